//! The index of the largest element.

use super::Simd;

/// The index of the largest element of `x`, the lowest one of equals. NaN never wins; None when `x` is empty
/// or has nothing but NaN.
#[must_use]
pub fn argmax(_simd: Simd, x: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (i, &x) in x.iter().enumerate() {
        if !x.is_nan() && best.is_none_or(|(_, most)| x > most) {
            best = Some((i, x));
        }
    }
    best.map(|(i, _)| i)
}
