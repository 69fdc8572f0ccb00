//! Who may give his KV to whom, in words and loops.

use rocmforge_scheduler::*;

use super::places::Before;
use super::{Seq, World};

impl Before {
    /// KV of a client as one who waits in a class counts it.
    fn kv_held(&self, client: ClientId, class: Class) -> u64 {
        let counts = |s: &Seq| s.running && s.a.client == client && s.class() <= class;
        let of_seqs = self.seqs.iter().zip(&self.kv);
        of_seqs.filter(|(s, _)| counts(s)).map(|(_, kv)| kv).sum()
    }

    /// The same of a client's model.
    fn kv_of_model(&self, (client, model): (ClientId, ModelId), class: Class) -> u64 {
        let of = |s: &Seq| (s.a.client, s.a.model) == (client, model);
        let counts = |s: &Seq| s.running && of(s) && s.class() <= class;
        let of_seqs = self.seqs.iter().zip(&self.kv);
        of_seqs.filter(|(s, _)| counts(s)).map(|(_, kv)| kv).sum()
    }

    /// Models of which a client has or wants something.
    fn models_of(&self, client: ClientId, class: Class) -> usize {
        let wants = |s: &&Seq| match s.running {
            true => s.class() <= class,
            false => s.ready && s.a.class <= class,
        };
        let of_client = self.seqs.iter().filter(|s| s.a.client == client);
        let mut models: Vec<ModelId> = of_client.filter(wants).map(|s| s.a.model).collect();
        models.sort_unstable();
        models.dedup();
        models.len()
    }

    /// Whether a model has as much of its client's KV as all models would have if they had as much.
    pub(super) fn model_has_its_room(&self, of: (ClientId, ModelId), class: Class) -> bool {
        let (held, all) = (self.kv_of_model(of, class), self.kv_held(of.0, class));
        held > 0 && held * self.models_of(of.0, class) as u64 >= all
    }

    /// Whether nobody waits for the room of one.
    pub(super) fn is_of_large_model(&self, s: &Seq, overdue: bool) -> bool {
        let client = s.a.client;
        let class = match overdue {
            true => Class::Interactive,
            false => s.class(),
        };
        self.models_of(client, class) > 1 && self.model_has_its_room((client, s.a.model), class)
    }

    fn kv_of_all(&self, class: Class) -> u64 {
        let of_seqs = self.seqs.iter().zip(&self.kv);
        let counts = |s: &Seq| s.running && s.class() <= class;
        of_seqs.filter(|(s, _)| counts(s)).map(|(_, kv)| kv).sum()
    }

    /// Whether a client has as much KV as all would have if they had as much.
    pub(super) fn has_its_room(&self, client: ClientId, class: Class) -> bool {
        let held = self.kv_held(client, class);
        held > 0 && held * self.clients(class) as u64 >= self.kv_of_all(class)
    }
}

impl World {
    /// Remembers what is promised to those that run.
    pub(super) fn note_promises(&mut self) {
        let running = self.scheduler.sequences().filter(|s| s.running);
        self.promises = running.map(|s| (s.arrival.seq, s.promised)).collect();
    }

    /// KV of one that runs.
    pub(super) fn kv(&self, s: &Seq) -> u64 {
        let promised = self.promises.get(&s.a.seq).copied().unwrap_or(0);
        match s.running {
            true => self.machine.kv_bytes(s.a.model, promised),
            false => 0,
        }
    }

    /// What one is promised when it is admitted.
    pub(super) fn promise(&self, s: &Seq) -> u32 {
        let usual = match s.a.open_ended {
            true => (s.goal() + self.config.promise_positions).min(s.a.positions_max),
            false => s.a.positions_max,
        };
        let alone = self.held
            + self.machine.kv_bytes(s.a.model, usual)
            + self.models[s.a.model.0 as usize].segment_bytes
            + self.least_scratch(s, usual, s.begun);
        match alone > self.budget {
            true => s.promise_least(),
            false => usual,
        }
    }

    /// Who yields when KV runs short because what runs grew: nobody is promised more than he needs
    /// then.
    pub(super) fn newest_of_the_greediest(&self) -> Option<SeqId> {
        let running: Vec<&Seq> = self.seqs.iter().filter(|s| s.running).collect();
        let class = running.iter().map(|s| s.class()).max()?;
        let promised = |s: &Seq| match s.in_pass {
            true => self.promised(s),
            false => s.promise_least(),
        };
        let kv = |s: &Seq| self.machine.kv_bytes(s.a.model, promised(s));
        let of_client = |client: ClientId| running.iter().filter(move |s| s.a.client == client);
        let held = |client| of_client(client).map(|s| kv(s)).sum::<u64>();
        let all: u64 = running.iter().map(|s| kv(s)).sum();
        let clients = Before::of(self).clients(class) as u64;
        let greedy = |s: &&&Seq| {
            let client = s.a.client;
            !s.in_pass
                && !s.a.promised
                && of_client(client).count() > 1
                && held(client) * clients > all
                && s.class() == class
        };
        let newest = running.iter().filter(greedy);
        let newest = newest.max_by_key(|s| (held(s.a.client), s.a.seq));
        newest.map(|s| s.a.seq)
    }

    /// Whether a sequence is the first that is to give its KV to another: of those of other
    /// clients, or of those of other models of the same client.
    pub(super) fn gives_room(&self, at: usize, by: usize, before: &Before) -> bool {
        self.gives_room_to_client(at, by, before) || self.gives_room_to_model(at, by, before)
    }

    fn gives_room_to_model(&self, at: usize, by: usize, before: &Before) -> bool {
        let (seq, by) = (self.seqs[at].a.seq, &self.seqs[by]);
        let (client, class) = (by.a.client, by.a.class);
        let now = Before::of(self);
        let running = self.seqs.iter().filter(|s| s.running).count();
        let full = running >= before.places;
        if full && before.seqs.iter().all(|s| !s.running || s.class() == class)
            || before.model_has_its_room((client, by.a.model), class)
        {
            return false;
        }
        let wanted = self.machine.kv_bytes(by.a.model, self.promise(by));
        let would_have = before.kv_of_model((client, by.a.model), class) + wanted;
        let held = |s: &Seq| now.kv_of_model((client, s.a.model), class);
        let may = |s: &&Seq| {
            s.running
                && !s.in_pass
                && !s.a.promised
                && s.a.client == client
                && s.a.model != by.a.model
                && s.class() == class
                && before.model_has_its_room((client, s.a.model), class)
                && held(s) >= self.kv(s) + would_have
                && self.passes - s.admitted.0 >= self.config.turn_passes
                && (s.yields < 4 || s.known > s.admitted.1)
        };
        let mut givers: Vec<&Seq> = self.seqs.iter().filter(may).collect();
        // In the order in which they came.
        givers.reverse();
        givers.sort_by_key(|s| s.yields);
        givers.sort_by_key(|s| u64::MAX - held(s));
        givers.first().is_some_and(|s| s.a.seq == seq)
    }

    fn gives_room_to_client(&self, at: usize, by: usize, before: &Before) -> bool {
        let (seq, by) = (self.seqs[at].a.seq, &self.seqs[by]);
        let class = by.a.class;
        let now = Before::of(self);
        let running = self.seqs.iter().filter(|s| s.running).count();
        if running >= before.places && before.seqs.iter().all(|s| !s.running || s.class() == class)
        {
            return false;
        }
        if before.has_its_places(by.a.client, class) || before.has_its_room(by.a.client, class) {
            return false;
        }
        let wanted = self.machine.kv_bytes(by.a.model, self.promise(by));
        let would_have = before.kv_held(by.a.client, class) + wanted;
        let may = |s: &&Seq| {
            let of_client = now.kv_held(s.a.client, class);
            s.running
                && !s.in_pass
                && !s.a.promised
                && s.a.client != by.a.client
                && s.class() == class
                && before.has_its_room(s.a.client, class)
                && of_client >= self.kv(s) + would_have
                && self.passes - s.admitted.0 >= self.config.turn_passes
                && (s.yields < 4 || s.known > s.admitted.1)
        };
        let mut givers: Vec<&Seq> = self.seqs.iter().filter(may).collect();
        // In the order in which they came.
        givers.reverse();
        givers.sort_by_key(|s| s.yields);
        givers.sort_by_key(|s| u64::MAX - now.kv_held(s.a.client, class));
        givers.first().is_some_and(|s| s.a.seq == seq)
    }

    /// After an admission: nobody waits for KV that he has a right to and one other could give,
    /// unless others come first.
    pub(super) fn check_room(&self) {
        let before = Before::of(self);
        for s in self.scheduler.sequences().filter(|s| s.running) {
            assert_eq!(self.promises[&s.arrival.seq], s.promised, "{s:?}");
        }
        let running = || self.seqs.iter().filter(|s| s.running);
        if running().count() >= self.config.running_max {
            return;
        }
        for s in self.seqs.iter().filter(|s| !s.running && s.ready) {
            let at = |s: &Seq| self.at(s.a.seq);
            let Some(giver) = running().find(|o| self.gives_room(at(o), at(s), &before)) else {
                continue;
            };
            assert!(
                !self.has_room_without(giver, s) || !self.comes_first(s, &before),
                "{s:?} waits for what {giver:?} could give"
            );
        }
    }

    /// Whether one that waits surely fits beside all that run but one.
    pub(super) fn has_room_without(&self, giver: &Seq, s: &Seq) -> bool {
        let running = || self.seqs.iter().filter(|s| s.running);
        let promised = self.promise(s);
        let with = || running().filter(|o| o.a.seq != giver.a.seq).chain([s]);
        let promise = |o: &Seq| match o.running {
            true => self.promises[&o.a.seq],
            false => promised,
        };
        let kv = with().map(|o| self.machine.kv_bytes(o.a.model, promise(o)));
        let segments = with().map(|o| self.models[o.a.model.0 as usize].segment_bytes);
        let least = with().map(|o| self.least_scratch(o, promise(o), false));
        // Scratch that is more than its usual part is no more than the shortest passes need.
        let scratch = least.max().unwrap_or(0).max(self.budget / 8);
        let demand = self.held + kv.sum::<u64>() + segments.max().unwrap_or(0) + scratch;
        demand <= self.budget
    }
}
