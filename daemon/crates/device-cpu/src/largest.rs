//! The largest elements of rows in the arena, found where they are: a copy of a batch's logits
//! takes longer than to look through them, and whoever reads the copy does so on one thread.

use rocmforge_device::Candidates;
use rocmforge_kernels_cpu::Pool;
use rocmforge_kernels_cpu::ops::{self, Simd};

/// Pieces of rows that each thread gets on average, where rows are few.
const SHARES: usize = 4;

/// Some of a row, and what was found in it.
struct Piece<'a> {
    x: &'a [f32],
    /// The index of its first element in the row.
    first: u32,
    /// The piece's largest elements, with their indices in the row.
    largest: Candidates,
    /// An element is NaN or +infinity.
    unusable: bool,
}

/// Of each row of `width`, the `k` largest elements with their indices, largest first, the lowest
/// index first among equals. `None` for a row with an element that is NaN or +infinity, and for one
/// whose largest is -infinity.
pub(super) fn largest(
    pool: &Pool,
    simd: Simd,
    rows: &[f32],
    width: usize,
    k: usize,
) -> Vec<Option<Candidates>> {
    let n_rows = rows.len() / width;
    let each = (pool.threads() * SHARES).div_ceil(n_rows.max(1));
    let len = width.div_ceil(each);
    let piece = |(i, x)| Piece {
        x,
        first: (i * len) as u32,
        largest: Vec::new(),
        unusable: false,
    };
    let mut pieces: Vec<Piece<'_>> = rows
        .chunks_exact(width)
        .flat_map(|row| row.chunks(len).enumerate().map(piece))
        .collect();
    pool.run_rows(&mut pieces, 1, 1, |_, pieces| {
        pieces.iter_mut().for_each(|piece| look(simd, k, piece));
    });
    let of_rows = pieces.chunk_by(|_, next| next.first > 0);
    of_rows.map(|pieces| merged(k, pieces)).collect()
}

fn look(simd: Simd, k: usize, piece: &mut Piece<'_>) {
    // Without an early end, which is as long as a row is usable, several are compared at a time.
    let finite = |all: bool, x: &f32| all & (*x < f32::INFINITY);
    piece.unusable = !piece.x.iter().fold(true, finite);
    match k {
        1 => {
            let best = ops::argmax(simd, piece.x).map(|i| (i as u32, piece.x[i]));
            piece.largest.extend(best);
        }
        _ => ops::top_k(simd, piece.x, k, &mut piece.largest),
    }
    for (index, _) in &mut piece.largest {
        *index += piece.first;
    }
}

/// What the pieces of one row have found.
fn merged(k: usize, pieces: &[Piece<'_>]) -> Option<Candidates> {
    if pieces.iter().any(|piece| piece.unusable) {
        return None;
    }
    let found = pieces.iter().flat_map(|piece| &piece.largest);
    let mut all: Candidates = found.copied().collect();
    // Indices ascend from piece to piece and among equals of one, and the sort keeps equals in
    // order.
    all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal));
    all.truncate(k);
    all.first()
        .is_some_and(|best| best.1 > f32::NEG_INFINITY)
        .then_some(all)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    /// As the contract says it, element by element.
    fn plain(row: &[f32], k: usize) -> Option<Candidates> {
        if row.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
            return None;
        }
        let mut all: Candidates = (0u32..).zip(row.iter().copied()).collect();
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        all.truncate(k);
        (all.first()?.1 > f32::NEG_INFINITY).then_some(all)
    }

    #[test]
    fn rows_in_pieces_have_the_largest_of_whole_rows() {
        let mut state = 7u32;
        let mut random = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        for threads in [1, 2, 3] {
            let pool = Pool::new(NonZeroUsize::new(threads).unwrap()).unwrap();
            for (n_rows, width) in [(1, 1), (1, 7), (1, 5000), (2, 1000), (16, 333), (70, 40)] {
                // Few values, so that ties are common.
                let mut rows: Vec<f32> = (0..n_rows * width)
                    .map(|_| (random() % 23) as f32 - 30.0)
                    .collect();
                for (r, row) in rows.chunks_exact_mut(width).enumerate() {
                    let at = random() as usize % width;
                    match r % 7 {
                        1 => row[at] = f32::NAN,
                        2 => row[at] = f32::INFINITY,
                        3 => row[at] = f32::NEG_INFINITY,
                        4 => row.fill(f32::NEG_INFINITY),
                        5 => row.fill(-0.0),
                        _ => {}
                    }
                }
                for k in [1, 2, 40] {
                    for simd in Simd::available() {
                        let found = largest(&pool, simd, &rows, width, k);
                        let expected: Vec<_> =
                            rows.chunks_exact(width).map(|row| plain(row, k)).collect();
                        assert_eq!(
                            found, expected,
                            "{threads} {n_rows} x {width}, {k}, {simd:?}"
                        );
                    }
                }
            }
        }
    }
}
