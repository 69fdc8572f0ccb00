//! The feed-forwards of experts: routed rows find their experts' matrices in a table on the device,
//! so nobody waits for the routing. Few rows go to mat-vecs; more are sorted by expert and go to
//! tiles, of up to 8 rows or of up to 32.

use rocmforge_kernels::gpu::ops::activations::{self, Sink, Transform};
use rocmforge_kernels::gpu::ops::experts::{self, Groups, ManyInputs, Routed, Tensors};

use crate::BoundExpert;
use crate::error::Error;
use crate::ops::{Act, ExpertFfn, TensorIndex};

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
        let n = self.count(ffn.out);
        let ids = self.at(ffn.ids);
        let up = describe(ffn.up, ffn.up_bias, ffn.up_scale);
        let down = describe(ffn.down, ffn.down_bias, ffn.scale);
        let gate = ffn.gate.map(|g| describe(g, ffn.gate_bias, ffn.gate_scale));
        let (n_ff, hidden) = (self.width(ffn.up_out), self.at(ffn.gate_out));
        let groups = |tile| Groups {
            at: self.scratch_base + self.workspace.groups,
            n: n as u32,
            n_expert: n_expert as u32,
            tile,
        };
        let fits = experts::groups_bytes(n, n_expert as u64) <= self.workspace.groups_bytes;
        let matrices = [Some(&up), gate.as_ref(), Some(&down)];
        let all = |is: &dyn Fn(&Tensors) -> bool| matrices.into_iter().flatten().all(is);
        let for_few = fits && all(&|tensors| experts::is_for_few(self.target, tensors));
        let many = n >= many_from(n_expert, for_few) && fits && all(&|t| t.ty.is_quantized());
        let up_to = self.at(ffn.up_out);
        let x = (ffn.n_used, self.at(ffn.x), self.count(ffn.x));
        if many {
            let groups = groups(experts::TILE);
            self.push(experts::group(groups, ids, table))?;
            let inputs = self.many(x.1, x.2, up.cols, Transform::Plain)?;
            // Rows of experts that are not here are left alone, but the
            // activation behind goes over all.
            let (rows, bytes) = (up_to - self.arena, n * n_ff * 4);
            self.work.push(Queued::Clear(rows, bytes));
            if gate.is_some() {
                self.work.push(Queued::Clear(hidden - self.arena, bytes));
            }
            let products = |inputs, share, tensors: &Tensors, out| {
                experts::experts_many(self.target, inputs, groups, share, tensors, out)
            };
            let (target_up, share) = (products(inputs, ffn.n_used, &up, up_to), ffn.n_used);
            let gated = gate.as_ref().map(|g| products(inputs, share, g, hidden));
            let (first, other) = match gated {
                Some(gated) => {
                    self.push(gated)?;
                    (hidden, Some(up_to))
                }
                None => (up_to, None),
            };
            self.push(target_up)?;
            let transform = Transform::Gate {
                other,
                act: ffn.act,
            };
            let inputs = self.many(first, n, n_ff, transform)?;
            let out = self.at(ffn.out);
            let down = experts::experts_many(self.target, inputs, groups, 1, &down, out);
            return self.push(down);
        }
        // From here on products of up to two matrices, rows sorted or not.
        let few = for_few && n >= few_from(n_expert);
        let few = few.then(|| groups(experts::FEW_TILE));
        if let Some(groups) = few {
            self.push(experts::group(groups, ids, table))?;
        }
        let products = |(share, x, _): (u32, u64, u64), tensors: &Tensors, out| match few {
            Some(groups) => experts::experts_few(self.target, x, groups, share, tensors, out),
            None => {
                let routed = Routed {
                    x,
                    share,
                    ids,
                    n: n as u32,
                    out,
                };
                experts::experts(self.target, routed, tensors)
            }
        };
        // A kernel of both has one factor, behind the function.
        let plain = ffn.gate_scale.or(ffn.up_scale).is_none();
        let unit = match &gate {
            None if plain => Tensors { act: ffn.act, ..up },
            Some(gate) if plain && gate.ty == up.ty => Tensors {
                second: Some(up.first),
                second_bias: up.first_bias,
                act: ffn.act,
                ..*gate
            },
            _ => {
                if let Some(gate) = &gate {
                    self.push(products(x, gate, hidden))?;
                }
                self.push(products(x, &up, up_to))?;
                let transform = Transform::Gate {
                    other: gate.map(|_| up_to),
                    act: ffn.act,
                };
                self.push(activations::activations(
                    hidden,
                    n,
                    n_ff,
                    transform,
                    Sink::F32(hidden),
                ))?;
                let out = self.at(ffn.out);
                return self.push(products((1, hidden, n), &down, out));
            }
        };
        self.push(products(x, &unit, hidden))?;
        let out = self.at(ffn.out);
        self.push(products((1, hidden, n), &down, out))
    }

    /// Rows of `cols`, brought into the workspace in the form that products of many
    /// routed rows are fastest with.
    fn many(&mut self, x: u64, rows: u64, cols: u64, transform: Transform) -> Lowered<ManyInputs> {
        let at = self.scratch_base + self.workspace.input;
        let scales = (at + activations::q8_bytes(rows, cols)).next_multiple_of(crate::ALIGNMENT);
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
