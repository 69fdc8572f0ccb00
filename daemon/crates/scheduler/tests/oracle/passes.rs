//! Slices of passes, and what came of the rows of those that ended.

use rand::RngExt;
use rand::rngs::StdRng;
use rocmforge_scheduler::*;

use super::outcome::Outcome;
use super::{SLICE_US_MAX, World};

impl World {
    pub(super) fn model_waits(&self, model: ModelId) -> bool {
        self.models[model.0 as usize].waits
    }

    /// A slice of a pass.
    pub(super) fn slice(&mut self, plan: PassPlan, rng: &mut StdRng, outcome: &mut Outcome) {
        let took = rng.random_range(0..SLICE_US_MAX);
        let ended = rng.random_bool(0.6);
        self.scheduler.took(plan.model, took, ended);
        self.clock += took.max(1);
        self.check_models_wait();
        self.model_since[plan.model.0 as usize] = self.clock;
        for s in &mut self.seqs {
            if plan.spans.iter().any(|span| span.seq == s.a.seq) {
                s.in_pass = !ended;
            }
            let mut prompts = plan.spans[plan.decode_spans..].iter();
            if prompts.any(|span| span.seq == s.a.seq) {
                s.prompt_us += took;
                s.again_us += took * u64::from(s.n_past < s.again_until);
            }
        }
        if ended {
            self.scheduler.pass_ended(plan.model);
            // Some may have been cancelled meanwhile.
            let mut plan = plan;
            plan.spans
                .retain(|span| self.seqs.iter().any(|s| s.a.seq == span.seq));
            if !plan.spans.is_empty() {
                self.run(&plan, rng, outcome);
            }
            return;
        }
        self.scheduler.suspend(plan.model);
        outcome.suspended += 1;
        self.suspended.push(plan);
    }

    fn run(&mut self, plan: &PassPlan, rng: &mut StdRng, outcome: &mut Outcome) {
        if rng.random_bool(0.02) {
            outcome.memory_refused += 1;
            let failed = self
                .scheduler
                .memory_refused(plan.spans.iter().map(|s| s.seq));
            let mut most = 0;
            for span in &plan.spans {
                let at = self.at(span.seq);
                self.seqs[at].refusals += 1;
                most = most.max(self.seqs[at].refusals);
            }
            assert_eq!(most, failed);
            let least = self.scheduler.budget_least(&self.view());
            self.budget = shrunk_budget(self.budget, 0, failed, 1).max(least);
            if rng.random_bool(0.8) {
                return;
            }
            // Another process holds on to it: the same pass fails again and again.
            while failed > 0
                && self.seqs[self.at(plan.spans[0].seq)].refusals <= self.config.refusals_max
            {
                let again = plan.spans.iter().map(|s| s.seq);
                self.scheduler.memory_refused(again);
                for span in &plan.spans {
                    let at = self.at(span.seq);
                    self.seqs[at].refusals += 1;
                }
            }
            return;
        }
        let mut results = Vec::new();
        for span in &plan.spans {
            let at = self.at(span.seq);
            match rng.random_range(0..200) {
                0 => {
                    outcome.cancelled_in_pass += 1;
                    self.seqs.remove(at);
                    self.scheduler.end(span.seq);
                    // The engine may tell of it or not.
                    if rng.random_bool(0.5) {
                        continue;
                    }
                    results.push(SpanResult {
                        seq: span.seq,
                        rows: span.rows,
                        appended: 0,
                        ended: rng.random_bool(0.5),
                    });
                    continue;
                }
                1 => continue,
                _ => {}
            }
            let s = &mut self.seqs[at];
            let decoding = s.decodes();
            let rows = match decoding {
                true => rng.random_range(1..=span.rows),
                false => span.rows,
            };
            outcome.drafts_dropped += u64::from(rows < span.rows);
            outcome.drafts_kept += u64::from(rows > 1 && decoding);
            let complete = rows >= s.ahead();
            let appended = match s.a.kind {
                Kind::Generate if complete => rows - s.ahead() + 1,
                _ => 0,
            };
            s.n_past += rows;
            s.known += appended;
            s.refusals = 0;
            let ended = match s.a.kind {
                Kind::Generate => s.known >= s.end_at || s.known >= s.a.positions_max,
                Kind::Score | Kind::Embed => complete,
            };
            if ended {
                outcome.done += 1;
                self.seqs.remove(at);
            }
            results.push(SpanResult {
                seq: span.seq,
                rows,
                appended,
                ended,
            });
        }
        self.scheduler.computed(&results);
    }
}
