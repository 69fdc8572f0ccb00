//! Rows changed element by element, gathered by columns, routed rows summed, and experts chosen
//! (`elements.hip`, `clamp.hip`, `route.hip`).

use rocmforge_kernels_cpu::ops;
use rocmforge_kernels_gpu::ops::activations::ActSpec;
use rocmforge_kernels_gpu::ops::elements::{
    ClampArgs, ColumnsArgs, CombineArgs, ElementsArgs, ProductTransposedArgs,
};
use rocmforge_kernels_gpu::ops::route::{RouteArgs, supports};
use rocmforge_ops::{Router, RouterGate};

use super::act::sigmoid;
use super::{Launch, args, covers, floats, store, words};
use crate::memory::{Fault, Memory};

/// Threads of a block, one an element.
const THREADS: u64 = 256;

/// What is done to rows in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    Scale,
    SoftCap,
    AddGated,
    AddWeighted,
    GateHeads,
    PositionScale,
    AddTable,
}

/// `out = min(max(x, low), high)`.
pub(super) fn clamp(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, ClampArgs::from_bytes)?;
    let (cols, rows) = (a.cols as usize, launch.grid[1] as usize);
    covers("the grid", u64::from(launch.grid[0]) * THREADS, cols as u64)?;
    let mut x = floats(memory, a.x, rows * cols, "rows to clamp")?;
    let low = floats(memory, a.low, 1, "a lower bound")?[0];
    let high = floats(memory, a.high, 1, "an upper bound")?[0];
    ops::clamp(&mut x, low, high);
    store(memory, a.out, &x)
}

pub(super) fn change(memory: &mut Memory, launch: &Launch, what: Change) -> Result<(), Fault> {
    let a = args(launch, ElementsArgs::from_bytes)?;
    let (cols, rows) = (a.cols as usize, launch.grid[1] as usize);
    covers("the grid", u64::from(launch.grid[0]) * THREADS, cols as u64)?;
    let mut x = floats(memory, a.x, rows * cols, "rows to change")?;
    match what {
        Change::Scale => {
            let mut factor = a.factor;
            if a.by != 0 {
                factor *= floats(memory, a.by, 1, "a factor")?[0];
            }
            x.iter_mut().for_each(|v| *v *= factor);
        }
        Change::SoftCap => x
            .iter_mut()
            .for_each(|v| *v = a.factor * (*v / a.factor).tanh()),
        Change::AddGated => {
            let y = floats(memory, a.y, rows * cols, "rows to add")?;
            let gates = floats(memory, a.by, rows, "gates of rows")?;
            for ((x, y), gate) in x.chunks_mut(cols).zip(y.chunks(cols)).zip(gates) {
                let gate = sigmoid(gate);
                x.iter_mut().zip(y).for_each(|(x, y)| *x += gate * y);
            }
        }
        Change::AddWeighted => {
            let y = floats(memory, a.y, rows * cols, "rows to add")?;
            let weight = floats(memory, a.by, cols, "factors of elements")?;
            for (x, y) in x.chunks_mut(cols).zip(y.chunks(cols)) {
                let added = y.iter().zip(&weight).map(|(y, weight)| weight * y);
                x.iter_mut().zip(added).for_each(|(x, added)| *x += added);
            }
        }
        Change::GateHeads => {
            let dim = a.span as usize;
            super::agrees("heads of a row", a.cols % a.span, 0)?;
            let mut gates = floats(memory, a.by, rows * cols / dim, "gates of heads")?;
            let spec = ActSpec {
                kind: a.act,
                ..ActSpec::default()
            };
            super::act::activate(&spec, &mut gates)?;
            for (x, gate) in x.chunks_mut(dim).zip(gates) {
                x.iter_mut().for_each(|x| *x *= gate);
            }
        }
        Change::AddTable => {
            let positions = match a.positions {
                0 => vec![0; rows],
                at => words(memory, at, rows, "positions")?,
            };
            for (x, position) in x.chunks_mut(cols).zip(positions) {
                let at = a.y + u64::from(position) * cols as u64 * 4;
                let row = floats(memory, at, cols, "a table's row")?;
                x.iter_mut().zip(row).for_each(|(x, y)| *x += y);
            }
        }
        Change::PositionScale => {
            let positions = words(memory, a.positions, rows, "positions")?;
            for (x, position) in x.chunks_mut(cols).zip(positions) {
                let factor = 1.0 + a.factor * ((1 + position / a.span) as f32).ln();
                x.iter_mut().for_each(|v| *v *= factor);
            }
        }
    }
    store(memory, a.x, &x)
}

pub(super) fn columns(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, ColumnsArgs::from_bytes)?;
    let (groups, width) = (a.n_group as usize, a.group_width as usize);
    let told: u32 = a.parts.iter().map(|p| p.width).sum();
    super::agrees("widths of the parts and of a group", told, a.group_width)?;
    let all = (groups * width) as u64;
    covers("the grid", u64::from(launch.grid[0]) * THREADS, all)?;
    for row in 0..launch.grid[1] {
        let mut out = Vec::with_capacity(groups * width);
        for group in 0..a.n_group {
            for part in a.parts.iter().filter(|p| p.width > 0) {
                let first = part.first + group * part.stride;
                covers("a row", u64::from(part.cols), u64::from(first + part.width))?;
                let at = u64::from(row) * u64::from(part.cols) + u64::from(first);
                out.extend(floats(
                    memory,
                    part.x + at * 4,
                    part.width as usize,
                    "columns",
                )?);
            }
        }
        store(memory, a.out + u64::from(row) * all * 4, &out)?;
    }
    Ok(())
}

pub(super) fn combine(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, CombineArgs::from_bytes)?;
    let (cols, n_used, rows) = (a.cols as usize, a.n_used as usize, launch.grid[1] as usize);
    covers("the grid", u64::from(launch.grid[0]) * THREADS, cols as u64)?;
    let y = floats(memory, a.y, rows * n_used * cols, "routed rows")?;
    let weights = floats(memory, a.weights, rows * n_used, "weights of routed rows")?;
    let mut out = vec![0.0; rows * cols];
    for ((routed, weight), i) in y.chunks(cols).zip(weights).zip(0..) {
        let row = &mut out[i / n_used * cols..][..cols];
        row.iter_mut()
            .zip(routed)
            .for_each(|(o, y)| *o += weight * y);
    }
    if a.add != 0 {
        let before = floats(memory, a.out, rows * cols, "what routed rows are added to")?;
        out.iter_mut().zip(before).for_each(|(o, x)| *o += x);
    }
    store(memory, a.out, &out)
}

/// Rows of a block of `product_transposed`.
const PRODUCT_ROWS: u64 = 8;

pub(super) fn product_transposed(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, ProductTransposedArgs::from_bytes)?;
    let (n_in, cols, rows) = (a.n_in as usize, a.cols as usize, a.rows as usize);
    covers("the grid", u64::from(launch.grid[0]) * THREADS, cols as u64)?;
    covers(
        "the grid",
        u64::from(launch.grid[1]) * PRODUCT_ROWS,
        rows as u64,
    )?;
    let x = floats(memory, a.x, rows * n_in, "rows of a product")?;
    let weight = floats(memory, a.weight, n_in * cols, "a transposed matrix")?;
    let mut out = vec![0.0; rows * cols];
    for (x, out) in x.chunks(n_in).zip(out.chunks_mut(cols)) {
        for (x, weights) in x.iter().zip(weight.chunks(cols)) {
            out.iter_mut().zip(weights).for_each(|(o, w)| *o += x * w);
        }
    }
    store(memory, a.out, &out)
}

pub(super) fn route(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, RouteArgs::from_bytes)?;
    let (rows, n, n_used) = (a.rows as usize, a.n_expert as usize, a.n_used as usize);
    // A wave a row, of two or four.
    covers("the grid", u64::from(launch.grid[0]) * 4, u64::from(a.rows))?;
    let router = Router {
        n_expert: a.n_expert,
        n_used: a.n_used,
        gate: match a.gate {
            0 => RouterGate::Softmax,
            1 => RouterGate::Sigmoid,
            2 => RouterGate::SoftmaxOfChosen,
            3 => RouterGate::SqrtSoftplus,
            other => return Err(Fault(format!("no gate {other}"))),
        },
        n_group: a.n_group,
        n_group_used: a.n_group_used,
        renormalize: a.renormalize != 0,
        scale: a.scale,
    };
    supports(&router).map_err(|e| Fault(e.to_string()))?;
    let logits = floats(memory, a.logits, rows * n, "logits of experts")?;
    let bias = match a.bias {
        0 => None,
        at => Some(floats(memory, at, n, "a selection's bias")?),
    };
    let (mut ids, mut weights) = (vec![0.0; rows * n_used], vec![0.0; rows * n_used]);
    let chosen = ids.chunks_mut(n_used).zip(weights.chunks_mut(n_used));
    for (logits, (ids, weights)) in logits.chunks(n).zip(chosen) {
        ops::route(&router, logits, bias.as_deref(), ids, weights);
    }
    store(memory, a.ids, &ids)?;
    store(memory, a.weights, &weights)
}
