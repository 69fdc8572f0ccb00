//! The largest logits of rows (`sample.hip`).

use rocmforge_kernels_gpu::ops::sample::TopKArgs;

use super::{Launch, agrees, args, covers, floats, store, words};
use crate::memory::{Fault, Memory};

/// Most logits of a part: 8 a thread.
const PART_MAX: u64 = 256 * 8;

/// A logit and its index; an index past all stands for none.
type Candidate = (f32, u32);

const NONE: Candidate = (f32::NEG_INFINITY, u32::MAX);

/// The first `k`, larger values first, then lower indices; what is missing is none.
fn first(mut all: Vec<Candidate>, k: usize) -> Vec<Candidate> {
    for (value, _) in &mut all {
        if value.is_nan() {
            *value = f32::INFINITY;
        }
    }
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    // Zeros of both signs are equal, and then the lower index is first.
    let is_zero = |c: &Candidate| c.0 == 0.0;
    if let Some(start) = all.iter().position(is_zero) {
        let end = all.iter().rposition(is_zero).map_or(start, |at| at + 1);
        all[start..end].sort_by_key(|c| c.1);
    }
    all.resize(k.max(all.len()), NONE);
    all.truncate(k);
    all
}

/// A block a part of a row.
pub(super) fn part(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, TopKArgs::from_bytes)?;
    agrees(
        "parts of the grid and by the arguments",
        launch.grid[0],
        a.n_parts,
    )?;
    let size = a.n.div_ceil(a.n_parts.max(1));
    covers("a part", PART_MAX, u64::from(size))?;
    for row in 0..u64::from(launch.grid[1]) {
        let at = a.logits + row * u64::from(a.n) * 4;
        let logits = floats(memory, at, a.n as usize, "logits")?;
        let numbered: Vec<Candidate> = logits.into_iter().zip(0u32..).collect();
        let mut bytes = Vec::new();
        for part in 0..a.n_parts {
            let from = (part * size).min(a.n) as usize;
            let to = ((part + 1) * size).min(a.n) as usize;
            for (value, id) in first(numbered[from..to].to_vec(), a.k as usize) {
                bytes.extend(value.to_bits().to_le_bytes());
                bytes.extend(id.to_le_bytes());
            }
        }
        memory.write(a.candidates + row * bytes.len() as u64, &bytes)?;
    }
    Ok(())
}

/// A block a row.
pub(super) fn join(memory: &mut Memory, launch: &Launch) -> Result<(), Fault> {
    let a = args(launch, TopKArgs::from_bytes)?;
    let (k, n) = (a.k as usize, (a.n_parts * a.k) as usize);
    for row in 0..u64::from(launch.grid[0]) {
        let at = a.candidates + row * n as u64 * 8;
        let pairs = words(memory, at, 2 * n, "candidates")?;
        let all = pairs.chunks_exact(2).map(|p| (f32::from_bits(p[0]), p[1]));
        let chosen = first(all.filter(|c| c.1 != NONE.1).collect(), k);
        let id = |c: &Candidate| if c.1 == NONE.1 { 0 } else { c.1 };
        if a.out_values != 0 {
            let values: Vec<f32> = chosen.iter().map(|c| c.0).collect();
            store(memory, a.out_values + row * k as u64 * 4, &values)?;
        }
        let ids: Vec<u8> = chosen.iter().flat_map(|c| id(c).to_le_bytes()).collect();
        memory.write(a.out_ids + row * k as u64 * 4, &ids)?;
        if a.next != 0
            && let Some(best) = chosen.first()
        {
            memory.write(a.next + row * 4, &id(best).to_le_bytes())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_index_wins_and_nan_is_infinite() {
        let all = vec![(f32::NAN, 0), (0.0, 3), (-0.0, 1), (2.0, 9), (2.0, 4)];
        let ids: Vec<u32> = first(all, 6).iter().map(|c| c.1).collect();
        assert_eq!(ids, [0, 4, 9, 1, 3, u32::MAX]);
    }
}
