//! Passes that are suspended: each stopped between two of its steps, and goes on later.
//!
//! ```text
//!   begun --> a slice --(its time is over, or its next segment is in flight)--> suspended
//!                |  ^                                                              |
//!                |  +------------------(its turn)----------------------------------+
//!                +--> complete, or failed
//! ```
//!
//! A pass whose work is all queued stops, too, if other models have work: it ends when its results
//! have been copied to the host.
//!
//! A suspended pass keeps its requests, their memory, its scratch block and, where it waits for an
//! upload, that one segment. All of it is in the ledger. What else of its model is resident may be
//! evicted for others.
//!
//! Commands that change what passes rely on (budget, unload, clear), and memory that a driver
//! refuses, find no suspended pass: these come to their ends first.
//!
//! *Invariant:* a model has one pass under way at a time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rocmforge_scheduler::{PassPlan, SeqId};
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::api::RequestCacheUse;
use crate::api::error::Error;
use crate::memory::Memory;
use crate::pass::member::Member;
use crate::pass::prepared::Prepared;
use crate::pass::space::ScratchBlock;
use crate::pass::stepwise::Progress;
use crate::request::gaps::Spent;
use crate::request::kv::SequenceMemory;
use crate::request::task::Task;

/// A pass between two of its slices.
pub(crate) struct PassUnderWay {
    pub(crate) plan: PassPlan,
    pub(crate) members: Vec<Member>,
    pub(crate) prepared: Prepared,
    pub(crate) counts: RequestCacheUse,
    /// Time of the pass's slices so far.
    pub(crate) took: Duration,
    /// Where the pass stopped; `None` before its first slice.
    pub(crate) progress: Option<Progress>,
    /// The pass's scratch block while it is suspended.
    pub(crate) scratch: Option<ScratchBlock>,
    /// Estimated time at which the device will have computed the pass, while its results are being
    /// read.
    pub(crate) due: Option<Instant>,
    /// Whether the whole pass takes no longer than a slice of other models' passes.
    pub(crate) is_short: bool,
}

impl PassUnderWay {
    /// A pass that has run nothing yet.
    pub(crate) fn new(plan: PassPlan, members: Vec<Member>, prepared: Prepared) -> Self {
        Self {
            plan,
            members,
            prepared,
            counts: RequestCacheUse::default(),
            took: Duration::ZERO,
            progress: None,
            scratch: None,
            due: None,
            is_short: false,
        }
    }

    pub(crate) fn model(&self) -> ModelId {
        ModelId(self.plan.model.0)
    }

    /// The memory of a request in this pass, which the pass keeps until it ends, and the position
    /// at which the request is then.
    pub(crate) fn memory_of(&self, seq: SeqId) -> Option<(&SequenceMemory, usize)> {
        let at = self.members.iter().position(|m| m.task.seq == seq)?;
        Some((self.prepared.memories.get(at)?, self.members[at].end()))
    }

    /// The memory of a suspended request, mutable.
    pub(crate) fn memory_of_mut(&mut self, seq: SeqId) -> Option<(&mut SequenceMemory, usize)> {
        let at = self.members.iter().position(|m| m.task.seq == seq)?;
        let end = self.members[at].end();
        Some((self.prepared.memories.get_mut(at)?, end))
    }

    /// Whether the pass only waits for its result, and that has been copied from the device.
    fn has_come(&self, memory: &Memory) -> bool {
        let read = self.progress.as_ref().and_then(Progress::read);
        read.is_some_and(|read| read.has_come(memory))
    }

    /// The segment that the pass holds and whose upload it waits for.
    pub(crate) fn waits_for(&self) -> Option<SegmentId> {
        self.progress.as_ref()?.waits_for(self.model())
    }

    /// Whether all of the pass is computed or queued on the device, and its results are being read.
    pub(crate) fn is_read(&self) -> bool {
        self.progress.as_ref().is_some_and(|p| p.read().is_some())
    }

    /// Whether the pass could not continue without waiting.
    pub(crate) fn waits(&self, memory: &Memory) -> bool {
        let read = self.progress.as_ref().and_then(Progress::read);
        read.is_some_and(|read| !read.has_come(memory))
            || self
                .waits_for()
                .is_some_and(|s| memory.store.is_under_way(s))
    }
}

/// All suspended passes.
#[derive(Default)]
pub(crate) struct SuspendedPasses {
    passes: Vec<PassUnderWay>,
    /// Number of times that a pass stopped between two steps.
    suspensions: u64,
    /// Whether a further pass found no contiguous memory beside the suspended ones.
    crowded: bool,
    /// Time since which all suspended passes have waited, some of them for the device.
    all_wait_since: Option<Instant>,
    /// Total time of all slices since start-up; the next field has it by model.
    of_all: Duration,
    of_model: HashMap<ModelId, Duration>,
}

impl SuspendedPasses {
    pub(crate) fn is_empty(&self) -> bool {
        self.passes.is_empty()
    }

    /// The suspended passes, mutable, so that their requests can be sent events.
    pub(crate) fn passes_mut(&mut self) -> impl Iterator<Item = &mut PassUnderWay> {
        self.passes.iter_mut()
    }

    /// All suspended passes.
    pub(crate) fn passes(&self) -> impl Iterator<Item = &PassUnderWay> {
        self.passes.iter()
    }

    /// The models of the suspended passes.
    pub(crate) fn models(&self) -> impl Iterator<Item = ModelId> {
        self.passes.iter().map(PassUnderWay::model)
    }

    /// The suspended pass of a model.
    pub(crate) fn of(&self, model: ModelId) -> Option<&PassUnderWay> {
        self.passes.iter().find(|pass| pass.model() == model)
    }

    /// The requests of the suspended passes.
    pub(crate) fn tasks(&self) -> impl Iterator<Item = &Task> + Clone {
        let members = self.passes.iter().flat_map(|pass| &pass.members);
        members.map(|member| &member.task)
    }

    /// The models whose passes could not go on without waiting.
    pub(crate) fn waiting(&self, memory: &Memory) -> impl Iterator<Item = ModelId> {
        let waiting = self.passes.iter().filter(|pass| pass.waits(memory));
        waiting.map(PassUnderWay::model)
    }

    /// Takes out a pass whose results have all been read.
    pub(crate) fn take_read(&mut self, memory: &Memory) -> Option<PassUnderWay> {
        let at = self.passes.iter().position(|pass| pass.has_come(memory))?;
        self.all_wait_since = None;
        Some(self.passes.remove(at))
    }

    /// How late the device is with the work that passes wait for, by the latest estimate; `None`
    /// while no pass waits for the device.
    pub(crate) fn late(&self, memory: &Memory, now: Instant) -> Option<Duration> {
        let computed = self
            .passes
            .iter()
            .filter(|pass| pass.is_read() && !pass.has_come(memory));
        computed
            .filter_map(|pass| Some(now.saturating_duration_since(pass.due?)))
            .max()
    }

    /// Whether the result of a short pass has been copied from the device.
    pub(crate) fn short_has_come(&self, memory: &Memory) -> bool {
        let mut short = self.passes.iter().filter(|pass| pass.is_short);
        short.any(|pass| pass.has_come(memory))
    }

    /// If all passes wait, some of them for the device: for how long they have.
    pub(crate) fn all_wait(&mut self, memory: &Memory, now: Instant) -> Option<Duration> {
        let wait = self.passes.iter().all(|pass| pass.waits(memory));
        if !wait || !self.passes.iter().any(PassUnderWay::is_read) {
            self.all_wait_since = None;
            return None;
        }
        Some(now - *self.all_wait_since.get_or_insert(now))
    }

    /// Number of times that a pass stopped between two steps.
    pub(crate) fn suspensions(&self) -> u64 {
        self.suspensions
    }

    pub(crate) fn push(&mut self, pass: PassUnderWay) {
        self.suspensions += 1;
        self.all_wait_since = None;
        self.passes.push(pass);
    }

    /// Records that a further pass found no contiguous memory beside the suspended ones.
    pub(crate) fn note_crowded(&mut self) {
        self.crowded = true;
    }

    /// Whether a further pass found no contiguous memory beside the suspended ones.
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// Records the end of a pass; if no other pass is suspended, memory counts as contiguous again.
    pub(crate) fn note_end(&mut self) {
        self.crowded &= !self.passes.is_empty();
    }

    /// Takes the pass of a model out.
    pub(crate) fn take(&mut self, model: ModelId) -> Option<PassUnderWay> {
        let at = self.passes.iter().position(|pass| pass.model() == model)?;
        self.all_wait_since = None;
        Some(self.passes.remove(at))
    }

    /// Takes out the pass that was suspended first.
    pub(crate) fn take_first(&mut self) -> Option<PassUnderWay> {
        (!self.passes.is_empty()).then(|| self.passes.remove(0))
    }

    /// Adds the time of a slice to its model's total.
    pub(crate) fn note_slice(&mut self, model: ModelId, took: Duration) {
        self.of_all += took;
        *self.of_model.entry(model).or_default() += took;
    }

    /// The engine's time since start-up as requests of `model` count it; `uploads` is the time that
    /// passes waited for uploads.
    pub(crate) fn spent(&self, model: ModelId, uploads: Duration) -> Spent {
        let own = self.of_model.get(&model).copied().unwrap_or_default();
        Spent {
            own,
            others: self.of_all - own,
            uploads,
        }
    }

    /// Forgets the times of a model that is unloaded.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.of_model.remove(&model);
    }

    /// Fails the requests of all suspended passes.
    pub(crate) fn fail(&mut self, error: impl Fn() -> Error) {
        for pass in self.passes.drain(..) {
            for member in pass.members {
                member.task.fail(error());
            }
        }
    }
}
