//! Forward passes of a draft model: catching up with its sequences, and one row for each draft
//! token.

use std::time::Duration;

use rocmforge_device::Span;
use rocmforge_ops::RowCounts;
use rocmforge_tensor_cache::ModelId;

use crate::api::RequestCacheUse;
use crate::api::error::Error;
use crate::features::context::{Context, shared_rows_max};
use crate::features::speculation::draft_choice::{Ahead, FEW_ROWS, Run};
use crate::features::speculation::mtp::DraftRows;
use crate::features::speculation::state::Speculation;
use crate::model::rotations::{self, Coordinates, Positions};
use crate::pass::costs::{Sizes, TableParts, spans_within, table_entries};
use crate::pass::inputs;
use crate::pass::member::Member;
use crate::pass::slices;
use crate::pass::spec::Pass;

/// Purpose of a pass of a draft model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum For {
    /// Compute KV cache of tokens that the draft model lacks; no logits.
    CatchUp,
    /// Compute the next token after the last row of each sequence. Each row is a span of its own,
    /// as in decoding.
    Drafts,
    /// As `Drafts`, but in chunks, if the logits of all rows do not fit at once.
    DraftsInChunks,
}

impl Speculation {
    /// Computes a chunk of the tokens that a draft model lacks of its sequences, for those that
    /// lack many.
    pub(super) fn catch_up(
        &mut self,
        cx: &mut Context<'_>,
        run: &Run,
        members: &mut [Member],
        ahead: &mut [Ahead],
    ) -> Result<(), Error> {
        let lacks = |of: &Ahead| members[of.member].task.tokens.len() - of.kv.past;
        if ahead.iter().all(|of| lacks(of) <= FEW_ROWS) {
            return Ok(());
        }
        // Others wait for their next token meanwhile.
        let mut rows = match run.rows {
            1 => cx.space.prefill_chunk.get(),
            _ => shared_rows_max(cx.space) as usize,
        };
        while rows > 1 && !self.has_scratch(cx, run, rows, 1) {
            rows /= 2;
        }
        let mut left = rows;
        for of in &mut *ahead {
            // The last one is for the draft.
            let n = match lacks(of) {
                lacks if lacks > FEW_ROWS => (lacks - 1).min(left),
                _ => 0,
            };
            left -= n;
            let tokens = &members[of.member].task.tokens[of.kv.past..];
            of.ids.clear();
            of.ids.extend_from_slice(&tokens[..n]);
        }
        let begun = cx.memory.store.clock.now();
        draft_pass(cx, run, members, ahead, For::CatchUp, true)?;
        for of in &mut *ahead {
            of.kv.past += of.ids.len();
            of.ids.clear();
        }
        let seconds = (cx.memory.store.clock.now() - begun).as_secs_f64() / (rows - left) as f64;
        if let Some(pair) = self.draft_model_mut(run.model) {
            // The first ones bring weights with them, too.
            pair.row_seconds = match pair.row_seconds {
                0.0 => seconds,
                known => known.min(seconds) + (known.max(seconds) - known.min(seconds)) / 8.0,
            };
        }
        Ok(())
    }

    /// Drafts tokens for the sequences of which the draft model lacks only few tokens.
    pub(super) fn draft_for(
        &mut self,
        cx: &mut Context<'_>,
        run: &Run,
        members: &mut [Member],
        ahead: &mut [Ahead],
    ) -> Result<(), Error> {
        let plan = run.loaded.model().plan();
        let longest = members.iter().map(|m| m.task.tokens.len()).max();
        let entries = table_entries(
            &plan.kv,
            longest.unwrap_or(0) + FEW_ROWS,
            TableParts::default(),
        );
        let spans = spans_within(&*cx.memory.store.device, entries) as usize;
        let mut rows = 0;
        let mut sequences = 0;
        for of in &mut *ahead {
            let unknown = &members[of.member].task.tokens[of.kv.past..];
            let (n, m) = (rows + unknown.len(), sequences + 1);
            // Those that have no room have drafts another time.
            if unknown.len() > FEW_ROWS || n > spans || !self.has_scratch(cx, run, n, 1) {
                of.wanted = 0;
                continue;
            }
            of.ids.extend_from_slice(unknown);
            (rows, sequences) = (n, m);
        }
        if rows == 0 {
            return Ok(());
        }
        let what = match self.has_scratch(cx, run, rows, rows) {
            true => For::Drafts,
            false => For::DraftsInChunks,
        };
        let most = ahead.iter().map(|of| of.wanted).max().unwrap_or(0);
        for n in 1..=most {
            let rows: usize = ahead.iter().map(|of| of.ids.len()).sum();
            if rows == 0 {
                break;
            }
            let begun = cx.memory.store.clock.now();
            let found = draft_pass(cx, run, members, ahead, what, n < most)?;
            if what == For::Drafts {
                note_draft_pass(cx, run.id, rows, cx.memory.store.clock.now() - begun);
            }
            let mut found = found.into_iter();
            for of in ahead.iter_mut().filter(|of| !of.ids.is_empty()) {
                let known = members[of.member].task.tokens.len();
                match of.kv.past < known {
                    true => of.kv.past = known,
                    false => of.kv.guessed.extend_from_slice(&of.ids),
                }
                of.ids.clear();
                // What is not finite is the draft model's affair.
                if let Some(Some(draft)) = found.next() {
                    of.drafts.push(draft);
                    of.ids
                        .extend((of.drafts.len() < of.wanted).then_some(draft));
                }
            }
        }
        Ok(())
    }

    /// Whether the scratch of the model's pass is large enough for a pass of the draft model.
    fn has_scratch(&self, cx: &Context<'_>, run: &Run, rows: usize, outputs: usize) -> bool {
        let sizes = Sizes::new(cx.models, self, &*cx.memory.store.device, cx.space);
        sizes.scratch(run.id, rows as u32, outputs as u32) <= cx.space.scratch_bytes()
    }
}

/// Notes the time of a pass of the draft model with `rows` rows.
fn note_draft_pass(cx: &mut Context<'_>, id: ModelId, rows: usize, took: Duration) {
    if let Some(entry) = cx.models.get_mut(id) {
        entry.times.note(rows, took);
    }
}

/// The first position of a sequence that a draft model's next pass computes.
fn first_of(of: &Ahead) -> usize {
    of.kv.past + of.kv.guessed.len()
}

/// Runs a pass of the draft model over the `ids` of each sequence, which follow what was computed
/// of it. For drafts, returns the most likely token after the last row of each sequence that has
/// rows.
fn draft_pass(
    cx: &mut Context<'_>,
    run: &Run,
    members: &mut [Member],
    ahead: &mut [Ahead],
    what: For,
    expects_next_pass: bool,
) -> Result<Vec<Option<u32>>, Error> {
    prepare(cx, run, members, ahead)?;
    let (id, plan) = (run.id, run.loaded.model().plan());
    cx.memory.store.prepare_anew(id, plan);
    let n_tokens = cx.space.ids.len();
    let pages: Vec<Vec<&[u64]>> = ahead.iter().map(|of| of.kv.pages.pages()).collect();
    let (spans, outputs) = rows_of(ahead, &pages, what);
    let outputs_at_a_time = match what {
        For::Drafts => n_tokens,
        For::CatchUp | For::DraftsInChunks => 1,
    };
    let layout = plan.scratch(RowCounts {
        tokens: n_tokens as u64,
        outputs: outputs_at_a_time as u64,
    });
    let bytes = layout.bytes + cx.memory.store.device.workspace_bytes(&layout);
    let (has, scratch_at) = cx.scratch();
    if bytes > has {
        let message = "the pass's scratch is too small for the draft model";
        return Err(Error::Internal(message.to_owned()));
    }
    let pass = Pass {
        model: id,
        plan,
        adapted: false,
        angles: &cx.space.angles,
        spans: &spans,
        parts: &[],
        n_tokens,
        outputs: &outputs,
        hidden: &[],
        given: &[],
        expects_next_pass,
        scratch: &layout,
        scratch_at,
        prefetch: cx.space.prefetch,
        interests: &[],
    };
    let mut counts = RequestCacheUse::default();
    let mut found = DraftRows::with_capacity(outputs.len());
    slices::run(cx.memory, &pass, &cx.space.inputs, &mut counts, &mut found)?;
    let mut found = found.tokens;
    if what == For::Drafts {
        // Those behind the last row of each.
        let mut end = 0;
        let last = ahead.iter().filter(|of| !of.ids.is_empty()).map(|of| {
            end += of.ids.len();
            end - 1
        });
        found = last.map(|row| found.get(row).copied().flatten()).collect();
    }
    for of in ahead.iter().filter(|of| !of.ids.is_empty()) {
        members[of.member].task.counts.add(&counts);
    }
    Ok(found)
}

/// Allocates KV pages for a draft model's pass, and sets its RoPE angles and inputs.
fn prepare(
    cx: &mut Context<'_>,
    run: &Run,
    members: &[Member],
    ahead: &mut [Ahead],
) -> Result<(), Error> {
    let (id, loaded) = (run.id, &run.loaded);
    let plan = loaded.model().plan();
    for of in ahead.iter_mut().filter(|of| !of.ids.is_empty()) {
        let end = first_of(of) + of.ids.len();
        // Drafts that turn out wrong are written over: what is read from their place on stays.
        let from = of.kv.past;
        let pages = &mut of.kv.pages;
        pages.prepare(cx.memory, (id, plan), (from, end), end)?;
    }
    let entry = cx
        .models
        .get_mut(id)
        .ok_or_else(|| Error::Internal("a draft model that is not registered".to_owned()))?;
    if entry.rope.is_empty() {
        let _waiting = cx.memory.store.files.begin(loaded.name(), loaded.path());
        entry.rope = rotations::tables(loaded, plan)?;
    }
    let sequences = ahead.iter().map(|of| Positions {
        first: first_of(of),
        n: of.ids.len(),
        reach: members[of.member].task.reach,
        coordinates: Coordinates::Text,
    });
    let space = &mut *cx.space;
    rotations::set_angles(plan, &entry.rope, sequences, &mut space.angles);
    space.ids.clear();
    for of in &*ahead {
        space.ids.extend_from_slice(&of.ids);
    }
    let _waiting = cx.memory.store.files.begin(loaded.name(), loaded.path());
    inputs::of_text(loaded, plan, &space.ids, &mut space.inputs)
}

/// The spans of a draft model's pass, and the indices of the rows whose logits are needed.
fn rows_of<'a>(
    ahead: &[Ahead],
    pages: &'a [Vec<&'a [u64]>],
    what: For,
) -> (Vec<Span<'a>>, Vec<u32>) {
    let mut spans: Vec<Span<'_>> = Vec::new();
    let mut outputs = Vec::new();
    let mut first_row = 0;
    let with_rows = ahead.iter().zip(pages).filter(|(of, _)| !of.ids.is_empty());
    for (of, pages) in with_rows {
        let span = Span {
            first_row,
            n_rows: of.ids.len(),
            first_position: first_of(of) as u32,
            kv_pages: pages,
            whole: false,
            draft: false,
            state: 0,
            state_out: 0,
        };
        if what == For::Drafts {
            spans.extend((0..span.n_rows).map(|row| Span {
                first_row: first_row + row,
                n_rows: 1,
                first_position: span.first_position + row as u32,
                // It reads what those before it append.
                draft: row > 0,
                ..span
            }));
        } else {
            spans.push(span);
        }
        first_row += of.ids.len();
        match what {
            For::CatchUp => {}
            For::Drafts => outputs.extend(span.first_row as u32..first_row as u32),
            For::DraftsInChunks => outputs.push(first_row as u32 - 1),
        }
    }
    (spans, outputs)
}
