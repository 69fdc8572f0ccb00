//! Who may give all of his KV for a while, and to whom, in words and loops.

use rocmforge_scheduler::*;

use super::outcome::Outcome;
use super::places::Before;
use super::{Seq, World};

impl World {
    /// Whether one that waits leaves its room to those that it was given to.
    pub(super) fn is_out(&self, s: &Seq) -> bool {
        self.clock < s.out_until
    }

    /// How long a term is at least of one that has so much KV, where another one wants `wanted`.
    fn term(&self, s: &Seq, wanted: u64) -> u64 {
        let kv = self.machine.kv_bytes(s.a.model, s.n_past).max(1);
        let again = match s.terms {
            0 => s.prompt_us as u128 * wanted.min(kv) as u128 / kv as u128,
            _ => s.again_us.into(),
        };
        let least = self.config.term_us;
        least.max(again as u64 * self.config.term_returns)
    }

    /// For how long a sequence gives its room to one that waits, if it has had its term, the other
    /// one's client or model had nothing before, and nobody who has had it has more.
    pub(super) fn gives_term(&self, at: usize, by: usize, before: &Before) -> Option<u64> {
        let (seq, by) = (self.seqs[at].a.seq, &self.seqs[by]);
        let running = before.seqs.iter().filter(|s| s.running);
        if by.out_until > self.clock || running.clone().count() >= before.places {
            return None;
        }
        let of_client = |s: &Seq| s.a.client == by.a.client;
        let client_has_nothing = !running.clone().any(of_client);
        let of_model = |s: &Seq| of_client(s) && s.a.model == by.a.model;
        if running.clone().any(of_model) {
            return None;
        }
        let wanted = self.machine.kv_bytes(by.a.model, self.promise(by))
            + self.models[by.a.model.0 as usize].segment_bytes;
        let may = |s: &&Seq| {
            s.running
                && !s.in_pass
                && !s.a.promised
                && s.class() == by.a.class
                && (client_has_nothing || of_client(s))
                && self.clock - s.admitted_us >= self.term(s, wanted)
                && self.passes - s.admitted.0 >= self.config.turn_passes
                && (s.yields < 4 || s.known > s.admitted.1 || s.n_past > s.again_until)
        };
        let first = self.seqs.iter().filter(may);
        let first = first.max_by_key(|s| (self.kv(s), s.a.seq))?;
        (first.a.seq == seq).then(|| self.term(first, wanted))
    }

    /// A sequence gave its room for a while to one that is admitted next.
    pub(super) fn ends_term(
        &mut self,
        at: usize,
        by: usize,
        before: &Before,
        outcome: &mut Outcome,
    ) {
        let out_us = self.gives_term(at, by, before);
        let out_us = out_us.expect("its term was over, and that of nobody with more");
        outcome.yielded_term += 1;
        outcome.yielded_terms_again += u64::from(self.seqs[at].terms > 0);
        let clock = self.clock;
        let s = &mut self.seqs[at];
        s.terms += 1;
        s.out_until = clock + out_us;
        self.stops_running(at);
    }

    /// After an admission: nobody whose client or model has nothing waits for one that has had its
    /// term and whose room would be enough, unless others come first.
    pub(super) fn check_terms(&self) {
        let before = Before::of(self);
        let running = || self.seqs.iter().filter(|s| s.running);
        for s in self.seqs.iter().filter(|s| !s.running && s.ready) {
            let at = |s: &Seq| self.at(s.a.seq);
            let gives = |o: &&Seq| self.gives_term(at(o), at(s), &before).is_some();
            let Some(giver) = running().find(gives) else {
                continue;
            };
            assert!(
                !self.has_room_without(giver, s) || !self.comes_first(s, &before),
                "{s:?} waits for {giver:?}, which has had its term"
            );
        }
    }
}
