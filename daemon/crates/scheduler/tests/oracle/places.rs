//! Who may give his place to whom, in words and loops.

use rocmforge_scheduler::*;

use super::{Seq, World};

/// Why a sequence gives its place.
pub(super) enum Gives {
    /// Its reader is slow.
    Slow,
    /// Its client has more than its share, and the other one has less.
    Share,
}

/// What was before the yields of one admission.
pub(super) struct Before {
    pub(super) seqs: Vec<Seq>,
    /// Bytes that each of them is promised.
    pub(super) kv: Vec<u64>,
    /// Nobody could go on.
    pub(super) idle: bool,
    /// Sequences that may run at once.
    pub(super) places: usize,
}

impl Before {
    pub(super) fn of(world: &World) -> Before {
        let seqs = world.seqs.clone();
        Before {
            idle: !seqs.iter().any(Seq::goes_on),
            places: world.config.running_max,
            kv: seqs.iter().map(|s| world.kv(s)).collect(),
            seqs,
        }
    }

    /// Orders those that wait as far as shares go: the class, and whether the client has its share
    /// of places and of KV.
    pub(super) fn first(&self, s: &Seq, overdue: bool) -> (Class, bool, bool) {
        let class = if overdue {
            Class::Interactive
        } else {
            s.class()
        };
        let client = s.a.client;
        let (places, room) = (
            self.has_its_places(client, class),
            self.has_its_room(client, class),
        );
        (class, places, room)
    }

    pub(super) fn has_its_places(&self, client: ClientId, class: Class) -> bool {
        held(&self.seqs, client, class) >= self.share(class)
    }

    fn share(&self, class: Class) -> usize {
        (self.places / self.clients(class).max(1)).max(1)
    }

    /// Clients that have or want something, as one who waits in a class counts them.
    pub(super) fn clients(&self, class: Class) -> usize {
        let wants = |s: &&Seq| match s.running {
            true => s.class() <= class,
            false => s.ready && s.a.class <= class,
        };
        let mut clients: Vec<ClientId> = Vec::new();
        for s in self.seqs.iter().filter(wants) {
            if !clients.contains(&s.a.client) {
                clients.push(s.a.client);
            }
        }
        clients.len()
    }
}

/// Places of a client as one who waits in a class counts them.
fn held(seqs: &[Seq], client: ClientId, class: Class) -> usize {
    let counts = |s: &&Seq| s.running && s.a.client == client && s.class() <= class;
    seqs.iter().filter(counts).count()
}

impl World {
    /// Whether a sequence is the first that is to give its place to another, and why.
    pub(super) fn gives_place(&self, at: usize, by: usize, before: &Before) -> Option<Gives> {
        let (seq, by) = (self.seqs[at].a.seq, &self.seqs[by]);
        let taken = before.seqs.iter().filter(|s| s.running).count();
        if taken < before.places {
            return None;
        }
        let (class, turn) = (by.a.class, self.config.turn_passes);
        let others = self.seqs.iter().filter(|s| s.running);
        let may = |s: &&Seq| !s.in_pass && !s.a.promised && s.a.client != by.a.client;
        let others = others.filter(|s| may(s) && s.class() >= class);
        let slow = |s: &&Seq| s.unready_since.is_some_and(|at| self.passes - at >= turn);
        let over = |s: &&Seq| {
            held(&self.seqs, s.a.client, class) > before.share(class)
                && self.passes - s.admitted.0 >= turn
                && (s.yields < 4 || s.known > s.admitted.1)
        };
        let (why, mut may): (Gives, Vec<&Seq>) = match others.clone().any(|s| slow(&s)) {
            true => (Gives::Slow, others.filter(slow).collect()),
            false if held(&self.seqs, by.a.client, class) >= before.share(class) => return None,
            false => (Gives::Share, others.filter(over).collect()),
        };
        // In the order in which they came.
        may.reverse();
        may.sort_by_key(|s| s.class() == Class::Interactive);
        may.sort_by_key(|s| s.yields);
        may.sort_by_key(|s| before.places - held(&self.seqs, s.a.client, class));
        (may.first()?.a.seq == seq).then_some(why)
    }

    /// After an admission: nobody with less than his share waits for a place that he has a right
    /// to, unless others come first or the budget has no room.
    pub(super) fn check_places(&self) {
        let before = Before::of(self);
        let waits = |s: &&Seq| !s.running && s.ready;
        for s in self.seqs.iter().filter(waits) {
            let at = |s: &Seq| self.at(s.a.seq);
            let mut running = self.seqs.iter().filter(|o| o.running);
            let gives = running.any(|o| self.gives_place(at(o), at(s), &before).is_some());
            let roomy = self.least_demand(|s| s.a.positions_max) * 2 + self.alone(s) < self.budget;
            assert!(
                !gives || !roomy || !self.comes_first(s, &before),
                "{s:?} waits"
            );
        }
    }

    /// Whether nobody who waits comes before a sequence.
    pub(super) fn comes_first(&self, s: &Seq, before: &Before) -> bool {
        let key = |s: &Seq| (before.first(s, self.overdue(s)), !self.overdue(s));
        let is_earlier = |o: &Seq| {
            let large = |s: &Seq| (before.is_of_large_model(s, self.overdue(s)), s.a.seq);
            match o.a.client == s.a.client && key(o) == key(s) {
                true => large(o) < large(s),
                false => key(s) >= key(o),
            }
        };
        let mut heads = self
            .seqs
            .iter()
            .filter(|o| !o.running && o.ready && self.is_head(o));
        self.is_head(s) && heads.all(|o| o.a.seq == s.a.seq || !is_earlier(o))
    }
}
