//! Passes that are under way while others run.
//!
//! A pass runs in slices. Between two of them it is *suspended*: its sequences are in no other pass
//! and keep their KV, its model has no other pass, and models with something to compute have slices
//! of theirs. A pass that runs to its end in one slice is never suspended.

use crate::plan::PassPlan;
use crate::scheduler::Scheduler;
use crate::sequence::{Class, ClientId, ModelId, SeqId};
use crate::turns::Candidate;

/// Weight of a prompt row when the time of a pass is divided among clients.
const PROMPT_ROW: u64 = 1;

/// Weight of a row that yields a token: it reads as much as a prompt row, for less work.
const TOKEN_ROW: u64 = 2;

/// A pass of a model that is under way, running or suspended.
#[derive(Clone, Debug)]
pub(crate) struct UnderWay {
    /// Clients with rows in the pass, each with its share of the pass's time.
    shares: Vec<(ClientId, u64)>,
    seqs: Vec<SeqId>,
    /// Sequences of the pass whose prompt rows are computed.
    prompts: Vec<SeqId>,
    /// Whether any of the pass's sequences is interactive.
    interactive: bool,
    pub(crate) suspended: bool,
}

impl Scheduler {
    /// Records that a pass was planned.
    pub(crate) fn note_under_way(&mut self, plan: &PassPlan) {
        let rows = plan.spans.iter().enumerate().map(|(at, span)| {
            let row = match at < plan.decode_spans {
                true => TOKEN_ROW,
                false => PROMPT_ROW,
            };
            let client = self.sequences[&span.seq].arrival.client;
            (client, u64::from(span.rows) * row)
        });
        let class = |seq: &SeqId| self.sequences[seq].class();
        let seqs: Vec<SeqId> = plan.spans.iter().map(|span| span.seq).collect();
        let under_way = UnderWay {
            shares: rows.collect(),
            interactive: seqs.iter().any(|seq| class(seq) == Class::Interactive),
            prompts: seqs[plan.decode_spans..].to_vec(),
            seqs,
            suspended: false,
        };
        self.under_way.insert(plan.model, under_way);
    }

    /// Reports that a slice of a model's pass took `took_us` microseconds; `ended` if the pass is
    /// over, complete or not. The time is charged to the model, and to the clients of the pass by
    /// their rows.
    pub fn took(&mut self, model: ModelId, took_us: u64, ended: bool) {
        self.turns.charge(model, took_us, ended, &self.config);
        let Some(under_way) = self.under_way.get(&model) else {
            return;
        };
        let all: u64 = under_way.shares.iter().map(|s| s.1).sum();
        for &(client, share) in &under_way.shares {
            self.queues.charge(client, took_us * share / all.max(1));
        }
        for seq in &under_way.prompts {
            if let Some(s) = self.sequences.get_mut(seq) {
                s.prompt_us += took_us;
                if s.n_past < s.again_until {
                    s.again_us += took_us;
                }
            }
        }
    }

    /// Suspends the running pass of a model between two steps; it continues later
    /// ([`crate::Next::GoOn`]).
    pub fn suspend(&mut self, model: ModelId) {
        let Some(under_way) = self.under_way.get_mut(&model) else {
            return;
        };
        under_way.suspended = true;
        for seq in &under_way.seqs {
            if let Some(s) = self.sequences.get_mut(seq) {
                s.in_pass = true;
            }
        }
    }

    /// Notes that the pass of a model is over, complete or not. To be called before its results are
    /// reported.
    pub fn pass_ended(&mut self, model: ModelId) {
        let Some(under_way) = self.under_way.remove(&model) else {
            return;
        };
        for seq in &under_way.seqs {
            if let Some(s) = self.sequences.get_mut(seq) {
                s.in_pass = false;
            }
        }
    }

    /// Whether promised KV does not fit until suspended passes have ended, because the sequences to
    /// preempt are in them.
    #[must_use]
    pub fn is_short_of_room(&self) -> bool {
        self.short_of_room
    }

    pub(crate) fn is_suspended(&self, model: ModelId) -> bool {
        self.under_way.get(&model).is_some_and(|u| u.suspended)
    }

    /// Number of suspended passes.
    #[must_use]
    pub fn suspended(&self) -> usize {
        self.under_way.values().filter(|u| u.suspended).count()
    }

    /// Models with a suspended pass, as candidates.
    pub(crate) fn suspended_models(&self) -> impl Iterator<Item = Candidate> {
        let suspended = self.under_way.iter().filter(|(_, u)| u.suspended);
        suspended.map(|(model, u)| Candidate {
            model: *model,
            interactive: u.interactive,
        })
    }
}
