//! What adapters (LoRA) add to products, on the host: the products of other matrices, with what has
//! no scale left out.
//!
//! *Invariant:* a row's result depends on no other row: products have a row's bits whatever the
//! number of rows, and a row without scales is not written.

#![expect(
    unsafe_code,
    reason = "products write disjoint columns of one buffer from several threads"
)]

use rocmforge_device::Error;
use rocmforge_kernels_cpu::{ActivationForm, Activations, PackedMatrix, RowsOut, ops};
use rocmforge_ops::{Adapted, Buf, TensorIndex};

use super::HostDevice;
use super::context::{OpBuffers, OpContext, share};
use super::products::{Item, fill, run_all};

/// Elements of the products that are added at a time, so that they stay in caches.
const SUM_ELEMENTS: usize = 1 << 20;

/// The buffers of the operation.
#[derive(Clone, Copy)]
pub(super) struct AdapterBufs {
    pub(super) x: Buf,
    pub(super) scales: Buf,
    pub(super) low: Buf,
}

/// What adapters add to products of one input.
pub(super) fn add(
    device: &mut HostDevice,
    bufs: AdapterBufs,
    products: &[Adapted],
    context: &OpBuffers<'_>,
) -> Result<(), Error> {
    let mut activations = std::mem::take(&mut device.activations);
    let done = with_activations(device, bufs, products, context, &mut activations);
    device.activations = activations;
    done
}

fn with_activations(
    device: &HostDevice,
    bufs: AdapterBufs,
    products: &[Adapted],
    context: &OpBuffers<'_>,
    activations: &mut Activations,
) -> Result<(), Error> {
    let on = context.with_device(device);
    let (tokens, width) = (on.count(bufs.x), on.width(bufs.scales));
    if tokens == 0 {
        return Ok(());
    }
    // One first matrix behind the other: `[n][tokens][width]`.
    let low = on.rows_mut(bufs.low);
    let groups = products.chunk_by(|a, b| a.a == b.a);
    let firsts: Vec<TensorIndex> = groups.clone().map(|group| group[0].a).collect();
    let form = ActivationForm::of(on.tensor(firsts[0]).desc.ty);
    let (isa, x) = (device.isa, on.rows(bufs.x));
    fill(&device.pool, isa, activations, form, x, on.width(bufs.x));
    let outs = low.chunks_exact_mut(tokens * width).zip(&firsts);
    let items = outs
        .map(|(out, first)| item(&on, *first, activations, out, tokens))
        .collect::<Result<Vec<_>, _>>()?;
    run_all(&device.pool, &items)?;
    drop(items);
    let scales = on.rows(bufs.scales);
    let lows = low.chunks_exact_mut(tokens * width);
    for (low, group) in lows.zip(groups) {
        device.pool.run_rows(low, width, share(width), |rows, low| {
            scale(low, &scales[rows.start * width..rows.end * width]);
        });
        for product in group {
            add_one(device, &on, product, (low, scales, width), activations)?;
        }
    }
    Ok(())
}

/// The product of all rows of a matrix.
fn item<'a>(
    on: &OpContext<'a>,
    weight: TensorIndex,
    input: &'a Activations,
    out: &'a mut [f32],
    tokens: usize,
) -> Result<Item<'a>, Error> {
    let matrix: PackedMatrix = super::packed(&on.tensor(weight).desc, on.device.isa)?;
    Ok(Item {
        matrix,
        weights: on.weights(weight, &matrix),
        input,
        groups: 0..matrix.row_groups(),
        // SAFETY: the pool hands each row group to one call, so no two write the same columns.
        out: unsafe { RowsOut::new(out, tokens, matrix.rows(), matrix.rows()) },
    })
}

/// What has no scale becomes zero, whatever it is.
fn scale(low: &mut [f32], scales: &[f32]) {
    for (low, &scale) in low.iter_mut().zip(scales) {
        *low = if scale == 0.0 { 0.0 } else { *low * scale };
    }
}

/// Adds the product of a second matrix with rows of `low`, some rows at a time.
fn add_one(
    device: &HostDevice,
    on: &OpContext<'_>,
    product: &Adapted,
    (low, scales, width): (&[f32], &[f32], usize),
    activations: &mut Activations,
) -> Result<(), Error> {
    let n_out = on.width(product.out);
    let at_once = (SUM_ELEMENTS / n_out.max(1)).max(1);
    let form = ActivationForm::of(on.tensor(product.b).desc.ty);
    let rows = on.rows_mut(product.out).chunks_mut(at_once * n_out);
    let lows = low.chunks(at_once * width);
    let scales = scales.chunks(at_once * width);
    for ((rows, low), scales) in rows.zip(lows).zip(scales) {
        if scales.iter().all(|scale| *scale == 0.0) {
            continue;
        }
        fill(&device.pool, device.isa, activations, form, low, width);
        let mut sums = vec![0.0; rows.len()];
        let item = item(on, product.b, activations, &mut sums, low.len() / width)?;
        run_all(&device.pool, &[item])?;
        let has = |row: usize| scales[row * width..][..width].iter().any(|s| *s != 0.0);
        device
            .pool
            .run_rows(rows, n_out, share(n_out), |range, rows| {
                let rows = range.clone().zip(rows.chunks_exact_mut(n_out));
                for (row, out) in rows.filter(|(row, _)| has(*row)) {
                    let sum = &sums[row * n_out..][..n_out];
                    ops::add_scaled(device.simd, out, sum, 1.0);
                }
            });
    }
    Ok(())
}
