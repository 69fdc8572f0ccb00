//! The feed-forwards of experts: routed rows find their experts' matrices in a table on the device, so nobody waits for the
//! routing. Few rows go to mat-vecs; many are sorted by expert and go to tiles.

use rocmforge_kernels::gpu::ops::activations::{self, Sink, Source};
use rocmforge_kernels::gpu::ops::experts::{self, Groups, ManyInputs, Routed, Tensors};

use crate::BoundExpert;
use crate::error::Error;
use crate::ops::{Act, ExpertFfn, TensorIndex};

use super::super::workspace::EXPERTS_MAX;
use super::{Lowered, Lowering, Work};

/// Routed rows from which on they are sorted by expert.
const MANY: u64 = 64;

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
        let mut addresses = vec![0; n_expert];
        for e in given {
            let place = e.weights.layout.tensors[e.first_tensor].at;
            addresses[e.expert as usize] = self.arena + e.weights.slab + place;
        }
        let table = self.scratch_base + self.workspace.table;
        self.work.push(Work::Table(addresses, table));
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
        let groups = Groups {
            at: self.scratch_base + self.workspace.groups,
            n: n as u32,
            n_expert: n_expert as u32,
        };
        let fits = experts::groups_bytes(n, n_expert as u64) <= self.workspace.groups_bytes;
        let many = n >= MANY
            && fits
            && up.ty.is_quantized()
            && down.ty.is_quantized()
            && gate.is_none_or(|g| g.ty.is_quantized());
        if many {
            self.push(experts::group(groups, ids, table))?;
        }
        let up_to = self.at(ffn.up_out);
        let x = (ffn.n_used, self.at(ffn.x), self.count(ffn.x));
        let routed = |(share, x, _): (u32, u64, u64), out| Routed {
            x,
            share,
            ids,
            n: n as u32,
            out,
        };
        if many {
            let inputs = self.q8(x.1, x.2, up.cols)?;
            if let Some(gate) = &gate {
                self.push(experts::experts_many(
                    self.target,
                    inputs,
                    groups,
                    ffn.n_used,
                    gate,
                    hidden,
                ))?;
            }
            self.push(experts::experts_many(
                self.target,
                inputs,
                groups,
                ffn.n_used,
                &up,
                up_to,
            ))?;
            let source = Source::Gate {
                other: gate.map(|_| up_to),
                act: ffn.act,
            };
            self.push(activations::activations(
                hidden,
                n,
                n_ff,
                source,
                Sink::F32(hidden),
            ))?;
            let inputs = self.q8(hidden, n, n_ff)?;
            let out = self.at(ffn.out);
            return self.push(experts::experts_many(
                self.target,
                inputs,
                groups,
                1,
                &down,
                out,
            ));
        }
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
                    self.push(experts::experts(self.target, routed(x, hidden), gate))?;
                }
                self.push(experts::experts(self.target, routed(x, up_to), &up))?;
                let source = Source::Gate {
                    other: gate.map(|_| up_to),
                    act: ffn.act,
                };
                self.push(activations::activations(
                    hidden,
                    n,
                    n_ff,
                    source,
                    Sink::F32(hidden),
                ))?;
                let out = self.at(ffn.out);
                return self.push(experts::experts(
                    self.target,
                    routed((1, hidden, n), out),
                    &down,
                ));
            }
        };
        self.push(experts::experts(self.target, routed(x, hidden), &unit))?;
        let out = self.at(ffn.out);
        self.push(experts::experts(
            self.target,
            routed((1, hidden, n), out),
            &down,
        ))
    }

    /// Rows as 8 bits in the workspace.
    fn q8(&mut self, x: u64, rows: u64, cols: u64) -> Lowered<ManyInputs> {
        let bytes = self.scratch_base + self.workspace.input;
        let scales = (bytes + activations::q8_bytes(rows, cols)).next_multiple_of(crate::ALIGNMENT);
        let end = scales + activations::q8_scale_bytes(rows, cols);
        if end > bytes + self.workspace.input_bytes {
            return Err(Error::Driver {
                operation: "experts",
                message: format!("{rows} rows of {cols} are more than there is room for"),
            });
        }
        let sink = Sink::Q8(bytes, scales);
        self.push(activations::activations(x, rows, cols, Source::Plain, sink))?;
        Ok(ManyInputs::Q8(bytes, scales))
    }
}
