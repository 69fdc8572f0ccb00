//! Recordings: the launches of a decode pass or of one of short texts, or of some steps of a decode
//! pass that follow each other where others come and go between them, captured once and replayed as
//! long as the same comes again.
//!
//! ```text
//!   unknown --(first time: launched one by one)--> seen
//!           --(second time: captured)--> recorded --> replayed
//! ```
//!
//! *Invariant:* a recorded graph holds addresses; its key (`GpuDevice::key`, `steps_key`) holds
//! everything that they and the launches' shapes were made of. [`Graphs::clear`] is called when a
//! model goes (`forget_file`), or memory of the arena does (`addresses_changed`). *Invariant:* what
//! is let go is not under way: a recorded pass whose place another takes is kept until something
//! behind it was read ([`Graphs::let_go`]), and recordings of steps are let go all together, when
//! the device has ended what it had to do ([`Graphs::is_full`]).

use rocmforge_gpu_driver::Graph;

/// Most recorded passes: a few models that take turns, with a few numbers of rows each. The one
/// that was used longest ago goes first.
const GRAPHS_MAX: usize = 64;

/// Most recorded passes of whole texts, beside those: the numbers of rows of one encoder's short
/// texts, each alone in its pass. Kept apart, so that texts of many lengths leave what tokens use.
const TEXT_GRAPHS_MAX: usize = 64;

/// Recordings whose place another has and that may be under way, at most.
const LEAVING_MAX: usize = 16;

/// Most recordings of steps: those of a few large models, and what does not come again.
pub(super) const STEP_GRAPHS_MAX: usize = 512;

/// What a recording was made of.
pub(super) type Key = Vec<u64>;

enum State {
    Seen,
    /// With the table of experts that it reads.
    Recorded(Graph, Vec<u64>),
    /// The driver could not record the graph: it is never tried again.
    Refused,
}

/// What to do with a pass.
pub(super) enum GraphUse<'a> {
    Launch,
    Record,
    Replay(&'a Graph),
}

/// The recorded graphs of one device.
pub(super) struct Graphs {
    // Few enough to look through; the most recently used last.
    entries: Vec<(Key, State)>,
    /// Graphs that were replaced, with what the compute stream had queued then.
    leaving: Vec<(u64, Graph)>,
    most: usize,
}

/// The recorded passes of one device.
#[derive(Debug)]
pub(super) struct PassGraphs {
    /// With one row of each sequence.
    tokens: Graphs,
    /// Of whole texts.
    texts: Graphs,
}

impl PassGraphs {
    pub(super) fn new() -> Self {
        Self {
            tokens: Graphs::new(GRAPHS_MAX),
            texts: Graphs::new(TEXT_GRAPHS_MAX),
        }
    }

    /// Recordings of passes that have one row of each sequence (`decodes`), or of those with more.
    pub(super) fn of(&mut self, decodes: bool) -> &mut Graphs {
        match decodes {
            true => &mut self.tokens,
            false => &mut self.texts,
        }
    }

    /// See [`Graphs::let_go`].
    pub(super) fn let_go(&mut self, queued: u64) {
        self.tokens.let_go(queued);
        self.texts.let_go(queued);
    }

    /// See [`Graphs::clear`].
    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.texts.clear();
    }
}

impl std::fmt::Debug for Graphs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graphs")
            .field("entries", &self.entries.len())
            .finish()
    }
}

impl Graphs {
    pub(super) fn new(most: usize) -> Self {
        Self {
            entries: Vec::new(),
            leaving: Vec::new(),
            most,
        }
    }

    /// Whether so many are kept that may be under way that the device is to be waited for.
    pub(super) fn many_leave(&self) -> bool {
        self.leaving.len() >= LEAVING_MAX
    }

    /// What the compute stream had queued before `queued` has ended.
    pub(super) fn let_go(&mut self, queued: u64) {
        self.leaving.retain(|(last, _)| *last > queued);
    }

    /// Whether another key takes the place of the one that was used longest ago.
    pub(super) fn is_full(&self) -> bool {
        self.entries.len() >= self.most
    }

    /// What to do with a pass or step of this key, where the compute stream has queued so much.
    pub(super) fn next_use(&mut self, key: &Key, queued: u64) -> GraphUse<'_> {
        let Some(at) = self.entries.iter().position(|(k, _)| k == key) else {
            if self.is_full()
                && let (_, State::Recorded(graph, _)) = self.entries.remove(0)
            {
                self.leaving.push((queued, graph));
            }
            self.entries.push((key.clone(), State::Seen));
            return GraphUse::Launch;
        };
        if at + 1 < self.entries.len() {
            let entry = self.entries.remove(at);
            self.entries.push(entry);
        }
        match self.entries.last().map(|(_, state)| state) {
            Some(State::Recorded(graph, _)) => GraphUse::Replay(graph),
            Some(State::Seen) => GraphUse::Record,
            _ => GraphUse::Launch,
        }
    }

    /// Keeps a recording, or notes that there can be none. Returns it.
    pub(super) fn keep(&mut self, key: &Key, graph: Option<(Graph, Vec<u64>)>) -> Option<&Graph> {
        let entry = self.entries.iter_mut().find(|(k, _)| k == key)?;
        entry.1 = graph.map_or(State::Refused, |(graph, table)| {
            State::Recorded(graph, table)
        });
        match &entry.1 {
            State::Recorded(graph, _) => Some(graph),
            _ => None,
        }
    }

    /// Whether there is a recording.
    pub(super) fn has(&self, key: &Key) -> bool {
        let mut recorded = self.entries.iter();
        recorded.any(|(k, state)| matches!(state, State::Recorded(..)) && k == key)
    }

    /// The table that a recording reads; empty for what is none.
    pub(super) fn table(&self, key: &Key) -> &[u64] {
        let entry = self.entries.iter().find(|(k, _)| k == key);
        match entry {
            Some((_, State::Recorded(_, table))) => table,
            _ => &[],
        }
    }

    /// Forgets all. Nothing of them may be under way.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.leaving.clear();
    }
}
