//! The largest logits of rows (`hip/sample.hip`); one of them is argmax.

use crate::error::count;
use crate::launch::{ArgBytes, arg_struct};
use crate::{Address, Error, Launch};

const THREADS: u32 = 256;
const PART_MAX: u32 = THREADS * 8;

/// Maximum number of logits that are taken a row: each costs a block a round.
pub const K_MAX: u32 = 256;

arg_struct! {
    /// Arguments of `top_k_part` and `top_k_join`.
    TopKArgs: 56 {
        logits: u64,
        candidates: u64,
        out_values: u64,
        out_ids: u64,
        next: u64,
        n: u32,
        n_parts: u32,
        k: u32,
        reserved: u32,
    }
}

/// Destination and scratch of a top-k selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopK {
    /// Scratch of [`candidates_bytes`].
    pub candidates: Address,
    /// f32 `[rows][k]`, largest first.
    pub values: Option<Address>,
    /// u32 `[rows][k]`.
    pub ids: Address,
    /// u32 `[rows]`, also given the first id: the next step's tokens.
    pub next: Option<Address>,
}

fn parts(n: u32) -> u32 {
    n.div_ceil(PART_MAX).max(1)
}

/// Bytes of [`TopK::candidates`] for `rows` rows of `n` logits.
#[must_use]
pub fn candidates_bytes(rows: u64, n: u32, k: u32) -> u64 {
    rows * u64::from(parts(n)) * u64::from(k) * 8
}

/// The `k` largest of each of `rows` rows of `n` logits (f32), two launches in order. NaN
/// counts as plus infinity, ties go to the lower id. Asks for more than `n`: the rest are
/// minus infinity with id 0.
///
/// # Errors
/// [`Error::TooLarge`] if `k` is above [`K_MAX`].
pub fn top_k(logits: Address, rows: u32, n: u64, k: u32, to: TopK) -> Result<[Launch; 2], Error> {
    if k > K_MAX {
        return Err(Error::TooLarge {
            what: "top_k",
            value: u64::from(k),
            max: u64::from(K_MAX),
        });
    }
    let n = count("the size of the vocabulary", n)?;
    let args = TopKArgs {
        logits,
        candidates: to.candidates,
        out_values: to.values.unwrap_or(0),
        out_ids: to.ids,
        next: to.next.unwrap_or(0),
        n,
        n_parts: parts(n),
        k,
        reserved: 0,
    };
    let launch = |kernel, grid| Launch {
        kernel,
        grid,
        block: [THREADS, 1, 1],
        shared_bytes: 0,
        args: ArgBytes::of(&args),
        overlaps: true,
    };
    Ok([
        launch("sample.top_k_part", [args.n_parts, rows, 1]),
        launch("sample.top_k_join", [rows, 1, 1]),
    ])
}
