//! The execution plan: for each segment the operations of a pass, and the activation buffers that they use.
//!
//! One layer, on `T` rows (shapes are `[rows][width]`, width fastest):
//!
//! ```text
//! N = rms_norm(X)                         [T][n_embd]
//! Q, K, V = N * Wq, N * Wk, N * Wv        [T][n_head * head_dim], [T][n_head_kv * head_dim], [T][n_head_kv * head_dim_v]
//! rope(Q), rope(K); K, V -> KV pages
//! A = attention(Q, KV)                    [T][n_head * head_dim_v]
//! P = A * Wo; X += P                      [T][n_embd]                  to here blk.{i}.attn
//! N = rms_norm(X)
//! G, U = N * Wgate, N * Wup               [T][n_ff]
//! G = silu(G) * U                                                      to here blk.{i}.ffn_up
//! P = G * Wdown; X += P                                                blk.{i}.ffn_down
//! ```
//!
//! A layer is three segments, so that what is on its way while another part is in use takes a third of a layer's room.

use rocmforge_device::ops::{Product, Rows, TensorIndex};
use rocmforge_device::{BufSpec, Op, TensorDesc};

use crate::Segment;
use crate::hparams::Hparams;
use crate::weights::{LayerWeights, Linear, Weights};

/// The activation buffers of every plan.
pub mod bufs {
    use rocmforge_device::Buf;

    /// The residual stream; a pass begins with the embedding rows in it.
    pub const X: Buf = Buf(0);
    /// A norm's output.
    pub const N: Buf = Buf(1);
    /// A branch's output, before it is added to the residual stream.
    pub const P: Buf = Buf(2);
    /// Queries.
    pub const Q: Buf = Buf(3);
    /// Keys.
    pub const K: Buf = Buf(4);
    /// Values.
    pub const V: Buf = Buf(5);
    /// Attention's output.
    pub const A: Buf = Buf(6);
    /// The gate, then the gated feed-forward.
    pub const G: Buf = Buf(7);
    /// The feed-forward's other factor.
    pub const U: Buf = Buf(8);
    /// Output rows of the residual stream.
    pub const O: Buf = Buf(9);
    /// Output rows, normed.
    pub const ON: Buf = Buf(10);
    /// Logits of the output rows.
    pub const LOGITS: Buf = Buf(11);
}

const ATTENTION: u8 = 1;
const FEED_FORWARD: u8 = 2;
const HEAD: u8 = 3;

/// Makes the segments in the order of a pass, and the buffers.
pub(crate) fn make(hparams: &Hparams, weights: &Weights) -> (Vec<Segment>, Vec<BufSpec>) {
    let mut segments: Vec<Segment> = (0u32..)
        .zip(&weights.layers)
        .flat_map(|(i, layer)| layer_segments(hparams, i, layer))
        .collect();
    segments.push(output_segment(hparams, weights));
    (segments, buffers(hparams))
}

fn buffers(hparams: &Hparams) -> Vec<BufSpec> {
    let n_embd = u64::from(hparams.n_embd);
    let n_ff = u64::from(hparams.n_ff);
    let heads = hparams.heads;
    let head_dim = u64::from(heads.head_dim);
    let head_dim_v = u64::from(heads.head_dim_v);
    let (n_head, n_head_kv) = (u64::from(heads.n_head), u64::from(heads.n_head_kv));
    let spec = |name, width, rows, overlay| BufSpec {
        name,
        width,
        rows,
        overlay,
    };
    vec![
        spec("x", n_embd, Rows::Tokens, 0),
        spec("n", n_embd, Rows::Tokens, 0),
        spec("p", n_embd, Rows::Tokens, 0),
        spec("q", n_head * head_dim, Rows::Tokens, ATTENTION),
        spec("k", n_head_kv * head_dim, Rows::Tokens, ATTENTION),
        spec("v", n_head_kv * head_dim_v, Rows::Tokens, ATTENTION),
        spec("a", n_head * head_dim_v, Rows::Tokens, ATTENTION),
        spec("gate", n_ff, Rows::Tokens, FEED_FORWARD),
        spec("up", n_ff, Rows::Tokens, FEED_FORWARD),
        spec("o", n_embd, Rows::Outputs, HEAD),
        spec("on", n_embd, Rows::Outputs, HEAD),
        spec("logits", u64::from(hparams.n_vocab), Rows::Outputs, HEAD),
    ]
}

/// Collects a segment's tensors and hands out their indices.
#[derive(Default)]
struct Tensors(Vec<TensorDesc>);

impl Tensors {
    fn add(&mut self, tensor: &TensorDesc) -> TensorIndex {
        self.0.push(tensor.clone());
        self.0.len() - 1
    }

    fn product(&mut self, linear: &Linear, out: rocmforge_device::Buf) -> Product {
        let weight = self.add(&linear.weight);
        let bias = linear.bias.as_ref().map(|b| self.add(b));
        Product { weight, bias, out }
    }

    fn segment(self, name: String, ops: Vec<Op>) -> Segment {
        Segment {
            name,
            tensors: self.0,
            ops,
        }
    }
}

/// A layer's segments: what hands on the residual stream, and within the feed-forward the gated product. Smaller ones would
/// part gate and up, which one launch computes.
fn layer_segments(hparams: &Hparams, layer: u32, w: &LayerWeights) -> [Segment; 3] {
    use bufs::{A, G, K, N, P, Q, U, V, X};
    let eps = hparams.norm_eps;
    let heads = hparams.heads;
    let mut t = Tensors::default();
    let attention = vec![
        Op::RmsNorm {
            x: X,
            weight: t.add(&w.attn_norm),
            eps,
            out: N,
        },
        Op::MatMul {
            x: N,
            products: vec![
                t.product(&w.attn_q, Q),
                t.product(&w.attn_k, K),
                t.product(&w.attn_v, V),
            ],
        },
        Op::RopeKv {
            q: Q,
            k: K,
            v: V,
            heads,
            q_norm: w.attn_q_norm.as_ref().map(|n| (t.add(n), eps)),
            k_norm: w.attn_k_norm.as_ref().map(|n| (t.add(n), eps)),
            layer,
        },
        Op::Attention {
            q: Q,
            out: A,
            heads,
            layer,
            scale: 1.0 / (heads.head_dim as f32).sqrt(),
        },
        Op::MatMul {
            x: A,
            products: vec![t.product(&w.attn_output, P)],
        },
        Op::Add { x: X, y: P },
    ];
    let attention = t.segment(format!("blk.{layer}.attn"), attention);
    let mut t = Tensors::default();
    let up = vec![
        Op::RmsNorm {
            x: X,
            weight: t.add(&w.ffn_norm),
            eps,
            out: N,
        },
        Op::MatMul {
            x: N,
            products: vec![t.product(&w.ffn_gate, G), t.product(&w.ffn_up, U)],
        },
        Op::SiluMul { gate: G, up: U },
    ];
    let up = t.segment(format!("blk.{layer}.ffn_up"), up);
    let mut t = Tensors::default();
    let down = vec![
        Op::MatMul {
            x: G,
            products: vec![t.product(&w.ffn_down, P)],
        },
        Op::Add { x: X, y: P },
    ];
    let down = t.segment(format!("blk.{layer}.ffn_down"), down);
    [attention, up, down]
}

fn output_segment(hparams: &Hparams, weights: &Weights) -> Segment {
    use bufs::{LOGITS, O, ON, X};
    let mut t = Tensors::default();
    let ops = vec![
        Op::GatherOutputs { x: X, out: O },
        Op::RmsNorm {
            x: O,
            weight: t.add(&weights.output_norm),
            eps: hparams.norm_eps,
            out: ON,
        },
        Op::MatMul {
            x: ON,
            products: vec![Product {
                weight: t.add(&weights.output),
                bias: None,
                out: LOGITS,
            }],
        },
    ];
    t.segment("output".to_owned(), ops)
}
