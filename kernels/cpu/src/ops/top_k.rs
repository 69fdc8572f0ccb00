//! The k largest elements, by partial selection: candidates above a rising threshold are collected
//! and cut back to k whenever their buffer is full. Bound by memory for small k.

use super::Simd;
use super::lanes::{Lanes, simd_fn};

/// The least number of candidates that are collected before they are cut back.
const MIN_CANDIDATES: usize = 256;

/// The `k` largest elements of `x` with their indices, largest first, the lowest index first among
/// equals. NaN is left out, so fewer than `k` come back when `x` has fewer numbers. `out` is
/// cleared first; its capacity is kept between calls and grows to no more than about
/// `max(2 k, 256)` or the length of `x`.
///
/// # Panics
/// When `x` has 2^32 elements or more.
pub fn top_k(simd: Simd, x: &[f32], k: usize, out: &mut Vec<(u32, f32)>) {
    assert!(
        u32::try_from(x.len()).is_ok(),
        "top_k of {} elements",
        x.len()
    );
    out.clear();
    if k == 0 {
        return;
    }
    let limit = k.saturating_mul(2).max(MIN_CANDIDATES).min(x.len().max(1));
    out.reserve(limit);
    collect(simd, x, k, limit, out);
    cut(k, out);
    out.sort_unstable_by(order);
}

simd_fn! {
    fn collect(x: &[f32], k: usize, limit: usize, out: &mut Vec<(u32, f32)>);
    simd collect_lanes;
    scalar collect_scalar;
}

/// The element below which nothing is a candidate any more. Equals of it
/// further right lose the tie.
struct Threshold(Option<f32>);

impl Threshold {
    #[inline(always)]
    fn offer(&mut self, i: usize, value: f32, k: usize, limit: usize, out: &mut Vec<(u32, f32)>) {
        if value.is_nan() || self.0.is_some_and(|threshold| value <= threshold) {
            return;
        }
        out.push((i as u32, value));
        if out.len() >= limit && out.len() > k {
            self.0 = cut(k, out);
        }
    }
}

#[inline(always)]
fn collect_lanes<S: Lanes>(s: S, x: &[f32], k: usize, limit: usize, out: &mut Vec<(u32, f32)>) {
    let mut threshold = Threshold(None);
    for (index, block) in x.chunks(S::N).enumerate() {
        let mut bits = match threshold.0 {
            Some(least) => s.gt_bits(s.load_part(block, f32::NAN), s.splat(least)),
            None => (1 << block.len()) - 1,
        };
        while bits != 0 {
            let lane = bits.trailing_zeros() as usize;
            threshold.offer(index * S::N + lane, block[lane], k, limit, out);
            bits &= bits - 1;
        }
    }
}

fn collect_scalar(x: &[f32], k: usize, limit: usize, out: &mut Vec<(u32, f32)>) {
    let mut threshold = Threshold(None);
    for (i, &value) in x.iter().enumerate() {
        threshold.offer(i, value, k, limit, out);
    }
}

/// Leaves the k best in `out`, in any order, and returns the worst of them if any were cut.
fn cut(k: usize, out: &mut Vec<(u32, f32)>) -> Option<f32> {
    if out.len() <= k {
        return None;
    }
    out.select_nth_unstable_by(k - 1, order);
    out.truncate(k);
    Some(out[k - 1].1)
}

/// Largest value first, then lowest index; there is no NaN among them, and -0 equals 0.
fn order(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.partial_cmp(&a.1)
        .unwrap_or(std::cmp::Ordering::Equal)
        .then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::Random;

    #[test]
    fn agrees_with_a_full_sort() {
        let mut source = Random::new("top_k");
        let mut out = Vec::new();
        for round in 0..300 {
            let n = source.below(if round % 10 == 0 { 20_000 } else { 600 });
            let k = [0, 1, 2, 40, 200, 1000, usize::MAX][source.below(7)];
            let coarse = source.below(2) == 0;
            let mut x = source.normal(n);
            if coarse {
                x.iter_mut().for_each(|x| *x = (*x * 3.0).round());
            }
            for _ in 0..n / 10 {
                let i = source.below(n);
                x[i] = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY][source.below(3)];
            }
            let mut expected: Vec<(u32, f32)> = (0..)
                .zip(x.iter().copied())
                .filter(|(_, x)| !x.is_nan())
                .collect();
            expected.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap());
            expected.truncate(k);
            for simd in Simd::available() {
                top_k(simd, &x, k, &mut out);
                assert_eq!(out, expected, "{simd:?} n {n} k {k}");
            }
        }
    }
}
