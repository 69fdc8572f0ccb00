//! `keep_alive`: how long a model's weights stay on the device after the last request of an Ollama
//! client.
//!
//! ```text
//! request begins -> in use -> ends -> kept for its time -> let go: weights, cached prefixes freed
//!                     ^                    |
//!                     +---- next request --+
//! ```
//!
//! Without the field, or with a negative time, weights stay until their memory is needed; the last
//! request decides. The model stays registered when its weights are freed: the next request uploads
//! them again. Weights that are pinned or in use stay.
//!
//! *Invariant:* nothing is freed while a request of the model runs or waits; there are no more
//! entries than models that are loaded (tests below).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_engine::EngineHandle;
use rocmforge_engine::api::{ModelStatus, SegmentState, Snapshot};
use rocmforge_failure::{self as failure, Failure};
use serde_json::Value;
use tokio::sync::Notify;

/// Interval at which a model that is to be freed but is in use is checked again.
const RETRY: Duration = Duration::from_millis(200);
/// Maximum wait for the engine's snapshot to show that weights are freed.
const SHOWN_MAX: Duration = Duration::from_millis(500);
/// Longest time that is counted; a longer one counts as for ever.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The `keep_alive` of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// For this duration after the request.
    For(Duration),
    /// Until its memory is needed for something else.
    Always,
}

impl Keep {
    /// Whether the weights are to be freed at once.
    pub(super) fn is_none(self) -> bool {
        self == Self::For(Duration::ZERO)
    }
}

/// Parses the field `keep_alive`: seconds, or a text such as "5m" or "1h30m".
///
/// # Errors
/// INVALID_ARGUMENT for anything else.
pub(super) fn read(value: Option<&Value>) -> Result<Option<Keep>, Failure> {
    let seconds = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Number(n)) => n.as_f64(),
        Some(Value::String(text)) => duration(text),
        Some(_) => None,
    };
    let Some(seconds) = seconds.filter(|seconds| seconds.is_finite()) else {
        let why = "give seconds, or a duration such as \"5m\" or \"1h30m\"; 0 lets the model go, -1 keeps it";
        return Err(failure::invalid("keep_alive", why));
    };
    Ok(Some(match seconds {
        0.0.. if seconds < LONGEST.as_secs_f64() => Keep::For(Duration::from_secs_f64(seconds)),
        _ => Keep::Always,
    }))
}

/// Seconds of a duration in Go's notation; a plain number is seconds.
fn duration(text: &str) -> Option<f64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    if let Ok(seconds) = rest.parse::<f64>() {
        return Some(sign * seconds);
    }
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit = rest
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(rest.len());
        sum += number
            * match &rest[..unit] {
                "h" => 3600.0,
                "m" => 60.0,
                "s" => 1.0,
                "ms" => 1e-3,
                "us" | "\u{b5}s" => 1e-6,
                "ns" => 1e-9,
                _ => return None,
            };
        rest = &rest[unit..];
    }
    (!text.is_empty()).then_some(sign * sum)
}

/// End times of models, as a value without clock or engine.
#[derive(Debug, Default)]
struct Lives(BTreeMap<String, Life>);

#[derive(Debug, Default)]
struct Life {
    /// Number of running requests.
    users: u32,
    /// Time at which the model's weights are freed.
    ends: Option<Instant>,
    /// Whether the weights were freed, and the model was not used since.
    gone: bool,
}

impl Lives {
    fn begin(&mut self, model: &str) {
        let life = self.0.entry(model.to_owned()).or_default();
        life.users += 1;
        life.gone = false;
    }

    fn end(&mut self, model: &str, keep: Option<Keep>, now: Instant) {
        let Some(life) = self.0.get_mut(model) else {
            return;
        };
        life.users = life.users.saturating_sub(1);
        life.ends = match keep {
            Some(Keep::For(time)) => now.checked_add(time),
            Some(Keep::Always) | None => None,
        };
    }

    /// Models whose time is over.
    fn due(&self, now: Instant) -> Vec<String> {
        let is_due = |life: &Life| life.users == 0 && life.ends.is_some_and(|ends| ends <= now);
        let due = self.0.iter().filter(|(_, life)| is_due(life));
        due.map(|(model, _)| model.clone()).collect()
    }

    /// The earliest end time of any model.
    fn next(&self) -> Option<Instant> {
        let idle = self.0.values().filter(|life| life.users == 0);
        idle.filter_map(|life| life.ends).min()
    }

    fn let_go(&mut self, model: &str) {
        let life = self.0.entry(model.to_owned()).or_default();
        life.ends = None;
        life.gone = true;
    }

    /// Forgets models that are not loaded and have no request.
    fn forget(&mut self, is_loaded: impl Fn(&str) -> bool) {
        self.0.retain(|model, life| {
            let says = life.ends.is_some() || life.gone;
            life.users > 0 || says && is_loaded(model)
        });
    }
}

/// Times at which the weights of models are freed, by `keep_alive`.
#[derive(Debug, Default)]
pub(in super::super) struct KeepAlives {
    lives: Mutex<Lives>,
    changed: Notify,
}

/// A request that uses a model. When it is dropped, the model's time begins.
#[derive(Debug)]
pub(super) struct Using {
    all: Arc<KeepAlives>,
    model: String,
    keep: Option<Keep>,
}

impl Drop for Using {
    fn drop(&mut self) {
        let mut lives = self.all.lock();
        lives.end(&self.model, self.keep, Instant::now());
        drop(lives);
        self.all.changed.notify_one();
    }
}

impl KeepAlives {
    /// Locks the entries. A poisoned lock is used: they are valid at every moment.
    fn lock(&self) -> MutexGuard<'_, Lives> {
        self.lives.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a request of a loaded model begins, with its `keep_alive`.
    pub(super) fn begin(self: &Arc<Self>, model: &str, keep: Option<Keep>) -> Using {
        self.lock().begin(model);
        Using {
            all: Arc::clone(self),
            model: model.to_owned(),
            keep,
        }
    }

    /// How long until a model's weights are freed, if that is known.
    pub(super) fn left(&self, model: &str) -> Option<Duration> {
        let ends = self.lock().0.get(model)?.ends?;
        Some(ends.saturating_duration_since(Instant::now()))
    }

    /// Whether a model's weights were freed, and have not been uploaded since.
    pub(super) fn is_gone(&self, status: &ModelStatus) -> bool {
        let lives = self.lock();
        let life = lives.0.get(status.model.name());
        life.is_some_and(|life| life.gone) && !is_there(status) && status.requests == 0
    }

    /// Frees a model's weights now, or once its requests have ended.
    pub(super) async fn let_go(&self, engine: &EngineHandle, model: &str) {
        let is_used = is_used(&engine.snapshot(), model);
        {
            let mut lives = self.lock();
            let life = lives.0.entry(model.to_owned()).or_default();
            if is_used || life.users > 0 {
                life.ends = Some(Instant::now());
                drop(lives);
                return self.changed.notify_one();
            }
            lives.let_go(model);
        }
        match engine.clear(Some(model)).await {
            Ok(cleared) => tracing::info!(
                model,
                freed_bytes = cleared.freed_bytes,
                "a model is let go at the end of its keep_alive"
            ),
            Err(error) => return tracing::debug!(model, %error, "a model cannot be let go"),
        }
        // Whoever asks next sees it.
        let mut snapshots = engine.watch();
        let gone = snapshots.wait_for(|snapshot| {
            let mut models = snapshot.models.iter();
            !models.any(|status| status.model.name() == model && is_there(status))
        });
        let _ = tokio::time::timeout(SHOWN_MAX, gone).await;
    }

    /// Frees models when their `keep_alive` ends. Runs until it is dropped.
    pub(in super::super) async fn run(&self, engine: &EngineHandle) {
        loop {
            let snapshot = engine.snapshot();
            let due = self.lock().due(Instant::now());
            let mut waits = false;
            for model in due {
                if is_used(&snapshot, &model) {
                    waits = true;
                } else {
                    self.let_go(engine, &model).await;
                }
            }
            let next = {
                let mut lives = self.lock();
                let is_loaded = |name: &str| snapshot.models.iter().any(|s| s.model.name() == name);
                lives.forget(is_loaded);
                lives.next()
            };
            let next = next.map(|next| if waits { Instant::now() + RETRY } else { next });
            let sleep = async {
                match next {
                    Some(next) => tokio::time::sleep_until(next.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => {}
                () = self.changed.notified() => {}
            }
        }
    }
}

/// Whether any of a model's weights are on the device.
fn is_there(status: &ModelStatus) -> bool {
    let mut segments = status.segments.iter();
    segments.any(|segment| segment.state != SegmentState::Absent && !segment.pinned)
}

/// Whether requests of a model run or wait.
fn is_used(snapshot: &Snapshot, model: &str) -> bool {
    let mut models = snapshot.models.iter();
    models.any(|status| status.model.name() == model && status.requests > 0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn times_are_read_as_ollama_reads_them() {
        for (value, expected) in [
            (json!(null), None),
            (json!(0), Some(Keep::For(Duration::ZERO))),
            (json!("0m"), Some(Keep::For(Duration::ZERO))),
            (json!(300), Some(Keep::For(300 * S))),
            (json!(0.5), Some(Keep::For(S / 2))),
            (json!("5m"), Some(Keep::For(300 * S))),
            (json!("1h30m"), Some(Keep::For(5400 * S))),
            (json!("1.5h"), Some(Keep::For(5400 * S))),
            (json!("250ms"), Some(Keep::For(S / 4))),
            (json!("300"), Some(Keep::For(300 * S))),
            (json!(-1), Some(Keep::Always)),
            (json!("-1"), Some(Keep::Always)),
            (json!("-5m"), Some(Keep::Always)),
            (json!(1e300), Some(Keep::Always)),
        ] {
            assert_eq!(read(Some(&value)).unwrap(), expected, "{value}");
        }
        for bad in [
            json!("soon"),
            json!("5x"),
            json!(""),
            json!("m"),
            json!(true),
            json!([]),
        ] {
            let failure = read(Some(&bad)).unwrap_err();
            assert_eq!(failure.fields()[0].0, "keep_alive", "{bad}");
        }
    }

    #[test]
    fn a_model_is_let_go_when_the_time_of_its_last_request_is_over() {
        let (mut lives, now) = (Lives::default(), Instant::now());
        let keep = |seconds| Some(Keep::For(seconds * S));
        lives.begin("m");
        lives.begin("m");
        lives.end("m", keep(0), now);
        // The other goes on.
        assert!(lives.due(now + 9 * S).is_empty() && lives.next().is_none());
        lives.end("m", keep(5), now);
        assert_eq!(lives.next(), Some(now + 5 * S));
        assert!(lives.due(now + 4 * S).is_empty());
        assert_eq!(lives.due(now + 5 * S), ["m"]);
        // The last one decides, and without a word a model stays.
        for keep in [None, Some(Keep::Always)] {
            lives.begin("m");
            lives.end("m", keep, now);
            assert!(lives.due(now + 99 * S).is_empty());
        }
        lives.let_go("m");
        assert!(lives.0["m"].gone);
        lives.begin("m");
        assert!(!lives.0["m"].gone);
    }

    #[test]
    fn nothing_is_kept_of_models_that_are_not_loaded() {
        let (mut lives, now) = (Lives::default(), Instant::now());
        for (model, keep) in [
            ("a", Some(Keep::For(S))),
            ("b", None),
            ("c", Some(Keep::For(S))),
        ] {
            lives.begin(model);
            lives.end(model, keep, now);
        }
        lives.begin("d");
        lives.forget(|name| name == "a");
        assert_eq!(lives.0.keys().collect::<Vec<_>>(), ["a", "d"]);
    }
}
