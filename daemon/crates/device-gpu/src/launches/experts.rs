//! The feed-forwards of experts: routed rows find their experts' matrices in a table on the device,
//! so nobody waits for the routing. Few rows go to mat-vecs; more are sorted by expert and go to
//! tiles, of up to 8 rows or of up to 32.

use rocmforge_device::ops::{Act, ExpertFfn, TensorIndex};
use rocmforge_device::{BoundExpert, Error};
use rocmforge_kernels_gpu::ops::activations::{self, Sink, Transform};
use rocmforge_kernels_gpu::ops::experts::{self, Groups, ManyInputs, Routed, Tensors};

use super::super::workspace::EXPERTS_MAX;
use super::{Lowered, Lowering, Queued};

/// From how many routed rows on they are sorted by expert and go to tiles of up to 8: from 1.25 for
/// each expert on. Qwen3-30B-A3B (128 experts, 8 a token) on an H200, clients and tokens a second,
/// so and each routed row for itself: 16 clients 1,970 and 2,027, 32 clients 3,101 and 2,522.
fn few_from(n_expert: usize) -> u64 {
    (5 * n_expert as u64 / 4).max(32)
}

/// From how many on they go to tiles of up to 32. Where tiles of 8 are there (`few`), from 9 for
/// each expert on: 64 clients of that model get 5,146 tokens a second by tiles of 8 and 3,515 by
/// tiles of 32, 128 clients 6,827 (by a form of the kernel that was 6 % slower with 64) and 6,202.
/// Else from about three for each expert on, since fewer rows of an expert find its weights in the
/// second-level cache: on an H100 with 16 and 32 tokens sorted 1,260 and 1,955, with 16 and 31 not
/// sorted 1,624 and 2,281; on an H200 with 48 sorted 2,586, not sorted 2,592.
fn many_from(n_expert: usize, few: bool) -> u64 {
    match few {
        true => 9 * n_expert as u64,
        false => (3 * n_expert as u64).clamp(64, 384),
    }
}

/// The experts of a layer that are given, and where their matrices are.
struct ExpertLayer<'a> {
    ffn: &'a ExpertFfn,
    n_expert: usize,
    /// Address of the table of their places.
    table: u64,
    up: Tensors,
    down: Tensors,
    gate: Option<Tensors>,
}

impl ExpertLayer<'_> {
    /// The first products with the function behind them as one product, where a kernel has both: it
    /// has one factor, behind the function.
    fn unit(&self) -> Option<Tensors> {
        let ffn = self.ffn;
        let plain = ffn.gate_scale.or(ffn.up_scale).is_none();
        match &self.gate {
            None if plain => Some(Tensors {
                act: ffn.act,
                ..self.up
            }),
            Some(gate) if plain && gate.ty == self.up.ty => Some(Tensors {
                second: Some(self.up.first),
                second_bias: self.up.first_bias,
                act: ffn.act,
                ..*gate
            }),
            _ => None,
        }
    }
}

impl Lowering<'_> {
    /// Computes the rows that are routed to the given experts.
    pub(super) fn experts(&mut self, ffn: &ExpertFfn, given: &[BoundExpert<'_>]) -> Lowered {
        let Some(first) = given.first() else {
            return Ok(());
        };
        let n_expert = given
            .iter()
            .map(|e| e.expert as usize + 1)
            .max()
            .unwrap_or(0);
        if n_expert as u64 > EXPERTS_MAX {
            return Err(Error::NoKernel(format!(
                "no GPU kernel for {n_expert} experts a layer: at most {EXPERTS_MAX}"
            )));
        }
        let first_entry = self.table.len();
        self.table.resize(first_entry + n_expert, 0);
        if self.table.len() as u64 * 8 > self.workspace.table_bytes {
            return Err(Error::NoKernel(format!(
                "the places of {} experts are more than the plan said",
                self.table.len()
            )));
        }
        for e in given {
            let place = e.weights.layout.tensors[e.first_tensor].at;
            self.table[first_entry + e.expert as usize] = self.arena + e.weights.slab + place;
        }
        let table = self.scratch_base + self.workspace.table + first_entry as u64 * 8;
        // All experts have the same tensors at the same distances.
        let tensors = &first.weights.layout.tensors[first.first_tensor..];
        let base = tensors[0].at;
        let at = |i: TensorIndex| tensors[i].at - base;
        type Maybe = Option<TensorIndex>;
        let describe = |first: TensorIndex, bias: Maybe, scale: Maybe| Tensors {
            table,
            n_expert: n_expert as u32,
            ty: tensors[first].desc.ty,
            rows: tensors[first].desc.rows,
            cols: tensors[first].desc.cols,
            first: at(first),
            second: None,
            first_bias: bias.map(at),
            second_bias: None,
            act: Act::Identity,
            scale: scale.map(at),
        };
        let layer = ExpertLayer {
            ffn,
            n_expert,
            table,
            up: describe(ffn.up, ffn.up_bias, ffn.up_scale),
            down: describe(ffn.down, ffn.down_bias, ffn.scale),
            gate: ffn.gate.map(|g| describe(g, ffn.gate_bias, ffn.gate_scale)),
        };
        let n = self.count(ffn.out);
        let fits = experts::groups_bytes(n, n_expert as u64) <= self.workspace.groups_bytes;
        let matrices = [Some(&layer.up), layer.gate.as_ref(), Some(&layer.down)];
        let all = |is: &dyn Fn(&Tensors) -> bool| matrices.into_iter().flatten().all(is);
        let for_few = fits && all(&|tensors| experts::is_for_few(self.target, tensors));
        let many = n >= many_from(n_expert, for_few) && fits && all(&|t| t.ty.is_quantized());
        match many {
            true => self.many_routed(&layer),
            false => self.few_routed(&layer, for_few && n >= few_from(n_expert)),
        }
    }

    /// Where rows are sorted by expert, in tiles of this many.
    fn groups(&self, layer: &ExpertLayer<'_>, tile: u32) -> Groups {
        Groups {
            at: self.scratch_base + self.workspace.groups,
            n: self.count(layer.ffn.out) as u32,
            n_expert: layer.n_expert as u32,
            tile,
        }
    }

    /// Rows sorted by expert in tiles of up to 32.
    fn many_routed(&mut self, layer: &ExpertLayer<'_>) -> Lowered {
        let (ffn, n) = (layer.ffn, self.count(layer.ffn.out));
        let (n_ff, hidden, up_to) = (
            self.width(ffn.up_out),
            self.at(ffn.gate_out),
            self.at(ffn.up_out),
        );
        let groups = self.groups(layer, experts::TILE);
        self.push(experts::group(groups, self.at(ffn.ids), layer.table))?;
        let (x, rows) = (self.at(ffn.x), self.count(ffn.x));
        let inputs = self.many(x, rows, layer.up.cols, Transform::Plain)?;
        // Rows of experts that are not here are left alone, but the
        // activation behind goes over all.
        let (first_byte, bytes) = (up_to - self.arena, n * n_ff * 4);
        self.work.push(Queued::Clear(first_byte, bytes));
        if layer.gate.is_some() {
            self.work.push(Queued::Clear(hidden - self.arena, bytes));
        }
        let target = self.target;
        let products = |tensors: &Tensors, out| {
            experts::experts_many(target, inputs, groups, ffn.n_used, tensors, out)
        };
        let (first, other) = match &layer.gate {
            Some(gate) => {
                self.push(products(gate, hidden))?;
                (hidden, Some(up_to))
            }
            None => (up_to, None),
        };
        self.push(products(&layer.up, up_to))?;
        let transform = Transform::Gate {
            other,
            act: ffn.act,
        };
        let inputs = self.many(first, n, n_ff, transform)?;
        let out = self.at(ffn.out);
        self.push(experts::experts_many(
            target,
            inputs,
            groups,
            1,
            &layer.down,
            out,
        ))
    }

    /// Products of up to two matrices, rows sorted into tiles of up to 8 or not.
    fn few_routed(&mut self, layer: &ExpertLayer<'_>, sorts: bool) -> Lowered {
        let (ffn, n) = (layer.ffn, self.count(layer.ffn.out));
        let (n_ff, hidden, up_to) = (
            self.width(ffn.up_out),
            self.at(ffn.gate_out),
            self.at(ffn.up_out),
        );
        let (ids, out) = (self.at(ffn.ids), self.at(ffn.out));
        let x = (ffn.n_used, self.at(ffn.x));
        let groups = sorts.then(|| self.groups(layer, experts::FEW_TILE));
        if let Some(groups) = groups {
            self.push(experts::group(groups, ids, layer.table))?;
        }
        let target = self.target;
        let products = |(share, x): (u32, u64), tensors: &Tensors, out| match groups {
            Some(groups) => experts::experts_few(target, x, groups, share, tensors, out),
            None => {
                let routed = Routed {
                    x,
                    share,
                    ids,
                    n: n as u32,
                    out,
                };
                experts::experts(target, routed, tensors)
            }
        };
        if let Some(unit) = layer.unit() {
            self.push(products(x, &unit, hidden))?;
            return self.push(products((1, hidden), &layer.down, out));
        }
        if let Some(gate) = &layer.gate {
            self.push(products(x, gate, hidden))?;
        }
        self.push(products(x, &layer.up, up_to))?;
        let transform = Transform::Gate {
            other: layer.gate.map(|_| up_to),
            act: ffn.act,
        };
        let sink = Sink::F32(hidden);
        self.push(activations::activations(hidden, n, n_ff, transform, sink))?;
        self.push(products((1, hidden), &layer.down, out))
    }

    /// Rows of `cols`, brought into the workspace in the form that products of many
    /// routed rows are fastest with.
    fn many(&mut self, x: u64, rows: u64, cols: u64, transform: Transform) -> Lowered<ManyInputs> {
        let at = self.scratch_base + self.workspace.input;
        let scales =
            (at + activations::q8_bytes(rows, cols)).next_multiple_of(rocmforge_device::ALIGNMENT);
        let (inputs, sink, end) = match self.target.multiplies_f16() {
            true => (
                ManyInputs::F16(at, 1.0 / activations::GATED_F16_SCALE),
                Sink::F16(at),
                at + rows * cols * 2,
            ),
            false => (
                ManyInputs::Q8(at, scales),
                Sink::Q8(at, scales),
                scales + activations::q8_scale_bytes(rows, cols),
            ),
        };
        if end > at + self.workspace.input_bytes {
            return Err(Error::Driver {
                operation: "experts",
                message: format!("{rows} rows of {cols} are more than there is room for"),
            });
        }
        self.push(activations::activations(x, rows, cols, transform, sink))?;
        Ok(inputs)
    }
}
