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

/// Id of a sequence; chosen by the engine, and never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// Id of a model, chosen by the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub u32);

/// Id of a client: a user of the machine, or an API key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// A time in units of the engine's choice. The scheduler only compares ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

/// How urgent a sequence is; the smaller class goes first.
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

/// A new sequence, as the engine reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Id of the new sequence.
    pub seq: SeqId,
    /// Model of the sequence.
    pub model: ModelId,
    /// Client of the sequence.
    pub client: ClientId,
    /// Class of the sequence.
    pub class: Class,
    /// Kind of work.
    pub kind: Kind,
    /// Number of tokens of the prompt; at least 1, for [`Kind::Score`] 2.
    pub tokens: u32,
    /// Maximum number of positions: prompt and generated tokens, bounded by the context.
    pub positions_max: u32,
    /// Whether the sequence has no maximum length and goes on until the model ends it. It is then
    /// promised KV for a while at a time; any other is promised all that it can come to.
    pub open_ended: bool,
    /// Whether the rows attend to later ones, so that one pass must have all of them or none, and
    /// only one row's outputs are wanted. Not for [`Kind::Generate`].
    pub whole: bool,
    /// Deadline of the sequence.
    pub deadline: Option<Tick>,
    /// Whether the engine promised the sequence a gap between its tokens: it is not preempted while
    /// one without a promise can be.
    pub promised: bool,
}

/// What the scheduler knows of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceStatus {
    /// The sequence as it arrived.
    pub arrival: Arrival,
    /// Whether the sequence is admitted; if not, it is queued.
    pub running: bool,
    /// Whether the sequence was admitted before, and so may have produced tokens.
    pub begun: bool,
    /// Number of positions that are computed.
    pub n_past: u32,
    /// Number of known tokens: the prompt and the generated ones.
    pub known: u32,
    /// Positions of KV cache that the sequence is promised; 0 while it waits.
    pub promised: u32,
    /// Number of times that the sequence was preempted.
    pub yields: u32,
    /// Number of these times at which it gave up all of its KV for a while because its term was
    /// over.
    pub terms: u32,
}

/// A sequence, with everything that its place among the others depends on.
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
    /// Number of draft tokens after the known ones, to be checked by the next pass.
    pub(crate) drafts: u32,
    /// Later positions at which a pass has to end, the farthest first.
    pub(crate) stops: Vec<u32>,
    /// Ranges of the prompt that are computed in one pass each, in order.
    pub(crate) wholes: Vec<Range<u32>>,
    /// Whether the client has room for what a pass may produce.
    pub(crate) ready: bool,
    /// Number of passes planned when the reader ran out of room; `None` if it has room.
    pub(crate) unready_since: Option<u64>,
    pub(crate) running: bool,
    pub(crate) begun: bool,
    /// Whether a suspended pass has rows of the sequence, so that it is in no other pass and keeps
    /// its KV.
    pub(crate) in_pass: bool,
    /// Whether the sequence waited so long that it keeps its place like an interactive one.
    pub(crate) protected: bool,
    /// Number of sequences that were admitted before this one although it came first by the rules.
    pub(crate) bypassed: u32,
    pub(crate) yields: u32,
    /// Number of the sequence's passes that failed because the driver refused memory.
    pub(crate) refusals: u32,
    /// Number of passes planned, and of tokens known, when the sequence was last admitted.
    pub(crate) admitted_at: u64,
    pub(crate) known_at_admission: u32,
    /// Clock of `turns.rs` in microseconds when the sequence was last admitted.
    pub(crate) admitted_us: u64,
    /// Microseconds of slices with rows of the prompt since the last admission, and of those that
    /// recomputed positions.
    pub(crate) prompt_us: u64,
    pub(crate) again_us: u64,
    /// Number of positions that had been computed when the sequence was preempted.
    pub(crate) again_until: u32,
    /// Number of times that the sequence gave up its KV at the end of a term.
    pub(crate) terms: u32,
    /// Clock of `turns.rs` until which the sequence leaves its memory to those it was given to.
    pub(crate) out_until: u64,
    /// Number of the last pass with the sequence, or of the last pass before its admission.
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

    /// Number of positions to compute for the known tokens. The last token of a [`Kind::Score`]
    /// sequence is only looked up.
    pub(crate) fn goal(&self) -> u32 {
        match self.arrival.kind {
            Kind::Generate | Kind::Embed => self.known,
            Kind::Score => self.known - 1,
        }
    }

    /// Number of positions that are still to be computed.
    pub(crate) fn ahead(&self) -> u32 {
        self.goal() - self.n_past
    }

    /// Number of rows that the next pass may have of the sequence: up to the next position at which
    /// a pass has to end.
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

    /// The first range to be computed in one pass that is not fully computed.
    fn next_whole(&self) -> Option<&Range<u32>> {
        self.wholes.iter().find(|whole| whole.end > self.n_past)
    }

    /// Number of rows that the next pass must have, all or none; 0 if it may have any number.
    pub(crate) fn rows_whole(&self) -> u32 {
        match self.next_whole() {
            _ if self.arrival.whole => self.ahead(),
            Some(whole) if whole.start <= self.n_past => whole.end - self.n_past,
            _ => 0,
        }
    }

    /// Number of rows of the shortest pass that can compute some of the sequence, at any position.
    pub(crate) fn rows_least(&self) -> u32 {
        let wholes = self.wholes.iter().map(|whole| whole.end - whole.start);
        match self.arrival.whole {
            true => self.goal(),
            false => wholes.max().unwrap_or(0).max(1),
        }
    }

    /// Whether the next pass computes one row whose next token is wanted.
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

    /// Whether the pass that computes all known tokens is certainly the last.
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

    /// Sort key by which sequences are preempted; the greatest goes first.
    pub(crate) fn seniority(&self) -> (bool, Class, u64) {
        (!self.arrival.promised, self.class(), self.number)
    }

    /// Minimum number of positions to promise so that the sequence can go on: its maximum, or for
    /// an open-ended one the known tokens.
    pub(crate) fn promise_least(&self) -> u32 {
        if self.arrival.open_ended {
            self.goal().max(1)
        } else {
            self.arrival.positions_max
        }
    }

    /// Number of positions that the sequence is promised if there is memory; `more` is the extra
    /// for an open-ended one.
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
