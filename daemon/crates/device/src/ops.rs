//! What a pass brings to the operations of a plan: its rows, its sequences and where their memory is.

use rocmforge_kernels::host::ops::RopeAngles;

pub use rocmforge_ops::buf::PlacedBuf;
pub use rocmforge_ops::*;

/// A page that a sequence does not hold: behind the window of its group.
pub const NO_PAGE: u64 = u64::MAX;

/// Rows of one sequence in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    /// Its first row in the batch.
    pub first_row: usize,
    /// Its rows, in the order of their positions.
    pub n_rows: usize,
    /// Position of the first row in its sequence.
    pub first_position: u32,
    /// For each group of KV the arena offsets of the sequence's pages, in order; they cover `first_position + n_rows`
    /// positions. [`NO_PAGE`] where no row of the span reads.
    pub kv_pages: &'a [&'a [u64]],
    /// Arena offset of the sequence's recurrent state; unused by plans without. What it holds counts as zero where the
    /// span begins at position 0.
    pub state: u64,
}

/// What a pass works on. Spans lie one after another and cover all rows.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Rows (tokens).
    pub n_tokens: usize,
    /// Sequences.
    pub spans: &'a [Span<'a>],
    /// The groups of KV of this model.
    pub kv: &'a [KvGroup],
    /// Cosine and sine of each row's rotations, for each table of the plan.
    pub rope: &'a [RopeAngles],
    /// Rows whose logits are wanted, for operations on output rows.
    pub outputs: &'a [u32],
}

impl Batch<'_> {
    /// How many rows buffers have.
    pub fn counts(&self) -> RowCounts {
        RowCounts {
            tokens: self.n_tokens as u64,
            outputs: self.outputs.len() as u64,
        }
    }

    /// Position of each row, in order.
    pub fn positions(&self) -> impl Iterator<Item = u32> + '_ {
        self.spans
            .iter()
            .flat_map(|s| (s.first_position..).take(s.n_rows))
    }
}
