//! Runs of an MTP head after the passes of its model.

use std::sync::Arc;
use std::time::Instant;

use rocmforge_device::Span;
use rocmforge_ops::RowCounts;
use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::ModelId;

use crate::api::RequestCacheUse;
use crate::api::error::Error;
use crate::features::context::{Context, model_of};
use crate::features::speculation::mtp::{DraftRows, MtpHead};
use crate::features::speculation::state::Speculation;
use crate::memory::Memory;
use crate::model::embedding_rows;
use crate::model::loaded::LoadedModel;
use crate::model::rotations::{self, Coordinates, Positions};
use crate::pass::inputs::extend_bytes;
use crate::pass::member::{Member, RowsOutcome};
use crate::pass::slices;
use crate::pass::spec::Pass;
use crate::request::task::{Task, Work};

/// A sequence's rows in a run of the MTP head.
struct MtpRows {
    member: usize,
    /// Index of the sequence's first row in the pass.
    first: usize,
    n: usize,
    /// Whether the token after the last row was chosen in this pass, so that the head can draft the
    /// next one.
    drafts: bool,
}

impl Speculation {
    /// Runs the MTP head after a pass whose tokens were taken by their requests. Returns whether it
    /// found no memory, so that its model stops using it.
    pub(crate) fn predict(
        &mut self,
        cx: &mut Context<'_>,
        plan: &PassPlan,
        members: &mut [Member],
        begun: Instant,
    ) -> bool {
        let model = model_of(plan);
        if !wants_stream(members) {
            self.rest_mtp(cx, model);
            return false;
        }
        let rows = rows_to_predict(cx.memory, members);
        if rows.is_empty() {
            return false;
        }
        let decodes = plan.spans.len() == plan.decode_spans;
        let Some(mtp) = self.mtp_mut(model) else {
            return false;
        };
        if let Err(error) = run(cx, mtp, plan, members, &rows) {
            // The pass itself has all that it needs: a shortage here is no reason to do it again.
            let short = cx.memory.store.take_refused_bytes().is_some();
            tracing::debug!(%error, "the MTP head failed");
            for of in &rows {
                members[of.member].task.stop_predicting(cx.memory);
            }
            return short;
        }
        if decodes {
            let took = cx.memory.store.clock.now() - begun;
            mtp.note(took.as_secs_f64());
        }
        false
    }

    /// Marks a model's MTP head as idle if no request drafts with it any more, so that its segments
    /// can be evicted.
    fn rest_mtp(&self, cx: &mut Context<'_>, model: ModelId) {
        let Some(mtp) = self.mtp_of(model) else {
            return;
        };
        let drafts = |t: &Task| t.predicts && t.begun && t.model == model;
        if !cx.requests.all().any(drafts) {
            cx.memory.store.cache.request_end(mtp.id);
        }
    }
}

/// Whether the pass's hidden states are needed for the MTP head.
pub(crate) fn wants_stream(members: &[Member]) -> bool {
    members.iter().any(|m| m.task.predicts)
}

/// The rows of a pass that the MTP head computes. A sequence that cannot go on with the head stops
/// using it.
fn rows_to_predict(memory: &mut Memory, members: &mut [Member]) -> Vec<MtpRows> {
    let mut rows = Vec::with_capacity(members.len());
    let mut first = 0;
    for (i, member) in members.iter_mut().enumerate() {
        let (at, n) = (first, member.rows() as usize);
        first += member.span.rows as usize;
        let goes_on = matches!(member.stepped, RowsOutcome::GoesOn | RowsOutcome::Appended);
        let task = &mut member.task;
        if !task.predicts || !goes_on || n == 0 {
            continue;
        }
        if task.n_past == 0 {
            task.memory.set_predicted(0);
        }
        let drafts = matches!(member.stepped, RowsOutcome::Appended);
        let tired = match &mut task.work {
            Work::Generate(g) => drafts && g.drafts.is_tired(),
            Work::Score(_) | Work::Embed(_) | Work::Tower(_) => true,
        };
        let complete = task.memory.predicted() == Some(task.n_past);
        if tired || !complete || task.tokens.len() <= task.n_past + n {
            task.stop_predicting(memory);
            continue;
        }
        rows.push(MtpRows {
            member: i,
            first: at,
            n,
            drafts,
        });
    }
    rows
}

fn run(
    cx: &mut Context<'_>,
    mtp: &mut MtpHead,
    plan: &PassPlan,
    members: &mut [Member],
    rows: &[MtpRows],
) -> Result<(), Error> {
    let model = model_of(plan);
    let entry = cx
        .models
        .get(model)
        .ok_or_else(|| Error::Internal("a request keeps its model registered".to_owned()))?;
    let loaded = Arc::clone(&entry.loaded);
    let n_tokens = rows.iter().map(|of| of.n).sum::<usize>();
    let layout = mtp.plan.scratch(RowCounts {
        tokens: n_tokens as u64,
        outputs: u64::from(plan.outputs_at_a_time),
    });
    let bytes = layout.bytes + cx.memory.store.device.workspace_bytes(&layout);
    let (has, scratch_at) = cx.scratch();
    if bytes > has {
        let message = "the pass's scratch is too small for the MTP head";
        return Err(Error::Internal(message.to_owned()));
    }
    cx.memory.store.prepare_anew(mtp.id, &mtp.plan);
    prepare(cx, mtp, &loaded, members, rows)?;
    for of in rows {
        let task = &mut members[of.member].task;
        let end = task.n_past + of.n;
        let memory = &mut task.memory;
        memory.prepare_predicting(cx.memory, model, &mtp.plan, end)?;
    }
    let pages = rows
        .iter()
        .map(|of| members[of.member].task.memory.predicting_pages());
    let pages: Vec<Vec<&[u64]>> = pages.collect();
    let spans = spans_of(rows, members, &pages);
    // The rows whose logits are wanted, and whose each of them is.
    let wanted = rows.iter().zip(&spans).filter(|(of, _)| of.drafts);
    let last_row = |span: &Span<'_>| (span.first_row + span.n_rows) as u32 - 1;
    let (outputs, owners): (Vec<u32>, Vec<usize>) =
        wanted.map(|(of, span)| (last_row(span), of.member)).unzip();
    let pass = Pass {
        model: mtp.id,
        plan: &mtp.plan,
        adapted: false,
        angles: &cx.space.angles,
        spans: &spans,
        parts: &[],
        n_tokens,
        outputs: &outputs,
        hidden: &[],
        given: &[],
        expects_next_pass: plan.expects_next,
        scratch: &layout,
        scratch_at,
        prefetch: cx.space.prefetch,
        interests: &[],
    };
    let mut counts = RequestCacheUse::default();
    let mut drafts = DraftRows::with_capacity(owners.len());
    slices::run(cx.memory, &pass, &cx.space.inputs, &mut counts, &mut drafts)?;
    for of in rows {
        let task = &mut members[of.member].task;
        task.memory.set_predicted(task.n_past + of.n);
        task.counts.add(&counts);
    }
    for (owner, draft) in owners.into_iter().zip(drafts.tokens) {
        let task = &mut members[owner].task;
        let known = task.tokens.len();
        if let (Work::Generate(g), Some(draft)) = (&mut task.work, draft) {
            g.drafts.foretell(known, draft);
        }
    }
    Ok(())
}

/// The spans of an MTP head's run, one after the other.
fn spans_of<'a>(
    rows: &[MtpRows],
    members: &[Member],
    pages: &'a [Vec<&'a [u64]>],
) -> Vec<Span<'a>> {
    let mut first_row = 0;
    let span = |(of, pages): (&MtpRows, &'a Vec<&'a [u64]>)| {
        let span = Span {
            first_row,
            n_rows: of.n,
            first_position: members[of.member].task.n_past as u32,
            kv_pages: pages,
            state: 0,
            state_out: 0,
            whole: false,
            draft: false,
        };
        first_row += of.n;
        span
    };
    rows.iter().zip(pages).map(span).collect()
}

/// Sets the RoPE angles and the inputs of an MTP head's run: the token after each row, and the
/// row's hidden state.
fn prepare(
    cx: &mut Context<'_>,
    mtp: &mut MtpHead,
    loaded: &LoadedModel,
    members: &[Member],
    rows: &[MtpRows],
) -> Result<(), Error> {
    if mtp.rope.is_empty() {
        let _waiting = cx.memory.store.files.begin(loaded.name(), loaded.path());
        mtp.rope = rotations::tables(loaded, &mtp.plan)?;
    }
    let sequences = rows.iter().map(|of| Positions {
        first: members[of.member].task.n_past,
        n: of.n,
        reach: members[of.member].task.reach,
        coordinates: Coordinates::Text,
    });
    let space = &mut *cx.space;
    rotations::set_angles(&mtp.plan, &mtp.rope, sequences, &mut space.angles);
    let width = loaded.model().hparams().n_embd as usize;
    space.ids.clear();
    space.inputs.resize_with(2, Vec::new);
    let [table, streams] = space.inputs.as_mut_slice() else {
        return Err(Error::Internal("the MTP head has two inputs".to_owned()));
    };
    streams.clear();
    for of in rows {
        let task = &members[of.member].task;
        let behind = task.n_past + 1..task.n_past + 1 + of.n;
        space.ids.extend_from_slice(&task.tokens[behind]);
        let of_rows = &space.stream[of.first * width..][..of.n * width];
        extend_bytes(streams, of_rows);
    }
    let _waiting = cx.memory.store.files.begin(loaded.name(), loaded.path());
    embedding_rows::rows(loaded, &mtp.plan.inputs[0].table, &space.ids, table)
}
