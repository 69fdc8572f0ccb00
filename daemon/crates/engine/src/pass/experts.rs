//! A MoE layer's experts in a pass: which ones its rows are routed to, and how absent ones are
//! uploaded.

use rocmforge_device::{BoundExpert, BoundStep, ExpertFfn, SegmentBinding};
use rocmforge_tensor_cache::Slab;

use crate::api::error::Error;
use crate::memory::Memory;
use crate::pass::run::{ExpertsLeft, Run, StepEnd};
use crate::pass::spec::{ExpertStep, Pass, batch, id, scratch};

impl Run<'_, '_> {
    /// Runs the experts that rows are routed to: first the resident ones, then the others as their
    /// uploads complete. If other models have work, it stops before it would wait for an upload.
    pub(super) fn experts(
        &mut self,
        memory: &mut Memory,
        step: ExpertStep,
        ffn: &ExpertFfn,
    ) -> Result<StepEnd, Error> {
        let (left, may_stop) = match self.experts.take() {
            // It was chosen to go on: nobody else could.
            Some(left) => (left, false),
            None => (self.first_experts(memory, step, ffn)?, true),
        };
        self.rest_of_experts(memory, step, ffn, left, may_stop)
    }

    /// Runs the resident experts and those that the CPU computes. Returns what is left.
    fn first_experts(
        &mut self,
        memory: &mut Memory,
        step: ExpertStep,
        ffn: &ExpertFfn,
    ) -> Result<ExpertsLeft, Error> {
        let pass = self.pass;
        // Read at once, before the card is given more to do.
        let (ids, x) = match memory.uses_cpu(pass) {
            true => memory.rows_of_both(pass, [ffn.ids, ffn.x])?.into(),
            false => (memory.rows_of(pass, ffn.ids, pass.n_tokens)?, Vec::new()),
        };
        self.given.was_read = true;
        let now = memory.store.clock.now();
        if let Some((then, n, computed)) = self.last_layer.take() {
            let took = now.saturating_duration_since(then);
            memory.cpu.layer_took(pass.model, n, computed, took);
        }
        let wanted = wanted(&ids, step.n_expert)?;
        memory.collect();
        let mut segments: Vec<u32> = wanted.iter().map(|&e| step.segment_of(e)).collect();
        segments.dedup();
        let (there, mut absent): (Vec<u32>, Vec<u32>) = segments
            .into_iter()
            .partition(|&s| memory.store.cache.holds(id(pass, s)));
        let (there, coming) = self.those_that_come(memory, there);
        memory.order_absent(pass, &mut absent);
        let all_there = absent.is_empty() && coming.is_empty();
        let share = memory.share_with_cpu(pass, &absent, (wanted.len(), self.suspends));
        self.last_layer = share.timed.map(|n| (now, n, share.computes));
        let answered = absent.split_off(absent.len() - share.computes);
        let mut pending = absent.as_slice();
        // The link is to work while the host does.
        let window = match answered.is_empty() {
            true => pass.prefetch as usize,
            false => pending.len().max(pass.prefetch as usize),
        };
        let ahead = &pending[..window.min(pending.len())];
        if !answered.is_empty() {
            let of = |s: u32| step.experts_of(s).map(move |e| (e, s));
            let experts: Vec<(u32, u32)> = answered.iter().copied().flat_map(of).collect();
            // The link begins before the rows are made ready for the host, and is given the rest
            // while the host computes.
            let (first, rest) = ahead.split_at(ahead.len().min(BEGUN_FIRST));
            let (held, outcome) = self.hold(memory, &mut there.as_slice());
            let begun = outcome.and_then(|()| begin(memory, pass, first));
            let mut held = Some(held);
            let mut others = |memory: &mut Memory| {
                if let Some(held) = held.take() {
                    let begun = begin(memory, pass, rest);
                    let ran = begun.and_then(|()| run_held(memory, pass, step, ffn, &held));
                    let_go(memory, pass, &held);
                    ran?;
                }
                // The card is given these too before the host's results, unless that
                // would take this thread long.
                let at_once = |&&s: &&u32| memory.store.comes_at_once(id(pass, s));
                let n = pending.iter().take_while(at_once).count();
                let mut now = &pending[..n];
                let ran = self.as_they_come(memory, step, ffn, &mut now, window);
                pending = &pending[n - now.len()..];
                ran
            };
            let outcome = begun.and_then(|()| {
                memory.experts_on_cpu(pass, ffn, step, &experts, (&x, &ids), &mut others)
            });
            let_go(memory, pass, &held.unwrap_or_default());
            let bytes = outcome?;
            self.counts.misses += answered.len() as u64;
            self.counts.host_bytes += bytes;
        } else {
            self.some_experts(memory, step, ffn, &mut there.as_slice(), ahead)?;
        }
        Ok(ExpertsLeft {
            pending: [&coming, pending].concat(),
            window,
            kept_later: if share.wants_more {
                absent.clone()
            } else {
                Vec::new()
            },
            all_there,
            awaited: 0,
        })
    }

    /// Of the held experts, those that are resident, and those whose uploads other models' passes
    /// would wait behind: work behind an upload that the device waits for waits, too.
    fn those_that_come(&self, memory: &Memory, segments: Vec<u32>) -> (Vec<u32>, Vec<u32>) {
        let store = &memory.store;
        let waits = self.suspends && store.records;
        let is_there = |&s: &u32| !waits || !store.is_under_way(id(self.pass, s));
        segments.into_iter().partition(is_there)
    }

    /// Runs the remaining experts of a layer as their uploads complete.
    fn rest_of_experts(
        &mut self,
        memory: &mut Memory,
        step: ExpertStep,
        ffn: &ExpertFfn,
        mut left: ExpertsLeft,
        mut may_stop: bool,
    ) -> Result<StepEnd, Error> {
        let pass = self.pass;
        while !left.pending.is_empty() {
            if let Some(error) = self.client.ended() {
                return Err(error);
            }
            memory.collect();
            let suspends = self.suspends
                && (self.is_worth_a_stop(memory, &left.pending)
                    || may_stop && self.come_late(memory, &left.pending)?);
            if suspends && may_stop && self.would_wait(memory, &mut left)? {
                self.experts = Some(left);
                return Ok(StepEnd::Waits);
            }
            may_stop = true;
            let mut pending = left.pending.as_slice();
            let n = match suspends {
                // What has come, and one at least.
                true => {
                    let there = |&&s: &&u32| {
                        memory.store.cache.holds(id(pass, s))
                            && !memory.store.is_under_way(id(pass, s))
                    };
                    pending.iter().take_while(there).count().max(1)
                }
                false => pending.len(),
            };
            let mut now = &pending[..n];
            let ran = match suspends && memory.store.records {
                // They have come, but for the one at least: the fewer launches, the less time on
                // the card.
                true => {
                    let later = &pending[n..];
                    let ahead = &later[..later.len().min(UPLOADS_MANY)];
                    self.some_experts(memory, step, ffn, &mut now, ahead)
                }
                false => self.as_they_come(memory, step, ffn, &mut now, left.window),
            };
            pending = &pending[n - now.len()..];
            left.pending = pending.to_vec();
            ran?;
        }
        if !left.kept_later.is_empty() {
            memory.keep_later(pass, &left.kept_later);
        }
        let (window, all_there) = (left.window, left.all_there);
        let nearly_all =
            pass.n_tokens * ffn.n_used as usize >= MANY_ROWS_EACH * step.n_expert as usize;
        if nearly_all && (self.suspends || !memory.uses_cpu(pass)) {
            let uploads = match self.suspends && memory.store.records {
                true => UPLOADS_MANY,
                false => window,
            };
            self.next_layer(memory, step.first_segment, uploads)?;
        } else if all_there {
            // Nobody waits for the link.
            self.spare_from = memory
                .store
                .bring_spare_experts(pass.model, self.spare_from)?;
            if memory.uses_cpu(pass) {
                memory.upload_what_was_left(pass)?;
            }
        }
        Ok(StepEnd::Done)
    }

    /// Whether other models' passes may run until absent experts have arrived. A link uploads a few
    /// experts faster than passes can be switched; the CPU's threads take longer.
    fn is_worth_a_stop(&self, memory: &mut Memory, pending: &[u32]) -> bool {
        let store = &mut memory.store;
        if !store.records {
            return true;
        }
        let Some(pace) = store.device.pace(self.pass.n_tokens) else {
            return pending.len() >= UPLOADS_MANY;
        };
        let absent = pending.iter().map(|&s| id(self.pass, s));
        let absent = absent.filter(|&s| !store.cache.holds(s) || store.is_under_way(s));
        let bytes: u64 = absent.map(|s| store.segment_bytes(s)).sum();
        bytes as f64 / pace.upload_bytes_per_s >= STOP_SECONDS
    }

    /// Starts the uploads of a few experts. Returns whether the device is not given all of them
    /// within [`STOP_SECONDS`]: what is read for the first time is registered first, and 30 to
    /// 70 ms were seen of one to four experts.
    fn come_late(&self, memory: &mut Memory, pending: &[u32]) -> Result<bool, Error> {
        begin(memory, self.pass, pending)?;
        let store = &memory.store;
        let waiting = |s: u32| !store.comes_at_once(id(self.pass, s));
        // Whoever had no room for its upload does not come by waiting.
        let begun = |s: u32| store.is_under_way(id(self.pass, s));
        let since = store.clock.now();
        loop {
            let mut late = pending.iter().copied().filter(|&s| waiting(s)).peekable();
            if late.peek().is_none() {
                return Ok(false);
            }
            let is_over = (store.clock.now() - since).as_secs_f64() >= STOP_SECONDS;
            if is_over || !late.all(begun) {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
    }

    /// Starts the next uploads, so many that the link has work until the pass goes on. Returns
    /// whether the first is still in flight.
    fn would_wait(&self, memory: &mut Memory, left: &mut ExpertsLeft) -> Result<bool, Error> {
        let uploads = match memory.store.records {
            true => UPLOADS_MANY,
            false => left.window.max(1),
        };
        let ahead = &left.pending[..uploads.min(left.pending.len())];
        begin(memory, self.pass, ahead)?;
        let comes = |s: u32| memory.store.is_under_way(id(self.pass, s));
        // On a card those that come are computed at once, for which it is asked once.
        let last = ahead.iter().rposition(|&s| comes(s));
        left.awaited = match memory.store.records {
            true => last.unwrap_or(0),
            false => 0,
        };
        Ok(left.pending.first().is_some_and(|&s| comes(s)))
    }

    /// Runs absent experts as their uploads complete, half of the allowed uploads (`window`) at a
    /// time, and leaves in `pending` those that it did not reach. For few rows the launches cost
    /// more than the computation.
    fn as_they_come(
        &mut self,
        memory: &mut Memory,
        step: ExpertStep,
        ffn: &ExpertFfn,
        pending: &mut &[u32],
        window: usize,
    ) -> Result<(), Error> {
        while !pending.is_empty() {
            if let Some(error) = self.client.ended() {
                return Err(error);
            }
            let n = match self.pass.n_tokens <= FEW_ROWS {
                true => window,
                false => window / 2,
            };
            let n = n.max(1).min(pending.len());
            let (mut now, later) = pending.split_at(n);
            let ahead = &later[..window.min(later.len())];
            let ran = self.some_experts(memory, step, ffn, &mut now, ahead);
            // What there was no room for beside the others of `now`.
            *pending = &pending[n - now.len()..];
            ran?;
        }
        Ok(())
    }

    /// Acquires as many of the experts `now` as have room at once, starts the uploads `ahead`, and
    /// runs the acquired ones; leaves in `now` those that it did not reach.
    fn some_experts(
        &mut self,
        memory: &mut Memory,
        step: ExpertStep,
        ffn: &ExpertFfn,
        now: &mut &[u32],
        ahead: &[u32],
    ) -> Result<(), Error> {
        let pass = self.pass;
        let (held, outcome) = self.hold(memory, now);
        self.given.amount.bytes += held.iter().map(|(_, slab)| slab.bytes).sum::<u64>();
        let ran = outcome
            .and_then(|()| begin(memory, pass, ahead))
            .and_then(|()| run_held(memory, pass, step, ffn, &held));
        let_go(memory, pass, &held);
        ran
    }

    /// Acquires as many of the segments `now` as have room at once, and leaves the others in `now`.
    /// An error only if none has room.
    fn hold(
        &mut self,
        memory: &mut Memory,
        now: &mut &[u32],
    ) -> (Vec<(u32, Slab)>, Result<(), Error>) {
        let mut held: Vec<(u32, Slab)> = Vec::new();
        while let Some((&segment, rest)) = now.split_first() {
            match memory.acquire(id(self.pass, segment), self.counts) {
                Ok(slab) => held.push((segment, slab)),
                Err(error) if held.is_empty() => return (held, Err(error)),
                // What is held may be all that there is room for.
                Err(_) => break,
            }
            *now = rest;
        }
        (held, Ok(()))
    }

    /// Starts uploads of experts of the next layer that has absent ones: a pass of many rows will
    /// need nearly all.
    fn next_layer(
        &mut self,
        memory: &mut Memory,
        first_segment: u32,
        uploads: usize,
    ) -> Result<(), Error> {
        let pass = self.pass;
        let mut later = pass.plan.steps.iter().filter_map(ExpertStep::of);
        let Some(next) = later.find(|step| step.first_segment > first_segment) else {
            return Ok(());
        };
        let n_segments = next.n_expert.div_ceil(next.per_segment);
        let segments = next.first_segment..next.first_segment + n_segments;
        let absent = segments.filter(|&s| !memory.store.cache.holds(id(pass, s)));
        let first: Vec<u32> = absent.take(uploads).collect();
        first
            .into_iter()
            .try_for_each(|s| memory.store.start_needed(id(pass, s)))
    }
}

/// Maximum number of rows of a pass for which the GPU computes an expert faster than the expert is
/// launched.
const FEW_ROWS: usize = 8;

/// Maximum number of uploads of experts in flight while the pass waits for them and other passes
/// run: a few milliseconds of the link.
pub(crate) const UPLOADS_MANY: usize = 64;

/// Upload time below which a pass waits for absent experts: suspending it takes longer.
const STOP_SECONDS: f64 = 0.5e-3;

/// Number of uploads that are started before the rows are prepared for the CPU, so that the link is
/// busy meanwhile.
const BEGUN_FIRST: usize = 1;

/// Mean number of rows for each expert from which on nearly every expert has at least one.
const MANY_ROWS_EACH: usize = 4;

/// The experts that any row is routed to by `ids`, each once, ascending.
fn wanted(ids: &[f32], n_expert: u32) -> Result<Vec<u32>, Error> {
    let mut wanted = vec![false; n_expert as usize];
    for &id in ids {
        let expert = wanted.get_mut(id as usize).filter(|_| id >= 0.0);
        *expert.ok_or_else(|| Error::Internal(format!("a row is routed to expert {id}")))? = true;
    }
    let all = (0u32..).zip(wanted);
    Ok(all.filter_map(|(e, wanted)| wanted.then_some(e)).collect())
}

/// Starts uploads of segments that the pass will reach.
fn begin(memory: &mut Memory, pass: &Pass<'_>, ahead: &[u32]) -> Result<(), Error> {
    let mut ahead = ahead.iter();
    ahead.try_for_each(|&next| memory.store.start_needed(id(pass, next)))
}

/// Runs the experts whose segments are held.
fn run_held(
    memory: &mut Memory,
    pass: &Pass<'_>,
    step: ExpertStep,
    ffn: &ExpertFfn,
    held: &[(u32, Slab)],
) -> Result<(), Error> {
    if held.is_empty() {
        return Ok(());
    }
    let experts: Vec<(u32, u32, Slab, u32)> = held
        .iter()
        .flat_map(|&(segment, slab)| {
            let experts = step.experts_of(segment);
            let first = experts.start;
            experts.map(move |e| (e, segment, slab, (e - first) * ffn.n_tensors))
        })
        .collect();
    run_experts(memory, pass, ffn, &experts)
}

/// Releases held segments of experts.
fn let_go(memory: &mut Memory, pass: &Pass<'_>, held: &[(u32, Slab)]) {
    for &(segment, _) in held {
        memory.store.release(id(pass, segment));
    }
}

fn run_experts(
    memory: &mut Memory,
    pass: &Pass<'_>,
    ffn: &ExpertFfn,
    experts: &[(u32, u32, Slab, u32)],
) -> Result<(), Error> {
    let (device, layouts) = memory.store.device_and_layouts(pass.model);
    let experts = experts
        .iter()
        .map(|&(expert, segment, slab, first_tensor)| BoundExpert {
            expert,
            weights: SegmentBinding {
                layout: &layouts[segment as usize],
                slab: slab.offset,
            },
            first_tensor: first_tensor as usize,
        })
        .collect();
    let step = BoundStep::Experts { ffn, experts };
    let ran = device.run(&step, scratch(pass), &batch(pass, &[]));
    ran.map_err(|e| memory.store.device_error(Some(pass.model), e))
}
