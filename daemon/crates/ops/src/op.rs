//! The operations: what a plan can ask of any device.
//!
//! Operations name weights by their index in the step's segment and activations by buffer. A plan
//! is made once a model; what changes from pass to pass (rows, sequences, positions) comes with the
//! pass. In formulas `t` is a row. Vectors of weights are f32 on the device.

use crate::buf::Buf;
use crate::experts::Router;
use crate::kv::KvLayer;
use crate::tensor::TensorIndex;

mod parts;

pub use parts::{
    ADAPTED_INPUTS_MAX, Act, Adapted, ColumnPart, HeadShape, MEAN_OF_SPAN, Mask, Product, RopeUse,
};

/// An operation.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// `out = x / sqrt(mean(x^2) + eps) * weight` over each group of elements (Zhang & Sennrich
    /// 2019).
    RmsNorm {
        /// Input rows.
        x: Buf,
        /// One element a column; or one an element of a group, for all groups alike; or none,
        /// for 1.
        weight: Option<TensorIndex>,
        /// Added to the mean of squares.
        eps: f32,
        /// Elements that are normed together; divides the width.
        group: u32,
        /// Output rows. May be `x`.
        out: Buf,
    },
    /// `out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over each group of
    /// elements (Ba et al. 2016).
    LayerNorm {
        /// Input rows.
        x: Buf,
        /// One element a column; or one an element of a group, for all groups alike.
        weight: TensorIndex,
        /// As `weight`, or none.
        bias: Option<TensorIndex>,
        /// Added to the variance.
        eps: f32,
        /// Elements that are normed together; divides the width.
        group: u32,
        /// Output rows. May be `x`.
        out: Buf,
    },
    /// `x += scale * y`.
    Add {
        /// Changed in place.
        x: Buf,
        /// The buffer that is added.
        y: Buf,
        /// Factor on the added rows.
        scale: f32,
    },
    /// `x[t] += weight * y[t]`, a factor for each element of a row: the sum with a residual stream
    /// of layers whose outputs are scaled (Touvron et al. 2021, arXiv 2103.17239).
    AddWeighted {
        /// Changed.
        x: Buf,
        /// Added.
        y: Buf,
        /// `[width]` factors.
        weight: TensorIndex,
    },
    /// `x[t] += table[position of t]`, or `x[t] += table[0]` for all rows: learned positions, and a
    /// vector that all rows have in common.
    AddTable {
        /// Changed in place.
        x: Buf,
        /// f32 `[rows of the table][width of x]`; one row, or as many as there are positions.
        table: TensorIndex,
        /// Whether the row is that of the position.
        by_position: bool,
    },
    /// `x *= factor`.
    Scale {
        /// Changed in place.
        x: Buf,
        /// The factor.
        factor: f32,
    },
    /// `x *= weight[0]`.
    ScaleBy {
        /// Changed in place.
        x: Buf,
        /// A tensor of one element.
        weight: TensorIndex,
    },
    /// `x = cap * tanh(x / cap)`.
    SoftCap {
        /// Changed in place.
        x: Buf,
        /// The bound.
        cap: f32,
    },
    /// `out = min(max(x, low[0]), high[0])`: what goes into and comes out of a product whose bounds
    /// the file has.
    Clamp {
        /// Input rows.
        x: Buf,
        /// A tensor of one element.
        low: TensorIndex,
        /// As `low`.
        high: TensorIndex,
        /// Output rows. May be `x`.
        out: Buf,
    },
    /// `out[t][r] = sum_k weight[r][k] * x[t][k] + bias[r]` for each product; they share the input.
    MatMul {
        /// Input rows.
        x: Buf,
        /// The products.
        products: Vec<Product>,
    },
    /// What adapters (LoRA, Hu et al. 2021) add to products of one input: `out[t] += b (scales[t] *
    /// (a x[t]))` for each product. Only the elements of `a x[t]` whose scale is not 0 are used: a
    /// row whose scales are all 0 stays as it is, whatever `a x[t]` is.
    AddAdapters {
        /// Input rows.
        x: Buf,
        /// A scale for each row of `a`: `[tokens][width]`. A buffer of [`Rows::Tokens`] is an input
        /// of the plan, which no operation writes.
        ///
        /// [`Rows::Tokens`]: crate::Rows::Tokens
        scales: Buf,
        /// Room for `scales[t] * (a x[t])`, in the device's own order: `[tokens][n * width]` for
        /// `n` different `a`. Nothing of it is needed before or behind the operation.
        low: Buf,
        /// The products. Those with one `a` follow each other; there are at most
        /// [`ADAPTED_INPUTS_MAX`] different ones.
        products: Vec<Adapted>,
    },
    /// A product for each head: `out[t][h][r] = sum_k weight[h][r][k] * x[t][h][k]`.
    MatMulHeads {
        /// Input rows `[tokens][n_head][cols]`.
        x: Buf,
        /// Heads.
        n_head: u32,
        /// Matrices `[cols, rows * n_head]` in ggml's order, one head's rows after the other's.
        weight: TensorIndex,
        /// Output `[tokens][n_head][rows]`.
        out: Buf,
    },
    /// A product by a matrix whose rows are the inputs, as some files have it:
    /// `out[t][r] = sum_k x[t][k] * weight[k][r]`.
    MatMulTransposed {
        /// Input rows.
        x: Buf,
        /// f32 `[inputs][outputs]`, a vector of all elements.
        weight: TensorIndex,
        /// Output rows.
        out: Buf,
    },
    /// Gathers columns: row `t` of `out` has for each group `h` its parts one after another,
    /// `part.x[t][part.first + h * part.stride ..][.. part.width]`.
    Columns {
        /// Groups.
        n_group: u32,
        /// Parts of a group.
        parts: Vec<ColumnPart>,
        /// Output `[tokens][n_group * sum of widths]`.
        out: Buf,
    },
    /// Norms (where given) and rotates heads in place.
    Rope {
        /// `[tokens][n_head * head_dim]`, changed in place.
        x: Buf,
        /// Heads.
        n_head: u32,
        /// Elements of a head.
        head_dim: u32,
        /// Weight and eps of an RMSNorm over each head.
        norm: Option<(TensorIndex, f32)>,
        /// The rotation.
        rope: RopeUse,
    },
    /// Norms and rotates (where given) the heads of `q` and `k` in place and appends `k` and `v` to
    /// the KV pages. Afterwards `k` holds nothing of use.
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
        /// Weight and eps of an RMSNorm over each key head; the eps is that of
        /// `q_norm` where both are there.
        k_norm: Option<(TensorIndex, f32)>,
        /// The rotation of both; none where positions come from elsewhere.
        rope: Option<RopeUse>,
        /// Layer of the KV cache that is read.
        layer: KvLayer,
    },
    /// Attention of each query over its sequence's KV, softmax in f32.
    Attention {
        /// Queries.
        q: Buf,
        /// Output `[tokens][n_head * head_dim_v]`.
        out: Buf,
        /// Heads.
        heads: HeadShape,
        /// Layer whose KV is read.
        layer: KvLayer,
        /// Factor on the products of queries and keys.
        scale: f32,
        /// Positions that each row attends to.
        mask: Mask,
        /// Scores become `softcap * tanh(score / softcap)`; 0 for none.
        softcap: f32,
        /// One more score a head that takes part in the softmax and has no value
        /// (gpt-oss's sinks), `[n_head]`.
        sinks: Option<TensorIndex>,
        /// A score falls by a head's [`alibi_slope`](crate::alibi_slope) for each position between
        /// query and key; 0 for none. Never with a soft cap.
        alibi: f32,
    },
    /// `gate = act(gate) * up`.
    Gate {
        /// Changed in place.
        gate: Buf,
        /// The second factor.
        up: Buf,
        /// The function.
        act: Act,
    },
    /// `x = act(x)`.
    Activate {
        /// Changed in place.
        x: Buf,
        /// The function.
        act: Act,
    },
    /// `x[t] += sigmoid(gate[t][0]) * y[t]`.
    AddGated {
        /// Changed in place.
        x: Buf,
        /// The buffer that is added.
        y: Buf,
        /// `[tokens][1]`.
        gate: Buf,
    },
    /// `x[t][h] *= act(gate[t][h])`: a factor for each head.
    GateHeads {
        /// `[tokens][n_head * head_dim]`, changed in place.
        x: Buf,
        /// `[tokens][n_head]`.
        gate: Buf,
        /// The function; not one of gates alone.
        act: Act,
    },
    /// `x[t] *= 1 + beta * ln(1 + floor(position / span))` (Llama 4's and
    /// Ministral's attention temperature).
    PositionScale {
        /// Changed in place.
        x: Buf,
        /// Strength.
        beta: f32,
        /// Positions of one step.
        span: u32,
    },
    /// Causal convolution of each channel over the sequence, with the last inputs kept as state:
    /// `out[t][c] = act(bias[c] + sum_j weight[c][j] * in[t - (kernel - 1) + j][c])`.
    Conv {
        /// Input rows `[tokens][channels]`.
        x: Buf,
        /// `[kernel, channels]` in ggml's order.
        weight: TensorIndex,
        /// `[channels]`.
        bias: Option<TensorIndex>,
        /// Inputs of a row, the row's own included; at least 2.
        kernel: u32,
        /// The function of the sum.
        act: Act,
        /// Where its state begins in the sequence's, in f32 elements:
        /// `[kernel - 1][channels]`, oldest first.
        state: u64,
        /// Output rows.
        out: Buf,
    },
    /// Gated delta rule (Yang et al. 2024, arXiv 2412.06464). For value head
    /// `h` with key head `g(h)`:
    ///
    /// ```text
    /// q, k   = l2norm(q) / sqrt(dim_k), l2norm(k)            (l2norm(x) = x / sqrt(sum x^2 + eps))
    /// S      = S * exp(a[h] * softplus(alpha[t][h] + dt_bias[h]))
    /// S     += k (sigmoid(beta[t][h]) * (v - S^T k))^T
    /// out    = S^T q
    /// ```
    DeltaNet {
        /// `[tokens][2 * n_head_k * dim_k + n_head_v * dim_v]`: queries, keys, values.
        qkv: Buf,
        /// `[tokens][n_head_v]`.
        alpha: Buf,
        /// `[tokens][n_head_v]`.
        beta: Buf,
        /// `[n_head_v]`, negative.
        a: TensorIndex,
        /// `[n_head_v]`.
        dt_bias: TensorIndex,
        /// Heads of queries and keys.
        n_head_k: u32,
        /// Heads of values; a multiple of `n_head_k`.
        n_head_v: u32,
        /// Elements of a query or key head.
        dim_k: u32,
        /// Elements of a value head.
        dim_v: u32,
        /// Whether value head `h` has key head `h % n_head_k`; else `h / (n_head_v / n_head_k)`.
        interleaved: bool,
        /// Added to the sum of squares in the norm of queries and keys.
        eps: f32,
        /// Where its state begins in the sequence's, in f32 elements: `[n_head_v][dim_k][dim_v]`.
        state: u64,
        /// Output `[tokens][n_head_v * dim_v]`.
        out: Buf,
    },
    /// Mamba-2 (Dao & Gu 2024, arXiv 2405.21060). For head `h` of group
    /// `g = h / (n_head / n_group)`:
    ///
    /// ```text
    /// d   = softplus(dt[t][h] + dt_bias[h])
    /// S   = S * exp(d * a[h]) + d * x B[g]^T
    /// out = S C[g] + skip[h] * x
    /// ```
    Ssm {
        /// `[tokens][n_head * dim + 2 * n_group * n_state]`: x, B, C.
        xbc: Buf,
        /// `[tokens][n_head]`.
        dt: Buf,
        /// `[n_head]`, negative.
        a: TensorIndex,
        /// `[n_head]`.
        skip: TensorIndex,
        /// `[n_head]`.
        dt_bias: TensorIndex,
        /// Heads.
        n_head: u32,
        /// Elements of a head.
        dim: u32,
        /// Groups of heads that share B and C.
        n_group: u32,
        /// Elements of B and C.
        n_state: u32,
        /// Where its state begins in the sequence's, in f32 elements: `[n_head][dim][n_state]`.
        state: u64,
        /// Output `[tokens][n_head * dim]`.
        out: Buf,
    },
    /// Chooses each row's experts.
    Route {
        /// `[tokens][n_expert]`.
        logits: Buf,
        /// A bias of the selection alone, `[n_expert]`.
        bias: Option<TensorIndex>,
        /// How.
        router: Router,
        /// Chosen experts, `[tokens][n_used]`, as whole numbers in f32, in
        /// falling order of selection.
        ids: Buf,
        /// Weights of the chosen experts, `[tokens][n_used]`.
        weights: Buf,
    },
    /// `out[t] = sum_s weights[t][s] * y[t * n_used + s]`, in the order of `s`.
    Combine {
        /// Routed rows.
        y: Buf,
        /// `[tokens][n_used]`.
        weights: Buf,
        /// Output rows.
        out: Buf,
    },
    /// Takes rows that follow each other for one: `out[i]` is `x[n * i]` to `x[n * i + n - 1]`, one
    /// after another, where `n` is the number of `out`'s [`Rows::Merged`](crate::Rows::Merged).
    MergeRows {
        /// Input rows `[tokens][width]`.
        x: Buf,
        /// Output rows `[tokens / n][n * width]`.
        out: Buf,
    },
    /// Copies the rows of the tokens whose logits are wanted: `out[i] = x[outputs[i]]`, or where
    /// that entry has [`MEAN_OF_SPAN`] the mean of its span's rows.
    GatherOutputs {
        /// Token rows.
        x: Buf,
        /// Output rows.
        out: Buf,
    },
}

impl Op {
    /// Calls `read` with each buffer whose content it needs, and `write` with each that it changes;
    /// a buffer that is changed in place is given to both, first to `read`.
    pub fn buffers(&self, read: &mut dyn FnMut(Buf), write: &mut dyn FnMut(Buf)) {
        let (reads, writes): (&[Buf], &[Buf]) = match self {
            Op::RmsNorm { x, out, .. }
            | Op::LayerNorm { x, out, .. }
            | Op::Clamp { x, out, .. } => (&[*x], &[*out]),
            Op::Add { x, y, .. } | Op::AddWeighted { x, y, .. } => (&[*x, *y], &[*x]),
            Op::AddTable { x, .. }
            | Op::Scale { x, .. }
            | Op::ScaleBy { x, .. }
            | Op::SoftCap { x, .. }
            | Op::Rope { x, .. }
            | Op::Activate { x, .. }
            | Op::PositionScale { x, .. } => (&[*x], &[*x]),
            Op::MatMul { x, products } => {
                read(*x);
                products.iter().for_each(|p| write(p.out));
                return;
            }
            Op::AddAdapters {
                x,
                scales,
                products,
                ..
            } => {
                read(*x);
                read(*scales);
                for product in products {
                    read(product.out);
                    write(product.out);
                }
                return;
            }
            Op::MatMulHeads { x, out, .. }
            | Op::MatMulTransposed { x, out, .. }
            | Op::Conv { x, out, .. } => (&[*x], &[*out]),
            Op::Columns { parts, out, .. } => {
                parts.iter().for_each(|p| read(p.x));
                write(*out);
                return;
            }
            // What is left in `k` is nobody's affair.
            Op::RopeKv { q, k, v, .. } => (&[*q, *k, *v], &[*q]),
            Op::Attention { q, out, .. } => (&[*q], &[*out]),
            Op::Gate { gate, up, .. } => (&[*gate, *up], &[*gate]),
            Op::AddGated { x, y, gate } => (&[*x, *y, *gate], &[*x]),
            Op::GateHeads { x, gate, .. } => (&[*x, *gate], &[*x]),
            Op::DeltaNet {
                qkv,
                alpha,
                beta,
                out,
                ..
            } => (&[*qkv, *alpha, *beta], &[*out]),
            Op::Ssm { xbc, dt, out, .. } => (&[*xbc, *dt], &[*out]),
            Op::Route {
                logits,
                ids,
                weights,
                ..
            } => (&[*logits], &[*ids, *weights]),
            Op::Combine { y, weights, out } => (&[*y, *weights], &[*out]),
            Op::MergeRows { x, out } | Op::GatherOutputs { x, out } => (&[*x], &[*out]),
        };
        reads.iter().for_each(|&b| read(b));
        writes.iter().for_each(|&b| write(b));
    }

    /// A buffer that it writes and whose content is nobody else's affair.
    #[must_use]
    pub fn temporary(&self) -> Option<Buf> {
        match self {
            Op::AddAdapters { low, .. } => Some(*low),
            _ => None,
        }
    }

    /// Whether the operation reads the content of this buffer.
    #[must_use]
    pub fn reads(&self, buf: Buf) -> bool {
        let mut found = false;
        self.buffers(&mut |b| found |= b == buf, &mut |_| {});
        found
    }

    /// Whether the operation writes this buffer.
    #[must_use]
    pub fn writes(&self, buf: Buf) -> bool {
        let mut found = self.temporary() == Some(buf);
        self.buffers(&mut |_| {}, &mut |b| found |= b == buf);
        found
    }

    /// The operation's name, for messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Op::RmsNorm { .. } => "rms_norm",
            Op::LayerNorm { .. } => "layer_norm",
            Op::Add { .. } => "add",
            Op::AddWeighted { .. } => "add_weighted",
            Op::AddTable { .. } => "add_table",
            Op::Scale { .. } => "scale",
            Op::ScaleBy { .. } => "scale_by",
            Op::SoftCap { .. } => "soft_cap",
            Op::Clamp { .. } => "clamp",
            Op::MatMul { .. } => "mat_mul",
            Op::AddAdapters { .. } => "add_adapters",
            Op::MatMulHeads { .. } => "mat_mul_heads",
            Op::MatMulTransposed { .. } => "mat_mul_transposed",
            Op::Columns { .. } => "columns",
            Op::Rope { .. } => "rope",
            Op::RopeKv { .. } => "rope_kv",
            Op::Attention { .. } => "attention",
            Op::Gate { .. } => "gate",
            Op::Activate { .. } => "activate",
            Op::AddGated { .. } => "add_gated",
            Op::GateHeads { .. } => "gate_heads",
            Op::PositionScale { .. } => "position_scale",
            Op::Conv { .. } => "conv",
            Op::DeltaNet { .. } => "delta_net",
            Op::Ssm { .. } => "ssm",
            Op::Route { .. } => "route",
            Op::Combine { .. } => "combine",
            Op::MergeRows { .. } => "merge_rows",
            Op::GatherOutputs { .. } => "gather_outputs",
        }
    }
}
