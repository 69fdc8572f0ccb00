//! Operations on the host: each finds its rows and weights in the arena and shares
//! the work out over the pool.

use std::num::NonZeroUsize;

use rocmforge_device::{Batch, Error, NO_PAGE, Scratch, SegmentBinding};
use rocmforge_kernels_cpu::ops::{self, AttentionShape, AttentionSpan, ColumnSource};
use rocmforge_ops::{Act, Buf, HeadShape, KV_PAGE_TOKENS, KvLayer, Mask, Op, RopeUse, TensorIndex};

use super::adapters::AdapterBufs;
use super::context::{OpBuffers, OpContext};
use super::{HostDevice, adapters, products, recurrent};

/// Runs one operation.
pub(super) fn run(
    device: &mut HostDevice,
    op: &Op,
    weights: Option<SegmentBinding<'_>>,
    scratch: Scratch<'_>,
    batch: &Batch<'_>,
) -> Result<(), Error> {
    let context = OpBuffers {
        weights,
        scratch,
        rows: batch.counts(),
    };
    context.assert_apart(op);
    match op {
        Op::MatMul { x, products } => products::multiply(device, *x, products, &context),
        Op::MatMulHeads {
            x,
            n_head,
            weight,
            out,
        } => products::multiply_heads(device, *x, *n_head, *weight, *out, &context),
        Op::AddAdapters {
            x,
            scales,
            low,
            products,
        } => {
            let bufs = AdapterBufs {
                x: *x,
                scales: *scales,
                low: *low,
            };
            adapters::add(device, bufs, products, &context)
        }
        _ => {
            rows_op(&context.with_device(device), op, batch);
            Ok(())
        }
    }
}

#[expect(clippy::too_many_lines, reason = "one arm an operation")]
fn rows_op(on: &OpContext<'_>, op: &Op, batch: &Batch<'_>) {
    let simd = on.device.simd;
    match op {
        Op::RmsNorm {
            x,
            weight,
            eps,
            group,
            out,
        } => {
            let (weight, width) = (weight.map(|w| on.floats(w)), on.width(*x));
            let group = *group as usize;
            if x == out {
                on.each_row(*x, |_, x| {
                    ops::rms_norm_groups_in_place(simd, x, weight, *eps, group)
                });
            } else {
                let x = on.rows(*x);
                on.each_row(*out, |rows, out| {
                    let x = &x[rows.start * width..rows.end * width];
                    ops::rms_norm_groups(simd, x, weight, *eps, group, out);
                });
            }
        }
        Op::LayerNorm {
            x,
            weight,
            bias,
            eps,
            group,
            out,
        } => {
            let (weight, bias) = (on.floats(*weight), bias.map(|b| on.floats(b)));
            let (group, width) = (*group as usize, on.width(*x));
            if x == out {
                on.each_row(*x, |_, x| {
                    ops::layer_norm_in_place(simd, x, weight, bias, *eps, group);
                });
            } else {
                let x = on.rows(*x);
                on.each_row(*out, |rows, out| {
                    out.copy_from_slice(&x[rows.start * width..rows.end * width]);
                    ops::layer_norm_in_place(simd, out, weight, bias, *eps, group);
                });
            }
        }
        Op::Add { x, y, scale } => {
            let (y, width) = (on.rows(*y), on.width(*x));
            on.each_row(*x, |rows, x| {
                ops::add_scaled(simd, x, &y[rows.start * width..rows.end * width], *scale);
            });
        }
        Op::AddWeighted { x, y, weight } => {
            let (y, weight, width) = (on.rows(*y), on.floats(*weight), on.width(*x));
            on.each_row(*x, |rows, x| {
                ops::add_weighted(x, &y[rows.start * width..rows.end * width], weight);
            });
        }
        Op::AddTable {
            x,
            table,
            by_position,
        } => {
            let (table, width) = (on.floats(*table), on.width(*x));
            let positions: Vec<u32> = batch.positions().collect();
            on.each_row(*x, |rows, x| {
                for (x, &position) in x.chunks_exact_mut(width).zip(&positions[rows]) {
                    let row = if *by_position { position as usize } else { 0 };
                    ops::add_scaled(simd, x, &table[row * width..][..width], 1.0);
                }
            });
        }
        Op::Scale { x, factor } => on.each_row(*x, |_, x| ops::scale(simd, x, *factor)),
        Op::ScaleBy { x, weight } => {
            let factor = on.floats(*weight)[0];
            on.each_row(*x, |_, x| ops::scale(simd, x, factor));
        }
        Op::Clamp { x, low, high, out } => {
            let (low, high, width) = (on.floats(*low)[0], on.floats(*high)[0], on.width(*x));
            if x == out {
                on.each_row(*x, |_, x| ops::clamp(x, low, high));
            } else {
                let x = on.rows(*x);
                on.each_row(*out, |rows, out| {
                    out.copy_from_slice(&x[rows.start * width..rows.end * width]);
                    ops::clamp(out, low, high);
                });
            }
        }
        Op::SoftCap { x, cap } => on.each_row(*x, |_, x| ops::soft_cap(simd, x, *cap)),
        Op::Gate { gate, up, act } => {
            let (up, width) = (on.rows(*up), on.width(*gate));
            on.each_row(*gate, |rows, gate| {
                let up = &up[rows.start * width..rows.end * width];
                match act {
                    Act::Silu => ops::silu_mul(simd, gate, up),
                    act => ops::gate(simd, *act, gate, up),
                }
            });
        }
        Op::Activate { x, act } => on.each_row(*x, |_, x| ops::activate(simd, *act, x)),
        Op::AddGated { x, y, gate } => {
            let (y, gate, width) = (on.rows(*y), on.rows(*gate), on.width(*x));
            on.each_row(*x, |rows, x| {
                let y = &y[rows.start * width..rows.end * width];
                ops::add_gated(simd, x, y, &gate[rows], width);
            });
        }
        Op::GateHeads { x, gate, act } => {
            let (gate, n_head, width) = (on.rows(*gate), on.width(*gate), on.width(*x));
            on.each_row(*x, |rows, x| {
                let gate = &gate[rows.start * n_head..rows.end * n_head];
                ops::gate_heads(simd, *act, x, gate, width / n_head);
            });
        }
        Op::PositionScale { x, beta, span } => {
            let width = on.width(*x);
            let positions: Vec<u32> = batch.positions().collect();
            on.each_row(*x, |rows, x| {
                let positions = positions[rows].iter().copied();
                ops::position_scale(simd, x, width, positions, *beta, *span);
            });
        }
        Op::MatMulTransposed { x, weight, out } => {
            let (n_in, n_out) = (on.width(*x), on.width(*out));
            let (x, weight) = (on.rows(*x), on.floats(*weight));
            on.each_row(*out, |rows, out| {
                let x = &x[rows.start * n_in..rows.end * n_in];
                ops::mat_mul_transposed(simd, x, weight, n_out, out);
            });
        }
        Op::Columns {
            n_group,
            parts,
            out,
        } => {
            let sources: Vec<_> = parts
                .iter()
                .map(|p| (p, on.rows(p.x), on.width(p.x)))
                .collect();
            on.each_row(*out, |rows, out| {
                let parts: Vec<ColumnSource<'_>> = sources
                    .iter()
                    .map(|&(part, x, row_width)| ColumnSource {
                        x: &x[rows.start * row_width..rows.end * row_width],
                        row_width,
                        first: part.first as usize,
                        stride: part.stride as usize,
                        width: part.width as usize,
                    })
                    .collect();
                ops::columns(&parts, *n_group as usize, out);
            });
        }
        Op::Route {
            logits,
            bias,
            router,
            ids,
            weights,
        } => {
            let (width, n_used) = (on.width(*logits), router.n_used as usize);
            let bias = bias.map(|b| on.floats(b));
            let ids = on.rows_mut(*ids).chunks_exact_mut(n_used);
            let rows = on.rows(*logits).chunks_exact(width).zip(ids);
            for ((logits, ids), weights) in rows.zip(on.rows_mut(*weights).chunks_exact_mut(n_used))
            {
                ops::route(router, logits, bias, ids, weights);
            }
        }
        Op::Combine { y, weights, out } => {
            let (width, n_used) = (on.width(*out), on.width(*weights));
            let (y, weights) = (on.rows(*y), on.rows(*weights));
            on.each_row(*out, |rows, out| {
                let y = &y[rows.start * n_used * width..rows.end * n_used * width];
                let weights = &weights[rows.start * n_used..rows.end * n_used];
                ops::combine(simd, y, weights, n_used, width, out);
            });
        }
        Op::MergeRows { x, out } => {
            let (x, width) = (on.rows(*x), on.width(*out));
            on.each_row(*out, |rows, out| {
                out.copy_from_slice(&x[rows.start * width..rows.end * width]);
            });
        }
        Op::GatherOutputs { x, out } => {
            let (all, width) = (on.rows(*x), on.width(*x));
            on.each_row(*out, |wanted, out| {
                for (&row, out) in batch.outputs[wanted]
                    .iter()
                    .zip(out.chunks_exact_mut(width))
                {
                    let rows = batch.rows_of_output(row);
                    let n = rows.len() as f32;
                    let mut rows = all[rows.start * width..rows.end * width].chunks_exact(width);
                    if let Some(first) = rows.next() {
                        out.copy_from_slice(first);
                    }
                    for row in rows {
                        ops::add_scaled(simd, out, row, 1.0);
                    }
                    if n > 1.0 {
                        ops::scale(simd, out, 1.0 / n);
                    }
                }
            });
        }
        Op::Rope {
            x,
            n_head,
            head_dim,
            norm,
            rope,
        } => rotate(on, *x, (*n_head, *head_dim), *norm, Some(*rope), batch),
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
            rotate(
                on,
                *q,
                (heads.n_head, heads.head_dim),
                *q_norm,
                *rope,
                batch,
            );
            rotate(
                on,
                *k,
                (heads.n_head_kv, heads.head_dim),
                *k_norm,
                *rope,
                batch,
            );
            append(on, *k, *v, *layer, batch);
        }
        Op::Attention { .. } => attend(on, op, batch),
        Op::Conv { .. } | Op::DeltaNet { .. } | Op::Ssm { .. } => recurrent::run(on, op, batch),
        Op::MatMul { .. } | Op::MatMulHeads { .. } | Op::AddAdapters { .. } => {
            unreachable!("handled by `run`, since products need the device mutable")
        }
    }
}

/// Norms the heads of each row, where a norm is given, and rotates them, where a rotation is.
fn rotate(
    on: &OpContext<'_>,
    x: Buf,
    (n_head, head_dim): (u32, u32),
    norm: Option<(TensorIndex, f32)>,
    rope: Option<RopeUse>,
    batch: &Batch<'_>,
) {
    let simd = on.device.simd;
    let (n_head, head_dim) = (n_head as usize, head_dim as usize);
    let norm = norm.map(|(weight, eps)| (on.floats(weight), eps));
    if norm.is_none() && rope.is_none() {
        return;
    }
    on.each_row(x, |rows, x| {
        if let Some((weight, eps)) = norm {
            ops::rms_norm_in_place(simd, x, weight, eps);
        }
        if let Some(RopeUse { table, first }) = rope {
            let angles = &batch.rope[usize::from(table)];
            ops::rope_at(
                simd,
                angles,
                rows.start,
                x,
                n_head,
                head_dim,
                first as usize,
            );
        }
    });
}

/// Appends the rows' keys and values to their sequences' pages, each page's by one thread: a key
/// goes to a cache line an element.
fn append(on: &OpContext<'_>, k: Buf, v: Buf, layer: KvLayer, batch: &Batch<'_>) {
    /// Rows that follow each other, and the first one's place in their page.
    struct Rows {
        page: u64,
        slot: usize,
        first: usize,
        n: usize,
    }
    let group = usize::from(layer.group);
    let layout = &batch.kv[group].layout;
    let (k_rows, v_rows) = (on.rows(k), on.rows(v));
    let (k_width, v_width) = (on.width(k), on.width(v));
    let (arena, simd) = (&*on.device.arena, on.device.simd);
    let spans = batch.spans_of(layer.group);
    let mut all = Vec::with_capacity(spans.len());
    for span in spans {
        let mut done = 0;
        while done < span.n_rows {
            let position = span.first_position as usize + done;
            let slot = position % KV_PAGE_TOKENS;
            let n = (KV_PAGE_TOKENS - slot).min(span.n_rows - done);
            all.push(Rows {
                page: span.kv_pages[group][position / KV_PAGE_TOKENS],
                slot,
                first: span.first_row + done,
                n,
            });
            done += n;
        }
    }
    all.sort_by_key(|rows| rows.page);
    let pages: Vec<&[Rows]> = all.chunk_by(|a, b| a.page == b.page).collect();
    let offset = layout.layer_offset_bytes(layer.index as usize) as u64;
    on.device.pool.run(pages.len(), 1, |range| {
        for rows in pages[range].iter().copied().flatten() {
            let page = arena.bytes_mut(rows.page + offset, layout.layer_bytes());
            let (k, v) = (
                &k_rows[rows.first * k_width..][..rows.n * k_width],
                &v_rows[rows.first * v_width..][..rows.n * v_width],
            );
            ops::kv_append(simd, layout, page, rows.slot..rows.slot + rows.n, k, v);
        }
    });
}

/// Attention of each span over its sequence's pages.
fn attend(on: &OpContext<'_>, op: &Op, batch: &Batch<'_>) {
    let Op::Attention {
        q,
        out,
        heads,
        layer,
        scale,
        mask,
        softcap,
        sinks,
        alibi,
    } = op
    else {
        unreachable!("only attention comes here");
    };
    let HeadShape { n_head, .. } = *heads;
    let layout = &batch.kv[usize::from(layer.group)].layout;
    let at = layout.layer_offset_bytes(layer.index as usize) as u64;
    let of_group = batch.spans_of(layer.group);
    let pages: Vec<Vec<_>> = of_group
        .iter()
        .map(|span| {
            let positions = span.first_position as usize + span.n_rows;
            let used = &span.kv_pages[usize::from(layer.group)][..layout.pages_for(positions)];
            used.iter()
                .map(|&page| match page {
                    NO_PAGE => &[][..],
                    page => on.device.arena.bytes(page + at, layout.layer_bytes()),
                })
                .collect()
        })
        .collect();
    let spans: Vec<_> = of_group
        .iter()
        .zip(&pages)
        .map(|(span, pages)| AttentionSpan {
            n_rows: span.n_rows,
            pos0: span.first_position as usize,
            pages,
            later: 0,
            whole: span.whole && *mask != Mask::CausalInImages,
        })
        .collect();
    let shape = AttentionShape {
        kv: *layout,
        n_head: n_head as usize,
        scale: *scale,
        ahead: match mask {
            Mask::Causal | Mask::CausalInImages | Mask::Window(_) => 0,
            Mask::Whole => usize::MAX,
            Mask::Around(n) => *n as usize,
        },
        window: match mask {
            Mask::Causal | Mask::CausalInImages | Mask::Whole => None,
            Mask::Window(n) => NonZeroUsize::new(*n as usize),
            Mask::Around(n) => NonZeroUsize::new(*n as usize + 1),
        },
        softcap: *softcap,
        sinks: sinks.map(|s| on.floats(s)),
        alibi: *alibi,
    };
    ops::attention(
        &on.device.pool,
        on.device.simd,
        &shape,
        &spans,
        on.rows(*q),
        on.rows_mut(*out),
    );
}
