//! Operations on the host: each finds its rows and weights in the arena and shares the work out over the pool.

#![expect(
    unsafe_code,
    reason = "products write disjoint columns of one buffer from several threads"
)]

use rocmforge_kernels::host::ops::{self, AttentionShape, AttentionSpan, KV_PAGE_TOKENS, KvLayout};
use rocmforge_kernels::host::{ActivationForm, PackedMatrix, RowsOut, mat_mul};

use crate::error::Error;
use crate::ops::{Batch, Buf, HeadShape, Op, Product, Rows};
use crate::{Bound, Scratch};

use super::HostDevice;

/// Elements that one share of a row-wise operation should have, so that handing it out costs nothing beside it.
const SHARE_ELEMENTS: usize = 16 << 10;

/// Shares of a product that each thread gets on average: enough that a thread that is interrupted does not hold up the
/// others by much.
const SHARES: usize = 8;

/// Bytes of weights that a share should have: each begins with a few kilobytes that no prefetch has fetched.
const SHARE_BYTES: usize = 256 << 10;

/// Runs one operation.
pub(super) fn run(
    device: &mut HostDevice,
    op: &Op,
    weights: Bound<'_>,
    scratch: Scratch<'_>,
    batch: &Batch<'_>,
) -> Result<(), Error> {
    let rows = RowCount {
        tokens: batch.n_tokens,
        outputs: batch.outputs.len(),
    };
    if let Op::MatMul { x, products } = op {
        return multiply(device, *x, products, weights, scratch, rows);
    }
    let on = On {
        device,
        weights,
        scratch,
        rows,
    };
    let simd = on.device.simd;
    let pool = &on.device.pool;
    match op {
        Op::RmsNorm {
            x,
            weight,
            eps,
            out,
        } => {
            let (x, weight, width) = (on.rows(*x), on.vector(*weight), on.width(*x));
            pool.run_rows(on.rows_mut(*out), width, share(width), |rows, out| {
                ops::rms_norm(
                    simd,
                    &x[rows.start * width..rows.end * width],
                    weight,
                    *eps,
                    out,
                );
            });
        }
        Op::Add { x, y } => {
            let (y, width) = (on.rows(*y), on.width(*x));
            pool.run_rows(on.rows_mut(*x), width, share(width), |rows, x| {
                ops::add(simd, x, &y[rows.start * width..rows.end * width]);
            });
        }
        Op::SiluMul { gate, up } => {
            let (up, width) = (on.rows(*up), on.width(*gate));
            pool.run_rows(on.rows_mut(*gate), width, share(width), |rows, gate| {
                ops::silu_mul(simd, gate, &up[rows.start * width..rows.end * width]);
            });
        }
        Op::GatherOutputs { x, out } => {
            let (all, width) = (on.all_rows(*x, batch.n_tokens), on.width(*x));
            for (&row, out) in batch
                .outputs
                .iter()
                .zip(on.rows_mut(*out).chunks_exact_mut(width))
            {
                out.copy_from_slice(&all[row as usize * width..][..width]);
            }
        }
        Op::RopeKv {
            q,
            k,
            v,
            heads,
            q_norm,
            k_norm,
            layer,
        } => {
            rotate(&on, *q, heads.n_head, heads, *q_norm, batch);
            rotate(&on, *k, heads.n_head_kv, heads, *k_norm, batch);
            append(&on, *k, *v, *layer, batch);
        }
        Op::Attention {
            q,
            out,
            heads,
            layer,
            scale,
        } => attend(&on, *q, *out, heads, *layer, *scale, batch),
        Op::MatMul { .. } => unreachable!("handled above, since it needs the device mutable"),
    }
    Ok(())
}

/// Rows of the batch.
#[derive(Debug, Clone, Copy)]
struct RowCount {
    tokens: usize,
    outputs: usize,
}

fn share(width: usize) -> usize {
    (SHARE_ELEMENTS / width.max(1)).max(1)
}

/// What an operation works on.
struct On<'a> {
    device: &'a HostDevice,
    weights: Bound<'a>,
    scratch: Scratch<'a>,
    rows: RowCount,
}

impl<'a> On<'a> {
    fn width(&self, buf: Buf) -> usize {
        self.scratch.layout.bufs[buf.0 as usize].width as usize
    }

    fn count(&self, buf: Buf) -> usize {
        match self.scratch.layout.bufs[buf.0 as usize].rows {
            Rows::Tokens => self.rows.tokens,
            Rows::Outputs => self.rows.outputs,
        }
    }

    fn at(&self, buf: Buf) -> u64 {
        self.scratch.base + self.scratch.layout.bufs[buf.0 as usize].at
    }

    fn rows(&self, buf: Buf) -> &'a [f32] {
        self.all_rows(buf, self.count(buf))
    }

    fn all_rows(&self, buf: Buf, rows: usize) -> &'a [f32] {
        self.device
            .arena
            .floats(self.at(buf), rows * self.width(buf))
    }

    /// The buffers of one operation are different ones, so the views do not overlap.
    fn rows_mut(&self, buf: Buf) -> &'a mut [f32] {
        self.device
            .arena
            .floats_mut(self.at(buf), self.count(buf) * self.width(buf))
    }

    fn vector(&self, tensor: usize) -> &'a [f32] {
        let placed = &self.weights.layout.tensors[tensor];
        self.device
            .arena
            .floats(self.weights.slab + placed.at, placed.desc.cols as usize)
    }
}

fn multiply(
    device: &mut HostDevice,
    x: Buf,
    products: &[Product],
    weights: Bound<'_>,
    scratch: Scratch<'_>,
    rows: RowCount,
) -> Result<(), Error> {
    let isa = device.isa;
    let tensor = |i: usize| &weights.layout.tensors[i];
    let matrices: Vec<PackedMatrix> = products
        .iter()
        .map(|p| super::packed(&tensor(p.weight).desc, isa))
        .collect::<Result<_, _>>()?;
    let mut activations = std::mem::take(&mut device.activations);
    let on = On {
        device,
        weights,
        scratch,
        rows,
    };
    let (tokens, cols) = (on.count(x), on.width(x));
    let mut forms = matrices.iter().map(|m| ActivationForm::of(m.ty()));
    let first = forms.next().expect("a product has a matrix");
    let form = if forms.all(|f| f == first) {
        first
    } else {
        ActivationForm::Both
    };
    activations.resize(form, tokens, cols);
    let input = on.rows(x);
    let pool = &on.device.pool;
    let mut parts: Vec<_> = activations.parts(share(cols)).collect();
    pool.run_rows(&mut parts, 1, 1, |_, parts| {
        parts.iter_mut().for_each(|p| p.fill(isa, input))
    });
    drop(parts);
    // All products' row groups are one list of items, so that a small product does not wait for a thread of its own.
    let work: Vec<_> = products
        .iter()
        .zip(&matrices)
        .map(|(product, matrix)| {
            let placed = tensor(product.weight);
            let packed = on
                .device
                .arena
                .bytes(weights.slab + placed.at, matrix.packed_bytes());
            let out = on.rows_mut(product.out);
            // SAFETY: the pool hands each row group to one call, below, so no two write the same columns.
            (matrix, packed, unsafe {
                RowsOut::new(out, tokens, matrix.rows(), matrix.rows())
            })
        })
        .collect();
    let n_groups: usize = matrices.iter().map(PackedMatrix::row_groups).sum();
    let bytes: usize = matrices.iter().map(PackedMatrix::packed_bytes).sum();
    let least = SHARE_BYTES.div_ceil(bytes.div_ceil(n_groups));
    // The kernels take groups two at a time.
    let chunk = (n_groups / (pool.threads() * SHARES))
        .max(least)
        .next_multiple_of(2);
    pool.run(n_groups, chunk, |items| {
        let mut first = 0;
        for &(matrix, packed, out) in &work {
            let end = first + matrix.row_groups();
            let (from, to) = (items.start.clamp(first, end), items.end.clamp(first, end));
            if from < to {
                mat_mul(matrix, packed, &activations, from - first..to - first, out);
            }
            first = end;
        }
    });
    for product in products {
        if let Some(bias) = product.bias {
            ops::add_bias(on.device.simd, on.rows_mut(product.out), on.vector(bias));
        }
    }
    device.activations = activations;
    Ok(())
}

/// Norms the heads of each row, where a norm is given, and rotates them.
fn rotate(
    on: &On<'_>,
    x: Buf,
    n_head: u32,
    heads: &HeadShape,
    norm: Option<(usize, f32)>,
    batch: &Batch<'_>,
) {
    let simd = on.device.simd;
    let (width, n_head, head_dim) = (on.width(x), n_head as usize, heads.head_dim as usize);
    let norm = norm.map(|(weight, eps)| (on.vector(weight), eps));
    on.device
        .pool
        .run_rows(on.rows_mut(x), width, share(width), |rows, x| {
            if let Some((weight, eps)) = norm {
                ops::rms_norm_in_place(simd, x, weight, eps);
            }
            ops::rope(simd, batch.rope, rows.start, x, n_head, head_dim);
        });
}

/// Appends the rows' keys and values to their sequences' pages.
fn append(on: &On<'_>, k: Buf, v: Buf, layer: u32, batch: &Batch<'_>) {
    let (k_rows, v_rows) = (on.rows(k), on.rows(v));
    let (k_width, v_width) = (on.width(k), on.width(v));
    for span in batch.spans {
        for i in 0..span.n_rows {
            let (row, position) = (span.first_row + i, span.first_position as usize + i);
            let page = span.kv_pages[position / KV_PAGE_TOKENS]
                + batch.kv.layer_offset_bytes(layer as usize) as u64;
            let bytes = on.device.arena.bytes_mut(page, batch.kv.layer_bytes());
            let (k, v) = (
                &k_rows[row * k_width..][..k_width],
                &v_rows[row * v_width..][..v_width],
            );
            let page = one_layer(batch.kv).layer_mut(bytes, 0);
            ops::kv_append(
                on.device.simd,
                batch.kv,
                page,
                position % KV_PAGE_TOKENS,
                k,
                v,
            );
        }
    }
}

/// A layout whose page is one layer of the given one's, for views of a single layer.
fn one_layer(kv: &KvLayout) -> KvLayout {
    KvLayout { n_layer: 1, ..*kv }
}

/// Attention of each span over its sequence's pages.
fn attend(
    on: &On<'_>,
    q: Buf,
    out: Buf,
    heads: &HeadShape,
    layer: u32,
    scale: f32,
    batch: &Batch<'_>,
) {
    let single = one_layer(batch.kv);
    let pages: Vec<Vec<_>> = batch
        .spans
        .iter()
        .map(|span| {
            let positions = span.first_position as usize + span.n_rows;
            let used = &span.kv_pages[..batch.kv.pages_for(positions)];
            let at = batch.kv.layer_offset_bytes(layer as usize) as u64;
            used.iter()
                .map(|&page| {
                    single.layer(on.device.arena.bytes(page + at, batch.kv.layer_bytes()), 0)
                })
                .collect()
        })
        .collect();
    let spans: Vec<_> = batch
        .spans
        .iter()
        .zip(&pages)
        .map(|(span, pages)| AttentionSpan {
            n_rows: span.n_rows,
            pos0: span.first_position as usize,
            pages,
        })
        .collect();
    let shape = AttentionShape {
        kv: *batch.kv,
        n_head: heads.n_head as usize,
        scale,
        window: None,
    };
    ops::attention(
        &on.device.pool,
        on.device.simd,
        &shape,
        &spans,
        on.rows(q),
        on.rows_mut(out),
    );
}
