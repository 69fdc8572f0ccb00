//! Passes that are suspended: each stopped between two of its steps, and goes on later.
//!
//! ```text
//!   begun --> a slice --(its time is over, or its next segment comes)--> suspended
//!                |  ^                                                       |
//!                |  +------------------(its turn)---------------------------+
//!                +--> complete, or failed
//! ```
//!
//! A suspended pass keeps its requests, their memory, its scratch block and, where it waits for an
//! upload, that one segment. All of it is in the ledger. What else of its model is resident may be
//! evicted for others.
//!
//! Commands that change what passes rely on (budget, unload, clear), and memory that a driver
//! refuses, find no suspended pass: these come to their ends first ([`Engine::finish_passes`]).
//!
//! *Invariant:* a model has one pass under way at a time.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use rocmforge_device::ALIGNMENT;
use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::{BlockId, BlockKind, ModelId, SegmentId};

use crate::actor::Engine;
use crate::api::RequestCacheUse;
use crate::backlog::Given;
use crate::error::Error;
use crate::gaps::Spent;
use crate::member::Member;
use crate::pass::{self, Load, Progress, SliceEnd, Slicing, Start};
use crate::prepared::Prepared;
use crate::step::nobody_waits;
use crate::task::Task;

/// How long a slice lasts, and a step at least. Others wait as long for their turn.
const SLICE: Duration = Duration::from_millis(3);

/// The same while no other model has requests: one that comes waits as long.
const SLICE_ALONE: Duration = Duration::from_millis(10);

/// The longest that a slice is taken to give a device to do.
const WORK_MAX: Duration = Duration::from_secs(1);

/// The part of the budget that scratch blocks may have which no pass needs now.
const SPARE_PART: u64 = 16;

/// The part of the budget that a further pass may take where one found no room in one piece beside
/// the suspended ones.
const CROWDED_PART: u64 = 32;

/// A scratch block and its bytes.
pub(crate) type ScratchBlock = (BlockId, u64);

/// A pass between two of its slices.
pub(crate) struct PassUnderWay {
    pub(crate) plan: PassPlan,
    pub(crate) members: Vec<Member>,
    pub(crate) prepared: Prepared,
    pub(crate) counts: RequestCacheUse,
    /// Time of its slices so far.
    pub(crate) took: Duration,
    /// Where it stopped; `None` before its first slice.
    progress: Option<Progress>,
    scratch: Option<ScratchBlock>,
}

impl PassUnderWay {
    /// One that has run nothing yet.
    pub(crate) fn new(plan: PassPlan, members: Vec<Member>, prepared: Prepared) -> Self {
        Self {
            plan,
            members,
            prepared,
            counts: RequestCacheUse::default(),
            took: Duration::ZERO,
            progress: None,
            scratch: None,
        }
    }

    pub(crate) fn model(&self) -> ModelId {
        ModelId(self.plan.model.0)
    }

    /// The segment that it holds and whose upload it waits for.
    fn waits_for(&self) -> Option<SegmentId> {
        self.progress.as_ref()?.waits_for(self.model())
    }
}

/// The suspended passes.
#[derive(Default)]
pub(crate) struct PassesUnderWay {
    passes: Vec<PassUnderWay>,
    /// Times that a pass stopped between two steps.
    suspensions: u64,
    /// A further pass found no room in one piece beside them.
    crowded: bool,
    /// Time of all slices since start-up, and of each model's.
    of_all: Duration,
    of_model: HashMap<ModelId, Duration>,
}

impl PassesUnderWay {
    pub(crate) fn is_empty(&self) -> bool {
        self.passes.is_empty()
    }

    /// Their models.
    pub(crate) fn models(&self) -> impl Iterator<Item = ModelId> {
        self.passes.iter().map(PassUnderWay::model)
    }

    /// Their requests.
    pub(crate) fn tasks(&self) -> impl Iterator<Item = &Task> {
        let members = self.passes.iter().flat_map(|pass| &pass.members);
        members.map(|member| &member.task)
    }

    /// The segments that are waited for, each with its pass's model.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = SegmentId> {
        self.passes.iter().filter_map(PassUnderWay::waits_for)
    }

    /// Times that a pass stopped between two steps.
    pub(crate) fn suspensions(&self) -> u64 {
        self.suspensions
    }

    pub(crate) fn push(&mut self, pass: PassUnderWay) {
        self.suspensions += 1;
        self.passes.push(pass);
    }

    /// A further pass found no room in one piece beside those that there are.
    pub(crate) fn note_crowded(&mut self) {
        self.crowded = true;
    }

    /// Takes the pass of a model out.
    pub(crate) fn take(&mut self, model: ModelId) -> Option<PassUnderWay> {
        let at = self.passes.iter().position(|pass| pass.model() == model)?;
        Some(self.passes.remove(at))
    }

    /// Takes one out, the first that was suspended.
    fn take_first(&mut self) -> Option<PassUnderWay> {
        (!self.passes.is_empty()).then(|| self.passes.remove(0))
    }

    /// A model without passes is no more.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.of_model.remove(&model);
    }

    /// Fails the requests of all.
    pub(crate) fn fail(&mut self, error: impl Fn() -> Error) {
        for pass in self.passes.drain(..) {
            for member in pass.members {
                member.task.fail(error());
            }
        }
    }
}

/// When a slice ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// Behind the step in which its time is over.
    ItsTime,
    /// With the pass.
    TheEnd,
}

impl Engine {
    /// All requests: those that wait or run, and those in suspended passes.
    pub(crate) fn all_tasks(&self) -> impl Iterator<Item = &Task> + Clone {
        let suspended = self.under_way.passes.iter().flat_map(|pass| &pass.members);
        let suspended = suspended.map(|member| &member.task);
        self.tasks.values().chain(suspended)
    }

    /// Whether requests of other models are there.
    fn others_ask(&self, model: ModelId) -> bool {
        self.all_tasks().any(|task| task.model != model)
    }

    /// Runs a slice of a pass, and what follows it.
    pub(crate) fn run_slice(&mut self, mut pass: PassUnderWay, until: Until) {
        let begun = Instant::now();
        let model = pass.model();
        let idle = match pass.scratch.take() {
            Some(own) => self.scratch.replace(own),
            None => None,
        };
        let ran = self.run_slice_in(&mut pass, until);
        let ended = Instant::now();
        let load = match &ran {
            Ok(SliceEnd::Suspended(_, load) | SliceEnd::Complete(load)) => *load,
            Err(_) => Load {
                bytes: 0,
                was_read: true,
            },
        };
        let work = self.device_time(pass.plan.rows as usize, load.bytes);
        let took = self.backlog.charge(Given {
            begun,
            ended,
            work,
            waited: load.was_read,
        });
        pass.took += took;
        match ran {
            Ok(SliceEnd::Suspended(progress, _)) => {
                pass.progress = Some(progress);
                pass.scratch = std::mem::replace(&mut self.scratch, idle);
                self.charge(model, took, false);
                self.scheduler.suspend(pass.plan.model);
                self.under_way.push(pass);
            }
            Ok(SliceEnd::Complete(_)) => {
                self.under_way.crowded &= !self.under_way.is_empty();
                self.keep_spare(idle);
                self.complete_pass(pass, took, ended);
            }
            Err(error) => {
                self.under_way.crowded &= !self.under_way.is_empty();
                self.keep_spare(idle);
                self.charge(model, took, true);
                self.scheduler.pass_ended(pass.plan.model);
                let PassUnderWay {
                    prepared,
                    mut members,
                    counts,
                    ..
                } = pass;
                self.put_back(prepared, &mut members, counts);
                self.pass_failed(members, error);
            }
        }
    }

    /// What the engine's time went to, as a model sees it.
    pub(crate) fn spent(&self, model: ModelId) -> Spent {
        let own = self.under_way.of_model.get(&model).copied();
        let own = own.unwrap_or_default();
        Spent {
            own,
            others: self.under_way.of_all - own,
            uploads: self.store.waited,
        }
    }

    /// Tells the scheduler what a slice took; `ended` if it was its pass's last.
    pub(crate) fn charge(&mut self, model: ModelId, took: Duration, ended: bool) {
        self.under_way.of_all += took;
        *self.under_way.of_model.entry(model).or_default() += took;
        let model = rocmforge_scheduler::ModelId(model.0);
        let took_us = took.as_micros() as u64;
        self.scheduler.took(model, took_us, ended);
    }

    /// How long the device takes to compute with so many bytes of weights in a pass of so many
    /// rows; zero where that is not known, or it does so at once.
    fn device_time(&mut self, rows: usize, bytes: u64) -> Duration {
        let Some(pace) = self.store.device.pace(rows) else {
            return Duration::ZERO;
        };
        let seconds = bytes as f64 / pace.computed_bytes_per_s;
        Duration::try_from_secs_f64(seconds)
            .unwrap_or(Duration::ZERO)
            .min(WORK_MAX)
    }

    /// How long slices of a model's passes last.
    fn slice_time(&self, model: ModelId) -> Duration {
        let usual = match self.others_ask(model) {
            true => SLICE,
            false => SLICE_ALONE,
        };
        self.config.slice.unwrap_or(usual)
    }

    fn run_slice_in(&mut self, pass: &mut PassUnderWay, until: Until) -> Result<SliceEnd, Error> {
        let scratch_at = self.scratch_at();
        let model = pass.model();
        let by_time = until == Until::ItsTime;
        let slicing_suspends = by_time && self.others_ask(model);
        let PassUnderWay {
            plan,
            members,
            prepared,
            counts,
            progress,
            ..
        } = pass;
        let whole = !by_time || self.is_short(model, plan);
        let slice = self.slice_time(model);
        let rows_per_pass = plan.rows as usize;
        let pace = self.store.device.pace(rows_per_pass);
        let bytes_max = pace.map_or(u64::MAX, |pace| {
            (slice.as_secs_f64() * pace.computed_bytes_per_s) as u64
        });
        let pages = prepared.pages();
        let rows = prepared.rows(members, plan.decode_spans, &pages, &self.store);
        let pass = prepared.pass(plan, members, &rows, scratch_at, self.prefetch);
        let start = match progress.take() {
            Some(progress) => Start::Progress(progress),
            None => Start::Inputs(&prepared.inputs),
        };
        let members = RefCell::new(members.as_mut_slice());
        // Beside the device's work: to wake the readers of a pass's rows takes the time of some
        // rows.
        let others = RefCell::new(&mut self.tasks);
        let begun = || {
            for member in members.borrow_mut().iter_mut() {
                member.task.tell();
            }
            for task in others.borrow_mut().values_mut() {
                task.tell();
            }
        };
        let ended = || nobody_waits(&members.borrow());
        let until = Instant::now() + slice;
        let is_over = |bytes| by_time && (bytes >= bytes_max || Instant::now() >= until);
        let slicing = Slicing {
            is_over: &is_over,
            suspends: slicing_suspends,
            whole,
        };
        self.computing = true;
        let end = pass::run_slice(
            &mut self.store,
            &pass,
            start,
            slicing,
            (counts, &ended, &begun),
            &mut rows.sink(&members),
        )?;
        let members = members.into_inner();
        if matches!(end, SliceEnd::Complete(_)) {
            self.keep_stream(prepared, scratch_at, members)?;
        }
        Ok(end)
    }

    /// Whether a pass is so short that nobody minds it in one piece.
    fn is_short(&self, model: ModelId, plan: &PassPlan) -> bool {
        let entry = self.models.iter().find(|e| e.id == model);
        let seconds = entry.and_then(|e| e.times.seconds(plan.rows as usize));
        seconds.is_some_and(|seconds| seconds <= self.slice_time(model).as_secs_f64())
    }

    /// Lets suspended passes come to their ends. Whether there were any.
    pub(crate) fn finish_passes(&mut self) -> bool {
        let mut any = false;
        while let Some(pass) = self.under_way.take_first() {
            any = true;
            self.run_slice(pass, Until::TheEnd);
        }
        any
    }

    /// Bytes that a further pass may take beside the suspended ones.
    pub(crate) fn beside_bytes(&self) -> u64 {
        let store = &self.store;
        let segments = self.under_way.models().map(|id| store.largest_unpinned(id));
        let taken = store.cache.usage().blocks() - store.prefixes.kept_bytes();
        let all = taken + store.pinned_bytes() + segments.sum::<u64>();
        let most = match self.under_way.crowded {
            true => self.budget() / CROWDED_PART,
            false => u64::MAX,
        };
        self.budget().saturating_sub(all).min(most)
    }

    /// Has scratch for a pass. Of a request that is computed `anew`, since its blocks left no room
    /// in one piece, scratch takes all that it may have from the beginning: were it to grow behind
    /// pages, what it leaves would be lost to a segment again.
    pub(crate) fn ensure_scratch(
        &mut self,
        model: ModelId,
        plan: &PassPlan,
        anew: u32,
    ) -> Result<(), Error> {
        // The draft model's passes run behind, if there is room for theirs.
        let draft = self.draft_entry(model).filter(|d| d.is_used());
        let of_draft = draft.map(|d| d.id).map_or(0, |id| {
            let (rows, outputs) = (plan.rows as usize, plan.outputs_at_a_time as usize);
            self.scratch_bytes(id, rows, outputs)
        });
        let mut bytes = plan.scratch_bytes.max(of_draft.min(plan.scratch_bytes_max));
        // Of one that is computed anew in an empty arena the model may seem to fit.
        if anew > 1 || (anew > 0 && !self.store.cache.fits(model)) {
            bytes = bytes.max(plan.scratch_bytes_max / ALIGNMENT * ALIGNMENT);
        }
        if let Some((_, has)) = self.scratch {
            // What a long prompt took would be uploaded again for every token of
            // a model that does not fit.
            let spare = has / 2 > bytes && !self.store.cache.fits(model) && !self.prompts_go_on();
            if (bytes..=plan.scratch_bytes_max).contains(&has) && !spare {
                self.take_smaller_scratch(bytes, has);
                return Ok(());
            }
            let idle = self.scratch.take();
            self.keep_spare(idle);
        }
        self.take_smaller_scratch(bytes, plan.scratch_bytes_max);
        if self.scratch.is_some() {
            return Ok(());
        }
        let mut had = self.store.reserve(BlockKind::Scratch, None, bytes);
        if had.is_err() && !self.spare_scratch.is_empty() {
            self.free_scratch();
            had = self.store.reserve(BlockKind::Scratch, None, bytes);
        }
        self.scratch = Some((had?.0, bytes));
        Ok(())
    }

    /// Takes the smallest spare block of at least so many bytes in place of the one that there is,
    /// if it has at most `most`: so each model comes to the same block again.
    fn take_smaller_scratch(&mut self, bytes: u64, most: u64) {
        let spare = self.spare_scratch.iter().enumerate();
        let fits = spare.filter(|(_, (_, has))| (bytes..=most).contains(has));
        let Some((at, _)) = fits.min_by_key(|(_, block)| block.1) else {
            return;
        };
        let found = self.spare_scratch.swap_remove(at);
        self.spare_scratch.extend(self.scratch.replace(found));
    }

    /// Keeps a scratch block that no pass needs now, where several models take turns and it is
    /// small; else gives it back.
    fn keep_spare(&mut self, idle: Option<ScratchBlock>) {
        let Some((block, bytes)) = idle else {
            return;
        };
        let kept: u64 = self.spare_scratch.iter().map(|spare| spare.1).sum();
        let several = {
            let mut tasks = self.all_tasks();
            let model = tasks.next().map(|task| task.model);
            tasks.any(|task| Some(task.model) != model)
        };
        match several && kept + bytes <= self.budget() / SPARE_PART {
            true => self.spare_scratch.push((block, bytes)),
            false => self.store.free(block),
        }
    }

    /// Scratch that no pass has holds nothing, nor do spare states.
    pub(crate) fn free_scratch(&mut self) {
        for (block, _) in self
            .scratch
            .take()
            .into_iter()
            .chain(self.spare_scratch.drain(..))
        {
            self.store.free(block);
        }
        for states in self.models.iter_mut().filter_map(|e| e.states.as_mut()) {
            states.free(&mut self.store);
        }
    }
}
