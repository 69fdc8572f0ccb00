//! A mixture of experts as a layer's feed-forward: routed experts, and shared ones with or
//! without a gate of their own.

use rocmforge_ops::{Act, Buf, Op, Router, RouterGate};

use crate::build::{MoeSpec, PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::keys::{Keys, N_EXPERT_MAX, WIDTH_MAX};

/// The shared expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Shared {
    pub(super) n_ff: u64,
    /// Whether the shared expert's output is weighted by the sigmoid of a product of the input.
    pub(super) gated: bool,
}

/// The mixture of experts of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moe {
    pub(super) spec: MoeSpec,
    pub(super) shared: Option<Shared>,
}

/// Reads the keys that all MoE models share.
pub(super) fn read(
    keys: Keys<'_>,
    n_embd: u32,
    gate: RouterGate,
    renormalize: bool,
) -> Result<MoeSpec, Error> {
    let n_expert = keys.count("expert_count", N_EXPERT_MAX)?;
    let n_used = keys.count("expert_used_count", N_EXPERT_MAX)?;
    if n_used > n_expert {
        let message = format!("must be at most the {n_expert} experts");
        return Err(keys.bad("expert_used_count", n_used, message));
    }
    let gate = match keys.maybe("expert_gating_func", 4)? {
        0 => gate,
        1 => RouterGate::Softmax,
        2 => RouterGate::Sigmoid,
        3 => RouterGate::SoftmaxOfChosen,
        _ => RouterGate::SqrtSoftplus,
    };
    let n_group = keys.maybe("expert_group_count", n_expert)?.max(1);
    let n_group_used = match keys.optional_u32("expert_group_used_count")? {
        // Of no groups, or of one, none is chosen.
        None => n_group,
        Some(0) if n_group == 1 => n_group,
        Some(_) => keys.count("expert_group_used_count", n_group)?,
    };
    if !n_expert.is_multiple_of(n_group) {
        let message = format!("must divide the {n_expert} experts");
        return Err(keys.bad("expert_group_count", n_group, message));
    }
    if n_expert / n_group * n_group_used < n_used {
        let message = format!("the groups that are kept have fewer than {n_used} experts");
        return Err(keys.bad("expert_group_used_count", n_group_used, message));
    }
    let scale = keys.not_negative_or("expert_weights_scale", 1.0)?;
    Ok(MoeSpec {
        router: Router {
            n_expert,
            n_used,
            gate,
            n_group,
            n_group_used,
            renormalize: keys.flag("expert_weights_norm", renormalize)?,
            scale: if scale == 0.0 { 1.0 } else { scale },
        },
        n_ff: u64::from(keys.maybe("expert_feed_forward_length", WIDTH_MAX)?),
        width: u64::from(n_embd),
        act: Act::Silu,
        gated: true,
        bias: Presence::Absent,
        selection_bias: Presence::Absent,
    })
}

/// Sets the width of an expert, if the file does not give it.
pub(super) fn n_ff_or(spec: MoeSpec, default: u64) -> MoeSpec {
    MoeSpec {
        n_ff: if spec.n_ff == 0 { default } else { spec.n_ff },
        ..spec
    }
}

impl Moe {
    /// Emits the MoE on normed rows `n`. Returns the buffer of the weighted sum.
    pub(super) fn emit(&self, b: &mut PlanBuilder<'_>, i: u32, n: Buf) -> Result<Buf, Error> {
        let mut carried = Vec::new();
        let mut shared = None;
        if let Some(spec) = self.shared {
            let s = b.shared_expert(i, n, spec.n_ff, self.spec.act)?;
            carried.push(s);
            let mut gate = None;
            if spec.gated {
                let g = b.buf("shared gate", 1);
                let name = blk(i, "ffn_gate_inp_shexp");
                b.product(&name, n, Presence::Absent, g)?;
                carried.push(g);
                gate = Some(g);
            }
            shared = Some((s, gate));
        }
        let logits = b.router_logits(i, n, &self.spec)?;
        let out = b.experts(i, n, logits, &self.spec, &carried)?;
        match shared {
            None => {}
            Some((y, None)) => b.add(out, y),
            Some((y, Some(gate))) => b.op(Op::AddGated { x: out, y, gate }),
        }
        Ok(out)
    }
}
