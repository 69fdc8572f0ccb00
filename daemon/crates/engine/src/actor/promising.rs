//! Decides whether a request is promised the gap between tokens that it asks for.

use std::time::Duration;

use rocmforge_scheduler::{CannotHold, Share, TooShort, least_gap};
use rocmforge_tensor_cache::ModelId;

use crate::actor::engine::Engine;
use crate::actor::promises::{
    MARGIN, micros, pass_us, planned, promising_models_max, unknown_pass_us,
};
use crate::api::error::Error;
use crate::request::task::Task;

/// One in this many of the requests that may run at a time is reserved for requests without
/// promises, which are preempted before those with promises.
const LEFT_PART: usize = 4;

/// How long requests without a promise may wait before no further gap is promised.
const HELD_MAX: Duration = Duration::from_secs(30);

/// How long a client should wait before it asks for a rejected gap again.
const RETRY: Duration = Duration::from_secs(1);

/// A time in milliseconds, rounded up, so that a client that asks for it next gets it.
fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}

fn requests(n: usize) -> String {
    match n {
        1 => "1 request".to_owned(),
        n => format!("{n} requests"),
    }
}

/// Why a gap cannot be promised: the cause, and when it might be gone.
struct Obstacle {
    what: String,
    until: Option<String>,
    /// The shortest gap that can be promised; `None` if none can.
    least: Option<Duration>,
}

impl Obstacle {
    fn error(self, gap: Duration, by_default: bool) -> Error {
        let asked = match by_default {
            false => format!("max_gap_ms of {} cannot be held", ms(gap)),
            true => format!(
                "max_gap_ms of {}, the daemon's default of this class, cannot be held",
                ms(gap)
            ),
        };
        let least = self.least.map(|least| format!("ask for {}", ms(least)));
        let until = self
            .until
            .as_ref()
            .map(|until| format!("try again when {until}"));
        let ways: Vec<String> = least.into_iter().chain(until).collect();
        let message = match ways.is_empty() {
            true => format!("{asked}: {}; ask without it (0)", self.what),
            false => format!("{asked}: {}; {}", self.what, ways.join(", or ")),
        };
        match self.until {
            Some(_) => Error::Exhausted {
                message,
                retry_after: RETRY,
            },
            None => Error::InvalidArgument {
                field: "max_gap_ms",
                message,
            },
        }
    }
}

impl Engine {
    /// The gap between tokens that a request is promised: the one that it asks for, or its class's
    /// default; `None` for none.
    ///
    /// # Errors
    ///
    /// The gap cannot be held now; the error says why, and when it could.
    pub(crate) fn promise_gap(
        &mut self,
        model: ModelId,
        asked: Option<Duration>,
        class: crate::api::Class,
    ) -> Result<Option<Duration>, Error> {
        let wanted = asked.or(self.config.max_gaps.of(class));
        let Some(gap) = wanted.filter(|gap| !gap.is_zero()) else {
            return Ok(None);
        };
        let obstacle = self
            .too_many_promises(model)
            .or_else(|| self.weights_do_not_stay(model))
            .or_else(|| self.gap_is_too_short(model, gap));
        match obstacle {
            Some(obstacle) => Err(obstacle.error(gap, asked.is_none())),
            None => {
                self.requests.promises.any = true;
                Ok(Some(gap))
            }
        }
    }

    fn promised_tasks(&self) -> impl Iterator<Item = &Task> {
        self.requests.all().filter(|t| t.promised_gap().is_some())
    }

    /// The obstacle that so many requests have promises that those without would not get their
    /// share.
    fn too_many_promises(&self, model: ModelId) -> Option<Obstacle> {
        let places = self.config.max_sequences.get();
        let most = (places - places / LEFT_PART).max(1);
        let promised = self.promised_tasks().count();
        if promised >= most {
            return Some(Obstacle {
                what: format!(
                    "{} with promised gaps run or wait, and of the {places} that may run the rest is left to others",
                    requests(promised)
                ),
                until: Some("one of them has ended".to_owned()),
                least: None,
            });
        }
        let mut models: Vec<ModelId> = self.promised_tasks().map(|task| task.model).collect();
        models.sort_unstable();
        models.dedup();
        models.retain(|other| *other != model);
        if models.len() >= promising_models_max() {
            return Some(Obstacle {
                what: format!(
                    "{} other models have requests with promised gaps",
                    models.len()
                ),
                until: Some("the requests of one of them have ended".to_owned()),
                least: None,
            });
        }
        let held = self.requests.promises.held_longest(self.now());
        (promised > 0 && held > HELD_MAX).then(|| Obstacle {
            what: format!(
                "requests without a promised gap have waited {} s for those that have one",
                held.as_secs()
            ),
            until: Some("they run".to_owned()),
            least: None,
        })
    }

    /// The obstacle that the model fits the budget, but its weights cannot stay resident for the
    /// promise beside what others need.
    fn weights_do_not_stay(&mut self, model: ModelId) -> Option<Obstacle> {
        let fits = self.memory.store.cache.fits(model);
        if !fits || self.requests.is_empty() {
            return None;
        }
        // Those of promised requests that wait stay once these run.
        let mut staying = self.requests.promises.kept.clone();
        for task in self.promised_tasks() {
            if self.memory.store.cache.fits(task.model) && !staying.contains(&task.model) {
                staying.push(task.model);
            }
        }
        if staying.contains(&model) {
            return None;
        }
        let staying = staying.iter().map(|&model| self.unpinned_bytes(model));
        let weights = staying.sum::<u64>() + self.unpinned_bytes(model);
        let (needed, budget) = (self.needed_beside_weights(), self.memory.budget());
        (weights.saturating_add(needed) > budget).then(|| Obstacle {
            what: format!(
                "the weights that would have to stay have {weights} bytes, running requests need {needed} beside them, \
                 and the budget is {budget}"
            ),
            until: Some("some of these have ended".to_owned()),
            least: None,
        })
    }

    /// The obstacle that the gap is shorter than the passes that have to run within it, by measured
    /// times.
    fn gap_is_too_short(&mut self, model: ModelId, gap: Duration) -> Option<Obstacle> {
        let mine = self.promised_tasks().filter(|task| task.model == model);
        let shortest = mine.filter_map(Task::promised_gap).min();
        let rows = self.rows_promised(model) + 1;
        let pass = self.measured_pass(model, rows)?;
        let piece = self.longest_piece(model);
        let asked = Share {
            gap_us: micros(planned(shortest.map_or(gap, |other| other.min(gap)))),
            pass_us: pass_us(pass),
        };
        let others = self.promised_shares(model);
        let piece_us = piece.map_or(0, |(_, seconds)| (seconds * 1e6) as u64);
        let cannot = least_gap(asked, &others, piece_us).err()?;
        Some(self.obstacle((model, rows, pass), cannot, piece, shortest))
    }

    /// Rows of a model's decode pass once its waiting requests with a promise run, too.
    fn rows_promised(&self, model: ModelId) -> u32 {
        let of_model = self.promised_tasks().filter(|task| task.model == model);
        let waiting = of_model.filter(|task| self.requests.running(task.seq).is_none());
        self.requests.running_of(model) + waiting.count() as u32
    }

    /// What the requests of each other model are promised, including those that wait.
    fn promised_shares(&self, except: ModelId) -> Vec<Share> {
        let mut gaps: Vec<(ModelId, Duration)> = Vec::new();
        for task in self.promised_tasks().filter(|t| t.model != except) {
            let Some(gap) = task.promised_gap() else {
                continue;
            };
            match gaps.iter_mut().find(|(model, _)| *model == task.model) {
                Some((_, shortest)) => *shortest = gap.min(*shortest),
                None => gaps.push((task.model, gap)),
            }
        }
        let share = |(model, gap): (ModelId, Duration)| {
            let gap_us = micros(planned(gap));
            let pass = self.pass_seconds(model, self.rows_promised(model));
            Share {
                gap_us,
                pass_us: pass.map_or(unknown_pass_us(gap_us), pass_us),
            }
        };
        gaps.into_iter().map(share).collect()
    }

    /// Expected seconds of a pass of `rows` rows, as measured for as many or fewer rows, or by the
    /// device's rates; `None` if nothing is known.
    fn measured_pass(&mut self, model: ModelId, rows: u32) -> Option<f64> {
        if let Some(seconds) = self.promised_seconds(model, rows) {
            return Some(seconds);
        }
        let routes = self.models.get(model)?.routes();
        let store = &mut self.memory.store;
        // Of experts a pass needs some.
        let pace = store.device.pace(rows as usize).filter(|_| !routes)?;
        let bytes = store.model_bytes(model);
        let absent = match store.cache.fits(model) {
            true => 0,
            false => bytes.saturating_sub(store.budget()),
        };
        let computed = bytes as f64 / pace.computed_bytes_per_s;
        Some(computed.max(absent as f64 / pace.upload_bytes_per_s))
    }

    /// The error text that says why a gap cannot be held.
    fn obstacle(
        &self,
        (model, rows, pass): (ModelId, u32, f64),
        cannot: CannotHold,
        piece: Option<(ModelId, f64)>,
        shortest: Option<Duration>,
    ) -> Obstacle {
        let name = |id: ModelId| {
            let entry = self.models.get(id);
            entry
                .map_or("another model", |e| e.loaded.name())
                .to_owned()
        };
        let least = cannot.least_us.map(|us| Duration::from_micros(us) + MARGIN);
        let ms = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        let (what, until) = match (cannot.why, piece) {
            (TooShort::OwnPass, _) => {
                let fits = self.memory.store.cache.fits(model);
                let streams = match fits {
                    true => "",
                    false => ", since it does not fit the budget",
                };
                let what = format!(
                    "a pass of '{}' with {} takes {}{streams}",
                    name(model),
                    requests(rows as usize),
                    ms(pass)
                );
                (
                    what,
                    (rows > 1).then(|| "some of them have ended".to_owned()),
                )
            }
            (TooShort::Piece, Some((other, seconds))) => {
                let n = self.requests.all().filter(|t| t.model == other).count();
                let what = format!(
                    "beside a pass of {} a step of '{}' takes {}",
                    ms(pass),
                    name(other),
                    ms(seconds)
                );
                (
                    what,
                    Some(format!(
                        "the {} of '{}' have ended",
                        requests(n),
                        name(other)
                    )),
                )
            }
            (TooShort::Piece | TooShort::Promises, _) => {
                let n = self.promised_tasks().filter(|t| t.model != model).count();
                let what = format!(
                    "beside a pass of {} those of {} with promised gaps are due",
                    ms(pass),
                    requests(n)
                );
                (what, Some("some of them have ended".to_owned()))
            }
        };
        // Who asks for more is not helped where others of the model have less.
        let least = least.filter(|least| shortest.is_none_or(|shortest| *least <= shortest));
        Obstacle { what, until, least }
    }
}
