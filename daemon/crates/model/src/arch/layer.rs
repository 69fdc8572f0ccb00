//! The layer that most decoders are made of: attention and feed-forward, each normed before or
//! after and added to the residual stream.
//!
//! One layer, on `T` rows (shapes are `[rows][width]`, width fastest):
//!
//! ```text
//! N = rms_norm(X)                         [T][n_embd]
//! Q, K, V = N * Wq, N * Wk, N * Wv        [T][n_head * head_dim], [T][n_head_kv * head_dim],
//!                                         [T][n_head_kv * head_dim_v]
//! rope(Q), rope(K); K, V -> KV pages
//! A = attention(Q, KV)                    [T][n_head * head_dim_v]
//! P = A * Wo; X += P                      [T][n_embd]                  to here blk.{i}.attn
//! N = rms_norm(X)
//! G, U = N * Wgate, N * Wup               [T][n_ff]
//! G = act(G) * U                                                       to here blk.{i}.ffn_up
//! P = G * Wdown; X += P                                                blk.{i}.ffn_down
//! ```
//!
//! That is three segments, so that what is on its way while another part is in use takes a
//! third of a layer's room. A feed-forward of one matrix up is one segment; a mixture's are
//! its router and its experts.

use rocmforge_ops::{Act, Buf, KvLayer};

use super::moe::Moe;
use crate::build::{AttentionSpec, PlanBuilder, Presence, blk};
use crate::error::Error;

/// A layer's feed-forward.
#[derive(Debug, Clone, Copy)]
pub(super) enum FeedForward {
    Gated {
        n_ff: u64,
        act: Act,
        bias: Presence,
    },
    /// A feed-forward without a gate: one matrix up, one down.
    Plain {
        n_ff: u64,
        act: Act,
        bias: Presence,
    },
    Moe(Moe),
}

impl FeedForward {
    /// `Wdown (silu(Wgate n) * Wup n)`, without biases.
    pub(super) fn swiglu(n_ff: u64) -> Self {
        Self::Gated {
            n_ff,
            act: Act::Silu,
            bias: Presence::Absent,
        }
    }
}

/// Names of a layer's norms: before or after attention and feed-forward, or both.
#[derive(Debug, Clone, Copy)]
pub(super) struct Norms {
    pub(super) attn: Option<&'static str>,
    pub(super) post_attn: Option<&'static str>,
    pub(super) ffn: Option<&'static str>,
    pub(super) post_ffn: Option<&'static str>,
}

impl Norms {
    /// Norms before attention and feed-forward.
    pub(super) const PRE: Norms = Norms {
        attn: Some("attn_norm.weight"),
        post_attn: None,
        ffn: Some("ffn_norm.weight"),
        post_ffn: None,
    };
    /// Norms before attention and feed-forward, where the file names the second one after the
    /// attention that it follows.
    pub(super) const POST_ATTENTION: Norms = Norms {
        ffn: Some("post_attention_norm.weight"),
        ..Norms::PRE
    };
    /// Norms before and after attention and feed-forward.
    pub(super) const SANDWICH: Norms = Norms {
        post_attn: Some("post_attention_norm.weight"),
        post_ffn: Some("post_ffw_norm.weight"),
        ..Norms::PRE
    };
    /// Norms after attention and feed-forward.
    pub(super) const POST: Norms = Norms {
        attn: None,
        ffn: None,
        ..Norms::SANDWICH
    };
}

/// Parameters of a decoder layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layer {
    pub(super) attention: AttentionSpec,
    pub(super) feed_forward: FeedForward,
    pub(super) norms: Norms,
    /// Epsilon of the norms after attention and feed-forward, if different from the others'.
    pub(super) post_eps: Option<f32>,
    /// Factor on what is added to the residual stream.
    pub(super) residual_scale: f32,
}

impl Layer {
    pub(super) fn new(attention: AttentionSpec, feed_forward: FeedForward) -> Self {
        Self {
            attention,
            feed_forward,
            norms: Norms::PRE,
            post_eps: None,
            residual_scale: 1.0,
        }
    }
}

/// Emits a layer. Returns where its K and V are stored.
pub(super) fn layer(
    b: &mut PlanBuilder<'_>,
    i: u32,
    x: Buf,
    spec: &Layer,
) -> Result<KvLayer, Error> {
    let kv = attention(b, i, x, spec)?;
    feed_forward(b, i, x, spec)?;
    Ok(kv)
}

/// Emits a layer's attention.
pub(super) fn attention(
    b: &mut PlanBuilder<'_>,
    i: u32,
    x: Buf,
    spec: &Layer,
) -> Result<KvLayer, Error> {
    b.cut(blk(i, "attn"), &[]);
    let n = pre_norm(b, i, x, spec.norms.attn)?;
    let (p, kv) = b.attention(i, n, &spec.attention)?;
    add(b, i, (x, p), spec.norms.post_attn, spec)?;
    Ok(kv)
}

/// Emits a layer's feed-forward.
pub(super) fn feed_forward(
    b: &mut PlanBuilder<'_>,
    i: u32,
    x: Buf,
    spec: &Layer,
) -> Result<(), Error> {
    let p = match spec.feed_forward {
        FeedForward::Gated { n_ff, act, bias } => {
            b.cut(blk(i, "ffn_up"), &[]);
            let n = pre_norm(b, i, x, spec.norms.ffn)?;
            b.gated_ffn(i, n, n_ff, act, bias, &[])?
        }
        FeedForward::Plain { n_ff, act, bias } => {
            b.cut(blk(i, "ffn"), &[]);
            let n = pre_norm(b, i, x, spec.norms.ffn)?;
            b.plain_ffn(i, n, n_ff, act, bias, ("", "p"))?
        }
        FeedForward::Moe(moe) => {
            b.cut(blk(i, "router"), &[]);
            let n = pre_norm(b, i, x, spec.norms.ffn)?;
            moe.emit(b, i, n)?
        }
    };
    add(b, i, (x, p), spec.norms.post_ffn, spec)
}

/// Adds `p` to the residual stream `x`, after norming it if the layer has such a norm.
fn add(
    b: &mut PlanBuilder<'_>,
    i: u32,
    (x, p): (Buf, Buf),
    norm: Option<&str>,
    spec: &Layer,
) -> Result<(), Error> {
    let y = match norm {
        Some(name) => {
            let eps = spec.post_eps.unwrap_or(b.eps);
            b.norm_by(p, &blk(i, name), "post", eps)?
        }
        None => p,
    };
    b.residual(x, y, None, spec.residual_scale)
}

fn pre_norm(b: &mut PlanBuilder<'_>, i: u32, x: Buf, name: Option<&str>) -> Result<Buf, Error> {
    match name {
        Some(name) => b.norm(x, &blk(i, name), "n"),
        None => Ok(x),
    }
}
