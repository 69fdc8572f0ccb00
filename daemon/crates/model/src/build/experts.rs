//! Mixtures of experts: the router in the segment under construction, each expert a
//! segment, then the weighted sum.

use rocmforge_ops::{
    Act, Buf, ExpertFfn, Op, Role, Router, Rows, Segment, SegmentKind, Step, TensorDesc,
    TensorIndex,
};

use super::{Found, PlanBuilder, Presence, blk};
use crate::error::Error;

/// Minimum bytes of a segment of experts; smaller experts are grouped, since the link reaches its
/// rate only with pieces of about a MiB.
const SEGMENT_BYTES_MIN: u64 = 1 << 20;

/// Tensor with gate and up of all experts.
const FUSED: &str = "ffn_gate_up_exps.weight";

/// Parameters of a layer's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MoeSpec {
    pub(crate) router: Router,
    /// Number of rows of an expert's up matrix.
    pub(crate) n_ff: u64,
    /// Number of elements of an expert's input and output.
    pub(crate) width: u64,
    pub(crate) act: Act,
    /// Whether experts have a gate matrix in addition to up.
    pub(crate) gated: bool,
    /// Whether the router and the experts' products have biases.
    pub(crate) bias: Presence,
    /// Whether the selection has a bias (`exp_probs_b`).
    pub(crate) selection_bias: Presence,
}

/// Where one expert's part of a tensor lies.
#[derive(Debug, Clone, Copy)]
enum Part {
    /// Rows `expert * stride + first ..`, this many of them.
    Rows { stride: u64, first: u64, rows: u64 },
    /// The single element with the expert's number.
    Element,
}

/// The tensors of one expert.
#[derive(Default)]
struct Parts(Vec<(Found, Part, Role)>);

impl Parts {
    fn add(&mut self, found: Found, part: Part, role: Role) -> TensorIndex {
        self.0.push((found, part, role));
        self.0.len() - 1
    }

    fn matrix(&mut self, found: Found, rows: u64) -> TensorIndex {
        let part = Part::Rows {
            stride: rows,
            first: 0,
            rows,
        };
        self.add(found, part, Role::Matrix)
    }

    fn of(&self, expert: u64) -> impl Iterator<Item = TensorDesc> + '_ {
        self.0.iter().map(move |(found, part, role)| match *part {
            Part::Rows {
                stride,
                first,
                rows,
            } => found.slice(expert * stride + first, rows).with_role(*role),
            Part::Element => found.columns(expert, 1).with_role(*role),
        })
    }
}

impl PlanBuilder<'_> {
    /// Emits the router's logits for rows `n`, from `ffn_gate_inp`.
    pub(crate) fn router_logits(
        &mut self,
        layer: u32,
        n: Buf,
        spec: &MoeSpec,
    ) -> Result<Buf, Error> {
        let n_expert = u64::from(spec.router.n_expert);
        let logits = self.buf("router", n_expert);
        let name = blk(layer, "ffn_gate_inp");
        self.product(&name, n, spec.bias, logits)
    }

    /// Emits routing by `logits`, the experts on rows `x`, and the weighted sum in a new step
    /// without weights. Returns the sum's buffer. The buffers in `carried` stay alive besides the
    /// residual stream.
    pub(crate) fn experts(
        &mut self,
        layer: u32,
        x: Buf,
        logits: Buf,
        spec: &MoeSpec,
        carried: &[Buf],
    ) -> Result<Buf, Error> {
        let n_used = spec.router.n_used;
        let n_expert = u64::from(spec.router.n_expert);
        let bias_name = ["exp_probs_b.bias", "exp_probs_b"]
            .into_iter()
            .map(|n| blk(layer, n))
            .find(|n| self.has(n))
            .unwrap_or_else(|| blk(layer, "exp_probs_b.bias"));
        let bias = self.vector_if(&bias_name, n_expert, spec.selection_bias)?;
        let ids = self.buf("ids", u64::from(n_used));
        let weights = self.buf("weights", u64::from(n_used));
        self.op(Op::Route {
            logits,
            bias,
            router: spec.router,
            ids,
            weights,
        });
        let mut alive = vec![x, ids, weights];
        alive.extend(carried);
        self.close(&alive);

        let (parts, mut ffn) = self.expert_parts(layer, spec, n_expert)?;
        ffn.x = x;
        ffn.ids = ids;
        let routed = Rows::Routed(n_used);
        ffn.up_out = self.buf_rows("expert up", spec.n_ff, routed);
        ffn.gate_out = if spec.gated {
            self.buf_rows("expert gate", spec.n_ff, routed)
        } else {
            ffn.up_out
        };
        ffn.out = self.buf_rows("expert out", spec.width, routed);
        let first_segment = self.experts.len() as u32;
        let per_segment = self.expert_segments(layer, &parts, n_expert);
        let mut alive = vec![ffn.out, weights];
        alive.extend(carried);
        self.push_step(
            Step::Experts {
                first_segment,
                n_expert: n_expert as u32,
                per_segment: per_segment as u32,
                ffn,
            },
            &alive,
        );
        self.cut(blk(layer, "combine"), &[]);
        let out = self.buf("moe", spec.width);
        self.op(Op::Combine {
            y: ffn.out,
            weights,
            out,
        });
        Ok(out)
    }

    /// Adds the segments of a layer's experts. Returns the number of experts in each.
    fn expert_segments(&mut self, layer: u32, parts: &Parts, n_expert: u64) -> u64 {
        let bytes: u64 = parts.of(0).map(|t| t.bytes).sum();
        let per_segment = SEGMENT_BYTES_MIN
            .div_ceil(bytes.max(1))
            .clamp(1, 8)
            .min(n_expert);
        for first in (0..n_expert).step_by(per_segment as usize) {
            let end = (first + per_segment).min(n_expert);
            let name = if end == first + 1 {
                blk(layer, &format!("exps.{first}"))
            } else {
                blk(layer, &format!("exps.{first}-{}", end - 1))
            };
            self.experts.push(Segment {
                name,
                kind: SegmentKind::Expert {
                    layer: self.n_expert_layers,
                },
                tensors: (first..end).flat_map(|e| parts.of(e)).collect(),
            });
        }
        self.n_expert_layers += 1;
        per_segment
    }

    /// The experts' gate, if they have one, and up: two matrices, or one with the gate's rows first
    /// in each expert.
    fn gate_and_up(
        &mut self,
        layer: u32,
        spec: &MoeSpec,
        is_fused: bool,
        parts: &mut Parts,
    ) -> Result<(Option<TensorIndex>, TensorIndex), Error> {
        let (n_ff, width, n_expert) = (spec.n_ff, spec.width, u64::from(spec.router.n_expert));
        if is_fused {
            let both = self.tensor(&blk(layer, FUSED), &[width, 2 * n_ff, n_expert])?;
            let half = |first| Part::Rows {
                stride: 2 * n_ff,
                first,
                rows: n_ff,
            };
            let gate = parts.add(both.clone(), half(0), Role::Matrix);
            return Ok((Some(gate), parts.add(both, half(n_ff), Role::Matrix)));
        }
        let mut matrix = |name| {
            let found = self.tensor(&blk(layer, name), &[width, n_ff, n_expert])?;
            Ok::<_, Error>(parts.matrix(found, n_ff))
        };
        let gate = match spec.gated {
            true => Some(matrix("ffn_gate_exps.weight")?),
            false => None,
        };
        Ok((gate, matrix("ffn_up_exps.weight")?))
    }

    /// The experts' tensors: separate or with gate and up fused (gate's rows first in each expert).
    fn expert_parts(
        &mut self,
        layer: u32,
        spec: &MoeSpec,
        n_expert: u64,
    ) -> Result<(Parts, ExpertFfn), Error> {
        let (n_ff, width) = (spec.n_ff, spec.width);
        let mut parts = Parts::default();
        let is_fused = spec.gated && self.has(&blk(layer, FUSED));
        let (gate, up) = self.gate_and_up(layer, spec, is_fused, &mut parts)?;
        let down = blk(layer, "ffn_down_exps.weight");
        let found = self.tensor(&down, &[n_ff, width, n_expert])?;
        let down = parts.matrix(found, width);
        let mut vector =
            |b: &mut Self, name: &str, len: u64| -> Result<Option<TensorIndex>, Error> {
                let found = b.tensor_if(&blk(layer, name), &[len, n_expert])?;
                let part = Part::Rows {
                    stride: 1,
                    first: 0,
                    rows: 1,
                };
                Ok(found.map(|f| parts.add(f, part, Role::Vector)))
            };
        let (mut gate_bias, mut up_bias, mut down_bias) = (None, None, None);
        if spec.bias != Presence::Absent {
            gate_bias = vector(self, "ffn_gate_exps.bias", n_ff)?;
            up_bias = vector(self, "ffn_up_exps.bias", n_ff)?;
            down_bias = vector(self, "ffn_down_exps.bias", width)?;
        }
        let [gate_name, up_name] = match is_fused {
            true => ["ffn_gate_up_exps"; 2],
            false => ["ffn_gate_exps", "ffn_up_exps"],
        };
        let mut factor = |name: &str, bias: Option<TensorIndex>| {
            let name = blk(layer, &format!("{name}.scale"));
            let found = self.tensor_if(&name, &[n_expert])?;
            if found.is_some() && bias.is_some() {
                return Err(Error::Unsupported(format!(
                    "the experts of '{name}' have biases, too, which is not supported; use a file of another quantization"
                )));
            }
            Ok(found.map(|f| parts.add(f, Part::Element, Role::Vector)))
        };
        let gate_scale = match spec.gated {
            true => factor(gate_name, gate_bias)?,
            false => None,
        };
        let up_scale = factor(up_name, up_bias)?;
        let scale = factor("ffn_down_exps", down_bias)?;
        let ffn = ExpertFfn {
            x: Buf(0),
            ids: Buf(0),
            n_used: spec.router.n_used,
            gate_out: Buf(0),
            up_out: Buf(0),
            out: Buf(0),
            act: spec.act,
            gate,
            up,
            down,
            gate_bias,
            up_bias,
            down_bias,
            gate_scale,
            up_scale,
            scale,
            n_tensors: parts.0.len() as u32,
        };
        Ok((parts, ffn))
    }
}
