//! Rows of f32: moved, biased, normed, summed, and brought to 8 bits or f16 (`gather.hip`,
//! `add_bias.hip`, `activations.hip`).

use rocmforge_kernels_cpu::ops::{self, Simd};
use rocmforge_kernels_gpu::ops::activations::{ActivationsArgs, F16_LOW_SCALE, GATED_F16_SCALE};
use rocmforge_kernels_gpu::ops::rows::{AddBiasArgs, GatherArgs, GatherOutputsArgs, LayerNormArgs};
use rocmforge_ops::MEAN_OF_SPAN;

use super::act;
use super::{Launch, args, covers, floats, store, store_halves, words};
use crate::memory::{Fault, Memory};

/// Threads of a block of `gather` and `add_bias`.
const THREADS: u64 = 256;

/// Activations in a block of 8 bits.
const BLOCK: usize = 32;

/// Of a `SequencePlace`, which begins with the first row and the number of rows.
pub(super) const SEQUENCE_PLACE_BYTES: u64 = 40;

/// What is computed of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum In {
    Plain,
    Norm,
    AddNorm,
    Gate,
    Add,
}

/// What it is stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Out {
    F32,
    F16,
    F16Pair,
    Q8,
    Nothing,
}

/// Entries of the unit `activations`.
pub(super) fn entries() -> impl Iterator<Item = (String, In, Out)> {
    let inputs = [
        ("plain", In::Plain),
        ("norm", In::Norm),
        ("add_norm", In::AddNorm),
        ("gate", In::Gate),
        ("add", In::Add),
    ];
    let outputs = [("f32", Out::F32), ("f16", Out::F16), ("q8", Out::Q8)];
    let all = inputs.into_iter().flat_map(move |(from, input)| {
        outputs.map(|(to, output)| (format!("activations_{from}_{to}"), input, output))
    });
    let pairs = [inputs[0], inputs[1], inputs[3]]
        .map(|(from, input)| (format!("activations_{from}_f16_pair"), input, Out::F16Pair));
    all.chain(pairs)
        .chain([("activations_add_none".to_owned(), In::Add, Out::Nothing)])
}

/// `out[i] = x[rows[i]]`, a block row a row.
pub(super) fn gather(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, GatherArgs::from_bytes)?;
    let cols = u64::from(a.cols);
    covers("the grid", u64::from(launch.grid[0]) * 4 * THREADS, cols)?;
    let wanted = words(memory, a.rows, launch.grid[1] as usize, "gather's rows")?;
    for (i, row) in (0u64..).zip(wanted) {
        let from = a.x + u64::from(row) * cols * 4;
        let values = floats(memory, from, cols as usize, "gather")?;
        store(memory, a.out + i * cols * 4, &values)?;
    }
    Ok(())
}

/// `out[i] = x[rows[i]]`, or the mean of a span's rows, a block row a row.
pub(super) fn gather_outputs(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, GatherOutputsArgs::from_bytes)?;
    let cols = u64::from(a.cols);
    covers("the grid", u64::from(launch.grid[0]) * 4 * THREADS, cols)?;
    let wanted = words(memory, a.rows, launch.grid[1] as usize, "gather's rows")?;
    for (i, row) in (0u64..).zip(wanted) {
        let (mut first, mut n) = (row, 1);
        if row & MEAN_OF_SPAN != 0 {
            let at = a.sequences + u64::from(row & !MEAN_OF_SPAN) * 4;
            let sequence = words(memory, at, 1, "a row's span")?[0];
            let place = a.places + u64::from(sequence) * SEQUENCE_PLACE_BYTES;
            let place = words(memory, place, 2, "a span's rows")?;
            (first, n) = (place[0], place[1] as usize);
        }
        let from = a.x + u64::from(first) * cols * 4;
        let all = floats(memory, from, n * cols as usize, "gather")?;
        let mut values = vec![0.0; cols as usize];
        for row in all.chunks_exact(cols as usize) {
            values.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        values.iter_mut().for_each(|sum| *sum /= n as f32);
        store(memory, a.out + i * cols * 4, &values)?;
    }
    Ok(())
}

/// `out[t] += bias`, a block row a token.
pub(super) fn add_bias(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, AddBiasArgs::from_bytes)?;
    let rows = a.rows as usize;
    covers("the grid", u64::from(launch.grid[0]) * THREADS, rows as u64)?;
    let bias = floats(memory, a.bias, rows, "add_bias")?;
    let mut x = floats(memory, a.out, rows * launch.grid[1] as usize, "add_bias")?;
    ops::add_bias(Simd::detect(), &mut x, &bias);
    store(memory, a.out, &x)
}

/// A block a group of a row.
pub(super) fn layer_norm(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, LayerNormArgs::from_bytes)?;
    let (cols, groups) = (a.cols as usize, a.weight_rows as usize);
    let mut x = floats(
        memory,
        a.x,
        cols * launch.grid[0] as usize,
        "layer_norm's x",
    )?;
    let weight = floats(memory, a.weight, cols * groups, "layer_norm's weight")?;
    let bias = match a.bias {
        0 => None,
        at => Some(floats(memory, at, cols * groups, "layer_norm's bias")?),
    };
    ops::layer_norm_in_place(
        Simd::detect(),
        &mut x,
        &weight,
        bias.as_deref(),
        a.eps,
        cols,
    );
    store(memory, a.out, &x)
}

/// A block a row.
pub(super) fn activations(
    memory: &mut Memory,
    launch: &Launch,
    input: In,
    output: Out,
) -> Result<(), Fault> {
    let a = args(launch, ActivationsArgs::from_bytes)?;
    let cols = a.cols as usize;
    let n = cols * launch.grid[0] as usize;
    let simd = Simd::detect();
    let mut x = floats(memory, a.x, n, "activations' x")?;
    let mut other = Vec::new();
    if matches!(input, In::AddNorm | In::Add) || input == In::Gate && a.other != 0 {
        other = floats(memory, a.other, n, "activations' other")?;
    }
    if matches!(input, In::AddNorm | In::Add) {
        for (x, y) in x.iter_mut().zip(&other) {
            *x = a.factor.mul_add(*y, *x);
        }
        store(memory, a.x, &x)?;
    }
    match input {
        In::Norm | In::AddNorm => {
            let groups = a.weight_rows as usize;
            let weight = match a.weight {
                0 => vec![1.0; cols * groups],
                at => floats(memory, at, cols * groups, "activations' weight")?,
            };
            for (x, weight) in x.chunks_mut(cols).zip(weight.chunks(cols).cycle()) {
                ops::rms_norm_in_place(simd, x, weight, a.eps);
            }
        }
        In::Gate if a.other == 0 => act::activate(&a.act, &mut x)?,
        In::Gate => act::gate(&a.act, &mut x, &other)?,
        In::Plain | In::Add => {}
    }
    if matches!(output, Out::F16 | Out::F16Pair) && matches!(input, In::Gate | In::Plain) {
        x.iter_mut().for_each(|v| *v *= GATED_F16_SCALE);
    }
    match output {
        Out::F32 => store(memory, a.out, &x),
        Out::F16 => store_halves(memory, a.out, &x),
        Out::F16Pair => {
            let low: Vec<f32> = x.iter().map(|v| low_part(*v)).collect();
            store_halves(memory, a.out, &x)?;
            store_halves(memory, a.scales, &low)
        }
        Out::Q8 => {
            let (bytes, scales) = to_q8(&x, cols)?;
            memory.write(a.out, &bytes)?;
            store(memory, a.scales, &scales)
        }
        Out::Nothing => Ok(()),
    }
}

/// What f16 leaves of a number, as the second of two f16.
pub(super) fn low_part(v: f32) -> f32 {
    match v.is_finite() {
        true => (v - half::f16::from_f32(v.clamp(-65504.0, 65504.0)).to_f32()) * F16_LOW_SCALE,
        false => 0.0,
    }
}

/// Rows as 8 bits: bytes `[rows][2][blocks][16]`, and `{d, d * sum}` a block.
fn to_q8(x: &[f32], cols: usize) -> Result<(Vec<u8>, Vec<f32>), Fault> {
    if !cols.is_multiple_of(BLOCK) {
        return Err(Fault(format!(
            "rows of {cols} are no whole blocks of {BLOCK}"
        )));
    }
    let blocks = cols / BLOCK;
    let mut bytes = vec![0; x.len()];
    let mut scales = Vec::with_capacity(x.len() / BLOCK * 2);
    for (row, to) in x.chunks_exact(cols).zip(bytes.chunks_exact_mut(cols)) {
        for (c, block) in row.chunks_exact(BLOCK).enumerate() {
            let finite = block.iter().all(|v| v.is_finite());
            let largest = block.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let d = if finite { largest / 127.0 } else { f32::NAN };
            let mut sum = 0;
            for (i, v) in block.iter().enumerate() {
                let q = (v * inverse).round_ties_even() as i8;
                sum += i32::from(q);
                to[(i / 16) * blocks * 16 + c * 16 + i % 16] = q.cast_unsigned();
            }
            scales.extend([d, d * sum as f32]);
        }
    }
    Ok((bytes, scales))
}

/// Rows of 8 bits as the f32 that they stand for.
pub(super) fn from_q8(bytes: &[u8], scales: &[f32], cols: usize) -> Result<Vec<f32>, Fault> {
    let blocks = cols / BLOCK;
    let mut x = vec![0.0; bytes.len()];
    let rows = x.chunks_exact_mut(cols).zip(bytes.chunks_exact(cols));
    for ((row, bytes), scales) in rows.zip(scales.chunks_exact(blocks * 2)) {
        for (c, block) in row.chunks_exact_mut(BLOCK).enumerate() {
            let (d, told) = (scales[2 * c], scales[2 * c + 1]);
            let mut sum = 0;
            for (i, v) in block.iter_mut().enumerate() {
                let q = bytes[(i / 16) * blocks * 16 + c * 16 + i % 16].cast_signed();
                sum += i32::from(q);
                *v = d * f32::from(q);
            }
            let is = d * sum as f32;
            if is != told && !(is.is_nan() && told.is_nan()) {
                return Err(Fault(format!(
                    "block {c} of 8 bits sums to {is}, its scales say {told}"
                )));
            }
        }
    }
    Ok(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_come_back_within_half_a_step() {
        let x: Vec<f32> = (0..192)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0)
            .collect();
        let (bytes, mut scales) = to_q8(&x, 96).unwrap();
        let back = from_q8(&bytes, &scales, 96).unwrap();
        for (x, y) in x.chunks(32).zip(back.chunks(32)) {
            let d = x.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
            assert!(x.iter().zip(y).all(|(x, y)| (x - y).abs() <= d * 0.501));
        }
        // A place of a byte is told by its block's sum.
        scales.swap(1, 3);
        assert!(from_q8(&bytes, &scales, 96).is_err());
    }
}
