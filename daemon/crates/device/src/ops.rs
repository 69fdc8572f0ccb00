//! The operation vocabulary: what a plan can ask of any device.
//!
//! Operations name weights by their index in the step's segment and activations by buffer. Every activation buffer is
//! f32, `[rows][width]`, width fastest; the row count is the batch's. A plan is made once a model; what changes from
//! pass to pass is in [`Batch`].

/// An activation buffer of a plan, by its index in the plan's list of [`BufSpec`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Buf(pub u8);

/// Which count gives a buffer its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// One row a token of the batch.
    Tokens,
    /// One row a token whose logits are wanted.
    Outputs,
}

/// An activation buffer: f32 `[rows][width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufSpec {
    /// Name for messages.
    pub name: &'static str,
    /// Elements a row.
    pub width: u64,
    /// Which rows.
    pub rows: Rows,
    /// Buffers with the same number other than 0 are laid one after another from the start of one region, and regions
    /// of different numbers overlay each other: their contents never live at the same time.
    pub overlay: u8,
}

/// A buffer's place in the scratch block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedBuf {
    /// Offset in the block in bytes.
    pub at: u64,
    /// Elements a row.
    pub width: u64,
    /// Which rows.
    pub rows: Rows,
}

/// Where the buffers lie in the scratch block, for a given number of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScratchLayout {
    /// Rows that the token buffers have room for.
    pub tokens: u64,
    /// Rows that the output buffers have room for.
    pub outputs: u64,
    /// Place of each buffer.
    pub bufs: Vec<PlacedBuf>,
    /// Bytes of the block, without a device's workspace.
    pub bytes: u64,
}

impl ScratchLayout {
    /// Lays the buffers out for `tokens` token rows and `outputs` output rows.
    pub fn new(specs: &[BufSpec], tokens: u64, outputs: u64) -> Self {
        let rows = |spec: &BufSpec| match spec.rows {
            Rows::Tokens => tokens,
            Rows::Outputs => outputs,
        };
        let size =
            |spec: &BufSpec| (rows(spec) * spec.width * 4).next_multiple_of(crate::ALIGNMENT);
        let fixed: u64 = specs.iter().filter(|s| s.overlay == 0).map(size).sum();
        let mut at = 0;
        let mut overlays = [fixed; 256];
        let bufs = specs
            .iter()
            .map(|spec| {
                let cursor = if spec.overlay == 0 {
                    &mut at
                } else {
                    &mut overlays[spec.overlay as usize]
                };
                let offset = *cursor;
                *cursor += size(spec);
                PlacedBuf {
                    at: offset,
                    width: spec.width,
                    rows: spec.rows,
                }
            })
            .collect();
        let bytes = overlays.iter().copied().fold(fixed, u64::max);
        Self {
            tokens,
            outputs,
            bufs,
            bytes,
        }
    }
}

/// The shape of the attention heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadShape {
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads; divides `n_head`.
    pub n_head_kv: u32,
    /// Elements of a query or key head.
    pub head_dim: u32,
    /// Elements of a value head.
    pub head_dim_v: u32,
}

/// Index of a tensor in the step's segment.
pub type TensorIndex = usize;

/// One product of a [`Op::MatMul`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// The matrix, `[cols, rows]` in ggml's order.
    pub weight: TensorIndex,
    /// A bias of `rows` elements.
    pub bias: Option<TensorIndex>,
    /// Where the result goes: `[tokens][rows]`.
    pub out: Buf,
}

/// An operation.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// `out = x / sqrt(mean(x^2) + eps) * weight`, a row at a time (Zhang & Sennrich 2019).
    RmsNorm {
        /// Input rows.
        x: Buf,
        /// Weight, one element a column.
        weight: TensorIndex,
        /// Added to the mean of squares.
        eps: f32,
        /// Output rows.
        out: Buf,
    },
    /// `x += y`.
    Add {
        /// Changed in place.
        x: Buf,
        /// What is added.
        y: Buf,
    },
    /// `out[t][r] = sum_k weight[r][k] * x[t][k] + bias[r]` for each product; they share the input.
    MatMul {
        /// Input rows.
        x: Buf,
        /// The products.
        products: Vec<Product>,
    },
    /// Norms (where given) and rotates the heads of `q` and `k` in place and appends `k` and `v` to the KV pages.
    RopeKv {
        /// Queries `[tokens][n_head * head_dim]`.
        q: Buf,
        /// Keys `[tokens][n_head_kv * head_dim]`.
        k: Buf,
        /// Values `[tokens][n_head_kv * head_dim_v]`.
        v: Buf,
        /// Heads.
        heads: HeadShape,
        /// Weight and eps of an RMSNorm over each query head.
        q_norm: Option<(TensorIndex, f32)>,
        /// Weight and eps of an RMSNorm over each key head; the eps is that of `q_norm` where both are there.
        k_norm: Option<(TensorIndex, f32)>,
        /// Layer whose KV it is.
        layer: u32,
    },
    /// Causal attention of each query over its sequence's KV, softmax in f32.
    Attention {
        /// Queries.
        q: Buf,
        /// Output `[tokens][n_head * head_dim_v]`.
        out: Buf,
        /// Heads.
        heads: HeadShape,
        /// Layer whose KV is read.
        layer: u32,
        /// Factor on the products of queries and keys.
        scale: f32,
    },
    /// `gate = silu(gate) * up`.
    SiluMul {
        /// Changed in place.
        gate: Buf,
        /// The other factor.
        up: Buf,
    },
    /// Copies the rows of the tokens whose logits are wanted: `out[i] = x[batch.outputs[i]]`.
    GatherOutputs {
        /// Token rows.
        x: Buf,
        /// Output rows.
        out: Buf,
    },
}

/// Rows of one sequence in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    /// Its first row in the batch.
    pub first_row: usize,
    /// Its rows, in the order of their positions.
    pub n_rows: usize,
    /// Position of the first row in its sequence.
    pub first_position: u32,
    /// Arena offsets of the sequence's KV pages, in order; they cover `first_position + n_rows` positions.
    pub kv_pages: &'a [u64],
}

/// What a pass works on. Spans lie one after another and cover all rows.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Rows (tokens).
    pub n_tokens: usize,
    /// Sequences.
    pub spans: &'a [Span<'a>],
    /// Layout of a KV page of this model.
    pub kv: &'a rocmforge_kernels::host::ops::KvLayout,
    /// Cosine and sine of each row's rotations.
    pub rope: &'a rocmforge_kernels::host::ops::RopeAngles,
    /// Rows whose logits are wanted, for operations on output rows.
    pub outputs: &'a [u32],
}
