//! Passes that are suspended: each stopped between two of its steps, and goes on later.
//!
//! ```text
//!   begun --> a slice --(its time is over, or its next segment is in flight)--> suspended
//!                |  ^                                                              |
//!                |  +------------------(its turn)----------------------------------+
//!                +--> complete, or failed
//! ```
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
use std::time::Duration;

use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::api::RequestCacheUse;
use crate::api::error::Error;
use crate::pass::member::Member;
use crate::pass::prepared::Prepared;
use crate::pass::space::ScratchBlock;
use crate::pass::stepwise::Progress;
use crate::request::gaps::Spent;
use crate::request::task::Task;

/// A pass between two of its slices.
pub(crate) struct PassUnderWay {
    pub(crate) plan: PassPlan,
    pub(crate) members: Vec<Member>,
    pub(crate) prepared: Prepared,
    pub(crate) counts: RequestCacheUse,
    /// Time of its slices so far.
    pub(crate) took: Duration,
    /// Where it stopped; `None` before its first slice.
    pub(crate) progress: Option<Progress>,
    /// Its scratch block while it is suspended.
    pub(crate) scratch: Option<ScratchBlock>,
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
    pub(crate) fn waits_for(&self) -> Option<SegmentId> {
        self.progress.as_ref()?.waits_for(self.model())
    }
}

/// The suspended passes.
#[derive(Default)]
pub(crate) struct SuspendedPasses {
    passes: Vec<PassUnderWay>,
    /// Times that a pass stopped between two steps.
    suspensions: u64,
    /// A further pass found no room in one piece beside them.
    crowded: bool,
    /// Time of all slices since start-up, and of each model's.
    of_all: Duration,
    of_model: HashMap<ModelId, Duration>,
}

impl SuspendedPasses {
    pub(crate) fn is_empty(&self) -> bool {
        self.passes.is_empty()
    }

    /// The passes, whose requests may be told something.
    pub(crate) fn passes_mut(&mut self) -> impl Iterator<Item = &mut PassUnderWay> {
        self.passes.iter_mut()
    }

    /// Their models.
    pub(crate) fn models(&self) -> impl Iterator<Item = ModelId> {
        self.passes.iter().map(PassUnderWay::model)
    }

    /// The one of a model.
    pub(crate) fn of(&self, model: ModelId) -> Option<&PassUnderWay> {
        self.passes.iter().find(|pass| pass.model() == model)
    }

    /// Their requests.
    pub(crate) fn tasks(&self) -> impl Iterator<Item = &Task> + Clone {
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

    /// Whether a further pass found no room in one piece beside those that there are.
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// A pass came to its end: without others there is room again.
    pub(crate) fn note_end(&mut self) {
        self.crowded &= !self.passes.is_empty();
    }

    /// Takes the pass of a model out.
    pub(crate) fn take(&mut self, model: ModelId) -> Option<PassUnderWay> {
        let at = self.passes.iter().position(|pass| pass.model() == model)?;
        Some(self.passes.remove(at))
    }

    /// Takes one out, the first that was suspended.
    pub(crate) fn take_first(&mut self) -> Option<PassUnderWay> {
        (!self.passes.is_empty()).then(|| self.passes.remove(0))
    }

    /// A slice of a model's pass took so long.
    pub(crate) fn note_slice(&mut self, model: ModelId, took: Duration) {
        self.of_all += took;
        *self.of_model.entry(model).or_default() += took;
    }

    /// What the engine's time went to, as a model sees it, where passes waited so long for
    /// uploads.
    pub(crate) fn spent(&self, model: ModelId, uploads: Duration) -> Spent {
        let own = self.of_model.get(&model).copied().unwrap_or_default();
        Spent {
            own,
            others: self.of_all - own,
            uploads,
        }
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
