//! What the recurrent operations have in common: a state that a sequence keeps from call to
//! call, changed row by row.
//!
//! A call has the rows of several sequences, each sequence's in order. Its work items are a
//! sequence times a part of the state that no other part depends on: a head, or some channels.
//!
//! *Invariant:* a sequence's rows in one call or in several give the same bits of output and state
//! (`agrees_with_f64_however_the_rows_come` of each operation).

use crate::{Pool, SyncPtr};

/// Rows whose inputs an item prepares at once, so that they stay in the second-level cache.
pub(super) const CHUNK_ROWS: usize = 32;

/// Consecutive rows of one sequence, and its state.
#[derive(Debug)]
pub struct StateSpan<'a> {
    /// Rows.
    pub n_rows: usize,
    /// The operation's own part of the sequence's state: what the rows before these left,
    /// afterwards what these leave.
    pub state: &'a mut [f32],
}

/// One work item of a recurrent operation.
pub(super) struct Item<'a> {
    /// The span's first row.
    pub(super) first_row: usize,
    /// The span's rows.
    pub(super) n_rows: usize,
    /// Which part of the state.
    pub(super) part: usize,
    state: &'a SyncPtr<f32>,
    state_len: usize,
}

impl Item<'_> {
    /// A piece of the span's state.
    ///
    /// # Safety
    /// Pieces that are in use at the same time do not overlap.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the pieces apart")]
    pub(super) unsafe fn state(&self, at: usize, len: usize) -> &mut [f32] {
        assert!(at + len <= self.state_len, "a piece of another state");
        // SAFETY: inside the span's state, which is mutably borrowed as long as the item;
        // the rest is the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.state.get().add(at), len) }
    }
}

/// The rows of all spans.
pub(super) fn rows(spans: &[StateSpan<'_>]) -> usize {
    spans.iter().map(|span| span.n_rows).sum()
}

/// Calls `f` for each of `n_parts` parts of each span's state, `chunk` at a time a thread.
pub(super) fn run_parts(
    pool: &Pool,
    spans: &mut [StateSpan<'_>],
    n_parts: usize,
    chunk: usize,
    f: impl Fn(Item<'_>) + Sync,
) {
    let mut first_row = 0;
    let places: Vec<(usize, usize, SyncPtr<f32>, usize)> = spans
        .iter_mut()
        .map(|span| {
            let first = first_row;
            first_row += span.n_rows;
            (
                first,
                span.n_rows,
                SyncPtr(span.state.as_mut_ptr()),
                span.state.len(),
            )
        })
        .collect();
    pool.run(places.len() * n_parts, chunk, |items| {
        for item in items {
            let (first_row, n_rows, state, state_len) = &places[item / n_parts];
            if *n_rows > 0 {
                f(Item {
                    first_row: *first_row,
                    n_rows: *n_rows,
                    part: item % n_parts,
                    state,
                    state_len: *state_len,
                });
            }
        }
    });
}
