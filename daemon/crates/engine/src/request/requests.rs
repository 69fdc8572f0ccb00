//! All requests of the engine: those that wait or run, and those in suspended passes.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Duration;

use rocmforge_scheduler::{Config, Scheduler, SeqId, SequenceStatus, SpanPlan};
use rocmforge_tensor_cache::ModelId;

use crate::api::PrefixCounts;
use crate::pass::member::Member;
use crate::pass::suspended::SuspendedPasses;
use crate::request::images::Images;
use crate::request::kv::SequenceMemory;
use crate::request::masks::Masks;
use crate::request::promises::Promises;
use crate::request::task::Task;
use crate::request::time_book::TimeBook;

/// The requests, and the scheduler that decides which of them run.
pub(crate) struct Requests {
    /// Decides which requests run, and what the next pass computes.
    pub(crate) scheduler: Scheduler,
    /// The requests that the scheduler knows, in the order in which they came, but for those in
    /// passes.
    pub(crate) tasks: BTreeMap<SeqId, Task>,
    /// The passes that stopped between two steps.
    pub(crate) suspended: SuspendedPasses,
    /// Whether a request has arrived or started since the last snapshot.
    pub(crate) changed: bool,
    /// Passes that go before anybody is admitted: one yielded because the ledger
    /// had no room in one piece.
    pub(crate) passes_before_admission: u32,
    /// The gaps between tokens that are promised.
    pub(crate) promises: Promises,
    /// What prompts began with.
    pub(crate) prefix_counts: PrefixCounts,
    /// What their time accounts share.
    pub(crate) times: TimeBook,
    /// Images of the requests.
    pub(crate) images: Images,
    /// The threads that compute masks, since the first request with a grammar.
    masks: Option<Masks>,
    /// The name of the next request.
    next_seq: u64,
}

impl Requests {
    /// An empty set of requests, of which `running_max` run at a time and `waiting_max` may be
    /// queued; each has its room for a `term` at least.
    pub(crate) fn new(
        running_max: NonZeroUsize,
        waiting_max: usize,
        term: Option<Duration>,
    ) -> Self {
        let usual = Config::default();
        Self {
            scheduler: Scheduler::new(Config {
                running_max: running_max.get(),
                waiting_max,
                term_us: term.map_or(usual.term_us, |term| term.as_micros() as u64),
                ..usual
            }),
            tasks: BTreeMap::new(),
            suspended: SuspendedPasses::default(),
            changed: false,
            passes_before_admission: 0,
            promises: Promises::default(),
            prefix_counts: PrefixCounts::default(),
            times: TimeBook::default(),
            images: Images::default(),
            masks: None,
            next_seq: 0,
        }
    }

    /// The name of a new request.
    pub(crate) fn next_seq(&mut self) -> SeqId {
        let seq = SeqId(self.next_seq);
        self.next_seq += 1;
        seq
    }

    /// The threads that compute masks.
    pub(crate) fn masks(&mut self) -> Masks {
        self.masks.get_or_insert_with(Masks::start).clone()
    }

    /// All requests: those that wait or run, and those in suspended passes.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Task> + Clone {
        self.tasks.values().chain(self.suspended.tasks())
    }

    /// What a request holds on the device, also while a suspended pass has it.
    pub(crate) fn memory_of(&self, seq: SeqId) -> Option<&SequenceMemory> {
        let task = self.tasks.get(&seq).map(|task| &task.memory);
        let mut passes = self.suspended.passes();
        task.or_else(|| Some(passes.find_map(|pass| pass.memory_of(seq))?.0))
    }

    /// The memory of a request, mutable, and the first position at which a pass can be made to end.
    pub(crate) fn memory_of_mut(&mut self, seq: SeqId) -> Option<(&mut SequenceMemory, usize)> {
        if let Some(task) = self.tasks.get_mut(&seq) {
            return Some((&mut task.memory, task.n_past + 1));
        }
        let mut passes = self.suspended.passes_mut();
        passes.find_map(|pass| pass.memory_of_mut(seq))
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty() && self.suspended.is_empty()
    }

    /// Whether there are any of a model.
    pub(crate) fn any_of(&self, model: ModelId) -> bool {
        self.all().any(|task| task.model == model)
    }

    /// Whether there are any of other models.
    pub(crate) fn any_of_others(&self, model: ModelId) -> bool {
        self.all().any(|task| task.model != model)
    }

    /// Whether any of a model was admitted.
    pub(crate) fn any_begun(&self, model: ModelId) -> bool {
        self.all().any(|task| task.begun && task.model == model)
    }

    /// The scheduler's part of a request that is admitted.
    pub(crate) fn running(&self, seq: SeqId) -> Option<SequenceStatus> {
        self.scheduler.sequence(seq).filter(|s| s.running)
    }

    /// How many of a model's requests run, those in a pass under way among them.
    pub(crate) fn running_of(&self, model: ModelId) -> u32 {
        let of_model = self.all().filter(|t| t.model == model);
        of_model.filter(|t| self.running(t.seq).is_some()).count() as u32
    }

    /// How many of a model's requests have no token yet, and how many rows their prompts have
    /// together. Requests of a pass under way are not among them.
    pub(crate) fn prompts(&self, model: ModelId) -> (usize, usize) {
        let of_model = self.tasks.values().filter(|t| t.model == model);
        let prompts = of_model.filter(|t| !t.begun || t.n_past + 1 < t.tokens.len());
        prompts.fold((0, 0), |(n, rows), t| (n + 1, rows + t.prompt_rows()))
    }

    /// Rows of a pass at most: `usual`, but for a text or an image that must be whole and is
    /// longer.
    pub(crate) fn rows_max(&self, model: ModelId, usual: usize) -> u32 {
        let of_model = self.all().filter(|t| t.model == model);
        let whole = of_model.map(|t| match t.loaded.model().plan().both_ways {
            true => t.tokens.len(),
            false => t
                .wholes()
                .iter()
                .map(ExactSizeIterator::len)
                .max()
                .unwrap_or(0),
        });
        whole.max().unwrap_or(0).max(usual) as u32
    }

    /// Whether a request outside of the pass under way has more than a token to compute.
    pub(crate) fn prompts_go_on(&self) -> bool {
        let mut begun = self.all().filter(|t| t.begun);
        begun.any(|t| !t.is_complete_at(t.n_past + 1))
    }

    /// Takes the requests of a pass.
    pub(crate) fn take(&mut self, spans: &[SpanPlan]) -> Vec<Member> {
        let members = spans.iter().map(|span| {
            let task = self.tasks.remove(&span.seq);
            Member::new(*span, task.expect("the scheduler knows the same requests"))
        });
        members.collect()
    }

    /// Puts a request of a pass back.
    pub(crate) fn put_back(&mut self, task: Task) {
        self.tasks.insert(task.seq, task);
    }

    /// Sends what passes have found and no later pass has sent beside its own
    /// work. Whether there was any.
    pub(crate) fn send_all(&mut self) -> bool {
        let sent = self.tasks.values_mut().map(Task::tell);
        sent.fold(false, |any, one| any | one)
    }
}
