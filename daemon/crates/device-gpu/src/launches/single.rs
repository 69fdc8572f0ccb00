//! Operations that are not part of a larger one: a launch or two each.

use rocmforge_device::SegmentBinding;
use rocmforge_device::ops::{Act, Buf, Op, TensorIndex};
use rocmforge_kernels_gpu::ops::activations::{self, Norm, Sink, Transform};
use rocmforge_kernels_gpu::ops::elements::{self, Change, Part};
use rocmforge_kernels_gpu::ops::heads::{HeadInputs, HeadMatrices, matmat_heads};
use rocmforge_kernels_gpu::ops::kv::{self, Heads, Qkv};
use rocmforge_kernels_gpu::ops::recurrent::{self, Conv, DeltaNet, Sequences, Ssm};
use rocmforge_kernels_gpu::ops::{route, rows};

use super::super::fuse::{Input, ScoresOf};
use super::{Lowered, Lowering};

impl Lowering<'_> {
    /// One operation as it is.
    #[expect(clippy::too_many_lines, reason = "one arm an operation")]
    pub(super) fn single(&mut self, op: &Op, bound: SegmentBinding<'_>) -> Lowered {
        match op {
            Op::RmsNorm {
                x,
                weight,
                eps,
                group,
                out,
            } => {
                let group = u64::from(*group);
                let cols = weight.map(|w| bound.layout.tensors[w].desc.cols);
                let norm = Norm {
                    weight: weight.map(|w| self.vector(w, bound)),
                    weight_of_row: cols.is_some_and(|c| c != group || group == self.width(*x)),
                    group,
                    eps: *eps,
                };
                self.rows_to(*x, Transform::Norm(norm), Sink::F32(self.at(*out)))
            }
            Op::LayerNorm {
                x,
                weight,
                bias,
                eps,
                group,
                out,
            } => {
                let (group, width) = (u64::from(*group), self.width(*x));
                let norm = rows::LayerNorm {
                    weight: self.vector(*weight, bound),
                    bias: bias.map(|b| self.vector(b, bound)),
                    weight_of_row: bound.layout.tensors[*weight].desc.cols == width,
                    group,
                    eps: *eps,
                };
                let (n, from, to) = (self.count(*x), self.at(*x), self.at(*out));
                self.push(rows::layer_norm(from, n, width, &norm, to))
            }
            Op::Add { x, y, scale } => {
                let transform = Transform::Add {
                    other: self.at(*y),
                    scale: *scale,
                };
                self.rows_to(*x, transform, Sink::Stored)
            }
            Op::Gate { gate, up, act } => {
                let transform = Transform::Gate {
                    other: Some(self.at(*up)),
                    act: *act,
                };
                self.rows_to(*gate, transform, Sink::F32(self.at(*gate)))
            }
            Op::Activate {
                act: Act::Identity, ..
            } => Ok(()),
            Op::Activate { x, act } => {
                let transform = Transform::Gate {
                    other: None,
                    act: *act,
                };
                self.rows_to(*x, transform, Sink::F32(self.at(*x)))
            }
            Op::Scale { x, factor } => self.change(*x, Change::Scale(*factor)),
            Op::ScaleBy { x, weight } => {
                let by = self.vector(*weight, bound);
                self.change(*x, Change::ScaleBy(by))
            }
            Op::Clamp { x, low, high, out } => {
                let bounds = [low, high].map(|bound_of| self.vector(*bound_of, bound));
                let (n, width) = (self.count(*x), self.width(*x));
                let (from, to) = (self.at(*x), self.at(*out));
                self.push(elements::clamp(from, n, width, bounds, to))
            }
            Op::SoftCap { x, cap } => self.change(*x, Change::SoftCap(*cap)),
            Op::AddGated { x, y, gate } => {
                let what = Change::AddGated {
                    y: self.at(*y),
                    gate: self.at(*gate),
                };
                self.change(*x, what)
            }
            Op::AddWeighted { x, y, weight } => {
                let what = Change::AddWeighted {
                    y: self.at(*y),
                    weight: self.vector(*weight, bound),
                };
                self.change(*x, what)
            }
            Op::GateHeads { x, gate, act } => {
                let what = Change::GateHeads {
                    gate: self.at(*gate),
                    head_dim: (self.width(*x) / self.width(*gate)) as u32,
                    act: *act,
                };
                self.change(*x, what)
            }
            Op::AddTable {
                x,
                table,
                by_position,
            } => {
                let positions = self.scratch_base + self.workspace.positions;
                let what = Change::AddTable {
                    table: self.vector(*table, bound),
                    positions: by_position.then_some(positions),
                };
                self.change(*x, what)
            }
            Op::PositionScale { x, beta, span } => {
                let what = Change::PositionScale {
                    positions: self.scratch_base + self.workspace.positions,
                    beta: *beta,
                    span: *span,
                };
                self.change(*x, what)
            }
            Op::MatMul { x, products } => {
                let done = self.products(Input::Plain(*x), products, None, false, bound);
                done.map(|_| ())
            }
            Op::AddAdapters { .. } => self.adapters_alone(op, bound),
            Op::MatMulHeads {
                x,
                n_head,
                weight,
                out,
            } => self.heads(*x, *n_head, *weight, *out, bound),
            Op::MatMulTransposed { x, weight, out } => {
                let (rows, cols) = (self.count(*out), self.width(*out));
                let inputs = (self.at(*x), self.width(*x));
                let (weight, out) = (self.vector(*weight, bound), self.at(*out));
                self.push(elements::product_transposed(
                    inputs, weight, rows, cols, out,
                ))
            }
            Op::Columns {
                n_group,
                parts,
                out,
            } => {
                let parts: Vec<Part> = parts
                    .iter()
                    .map(|p| Part {
                        x: self.at(p.x),
                        cols: self.width(p.x),
                        first: p.first,
                        stride: p.stride,
                        width: p.width,
                    })
                    .collect();
                let (rows, out) = (self.count(*out), self.at(*out));
                self.push(elements::columns(&parts, *n_group, rows, out))
            }
            Op::MergeRows { x, out } => {
                // The rows lie as they are to be: those of the output are longer and fewer.
                let (rows, cols) = (self.count(*out), self.width(*out));
                let part = Part {
                    x: self.at(*x),
                    cols,
                    first: 0,
                    stride: 0,
                    width: cols as u32,
                };
                if rows == 0 {
                    return Ok(());
                }
                let out = self.at(*out);
                self.push(elements::columns(&[part], 1, rows, out))
            }
            Op::Route {
                logits,
                bias,
                router,
                ids,
                weights,
            } => {
                let bias = bias.map(|b| self.vector(b, bound));
                let rows = self.count(*logits) as u32;
                let (logits, ids, weights) = (self.at(*logits), self.at(*ids), self.at(*weights));
                self.push(route::route(
                    self.target,
                    logits,
                    bias,
                    router,
                    rows,
                    ids,
                    weights,
                ))
            }
            Op::Combine { y, weights, out } => self.combine(*y, *weights, *out, false),
            Op::GatherOutputs { x, out } => {
                let (x, out, width) = (self.at(*x), self.at(*out), self.width(*out));
                let wanted = self.scratch_base + self.workspace.outputs;
                let n = self.batch.outputs.len() as u32;
                let spans = rows::Spans {
                    sequences: self.scratch_base + self.workspace.sequences,
                    places: self.scratch_base + self.workspace.places,
                };
                self.push(rows::gather_outputs(x, wanted, n, width, out, spans))
            }
            Op::Rope {
                x,
                n_head,
                head_dim,
                norm,
                rope,
            } => {
                let heads = Heads {
                    x: self.at(*x),
                    n_head: *n_head,
                    dim: *head_dim,
                    rows: self.count(*x) as u32,
                };
                let positions = self.scratch_base + self.workspace.positions;
                let norm = norm.map(|(weight, eps)| (self.vector(weight, bound), eps));
                let rotation = self.rotation(Some(*rope));
                self.push(kv::rope_heads(
                    self.target,
                    heads,
                    positions,
                    norm,
                    rotation,
                ))
            }
            Op::RopeKv {
                q,
                k,
                v,
                heads,
                q_norm,
                k_norm,
                rope,
                layer,
            } => {
                let qkv = self.qkv(*q, *k, *v, heads);
                let place = self.kv(*layer);
                let rope = self.rope(*rope, *q_norm, *k_norm, bound);
                self.push(kv::rope_kv(self.target, qkv, qkv.q, &place, &rope))
            }
            Op::Attention {
                q,
                out,
                heads,
                layer,
                scale,
                mask,
                softcap,
                sinks,
                alibi,
            } => {
                let (at, out) = (self.at(*q), self.at(*out));
                let place = self.kv(*layer);
                let scores = ScoresOf {
                    scale: *scale,
                    mask: *mask,
                    softcap: *softcap,
                    sinks: *sinks,
                    alibi: *alibi,
                };
                let scores = self.scores(&scores, *layer, bound);
                if self.shape.is_decode() {
                    let qkv = Qkv {
                        q: at,
                        k: 0,
                        v: 0,
                        n_head: heads.n_head,
                        rows: self.batch.n_tokens as u32,
                    };
                    return self.decode(qkv, out, &place, None, &scores, heads);
                }
                self.rotated(at, out, (&place, *layer), &scores, heads)
            }
            Op::Conv { .. } | Op::DeltaNet { .. } | Op::Ssm { .. } => self.recurrent(op, bound),
        }
    }

    fn change(&mut self, x: Buf, what: Change) -> Lowered {
        let (at, rows, cols) = (self.at(x), self.count(x), self.width(x));
        if rows == 0 {
            return Ok(());
        }
        self.push(elements::change(at, rows, cols, what))
    }

    /// A product for each head.
    fn heads(
        &mut self,
        x: Buf,
        n_head: u32,
        weight: TensorIndex,
        out: Buf,
        bound: SegmentBinding<'_>,
    ) -> Lowered {
        let desc = &bound.layout.tensors[weight].desc;
        let matrices = HeadMatrices {
            ty: desc.ty,
            weights: self.vector(weight, bound),
            n_head,
            rows: desc.rows / u64::from(n_head),
            cols: desc.cols,
        };
        let (tokens, cols) = (self.count(x), desc.cols);
        let rows = tokens * u64::from(n_head);
        let bytes = self.scratch_base + self.workspace.input;
        let scales = (bytes + activations::q8_bytes(rows, cols))
            .next_multiple_of(rocmforge_device::ALIGNMENT);
        if desc.ty.is_quantized() {
            // Heads are rows of their own.
            let sink = Sink::Q8(bytes, scales);
            self.push(activations::activations(
                self.at(x),
                rows,
                cols,
                Transform::Plain,
                sink,
            ))?;
        }
        let inputs = HeadInputs {
            x: self.at(x),
            q8: (bytes, scales),
            n_tokens: tokens as u32,
        };
        let out = self.at(out);
        self.push(matmat_heads(self.target, inputs, &matrices, out))
    }

    fn sequences(&self, state: u64) -> Sequences {
        let spans = self.batch.spans;
        Sequences {
            places: self.scratch_base + self.workspace.places,
            n: spans.len() as u32,
            rows_max: self.batch.rows_of_a_sequence() as u32,
            state,
        }
    }

    /// An operation with a state.
    fn recurrent(&mut self, op: &Op, bound: SegmentBinding<'_>) -> Lowered {
        match op {
            Op::Conv {
                x,
                weight,
                bias,
                kernel,
                act,
                state,
                out,
            } => {
                let conv = Conv {
                    x: self.at(*x),
                    weight: self.vector(*weight, bound),
                    bias: bias.map(|b| self.vector(b, bound)),
                    channels: self.width(*x),
                    kernel: *kernel,
                    act: *act,
                    out: self.at(*out),
                };
                let sequences = self.sequences(*state);
                self.push(recurrent::conv(&conv, sequences))
            }
            Op::DeltaNet {
                qkv,
                alpha,
                beta,
                a,
                dt_bias,
                n_head_k,
                n_head_v,
                dim_k,
                dim_v,
                interleaved,
                eps,
                state,
                out,
            } => {
                let net = DeltaNet {
                    qkv: self.at(*qkv),
                    alpha: self.at(*alpha),
                    beta: self.at(*beta),
                    a: self.vector(*a, bound),
                    dt_bias: self.vector(*dt_bias, bound),
                    n_head_k: *n_head_k,
                    n_head_v: *n_head_v,
                    dim_k: *dim_k,
                    dim_v: *dim_v,
                    interleaved: *interleaved,
                    eps: *eps,
                    out: self.at(*out),
                };
                let sequences = self.sequences(*state);
                self.push(recurrent::delta_net(self.target, &net, sequences))
            }
            Op::Ssm {
                xbc,
                dt,
                a,
                skip,
                dt_bias,
                n_head,
                dim,
                n_group,
                n_state,
                state,
                out,
            } => {
                let ssm = Ssm {
                    xbc: self.at(*xbc),
                    dt: self.at(*dt),
                    a: self.vector(*a, bound),
                    skip: self.vector(*skip, bound),
                    dt_bias: self.vector(*dt_bias, bound),
                    n_head: *n_head,
                    dim: *dim,
                    n_group: *n_group,
                    n_state: *n_state,
                    out: self.at(*out),
                };
                let sequences = self.sequences(*state);
                self.push(recurrent::ssm(&ssm, sequences))
            }
            other => unreachable!("{} has no state", other.name()),
        }
    }
}
