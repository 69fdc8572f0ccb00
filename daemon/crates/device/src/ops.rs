//! What a pass brings to the operations of a plan: its rows, its sequences and where their memory
//! is.

use rocmforge_kernels_cpu::ops::RopeAngles;

pub use rocmforge_ops::buf::PlacedBuf;
pub use rocmforge_ops::*;

/// A page that a sequence does not hold: behind the window of its group.
pub const NO_PAGE: u64 = u64::MAX;

/// Rows of one sequence in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    /// The span's first row in the batch.
    pub first_row: usize,
    /// The span's rows, in the order of their positions.
    pub n_rows: usize,
    /// Position of the first row in its sequence.
    pub first_position: u32,
    /// For each group of KV the arena offsets of the sequence's pages, in order; they cover
    /// `first_position + n_rows` positions. [`NO_PAGE`] where no row of the span reads.
    pub kv_pages: &'a [&'a [u64]],
    /// Arena offset of the sequence's recurrent state; unused by plans without. What it holds
    /// counts as zero where the span begins at position 0.
    pub state: u64,
    /// Arena offset of where the state behind the rows goes: that of `state`, unless the span is a
    /// draft's: then `state` is the `state_out` of the span before it.
    pub state_out: u64,
    /// Each of its rows attends to all of the span's, those behind it too, whatever the mask of the
    /// plan says: the tokens of an image, where the model wants that.
    pub whole: bool,
    /// The span is one row that goes on from the span before it, of the same
    /// sequence and with its pages.
    pub draft: bool,
}

/// What a pass works on. Spans lie one after another and cover all rows.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Rows (tokens).
    pub n_tokens: usize,
    /// Sequences.
    pub spans: &'a [Span<'a>],
    /// The parts of the sequences, as sequences of their own, for groups of KV whose rows attend
    /// within their part ([`KvGroup::parts`]): they lie one after another and cover all rows. Empty
    /// where there is no such group.
    pub parts: &'a [Span<'a>],
    /// The groups of KV of this model.
    pub kv: &'a [KvGroup],
    /// Cosine and sine of each row's rotations, for each table of the plan.
    pub rope: &'a [RopeAngles],
    /// Rows whose logits are wanted, for operations on output rows; of one with [`MEAN_OF_SPAN`]
    /// the mean of its span's rows counts.
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

    /// The sequences of a group of KV.
    pub fn spans_of(&self, group: u8) -> &[Span<'_>] {
        match self.kv[usize::from(group)].parts {
            true => self.parts,
            false => self.spans,
        }
    }

    /// The rows whose mean an entry of `outputs` stands for: most often one.
    ///
    /// # Panics
    /// No span has the row.
    pub fn rows_of_output(&self, output: u32) -> std::ops::Range<usize> {
        let row = (output & !MEAN_OF_SPAN) as usize;
        if output & MEAN_OF_SPAN == 0 {
            return row..row + 1;
        }
        let at = self.spans.partition_point(|span| span.first_row <= row);
        let span = &self.spans[at.checked_sub(1).expect("spans cover all rows")];
        span.first_row..span.first_row + span.n_rows
    }

    /// Most rows of one sequence: those of a span, and of the drafts that go on from it.
    pub fn rows_of_a_sequence(&self) -> usize {
        let mut rows = 0;
        let sums = self.spans.iter().map(|span| {
            rows = span.n_rows + if span.draft { rows } else { 0 };
            rows
        });
        sums.max().unwrap_or(0)
    }

    /// Whether some span's rows attend to later rows whatever the mask of the plan says.
    pub fn has_whole_spans(&self) -> bool {
        self.spans.iter().any(|span| span.whole)
    }

    /// Position of each row, in order.
    pub fn positions(&self) -> impl Iterator<Item = u32> + '_ {
        self.spans
            .iter()
            .flat_map(|s| (s.first_position..).take(s.n_rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_is_a_row_or_the_mean_of_its_span() {
        let span = |first_row, n_rows| Span {
            first_row,
            n_rows,
            first_position: 0,
            kv_pages: &[],
            state: 0,
            state_out: 0,
            whole: false,
            draft: false,
        };
        let batch = Batch {
            n_tokens: 6,
            spans: &[span(0, 2), span(2, 1), span(3, 3)],
            parts: &[],
            kv: &[],
            rope: &[],
            outputs: &[],
        };
        let rows = |output| batch.rows_of_output(output);
        assert_eq!([rows(1), rows(4)], [1..2, 4..5]);
        assert_eq!(rows(MEAN_OF_SPAN), 0..2);
        assert_eq!(rows(1 | MEAN_OF_SPAN), 0..2);
        assert_eq!(rows(2 | MEAN_OF_SPAN), 2..3);
        assert_eq!(rows(5 | MEAN_OF_SPAN), 3..6);
    }

    #[test]
    fn a_sequence_has_the_rows_of_its_drafts_too() {
        let span = |n_rows, state, state_out| Span {
            first_row: 0,
            n_rows,
            first_position: 9,
            kv_pages: &[],
            state,
            state_out,
            whole: false,
            draft: state != state_out,
        };
        let rows = |spans: &[Span<'_>]| {
            let batch = Batch {
                n_tokens: 0,
                spans,
                parts: &[],
                kv: &[],
                rope: &[],
                outputs: &[],
            };
            batch.rows_of_a_sequence()
        };
        assert_eq!(rows(&[]), 0);
        assert_eq!(rows(&[span(1, 0, 0), span(1, 0, 0)]), 1);
        let drafts = [
            span(1, 0, 0),
            span(1, 0, 64),
            span(1, 64, 128),
            span(2, 256, 256),
        ];
        assert_eq!(rows(&drafts), 3);
        assert_eq!(rows(&drafts[3..]), 2);
    }
}
