//! A sequence: a prompt and what is generated after it, as counts of positions.
//!
//! ```text
//!            admitted                      computed, until its engine ends it
//!   Waiting ----------> Running (prompt) ------------------------------------> Running (decode)
//!      ^                      |                                                      |
//!      +----------------------+------------------------------------------------------+
//!                       yielded, for room or its place: its KV is given back, its tokens are kept
//! ```

use std::ops::Range;

/// Names a sequence; chosen by the engine, and never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// Names a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub u32);

/// Names who asks: a user of the machine, or what an API key stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// A time in units of the engine's choice. The scheduler only compares ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

/// How urgent a sequence is; the lesser goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// A user waits for the sequence.
    Interactive,
    /// The sequence takes what interactive sequences leave, but waits a bounded number of passes.
    Batch,
}

/// Kind of work that a sequence asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// More tokens: the logits of the last row, once all known tokens are computed.
    Generate,
    /// The log-probability of each token after the first: the logits of every row.
    Score,
    /// The hidden state of the rows, and no logits.
    Embed,
}

/// A sequence that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Id of the sequence.
    pub seq: SeqId,
    /// Model of the sequence.
    pub model: ModelId,
    /// Client of the sequence.
    pub client: ClientId,
    /// Class of the sequence.
    pub class: Class,
    /// Kind of work.
    pub kind: Kind,
    /// Tokens of the prompt; at least 1, of a scoring 2.
    pub tokens: u32,
    /// Positions that it can come to at most: prompt and generated tokens, bounded by the context.
    pub positions_max: u32,
    /// Whether the sequence has no maximum length and goes on until the model ends it. It is then
    /// promised KV for a while at a time; any other is promised all that it can come to.
    pub open_ended: bool,
    /// Whether its rows attend to later ones: they are computed in one pass, all or none, and of
    /// them one row's outputs are wanted. Not of [`Kind::Generate`].
    pub whole: bool,
    /// Deadline of the sequence.
    pub deadline: Option<Tick>,
    /// Whether its engine promised it a gap between its tokens: it yields to nobody while others
    /// that were promised none can.
    pub promised: bool,
}

/// What the scheduler knows of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceStatus {
    /// What came.
    pub arrival: Arrival,
    /// Whether the sequence is admitted; if not, it is queued.
    pub running: bool,
    /// Whether the sequence was admitted before, and so may have produced tokens.
    pub begun: bool,
    /// Positions that are computed.
    pub n_past: u32,
    /// Tokens that are known: the prompt and what was generated.
    pub known: u32,
    /// Positions of KV cache that the sequence is promised; 0 while it waits.
    pub promised: u32,
    /// Times that the sequence was preempted.
    pub yields: u32,
    /// How many of them gave all of its room for a while to who had none.
    pub terms: u32,
}

/// A sequence, with what its place among the others depends on.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) arrival: Arrival,
    /// The sequence's number in the order of arrival.
    pub(crate) number: u64,
    /// Number of passes that had been planned when the sequence arrived.
    pub(crate) entered: u64,
    pub(crate) n_past: u32,
    pub(crate) known: u32,
    pub(crate) promised: u32,
    /// Tokens that are guessed to follow the known ones, to be checked by the next pass.
    pub(crate) drafts: u32,
    /// Positions ahead at which a pass is to end, the farthest first.
    pub(crate) stops: Vec<u32>,
    /// Positions of the prompt that are computed in one pass each, in order.
    pub(crate) wholes: Vec<Range<u32>>,
    /// Whether the client has room for what a pass may produce.
    pub(crate) ready: bool,
    /// Passes that had been planned when its reader had no room any more; `None` if it has.
    pub(crate) unready_since: Option<u64>,
    pub(crate) running: bool,
    pub(crate) begun: bool,
    /// A suspended pass has rows of it: it is in no other pass, and keeps what it has.
    pub(crate) in_pass: bool,
    /// Whether the sequence waited so long that it keeps its place like an interactive one.
    pub(crate) protected: bool,
    /// Sequences that were admitted before it although it came first by the rules.
    pub(crate) bypassed: u32,
    pub(crate) yields: u32,
    /// Passes of the sequence that failed because the driver refused memory.
    pub(crate) refusals: u32,
    /// Passes that had been planned, and tokens that were known, when it was last admitted.
    pub(crate) admitted_at: u64,
    pub(crate) known_at_admission: u32,
    /// The clock of `turns.rs` when it was last admitted.
    pub(crate) admitted_us: u64,
    /// Microseconds of slices of passes with rows of its prompt since then, and of those with
    /// positions that it had computed before.
    pub(crate) prompt_us: u64,
    pub(crate) again_us: u64,
    /// Positions that it had computed when it yielded.
    pub(crate) again_until: u32,
    /// Times that it gave its room at the end of a term.
    pub(crate) terms: u32,
    /// The clock up to which it leaves the room to those it was given to.
    pub(crate) out_until: u64,
    /// The number of the last pass with it, or of the last before its admission.
    pub(crate) last_pass: u64,
}

impl Sequence {
    pub(crate) fn new(arrival: Arrival, number: u64, entered: u64) -> Sequence {
        Sequence {
            arrival,
            number,
            entered,
            n_past: 0,
            known: arrival.tokens,
            promised: 0,
            drafts: 0,
            stops: Vec::new(),
            wholes: Vec::new(),
            ready: true,
            unready_since: None,
            running: false,
            begun: false,
            in_pass: false,
            protected: false,
            bypassed: 0,
            yields: 0,
            refusals: 0,
            admitted_at: entered,
            known_at_admission: 0,
            admitted_us: 0,
            prompt_us: 0,
            again_us: 0,
            again_until: 0,
            terms: 0,
            out_until: 0,
            last_pass: entered,
        }
    }

    /// Positions that are to be computed for what is known. The last token of a scoring is only
    /// looked up.
    pub(crate) fn goal(&self) -> u32 {
        match self.arrival.kind {
            Kind::Generate | Kind::Embed => self.known,
            Kind::Score => self.known - 1,
        }
    }

    /// Positions that are still to be computed.
    pub(crate) fn ahead(&self) -> u32 {
        self.goal() - self.n_past
    }

    /// Rows that its next pass may have: up to where a pass is to end.
    pub(crate) fn rows_ahead(&self) -> u32 {
        if let Some(whole) = self.next_whole().filter(|w| w.start <= self.n_past) {
            return whole.end - self.n_past;
        }
        let stops = self.stops.iter().rev();
        let stop = stops.copied().find(|&stop| stop > self.n_past);
        let whole = self.next_whole().map(|whole| whole.start);
        let end = [stop, whole].into_iter().flatten().min();
        end.map_or(self.ahead(), |end| self.ahead().min(end - self.n_past))
    }

    /// The first positions that are to be computed in one pass, of which some are not computed.
    fn next_whole(&self) -> Option<&Range<u32>> {
        self.wholes.iter().find(|whole| whole.end > self.n_past)
    }

    /// Rows that its next pass must have, all or none; 0 where it may have any number.
    pub(crate) fn rows_whole(&self) -> u32 {
        match self.next_whole() {
            _ if self.arrival.whole => self.ahead(),
            Some(whole) if whole.start <= self.n_past => whole.end - self.n_past,
            _ => 0,
        }
    }

    /// Rows of the shortest pass that can have some of it, wherever it is.
    pub(crate) fn rows_least(&self) -> u32 {
        let wholes = self.wholes.iter().map(|whole| whole.end - whole.start);
        match self.arrival.whole {
            true => self.goal(),
            false => wholes.max().unwrap_or(0).max(1),
        }
    }

    /// Whether its next pass computes one row, and the token that follows is wanted.
    pub(crate) fn decodes(&self) -> bool {
        self.arrival.kind == Kind::Generate && self.ahead() == 1
    }

    /// Whether the sequence's next rows can be computed now.
    pub(crate) fn runnable(&self) -> bool {
        self.running && self.ready && !self.in_pass && self.ahead() > 0
    }

    /// Whether the sequence makes progress, now or when its suspended pass is resumed.
    pub(crate) fn goes_on(&self) -> bool {
        self.in_pass || self.runnable()
    }

    /// Whether the pass that computes all that is known is surely its last.
    pub(crate) fn ends_when_computed(&self) -> bool {
        match self.arrival.kind {
            Kind::Generate => self.known + 1 >= self.arrival.positions_max,
            Kind::Score | Kind::Embed => true,
        }
    }

    /// The class that the sequence is treated as.
    pub(crate) fn class(&self) -> Class {
        if self.protected {
            Class::Interactive
        } else {
            self.arrival.class
        }
    }

    /// Orders sequences by who may keep what it has; the greatest yields first.
    pub(crate) fn seniority(&self) -> (bool, Class, u64) {
        (!self.arrival.promised, self.class(), self.number)
    }

    /// The least positions that it must be promised to go on: all that it can come to, or what is
    /// known.
    pub(crate) fn promise_least(&self) -> u32 {
        if self.arrival.open_ended {
            self.goal().max(1)
        } else {
            self.arrival.positions_max
        }
    }

    /// The positions that it is promised if there is room.
    pub(crate) fn promise_usual(&self, more: u32) -> u32 {
        if self.arrival.open_ended {
            self.goal()
                .saturating_add(more)
                .min(self.arrival.positions_max)
        } else {
            self.arrival.positions_max
        }
    }

    pub(crate) fn status(&self) -> SequenceStatus {
        SequenceStatus {
            arrival: self.arrival,
            running: self.running,
            begun: self.begun,
            n_past: self.n_past,
            known: self.known,
            promised: self.promised,
            yields: self.yields,
            terms: self.terms,
        }
    }
}
