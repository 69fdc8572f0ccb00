//! The description of a pass: its rows, what is wanted of them, and who takes the results.

use rocmforge_device::{Batch, Plan, Scratch, ScratchLayout, Span};
use rocmforge_kernels_cpu::ops::RopeAngles;
use rocmforge_ops::{MEAN_OF_SPAN, Op, Step};
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::api::error::Error;
use crate::pass::given::GivenRows;

/// Takes the results of a pass for the requests that it is computed for.
pub(crate) trait PassClient {
    /// The error that ends the pass, if all its requests have ended.
    fn ended(&self) -> Option<Error>;

    /// Called when the device has begun the work, so that other work can be done meanwhile.
    fn begun(&mut self);

    /// Takes the result of a wanted row. Rows of one sequence come in their order.
    fn take(&mut self, row: WantedRow, found: RowOutput<'_>);

    /// Takes the logits of several wanted rows, `[rows][n_vocab]`, which it may change in place.
    fn take_logits(&mut self, rows: &[WantedRow], logits: &mut [f32]) {
        let width = logits.len() / rows.len().max(1);
        for (&row, logits) in rows.iter().zip(logits.chunks_exact_mut(width.max(1))) {
            self.take(row, RowOutput::Logits(logits));
        }
    }
}

/// A row of a pass whose result is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WantedRow {
    /// Index among the pass's wanted rows: those of [`Pass::outputs`] come first, then those of
    /// [`Pass::hidden`].
    pub(crate) wanted: usize,
    /// Index among the pass's rows; the last row of the span if the result is the span's mean.
    pub(crate) row: usize,
}

impl WantedRow {
    /// The wanted rows for a part of the outputs or hidden states; the part's first wanted row has
    /// the index `first`.
    pub(crate) fn of_part(first: usize, rows: &[u32]) -> impl ExactSizeIterator<Item = Self> {
        let rows = rows.iter().enumerate();
        rows.map(move |(at, &row)| Self {
            wanted: first + at,
            row: row_of(row),
        })
    }
}

/// A pass: the model and plan, the sequences' rows, and the rows whose results are wanted.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) model: ModelId,
    pub(crate) plan: &'a Plan,
    /// Whether the plan is the model's plan with adapters.
    pub(crate) adapted: bool,
    pub(crate) angles: &'a [RopeAngles],
    /// The rows of each sequence; together they are all rows of the pass.
    pub(crate) spans: &'a [Span<'a>],
    /// Parts of images that layers of a vision tower attend within, each a span of its own.
    pub(crate) parts: &'a [Span<'a>],
    pub(crate) n_tokens: usize,
    /// Indices of the rows whose logits are wanted, ascending. If there are none, and no hidden
    /// states are wanted, the output head does not run.
    pub(crate) outputs: &'a [u32],
    /// Indices of the rows whose hidden state is wanted, ascending.
    pub(crate) hidden: &'a [u32],
    /// Rows of images that replace rows of inputs.
    pub(crate) given: &'a [GivenRows],
    /// Whether another pass of this model is expected right after.
    pub(crate) expects_next_pass: bool,
    pub(crate) scratch: &'a ScratchLayout,
    /// Arena offset of the scratch block.
    pub(crate) scratch_at: u64,
    /// Maximum number of uploads in flight ahead of need.
    pub(crate) prefetch: u32,
    /// How much of the logits of each row in `outputs` is needed; empty if only the best token of
    /// each.
    pub(crate) interests: &'a [Interest],
}

impl Pass<'_> {
    /// Whether no results are wanted, so that the output head does not run.
    pub(super) fn wants_nothing(&self) -> bool {
        self.outputs.is_empty() && self.hidden.is_empty()
    }

    /// Whether every sequence has one row, whose logits are wanted and fit at once.
    pub(super) fn decodes(&self) -> bool {
        self.spans.len() == self.n_tokens
            && self.outputs.len() == self.n_tokens
            && self.n_tokens as u64 <= self.scratch.outputs
    }

    /// Whether this is a pass of few rows, also of prompts, of a MoE model. Given to the device in
    /// parts, each layer would wait for its routing to be read. Requests are not checked while it
    /// runs, so it must be short.
    pub(super) fn has_few_routed_rows(&self) -> bool {
        self.n_tokens <= WHOLE_ROWS
            && self.hidden.is_empty()
            && self.outputs.len() as u64 <= self.scratch.outputs
            && self.routes()
    }

    /// Whether it is a pass of short texts that are computed whole, so that the device gets it at
    /// once. What is wanted of it has room at once.
    pub(super) fn is_of_short_texts(&self) -> bool {
        let wanted = match (self.outputs, self.hidden) {
            (wanted, []) | ([], wanted) => wanted.len() as u64,
            _ => return false,
        };
        self.plan.both_ways
            && self.n_tokens <= TEXT_ROWS
            && (1..=self.scratch.outputs).contains(&wanted)
    }

    /// The operations of the head that make hidden states.
    ///
    /// # Errors
    /// [`Error::Internal`] for a plan without such operations.
    pub(super) fn hidden_ops(&self) -> Result<&[Op], Error> {
        let Step::Run { ops, .. } = &self.plan.steps[self.plan.head_step] else {
            return Err(Error::Internal("the head of a plan routes".to_owned()));
        };
        let makes = |op: &Op| {
            let mut found = false;
            op.buffers(&mut |_| {}, &mut |b| found |= b == self.plan.hidden);
            found
        };
        let last = ops.iter().position(makes);
        let last = last.ok_or_else(|| Error::Internal("a head without its norm".to_owned()))?;
        Ok(&ops[..=last])
    }

    /// Positions that the rows attend to in a step, summed over them. Windows are not looked at.
    pub(super) fn attended(&self, step: &Step) -> u64 {
        let Step::Run { ops, .. } = step else {
            return 0;
        };
        let layers = ops.iter().filter(|op| matches!(op, Op::Attention { .. }));
        let of_span = |span: &Span<'_>| {
            let mean = u64::from(span.first_position) + span.n_rows as u64 / 2;
            span.n_rows as u64 * mean
        };
        match layers.count() as u64 {
            0 => 0,
            layers => layers * self.spans.iter().map(of_span).sum::<u64>(),
        }
    }

    /// Whether the pass's model has MoE layers.
    pub(super) fn routes(&self) -> bool {
        let mut steps = self.plan.steps.iter();
        steps.any(|step| matches!(step, Step::Experts { .. }))
    }
}

/// How much of a row's logits is needed; ordered from least to most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Interest {
    /// The row's most likely token.
    Best,
    /// This many of the row's most likely tokens.
    Top(usize),
    /// All logits of the row.
    Logits,
}

/// The result of a pass for one wanted row: what was needed of the logits, or all of them if the
/// device leaves the selection to the engine.
pub(crate) enum RowOutput<'a> {
    /// The row's logits, `[n_vocab]`.
    Logits(&'a mut [f32]),
    /// The row's best token, the lowest id among equals; `None` if the logits are not finite.
    Best(Option<u32>),
    /// The row's best tokens with their logits, sorted by falling logit, the lowest id first among
    /// equals; `None` if they are not finite.
    Top(Option<&'a [(u32, f32)]>),
    /// The row's hidden state behind the last norm, `[n_embd]`.
    Hidden(&'a [f32]),
}

/// Maximum number of rows of a pass with prompts that the device is given at once.
const WHOLE_ROWS: usize = 256;

/// Rows of a pass of whole texts that the device gets at once, at most: about as many as take no
/// longer than one.
const TEXT_ROWS: usize = 64;

/// A layer's experts among the segments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertStep {
    pub(super) first_segment: u32,
    pub(super) n_expert: u32,
    pub(super) per_segment: u32,
}

impl ExpertStep {
    pub(super) fn of(step: &Step) -> Option<Self> {
        match *step {
            Step::Experts {
                first_segment,
                n_expert,
                per_segment,
                ..
            } => Some(Self {
                first_segment,
                n_expert,
                per_segment,
            }),
            Step::Run { .. } => None,
        }
    }

    pub(super) fn segment_of(self, expert: u32) -> u32 {
        self.first_segment + expert / self.per_segment
    }

    pub(crate) fn experts_of(self, segment: u32) -> std::ops::Range<u32> {
        let first = (segment - self.first_segment) * self.per_segment;
        first..(first + self.per_segment).min(self.n_expert)
    }
}

/// The row of an output, without the mark for a span's mean.
fn row_of(output: u32) -> usize {
    (output & !MEAN_OF_SPAN) as usize
}

pub(crate) fn id(pass: &Pass<'_>, index: u32) -> SegmentId {
    SegmentId {
        model: pass.model,
        index,
    }
}

pub(crate) fn scratch<'a>(pass: &Pass<'a>) -> Scratch<'a> {
    Scratch {
        layout: pass.scratch,
        base: pass.scratch_at,
    }
}

pub(crate) fn batch<'a>(pass: &Pass<'a>, outputs: &'a [u32]) -> Batch<'a> {
    Batch {
        n_tokens: pass.n_tokens,
        spans: pass.spans,
        parts: pass.parts,
        kv: &pass.plan.kv,
        rope: pass.angles,
        outputs,
    }
}
