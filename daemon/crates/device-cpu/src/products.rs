//! Products on the host: the input is brought into the form that the matrices want, and all row
//! groups of all products are one list of items for the pool.

#![expect(
    unsafe_code,
    reason = "products write disjoint columns of one buffer from several threads"
)]

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rocmforge_device::{Error, TensorDesc};
use rocmforge_gguf::MappedFile;
use rocmforge_kernels_cpu::{
    ActivationForm, Activations, Isa, PackedMatrix, Pool, ROW_GROUP, RowsOut, mat_mul, ops,
};
use rocmforge_ops::{Buf, Product, TensorIndex};

use super::HostDevice;
use super::answers::multiply_from_file;
use super::context::{OpBuffers, share};

/// Shares of a product that each thread gets on average: enough that a thread that is interrupted
/// does not hold up the others by much.
const SHARES: usize = 8;

/// Bytes of weights that a share should have: each begins with a few kilobytes
/// that no prefetch has fetched.
const SHARE_BYTES: usize = 256 << 10;

/// Shares that each thread should get, down to [`SHARE_BYTES_LEAST`]: of a few experts' products
/// there are not many, and a thread that begins late would leave all of its own to the end.
const SHARES_LEAST: usize = 2;

/// Bytes of weights that a share has at least.
const SHARE_BYTES_LEAST: usize = 64 << 10;

/// One product of a job.
pub(super) struct Item<'a> {
    pub(super) matrix: PackedMatrix,
    pub(super) weights: Weights<'a>,
    pub(super) input: &'a Activations,
    /// The row groups of the matrix that are wanted.
    pub(super) groups: std::ops::Range<usize>,
    pub(super) out: RowsOut<'a>,
}

/// Where the weights of a product are.
#[derive(Debug, Clone, Copy)]
pub(super) enum Weights<'a> {
    /// In the arena.
    Packed(&'a [u8]),
    /// In the file, as the file has them.
    InFile(&'a MappedFile, &'a TensorDesc),
}

/// Computes all products of a job. All row groups are one list of items, so that a small product
/// does not wait for a thread of its own.
///
/// # Errors
/// What reading weights from a file gives; the results are then not to be used.
pub(super) fn run_all(pool: &Pool, items: &[Item<'_>]) -> Result<(), Error> {
    run_all_beside(pool, items, &mut || ())
}

/// [`run_all`], before whose part the calling thread does `own`, once.
pub(super) fn run_all_beside(
    pool: &Pool,
    items: &[Item<'_>],
    own: &mut dyn FnMut(),
) -> Result<(), Error> {
    let n_groups: usize = items.iter().map(|i| i.groups.len()).sum();
    let bytes: usize = items
        .iter()
        .map(|i| i.groups.len() * i.matrix.group_bytes())
        .sum();
    if n_groups == 0 {
        own();
        return Ok(());
    }
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let chunk = share_of(n_groups, bytes, pool.threads());
    let compute = |range: Range<usize>| {
        let mut first = 0;
        for item in items {
            let end = first + item.groups.len();
            let (from, to) = (range.start.clamp(first, end), range.end.clamp(first, end));
            if from < to {
                let at = item.groups.start;
                let groups = at + from - first..at + to - first;
                match item.weights {
                    Weights::Packed(packed) => {
                        mat_mul(&item.matrix, packed, item.input, groups, item.out);
                    }
                    Weights::InFile(file, desc) => {
                        if let Err(error) = multiply_from_file(item, file, desc, groups) {
                            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                            failed.get_or_insert(error);
                        }
                    }
                }
            }
            first = end;
        }
    };
    pool.run_beside(n_groups, chunk, compute, own);
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.map_or(Ok(()), Err)
}

/// Row groups of a share, of so many with so many bytes of weights.
fn share_of(n_groups: usize, bytes: usize, threads: usize) -> usize {
    let groups_of = |least: usize| least.div_ceil(bytes.div_ceil(n_groups).max(1));
    let few = groups_of(SHARE_BYTES_LEAST).max(n_groups.div_ceil(threads * SHARES_LEAST));
    // The kernels take groups two at a time.
    (n_groups / (threads * SHARES))
        .max(groups_of(SHARE_BYTES).min(few))
        .next_multiple_of(2)
}

/// The form of an input that suits all of some matrices.
pub(super) fn form_of(matrices: &[PackedMatrix]) -> ActivationForm {
    let mut forms = matrices.iter().map(|m| ActivationForm::of(m.ty()));
    let first = forms.next().expect("a product has a matrix");
    if forms.all(|f| f == first) {
        first
    } else {
        ActivationForm::Both
    }
}

/// Fills activations from `[rows][cols]`, the rows shared out over the pool.
pub(super) fn fill(
    pool: &Pool,
    isa: Isa,
    activations: &mut Activations,
    form: ActivationForm,
    input: &[f32],
    cols: usize,
) {
    activations.resize(form, input.len() / cols, cols);
    let mut parts: Vec<_> = activations.parts(share(cols)).collect();
    pool.run_rows(&mut parts, 1, 1, |_, parts| {
        parts.iter_mut().for_each(|p| p.fill(isa, input))
    });
}

/// Products of one input.
pub(super) fn multiply(
    device: &mut HostDevice,
    x: Buf,
    products: &[Product],
    context: &OpBuffers<'_>,
) -> Result<(), Error> {
    let mut activations = std::mem::take(&mut device.activations);
    let done = with_activations(device, x, products, context, &mut activations);
    device.activations = activations;
    done
}

fn with_activations(
    device: &HostDevice,
    x: Buf,
    products: &[Product],
    context: &OpBuffers<'_>,
    activations: &mut Activations,
) -> Result<(), Error> {
    let on = context.with_device(device);
    let isa = device.isa;
    let matrices: Vec<PackedMatrix> = products
        .iter()
        .map(|p| super::packed(&on.tensor(p.weight).desc, isa))
        .collect::<Result<_, _>>()?;
    let (tokens, cols) = (on.count(x), on.width(x));
    if tokens == 0 {
        return Ok(());
    }
    fill(
        &device.pool,
        isa,
        activations,
        form_of(&matrices),
        on.rows(x),
        cols,
    );
    let activations = &*activations;
    let items: Vec<Item<'_>> = products
        .iter()
        .zip(&matrices)
        .map(|(product, matrix)| {
            let out = on.rows_mut(product.out);
            Item {
                matrix: *matrix,
                weights: on.weights(product.weight, matrix),
                input: activations,
                groups: 0..matrix.row_groups(),
                // SAFETY: the pool hands each row group to one call, so no two write the same
                // columns.
                out: unsafe { RowsOut::new(out, tokens, matrix.rows(), matrix.rows()) },
            }
        })
        .collect();
    run_all(&device.pool, &items)?;
    drop(items);
    for product in products {
        if let Some(bias) = product.bias {
            ops::add_bias(device.simd, on.rows_mut(product.out), on.floats(bias));
        }
    }
    Ok(())
}

/// A product for each head: `x` is `[tokens][n_head][cols]`, `out` `[tokens][n_head][rows]`, the
/// matrix has one head's rows after the other's.
pub(super) fn multiply_heads(
    device: &mut HostDevice,
    x: Buf,
    n_head: u32,
    weight: TensorIndex,
    out: Buf,
    context: &OpBuffers<'_>,
) -> Result<(), Error> {
    let on = context.with_device(device);
    let (isa, pool, n_head) = (device.isa, &device.pool, n_head as usize);
    let tokens = on.count(x);
    if tokens == 0 {
        return Ok(());
    }
    let matrix = super::packed(&on.tensor(weight).desc, isa)?;
    let (cols, rows) = (on.width(x) / n_head, on.width(out) / n_head);
    assert!(
        matrix.cols() == cols && matrix.rows() == rows * n_head,
        "a product for each of {n_head} heads of {cols}: matrix [{}, {}]",
        matrix.cols(),
        matrix.rows()
    );
    // One head's rows together, as activations want them.
    let input = on.rows(x);
    let mut heads = vec![0.0; tokens * cols];
    let inputs: Vec<Activations> = (0..n_head)
        .map(|head| {
            for (t, row) in heads.chunks_exact_mut(cols).enumerate() {
                row.copy_from_slice(&input[(t * n_head + head) * cols..][..cols]);
            }
            let mut activations = Activations::new();
            fill(
                pool,
                isa,
                &mut activations,
                ActivationForm::of(matrix.ty()),
                &heads,
                cols,
            );
            activations
        })
        .collect();
    let weights = on.weights(weight, &matrix);
    if n_head > 1 && !rows.is_multiple_of(ROW_GROUP) {
        return heads_that_share_groups(pool, matrix, weights, &inputs, on.rows_mut(out));
    }
    let groups = matrix.row_groups() / n_head;
    // SAFETY: each head has row groups of its own, and the pool hands each to one call.
    let target = unsafe { RowsOut::new(on.rows_mut(out), tokens, matrix.rows(), matrix.rows()) };
    let items: Vec<Item<'_>> = inputs
        .iter()
        .enumerate()
        .map(|(head, input)| Item {
            matrix,
            weights,
            input,
            groups: head * groups..(head + 1) * groups,
            out: target,
        })
        .collect();
    run_all(pool, &items)
}

/// Multiplies where a group of packed rows has those of two heads: one head after the other, each
/// with all groups in which it has rows. No model that people run has such heads.
fn heads_that_share_groups(
    pool: &Pool,
    matrix: PackedMatrix,
    weights: Weights<'_>,
    inputs: &[Activations],
    out: &mut [f32],
) -> Result<(), Error> {
    let all = matrix.rows();
    let rows = all / inputs.len();
    let mut found = vec![0.0; out.len()];
    for (head, input) in inputs.iter().enumerate() {
        let mine = head * rows..(head + 1) * rows;
        let tokens = out.len() / all;
        let item = Item {
            matrix,
            weights,
            input,
            groups: mine.start / ROW_GROUP..mine.end.div_ceil(ROW_GROUP),
            // SAFETY: the pool hands each row group to one call, and nobody else writes there.
            out: unsafe { RowsOut::new(&mut found, tokens, all, all) },
        };
        run_all(pool, &[item])?;
        for (out, found) in out.chunks_exact_mut(all).zip(found.chunks_exact(all)) {
            out[mine.clone()].copy_from_slice(&found[mine.clone()]);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_not_small_and_no_thread_is_without() {
        for threads in [2, 6, 14] {
            for group_bytes in [500, 7 << 10, 18 << 10, 300 << 10] {
                for n_groups in [1, 24, 130, 435, 4000] {
                    let chunk = share_of(n_groups, n_groups * group_bytes, threads);
                    let (shares, bytes) = (n_groups.div_ceil(chunk), chunk * group_bytes);
                    let case = format!("{n_groups} of {group_bytes}: {chunk} for {threads}");
                    assert!(bytes >= SHARE_BYTES_LEAST, "{case}");
                    // Groups go by twos.
                    let is_least = (chunk - 2) * group_bytes <= SHARE_BYTES_LEAST;
                    assert!(shares >= threads || is_least, "{case}");
                    assert!(shares <= 2 * threads * SHARES, "{case}");
                }
            }
        }
    }
}
