//! What operations are made of.

use crate::buf::Buf;
use crate::tensor::TensorIndex;

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

/// One product of a [`Op::MatMul`](super::Op::MatMul).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product {
    /// The matrix, `[cols, rows]` in ggml's order.
    pub weight: TensorIndex,
    /// A bias of `rows` elements.
    pub bias: Option<TensorIndex>,
    /// Where the result goes: `[tokens][rows]`.
    pub out: Buf,
}

/// A function of one element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Act {
    /// `x`.
    Identity,
    /// `x / (1 + exp(-x))` (Elfwing et al. 2017; Ramachandran et al. 2017).
    Silu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))` (Hendrycks & Gimpel 2016).
    GeluTanh,
    /// `x / 2 * (1 + erf(x / sqrt(2)))` (Hendrycks & Gimpel 2016).
    GeluErf,
    /// `max(x, 0)^2` (So et al. 2021).
    ReluSquared,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `ln(1 + exp(x))`.
    Softplus,
    /// gpt-oss's gate: of `g = min(gate, limit)` and `u = clamp(up, -limit, limit)` the product
    /// `g * sigmoid(alpha * g) * (u + 1)`. Only for gates.
    SwigluClamped {
        /// Factor inside the sigmoid.
        alpha: f32,
        /// Bound of both inputs.
        limit: f32,
    },
}

/// Positions that a row attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mask {
    /// All positions up to the row's own.
    Causal,
    /// All up to its own, where rows of an image attend to all of the image in other layers, too
    /// (Gemma 4).
    CausalInImages,
    /// A number of positions up to the row's own, which is included.
    Window(u32),
    /// All of its sequence. The pages have those of the pass: all rows of a sequence are in one
    /// pass ([`Plan::both_ways`](crate::Plan::both_ways)).
    Whole,
    /// A number of positions before the row's own, its own, and as many after it.
    Around(u32),
}

/// Of an entry of a pass's `outputs`: not the row itself, but the mean of all rows of the span that
/// has it. A pass has fewer rows.
pub const MEAN_OF_SPAN: u32 = 1 << 31;

/// Maximum number of different first matrices of an [`Op::AddAdapters`](super::Op::AddAdapters).
pub const ADAPTED_INPUTS_MAX: usize = 4;

/// How heads are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeUse {
    /// The table, by its index in the plan.
    pub table: u8,
    /// The element of a head at which the rotated ones begin.
    pub first: u32,
}

/// A source of [`Op::Columns`](super::Op::Columns): `width` elements for each group, from a row of
/// `x`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnPart {
    /// The buffer of the columns.
    pub x: Buf,
    /// The first group's first element.
    pub first: u32,
    /// Elements from one group's first to the next one's; 0 gives every group the same.
    pub stride: u32,
    /// Elements a group.
    pub width: u32,
}

impl ColumnPart {
    /// `width` elements of `x` for each group, from `first`, `stride` apart.
    pub fn new(x: Buf, first: u32, stride: u32, width: u32) -> Self {
        Self {
            x,
            first,
            stride,
            width,
        }
    }
}

/// What adapters add to one product of an [`Op::AddAdapters`](super::Op::AddAdapters).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adapted {
    /// `[cols, width]` in ggml's order: the rows of all adapters, one adapter's after the other's.
    pub a: TensorIndex,
    /// `[width, rows]`: their columns.
    pub b: TensorIndex,
    /// The buffer that is added to: `[tokens][rows]`, the result of the product.
    pub out: Buf,
}
