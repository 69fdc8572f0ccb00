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

/// All requests, and the scheduler that decides which of them run.
pub(crate) struct Requests {
    /// Decides which requests run, and what the next pass computes.
    pub(crate) scheduler: Scheduler,
    /// The scheduler's requests in the order of their arrival, except those in passes.
    pub(crate) tasks: BTreeMap<SeqId, Task>,
    /// The passes that stopped between two steps.
    pub(crate) suspended: SuspendedPasses,
    /// Whether a request has arrived or started since the last snapshot.
    pub(crate) changed: bool,
    /// Number of passes that run before any request is admitted, after one was preempted because
    /// memory was not contiguous.
    pub(crate) passes_before_admission: u32,
    /// State of promised gaps between tokens.
    pub(crate) promises: Promises,
    /// Counts of prompt tokens, and of those found in the prefix cache.
    pub(crate) prefix_counts: PrefixCounts,
    /// State that the time accounts of all requests share.
    pub(crate) times: TimeBook,
    /// State of the requests' images.
    pub(crate) images: Images,
    /// The threads that compute grammar masks; started for the first request with a grammar.
    masks: Option<Masks>,
    /// The sequence id of the next request.
    next_seq: u64,
}

impl Requests {
    /// An empty set of requests, of which at most `running_max` run at a time and `waiting_max` are
    /// queued; each keeps its KV cache at least for a `term`.
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

    /// A new sequence id.
    pub(crate) fn next_seq(&mut self) -> SeqId {
        let seq = SeqId(self.next_seq);
        self.next_seq += 1;
        seq
    }

    /// The threads that compute grammar masks; starts them at the first call.
    pub(crate) fn masks(&mut self) -> Masks {
        self.masks.get_or_insert_with(Masks::start).clone()
    }

    /// All requests: those that wait or run, and those in suspended passes.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Task> + Clone {
        self.tasks.values().chain(self.suspended.tasks())
    }

    /// The memory that a request holds on the device, also while it is in a suspended pass.
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

    /// Whether there are no requests.
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty() && self.suspended.is_empty()
    }

    /// Whether there are requests of this model.
    pub(crate) fn any_of(&self, model: ModelId) -> bool {
        self.all().any(|task| task.model == model)
    }

    /// Whether there are requests of other models.
    pub(crate) fn any_of_others(&self, model: ModelId) -> bool {
        self.all().any(|task| task.model != model)
    }

    /// Whether any request of this model was admitted.
    pub(crate) fn any_begun(&self, model: ModelId) -> bool {
        self.all().any(|task| task.begun && task.model == model)
    }

    /// The scheduler's state of an admitted request.
    pub(crate) fn running(&self, seq: SeqId) -> Option<SequenceStatus> {
        self.scheduler.sequence(seq).filter(|s| s.running)
    }

    /// Number of a model's running requests, including those in a pass.
    pub(crate) fn running_of(&self, model: ModelId) -> u32 {
        let of_model = self.all().filter(|t| t.model == model);
        of_model.filter(|t| self.running(t.seq).is_some()).count() as u32
    }

    /// Number of a model's requests that have no token yet, and the number of rows of their prompts
    /// together; without requests in a pass.
    pub(crate) fn prompts(&self, model: ModelId) -> (usize, usize) {
        let of_model = self.tasks.values().filter(|t| t.model == model);
        let prompts = of_model.filter(|t| !t.begun || t.n_past + 1 < t.tokens.len());
        prompts.fold((0, 0), |(n, rows), t| (n + 1, rows + t.prompt_rows()))
    }

    /// Maximum number of rows of a pass: `usual`, or more if a text or an image that must be in one
    /// pass is longer.
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

    /// Whether a request outside of the current pass has more than one token to compute.
    pub(crate) fn prompts_go_on(&self) -> bool {
        let mut begun = self.all().filter(|t| t.begun);
        begun.any(|t| !t.is_complete_at(t.n_past + 1))
    }

    /// Takes out the requests of a pass.
    pub(crate) fn take(&mut self, spans: &[SpanPlan]) -> Vec<Member> {
        let members = spans.iter().map(|span| {
            let task = self.tasks.remove(&span.seq);
            Member::new(*span, task.expect("the scheduler knows the same requests"))
        });
        members.collect()
    }

    /// Puts a request back after its pass.
    pub(crate) fn put_back(&mut self, task: Task) {
        self.tasks.insert(task.seq, task);
    }

    /// Sends events that passes produced and that no later pass has sent yet. Returns whether there
    /// were any.
    pub(crate) fn send_all(&mut self) -> bool {
        let sent = self.tasks.values_mut().map(Task::tell);
        sent.fold(false, |any, one| any | one)
    }
}
