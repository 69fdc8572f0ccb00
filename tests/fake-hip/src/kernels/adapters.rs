//! What adapters add to products (`adapters.hip`): sums of f64, of the ranks alone that have a
//! scale. What nobody writes is not read. Rows in Hopper's order are no AMD GPU's.

use rocmforge_kernels_gpu::ops::adapters::{
    AdapterMatrix, AdaptersDownArgs, AdaptersUpArgs, MATRICES_MAX, PARTS_MAX,
};
use rocmforge_ops::WeightType;

use super::act;
use super::{Launch, agrees, args, covers, floats, halves, store};
use crate::memory::{Fault, Memory};

/// Threads of a block of `adapters_up_*`, a row each.
const UP_THREADS: u32 = 128;

/// Tokens of a block, but of `adapters_up_1_*` and `adapters_up_gated_*`.
const TOKENS: u32 = 32;

/// Rows of a first matrix that a block of `adapters_down_*` takes.
const RANKS: u32 = 4;

/// Columns that such a block reads at once: every `n_parts`-th of these is of a part.
const SLICE: usize = 4096;

/// How `adapters_up_*` deals with tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Up {
    One,
    Many,
    Gated,
}

/// Rows of a matrix of floats.
fn weights(
    memory: &mut Memory,
    ty: WeightType,
    at: u64,
    n: usize,
    who: &str,
) -> Result<Vec<f32>, Fault> {
    match ty {
        WeightType::F32 => floats(memory, at, n, who),
        WeightType::F16 => halves(memory, at, n, who),
        other => Err(Fault(format!("adapters of {other}"))),
    }
}

fn check_width(width: u32) -> Result<(), Fault> {
    if width > 0 && width.is_multiple_of(32) {
        return Ok(());
    }
    Err(Fault(format!("adapters of width {width}")))
}

/// The rows that first matrices are multiplied with, normed where that is asked for.
fn rows(memory: &mut Memory, a: &AdaptersDownArgs, half: bool) -> Result<Vec<f32>, Fault> {
    let (n, cols) = (a.n_tokens as usize, a.cols as usize);
    if !half {
        let mut x = floats(memory, a.x, n * cols, "adapters' rows")?;
        if a.norm != 0 {
            let weight = floats(memory, a.norm, cols, "adapters' norm")?;
            for row in x.chunks_exact_mut(cols) {
                let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
                let factor = 1.0 / (squares / cols as f64 + f64::from(a.eps)).sqrt();
                let pairs = row.iter_mut().zip(&weight);
                pairs.for_each(|(v, w)| *v = (f64::from(*v * *w) * factor) as f32);
            }
        }
        return Ok(x);
    }
    if a.norm != 0 || cols % 8 != 0 {
        return Err(Fault(format!("f16 rows of {cols} columns")));
    }
    let mut x = halves(memory, a.x, n * cols, "adapters' rows")?;
    x.iter_mut().for_each(|v| *v *= a.factor);
    Ok(x)
}

/// The products with the first matrices, part by part of the columns.
pub(super) fn down(
    memory: &mut Memory,
    launch: &Launch,
    ty: WeightType,
    half: bool,
) -> Result<(), Fault> {
    let a = args(launch, AdaptersDownArgs::from_bytes)?;
    check_width(a.width)?;
    let matrices = a.weights.get(..a.n_matrices as usize);
    let matrices = matrices.ok_or_else(|| Fault(format!("{} matrices", a.n_matrices)))?;
    agrees(
        "blocks and ranks",
        launch.grid[0],
        a.n_matrices * a.width / RANKS,
    )?;
    agrees(
        "blocks and tokens",
        launch.grid[1],
        a.n_tokens.div_ceil(TOKENS),
    )?;
    agrees("blocks and parts", launch.grid[2], a.n_parts)?;
    if a.n_parts == 0 || u64::from(a.n_parts) > PARTS_MAX || a.norm != 0 && a.n_parts > 1 {
        return Err(Fault(format!("{} parts of the columns", a.n_parts)));
    }
    let (n, cols, width) = (a.n_tokens as usize, a.cols as usize, a.width as usize);
    let x = rows(memory, &a, half)?;
    let scales = floats(memory, a.scales, n * width, "adapters' scales")?;
    for (m, &at) in matrices.iter().enumerate() {
        let matrix = weights(memory, ty, at, width * cols, "an adapter")?;
        for part in 0..a.n_parts as usize {
            for (t, scales) in scales.chunks_exact(width).enumerate() {
                let row = &x[t * cols..][..cols];
                let place = (part * matrices.len() + m) * n + t;
                let at = a.low + (place * width * 4) as u64;
                // As many as a block takes are written if one of them has a scale.
                for (i, scales) in scales.chunks_exact(RANKS as usize).enumerate() {
                    if scales.iter().all(|s| *s == 0.0) {
                        continue;
                    }
                    let first = i * RANKS as usize;
                    let of_rank = |(r, &scale): (usize, &f32)| match scale == 0.0 {
                        true => 0.0,
                        false => {
                            let weights = &matrix[(first + r) * cols..][..cols];
                            scale * part_of(weights, row, part, a.n_parts as usize)
                        }
                    };
                    let four: Vec<f32> = scales.iter().enumerate().map(of_rank).collect();
                    store(memory, at + (first * 4) as u64, &four)?;
                }
            }
        }
    }
    Ok(())
}

/// The product of a part's columns.
fn part_of(weights: &[f32], row: &[f32], part: usize, n_parts: usize) -> f32 {
    let slices = weights.chunks(SLICE).zip(row.chunks(SLICE));
    let mine = slices.skip(part).step_by(n_parts);
    let sums = mine.map(|(w, x)| -> f64 {
        let pairs = w.iter().zip(x);
        pairs.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
    });
    sums.sum::<f64>() as f32
}

/// The sums of the parts of what has a scale, and zero for what has none.
fn lows(
    memory: &mut Memory,
    a: &AdaptersUpArgs,
    scales: &[f32],
    low: u32,
) -> Result<Vec<f32>, Fault> {
    let width = a.width as usize;
    let mut sums = vec![0.0; scales.len()];
    for part in 0..a.n_parts {
        for (i, scales) in scales.chunks_exact(RANKS as usize).enumerate() {
            if scales.iter().all(|s| *s == 0.0) {
                continue;
            }
            let (t, first) = (i * RANKS as usize / width, i * RANKS as usize % width);
            let row = u64::from(part * a.n_low + low) * u64::from(a.n_tokens) + t as u64;
            let at = a.low + (row * width as u64 + first as u64) * 4;
            let four = floats(memory, at, RANKS as usize, "what adapters left")?;
            let to = &mut sums[i * RANKS as usize..][..RANKS as usize];
            to.iter_mut().zip(four).for_each(|(sum, v)| *sum += v);
        }
    }
    Ok(sums)
}

/// A product with what is added to it.
fn sum(
    memory: &mut Memory,
    ty: WeightType,
    a: &AdaptersUpArgs,
    matrix: &AdapterMatrix,
    scales: &[f32],
) -> Result<Vec<f32>, Fault> {
    let (rows, width) = (matrix.rows as usize, a.width as usize);
    let mut out = floats(
        memory,
        matrix.out,
        a.n_tokens as usize * rows,
        "adapters' sums",
    )?;
    if matrix.weights == 0 {
        return Ok(out);
    }
    let low = lows(memory, a, scales, matrix.low)?;
    let second = weights(memory, ty, matrix.weights, rows * width, "an adapter")?;
    let tokens = low.chunks_exact(width).zip(scales.chunks_exact(width));
    for (out, (low, scales)) in out.chunks_exact_mut(rows).zip(tokens) {
        // A row without scales stays as it is.
        if scales.iter().all(|s| *s == 0.0) {
            continue;
        }
        for (out, second) in out.iter_mut().zip(second.chunks_exact(width)) {
            let pairs = second.iter().zip(low);
            let added: f64 = pairs.map(|(w, y)| f64::from(*w) * f64::from(*y)).sum();
            *out = (f64::from(*out) + added) as f32;
        }
    }
    Ok(out)
}

/// What the second matrices add, and the gated unit of it.
pub(super) fn up(
    memory: &mut Memory,
    launch: &Launch,
    ty: WeightType,
    how: Up,
) -> Result<(), Fault> {
    let a = args(launch, AdaptersUpArgs::from_bytes)?;
    check_width(a.width)?;
    let n = a.n_matrices as usize;
    if n == 0 || n > MATRICES_MAX || u64::from(a.n_parts) > PARTS_MAX {
        return Err(Fault(format!("{n} matrices, {} parts", a.n_parts)));
    }
    let matrices = &a.matrices[..n];
    let blocks = |m: &AdapterMatrix| m.rows.div_ceil(UP_THREADS);
    let scales = floats(
        memory,
        a.scales,
        (a.n_tokens * a.width) as usize,
        "adapters' scales",
    )?;
    let tokens = match how {
        Up::Many => TOKENS,
        Up::One | Up::Gated => 1,
    };
    covers(
        "the grid",
        u64::from(launch.grid[1] * tokens),
        u64::from(a.n_tokens),
    )?;
    if let Some(wrong) = matrices.iter().find(|m| m.low >= a.n_low) {
        return Err(Fault(format!("first matrix {} of {}", wrong.low, a.n_low)));
    }
    if how != Up::Gated {
        agrees(
            "blocks and rows",
            launch.grid[0],
            matrices.iter().map(blocks).sum(),
        )?;
        for matrix in matrices {
            let out = sum(memory, ty, &a, matrix, &scales)?;
            store(memory, matrix.out, &out)?;
        }
        return Ok(());
    }
    agrees("blocks and rows", launch.grid[0], blocks(&matrices[0]))?;
    let [gate, up] = matrices else {
        return Err(Fault(format!("a gated unit of {n} matrices")));
    };
    agrees("rows of gate and up", gate.rows, up.rows)?;
    agrees("tokens of a gated unit", a.n_tokens, 1)?;
    let mut made = sum(memory, ty, &a, gate, &scales)?;
    let other = sum(memory, ty, &a, up, &scales)?;
    act::gate(&a.act, &mut made, &other)?;
    store(memory, gate.out, &made)
}
