//! Slices of passes, and the scratch that passes work in.

use std::time::{Duration, Instant};

use rocmforge_device::{ALIGNMENT, TimedTicket};
use rocmforge_scheduler::{PassPlan, slice_is_over};
use rocmforge_tensor_cache::{BlockKind, ModelId};

use crate::actor::accounts::EndedSlice;
use crate::actor::engine::Engine;
use crate::actor::promises::{micros, pass_us};
use crate::actor::step::Until;
use crate::api::error::Error;
use crate::features::context::have_room;
use crate::features::speculation::mtp_pass::wants_stream;
use crate::memory::Memory;
use crate::model::registry::Entry;
use crate::pass::backlog::{SliceWork, TimedSlice};
use crate::pass::pieces::StepWatch;
use crate::pass::prepared::PassRequests;
use crate::pass::run::Load;
use crate::pass::slices::{self, SliceStart, Slicing};
use crate::pass::space::ScratchBlock;
use crate::pass::stepwise::SliceEnd;
use crate::pass::suspended::PassUnderWay;
use crate::pass::work::{Amount, WorkRates};
use crate::request::time_book::SpentSince;

/// How long a slice of a pass lasts while other models have requests. They wait this long for their
/// turn.
const SLICE: Duration = Duration::from_millis(3);

/// How long a slice of a pass lasts while no other model has requests; one that arrives waits this
/// long.
const SLICE_ALONE: Duration = Duration::from_millis(10);

/// Minimum length of a slice that ends early because the results of another, short pass have
/// arrived.
const YIELDS_AFTER: Duration = Duration::from_millis(1);

/// Maximum estimated time of queued work on the device before it is given more, while an earlier
/// pass's results are waited for.
const AHEAD_MAX: Duration = SLICE;

/// How long the engine polls whether any suspended pass can go on before it looks at anything else.
const LOOK: Duration = Duration::from_micros(100);

/// How long the engine polls while all suspended passes wait, before it blocks on one of them; the
/// blocking wait ends if the device hangs.
const ALL_WAIT_MAX: Duration = Duration::from_millis(20);

/// Upper bound on the estimated device time of one slice's work.
const WORK_MAX: Duration = Duration::from_millis(200);

/// Maximum number of timed slices queued on the device while gaps are promised: one that it
/// computes and one behind it, so that it is never idle.
const TIMED_MAX: usize = 2;

/// How long a device may work on one timed slice before it is given more work anyway: if it hangs,
/// whoever waits for the work detects that.
const TIMED_WAIT_MAX: Duration = Duration::from_secs(1);

impl Engine {
    /// Whether a model's weights should stay resident while passes of other models run before its
    /// next one: true if all models with requests that fit alone also fit together. A model larger
    /// than the budget streams beside them.
    pub(crate) fn stays_among_asked(&self, model: ModelId) -> bool {
        let cache = &self.memory.store.cache;
        let mut asked: Vec<ModelId> = self.requests.all().map(|task| task.model).collect();
        asked.push(model);
        asked.sort_unstable();
        asked.dedup();
        asked.retain(|&id| cache.fits(id));
        let budget = self.memory.budget();
        cache.fits(model) && have_room(&self.memory, &self.speculation, &asked, budget)
    }

    /// Whether all suspended passes wait, some of them for the device. Polls for a while, since a
    /// command may arrive meanwhile and all of them are equally urgent.
    pub(crate) fn all_wait(&mut self) -> bool {
        let begun = self.now();
        loop {
            self.memory.collect();
            let now = self.now();
            match self.requests.suspended.all_wait(&self.memory, now) {
                Some(waited) if waited < ALL_WAIT_MAX => {}
                Some(_) | None => return false,
            }
            if now - begun >= LOOK {
                return true;
            }
            std::hint::spin_loop();
        }
    }

    /// Completes the passes whose results are computed and read, which takes no device time.
    /// Returns whether there were any.
    pub(crate) fn end_read_passes(&mut self) -> bool {
        let mut any = false;
        while let Some(pass) = self.requests.suspended.take_read(&self.memory) {
            any = true;
            self.memory.store.take_refused_bytes();
            self.run_slice(pass, Until::ItsTime);
        }
        any
    }

    /// Whether the device has enough queued work while results of it are waited for: more work
    /// would delay what is needed next. Polls for a while whether results have arrived.
    pub(crate) fn device_is_ahead(&self) -> bool {
        let begun = self.now();
        loop {
            let now = self.now();
            let suspended = &self.requests.suspended;
            let Some(late) = suspended.late(&self.memory, now) else {
                return false;
            };
            let left = self.space.backlog.left(now).max(late);
            if left <= AHEAD_MAX || late >= ALL_WAIT_MAX {
                return false;
            }
            if now - begun >= LOOK {
                return true;
            }
            std::hint::spin_loop();
        }
    }

    /// Reads the times of the timed slices that the device has completed.
    pub(crate) fn look_at_timed(&mut self) {
        let now = self.now();
        loop {
            let device = &mut self.memory.store.device;
            let look = |ticket| device.look_at_timed(ticket);
            let Some((slice, took)) = self.space.backlog.take_done(now, look) else {
                return;
            };
            self.are_due_sooner(slice.due, now);
            let Some(took) = took.filter(|_| slice.is_undisturbed) else {
                continue;
            };
            let pace = self.memory.store.device.pace(slice.rows as usize);
            if let (Some(pace), Some(entry)) = (pace, self.models.get_mut(slice.model)) {
                let per_s = pace.computed_bytes_per_s;
                entry.attention.note(slice.rows, slice.amount, took, per_s);
            }
        }
    }

    /// Whether the device has so much queued work that a pass with a promised gap would start too
    /// late behind more. Polls for a while.
    pub(crate) fn device_is_full(&mut self) -> bool {
        let begun = self.now();
        loop {
            self.look_at_timed();
            let now = self.now();
            let (slices, since) = self.space.backlog.under_way();
            let late = since.is_some_and(|since| now - since >= TIMED_WAIT_MAX);
            if slices < TIMED_MAX || late {
                return false;
            }
            if now - begun >= LOOK {
                return true;
            }
            std::hint::spin_loop();
        }
    }

    /// Runs a slice of a pass, and handles its end.
    pub(crate) fn run_slice(&mut self, mut pass: PassUnderWay, until: Until) {
        let begun = self.now();
        self.account_between(&mut pass.members, begun);
        let model = pass.model();
        let looked = pass.is_read();
        let idle = match pass.scratch.take() {
            Some(own) => self.space.scratch.replace(own),
            None => None,
        };
        let missed = pass.counts.misses;
        let waited = self.memory.store.reasons.waited.all;
        let timed = self.begin_timed(&pass);
        let ran = self.run_slice_in(&mut pass, until);
        if let (Some(ticket), Some(device)) = (timed, self.memory.store.device.timing()) {
            device.end_timed(ticket);
        }
        let ended = self.now();
        let load = match &ran {
            Ok(SliceEnd::Suspended(_, load) | SliceEnd::Complete(load)) => *load,
            Err(_) => Load {
                was_read: true,
                ..Load::default()
            },
        };
        let work = self.device_time(model, pass.plan.rows, load.amount);
        let queued = self.space.backlog.left(ended);
        let took = self.charge_of(&mut pass, (begun, ended), work, &ran, load);
        if let Some(ticket) = timed {
            let slice = TimedSlice {
                ticket,
                model,
                rows: pass.plan.rows,
                amount: load.amount,
                work,
                due: ended,
                // An MoE model waits for its routing to be read, and the device for the host.
                is_undisturbed: ran.is_ok()
                    && !load.was_read
                    && pass.counts.misses == missed
                    && self.memory.store.reasons.waited.all == waited
                    && !self.models.get(model).is_some_and(Entry::routes),
            };
            self.space.backlog.push(slice, ended);
        }
        pass.took += took;
        let computing = pass.due.map(|_| queued);
        let slice = EndedSlice {
            now: ended,
            earlier: ended.saturating_duration_since(begun).saturating_sub(took),
            was_read: load.was_read,
            work,
            before: SpentSince::default(),
            computing,
            looked,
        };
        self.account_slice(&mut pass.members, pass.plan.decode_spans, &slice);
        tracing::trace!(
            model = model.0,
            rows = pass.plan.rows,
            us = ended.saturating_duration_since(begun).as_micros() as u64,
            charged_us = took.as_micros() as u64,
            weight_bytes = load.amount.bytes,
            attended = load.amount.attended,
            work_us = work.as_micros() as u64,
            uploads = self.memory.store.under_way(),
            complete = matches!(ran, Ok(SliceEnd::Complete(_))),
            "a slice of a pass"
        );
        self.after_slice(pass, ran, idle, (took, ended));
    }

    /// Handles the end of a slice: its pass is suspended, complete or failed. `idle` is the scratch
    /// block that no pass used before it.
    fn after_slice(
        &mut self,
        mut pass: PassUnderWay,
        ran: Result<SliceEnd, Error>,
        idle: Option<ScratchBlock>,
        (took, ended): (Duration, Instant),
    ) {
        let model = pass.model();
        match ran {
            Ok(SliceEnd::Suspended(progress, _)) => {
                pass.progress = Some(progress);
                pass.is_short = self.is_short(model, &pass.plan);
                pass.scratch = std::mem::replace(&mut self.space.scratch, idle);
                self.charge(model, took, false);
                self.requests.scheduler.suspend(pass.plan.model);
                self.requests.suspended.push(pass);
            }
            Ok(SliceEnd::Complete(_)) => {
                self.requests.suspended.note_end();
                self.keep_spare(idle);
                self.complete_pass(pass, took, ended);
            }
            Err(error) => {
                self.requests.suspended.note_end();
                self.keep_spare(idle);
                self.charge(model, took, true);
                self.requests.scheduler.pass_ended(pass.plan.model);
                let PassUnderWay {
                    prepared,
                    mut members,
                    counts,
                    ..
                } = pass;
                self.put_back(prepared, &mut members, counts);
                for member in &mut members {
                    member.task.times.end_pass(0.0, None);
                }
                self.pass_failed(members, error);
            }
        }
    }

    /// Time that a slice is charged to its model; `work` is the estimated device time of the work
    /// that it queued.
    fn charge_of(
        &mut self,
        pass: &mut PassUnderWay,
        (begun, ended): (Instant, Instant),
        work: Duration,
        ran: &Result<SliceEnd, Error>,
        load: Load,
    ) -> Duration {
        if let Some(due) = pass.due.take() {
            return self.charge_of_read(pass.took, due, (begun, ended), load);
        }
        let is_read =
            matches!(ran, Ok(SliceEnd::Suspended(progress, _)) if progress.read().is_some());
        let took = self.space.backlog.charge(SliceWork {
            begun,
            ended,
            work,
            waited: load.was_read,
        });
        if is_read {
            // The launches of a small model take the device longer than its bytes.
            let entry = self.models.get(pass.model());
            let usual = entry.and_then(|e| e.times.seconds(pass.plan.rows as usize));
            let usual = usual.and_then(|s| Duration::try_from_secs_f64(s).ok());
            let more = usual.unwrap_or_default().saturating_sub(pass.took + work);
            pass.due = Some(self.space.backlog.add(ended, more));
        }
        took
    }

    /// Time charged for the slice that reads a pass's results, after the pass was already charged
    /// `charged` and was expected to end at `due`: the device time beyond that, if the device
    /// measures it; else the time waited after `due`.
    fn charge_of_read(
        &mut self,
        charged: Duration,
        due: Instant,
        (begun, ended): (Instant, Instant),
        load: Load,
    ) -> Duration {
        self.space.backlog.was_done(due, ended);
        self.are_due_sooner(due, ended);
        match load.timed {
            Some(timed) => timed.saturating_sub(charged),
            None => ended.saturating_duration_since(begun.max(due)),
        }
    }

    /// Corrects the expected ends of suspended passes: the device has now done work that was
    /// expected at `due`, so what is queued behind it ends earlier, too.
    fn are_due_sooner(&mut self, due: Instant, now: Instant) {
        let early = due.saturating_duration_since(now);
        for pass in self.requests.suspended.passes_mut() {
            if let Some(other) = pass.due.as_mut().filter(|other| **other >= due) {
                *other = (*other - early).max(now);
            }
        }
    }

    /// Charges a slice's time to its model in the scheduler; `ended` if it was the pass's last
    /// slice.
    pub(crate) fn charge(&mut self, model: ModelId, took: Duration, ended: bool) {
        self.requests.suspended.note_slice(model, took);
        let model = rocmforge_scheduler::ModelId(model.0);
        let took_us = took.as_micros() as u64;
        self.requests.scheduler.took(model, took_us, ended);
    }

    /// Lets the device time the work of a slice that begins. Not for a short decode pass, which is
    /// queued in one piece and read right behind, nor for a slice that only reads.
    fn begin_timed(&mut self, pass: &PassUnderWay) -> Option<TimedTicket> {
        let decodes = pass.plan.decode_spans == pass.plan.spans.len();
        if pass.is_read() || (decodes && self.is_short(pass.model(), &pass.plan)) {
            return None;
        }
        self.memory.store.device.timing()?.begin_timed()
    }

    /// Rates at which the device computes passes of `rows` rows of a model; `None` if unknown, or
    /// if the device computes synchronously.
    fn work_rates(&mut self, model: ModelId, rows: u32) -> Option<WorkRates> {
        let pace = self.memory.store.device.pace(rows as usize)?;
        let entry = self.models.get(model);
        Some(WorkRates {
            bytes_per_s: pace.computed_bytes_per_s,
            attention: entry.map_or(0.0, |entry| entry.attention.seconds(rows)),
        })
    }

    /// Estimated device time for `amount` of work in a pass of `rows` rows; zero if unknown, or if
    /// the device computes synchronously.
    fn device_time(&mut self, model: ModelId, rows: u32, amount: Amount) -> Duration {
        let rates = self.work_rates(model, rows);
        let time = rates.map_or(Duration::ZERO, |rates| rates.time(amount));
        time.min(WORK_MAX)
    }

    /// How long a slice of a model's pass lasts.
    fn slice_time(&self, model: ModelId) -> Duration {
        let usual = match self.requests.any_of_others(model) {
            true => SLICE,
            false => SLICE_ALONE,
        };
        self.config.slice.unwrap_or(usual)
    }

    fn run_slice_in(&mut self, pass: &mut PassUnderWay, until: Until) -> Result<SliceEnd, Error> {
        let scratch_at = self.space.scratch_at(&self.memory);
        let model = pass.model();
        let by_time = until == Until::ItsTime;
        let suspends = by_time && self.requests.any_of_others(model);
        // What is promised is held by measured times of passes, of which each has the device.
        let reads_later = suspends && !self.requests.promises.any && !wants_stream(&pass.members);
        let PassUnderWay {
            plan,
            members,
            prepared,
            counts,
            progress,
            ..
        } = pass;
        let whole = !by_time || self.is_short(model, plan);
        let limit = self.slack(model).filter(|_| by_time);
        let fits = limit.is_none_or(|limit| self.takes_at_most(limit, model, plan));
        let known = limit.and_then(|_| self.piece_seconds(model, plan.rows));
        let slice = self.slice_time(model);
        let rates = self.work_rates(model, plan.rows);
        let is_behind = self.space.backlog.under_way().0 > 0;
        let pages = prepared.pages(members);
        let rows = prepared.rows(members, plan.decode_spans, &pages, &self.memory);
        let pass = prepared.pass(plan, &rows, scratch_at, self.space.prefetch);
        let start = match progress.take() {
            Some(progress) => SliceStart::Progress(progress),
            None => SliceStart::Inputs(&prepared.inputs),
        };
        let clock = self.memory.store.clock;
        let begun = clock.now();
        let until = begun + slice;
        let waited = self.memory.store.reasons.waited;
        let watch = StepWatch::new(begun, rates, is_behind);
        let known = known.map_or(0, |seconds| (seconds * 1e6) as u64);
        let suspended = &self.requests.suspended;
        let is_over = |memory: &Memory, given| {
            let now = clock.now();
            let (elapsed, longest) = watch.step(now, given);
            if by_time && elapsed >= YIELDS_AFTER && suspended.short_has_come(memory) {
                return true;
            }
            let is_late = limit.is_some_and(|limit| {
                let longest = micros(longest).max(known);
                slice_is_over(micros(elapsed), longest, micros(limit))
            });
            by_time && (watch.work(given) >= slice || now >= until || is_late)
        };
        let slicing = Slicing {
            is_over: &is_over,
            suspends,
            reads_later,
            whole,
            fits,
        };
        self.space.computing = true;
        let others = Some(&mut self.requests.tasks);
        let mut client = PassRequests::new(&rows, members, others, &self.space.row_threads);
        let end = slices::run_slice(&mut self.memory, &pass, start, slicing, counts, &mut client);
        self.requests.times.sampling += client.sampling;
        // The time of a step in which an upload was waited for is not its own, unless the model has
        // to wait for the link in each pass.
        let waits = self.memory.store.reasons.waited;
        let is_own = waits.all == waited.all
            || (waits.disk == waited.disk && !self.memory.store.cache.fits(model));
        if is_own
            && let Some(longest) = watch.longest(clock.now())
            && let Some(entry) = self.models.get_mut(model)
        {
            entry.pieces.note(plan.rows, longest.as_secs_f64());
        }
        let end = end?;
        if matches!(end, SliceEnd::Complete(_)) {
            self.keep_stream(prepared, scratch_at, members)?;
        }
        Ok(end)
    }

    /// Whether a pass, run in one piece, takes at most `limit`.
    fn takes_at_most(&self, limit: Duration, model: ModelId, plan: &PassPlan) -> bool {
        let entry = self.models.get(model);
        let seconds = entry.and_then(|e| e.times.seconds(plan.rows as usize));
        seconds.is_some_and(|seconds| pass_us(seconds) <= micros(limit))
    }

    /// Whether a pass is so short that it may run in one piece, without slices.
    fn is_short(&self, model: ModelId, plan: &PassPlan) -> bool {
        let entry = self.models.get(model);
        let seconds = entry.and_then(|e| e.times.seconds(plan.rows as usize));
        seconds.is_some_and(|seconds| seconds <= self.slice_time(model).as_secs_f64())
    }

    /// Runs all suspended passes to their ends. Returns whether there were any.
    pub(crate) fn finish_passes(&mut self) -> bool {
        let mut any = false;
        while let Some(pass) = self.requests.suspended.take_first() {
            any = true;
            self.run_slice(pass, Until::TheEnd);
        }
        any
    }

    /// Allocates the scratch memory of a pass. For a request that is recomputed (`anew` times)
    /// because its blocks left no contiguous memory, scratch has its maximum size from the start:
    /// if it grew later, the place that it leaves between KV pages would be lost to large segments
    /// again.
    pub(crate) fn ensure_scratch(
        &mut self,
        model: ModelId,
        plan: &PassPlan,
        anew: u32,
    ) -> Result<(), Error> {
        // The draft model's passes run behind, if there is room for theirs.
        let draft = self.speculation.used_draft_model(model).map(|d| d.id);
        let of_draft = draft.map_or(0, |id| {
            self.sizes().scratch(id, plan.rows, plan.outputs_at_a_time)
        });
        let mut bytes = plan.scratch_bytes.max(of_draft.min(plan.scratch_bytes_max));
        // Of one that is computed anew in an empty arena the model may seem to fit.
        if anew > 1 || (anew > 0 && !self.memory.store.cache.fits(model)) {
            bytes = bytes.max(plan.scratch_bytes_max / ALIGNMENT * ALIGNMENT);
        }
        if let Some((_, has)) = self.space.scratch {
            // What a long prompt took would be uploaded again for every token of
            // a model that does not fit.
            let spare = has / 2 > bytes
                && !self.memory.store.cache.fits(model)
                && !self.requests.prompts_go_on();
            if (bytes..=plan.scratch_bytes_max).contains(&has) && !spare {
                self.space.take_spare(model, bytes, has);
                return Ok(());
            }
            let idle = self.space.scratch.take();
            self.keep_spare(idle);
        }
        self.space.take_spare(model, bytes, plan.scratch_bytes_max);
        if self.space.scratch.is_some() {
            return Ok(());
        }
        let mut had = self.memory.reserve(BlockKind::Scratch, None, bytes);
        if had.is_err() && self.space.has_spare() {
            self.free_scratch();
            had = self.memory.reserve(BlockKind::Scratch, None, bytes);
        }
        self.space.scratch = Some((had?.0, bytes));
        Ok(())
    }

    /// Keeps a small scratch block that no pass uses now for later, if several models take turns;
    /// else frees it.
    fn keep_spare(&mut self, idle: Option<ScratchBlock>) {
        let mut models = self.requests.all().map(|task| task.model);
        let first = models.next();
        let several = models.any(|model| Some(model) != first);
        self.space.keep_spare(&mut self.memory, idle, several);
    }
}
