//! The functions of rocBLAS that the daemon asks for, and the product that they queue, over
//! the same memory and streams.
//!
//! The library is the runtime's own by another name: [`crate::Fake::add_products`]. Only
//! products of the kind that the daemon makes are carried out, the left matrix transposed, f16
//! into f32; others are noted.

// Each function is a foreign interface of its own; the contract of all is rocBLAS's documentation.
#![allow(
    clippy::missing_safety_doc,
    missing_docs,
    reason = "the functions are the vendor's, and so are their contracts"
)]

use std::ffi::{c_int, c_uint, c_void};

use half::f16;

use crate::memory::{Fault, Memory};
use crate::misbehaviour::Misbehaviour;
use crate::queue::Work;
use crate::state::{SUCCESS, State, call};

/// Names that the daemon looks for a library by, the one that it tries before included.
pub(crate) const NAMES: [&str; 2] = ["librocblas.so.4", "libhipblaslt.so.0"];

/// rocblas_status_invalid_handle, _not_implemented and _invalid_pointer.
const INVALID_HANDLE: u32 = 1;
const NOT_IMPLEMENTED: u32 = 2;
const INVALID_POINTER: u32 = 3;

const NONE: u32 = 111;
const TRANSPOSE: u32 = 112;
const F16: u32 = 150;
const F32: u32 = 151;

/// `c = alpha * a^T b + beta * c`, column-major: `a` is f16 `[m][k]`, `b` f16 `[n][k]` and `c`
/// f32 `[n][ldc]` as they lie.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    m: usize,
    n: usize,
    k: usize,
    alpha: f32,
    beta: f32,
    a: u64,
    b: u64,
    c: u64,
    ldc: usize,
}

impl Product {
    pub(crate) fn run(&self, memory: &mut Memory) -> Result<(), Fault> {
        let &Product { m, n, k, .. } = self;
        let a = halves(memory, self.a, m * k, "a product's weights")?;
        let b = halves(memory, self.b, n * k, "a product's input")?;
        for (i, x) in b.chunks_exact(k).enumerate() {
            let at = self.c + (i * self.ldc * 4) as u64;
            let mut out = vec![0.0; m];
            if self.beta != 0.0 {
                let bytes = memory.read(at, m * 4, "a product's sum")?;
                let (words, _) = bytes.as_chunks::<4>();
                for (out, word) in out.iter_mut().zip(words) {
                    *out = self.beta * f32::from_le_bytes(*word);
                }
            }
            for (out, row) in out.iter_mut().zip(a.chunks_exact(k)) {
                let sum: f32 = row.iter().zip(x).map(|(w, x)| w * x).sum();
                *out += self.alpha * sum;
            }
            let bytes: Vec<u8> = out.iter().flat_map(|v| v.to_le_bytes()).collect();
            memory.write(at, &bytes)?;
        }
        Ok(())
    }
}

fn halves(memory: &mut Memory, at: u64, n: usize, who: &str) -> Result<Vec<f32>, Fault> {
    let bytes = memory.read(at, n * 2, who)?;
    let (words, _) = bytes.as_chunks::<2>();
    Ok(words
        .iter()
        .map(|w| f16::from_le_bytes(*w).to_f32())
        .collect())
}

// SAFETY: the name is rocBLAS's on purpose: this library stands in for it and is never linked with
// it.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rocblas_create_handle(to: *mut usize) -> u32 {
    call("rocblas_create_handle", |state| {
        if to.is_null() {
            return INVALID_POINTER;
        }
        let handle = state.handle();
        state.blas.insert(handle, 0);
        // SAFETY: not null; that it is writable is the caller's promise.
        unsafe { to.write(handle) };
        SUCCESS
    })
}

// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rocblas_destroy_handle(handle: usize) -> u32 {
    call("rocblas_destroy_handle", |state| {
        match state.blas.remove(&handle) {
            Some(_) => SUCCESS,
            None => state.misuse(INVALID_HANDLE, format!("unknown handle {handle:#x}")),
        }
    })
}

// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rocblas_set_stream(handle: usize, stream: usize) -> u32 {
    call("rocblas_set_stream", |state| {
        match state.blas.get_mut(&handle) {
            Some(of) => *of = stream,
            None => return INVALID_HANDLE,
        }
        SUCCESS
    })
}

// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rocblas_gemm_ex(
    handle: usize,
    trans_a: u32,
    trans_b: u32,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const f32,
    a: u64,
    a_type: u32,
    lda: c_int,
    b: u64,
    b_type: u32,
    ldb: c_int,
    beta: *const f32,
    c: u64,
    c_type: u32,
    ldc: c_int,
    d: u64,
    d_type: u32,
    ldd: c_int,
    compute_type: u32,
    _algo: u32,
    _solution: i32,
    _flags: c_uint,
) -> u32 {
    call("rocblas_gemm_ex", |state: &mut State| {
        if state.misbehaves.of(Misbehaviour::AbortsProducts).is_some() {
            eprintln!(
                "\nrocBLAS error: Cannot read rocblas/library/TensileLibrary.dat for GPU arch : {}",
                state.arch(0)
            );
            std::process::abort();
        }
        let Some(&stream) = state.blas.get(&handle) else {
            return state.misuse(INVALID_HANDLE, format!("a product by {handle:#x}"));
        };
        let types = [a_type, b_type, c_type, d_type, compute_type];
        let known = (trans_a, trans_b) == (TRANSPOSE, NONE)
            && types == [F16, F16, F32, F32, F32]
            && (lda, ldb, d, ldd) == (k, k, c, ldc)
            && m > 0
            && n > 0
            && k > 0
            && ldc >= m;
        if !known {
            let message = format!("a product of {m} x {n} x {k}, types {types:?}");
            return state.misuse(NOT_IMPLEMENTED, message);
        }
        // SAFETY: the caller gives the addresses of two floats of the host.
        let (alpha, beta) = unsafe { (alpha.read(), beta.read()) };
        let product = Product {
            m: m as usize,
            n: n as usize,
            k: k as usize,
            alpha,
            beta,
            a,
            b,
            c,
            ldc: ldc as usize,
        };
        crate::exports::queue(state, stream as *mut c_void, Work::Product(product))
    })
}
