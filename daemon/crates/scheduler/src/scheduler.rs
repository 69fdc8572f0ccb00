//! The scheduler's state, and the events that change sequences.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::config::Config;
use crate::error::NotTaken;
use crate::plan::{Action, SpanResult};
use crate::queues::Queues;
use crate::sequence::{Arrival, Kind, ModelId, SeqId, Sequence, SequenceStatus, Tick};
use crate::suspended::UnderWay;
use crate::turns::Turns;

/// A client may have at most this many waiting sequences for each place of the queue that is free.
const WAITING_TO_FREE: usize = 7;

/// Whether the free places of the queue are reserved for other clients, since `of_client` sequences
/// of this one wait already: one client alone leaves an eighth of all places, many leave less, and
/// a client without waiting sequences may take any free place.
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
    /// The pass of each model that is under way, running or suspended.
    pub(crate) under_way: BTreeMap<ModelId, UnderWay>,
    /// Whether promised KV does not fit, and the sequences that would be preempted are in suspended
    /// passes.
    pub(crate) short_of_room: bool,
    /// Number of passes planned so far.
    pub(crate) passes: u64,
    /// Number of sequences that arrived so far.
    arrivals: u64,
}

impl Scheduler {
    /// A scheduler without any sequences.
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

    /// Adds a sequence, which waits for the next [`Scheduler::admit`].
    ///
    /// # Errors
    /// The queue is full, for all or for this client; nothing has changed.
    ///
    /// # Panics
    /// The id was used before, there is no token, or there are more tokens than positions.
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

    /// Forgets a sequence that is over (cancelled, stopped or failed). Returns whether it was
    /// known.
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

    /// Takes the results of a pass. A sequence of the plan without a result has not advanced;
    /// results of unknown sequences are ignored.
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

    /// Sets whether the reader of a sequence has room for what a pass may produce; initially it
    /// has.
    pub fn set_ready(&mut self, seq: SeqId, ready: bool) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.ready = ready;
            s.unready_since = match ready {
                true => None,
                false => s.unready_since.or(Some(self.passes)),
            };
        }
    }

    /// Records that the first `positions` positions of a just admitted sequence need not be
    /// computed, because cached ones were found.
    ///
    /// # Panics
    /// The sequence does not run, it has computed positions already, or these are all of
    /// its positions: the logits of the last one are needed.
    pub fn reused(&mut self, seq: SeqId, positions: u32) {
        let s = self.sequences.get_mut(&seq).expect("a known sequence");
        assert!(
            s.running && s.n_past == 0 && positions < s.goal(),
            "{positions}: {s:?}"
        );
        s.n_past = positions;
    }

    /// Sets positions at which a pass of a running sequence has to end, because its engine keeps
    /// the state there. They are forgotten when the sequence is preempted.
    pub fn stop_at(&mut self, seq: SeqId, positions: &[u32]) {
        if let Some(s) = self.sequences.get_mut(&seq).filter(|s| s.running) {
            s.stops = positions.to_vec();
            s.stops.sort_unstable_by(|a, b| b.cmp(a));
        }
    }

    /// Sets ranges of a sequence's prompt whose rows attend to each other in both directions, in
    /// order: each range is computed in one pass, without other rows of the sequence. A pass of the
    /// model must have room for them ([`ModelView::rows_max`](crate::ModelView::rows_max)).
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

    /// Discards what a running sequence has computed, so that it is recomputed.
    pub fn start_over(&mut self, seq: SeqId) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.n_past = 0;
            s.drafts = 0;
            s.stops.clear();
        }
    }

    /// Sets the number of draft tokens after a sequence's known tokens; the next pass checks as
    /// many as it has room for.
    pub fn propose(&mut self, seq: SeqId, drafts: u32) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.drafts = drafts;
        }
    }

    /// Forgets all sequences of an unloaded model, and returns them in the order of their arrival.
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

    /// Ends the sequences whose deadline has passed.
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

    /// The status of a sequence, if it is known.
    #[must_use]
    pub fn sequence(&self, seq: SeqId) -> Option<SequenceStatus> {
        self.sequences.get(&seq).map(Sequence::status)
    }

    /// The status of all sequences.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceStatus> {
        self.sequences.values().map(Sequence::status)
    }

    /// Number of running sequences.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Number of waiting sequences.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.sequences.len() - self.running.len()
    }

    /// Number of passes planned so far.
    #[must_use]
    pub fn passes(&self) -> u64 {
        self.passes
    }

    pub(crate) fn running_sequences(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.running.iter().map(|seq| &self.sequences[seq])
    }

    /// Checks the scheduler's invariants, for tests.
    ///
    /// # Panics
    /// An invariant does not hold.
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
