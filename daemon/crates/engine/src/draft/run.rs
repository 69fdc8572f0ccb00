//! The passes of a draft model: over what it does not know of its sequences, and a row a draft.

use std::time::{Duration, Instant};

use rocmforge_device::Span;
use rocmforge_ops::RowCounts;

use super::{Ahead, FEW_ROWS, Run};
use crate::actor::Engine;
use crate::api::RequestCacheUse;
use crate::embedding_rows;
use crate::error::Error;
use crate::member::Member;
use crate::pass::{self, Interest, Pass, RowOutput};
use crate::predict::best_of;
use crate::rotations::{self, Positions};
use crate::schedule::table_entries;

/// What a pass of a draft model is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum For {
    /// Keys and values.
    CatchUp,
    /// The token behind the last row of each sequence. Each row is a span of its own, as
    /// where tokens are generated.
    Drafts,
    /// The same, where that many logits have no room.
    DraftsInChunks,
}

impl Engine {
    /// Computes a chunk of what a draft model lacks of its sequences, where that is much.
    pub(super) fn catch_up(
        &mut self,
        run: &Run,
        members: &mut [Member],
        ahead: &mut [Ahead],
    ) -> Result<(), Error> {
        let lacks = |of: &Ahead| members[of.member].task.tokens.len() - of.memory.past;
        if ahead.iter().all(|of| lacks(of) <= FEW_ROWS) {
            return Ok(());
        }
        // Others wait for their next token meanwhile.
        let mut rows = match run.rows {
            1 => self.prefill_chunk.get(),
            _ => self.shared_rows_max() as usize,
        };
        while rows > 1 && !self.has_scratch(run, rows, 1) {
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
            let tokens = &members[of.member].task.tokens[of.memory.past..];
            of.ids.clear();
            of.ids.extend_from_slice(&tokens[..n]);
        }
        let begun = Instant::now();
        self.draft_pass(run, members, ahead, For::CatchUp, true)?;
        for of in &mut *ahead {
            of.memory.past += of.ids.len();
            of.ids.clear();
        }
        let seconds = begun.elapsed().as_secs_f64() / (rows - left) as f64;
        if let Some(pair) = self.draft_entry(run.model) {
            // The first ones bring weights with them, too.
            pair.row_seconds = match pair.row_seconds {
                0.0 => seconds,
                known => known.min(seconds) + (known.max(seconds) - known.min(seconds)) / 8.0,
            };
        }
        Ok(())
    }

    /// Drafts for those sequences of which the draft model lacks little.
    pub(super) fn draft_for(
        &mut self,
        run: &Run,
        members: &mut [Member],
        ahead: &mut [Ahead],
    ) -> Result<(), Error> {
        let plan = run.loaded.model().plan();
        let longest = members.iter().map(|m| m.task.tokens.len()).max();
        let entries = table_entries(plan, longest.unwrap_or(0) + FEW_ROWS);
        let spans = self.spans_within(entries) as usize;
        let mut rows = 0;
        let mut sequences = 0;
        for of in &mut *ahead {
            let unknown = &members[of.member].task.tokens[of.memory.past..];
            let (n, m) = (rows + unknown.len(), sequences + 1);
            // Those that have no room have drafts another time.
            if unknown.len() > FEW_ROWS || n > spans || !self.has_scratch(run, n, 1) {
                of.wanted = 0;
                continue;
            }
            of.ids.extend_from_slice(unknown);
            (rows, sequences) = (n, m);
        }
        if rows == 0 {
            return Ok(());
        }
        let what = match self.has_scratch(run, rows, rows) {
            true => For::Drafts,
            false => For::DraftsInChunks,
        };
        let most = ahead.iter().map(|of| of.wanted).max().unwrap_or(0);
        for n in 1..=most {
            let rows: usize = ahead.iter().map(|of| of.ids.len()).sum();
            if rows == 0 {
                break;
            }
            let begun = Instant::now();
            let found = self.draft_pass(run, members, ahead, what, n < most)?;
            if what == For::Drafts {
                self.note_draft_pass(run, rows, begun.elapsed());
            }
            let mut found = found.into_iter();
            for of in ahead.iter_mut().filter(|of| !of.ids.is_empty()) {
                let known = members[of.member].task.tokens.len();
                match of.memory.past < known {
                    true => of.memory.past = known,
                    false => of.memory.guessed.extend_from_slice(&of.ids),
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

    fn note_draft_pass(&mut self, run: &Run, rows: usize, took: Duration) {
        if let Some(entry) = self.models.iter_mut().find(|e| e.id == run.id) {
            entry.times.note(rows, took);
        }
    }

    /// Whether the pass's scratch is enough for a pass of the draft model.
    fn has_scratch(&self, run: &Run, rows: usize, outputs: usize) -> bool {
        let has = self.scratch.map_or(0, |s| s.1);
        self.scratch_bytes(run.id, rows, outputs) <= has
    }

    /// A pass of the draft model over the `ids` of each sequence, which are behind
    /// what was computed of it. For drafts, the best token behind the last row of
    /// each sequence that has rows.
    fn draft_pass(
        &mut self,
        run: &Run,
        members: &mut [Member],
        ahead: &mut [Ahead],
        what: For,
        expects_next_pass: bool,
    ) -> Result<Vec<Option<u32>>, Error> {
        let internal = |what: &str| Error::Internal(what.to_owned());
        let (id, loaded) = (run.id, &run.loaded);
        let plan = loaded.model().plan();
        let first = |of: &Ahead| of.memory.past + of.memory.guessed.len();
        for of in ahead.iter_mut().filter(|of| !of.ids.is_empty()) {
            let end = first(of) + of.ids.len();
            // Drafts that turn out wrong are written over: what is read from their place on stays.
            let from = of.memory.past;
            let pages = &mut of.memory.pages;
            pages.prepare(&mut self.store, (id, plan), (from, end), end)?;
        }

        // Rotations and inputs.
        let entry = self.models.iter_mut().find(|e| e.id == id);
        let entry = entry.ok_or_else(|| internal("a draft model that is not registered"))?;
        if entry.rope.is_empty() {
            let _waiting = self.store.files.begin(loaded.name(), loaded.path());
            entry.rope = rotations::tables(loaded, plan)?;
        }
        let sequences = ahead.iter().map(|of| Positions {
            first: first(of),
            n: of.ids.len(),
            reach: members[of.member].task.reach,
        });
        rotations::set_angles(plan, &entry.rope, sequences, &mut self.angles);
        self.ids.clear();
        for of in &*ahead {
            self.ids.extend_from_slice(&of.ids);
        }
        self.inputs.resize_with(plan.inputs.len(), Vec::new);
        let waiting = self.store.files.begin(loaded.name(), loaded.path());
        for (input, rows) in plan.inputs.iter().zip(&mut self.inputs) {
            embedding_rows::rows(loaded, &input.table, &self.ids, rows)?;
        }
        drop(waiting);

        let n_tokens = self.ids.len();
        let pages: Vec<Vec<&[u64]>> = ahead.iter().map(|of| of.memory.pages.pages()).collect();
        let mut spans: Vec<Span<'_>> = Vec::with_capacity(n_tokens);
        let mut outputs = Vec::new();
        let mut first_row = 0;
        for (of, pages) in ahead
            .iter()
            .zip(&pages)
            .filter(|(of, _)| !of.ids.is_empty())
        {
            let span = Span {
                first_row,
                n_rows: of.ids.len(),
                first_position: first(of) as u32,
                kv_pages: pages,
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
        let outputs_at_a_time = match what {
            For::Drafts => n_tokens,
            For::CatchUp | For::DraftsInChunks => 1,
        };
        let layout = plan.scratch(RowCounts {
            tokens: n_tokens as u64,
            outputs: outputs_at_a_time as u64,
        });
        let bytes = layout.bytes + self.store.device.workspace_bytes(&layout);
        let (block, has) = self.scratch.ok_or_else(|| internal("a pass has scratch"))?;
        if bytes > has {
            return Err(internal(
                "the pass's scratch is too small for the draft model",
            ));
        }
        let pass = Pass {
            model: id,
            plan,
            angles: &self.angles,
            spans: &spans,
            n_tokens,
            outputs: &outputs,
            hidden: &[],
            expects_next_pass,
            scratch: &layout,
            scratch_at: self.store.cache.block(block).offset,
            prefetch: self.prefetch,
            interest: Interest::Best,
        };
        let mut counts = RequestCacheUse::default();
        let mut found: Vec<Option<u32>> = Vec::with_capacity(outputs.len());
        let mut sink = |_, output: RowOutput<'_>| {
            found.push(best_of(&output));
            Ok(())
        };
        let store = &mut self.store;
        pass::run(
            store,
            &pass,
            &self.inputs,
            &mut counts,
            &|| None,
            &|| (),
            &mut sink,
        )?;
        drop(spans);
        drop(pages);
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
            let to = &mut members[of.member].task.counts;
            to.hits += counts.hits;
            to.misses += counts.misses;
            to.uploaded_bytes += counts.uploaded_bytes;
            to.host_bytes += counts.host_bytes;
        }
        Ok(found)
    }
}
