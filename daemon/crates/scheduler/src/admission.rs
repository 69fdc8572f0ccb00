//! Admission: decides which sequences run. The KV cache promised to them has to fit the budget
//! beside scratch and the largest segment.
//!
//! A sequence with a maximum length is promised all positions that it can reach. An open-ended one
//! is promised some positions, and more as it goes on. Promises are sums; pages are taken as a
//! sequence grows. Where promises do not fit any more, because an open-ended sequence goes on or
//! the budget shrank, one of the lowest class is preempted: the newest of the client that has most
//! and more than its share (`room.rs`), or the newest. So the oldest of the highest class goes on,
//! unless it gives its place or its KV to another client, and every sequence becomes the oldest at
//! last.
//!
//! A sequence that is first by the rules and does not fit may be passed by a few others that do;
//! then all wait until it fits. But of one client those go first whose model has less than its
//! share of what the client has, and no request of the client waits for the room of the others. A
//! sequence that could not even run alone is rejected at once.

use std::cmp::Reverse;

use crate::demand::ScratchTarget;
use crate::error::Refusal;
use crate::plan::Action;
use crate::queues::Queue;
use crate::room::Among;
use crate::scheduler::Scheduler;
use crate::sequence::{Class, ClientId, SeqId, Sequence, Tick};
use crate::view::View;

/// The first waiting sequence of a client, class and model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Class of the sequence; overdue ones count as interactive.
    class: Class,
    /// Whether the client has its share of places; `false` goes first.
    has_its_places: bool,
    /// Whether the client has its share of promised KV; `false` goes first.
    has_its_room: bool,
    /// Whether the model has its share of the client's KV while the client's other models want
    /// some; among one client's, `false` goes first.
    of_large_model: bool,
    /// Whether the sequence is not overdue; `false` goes first.
    in_time: bool,
    /// Time in microseconds that the client was served so far; 0 if the sequence is overdue.
    service: u64,
    client: ClientId,
    number: u64,
    seq: SeqId,
}

impl Head {
    /// Sort key among clients, applied to each client's first head.
    fn among_clients(&self) -> impl Ord + use<> {
        (
            self.class,
            self.has_its_places,
            self.has_its_room,
            self.in_time,
            self.service,
            self.number,
        )
    }

    /// Sort key among heads of one client and class that are all overdue, or all not.
    fn of_client(&self) -> impl Ord + use<> {
        let large = self.of_large_model;
        (self.client, self.class, self.in_time, large, self.number)
    }

    fn is_beside(&self, other: &Self) -> bool {
        let group = |head: &Self| (head.client, head.class, head.in_time);
        group(self) == group(other)
    }
}

/// The result of an attempt to admit a sequence.
enum Tried {
    Admitted,
    Refused,
    NoRoom,
}

/// The sequences that are preempted for another one.
#[derive(Default)]
struct Yielding {
    seqs: Vec<SeqId>,
    /// Sequences preempted at the end of their term, and the microseconds for which each leaves its
    /// KV memory to others.
    of_terms: Vec<(SeqId, u64)>,
}

impl Yielding {
    fn of(seqs: Vec<SeqId>) -> Self {
        Self {
            seqs,
            of_terms: Vec::new(),
        }
    }
}

impl Scheduler {
    /// Brings the sequences in line with the clock and the view: expires, rejects, preempts and
    /// admits sequences.
    ///
    /// Actions are appended in the order in which they are to be carried out. To be called before
    /// [`Scheduler::next`], with the same view.
    pub fn admit(&mut self, view: &View<'_>, now: Tick, actions: &mut Vec<Action>) {
        self.keep(view, now, actions);
        self.admit_waiting(view, actions);
    }

    /// As [`Scheduler::admit`], but admits no sequence: used while a preempted one would disturb
    /// the others as before.
    pub fn keep(&mut self, view: &View<'_>, now: Tick, actions: &mut Vec<Action>) {
        self.expire(now, actions);
        self.refuse_the_failed(actions);
        self.protect_the_old();
        self.keep_promises(view, actions);
    }

    /// Preempts the newest sequence of the lowest class, because the ledger had less contiguous
    /// memory than the sums say. `None` if fewer than two run.
    pub fn yield_one(&mut self, actions: &mut Vec<Action>) -> Option<SeqId> {
        let seq = self.most_junior().filter(|_| self.running.len() > 1)?;
        self.let_yield(seq, actions);
        Some(seq)
    }

    /// Protects running sequences that arrived long ago from preemption: they would be overdue as
    /// soon as they were preempted.
    fn protect_the_old(&mut self) {
        for seq in &self.running {
            let s = self.sequences.get_mut(seq).expect("it runs");
            let patience = self.config.patience(s.arrival.class);
            s.protected |= self.passes - s.entered >= patience;
        }
    }

    /// Promises KV for the known positions of running sequences, preempts those that do not fit,
    /// and promises more where there is room.
    fn keep_promises(&mut self, view: &View<'_>, actions: &mut Vec<Action>) {
        self.short_of_room = false;
        let mut grew: Vec<SeqId> = Vec::new();
        for seq in &self.running {
            let s = self.sequences.get_mut(seq).expect("it runs");
            if s.promised < s.goal() {
                s.promised = s.goal();
                grew.push(*seq);
            }
        }
        let mut shortened = false;
        while !self.running.is_empty() && self.demand_running(view).total() > view.budget_bytes {
            if !shortened {
                // What is promised and not needed yet goes before what is computed.
                shortened = true;
                for seq in &self.running {
                    let s = self.sequences.get_mut(seq).expect("it runs");
                    if !s.in_pass {
                        s.promised = s.promised.min(s.promise_least());
                    }
                }
                continue;
            }
            let greedy = self.newest_of_the_greediest(view);
            let Some(seq) = greedy.or_else(|| self.most_junior()) else {
                // Who would have to yield is in suspended passes: these come to their ends first.
                self.short_of_room = true;
                break;
            };
            if self.running.len() > 1 {
                self.let_yield(seq, actions);
                continue;
            }
            let s = &self.sequences[&seq];
            let why = self.no_room(s, view);
            self.refuse(seq, why, actions);
        }
        grew.sort_by_key(|seq| self.sequences.get(seq).map(Sequence::seniority));
        for seq in grew {
            let Some(s) = self.sequences.get_mut(&seq).filter(|s| s.running) else {
                continue;
            };
            let before = s.promised;
            s.promised = s.promise_usual(self.config.promise_positions);
            if self.demand_running(view).total() > view.budget_bytes {
                let s = self.sequences.get_mut(&seq).expect("looked at above");
                s.promised = before;
            }
        }
    }

    /// Admits waiting sequences in the order of the rules.
    fn admit_waiting(&mut self, view: &View<'_>, actions: &mut Vec<Action>) {
        while self.admit_next(view, actions) {}
    }

    /// Admits or rejects the next sequence. Returns whether there was one.
    fn admit_next(&mut self, view: &View<'_>, actions: &mut Vec<Action>) -> bool {
        let mut passed: Vec<Head> = Vec::new();
        let (mut class, mut only) = (None, None);
        for head in self.heads(view) {
            // Others wait for the room of one of this client, which its own may pass.
            if only.is_some_and(|client| client != head.client) {
                match head.in_time {
                    true => continue,
                    false => return false,
                }
            }
            if class.is_some_and(|class| class != head.class) {
                // Nobody of a lower class takes the room that one of a higher class waits for.
                return false;
            }
            match self.try_admit(head, view, actions) {
                Tried::Refused => return true,
                Tried::Admitted => {
                    // Whose model has its share is passed by its own client as it should be.
                    passed.retain(|p| !p.of_large_model || p.client != head.client);
                    for passed in passed {
                        let s = self.sequences.get_mut(&passed.seq);
                        s.expect("it waits").bypassed += 1;
                    }
                    return true;
                }
                Tried::NoRoom => {
                    class = Some(head.class);
                    let s = &self.sequences[&head.seq];
                    let is_passed = s.bypassed >= self.config.bypass_max && !self.is_out(s);
                    let reserves = !head.in_time || is_passed;
                    match (reserves, head.of_large_model) {
                        (true, false) => return false,
                        (true, true) => only = Some(head.client),
                        (false, _) => {}
                    }
                    passed.push(head);
                }
            }
        }
        false
    }

    /// The first ready sequence of each queue and model, in the order of admission.
    fn heads(&self, view: &View<'_>) -> Vec<Head> {
        let mut heads: Vec<Head> = Vec::new();
        if self.waiting() == 0 {
            return heads;
        }
        let classes = [Class::Interactive, Class::Batch];
        let places = classes.map(|class| self.places(class));
        let room = classes.map(|class| self.room(Among::Clients, class, view));
        for ((client, of), queue) in self.queues.iter() {
            let firsts = self.firsts(queue);
            if firsts.is_empty() {
                continue;
            }
            let mut of_models = classes.map(|_| None);
            heads.extend(firsts.into_iter().map(|s| {
                // One that yielded has waited since it came, but it leaves others their time.
                let since = match s.begun {
                    true => s.entered,
                    false => s.entered.max(queue.admitted_at),
                };
                let patience = self.config.patience(of);
                let overdue = self.passes - since >= patience && !self.is_out(s);
                let class = match overdue {
                    true => Class::Interactive,
                    false => s.class(),
                };
                Head {
                    class,
                    has_its_places: places[class as usize].has_its_share(client),
                    has_its_room: room[class as usize].client_has_its_share(client),
                    of_large_model: of_models[class as usize]
                        .get_or_insert_with(|| self.room(Among::ModelsOf(client), class, view))
                        .model_has_its_share(s.arrival.model),
                    in_time: !overdue,
                    service: match overdue {
                        true => 0,
                        false => self.queues.service(client),
                    },
                    client,
                    number: s.number,
                    seq: s.arrival.seq,
                }
            }));
        }
        heads.sort_unstable_by_key(Head::of_client);
        let mut clients: Vec<&[Head]> = heads.chunk_by(Head::is_beside).collect();
        clients.sort_unstable_by_key(|of_client| of_client[0].among_clients());
        clients.concat()
    }

    /// The first ready sequence of each model in a queue, in the order of arrival.
    pub(crate) fn firsts(&self, queue: &Queue) -> Vec<&Sequence> {
        let mut firsts: Vec<&Sequence> = Vec::new();
        let waiting = queue.waiting.values().map(|seq| &self.sequences[seq]);
        for s in waiting.filter(|s| s.ready) {
            if firsts
                .iter()
                .all(|first| first.arrival.model != s.arrival.model)
            {
                firsts.push(s);
            }
        }
        firsts
    }

    fn try_admit(&mut self, head: Head, view: &View<'_>, actions: &mut Vec<Action>) -> Tried {
        let s = &self.sequences[&head.seq];
        let least = s.promise_least();
        if self.demand_alone(s, least, view).total() > view.budget_bytes {
            let why = match s.begun {
                true => self.no_room(s, view),
                false => Refusal::NeverFits {
                    model: s.arrival.model,
                    positions: least,
                    demand: self.demand_alone(s, least, view),
                    budget_bytes: view.budget_bytes,
                },
            };
            self.refuse(head.seq, why, actions);
            return Tried::Refused;
        }
        let mut promised = s.promise_usual(self.config.promise_positions);
        if self.demand_alone(s, promised, view).total() > view.budget_bytes {
            promised = least;
        }
        let Some(yielding) = self.who_yields_to(s, promised, view) else {
            return Tried::NoRoom;
        };
        for seq in yielding.seqs {
            self.let_yield(seq, actions);
        }
        for (seq, out_us) in yielding.of_terms {
            self.let_yield(seq, actions);
            self.note_term(seq, out_us);
        }
        self.start(head, promised, actions);
        Tried::Admitted
    }

    /// The sequences that have to be preempted so that a waiting one fits; `None` if it does not
    /// fit even then.
    ///
    /// Batch sequences are preempted for interactive ones, and sequences whose readers are slow if
    /// no other runs. If that is not enough, [`Scheduler::who_gives_a_place_to`] chooses those that
    /// give their place, [`Scheduler::who_gives_room_to`] those that give some KV, and
    /// [`Scheduler::who_gives_his_term_to`] those that give all of it for a while.
    fn who_yields_to(&self, s: &Sequence, promised: u32, view: &View<'_>) -> Option<Yielding> {
        let fits = |kept: &[SeqId]| {
            let target = match (kept.is_empty(), s.begun) {
                (true, true) => ScratchTarget::Single,
                (true, false) => ScratchTarget::Least,
                // Nobody's passes become shorter for the sake of one who can wait.
                (false, _) => ScratchTarget::Usual,
            };
            let kept_sequences = kept.iter().map(|seq| &self.sequences[seq]);
            let demand = self.demand(kept_sequences, Some((s, promised)), target, view);
            kept.len() < self.config.running_max && demand.total() <= view.budget_bytes
        };
        if fits(&self.running) {
            return Some(Yielding::default());
        }
        let nobody_goes_on = !self.running_sequences().any(Sequence::goes_on);
        let may_yield = |other: &Sequence| {
            let lower = s.arrival.class == Class::Interactive && other.class() == Class::Batch;
            nobody_goes_on || lower && !other.arrival.promised
        };
        let mut yielding: Vec<SeqId> = self.running.clone();
        yielding.retain(|seq| !self.sequences[seq].in_pass && may_yield(&self.sequences[seq]));
        yielding.sort_by_key(|seq| Reverse(self.sequences[seq].seniority()));
        let mut kept = self.running.clone();
        for (at, seq) in yielding.iter().enumerate() {
            kept.retain(|other| other != seq);
            if fits(&kept) {
                yielding.truncate(at + 1);
                return Some(Yielding::of(yielding));
            }
        }
        if let Some(givers) = self.who_gives_a_place_to(s, fits) {
            return Some(Yielding::of(givers));
        }
        if let Some(givers) = self.who_gives_room_to(s, promised, &self.running, view, fits) {
            return Some(Yielding::of(givers));
        }
        if let Some(givers) = self.who_gives_room_to(s, promised, &kept, view, fits) {
            yielding.extend(givers);
            return Some(Yielding::of(yielding));
        }
        let of_terms = self.who_gives_his_term_to(s, promised, kept, view, fits)?;
        Some(Yielding {
            seqs: yielding,
            of_terms,
        })
    }

    fn start(&mut self, head: Head, promised: u32, actions: &mut Vec<Action>) {
        let (passes, clock) = (self.passes, self.turns.clock());
        let s = &self.sequences[&head.seq];
        let of_queue = |other: &Sequence| {
            let same = (s.arrival.client, s.arrival.class);
            (other.arrival.client, other.arrival.class) == same && !other.decodes()
        };
        let first = !self.running_sequences().any(of_queue);
        let s = self.sequences.get_mut(&head.seq).expect("it waits");
        let (client, class) = (s.arrival.client, s.arrival.class);
        let queue = self.queues.queue_mut(client, class);
        queue.waiting.remove(&s.number);
        if !s.begun {
            queue.admitted_at = passes;
        }
        if first {
            queue.prompt_at = passes;
        }
        s.running = true;
        s.begun = true;
        s.protected |= !head.in_time;
        s.promised = promised;
        s.admitted_at = passes;
        s.known_at_admission = s.known;
        (s.admitted_us, s.prompt_us) = (clock, 0);
        (s.again_us, s.out_until) = (0, 0);
        s.last_pass = passes;
        self.running.push(head.seq);
        actions.push(Action::Admitted(head.seq));
    }

    fn let_yield(&mut self, seq: SeqId, actions: &mut Vec<Action>) {
        let s = self.sequences.get_mut(&seq).expect("it runs");
        s.running = false;
        s.again_until = s.again_until.max(s.n_past);
        s.n_past = 0;
        s.stops.clear();
        s.promised = 0;
        s.drafts = 0;
        s.yields += 1;
        let queue = self.queues.queue_mut(s.arrival.client, s.arrival.class);
        queue.waiting.insert(s.number, seq);
        self.running.retain(|other| *other != seq);
        actions.push(Action::Yielded(seq));
    }

    /// The running sequence that is preempted first; `None` if all are in suspended passes.
    fn most_junior(&self) -> Option<SeqId> {
        let free = self.running_sequences().filter(|s| !s.in_pass);
        let junior = free.max_by_key(|s| s.seniority());
        junior.map(|s| s.arrival.seq)
    }

    pub(crate) fn refuse(&mut self, seq: SeqId, why: Refusal, actions: &mut Vec<Action>) {
        self.end(seq);
        actions.push(Action::Refused { seq, why });
    }

    fn no_room(&self, s: &Sequence, view: &View<'_>) -> Refusal {
        Refusal::NoRoom {
            model: s.arrival.model,
            position: s.goal(),
            demand: self.demand_alone(s, s.promise_least(), view),
            budget_bytes: view.budget_bytes,
        }
    }
}
