//! Operations become launches: the builders of the kernels crate are given addresses, and which
//! kernels do a product is decided by the number of its rows.
//!
//! | rows | product |
//! |---|---|
//! | 1 | mat-vec, norm, SwiGLU and residual sum inside |
//! | 17 to 128 on sm_90, quantized weights | the input as f16 by columns, then mat-mat by wgmma |
//! | up to [`SMALL_BATCH`](super::workspace::SMALL_BATCH) otherwise | the input as f16, then mat-mat by matrix instructions (where there are, quantized weights, on AMD from 9 or 17 tokens on); else as 8 bits, then mat-mat |
//! | more | `tiled.rs`: tiles of the weights as f16 (what is f16 already as it is), then the vendor's library; mat-mat where there is none |
//!
//! Rows of a plan of float weights stay f32, and 4 to 16 of them are multiplied with f16 weights by
//! matrix instructions where NVIDIA has them, or become two f16 for the library, which does such
//! products from [`library_rows`](super::workspace::library_rows) on.

use rocmforge_device::ops::{
    Batch, Buf, HeadShape, KvLayer, Op, PlacedBuf, Product, RopeUse, TensorIndex,
};
use rocmforge_device::{BoundStep, Error, Scratch, SegmentBinding, SegmentLayout};
use rocmforge_gpu_driver::blas::Gemm;
use rocmforge_kernels_gpu::ops::attention::{self, Partials, Scores, SharedPositions};
use rocmforge_kernels_gpu::ops::elements;
use rocmforge_kernels_gpu::ops::kv::{self, Kv, Qkv, Rope, Rotation};
use rocmforge_kernels_gpu::ops::matvec::{self, Epilogue, Matrix};
use rocmforge_kernels_gpu::{Error as KernelError, GpuTarget, Launch};

use super::fuse::{Fused, Input, ScoresOf, fuse};
use super::launch_error;
use super::pass_data::{PassShape, SpansShape};
use super::reserve::DeviceReserve;
use super::workspace::Workspace;

mod adapters;
mod experts;
mod products;
mod single;
mod tiled;

/// Something to queue.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Queued {
    Launch(Launch),
    /// Zeros from an offset of the arena on, so many bytes.
    Clear(u64, u64),
    /// A product by the vendor's library, and what adds its bias where the library leaves that.
    Gemm(Gemm, Option<Launch>),
}

/// What a pass's operations are turned into launches with.
pub(super) struct Lowering<'a> {
    pub(super) target: &'a GpuTarget,
    /// Address of the arena.
    pub(super) arena: u64,
    /// Addresses of the reserve's parts.
    pub(super) reserve: &'a DeviceReserve,
    pub(super) workspace: Workspace,
    pub(super) scratch: Scratch<'a>,
    /// Address of the scratch block.
    pub(super) scratch_base: u64,
    pub(super) batch: &'a Batch<'a>,
    pub(super) shape: PassShape,
    /// Whether the vendor's products are there.
    pub(super) vendor: bool,
    /// What there is to queue, in order.
    pub(super) work: Vec<Queued>,
    /// What is to lie at the workspace's table before: addresses of experts, of
    /// one step after the other.
    pub(super) table: Vec<u64>,
    /// The gated unit that a step ended with, where the next one's product makes it on its way in.
    pub(super) handed_on: Option<Input>,
}

type Lowered<T = ()> = Result<T, Error>;

impl<'a> Lowering<'a> {
    /// Appends the launches of a segment's operations. `next` is the step that
    /// follows, if that is lowered too.
    pub(super) fn lower(&mut self, step: &BoundStep<'_>, next: Option<&BoundStep<'_>>) -> Lowered {
        let (ops, live_out, weights) = match step {
            BoundStep::Run {
                ops,
                live_out,
                weights,
            } => (*ops, *live_out, *weights),
            BoundStep::Experts { ffn, experts } => return self.experts(ffn, experts),
        };
        let nothing = SegmentLayout {
            tensors: Vec::new(),
            bytes: 0,
        };
        let bound = weights.unwrap_or(SegmentBinding {
            layout: &nothing,
            slab: 0,
        });
        let desc = |p: &Product| &bound.layout.tensors[p.weight].desc;
        let vector_rows = |p: &Product| self.count(p.out) == 1;
        let width = |buf: Buf| self.width(buf);
        let mut fused = fuse(ops, live_out, width, |gate, up| {
            vector_rows(gate)
                && matvec::fuses_gate(desc(gate).ty, desc(up).ty)
                && gate.bias.is_none()
                && up.bias.is_none()
                && desc(gate).rows == desc(up).rows
                && self.vector_fits(desc(gate).cols)
        });
        let ends_with = match fused.last() {
            Some(&Fused::Single(&Op::Gate { gate, up, act })) => {
                Some(Input::Gated { gate, up, act })
            }
            _ => None,
        };
        let hands_on = ends_with.filter(|gated| next.is_some_and(|n| takes_over(n, *gated)));
        if hands_on.is_some() {
            fused.pop();
        }
        for step in &fused {
            self.step(step, bound)?;
        }
        self.handed_on = hands_on;
        Ok(())
    }

    fn step(&mut self, step: &Fused<'_>, bound: SegmentBinding<'_>) -> Lowered {
        match step {
            Fused::Products {
                input,
                products,
                add,
            } => {
                let done = self.products(*input, products, *add, false, bound);
                done.map(|_| ())
            }
            Fused::Adapted {
                input,
                products,
                add,
                gate,
                adapters,
            } => self.adapted((*input, products), (*add, *gate), adapters, bound),
            Fused::GatedUnit {
                input,
                gate,
                up,
                act,
            } => {
                let input = self.with_handed_on(*input);
                let input = self.vector_input(input, true, bound)?;
                let pair = [
                    self.matrix(gate, bound, None)?,
                    self.matrix(up, bound, None)?,
                ];
                let launches = matvec::matvec(self.target, input, &pair, Epilogue::Gate(*act));
                self.push_all(launches)
            }
            Fused::Attention {
                q,
                k,
                v,
                out,
                heads,
                q_norm,
                k_norm,
                rope,
                layer,
                scores,
            } => {
                let qkv = self.qkv(*q, *k, *v, heads);
                let place = self.kv(*layer);
                let rope = self.rope(*rope, *q_norm, *k_norm, bound);
                let scores = self.scores(scores, *layer, bound);
                let out = self.at(*out);
                // A draft's row reads what the rows before it append, so those are
                // appended by a launch before.
                if self.shape.is_decode() && self.batch.rows_of_a_sequence() <= 1 {
                    return self.decode(qkv, out, &place, Some(&rope), &scores, heads);
                }
                let rotated = self.scratch_base + self.workspace.input;
                self.push(kv::rope_kv(self.target, qkv, rotated, &place, &rope))?;
                self.rotated(rotated, out, (&place, *layer), &scores, heads)
            }
            Fused::Combined { y, weights, x } => self.combine(*y, *weights, *x, true),
            Fused::Single(op) => self.single(op, bound),
        }
    }

    /// Sums routed rows by their weights, to `out` or on top of what is there.
    fn combine(&mut self, y: Buf, weights: Buf, out: Buf, add: bool) -> Lowered {
        let (rows, cols) = (self.count(out), self.width(out));
        let n_used = self.width(weights) as u32;
        let (y, weights, out) = (self.at(y), self.at(weights), self.at(out));
        self.push(elements::combine(y, weights, n_used, rows, cols, out, add))
    }

    fn decode(
        &mut self,
        qkv: Qkv,
        out: u64,
        place: &Kv<'_>,
        append: Option<&Rope>,
        scores: &Scores,
        heads: &HeadShape,
    ) -> Lowered {
        let rows = u64::from(qkv.rows);
        let positions = self.shape.positions_max;
        let mut shape = attention::decode_shape_of(
            scores,
            self.target,
            qkv.rows,
            qkv.n_head,
            place.layout,
            positions,
        )
        .map_err(|e| launch_error(&e))?;
        let one = attention::partials_bytes(
            rows,
            u64::from(heads.n_head),
            1,
            u64::from(heads.head_dim_v),
        );
        // One part needs neither partial sums nor counters.
        let n_split = match rows * u64::from(shape.blocks) <= self.reserve.counters_len {
            true => u64::from(shape.n_split).min(self.workspace.partials_bytes / one.max(1)),
            false => 1,
        };
        shape.n_split = n_split.max(1) as u32;
        let partials = Partials {
            partials: self.scratch_base + self.workspace.partials,
            counters: self.reserve.counters,
        };
        self.push(attention::decode(
            qkv, out, place, append, scores, shape, partials,
        ))
    }

    /// Attention of rows that are rotated, their keys and values in the pages: single rows and
    /// longer spans by a launch each.
    fn rotated(
        &mut self,
        q: u64,
        out: u64,
        (place, layer): (&Kv<'_>, KvLayer),
        scores: &Scores,
        heads: &HeadShape,
    ) -> Lowered {
        let shape = self.spans_shape(layer);
        if shape.single_rows > 0 {
            let rows = Qkv {
                q,
                k: 0,
                v: 0,
                n_head: heads.n_head,
                rows: shape.single_rows,
            };
            self.decode(rows, out, place, None, scores, heads)?;
        }
        if shape.n_tiles == 0 {
            return Ok(());
        }
        self.prefill(q, out, (place, layer), scores, heads)
    }

    fn prefill(
        &mut self,
        q: u64,
        out: u64,
        (place, layer): (&Kv<'_>, KvLayer),
        scores: &Scores,
        heads: &HeadShape,
    ) -> Lowered {
        let shape = self.spans_shape(layer);
        let tiles = match self.in_parts(layer) {
            true => self.workspace.of_parts.tiles,
            false => self.workspace.tiles,
        };
        let tiles = self.scratch_base + tiles;
        self.push(attention::prefill(
            self.target,
            q,
            heads.n_head,
            self.batch.n_tokens as u32,
            out,
            place,
            scores,
            tiles,
            (shape.n_tiles, shape.tile_rows),
            SharedPositions {
                room: self.parts_room(),
                positions: self.shape.positions_max,
            },
        ))
    }

    // ----
    // places --------------------------------------------------------------------------------------

    fn buf(&self, buf: Buf) -> PlacedBuf {
        self.scratch.layout.bufs[buf.0 as usize]
    }

    fn at(&self, buf: Buf) -> u64 {
        self.scratch_base + self.buf(buf).at
    }

    fn width(&self, buf: Buf) -> u64 {
        self.buf(buf).width
    }

    fn count(&self, buf: Buf) -> u64 {
        self.batch.counts().of(self.buf(buf).rows)
    }

    /// Whether a mat-vec's input of so many elements fits shared memory.
    fn vector_fits(&self, cols: u64) -> bool {
        cols / 32 * 40 + 1024 <= u64::from(self.target.shared_bytes_max)
    }

    fn vector(&self, tensor: TensorIndex, bound: SegmentBinding<'_>) -> u64 {
        self.arena + bound.slab + bound.layout.tensors[tensor].at
    }

    fn matrix(&self, p: &Product, bound: SegmentBinding<'_>, add: Option<Buf>) -> Lowered<Matrix> {
        let placed = &bound.layout.tensors[p.weight];
        Ok(Matrix {
            ty: placed.desc.ty,
            weights: self.arena + bound.slab + placed.at,
            rows: placed.desc.rows,
            out: self.at(add.unwrap_or(p.out)),
            bias: p.bias.map(|b| self.vector(b, bound)),
        })
    }

    /// Whether the sequences of a layer are parts of the pass's.
    fn in_parts(&self, layer: KvLayer) -> bool {
        self.batch.kv[usize::from(layer.group)].parts
    }

    fn spans_shape(&self, layer: KvLayer) -> SpansShape {
        match self.in_parts(layer) {
            true => self.shape.parts,
            false => self.shape.spans,
        }
    }

    fn kv(&self, layer: KvLayer) -> Kv<'a> {
        let (workspace, of_parts) = (&self.workspace, &self.workspace.of_parts);
        let (positions, sequences) = match self.in_parts(layer) {
            true => (of_parts.positions, of_parts.sequences),
            false => (workspace.positions, workspace.sequences),
        };
        Kv {
            layout: &self.batch.kv[usize::from(layer.group)].layout,
            layer: layer.index as usize,
            base: self.arena,
            table: self.reserve.table + self.shape.table_start(self.batch, layer.group) * 8,
            table_stride: self.spans_shape(layer).table_stride,
            positions: self.scratch_base + positions,
            sequences: (!self.shape.is_decode()).then_some(self.scratch_base + sequences),
        }
    }

    fn qkv(&self, q: Buf, k: Buf, v: Buf, heads: &HeadShape) -> Qkv {
        Qkv {
            q: self.at(q),
            k: self.at(k),
            v: self.at(v),
            n_head: heads.n_head,
            rows: self.batch.n_tokens as u32,
        }
    }

    /// The rotation of a table, where there is one.
    fn rotation(&self, rope: Option<RopeUse>) -> Option<Rotation> {
        let rope = rope?;
        let (before, rest) = self.batch.rope.split_at(usize::from(rope.table));
        let angles = &rest[0];
        let before: usize = before.iter().map(|r| r.cos().len() + r.sin().len()).sum();
        let cos = self.scratch_base + self.workspace.rope + before as u64 * 4;
        Some(Rotation {
            cos,
            sin: cos + angles.cos().len() as u64 * 4,
            first: rope.first,
            n_rot: angles.n_rot() as u32,
            order: angles.order(),
            by_position: false,
        })
    }

    fn rope(
        &self,
        rope: Option<RopeUse>,
        q_norm: Option<(TensorIndex, f32)>,
        k_norm: Option<(TensorIndex, f32)>,
        bound: SegmentBinding<'_>,
    ) -> Rope {
        if let (Some((_, q)), Some((_, k))) = (q_norm, k_norm) {
            assert!(q == k, "the kernels norm queries and keys with one eps");
        }
        let norm = |n: Option<(TensorIndex, f32)>| n.map(|(weight, _)| self.vector(weight, bound));
        Rope {
            rotation: self.rotation(rope),
            q_norm: norm(q_norm),
            k_norm: norm(k_norm),
            eps: q_norm.or(k_norm).map_or(0.0, |(_, eps)| eps),
        }
    }

    fn scores(&self, scores: &ScoresOf, layer: KvLayer, bound: SegmentBinding<'_>) -> Scores {
        let places = match self.in_parts(layer) {
            true => self.workspace.of_parts.places,
            false => self.workspace.places,
        };
        Scores {
            scale: scores.scale,
            mask: scores.mask,
            softcap: scores.softcap,
            sinks: scores.sinks.map(|s| self.vector(s, bound)),
            alibi: scores.alibi,
            places: self.scratch_base + places,
            whole: self.batch.has_whole_spans(),
        }
    }

    fn push(&mut self, launch: Result<Launch, KernelError>) -> Lowered {
        let launch = launch.map_err(|e| launch_error(&e))?;
        self.work.push(Queued::Launch(launch));
        Ok(())
    }

    fn push_all(&mut self, launches: Result<Vec<Launch>, KernelError>) -> Lowered {
        let launches = launches.map_err(|e| launch_error(&e))?;
        self.work.extend(launches.into_iter().map(Queued::Launch));
        Ok(())
    }
}

/// Whether a step begins with a product of a gated unit and nothing else of it or behind it
/// reads what that is made of.
fn takes_over(next: &BoundStep<'_>, gated: Input) -> bool {
    let BoundStep::Run { ops, live_out, .. } = next else {
        return false;
    };
    let [Op::MatMul { x, .. }, rest @ ..] = *ops else {
        return false;
    };
    // Adapters take their rows from the product before them.
    let rest = match rest {
        [Op::AddAdapters { x: same, .. }, rest @ ..] if same == x => rest,
        rest => rest,
    };
    let mut read = false;
    for op in rest {
        op.buffers(&mut |b| read |= gated.is_made_of(b), &mut |_| {});
    }
    *x == gated.target() && !read && !live_out.iter().any(|b| gated.is_made_of(*b))
}
