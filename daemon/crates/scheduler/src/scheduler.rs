//! The sequences, and what happens to them.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::config::Config;
use crate::error::NotTaken;
use crate::plan::{Action, SpanResult};
use crate::queues::Queues;
use crate::sequence::{Arrival, Kind, ModelId, SeqId, Sequence, SequenceStatus, Tick};
use crate::suspended::UnderWay;
use crate::turns::Turns;

/// A client has waiting at most so many times what is free for all.
const WAITING_TO_FREE: usize = 7;

/// Whether the places of the queue that are free are left to others by a client of which so many
/// sequences wait: alone it leaves an eighth of all, many leave less, and one that has nothing
/// waiting finds a place as long as any is free.
#[must_use]
pub fn are_left_to_others(of_client: usize, free: usize) -> bool {
    of_client >= WAITING_TO_FREE * free
}

/// Decides which sequences run, and what the next pass computes.
#[derive(Clone, Debug)]
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) sequences: BTreeMap<SeqId, Sequence>,
    /// Admitted sequences, in the order of their admission.
    pub(crate) running: Vec<SeqId>,
    pub(crate) queues: Queues,
    pub(crate) turns: Turns,
    /// The pass of each model that is under way.
    pub(crate) under_way: BTreeMap<ModelId, UnderWay>,
    /// What is promised does not fit, and who would have to yield is in suspended passes.
    pub(crate) short_of_room: bool,
    /// Passes planned so far.
    pub(crate) passes: u64,
    /// Sequences that came so far.
    arrivals: u64,
}

impl Scheduler {
    /// A scheduler without sequences.
    #[must_use]
    pub fn new(config: Config) -> Scheduler {
        Scheduler {
            config,
            sequences: BTreeMap::new(),
            running: Vec::new(),
            queues: Queues::default(),
            turns: Turns::default(),
            under_way: BTreeMap::new(),
            short_of_room: false,
            passes: 0,
            arrivals: 0,
        }
    }

    /// A sequence comes. It waits for the next [`Scheduler::admit`].
    ///
    /// # Errors
    /// As many wait as may wait, of all or of its client; nothing has changed.
    ///
    /// # Panics
    /// The name was used before, there is no token, or there are more than positions.
    pub fn arrive(&mut self, arrival: Arrival) -> Result<(), NotTaken> {
        let least = match arrival.kind {
            Kind::Score => 2,
            Kind::Generate | Kind::Embed => 1,
        };
        assert!(
            (least..=arrival.positions_max).contains(&arrival.tokens),
            "{arrival:?}"
        );
        let (waiting, waiting_max) = (self.waiting(), self.config.waiting_max);
        let free = waiting_max.saturating_sub(waiting);
        if free == 0 {
            return Err(NotTaken::QueueFull {
                waiting,
                waiting_max,
            });
        }
        let of_client = self.queues.waiting_of(arrival.client);
        if are_left_to_others(of_client, free) {
            return Err(NotTaken::LeftToOthers { of_client, free });
        }
        let number = self.arrivals;
        self.arrivals += 1;
        let sequence = Sequence::new(arrival, number, self.passes);
        let before = self.sequences.insert(arrival.seq, sequence);
        assert!(before.is_none(), "{:?} came twice", arrival.seq);
        let Arrival { client, class, .. } = arrival;
        self.queues.enter(client, class, self.passes);
        let queue = self.queues.queue_mut(client, class);
        queue.waiting.insert(number, arrival.seq);
        Ok(())
    }

    /// A sequence is over: cancelled, stopped, failed. Whether it was known; it is forgotten.
    pub fn end(&mut self, seq: SeqId) -> bool {
        let Some(gone) = self.sequences.remove(&seq) else {
            return false;
        };
        let Arrival { client, class, .. } = gone.arrival;
        if gone.running {
            self.running.retain(|other| *other != seq);
        } else {
            let queue = self.queues.queue_mut(client, class);
            queue.waiting.remove(&gone.number);
        }
        self.queues.leave(client, class);
        if self.sequences.is_empty() {
            self.turns.idle();
        }
        true
    }

    /// What a pass did. A sequence of the plan that is not named has not advanced, and a name that
    /// is not known any more means nothing.
    ///
    /// # Panics
    /// More rows were computed than there were.
    pub fn computed(&mut self, results: &[SpanResult]) {
        for result in results {
            let Some(s) = self.sequences.get_mut(&result.seq) else {
                continue;
            };
            if result.ended {
                self.end(result.seq);
                continue;
            }
            s.n_past += result.rows;
            s.known += result.appended;
            s.drafts = 0;
            s.refusals = 0;
            assert!(
                s.running && s.n_past <= s.goal() && s.n_past <= s.promised,
                "{result:?}: {s:?}"
            );
        }
    }

    /// The reader of a sequence has room for what a pass may produce, or has not; it has at first.
    pub fn set_ready(&mut self, seq: SeqId, ready: bool) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.ready = ready;
            s.unready_since = match ready {
                true => None,
                false => s.unready_since.or(Some(self.passes)),
            };
        }
    }

    /// Positions of a sequence that was just admitted are there already: found by their content, or
    /// brought back.
    ///
    /// # Panics
    /// It does not run, it has computed something, or these are all of its positions: the last
    /// one's logits are wanted.
    pub fn reused(&mut self, seq: SeqId, positions: u32) {
        let s = self.sequences.get_mut(&seq).expect("a known sequence");
        assert!(
            s.running && s.n_past == 0 && positions < s.goal(),
            "{positions}: {s:?}"
        );
        s.n_past = positions;
    }

    /// Positions at which a pass of a running sequence is to end, because its engine keeps there
    /// what it has then. They are forgotten when it yields.
    pub fn stop_at(&mut self, seq: SeqId, positions: &[u32]) {
        if let Some(s) = self.sequences.get_mut(&seq).filter(|s| s.running) {
            s.stops = positions.to_vec();
            s.stops.sort_unstable_by(|a, b| b.cmp(a));
        }
    }

    /// Positions of a sequence's prompt whose rows attend to each other both ways, in order: those
    /// of each range are computed in one pass, without others of the sequence. A pass of the model
    /// must have room for them ([`ModelView::rows_max`](crate::ModelView::rows_max)).
    ///
    /// # Panics
    /// A range is empty, or not behind the one before it and within the prompt.
    pub fn keep_whole(&mut self, seq: SeqId, wholes: &[Range<u32>]) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            let mut free = 0;
            for whole in wholes {
                assert!(
                    whole.start >= free && whole.start < whole.end && whole.end <= s.known,
                    "{whole:?} behind {free} of {} tokens",
                    s.known
                );
                free = whole.end;
            }
            s.wholes = wholes.to_vec();
        }
    }

    /// What a running sequence has computed is lost; it is computed again.
    pub fn start_over(&mut self, seq: SeqId) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.n_past = 0;
            s.drafts = 0;
            s.stops.clear();
        }
    }

    /// So many tokens are guessed to follow the known ones; the next pass checks as many as there
    /// is room for.
    pub fn propose(&mut self, seq: SeqId, drafts: u32) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.drafts = drafts;
        }
    }

    /// A model is no more: its sequences are forgotten, and named in the order of their arrival.
    pub fn model_unloaded(&mut self, model: ModelId) -> Vec<SeqId> {
        let mut gone: Vec<(u64, SeqId)> = self
            .sequences
            .iter()
            .filter(|(_, s)| s.arrival.model == model)
            .map(|(seq, s)| (s.number, *seq))
            .collect();
        gone.sort_unstable();
        for (_, seq) in &gone {
            self.end(*seq);
        }
        self.turns.forget(model);
        self.under_way.remove(&model);
        gone.into_iter().map(|(_, seq)| seq).collect()
    }

    /// Ends those whose deadline is over.
    pub(crate) fn expire(&mut self, now: Tick, actions: &mut Vec<Action>) {
        let over = |s: &Sequence| s.arrival.deadline.is_some_and(|d| d <= now);
        let expired: Vec<SeqId> = self
            .sequences
            .iter()
            .filter(|(_, s)| over(s))
            .map(|(seq, _)| *seq)
            .collect();
        for seq in expired {
            self.end(seq);
            actions.push(Action::Expired(seq));
        }
    }

    /// A sequence as it is now.
    #[must_use]
    pub fn sequence(&self, seq: SeqId) -> Option<SequenceStatus> {
        self.sequences.get(&seq).map(Sequence::status)
    }

    /// All sequences as they are now.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceStatus> {
        self.sequences.values().map(Sequence::status)
    }

    /// Sequences that run.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.sequences.len() - self.running.len()
    }

    /// Passes planned so far.
    #[must_use]
    pub fn passes(&self) -> u64 {
        self.passes
    }

    pub(crate) fn running_sequences(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.running.iter().map(|seq| &self.sequences[seq])
    }

    /// Checks what must always hold. For tests; the rules check what they rely on themselves.
    ///
    /// # Panics
    /// Something does not hold.
    pub fn assert_consistent(&self) {
        assert!(self.running.len() <= self.config.running_max);
        let waiting = self.queues.waiting();
        assert_eq!(waiting + self.running.len(), self.sequences.len());
        for seq in &self.running {
            let s = &self.sequences[seq];
            assert!(
                s.running && s.begun && s.n_past <= s.goal() && s.n_past <= s.promised,
                "{s:?}"
            );
        }
        for ((client, class), queue) in self.queues.iter() {
            for (number, seq) in &queue.waiting {
                let s = &self.sequences[seq];
                let same = (s.arrival.client, s.arrival.class, s.number);
                assert!(!s.running && same == (client, class, *number), "{s:?}");
                assert_eq!((s.promised, s.n_past), (0, 0), "{s:?}");
            }
        }
    }
}
