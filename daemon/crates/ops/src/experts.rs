//! Mixtures of experts: how rows are routed, and what an expert computes.

use crate::buf::Buf;
use crate::op::Act;
use crate::tensor::TensorIndex;

/// How a router's logits become probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterGate {
    /// Softmax over all experts.
    Softmax,
    /// The logistic function of each.
    Sigmoid,
    /// The best logits are chosen, then softmax over the chosen ones.
    SoftmaxOfChosen,
    /// `sqrt(ln(1 + exp(x)))` of each.
    SqrtSoftplus,
}

/// Which experts a row goes to, and with what weights (Shazeer et al. 2017; DeepSeek-AI 2024, arXiv
/// 2412.19437, for groups and selection biases).
///
/// Experts are chosen by probability plus selection bias, the lowest index first among equals; what
/// they weigh is the probability alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Router {
    /// Experts.
    pub n_expert: u32,
    /// Experts that a row goes to.
    pub n_used: u32,
    /// Probabilities.
    pub gate: RouterGate,
    /// Groups of consecutive experts; 1 for no groups.
    pub n_group: u32,
    /// Groups that are kept: those with the largest sum of their two largest selection values.
    pub n_group_used: u32,
    /// Whether the weights of the chosen are divided by their sum.
    pub renormalize: bool,
    /// Multiplies the weights at last.
    pub scale: f32,
}

/// The feed-forward of each expert. Routed row `t * n_used + s` is row `t`'s `s`-th choice.
///
/// ```text
/// g = (Wgate[e] x[t] + bgate[e]) * gate_scale[e];  u = (Wup[e] x[t] + bup[e]) * up_scale[e]
/// h = act(g) * u      (without Wgate: h = act(u))
/// out[t * n_used + s] = (Wdown[e] h + bdown[e]) * scale[e]       with e = ids[t][s]
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertFfn {
    /// Input rows.
    pub x: Buf,
    /// Chosen experts, `[tokens][n_used]`, as whole numbers in f32.
    pub ids: Buf,
    /// Experts that a row goes to.
    pub n_used: u32,
    /// The gate's product, `[routed][n_ff]`; `up_out` where there is no gate.
    pub gate_out: Buf,
    /// The up product, `[routed][n_ff]`.
    pub up_out: Buf,
    /// Output, `[routed][n_embd]`.
    pub out: Buf,
    /// The gated unit's function.
    pub act: Act,
    /// Tensors of one expert, by their index in the expert's own list.
    pub gate: Option<TensorIndex>,
    /// Matrix up.
    pub up: TensorIndex,
    /// Matrix down.
    pub down: TensorIndex,
    /// Bias of the gate.
    pub gate_bias: Option<TensorIndex>,
    /// Bias of up.
    pub up_bias: Option<TensorIndex>,
    /// Bias of down.
    pub down_bias: Option<TensorIndex>,
    /// One factor on the gate's product.
    pub gate_scale: Option<TensorIndex>,
    /// One factor on the up product.
    pub up_scale: Option<TensorIndex>,
    /// One factor on the expert's output.
    pub scale: Option<TensorIndex>,
    /// Tensors of one expert.
    pub n_tensors: u32,
}

impl ExpertFfn {
    /// As [`Op::buffers`](crate::Op::buffers).
    pub fn buffers(&self, read: &mut dyn FnMut(Buf), write: &mut dyn FnMut(Buf)) {
        read(self.x);
        read(self.ids);
        write(self.out);
    }

    /// Temporary buffers, which hold nothing before and after.
    pub fn temporaries(&self) -> [Buf; 2] {
        [self.gate_out, self.up_out]
    }
}
