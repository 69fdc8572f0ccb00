//! Kernels by entry name, each carried out by the host's reference on the launch's argument struct.
//!
//! Layouts of the structs are those of the sources; a field is read at its offset.

use rocmforge_kernels::host::ops::{self, Simd};

use crate::memory::{Fault, Memory};

/// A launch as it was queued.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) grid: [u32; 3],
    pub(crate) args: Vec<u8>,
}

impl Launch {
    fn u64(&self, at: usize) -> Result<u64, Fault> {
        let bytes = self.args.get(at..at + 8).and_then(|b| b.try_into().ok());
        bytes.map(u64::from_le_bytes).ok_or_else(|| self.short(at))
    }

    fn u32(&self, at: usize) -> Result<u32, Fault> {
        let bytes = self.args.get(at..at + 4).and_then(|b| b.try_into().ok());
        bytes.map(u32::from_le_bytes).ok_or_else(|| self.short(at))
    }

    fn f32(&self, at: usize) -> Result<f32, Fault> {
        self.u32(at).map(f32::from_bits)
    }

    fn short(&self, at: usize) -> Fault {
        Fault(format!(
            "no field at {at} in {} bytes of arguments",
            self.args.len()
        ))
    }
}

/// A kernel.
pub(crate) struct Kernel {
    pub(crate) name: &'static str,
    /// Bytes of its argument struct.
    pub(crate) arg_bytes: usize,
    pub(crate) run: fn(&mut Memory, &Launch) -> Result<(), Fault>,
}

/// Every kernel that there is.
pub(crate) static KERNELS: &[Kernel] = &[
    Kernel {
        name: "gather",
        arg_bytes: 32,
        run: gather,
    },
    Kernel {
        name: "add_bias",
        arg_bytes: 24,
        run: add_bias,
    },
    activations("activations_plain_f32", |m, l| {
        activate(m, l, In::Plain, true)
    }),
    activations("activations_norm_f32", |m, l| {
        activate(m, l, In::Norm, true)
    }),
    activations("activations_add_norm_f32", |m, l| {
        activate(m, l, In::AddNorm, true)
    }),
    activations("activations_silu_f32", |m, l| {
        activate(m, l, In::Silu, true)
    }),
    activations("activations_add_f32", |m, l| activate(m, l, In::Add, true)),
    activations("activations_add_none", |m, l| {
        activate(m, l, In::Add, false)
    }),
];

const fn activations(
    name: &'static str,
    run: fn(&mut Memory, &Launch) -> Result<(), Fault>,
) -> Kernel {
    Kernel {
        name,
        arg_bytes: 48,
        run,
    }
}

fn floats(memory: &mut Memory, at: u64, n: usize, who: &str) -> Result<Vec<f32>, Fault> {
    let bytes = memory.read(at, n * 4, who)?;
    let (words, _) = bytes.as_chunks::<4>();
    Ok(words.iter().map(|w| f32::from_le_bytes(*w)).collect())
}

fn store(memory: &mut Memory, at: u64, values: &[f32]) -> Result<(), Fault> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    memory.write(at, &bytes)
}

/// { x, out, rows: u64, cols, reserved: u32 }: `out[i] = x[rows[i]]`, a block row a row.
fn gather(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let (x, out, rows) = (launch.u64(0)?, launch.u64(8)?, launch.u64(16)?);
    let cols = launch.u32(24)? as usize;
    for i in 0..u64::from(launch.grid[1]) {
        let row = memory.read(rows + i * 4, 4, "gather's rows")?;
        let row = u64::from(u32::from_le_bytes([row[0], row[1], row[2], row[3]]));
        let values = floats(memory, x + row * cols as u64 * 4, cols, "gather")?;
        store(memory, out + i * cols as u64 * 4, &values)?;
    }
    Ok(())
}

/// { out, bias: u64, rows, reserved: u32 }: `out[t] += bias`, a block row a token.
fn add_bias(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let (out, bias) = (launch.u64(0)?, launch.u64(8)?);
    let rows = launch.u32(16)? as usize;
    let bias = floats(memory, bias, rows, "add_bias")?;
    let mut x = floats(memory, out, rows * launch.grid[1] as usize, "add_bias")?;
    ops::add_bias(Simd::Scalar, &mut x, &bias);
    store(memory, out, &x)
}

enum In {
    Plain,
    Norm,
    AddNorm,
    Silu,
    Add,
}

/// { x, other, weight, out, scales: u64, eps: f32, cols: u32 }: a block a row.
fn activate(memory: &mut Memory, launch: &Launch, input: In, to_f32: bool) -> Result<(), Fault> {
    let (x_at, other_at) = (launch.u64(0)?, launch.u64(8)?);
    let (weight_at, out_at) = (launch.u64(16)?, launch.u64(24)?);
    let (eps, cols) = (launch.f32(40)?, launch.u32(44)? as usize);
    let n = cols * launch.grid[0] as usize;
    let simd = Simd::Scalar;
    let mut x = floats(memory, x_at, n, "activations' x")?;
    let mut other = Vec::new();
    if !matches!(input, In::Plain | In::Norm) {
        other = floats(memory, other_at, n, "activations' other")?;
    }
    let mut weight = Vec::new();
    if matches!(input, In::Norm | In::AddNorm) {
        weight = floats(memory, weight_at, cols, "activations' weight")?;
    }
    if matches!(input, In::AddNorm | In::Add) {
        ops::add(simd, &mut x, &other);
        store(memory, x_at, &x)?;
    }
    match input {
        In::Norm | In::AddNorm => ops::rms_norm_in_place(simd, &mut x, &weight, eps),
        In::Silu => ops::silu_mul(simd, &mut x, &other),
        In::Plain | In::Add => {}
    }
    if to_f32 {
        store(memory, out_at, &x)?;
    }
    Ok(())
}
