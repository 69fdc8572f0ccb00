//! What the oracle checks: each answer against the rules, in words and loops.

use rand::RngExt;
use rand::rngs::StdRng;
use rocmforge_scheduler::*;

use super::outcome::Outcome;
use super::places::{Before, Gives};
use super::{Seq, World};

/// What is carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nobody is admitted.
    Keep,
    /// The engine asked for one to yield.
    Forced,
    /// Whoever yields does so for the one that is admitted next.
    Admit,
}

impl World {
    /// What the scheduler says of its sequences is what the oracle knows.
    pub(crate) fn check(&mut self) {
        self.scheduler.assert_consistent();
        for (n, since) in self.model_since.iter_mut().enumerate() {
            let mut of_model = self.seqs.iter().filter(|s| s.a.model == ModelId(n as u32));
            if !of_model.any(Seq::runnable) {
                *since = self.clock;
            }
        }
        assert_eq!(self.scheduler.sequences().count(), self.seqs.len());
        let running = self.seqs.iter().filter(|s| s.running).count();
        assert_eq!(self.scheduler.running(), running);
        for s in &self.seqs {
            let said = self.scheduler.sequence(s.a.seq).expect("it is known");
            assert_eq!(
                (said.n_past, said.known, said.running, said.begun),
                (s.n_past, s.known, s.running, s.begun),
                "{s:?}"
            );
        }
    }

    pub(super) fn promised(&self, s: &Seq) -> u32 {
        self.scheduler
            .sequence(s.a.seq)
            .expect("it is known")
            .promised
    }

    fn model(&self, model: ModelId) -> &ModelView {
        &self.models[model.0 as usize]
    }

    /// Scratch of the shortest passes; what has begun may go on by single rows if it is alone.
    pub(super) fn least_scratch(&self, s: &Seq, promised: u32, by_rows: bool) -> u64 {
        let rows = match by_rows {
            true => 1,
            false => self.config.least_rows,
        };
        let mut rows = rows
            .min(self.model(s.a.model).rows_max)
            .min(promised)
            .min(s.a.tokens)
            .max(1);
        let bytes = |rows| self.machine.scratch_bytes(s.a.model, rows, 1);
        while rows > 1 && bytes(rows) > self.budget / 8 {
            rows /= 2;
        }
        self.machine.scratch_bytes(s.a.model, rows, 1)
    }

    /// What all that runs needs at the least.
    pub(super) fn least_demand(&self, promised: impl Fn(&Seq) -> u32) -> u64 {
        let mut kv = 0;
        let mut segment = 0;
        let mut scratch = 0;
        let alone = self.seqs.iter().filter(|s| s.running).count() == 1;
        for s in self.seqs.iter().filter(|s| s.running) {
            let promised = promised(s);
            kv += self.machine.kv_bytes(s.a.model, promised);
            segment = segment.max(self.model(s.a.model).segment_bytes);
            scratch = scratch.max(self.least_scratch(s, promised, alone));
        }
        self.held + kv + segment + scratch
    }

    pub(super) fn alone(&self, s: &Seq) -> u64 {
        let promised = s.promise_least();
        self.held
            + self.machine.kv_bytes(s.a.model, promised)
            + self.model(s.a.model).segment_bytes
            + self.least_scratch(s, promised, s.begun)
    }

    pub(super) fn overdue(&self, s: &Seq) -> bool {
        let last = self
            .admitted_at
            .iter()
            .find(|(client, class, _)| (*client, *class) == (s.a.client, s.a.class))
            .map_or(0, |a| a.2);
        let since = match s.begun {
            true => s.entered,
            false => s.entered.max(last),
        };
        let patience = match s.a.class {
            Class::Interactive => self.config.patience_passes,
            Class::Batch => self.config.batch_patience_passes,
        };
        self.passes - since >= patience && !self.is_out(s)
    }

    /// The first of its client, class and model among those that wait and whose readers read.
    pub(super) fn is_head(&self, s: &Seq) -> bool {
        let queue = |s: &Seq| (s.a.client, s.a.class, s.a.model);
        let same = |o: &&Seq| queue(o) == queue(s);
        let mut waiting = self.seqs.iter().filter(|o| !o.running && o.ready);
        waiting.find(same).is_some_and(|o| o.a.seq == s.a.seq)
    }

    /// Takes over what was decided, and checks that it was allowed.
    pub(super) fn carry_out(
        &mut self,
        actions: &[Action],
        phase: Phase,
        rng: &mut StdRng,
        outcome: &mut Outcome,
    ) {
        let mut admitted = Vec::new();
        let mut before = Before::of(self);
        for (n, action) in actions.iter().enumerate() {
            match action {
                Action::Admitted(seq) => {
                    self.admitted(*seq, &before, outcome);
                    admitted.push(*seq);
                    before = Before::of(self);
                }
                Action::Yielded(seq) => {
                    let after = actions[n..].iter().find_map(|a| match a {
                        Action::Admitted(seq) => Some(*seq),
                        _ => None,
                    });
                    assert!(phase != Phase::Admit || after.is_some(), "for nobody");
                    self.yielded(*seq, (phase, after), &before, outcome);
                    admitted.retain(|other| other != seq);
                }
                Action::Refused { seq, why } => {
                    self.refused(*seq, why, outcome);
                    before = Before::of(self);
                }
                Action::Expired(seq) => {
                    let at = self.at(*seq);
                    let gone = self.seqs.remove(at);
                    assert!(gone.a.deadline.is_some_and(|d| d.0 <= self.now));
                    outcome.expired += 1;
                }
            }
        }
        for seq in admitted {
            let at = self.at(seq);
            let goal = self.seqs[at].goal();
            if goal > 1 && rng.random_bool(0.2) {
                let reused = rng.random_range(1..goal);
                self.seqs[at].n_past = reused;
                self.scheduler.reused(seq, reused);
                outcome.reused += 1;
            }
        }
    }

    fn admitted(&mut self, seq: SeqId, before: &Before, outcome: &mut Outcome) {
        let at = self.at(seq);
        let s = &self.seqs[at];
        assert!(
            !s.running && s.ready && self.is_head(s),
            "out of order: {s:?}"
        );
        let overdue_of = |s: &Seq| self.overdue(s);
        let overdue = self.overdue(s);
        let heads = self
            .seqs
            .iter()
            .filter(|o| o.a.seq != seq && !o.running && o.ready && self.is_head(o));
        for other in heads {
            // Those that have their share of places stand behind those that have not.
            let first = |s: &Seq| (before.first(s, overdue_of(s)), !overdue_of(s));
            assert!(
                !overdue_of(other)
                    || other.a.client == s.a.client && before.is_of_large_model(other, true)
                    || first(s) <= first(other),
                "{other:?} waited too long, and {s:?} was admitted"
            );
            assert!(
                overdue || s.class() == Class::Interactive || other.class() == Class::Batch,
                "{s:?} before {other:?}"
            );
        }
        let beside = self.seqs.iter().any(|o| o.running);
        outcome.admitted += 1;
        outcome.admitted_beside += u64::from(beside);
        outcome.readmitted += u64::from(s.begun);
        outcome.protected += u64::from(overdue && s.a.class == Class::Batch);
        let earlier = |o: &Seq| !o.running && o.ready && o.a.seq < seq && o.class() == s.class();
        outcome.before_large_models += u64::from(self.seqs.iter().any(|o| {
            earlier(o) && o.a.client == s.a.client && before.is_of_large_model(o, self.overdue(o))
        }));
        outcome.bypasses += u64::from(self.seqs.iter().any(earlier));
        outcome.longest_wait_passes = outcome.longest_wait_passes.max(self.passes - s.entered);
        let (client, class, begun) = (s.a.client, s.a.class, s.begun);
        self.promises.insert(seq, self.promise(s));
        if !begun {
            self.admitted_at.retain(|a| (a.0, a.1) != (client, class));
            self.admitted_at.push((client, class, self.passes));
        }
        let s = &mut self.seqs[at];
        outcome.readmitted_from_term += u64::from(s.out_until > 0);
        (s.admitted_us, s.out_until) = (self.clock, 0);
        (s.prompt_us, s.again_us) = (0, 0);
        s.running = true;
        s.begun = true;
        s.protected |= overdue;
        s.admitted = (self.passes, s.known);
        s.last_pass = self.passes;
        s.left_out = 0;
    }

    fn yielded(
        &mut self,
        seq: SeqId,
        (phase, by): (Phase, Option<SeqId>),
        before: &Before,
        outcome: &mut Outcome,
    ) {
        let at = self.at(seq);
        let idle = before.idle;
        let said = self.scheduler.sequence(seq).expect("it is known").terms;
        if said != self.seqs[at].terms {
            let by = self.at(by.expect("nobody's term ends for nobody"));
            return self.ends_term(at, by, before, outcome);
        }
        if let Some(by) = by.map(|by| self.at(by))
            && let Some(why) = self.gives_place(at, by, before)
        {
            match why {
                Gives::Slow => outcome.yielded_slow += 1,
                Gives::Share => outcome.yielded_share += 1,
            }
            return self.stops_running(at);
        }
        if let Some(by) = by.map(|by| self.at(by))
            && self.gives_room(at, by, before)
        {
            outcome.yielded_room += 1;
            let same = self.seqs[at].a.client == self.seqs[by].a.client;
            outcome.yielded_to_model += u64::from(same);
            return self.stops_running(at);
        }
        let seniority = |s: &Seq| (!s.a.promised, s.class(), s.a.seq);
        let running = self.seqs.iter().filter(|s| s.running && !s.in_pass);
        let junior = running.max_by_key(|s| seniority(s)).expect("some run");
        match phase {
            Phase::Keep if let Some(greedy) = self.newest_of_the_greediest() => {
                outcome.yielded_greedy += u64::from(greedy != junior.a.seq);
                assert_eq!(greedy, seq, "the newest of the client with most yields");
            }
            _ => assert_eq!(junior.a.seq, seq, "the newest of the lowest class yields"),
        }
        let s = &self.seqs[at];
        match by.map(|by| &self.seqs[self.at(by)]) {
            Some(by) if by.a.class == Class::Interactive && s.class() == Class::Batch => {
                outcome.yielded_to_interactive += 1;
            }
            Some(_) if idle => outcome.yielded_blocked += 1,
            _ => outcome.yielded_for_room += 1,
        }
        self.stops_running(at);
    }

    pub(super) fn stops_running(&mut self, at: usize) {
        let s = &mut self.seqs[at];
        s.running = false;
        s.again_until = s.again_until.max(s.n_past);
        s.n_past = 0;
        s.yields += 1;
    }

    fn refused(&mut self, seq: SeqId, why: &Refusal, outcome: &mut Outcome) {
        let at = self.at(seq);
        let s = self.seqs.remove(at);
        match *why {
            Refusal::NeverFits { demand, .. } => {
                assert!(!s.begun && demand.total() > self.budget, "{s:?}: {why}");
                assert_eq!(demand.total(), self.alone(&s), "{why}");
                outcome.never_fits += 1;
            }
            Refusal::NoRoom { demand, .. } => {
                assert!(s.begun && demand.total() > self.budget, "{s:?}: {why}");
                assert_eq!(demand.total(), self.alone(&s), "{why}");
                outcome.no_room += 1;
            }
            Refusal::DriverRefuses { refusals } => {
                assert!(s.running && refusals == s.refusals, "{s:?}: {why}");
                assert!(refusals > self.config.refusals_max);
                outcome.driver_refuses += 1;
            }
        }
    }

    /// After an admission: what runs fits, and who could run does.
    pub(super) fn check_admitted(&self) {
        let running: Vec<&Seq> = self.seqs.iter().filter(|s| s.running).collect();
        assert!(running.len() <= self.config.running_max);
        for s in &running {
            let promised = self.promised(s);
            assert!(
                (s.promise_least()..=s.a.positions_max).contains(&promised),
                "{promised}: {s:?}"
            );
        }
        let need = self.least_demand(|s| self.promised(s));
        let short = self.scheduler.is_short_of_room();
        assert!(
            !short || running.iter().any(|s| s.in_pass),
            "short for nobody"
        );
        assert!(
            running.is_empty() || need <= self.budget || short,
            "{need} of {}",
            self.budget
        );
        let waits = self.seqs.iter().any(|s| !s.running && s.ready);
        let goes_on = running.iter().any(|s| s.goes_on());
        assert!(!waits || goes_on, "someone waits for nothing");
        self.check_places();
        self.check_room();
        self.check_terms();
        let late = |s: &&Seq| s.a.deadline.is_some_and(|d| d.0 <= self.now);
        assert!(self.seqs.iter().find(late).is_none(), "a deadline is over");
    }

    /// A pass is within its limits, and nobody is passed over against the rules.
    pub(super) fn check_plan(&mut self, plan: &PassPlan, outcome: &mut Outcome) {
        let model = *self.model(plan.model);
        let awaited = self.seqs.iter().any(|s| s.goes_on() && s.decodes());
        assert!(!plan.spans.is_empty() && plan.spans.len() <= self.spans_max as usize);
        assert!((1..=model.rows_max).contains(&plan.rows));
        assert_eq!(plan.rows, plan.spans.iter().map(|s| s.rows).sum::<u32>());
        let mut prompt_rows = 0;
        for (n, span) in plan.spans.iter().enumerate() {
            let s = &self.seqs[self.at(span.seq)];
            let twice = plan.spans[..n].iter().any(|o| o.seq == span.seq);
            assert!(
                s.runnable() && s.a.model == plan.model && !twice,
                "{span:?}"
            );
            assert_eq!(span.first_position, s.n_past);
            let decode = n < plan.decode_spans;
            assert_eq!(decode, s.decodes(), "{span:?}");
            assert!(span.rows > 0 && s.n_past + span.rows <= self.promised(s));
            let outputs = match s.a.kind {
                Kind::Generate if decode => span.rows,
                Kind::Generate => u32::from(span.rows == s.ahead()),
                Kind::Score => span.rows,
                Kind::Embed => 0,
            };
            assert_eq!(span.outputs, outputs);
            assert!(decode || span.rows <= s.ahead());
            prompt_rows += if decode { 0 } else { span.rows };
        }
        assert!(
            !awaited || prompt_rows <= model.shared_rows,
            "{prompt_rows} rows of prompts"
        );
        self.check_scratch(plan, &model);
        self.check_beside(plan, outcome);
        self.check_left_out(plan, &model);
        self.passes += 1;
        self.check_waits(plan);
        self.count(plan, &model, prompt_rows, outcome);
    }

    fn check_scratch(&self, plan: &PassPlan, model: &ModelView) {
        let outputs = plan.outputs_at_a_time;
        assert!((1..=model.outputs_max).contains(&outputs));
        let bytes = self.machine.scratch_bytes(plan.model, plan.rows, outputs);
        assert_eq!(bytes, plan.scratch_bytes);
        let running = self.seqs.iter().filter(|s| s.running);
        let kv: u64 = running
            .map(|s| self.machine.kv_bytes(s.a.model, self.promised(s)))
            .sum();
        let beside = self.held + kv + model.segment_bytes;
        assert!(bytes <= plan.scratch_bytes_max || !self.suspended.is_empty());
        assert!(beside + plan.scratch_bytes_max <= self.budget);
    }

    /// Who was left out could not have been taken, and comes before who was taken.
    fn check_left_out(&self, plan: &PassPlan, model: &ModelView) {
        let in_pass = |s: &Seq| plan.spans.iter().find(|span| span.seq == s.a.seq);
        let of_model = |s: &&Seq| s.a.model == plan.model && s.runnable();
        for out in self.seqs.iter().filter(of_model) {
            if in_pass(out).is_some() {
                continue;
            }
            for other in self.seqs.iter().filter(of_model) {
                if in_pass(other).is_none() {
                    continue;
                }
                if out.decodes() && other.decodes() {
                    assert!(other.last_pass <= out.last_pass, "{other:?} before {out:?}");
                }
                let same = |s: &Seq| (s.a.client, s.a.class);
                if !out.decodes() && !other.decodes() && same(out) == same(other) {
                    assert!(other.a.seq < out.a.seq, "{other:?} before {out:?}");
                }
            }
            let full = plan.spans.len() + 1 >= self.spans_max as usize;
            let long = plan.rows * 2 >= model.rows_max;
            let wider = self.machine.scratch_bytes(plan.model, plan.rows * 2 + 1, 1);
            // Logits have a quarter of it at most when rows are given up.
            let target = plan.scratch_bytes_max.min(self.budget / 8);
            let tight = wider * 4 > target * 3;
            let shared = !out.decodes();
            assert!(full || long || tight || shared, "{out:?} in {plan:?}");
        }
        let taken: Vec<&Seq> = self.seqs.iter().filter(of_model).collect();
        let incomplete = taken
            .iter()
            .filter(|s| !s.decodes() && in_pass(s).is_some_and(|span| span.rows < s.ahead()));
        assert!(incomplete.count() <= 1, "one prompt is cut at most");
    }

    /// Nobody waits for ever.
    fn check_waits(&mut self, plan: &PassPlan) {
        for s in &mut self.seqs {
            let taken = plan.spans.iter().any(|span| span.seq == s.a.seq);
            if taken {
                s.last_pass = self.passes;
            }
            if taken || !s.runnable() {
                s.left_out = 0;
            } else if s.a.model == plan.model {
                s.left_out += 1;
            }
            // Others of its client and class, then other clients that are overdue, each for the
            // whole of a prompt.
            let most = 8 * (self.config.patience_passes + 1200);
            assert!(s.left_out <= most, "left out {} times: {s:?}", s.left_out);
        }
    }

    /// What goes on is the pass of a model that nobody else's came before; and one that waits does
    /// so only if nobody else can.
    pub(super) fn check_goes_on(&mut self, model: ModelId, outcome: &mut Outcome) {
        outcome.went_on += 1;
        let waits = |model: ModelId| self.model(model).waits;
        if waits(model) {
            outcome.waited_for += 1;
            assert!(self.suspended.iter().all(|plan| waits(plan.model)));
        }
    }

    /// A pass that begins beside suspended ones: of another model, few enough, and with its room.
    fn check_beside(&self, plan: &PassPlan, outcome: &mut Outcome) {
        assert!(self.suspended.iter().all(|s| s.model != plan.model));
        if self.suspended.is_empty() {
            return;
        }
        outcome.beside += 1;
        assert!(self.suspended.len() < self.config.passes_max);
        let kv = |model, positions| self.machine.kv_bytes(model, positions);
        let grows = plan.spans.iter().map(|span| {
            let end = span.first_position + span.rows;
            kv(plan.model, end) - kv(plan.model, span.first_position)
        });
        let segment = self.model(plan.model).segment_bytes;
        let bytes = segment + plan.scratch_bytes + grows.sum::<u64>();
        assert!(
            bytes <= self.beside_bytes,
            "{bytes} of {}",
            self.beside_bytes
        );
    }

    /// No model waits for ever: it is overdue after a while, and then waits for suspended passes at
    /// most.
    pub(super) fn check_models_wait(&mut self) {
        let slice = super::SLICE_US_MAX;
        for (n, since) in self.model_since.iter_mut().enumerate() {
            let of_model = |s: &&Seq| s.a.model == ModelId(n as u32);
            if !self.seqs.iter().filter(of_model).any(Seq::runnable) {
                *since = self.clock;
            }
            // Each of the others may be overdue, too, and each of those under way has slices left.
            let waits = self.clock - *since;
            let most = self.config.model_patience_us + 200 * slice;
            assert!(waits <= most, "model {n} waits for {waits} us");
        }
    }

    fn count(&mut self, plan: &PassPlan, model: &ModelView, prompts: u32, outcome: &mut Outcome) {
        let mixed = plan.decode_spans > 0 && prompts > 0;
        let decoding = self
            .seqs
            .iter()
            .filter(|s| s.a.model == plan.model && s.runnable() && s.decodes());
        outcome.passes += 1;
        outcome.passes_of_many += u64::from(plan.spans.len() > 1);
        outcome.passes_mixed += u64::from(mixed);
        outcome.passes_cut += u64::from(decoding.count() > plan.decode_spans);
        outcome.passes_long += u64::from(prompts > model.shared_rows);
        let usual = self.budget / 8;
        let wider = plan.rows + 1;
        let wider = self
            .machine
            .scratch_bytes(plan.model, wider, plan.outputs_at_a_time);
        outcome.passes_short += u64::from(wider > usual && plan.rows < model.shared_rows);
        let switched = self.last_model.is_some_and(|last| last != plan.model);
        outcome.switches += u64::from(switched);
        outcome.next_right += u64::from(self.guess == Some(!switched));
        self.guess = Some(plan.expects_next);
        self.last_model = Some(plan.model);
    }
}
