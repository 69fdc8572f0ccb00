//! Products (`matvec.hip`, `matvec_float.hip`, `matmat.hip`): the host device's,
//! on matrices that it packed.
//!
//! Packing a matrix costs as much as many products with it, so what was packed is kept until
//! somebody writes where the matrix lies.

use std::sync::Arc;

use rocmforge_kernels_cpu::ops::{self, Simd};
use rocmforge_kernels_cpu::{
    ActivationForm, Activations, Isa, PackedMatrix, mat_mul_all, reference,
};
use rocmforge_kernels_gpu::device_bytes;
use rocmforge_kernels_gpu::ops::heads::{MatmatHeadsArgs, MatmatHeadsFloatArgs};
use rocmforge_kernels_gpu::ops::matmat::{MatmatArgs, MatmatMmaArgs};
use rocmforge_kernels_gpu::ops::matvec::{MATRICES_MAX, MatvecArgs, MatvecFloatArgs};
use rocmforge_ops::WeightType;

use super::act;
use super::rows::from_q8;
use super::{Launch, agrees, args, covers, floats, halves, store, words};
use crate::memory::{Fault, Memory};

/// Tokens that a block of `matmat` and of float products takes.
const COLUMNS: u64 = 8;

/// A matrix as the host multiplies it.
pub(crate) struct Prepared {
    matrix: PackedMatrix,
    packed: Vec<u8>,
}

/// A matrix on the device.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) ty: WeightType,
    pub(super) at: u64,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl Matrix {
    fn file_bytes(self) -> usize {
        self.rows * (self.cols / self.ty.block_size()) * self.ty.block_bytes()
    }

    /// The matrix packed; `None` if its scales are not finite, so that the host does not pack it.
    fn prepared(self, memory: &mut Memory) -> Result<Option<Arc<Prepared>>, Fault> {
        let wrong = |e: &dyn std::fmt::Display| Fault(e.to_string());
        let planes = device_bytes(self.ty, self.rows as u64, self.cols as u64);
        memory.check(self.at, planes.map_err(|e| wrong(&e))? as usize)?;
        let bytes = self.file_bytes();
        if let Some(found) = memory.derived(self.at, bytes) {
            let matrix = found.matrix;
            if (matrix.ty(), matrix.rows(), matrix.cols()) == (self.ty, self.rows, self.cols) {
                return Ok(Some(found));
            }
        }
        let isa = Isa::detect().map_err(|e| wrong(&e))?;
        let matrix =
            PackedMatrix::new(self.ty, self.rows, self.cols, isa).map_err(|e| wrong(&e))?;
        let file = memory.read(self.at, bytes, "a product's weights")?;
        let mut packed = vec![0; matrix.packed_bytes()];
        if matrix
            .pack(&file, 0..matrix.row_groups(), &mut packed)
            .is_err()
        {
            return Ok(None);
        }
        let prepared = Arc::new(Prepared { matrix, packed });
        memory.keep(self.at, bytes, Arc::clone(&prepared));
        Ok(Some(prepared))
    }

    /// `[tokens][rows]` of `x`, `[tokens][cols]`, and the bias at an address unless that is 0.
    pub(super) fn times(
        self,
        memory: &mut Memory,
        x: &[f32],
        bias: u64,
    ) -> Result<Vec<f32>, Fault> {
        let mut out = self.products(memory, x)?;
        if bias != 0 {
            let bias = floats(memory, bias, self.rows, "a product's bias")?;
            ops::add_bias(Simd::detect(), &mut out, &bias);
        }
        Ok(out)
    }

    fn products(self, memory: &mut Memory, x: &[f32]) -> Result<Vec<f32>, Fault> {
        let tokens = x.len() / self.cols.max(1);
        let Some(prepared) = self.prepared(memory)? else {
            let file = memory.read(self.at, self.file_bytes(), "a product's weights")?;
            let products = reference::mat_mul(self.ty, &file, self.rows, self.cols, x);
            let products = products.map_err(|e| Fault(e.to_string()))?;
            return Ok(products.into_iter().map(|v| v as f32).collect());
        };
        let mut activations = Activations::new();
        let form = ActivationForm::of(self.ty);
        activations.fill(prepared.matrix.isa(), form, x, tokens, self.cols);
        let mut out = vec![0.0; tokens * self.rows];
        mat_mul_all(&prepared.matrix, &prepared.packed, &activations, &mut out);
        Ok(out)
    }
}

/// A fault unless the grid is that of the arguments and covers the tokens.
fn check_grid(launch: &Launch, n_blocks: u32, n_tokens: u32) -> Result<(), Fault> {
    let [blocks, columns, _] = launch.grid;
    agrees("blocks of the grid and by the arguments", blocks, n_blocks)?;
    covers(
        "the grid",
        u64::from(columns) * COLUMNS,
        u64::from(n_tokens),
    )
}

/// Stores products, or adds them to what is there.
fn finish(memory: &mut Memory, at: u64, mut out: Vec<f32>, epilogue: u32) -> Result<(), Fault> {
    match epilogue {
        0 => {}
        1 => {
            let before = floats(memory, at, out.len(), "a product's sum")?;
            ops::add(Simd::detect(), &mut out, &before);
        }
        other => return Err(Fault(format!("no epilogue {other}"))),
    }
    store(memory, at, &out)
}

/// One token, up to four matrices, norm before and sum or gated unit after.
pub(super) fn matvec(
    memory: &mut Memory,
    launch: &Launch,
    first: WeightType,
    second: Option<WeightType>,
) -> Result<(), Fault> {
    let a = args(launch, MatvecArgs::from_bytes)?;
    check_grid(launch, a.n_blocks, 1)?;
    if a.n_matrices == 0 || a.n_matrices as usize > MATRICES_MAX {
        return Err(Fault(format!("{} matrices", a.n_matrices)));
    }
    let cols = a.cols as usize;
    let mut x = floats(memory, a.x, cols, "a product's input")?;
    if a.norm != 0 {
        let weight = floats(memory, a.norm, cols, "a product's norm")?;
        ops::rms_norm_in_place(Simd::detect(), &mut x, &weight, a.eps);
    }
    let mut outs = Vec::new();
    for m in &a.matrices[..a.n_matrices as usize] {
        let ty = match (m.second, second) {
            (0, _) => first,
            (1, Some(second)) => second,
            (n, _) => return Err(Fault(format!("a matrix of type {n} of this kernel"))),
        };
        let matrix = Matrix {
            ty,
            at: m.weights,
            rows: m.rows as usize,
            cols,
        };
        outs.push(matrix.times(memory, &x, m.bias)?);
    }
    if a.epilogue == 2 {
        let [gate, up] = outs.as_mut_slice() else {
            return Err(Fault(format!("a gated unit of {} matrices", outs.len())));
        };
        agrees("rows of gate and up", gate.len() as u32, up.len() as u32)?;
        act::gate(&a.act, gate, up)?;
        return store(memory, a.matrices[0].out, gate);
    }
    for (m, out) in a.matrices.iter().zip(outs) {
        finish(memory, m.out, out, a.epilogue)?;
    }
    Ok(())
}

/// Any number of tokens, weights that are floats.
pub(super) fn float(memory: &mut Memory, launch: &Launch, ty: WeightType) -> Result<(), Fault> {
    let a = args(launch, MatvecFloatArgs::from_bytes)?;
    check_grid(launch, a.n_blocks, a.n_tokens)?;
    let (rows, cols) = (a.rows as usize, a.cols as usize);
    let x = floats(memory, a.x, a.n_tokens as usize * cols, "a product's input")?;
    let matrix = Matrix {
        ty,
        at: a.weights,
        rows,
        cols,
    };
    let out = matrix.times(memory, &x, a.bias)?;
    finish(memory, a.out, out, a.epilogue)
}

/// Any number of tokens that were brought to 8 bits before.
pub(super) fn matmat(memory: &mut Memory, launch: &Launch, ty: WeightType) -> Result<(), Fault> {
    let a = args(launch, MatmatArgs::from_bytes)?;
    check_grid(launch, a.n_blocks, a.n_tokens)?;
    agrees("rows and stride", a.rows, a.stride)?;
    let (rows, cols, tokens) = (a.rows as usize, a.cols as usize, a.n_tokens as usize);
    let bytes = memory.read(a.x_bytes, tokens * cols, "a product's input")?;
    let scales = floats(
        memory,
        a.x_scales,
        tokens * cols / 32 * 2,
        "a product's scales",
    )?;
    let x = from_q8(&bytes, &scales, cols)?;
    let matrix = Matrix {
        ty,
        at: a.weights,
        rows,
        cols,
    };
    let out = matrix.times(memory, &x, a.bias)?;
    finish(memory, a.out, out, a.epilogue)
}

/// The rows of a block of AMD's matrix instructions, which has 256 threads: 32 a wave of 32 lanes.
const WMMA_ROWS: u32 = 256;

/// Any number of f16 rows, up to four matrices of one type, for blocks of so many tokens.
pub(super) fn f16(
    memory: &mut Memory,
    launch: &Launch,
    ty: WeightType,
    tokens: u32,
) -> Result<(), Fault> {
    let a = args(launch, MatmatMmaArgs::from_bytes)?;
    let (n, cols) = (a.n_tokens as usize, a.cols as usize);
    let Some(matrices) = a.matrices.get(..a.n_matrices as usize) else {
        return Err(Fault(format!("{} matrices", a.n_matrices)));
    };
    let tiles: u32 = matrices.iter().map(|m| m.rows.div_ceil(WMMA_ROWS)).sum();
    let grid = [tiles, a.n_tokens.div_ceil(tokens), a.parts];
    for (is, expected) in launch.grid.into_iter().zip(grid) {
        agrees("blocks of the grid and tiles", is, expected)?;
    }
    if a.parts > 1 {
        let blocks = (grid[0] * grid[1]) as usize;
        let bytes = blocks * (a.parts * WMMA_ROWS * tokens * 4) as usize;
        memory.check(a.partials, bytes)?;
        let counters = words(memory, a.counters, blocks, "counters of parts")?;
        if counters.iter().any(|c| *c != 0) {
            return Err(Fault("a counter of parts is not zero".to_owned()));
        }
    }
    let x: Vec<f32> = halves(memory, a.x, n * cols, "a product's input")?
        .iter()
        .map(|x| x * a.factor)
        .collect();
    for m in matrices {
        let matrix = Matrix {
            ty,
            at: m.weights,
            rows: m.rows as usize,
            cols,
        };
        let out = matrix.times(memory, &x, m.bias)?;
        finish(memory, m.out, out, a.epilogue)?;
    }
    Ok(())
}

/// A product for each head, from rows in 8 bits or, with float weights, in f32.
pub(super) fn heads(memory: &mut Memory, launch: &Launch, ty: WeightType) -> Result<(), Fault> {
    let (product, n_head, x) = if ty.is_quantized() {
        let a = args(launch, MatmatHeadsArgs::from_bytes)?;
        let n = (a.product.n_tokens * a.n_head) as usize * a.product.cols as usize;
        let bytes = memory.read(a.product.x_bytes, n, "a product's input")?;
        let scales = floats(memory, a.product.x_scales, n / 32 * 2, "a product's scales")?;
        let x = from_q8(&bytes, &scales, a.product.cols as usize)?;
        (a.product, a.n_head, x)
    } else {
        let a = args(launch, MatmatHeadsFloatArgs::from_bytes)?;
        let p = a.product;
        let n = (p.n_tokens * a.n_head) as usize * p.cols as usize;
        let product = MatmatArgs {
            weights: p.weights,
            out: p.out,
            rows: p.rows,
            cols: p.cols,
            n_tokens: p.n_tokens,
            n_blocks: p.n_blocks,
            ..MatmatArgs::default()
        };
        (
            product,
            a.n_head,
            floats(memory, p.x, n, "a product's input")?,
        )
    };
    check_grid(launch, product.n_blocks, product.n_tokens)?;
    agrees(
        "heads of the grid and by the arguments",
        launch.grid[2],
        n_head,
    )?;
    let (rows, cols) = (product.rows as usize, product.cols as usize);
    let whole = Matrix {
        ty,
        at: product.weights,
        rows: rows * n_head as usize,
        cols,
    };
    // All heads' rows with every input; a head's are those that are wanted.
    let products = whole.times(memory, &x, 0)?;
    let mut out = Vec::with_capacity(x.len() / cols.max(1) * rows);
    for (i, products) in products.chunks(whole.rows.max(1)).enumerate() {
        out.extend_from_slice(&products[i % n_head as usize * rows..][..rows]);
    }
    store(memory, product.out, &out)
}
