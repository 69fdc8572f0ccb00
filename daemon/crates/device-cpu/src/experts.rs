//! The feed-forwards of experts on the host: routed rows are sorted by expert, and all experts'
//! products of one kind are one job of the pool.
//!
//! *Invariant:* what a routed row gets depends neither on the other rows nor on which experts are
//! computed by the same call (products are by row; test `requests_of_a_mixture_share_passes_too`,
//! also where a few experts have room at a time).

#![expect(
    unsafe_code,
    reason = "products write disjoint columns of one buffer from several threads"
)]

use std::ops::Range;

use rocmforge_device::{Batch, BoundExpert, Error, Scratch};
use rocmforge_kernels_cpu::{ActivationForm, Activations, PackedMatrix, RowsOut, ops};
use rocmforge_ops::{ExpertFfn, TensorIndex};

use super::HostDevice;
use super::context::{OpBuffers, OpContext, share};
use super::products::{Item, form_of, run_all_beside};

/// An expert that rows are routed to.
struct Busy<'a> {
    on: OpContext<'a>,
    first_tensor: usize,
    /// The expert's rows among those sorted by expert.
    rows: Range<usize>,
}

impl Busy<'_> {
    fn tensor(&self, index: TensorIndex) -> TensorIndex {
        self.first_tensor + index
    }

    fn matrix(&self, index: TensorIndex) -> Result<PackedMatrix, Error> {
        super::packed(&self.on.tensor(self.tensor(index)).desc, self.on.device.isa)
    }
}

/// Computes the rows that are routed to the given experts; the calling thread does `own` beside the
/// first products, and again beside the last, unless those do not come about; once where no row is
/// routed to them.
pub(super) fn run(
    device: &mut HostDevice,
    ffn: &ExpertFfn,
    experts: &[BoundExpert<'_>],
    scratch: Scratch<'_>,
    batch: &Batch<'_>,
    own: &mut dyn FnMut(),
) -> Result<(), Error> {
    let mut inputs = std::mem::take(&mut device.expert_inputs);
    let mut sorted = std::mem::take(&mut device.expert_rows);
    let done = compute(
        device,
        ffn,
        experts,
        scratch,
        batch,
        own,
        (&mut inputs, &mut sorted),
    );
    device.expert_inputs = inputs;
    device.expert_rows = sorted;
    done
}

fn compute(
    device: &HostDevice,
    ffn: &ExpertFfn,
    experts: &[BoundExpert<'_>],
    scratch: Scratch<'_>,
    batch: &Batch<'_>,
    own: &mut dyn FnMut(),
    (inputs, results): (&mut Vec<Activations>, &mut Vec<f32>),
) -> Result<(), Error> {
    let context = |weights| OpBuffers {
        weights,
        scratch,
        rows: batch.counts(),
    };
    let plain = context(None);
    let contexts: Vec<OpBuffers<'_>> = experts.iter().map(|e| context(Some(e.weights))).collect();
    let on = plain.with_device(device);
    let (busy, order) = sorted(device, experts, &contexts, on.rows(ffn.ids));
    if busy.is_empty() {
        own();
        return Ok(());
    }
    if inputs.len() < busy.len() {
        inputs.resize_with(busy.len(), Activations::new);
    }
    let routed = RoutedRows {
        device,
        ffn,
        on,
        busy: &busy,
        order: &order,
    };
    routed.gates_and_ups(inputs, own)?;
    let hidden = routed.hidden();
    routed.downs(hidden, inputs, results, own)
}

/// The experts that rows are routed to, and the routed rows by expert, in their own order within
/// one.
fn sorted<'a>(
    device: &'a HostDevice,
    experts: &[BoundExpert<'a>],
    contexts: &[OpBuffers<'a>],
    ids: &[f32],
) -> (Vec<Busy<'a>>, Vec<usize>) {
    let mut order: Vec<usize> = Vec::new();
    let mut busy: Vec<Busy<'a>> = Vec::new();
    for (expert, context) in experts.iter().zip(contexts) {
        let first = order.len();
        let wanted = expert.expert as f32;
        let rows = ids.iter().enumerate().filter(|(_, id)| **id == wanted);
        order.extend(rows.map(|(i, _)| i));
        if order.len() > first {
            busy.push(Busy {
                on: context.with_device(device),
                first_tensor: expert.first_tensor,
                rows: first..order.len(),
            });
        }
    }
    (busy, order)
}

/// Rows of a pass with the experts that they are routed to.
struct RoutedRows<'a> {
    device: &'a HostDevice,
    ffn: &'a ExpertFfn,
    on: OpContext<'a>,
    busy: &'a [Busy<'a>],
    order: &'a [usize],
}

impl<'a> RoutedRows<'a> {
    /// The first products of each expert, of its rows, into `gate_out` and `up_out`.
    fn gates_and_ups(
        &self,
        inputs: &mut [Activations],
        own: &mut dyn FnMut(),
    ) -> Result<(), Error> {
        let (ffn, on, busy) = (self.ffn, &self.on, self.busy);
        let (cols, n_ff) = (on.width(ffn.x), on.width(ffn.up_out));
        let n_used = ffn.n_used as usize;
        let matrices_of = |b: &Busy<'_>| {
            let tensors = ffn.gate.iter().chain([&ffn.up]);
            tensors.map(|&t| b.matrix(t)).collect()
        };
        let first_products: Vec<Vec<PackedMatrix>> =
            busy.iter().map(matrices_of).collect::<Result<_, _>>()?;
        let x = on.rows(ffn.x);
        let mut gathered = vec![0.0; self.order.len() * cols];
        for (row, &routed) in gathered.chunks_exact_mut(cols).zip(self.order) {
            row.copy_from_slice(&x[routed / n_used * cols..][..cols]);
        }
        let form = |i: usize| form_of(&first_products[i]);
        fill_each(self.device, busy, inputs, form, &gathered, cols);
        let (mut gates, mut ups) = (on.rows_mut(ffn.gate_out), on.rows_mut(ffn.up_out));
        let mut items = Vec::with_capacity(2 * busy.len());
        for ((b, input), matrices) in busy.iter().zip(inputs.iter()).zip(&first_products) {
            let n = b.rows.len();
            let mut matrices = matrices.iter();
            if let Some(gate) = ffn.gate {
                let out = gates
                    .split_off_mut(..n * n_ff)
                    .expect("the buffer has a row for each routed row");
                let matrix = matrices.next().expect("made above");
                items.push(item(b, gate, *matrix, input, out));
            }
            let out = ups
                .split_off_mut(..n * n_ff)
                .expect("the buffer has a row for each routed row");
            let matrix = matrices.next().expect("made above");
            items.push(item(b, ffn.up, *matrix, input, out));
        }
        run_all_beside(&self.device.pool, &items, own)
    }

    /// What the last products read, in `gate_out`: the first ones with their biases, factors and
    /// the function between them.
    fn hidden(&self) -> &[f32] {
        let (ffn, simd, pool) = (self.ffn, self.device.simd, &self.device.pool);
        let n_ff = self.on.width(ffn.up_out);
        let all = self.order.len() * n_ff;
        let gate_rows = self.on.rows_mut(ffn.gate_out);
        if ffn.gate.is_none() {
            for b in self.busy {
                let ups = &mut gate_rows[b.rows.start * n_ff..b.rows.end * n_ff];
                bias(b, ffn.up_bias, simd, ups);
                factor(b, ffn.up_scale, simd, ups);
            }
            pool.run_rows(&mut gate_rows[..all], n_ff, share(n_ff), |_, rows| {
                ops::activate(simd, ffn.act, rows);
            });
            return &gate_rows[..all];
        }
        let up_rows = self.on.rows_mut(ffn.up_out);
        for b in self.busy {
            let range = b.rows.start * n_ff..b.rows.end * n_ff;
            let (gates, ups) = (&mut gate_rows[range.clone()], &mut up_rows[range]);
            bias(b, ffn.gate_bias, simd, gates);
            factor(b, ffn.gate_scale, simd, gates);
            bias(b, ffn.up_bias, simd, ups);
            factor(b, ffn.up_scale, simd, ups);
        }
        let up_rows = &up_rows[..all];
        let gates = &mut gate_rows[..all];
        pool.run_rows(gates, n_ff, share(n_ff), |rows, gate| {
            let ups = &up_rows[rows.start * n_ff..rows.end * n_ff];
            ops::gate(simd, ffn.act, gate, ups);
        });
        &gate_rows[..all]
    }

    /// The last products, then each row to its place.
    fn downs(
        &self,
        hidden: &[f32],
        inputs: &mut [Activations],
        results: &mut Vec<f32>,
        own: &mut dyn FnMut(),
    ) -> Result<(), Error> {
        let (ffn, busy, simd) = (self.ffn, self.busy, self.device.simd);
        let (n_ff, width) = (self.on.width(ffn.up_out), self.on.width(ffn.out));
        let matrices = busy.iter().map(|b| b.matrix(ffn.down));
        let down: Vec<PackedMatrix> = matrices.collect::<Result<_, _>>()?;
        let form = |i: usize| ActivationForm::of(down[i].ty());
        fill_each(self.device, busy, inputs, form, hidden, n_ff);
        results.resize(self.order.len() * width, 0.0);
        let mut rest = results.as_mut_slice();
        let mut items = Vec::with_capacity(busy.len());
        for ((b, input), matrix) in busy.iter().zip(inputs.iter()).zip(&down) {
            let out = rest
                .split_off_mut(..b.rows.len() * width)
                .expect("as long as all rows");
            items.push(item(b, ffn.down, *matrix, input, out));
        }
        run_all_beside(&self.device.pool, &items, own)?;
        drop(items);
        let out = self.on.rows_mut(ffn.out);
        for b in busy {
            let rows = &mut results[b.rows.start * width..b.rows.end * width];
            bias(b, ffn.down_bias, simd, rows);
            factor(b, ffn.scale, simd, rows);
            for (row, &routed) in rows.chunks_exact(width).zip(&self.order[b.rows.clone()]) {
                out[routed * width..][..width].copy_from_slice(row);
            }
        }
        Ok(())
    }
}

fn bias(b: &Busy<'_>, tensor: Option<TensorIndex>, simd: ops::Simd, rows: &mut [f32]) {
    if let Some(tensor) = tensor {
        ops::add_bias(simd, rows, b.on.floats(b.tensor(tensor)));
    }
}

fn factor(b: &Busy<'_>, tensor: Option<TensorIndex>, simd: ops::Simd, rows: &mut [f32]) {
    if let Some(tensor) = tensor {
        ops::scale(simd, rows, b.on.floats(b.tensor(tensor))[0]);
    }
}

/// Brings each expert's rows of `sorted` into the form that its matrices want.
fn fill_each(
    device: &HostDevice,
    busy: &[Busy<'_>],
    inputs: &mut [Activations],
    form: impl Fn(usize) -> ActivationForm + Sync,
    sorted: &[f32],
    cols: usize,
) {
    let isa = device.isa;
    let mut jobs: Vec<_> = inputs.iter_mut().zip(busy).enumerate().collect();
    // A few rows are not worth the threads' start.
    let each = share(sorted.len() / jobs.len().max(1));
    device.pool.run_rows(&mut jobs, 1, each, |_, jobs| {
        for (i, (input, b)) in jobs {
            let rows = &sorted[b.rows.start * cols..b.rows.end * cols];
            input.fill(isa, form(*i), rows, b.rows.len(), cols);
        }
    });
}

fn item<'a>(
    b: &Busy<'a>,
    tensor: TensorIndex,
    matrix: PackedMatrix,
    input: &'a Activations,
    out: &'a mut [f32],
) -> Item<'a> {
    let rows = matrix.rows();
    Item {
        weights: b.on.weights(b.tensor(tensor), &matrix),
        matrix,
        input,
        groups: 0..matrix.row_groups(),
        // SAFETY: the rows are this product's alone, and the pool hands each row group to one call.
        out: unsafe { RowsOut::new(out, b.rows.len(), rows, rows) },
    }
}
