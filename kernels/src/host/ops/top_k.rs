//! The k largest elements, by partial selection.

use super::Simd;

/// The `k` largest elements of `x` with their indices, largest first, the lowest index first among equals.
/// NaN is left out, so fewer than `k` come back when `x` has fewer numbers. `out` is cleared first; its
/// capacity is kept between calls and grows to at most `max(2 k, 256)`.
pub fn top_k(_simd: Simd, x: &[f32], k: usize, out: &mut Vec<(u32, f32)>) {
    out.clear();
    if k == 0 {
        return;
    }
    let limit = k.saturating_mul(2).max(256).min(x.len());
    out.reserve(limit);
    // Everything at or below the k-th best so far is out: equals further right lose the tie.
    let mut threshold: Option<f32> = None;
    for (i, &value) in x.iter().enumerate() {
        if value.is_nan() || threshold.is_some_and(|t| value <= t) {
            continue;
        }
        out.push((i as u32, value));
        if out.len() >= limit && out.len() > k {
            out.select_nth_unstable_by(k - 1, order);
            out.truncate(k);
            threshold = Some(out[k - 1].1);
        }
    }
    if out.len() > k {
        out.select_nth_unstable_by(k - 1, order);
        out.truncate(k);
    }
    out.sort_unstable_by(order);
}

/// Largest value first, then lowest index; there is no NaN among them, and -0 equals 0.
fn order(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.partial_cmp(&a.1)
        .unwrap_or(std::cmp::Ordering::Equal)
        .then(a.0.cmp(&b.0))
}
