//! Weights on their way in and out (`repack.hip`, `dequantize.hip`).

use rocmforge_kernels_cpu::reference;
use rocmforge_kernels_gpu::device_bytes;
use rocmforge_kernels_gpu::ops::weights::{DequantizeArgs, RepackArgs};
use rocmforge_ops::WeightType;

use super::rows::low_part;
use super::{Launch, args, covers, store, store_halves, words};
use crate::memory::{Fault, Memory};

/// Threads of a block; a thread has 32 weights.
const THREADS: u64 = 256;

fn row_bytes(ty: WeightType, cols: u64) -> u64 {
    cols / ty.block_size() as u64 * ty.block_bytes() as u64
}

/// A fault unless the matrix is whole blocks and all of it lies in one allocation.
fn check(memory: &mut Memory, ty: WeightType, at: u64, rows: u32, cols: u32) -> Result<(), Fault> {
    let bytes = device_bytes(ty, u64::from(rows), u64::from(cols));
    memory.check(at, bytes.map_err(|e| Fault(e.to_string()))? as usize)
}

/// Rows from a slot to their places, and a flag for those that are not finite.
pub(super) fn repack(memory: &mut Memory, launch: &Launch, ty: WeightType) -> Result<(), Fault> {
    let a = args(launch, RepackArgs::from_bytes)?;
    check(memory, ty, a.to, a.total_rows, a.cols)?;
    let (rows, cols) = (u64::from(a.rows), u64::from(a.cols));
    let items = if ty.is_quantized() {
        rows * (cols / 32)
    } else {
        (rows * cols).div_ceil(32)
    };
    covers("the grid", u64::from(launch.grid[0]) * THREADS, items)?;
    let end = u64::from(a.first_row) + rows;
    covers("the matrix", u64::from(a.total_rows), end)?;
    let row = row_bytes(ty, cols);
    let bytes = memory.read(a.from, (rows * row) as usize, "rows to repack")?;
    memory.write(a.to + u64::from(a.first_row) * row, &bytes)?;
    let mut blocks = bytes.chunks_exact(ty.block_bytes());
    if !blocks.all(|block| reference::is_finite(ty, block)) {
        let flag = words(memory, a.flag, 1, "the flag of an upload")?[0];
        memory.write(a.flag, &(flag | 1).to_le_bytes())?;
    }
    Ok(())
}

/// What rows become.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    F32,
    F16,
    /// What f16 leaves.
    Low,
}

/// Rows as f16, or by number as f32; a number past the last row gives zeros.
pub(super) fn dequantize(
    memory: &mut Memory,
    launch: &Launch,
    ty: WeightType,
    form: Form,
) -> Result<(), Fault> {
    let a = args(launch, DequantizeArgs::from_bytes)?;
    check(memory, ty, a.weights, a.total_rows, a.cols)?;
    let cols = u64::from(a.cols);
    let items = u64::from(a.rows) * cols.div_ceil(32);
    covers("the grid", u64::from(launch.grid[0]) * THREADS, items)?;
    let ids = if a.ids == 0 {
        (a.first_row..).take(a.rows as usize).collect()
    } else {
        words(memory, a.ids, a.rows as usize, "ids of rows")?
    };
    let row = row_bytes(ty, cols);
    for (i, id) in (0u64..).zip(ids) {
        let mut values = vec![0.0; cols as usize];
        if id < a.total_rows {
            let at = a.weights + u64::from(id) * row;
            let bytes = memory.read(at, row as usize, "rows to dequantize")?;
            reference::dequantize(ty, &bytes, &mut values).map_err(|e| Fault(e.to_string()))?;
        }
        if form == Form::Low {
            values.iter_mut().for_each(|v| *v = low_part(*v));
        }
        match form {
            Form::F32 => store(memory, a.out + i * cols * 4, &values)?,
            Form::F16 | Form::Low => store_halves(memory, a.out + i * cols * 2, &values)?,
        }
    }
    Ok(())
}
