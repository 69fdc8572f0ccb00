//! Plans the next pass: a row of every sequence that decodes, and chunks of prompts.
//!
//! Prompts take what the decoding sequences leave of the rows, and at most
//! [`ModelView::shared_rows`] while somebody waits for a token, so a long prompt delays every token
//! by a bounded amount. Prompts of the client that was served least go first, and within a client
//! and class the prompt that arrived first. If there are more rows than a pass may have, sequences
//! that were left out go first in the next one.
//!
//! [`ModelView::shared_rows`]: crate::ModelView::shared_rows

use crate::demand::Shape;
use crate::plan::{Next, PassPlan, SpanPlan};
use crate::scheduler::Scheduler;
use crate::sequence::{Class, ClientId, Kind, ModelId, SeqId, Sequence};
use crate::turns::Candidate;
use crate::view::{ModelView, View};

/// Decoding sequences leave at least one part in this many of a pass's rows to prompts.
const PROMPT_PART: u32 = 4;

/// The scratch of a pass may take one part in this many of the budget, whatever a promised pass
/// needs.
const LEAST_PART: u64 = 32;

/// Sequences of a model that have something to compute, in the order in which they get rows.
struct Ready {
    decode: Vec<SeqId>,
    prompts: Vec<SeqId>,
}

/// The rows of a pass, by sequence.
struct Rows {
    decode: usize,
    prompts: u32,
    outputs_at_a_time: u32,
    /// Maximum number of rows of the pass.
    most: u32,
}

impl Scheduler {
    /// Chooses what runs next: a new pass, or a suspended one to continue. `None` if nothing can
    /// run.
    ///
    /// The caller reports the slice's time with [`Scheduler::took`], and then calls either
    /// [`Scheduler::suspend`], or [`Scheduler::pass_ended`] and, if it computed its rows,
    /// [`Scheduler::computed`], before the next call.
    pub fn next(&mut self, view: &View<'_>) -> Option<Next> {
        let candidates = self.candidates();
        self.turns.note(&candidates, &self.config);
        let waits = |c: &Candidate| self.is_suspended(c.model) && view.model(c.model).waits;
        let (waiting, mut able): (Vec<_>, Vec<_>) = candidates.into_iter().partition(waits);
        while let Some(model) = self.turns.pick(&able, None, (view, &self.config)) {
            let first = self.before_promises(model, &able, view);
            self.turns.pass_over(model, first != model);
            if self.is_suspended(first) {
                return Some(Next::GoOn(first));
            }
            if let Some(plan) = self.plan_beside(view.model(first), view) {
                return Some(Next::Pass(self.begins(plan, view)));
            }
            if first != model {
                // What is under way gives the room back, promised passes before others.
                able.retain(|c| c.model != first && self.is_suspended(c.model));
                let promised = |c: &Candidate| view.model(c.model).promise.is_some();
                if able.iter().any(promised) {
                    able.retain(promised);
                }
                continue;
            }
            match self.turns.is_overdue(model, &self.config) {
                // No other pass takes the room that it waits for, but short ones, which give it
                // back, and promised ones, whose room is not its.
                true => able.retain(|c| {
                    let short = self.turns.has_short_passes(c.model, &self.config);
                    let promised = view.model(c.model).promise.is_some();
                    c.model != model && (short || promised || self.is_suspended(c.model))
                }),
                false => able.retain(|c| c.model != model),
            }
        }
        // The engine waits for what this one waits for.
        let model = self.turns.pick(&waiting, None, (view, &self.config))?;
        Some(Next::GoOn(model))
    }

    /// Records that a planned pass begins.
    fn begins(&mut self, mut plan: PassPlan, view: &View<'_>) -> PassPlan {
        self.passes += 1;
        self.charge(&plan);
        self.note_under_way(&plan);
        plan.expects_next = self.expects_next(&plan, view);
        plan
    }

    /// Plans a pass of `model` that fits beside the suspended ones. `None` if it has no rows, if
    /// too many passes are suspended, or if its memory does not fit.
    fn plan_beside(&self, model: &ModelView, view: &View<'_>) -> Option<PassPlan> {
        let suspended = self.suspended();
        let has_rows = |plan: &PassPlan| !plan.spans.is_empty();
        // A promised pass finds a place and room beside this one.
        let (promised, bytes) = match model.promise {
            Some(_) => (0, 0),
            None => self.promised_beside(model.model, view),
        };
        let beside = view.beside_bytes.saturating_sub(bytes);
        if suspended == 0 {
            let room = match promised {
                0 => u64::MAX,
                // It has no shorter pass, and none ever if this one waits for room.
                _ if self.has_whole_prompt(model.model) => u64::MAX,
                _ => beside.saturating_sub(model.segment_bytes),
            };
            let room = room.max(view.budget_bytes / LEAST_PART);
            return Some(self.plan(model, view, room)).filter(has_rows);
        }
        let room = beside.checked_sub(model.segment_bytes)?;
        let kept_free = promised.min(self.config.passes_max - 1);
        if suspended + kept_free >= self.config.passes_max {
            return None;
        }
        let plan = Some(self.plan(model, view, room)).filter(has_rows)?;
        let grows = plan.spans.iter().map(|span| {
            let bytes = |positions| view.costs.kv_bytes(plan.model, positions);
            bytes(span.first_position + span.rows) - bytes(span.first_position)
        });
        let bytes = grows.fold(plan.scratch_bytes, u64::saturating_add);
        (bytes <= room).then_some(plan)
    }

    /// Whether a model has a prompt of which a pass must have all rows or none.
    fn has_whole_prompt(&self, model: ModelId) -> bool {
        let mut of_model = self
            .running_sequences()
            .filter(|s| s.arrival.model == model && s.runnable());
        of_model.any(|s| s.rows_whole() > 0)
    }

    /// Plans a further decode pass, while the prompts of `plan` are still being computed: one row
    /// of each of its decoding sequences that can go on, without draft tokens. `None` if none can.
    ///
    /// It counts as a part of that pass, not as a pass of its own.
    pub fn next_tokens(&mut self, plan: &PassPlan) -> Option<PassPlan> {
        let goes_on = |span: &&SpanPlan| {
            let s = self.sequences.get(&span.seq);
            s.is_some_and(|s| s.runnable() && s.decodes() && s.goal() <= s.promised)
        };
        let spans = plan.spans[..plan.decode_spans].iter().filter(goes_on);
        let spans: Vec<SpanPlan> = spans
            .map(|span| SpanPlan {
                first_position: self.sequences[&span.seq].n_past,
                rows: 1,
                outputs: 1,
                ..*span
            })
            .collect();
        if spans.is_empty() {
            return None;
        }
        let rows = spans.len() as u32;
        let tokens = PassPlan {
            decode_spans: spans.len(),
            spans,
            rows,
            outputs_at_a_time: plan.outputs_at_a_time.min(rows),
            ..plan.clone()
        };
        self.charge(&tokens);
        Some(tokens)
    }

    /// The models in the order in which their weights are needed: those with something to compute
    /// by their turns, the one of the last pass first if its turn goes on, then those of waiting
    /// sequences, and of sequences whose readers are slow.
    ///
    /// `under_way` is a planned pass without reported results: sequences that end with it need no
    /// further pass.
    #[must_use]
    pub fn upcoming_models(&self, under_way: Option<&PassPlan>, view: &View<'_>) -> Vec<ModelId> {
        let mut candidates = match under_way {
            None => self.candidates(),
            Some(plan) => self.candidates_after(plan),
        };
        let mut models = Vec::new();
        let mut turns = self.turns.clone();
        turns.note(&candidates, &self.config);
        let ahead = under_way.map(|plan| (plan.model, turns.usual_us(plan.model).max(1)));
        while let Some(model) = turns.pick(&candidates, ahead, (view, &self.config)) {
            candidates.retain(|c| c.model != model);
            models.push(model);
        }
        let ends = |s: &&Sequence| under_way.is_some_and(|plan| ends_with(s, plan));
        let mut rest: Vec<&Sequence> = self.sequences.values().filter(|s| !ends(s)).collect();
        rest.sort_by_key(|s| (!s.ready, s.running, s.class(), s.number));
        for s in rest {
            if !models.contains(&s.arrival.model) {
                models.push(s.arrival.model);
            }
        }
        models
    }

    /// Models with something to compute.
    fn candidates(&self) -> Vec<Candidate> {
        let runnable = self.running_sequences().filter(|s| s.runnable());
        self.with_suspended(candidates(runnable))
    }

    /// Models with something to compute after a planned pass.
    fn candidates_after(&self, plan: &PassPlan) -> Vec<Candidate> {
        let goes_on = |s: &&Sequence| s.ready && s.ahead() > 0 && !ends_with(s, plan);
        self.with_suspended(candidates(self.running_sequences().filter(goes_on)))
    }

    /// The candidates, with every model that has a suspended pass represented by that pass only.
    fn with_suspended(&self, mut candidates: Vec<Candidate>) -> Vec<Candidate> {
        candidates.retain(|c| !self.is_suspended(c.model));
        candidates.extend(self.suspended_models());
        candidates
    }

    /// Plans a pass of a model, with at most `scratch_max` bytes of scratch if that is less than
    /// usual.
    fn plan(&self, model: &ModelView, view: &View<'_>, scratch_max: u64) -> PassPlan {
        let mut ready = self.ready(model.model);
        // The reader of one that is promised its tokens may go on at any time.
        let awaited =
            model.promise.is_some() || self.running_sequences().any(|s| s.goes_on() && s.decodes());
        let (usual, room) = self.scratch_room(model, !awaited, view);
        let (usual, room) = (usual.min(scratch_max), room.min(scratch_max));
        let spans_max = view.spans_max.max(1) as usize;
        if spans_max == 1 {
            self.keep_the_longest_waiting(&mut ready);
        }
        let mut rows = self.rows(model, &ready, awaited, (usual, room), view);
        if rows.most == 1 {
            self.keep_the_longest_waiting(&mut ready);
            rows = self.rows(model, &ready, awaited, (usual, room), view);
        }
        let kept_for_prompts = usize::from(!ready.prompts.is_empty() && spans_max > 1);
        let decode_spans = rows.decode.min(spans_max - kept_for_prompts);
        let mut left = rows.most - decode_spans as u32;
        let mut spans: Vec<SpanPlan> = Vec::with_capacity(ready.decode.len() + 1);
        let mut prompts = Vec::new();
        let mut for_prompts = rows.prompts.min(left);
        for seq in &ready.prompts {
            if for_prompts == 0 || decode_spans + prompts.len() == spans_max {
                break;
            }
            let s = &self.sequences[seq];
            // What must be whole and is longer than what is left waits; others behind it do not.
            if s.rows_whole() > for_prompts {
                continue;
            }
            let n = s.rows_ahead().min(for_prompts);
            for_prompts -= n;
            left -= n;
            prompts.push(SpanPlan {
                seq: *seq,
                first_position: s.n_past,
                rows: n,
                outputs: match s.arrival.kind {
                    _ if s.arrival.whole => 1,
                    Kind::Generate => u32::from(n == s.ahead()),
                    Kind::Score => n,
                    Kind::Embed => 0,
                },
            });
        }
        for seq in &ready.decode[..decode_spans] {
            let s = &self.sequences[seq];
            let drafts = s.drafts.min(left).min(s.promised - s.goal());
            left -= drafts;
            spans.push(SpanPlan {
                seq: *seq,
                first_position: s.n_past,
                rows: 1 + drafts,
                outputs: 1 + drafts,
            });
        }
        spans.append(&mut prompts);
        let n_rows: u32 = spans.iter().map(|s| s.rows).sum();
        let outputs: u32 = spans.iter().map(|s| s.outputs).sum();
        let outputs_at_a_time = rows.outputs_at_a_time.min(outputs).max(1);
        PassPlan {
            model: model.model,
            spans,
            decode_spans,
            rows: n_rows,
            outputs_at_a_time,
            scratch_bytes: view
                .costs
                .scratch_bytes(model.model, n_rows, outputs_at_a_time),
            scratch_bytes_max: room,
            expects_next: false,
        }
    }

    /// Distributes the rows of a pass among sequences, within the scratch memory.
    fn rows(
        &self,
        model: &ModelView,
        ready: &Ready,
        awaited: bool,
        bytes: (u64, u64),
        view: &View<'_>,
    ) -> Rows {
        let of = |seqs: &[SeqId], n: fn(&Sequence) -> u32| {
            let each = seqs.iter().map(|seq| n(&self.sequences[seq]));
            each.fold(0, u32::saturating_add)
        };
        let rows_max = model.rows_max.max(1);
        let decoding = ready.decode.len() as u32;
        let chunk_max = match awaited {
            true => model.shared_rows.max(1),
            false => rows_max,
        };
        // The first one is in the pass, however long it is, where it can be in no other.
        let first = ready.prompts.first().map(|seq| &self.sequences[seq]);
        let first = first.map_or(0, Sequence::rows_whole);
        let asked = of(&ready.prompts, Sequence::rows_ahead).min(chunk_max.max(first));
        // So much of a pass that there is something for both.
        let kept = |rows: u32| match rows {
            0 | 1 => u32::from(decoding == 0),
            more => (more / PROMPT_PART).max(1).max(first.min(more)),
        };
        let drafts = of(&ready.decode, |s| s.drafts);
        let wanted = decoding.saturating_add(asked).saturating_add(drafts);
        let scored = of(&ready.prompts, |s| match s.arrival.kind {
            _ if s.arrival.whole => 1,
            Kind::Generate => 1,
            Kind::Score => s.rows_ahead(),
            Kind::Embed => 0,
        });
        let least = self.least_rows_of(model.model, view);
        let shape = Shape {
            rows: wanted,
            outputs: decoding.saturating_add(drafts).saturating_add(scored),
        }
        .within(view, model, least, bytes);
        let left = shape.rows.saturating_sub(decoding);
        let prompts = asked.min(left.max(kept(shape.rows)));
        Rows {
            decode: (decoding.min(shape.rows - prompts)) as usize,
            prompts,
            outputs_at_a_time: shape.outputs,
            most: shape.rows,
        }
    }

    /// If a pass has room for one sequence only, keeps the one that was left out longest.
    fn keep_the_longest_waiting(&self, ready: &mut Ready) {
        let waited = |seqs: &[SeqId]| seqs.iter().map(|seq| self.sequences[seq].last_pass).min();
        let (decode, prompts) = (waited(&ready.decode), waited(&ready.prompts));
        match (decode, prompts) {
            (Some(decode), Some(prompt)) if prompt < decode => ready.decode.clear(),
            (Some(_), Some(_)) => ready.prompts.clear(),
            _ => {}
        }
    }

    /// The sequences of a model that can go on.
    fn ready(&self, model: ModelId) -> Ready {
        let of_model = |s: &&Sequence| s.arrival.model == model && s.runnable();
        let (mut decode, mut prompts): (Vec<&Sequence>, Vec<&Sequence>) = self
            .running_sequences()
            .filter(of_model)
            .partition(|s| s.decodes());
        decode.sort_by_key(|s| (s.last_pass, s.seniority()));
        prompts.sort_by_key(|s| self.prompt_order(s));
        let names = |seqs: Vec<&Sequence>| seqs.into_iter().map(|s| s.arrival.seq).collect();
        Ready {
            decode: names(decode),
            prompts: names(prompts),
        }
    }

    /// Sort key of prompts: the lowest goes first. All prompts of a client and class are overdue
    /// together, so that the one that arrived first among them stays first.
    fn prompt_order(&self, s: &Sequence) -> (bool, u64, Class, u64, ClientId, u64) {
        let (client, class) = (s.arrival.client, s.arrival.class);
        let at = self.queues.queue(client, class).prompt_at;
        let overdue = self.passes - at >= self.config.patience_passes;
        let class = match (overdue, class) {
            (true, _) => Class::Interactive,
            (false, class) => class,
        };
        let service = self.queues.service(client);
        let since = if overdue { at } else { 0 };
        (!overdue, since, class, service, client, s.number)
    }

    /// Charges the sequences and clients of a planned pass.
    fn charge(&mut self, plan: &PassPlan) {
        for (at, span) in plan.spans.iter().enumerate() {
            let s = self.sequences.get_mut(&span.seq).expect("it runs");
            s.last_pass = self.passes;
            let (client, class) = (s.arrival.client, s.arrival.class);
            let decode = at < plan.decode_spans;
            if !decode {
                self.queues.queue_mut(client, class).prompt_at = self.passes;
            }
        }
    }

    /// Whether the pass after this one is expected to be of the same model.
    fn expects_next(&self, plan: &PassPlan, view: &View<'_>) -> bool {
        let mut after = self.candidates_after(plan);
        let mut waiting = self.sequences.values().filter(|s| !s.running && s.ready);
        if !after.iter().any(|c| c.model == plan.model) {
            let Some(s) = waiting.find(|s| s.arrival.model == plan.model) else {
                return false;
            };
            after.push(Candidate {
                model: plan.model,
                interactive: s.class() == Class::Interactive,
            });
        }
        let usual = self.turns.usual_us(plan.model).max(1);
        let ahead = Some((plan.model, usual));
        let next = self.turns.pick(&after, ahead, (view, &self.config));
        next == Some(plan.model)
    }
}

/// Whether a sequence needs no further pass after this one.
fn ends_with(s: &Sequence, plan: &PassPlan) -> bool {
    // First what is known of itself: of many sequences few end with a pass.
    s.ends_when_computed() && {
        let span = plan.spans.iter().find(|span| span.seq == s.arrival.seq);
        span.is_some_and(|span| span.rows >= s.ahead())
    }
}

/// The models of some sequences, as candidates.
fn candidates<'a>(sequences: impl Iterator<Item = &'a Sequence>) -> Vec<Candidate> {
    let mut candidates: Vec<Candidate> = Vec::new();
    for s in sequences {
        let interactive = s.class() == Class::Interactive;
        match candidates.iter_mut().find(|c| c.model == s.arrival.model) {
            Some(known) => known.interactive |= interactive,
            None => candidates.push(Candidate {
                model: s.arrival.model,
                interactive,
            }),
        }
    }
    candidates
}
