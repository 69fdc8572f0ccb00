//! Terms: which sequences give up all of their KV for a while, if one has so much that others have
//! none.
//!
//! Room is shared in bytes (`room.rs`), as long as the giver keeps as much as the other gets: the
//! last sequence of a client or of a model is not asked there. A sequence whose KV fills the budget
//! would make all others wait until it ends. So room is shared in time, too: if a client, or a
//! model of a client, runs nothing, and its first sequence has no room, sequences of others that
//! had their *term* are preempted, the largest first. In return such a sequence does not ask for
//! memory until the others had it as long, unless they free it before. Then it is as urgent as it
//! was, and so are those that it takes the room from.
//!
//! A term is a time of the clock of `turns.rs`, so no term goes on while nothing is computed. It
//! lasts at least [`Config::term_us`], and [`Config::term_returns`] times as long as a return
//! takes: what is lost is computed again, and that is a bounded part of the time. How long the last
//! return took is measured. Before the first one it is the part of its prompt's time that the bytes
//! are of its KV that the other one wants: what has room beside it is kept.
//!
//! [`Config::term_us`]: crate::Config::term_us
//! [`Config::term_returns`]: crate::Config::term_returns

use std::cmp::Reverse;

use crate::room::promised_bytes;
use crate::scheduler::Scheduler;
use crate::sequence::{SeqId, Sequence};
use crate::view::View;

impl Scheduler {
    /// Whether a waiting sequence leaves its memory to others for now.
    pub(crate) fn is_out(&self, s: &Sequence) -> bool {
        s.out_until > self.turns.clock()
    }

    /// Records that a sequence which is preempted has had its term; it stays out for `out_us`
    /// microseconds.
    pub(crate) fn note_term(&mut self, seq: SeqId, out_us: u64) {
        let clock = self.turns.clock();
        let s = self.sequences.get_mut(&seq).expect("it yielded");
        s.terms += 1;
        s.out_until = clock + out_us;
        s.bypassed = 0;
    }

    /// Sequences that give all of their KV so that a waiting one, promised `promised` positions,
    /// fits beside the rest of `kept`, each with the microseconds for which it does; `None` if the
    /// waiting one is not entitled to that, or it would not suffice.
    pub(crate) fn who_gives_his_term_to(
        &self,
        s: &Sequence,
        promised: u32,
        mut kept: Vec<SeqId>,
        view: &View<'_>,
        fits: impl Fn(&[SeqId]) -> bool,
    ) -> Option<Vec<(SeqId, u64)>> {
        let (client, model) = (s.arrival.client, s.arrival.model);
        if self.is_out(s) || self.running.len() >= self.config.running_max {
            return None;
        }
        let mut of_client = self.running_sequences();
        let client_has_nothing = !of_client.any(|other| other.arrival.client == client);
        let mut of_model = self.running_sequences();
        let model_has_nothing = !of_model.any(|other| {
            let arrival = other.arrival;
            (arrival.client, arrival.model) == (client, model)
        });
        if !model_has_nothing {
            return None;
        }
        let wanted = view.costs.kv_bytes(model, promised) + view.model(model).segment_bytes;
        let others = kept.iter().map(|seq| &self.sequences[seq]);
        let mut may: Vec<(&Sequence, u64)> = others
            .filter(|other| {
                let of_client = other.arrival.client == client;
                (client_has_nothing || of_client)
                    && !other.in_pass
                    && !other.arrival.promised
                    && other.class() == s.arrival.class
            })
            .filter_map(|other| Some((other, self.term_of(other, wanted, view)?)))
            .collect();
        may.sort_by_key(|(other, _)| (Reverse(promised_bytes(other, view)), Reverse(other.number)));
        for at in 0..may.len() {
            let seq = may[at].0.arrival.seq;
            kept.retain(|kept| *kept != seq);
            if fits(&kept) {
                may.truncate(at + 1);
                let given = may.iter().map(|(s, term)| (s.arrival.seq, *term));
                return Some(given.collect());
            }
        }
        None
    }

    /// Microseconds of a running sequence's term if that is over, where another one wants `wanted`
    /// bytes of its KV; else `None`.
    fn term_of(&self, s: &Sequence, wanted: u64, view: &View<'_>) -> Option<u64> {
        let price = match s.terms {
            0 => {
                let bytes = view.costs.kv_bytes(s.arrival.model, s.n_past).max(1);
                let lost = u128::from(wanted.min(bytes));
                (u128::from(s.prompt_us) * lost / u128::from(bytes)) as u64
            }
            _ => s.again_us,
        };
        let term = price.saturating_mul(self.config.term_returns);
        let term = term.max(self.config.term_us);
        let had = self.turns.clock() - s.admitted_us;
        // One whose prompt takes many terms says nothing meanwhile, but comes farther in each.
        let is_farther = s.n_past > s.again_until && self.has_had_passes(s);
        (had >= term && (is_farther || self.has_had_a_turn(s))).then_some(term)
    }
}
