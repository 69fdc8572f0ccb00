//! Rotary position embedding: the pair `(a, b)` at position `p` becomes
//! `(a cos t - b sin t, a sin t + b cos t)` with `t = p * freq[pair]`, times the magnitude of a
//! [`RopeTable`].
//!
//! cos and sin of a pass's positions are computed once into [`RopeAngles`] and used by every layer.

use super::lanes::{Lanes, simd_fn};
use super::rope_table::RopeSpans;
use super::{RopeTable, Simd, rows_of};
use rocmforge_ops::RopeOrder;

/// cos and sin for the rows of one pass, laid out for one pair order. Computed once a
/// pass, used by all layers.
#[derive(Clone, Debug)]
pub struct RopeAngles {
    order: RopeOrder,
    n_rot: usize,
    /// `[rows][n_rot]`, what an element itself is multiplied by: cos of its pair.
    cos: Vec<f32>,
    /// `[rows][n_rot]`, what its partner is multiplied by: -sin for the first of a
    /// pair, sin for the second.
    sin: Vec<f32>,
    spans: RopeSpans,
}

impl RopeAngles {
    /// No rows yet, see [`RopeAngles::set`].
    #[must_use]
    pub fn new(order: RopeOrder) -> RopeAngles {
        RopeAngles {
            order,
            n_rot: 0,
            cos: Vec::new(),
            sin: Vec::new(),
            spans: RopeSpans::default(),
        }
    }

    /// Computes the angles of `positions`, one a row; memory is kept between calls, and so is what
    /// neighbouring positions share.
    pub fn set(&mut self, table: &RopeTable, positions: impl IntoIterator<Item = u32>) {
        self.clear(table.n_rot());
        self.append(table, positions);
    }

    /// No rows, of so many rotated elements; memory is kept.
    pub fn clear(&mut self, n_rot: usize) {
        self.n_rot = n_rot;
        self.cos.clear();
        self.sin.clear();
    }

    /// Computes the angles of `positions` behind those that are there, by a
    /// table of as many elements.
    ///
    /// # Panics
    /// When the table rotates another number of elements.
    pub fn append(&mut self, table: &RopeTable, positions: impl IntoIterator<Item = u32>) {
        assert_eq!(self.n_rot, table.n_rot(), "one width of rotations a pass");
        for position in positions {
            let pairs = table.cos_sin(position, &mut self.spans);
            let row = row_of(&mut self.cos, &mut self.sin, self.n_rot);
            set_row(self.order, row, pairs);
        }
    }

    /// As [`append`](Self::append), of rows whose positions have three coordinates; `axes` has the
    /// coordinate that turns each pair.
    ///
    /// # Panics
    /// When the table rotates another number of elements, or `axes` has other pairs.
    pub fn append_axes(
        &mut self,
        table: &RopeTable,
        axes: &[u8],
        positions: impl IntoIterator<Item = [u32; 3]>,
    ) {
        assert_eq!(self.n_rot, table.n_rot(), "one width of rotations a pass");
        assert_eq!(self.n_rot / 2, axes.len(), "one coordinate a pair");
        let mut mixed = vec![(0.0, 0.0); axes.len()];
        for position in positions {
            if position[0] == position[1] && position[0] == position[2] {
                self.append(table, [position[0]]);
                continue;
            }
            for (axis, position) in position.into_iter().enumerate() {
                let pairs = table.cos_sin(position, &mut self.spans);
                let of_axis = mixed.iter_mut().zip(axes).zip(pairs);
                for ((mixed, _), pair) in of_axis.filter(|((_, of), _)| usize::from(**of) == axis) {
                    *mixed = pair;
                }
            }
            let row = row_of(&mut self.cos, &mut self.sin, self.n_rot);
            set_row(self.order, row, mixed.iter().copied());
        }
    }

    /// Which elements form a pair.
    #[must_use]
    pub fn order(&self) -> RopeOrder {
        self.order
    }

    /// Elements of a head that are rotated.
    #[must_use]
    pub fn n_rot(&self) -> usize {
        self.n_rot
    }

    /// `[rows][n_rot]`: what an element itself is multiplied by.
    #[must_use]
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// `[rows][n_rot]`: what its partner is multiplied by, the sign folded in.
    #[must_use]
    pub fn sin(&self) -> &[f32] {
        &self.sin
    }

    /// The number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.cos.len().checked_div(self.n_rot).unwrap_or(0)
    }
}

/// Another row of cos and one of sin.
fn row_of<'a>(
    cos: &'a mut Vec<f32>,
    sin: &'a mut Vec<f32>,
    n_rot: usize,
) -> (&'a mut [f32], &'a mut [f32]) {
    let start = cos.len();
    cos.resize(start + n_rot, 0.0);
    sin.resize(start + n_rot, 0.0);
    (&mut cos[start..], &mut sin[start..])
}

/// Sets a row to the cos and sin of its pairs.
fn set_row(
    order: RopeOrder,
    (cos, sin): (&mut [f32], &mut [f32]),
    pairs: impl Iterator<Item = (f32, f32)>,
) {
    let half = cos.len() / 2;
    match order {
        RopeOrder::Norm => {
            let rows = cos.chunks_exact_mut(2).zip(sin.chunks_exact_mut(2));
            for ((cos, sin), (c, s)) in rows.zip(pairs) {
                cos.fill(c);
                (sin[0], sin[1]) = (-s, s);
            }
        }
        RopeOrder::Neox => {
            let (cos, cos_again) = cos.split_at_mut(half);
            let (minus_sin, sin) = sin.split_at_mut(half);
            let cos = cos.iter_mut().zip(cos_again);
            let sin = minus_sin.iter_mut().zip(sin);
            for (((cos, cos_again), (minus_sin, sin)), (c, s)) in cos.zip(sin).zip(pairs) {
                (*cos, *cos_again) = (c, c);
                (*minus_sin, *sin) = (-s, s);
            }
        }
    }
}

/// Rotates the first n_rot elements of every head of `x`, `[rows][n_head][head_dim]`, in place. Row
/// `i` of `x` is row `first_row + i` of `angles`.
///
/// # Panics
/// When the shapes do not fit each other.
pub fn rope(
    simd: Simd,
    angles: &RopeAngles,
    first_row: usize,
    x: &mut [f32],
    n_head: usize,
    head_dim: usize,
) {
    rope_at(simd, angles, first_row, x, n_head, head_dim, 0);
}

/// [`rope`] of the n_rot elements of every head from element `first` on.
///
/// # Panics
/// When the shapes do not fit each other.
pub fn rope_at(
    simd: Simd,
    angles: &RopeAngles,
    first_row: usize,
    x: &mut [f32],
    n_head: usize,
    head_dim: usize,
    first: usize,
) {
    let n_rot = angles.n_rot;
    let rows = rows_of(x.len(), n_head * head_dim);
    assert!(
        first <= head_dim && n_rot <= head_dim - first,
        "rope: {n_rot} rotated elements from {first} on in heads of {head_dim}"
    );
    assert!(
        first_row + rows <= angles.rows(),
        "rope: {rows} rows from {first_row} of {}",
        angles.rows()
    );
    for (row, x) in x.chunks_exact_mut(n_head * head_dim).enumerate() {
        let start = (first_row + row) * n_rot;
        let (cos, sin) = (
            &angles.cos[start..start + n_rot],
            &angles.sin[start..start + n_rot],
        );
        for head in x.chunks_exact_mut(head_dim) {
            rotate(
                simd,
                angles.order,
                &mut head[first..first + n_rot],
                cos,
                sin,
            );
        }
    }
}

simd_fn! {
    fn rotate(order: RopeOrder, x: &mut [f32], cos: &[f32], sin: &[f32]);
    simd rotate_lanes;
    scalar rotate_scalar;
}

#[inline(always)]
fn rotate_lanes<S: Lanes>(s: S, order: RopeOrder, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    match order {
        RopeOrder::Norm => {
            // A chunk is a whole number of pairs, and so is what is left.
            for ((x, cos), sin) in x
                .chunks_mut(S::N)
                .zip(cos.chunks(S::N))
                .zip(sin.chunks(S::N))
            {
                if x.len() == S::N {
                    let v = s.load(x);
                    s.store(
                        x,
                        s.fma(s.swap_pairs(v), s.load(sin), s.mul(v, s.load(cos))),
                    );
                } else {
                    let v = s.load_part(x, 0.0);
                    let (cos, sin) = (s.load_part(cos, 0.0), s.load_part(sin, 0.0));
                    s.store_part(x, s.fma(s.swap_pairs(v), sin, s.mul(v, cos)));
                }
            }
        }
        RopeOrder::Neox => {
            let half = x.len() / 2;
            let (first, second) = x.split_at_mut(half);
            // The second half of sin is the positive one.
            let halves = first.chunks_mut(S::N).zip(second.chunks_mut(S::N));
            for ((a, b), (cos, sin)) in halves.zip(cos.chunks(S::N).zip(sin[half..].chunks(S::N))) {
                let n = a.len();
                if n == S::N {
                    let (va, vb, cos, sin) = (s.load(a), s.load(b), s.load(cos), s.load(sin));
                    s.store(a, s.sub(s.mul(va, cos), s.mul(vb, sin)));
                    s.store(b, s.fma(va, sin, s.mul(vb, cos)));
                } else {
                    rotate_pairs(a, b, &cos[..n], &sin[..n]);
                }
            }
        }
    }
}

fn rotate_pairs(first: &mut [f32], second: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

fn rotate_scalar(order: RopeOrder, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = x.len() / 2;
    match order {
        RopeOrder::Norm => {
            for ((x, cos), sin) in x
                .chunks_exact_mut(2)
                .zip(cos.chunks_exact(2))
                .zip(sin.chunks_exact(2))
            {
                (x[0], x[1]) = (x[0] * cos[0] + x[1] * sin[0], x[1] * cos[1] + x[0] * sin[1]);
            }
        }
        RopeOrder::Neox => {
            let (first, second) = x.split_at_mut(half);
            rotate_pairs(first, second, &cos[..half], &sin[half..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::RopeParams;
    use crate::ops::testing::{Random, assert_close};
    use rocmforge_ops::RopeScaling;

    fn plain(n_rot: usize, freq_base: f64) -> RopeParams {
        RopeParams {
            n_rot,
            freq_base,
            scaling: RopeScaling::None,
            freq_factors: None,
            magnitude: 1.0,
        }
    }

    /// The rotation of one head straight from the definition, in f64.
    fn reference(x: &[f32], n_rot: usize, base: f64, position: u32, order: RopeOrder) -> Vec<f64> {
        let mut out: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        for pair in 0..n_rot / 2 {
            let t = f64::from(position) * base.powf(-2.0 * pair as f64 / n_rot as f64);
            let (i, j) = match order {
                RopeOrder::Norm => (2 * pair, 2 * pair + 1),
                RopeOrder::Neox => (pair, pair + n_rot / 2),
            };
            out[i] = f64::from(x[i]) * t.cos() - f64::from(x[j]) * t.sin();
            out[j] = f64::from(x[i]) * t.sin() + f64::from(x[j]) * t.cos();
        }
        out
    }

    #[test]
    fn both_orders_agree_with_the_definition_up_to_a_million() {
        let mut source = Random::new("rope");
        for (head_dim, n_rot) in [
            (64, 64),
            (128, 128),
            (80, 32),
            (96, 96),
            (20, 6),
            (7, 2),
            (50, 50),
        ] {
            for order in [RopeOrder::Norm, RopeOrder::Neox] {
                let n_head = 1 + source.below(3);
                let positions = [0, 1, 31, 5000, 131_071, 999_999, 1_000_000];
                let x = source.normal(positions.len() * n_head * head_dim);
                let mut angles = RopeAngles::new(order);
                angles.set(
                    &RopeTable::new(&plain(n_rot, 500_000.0)).unwrap(),
                    positions,
                );
                let expected: Vec<f64> = x
                    .chunks(head_dim)
                    .enumerate()
                    .flat_map(|(i, head)| {
                        reference(head, n_rot, 500_000.0, positions[i / n_head], order)
                    })
                    .collect();
                for simd in Simd::available() {
                    let what = format!("{simd:?} {order:?} {head_dim} {n_rot}");
                    let mut out = x.clone();
                    rope(simd, &angles, 0, &mut out, n_head, head_dim);
                    assert_close(&out, &expected, 2e-6, &what);
                    // The rows from the third on by themselves: the same bits.
                    let start = 2 * n_head * head_dim;
                    let mut tail = x[start..].to_vec();
                    rope(simd, &angles, 2, &mut tail, n_head, head_dim);
                    assert_eq!(tail, out[start..], "{what}");
                }
            }
        }
    }

    #[test]
    fn a_pair_turns_by_its_own_coordinate() {
        let table = RopeTable::new(&plain(12, 100.0)).unwrap();
        let axes = [0, 1, 2, 0, 1, 2];
        for order in [RopeOrder::Norm, RopeOrder::Neox] {
            let mut mixed = RopeAngles::new(order);
            mixed.clear(12);
            mixed.append_axes(&table, &axes, [[70, 3, 5], [9, 9, 9]]);
            let mut each = RopeAngles::new(order);
            each.set(&table, [70, 3, 5, 9]);
            for (pair, axis) in axes.into_iter().enumerate() {
                let elements = match order {
                    RopeOrder::Norm => [2 * pair, 2 * pair + 1],
                    RopeOrder::Neox => [pair, pair + 6],
                };
                for e in elements {
                    let from = usize::from(axis) * 12 + e;
                    assert_eq!(
                        (mixed.cos()[e], mixed.sin()[e]),
                        (each.cos()[from], each.sin()[from])
                    );
                }
            }
            assert_eq!(
                (&mixed.cos()[12..], &mixed.sin()[12..]),
                (&each.cos()[36..], &each.sin()[36..])
            );
        }
    }

    #[test]
    fn elements_before_the_first_stay_as_they_are() {
        let mut source = Random::new("rope_at");
        for order in [RopeOrder::Norm, RopeOrder::Neox] {
            let (n_head, head_dim, n_rot) = (3, 192, 64);
            let positions = [7, 100_000];
            let mut angles = RopeAngles::new(order);
            angles.set(&RopeTable::new(&plain(n_rot, 10_000.0)).unwrap(), positions);
            let x = source.normal(2 * n_head * head_dim);
            for (simd, first) in Simd::available().flat_map(|s| [0, 5, 128].map(|f| (s, f))) {
                let mut out = x.clone();
                rope_at(simd, &angles, 0, &mut out, n_head, head_dim, first);
                let expected: Vec<f64> = x
                    .chunks(head_dim)
                    .enumerate()
                    .flat_map(|(i, head)| {
                        let (before, rest) = head.split_at(first);
                        let position = positions[i / n_head];
                        let before = before.iter().map(|&x| f64::from(x));
                        before
                            .chain(reference(rest, n_rot, 10_000.0, position, order))
                            .collect::<Vec<_>>()
                    })
                    .collect();
                assert_close(
                    &out,
                    &expected,
                    2e-6,
                    &format!("{simd:?} {order:?} {first}"),
                );
            }
        }
    }

    #[test]
    fn a_shift_of_both_positions_keeps_the_product() {
        let mut source = Random::new("rope shift");
        let table = RopeTable::new(&plain(64, 10_000.0)).unwrap();
        let (q, k) = (source.normal(64), source.normal(64));
        let product = |position_q: u32, position_k: u32| {
            let mut angles = RopeAngles::new(RopeOrder::Norm);
            angles.set(&table, [position_q, position_k]);
            let (mut q, mut k) = (q.clone(), k.clone());
            rope(Simd::detect(), &angles, 0, &mut q, 1, 64);
            rope(Simd::detect(), &angles, 1, &mut k, 1, 64);
            q.iter()
                .zip(&k)
                .map(|(q, k)| f64::from(*q) * f64::from(*k))
                .sum::<f64>()
        };
        assert!((product(17, 5) - product(100_017, 100_005)).abs() < 1e-4);
        assert!(
            (product(17, 5) - product(17, 6)).abs() > 1e-3,
            "the position has no effect"
        );
    }
}
