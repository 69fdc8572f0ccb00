//! What passes take besides operations: rows of an embedding, and the largest of a row of logits.

use rand::RngExt;
use rand::rngs::StdRng;
use rocmforge_device::{Buf, Candidates, Device, Error, Role, Scratch, TensorDesc};
use rocmforge_ops::WeightType;

use crate::weights::random_matrix;

/// Elements that are as large as the largest, which is then the first of them.
const TIES: usize = 3;

/// Writes rows of a type, as a file has them, into buffer 0.
pub(crate) fn write_embedding(
    device: &mut dyn Device,
    ty: WeightType,
    (n, width): (u64, u64),
    scratch: Scratch<'_>,
    rng: &mut StdRng,
) -> Result<(), Error> {
    let rows = random_matrix(rng, ty, n, width, 0.02);
    let table = TensorDesc {
        name: "rows".to_owned(),
        ty,
        rows: n,
        cols: width,
        offset: 0,
        bytes: rows.len() as u64,
        role: Role::Matrix,
    };
    device.write_rows(scratch, Buf(0), &table, &rows)
}

/// Random rows which have ties; the last of several has a NaN.
fn with_ties((n, width): (usize, usize), rng: &mut StdRng) -> Vec<f32> {
    let mut values = vec![0.0f32; n * width];
    for row in values.chunks_exact_mut(width) {
        row.fill_with(|| rng.random_range(-20.0..20.0));
        for _ in 0..TIES {
            row[rng.random_range(0..width)] = 21.0;
        }
    }
    if n > 1 {
        let last = (n - 1) * width;
        values[last + rng.random_range(0..width)] = f32::NAN;
    }
    values
}

/// The indices of the largest elements of `n` random rows, which have ties; the
/// last of several has a NaN.
pub(crate) fn argmax(
    device: &mut dyn Device,
    (n, width): (usize, usize),
    scratch: Scratch<'_>,
    rng: &mut StdRng,
) -> Result<Vec<f32>, Error> {
    let values = with_ties((n, width), rng);
    device.write(scratch, Buf(0), &values)?;
    let found = device.argmax(scratch, Buf(0), n)?;
    // Where the device leaves it to the reader of the rows, the reader does it.
    let own = || values.chunks_exact(width).map(largest).collect();
    let found: Vec<Option<u32>> = found.unwrap_or_else(own);
    let index = |i: Option<u32>| i.map_or(-1.0, |i| (i + 1) as f32);
    Ok(found.into_iter().map(index).collect())
}

/// The `k` largest elements of `n` random rows, and their indices; the rows are as those of
/// [`argmax`].
pub(crate) fn top_k(
    device: &mut dyn Device,
    (n, width): (usize, usize),
    k: usize,
    scratch: Scratch<'_>,
    rng: &mut StdRng,
) -> Result<[(&'static str, Vec<f32>); 2], Error> {
    let values = with_ties((n, width), rng);
    device.write(scratch, Buf(0), &values)?;
    let found = device.top_k(scratch, Buf(0), n, k)?;
    // Where the device leaves it to the reader of the rows, the reader does it.
    let own = || {
        values
            .chunks_exact(width)
            .map(|row| first_of(row, k))
            .collect()
    };
    let found: Vec<Option<Candidates>> = found.unwrap_or_else(own);
    // A row without an answer is one that says so.
    let pairs = || {
        found
            .iter()
            .flat_map(|row| row.as_deref().unwrap_or(&[(0, -1.0)]))
    };
    Ok([
        (
            "index",
            pairs().map(|&(index, _)| (index + 1) as f32).collect(),
        ),
        ("value", pairs().map(|&(_, value)| value).collect()),
    ])
}

/// The largest elements, the first of equal ones first; none of a row with a NaN.
fn first_of(row: &[f32], k: usize) -> Option<Candidates> {
    if row.iter().any(|v| v.is_nan()) {
        return None;
    }
    let mut indexed: Candidates = (0u32..).zip(row.iter().copied()).collect();
    indexed.sort_by(|a, b| b.1.total_cmp(&a.1));
    indexed.truncate(k);
    Some(indexed)
}

/// The first of the largest; none of a row with a NaN.
fn largest(row: &[f32]) -> Option<u32> {
    if row.iter().any(|v| v.is_nan()) {
        return None;
    }
    let indexed = (0u32..).zip(row);
    let best = indexed.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map(|(index, _)| index)
}
