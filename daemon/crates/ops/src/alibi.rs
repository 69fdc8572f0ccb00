//! ALiBi: scores of attention that fall with the distance between query and key.
//!
//! Source: Press, Smith and Lewis 2021 (arXiv 2108.12409).

/// By how much a head's scores fall for each position between query and key: `2^(-bias * i / n)` of
/// the `i`th of `n` heads, counted from one, where `n` is a power of two. Of other numbers, heads
/// beyond the largest power of two below lie halfway between those before, from the first on.
#[must_use]
pub fn alibi_slope(bias: f32, n_head: u32, head: u32) -> f32 {
    let whole = 1 << n_head.max(1).ilog2();
    let at = match head < whole {
        true => (head + 1) as f32,
        false => (head - whole) as f32 + 0.5,
    };
    (-bias * at / whole as f32).exp2()
}

#[cfg(test)]
mod tests {
    use super::alibi_slope;

    /// What the authors' code gives.
    #[test]
    fn slopes_are_those_of_the_authors() {
        let of = |n: u32| (0..n).map(move |head| alibi_slope(8.0, n, head));
        let eight: Vec<f32> = of(8).collect();
        assert_eq!(
            eight,
            [
                0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625
            ]
        );
        // Of 12, four more lie between those of 8, beginning above the first.
        let twelve: Vec<f32> = of(12).collect();
        assert_eq!(twelve[..8], eight);
        for (i, found) in twelve[8..].iter().enumerate() {
            let expected = 0.5_f32.powf(i as f32 + 0.5);
            assert!((found - expected).abs() < 1e-7, "{i}: {found} {expected}");
        }
        assert_eq!(of(1).collect::<Vec<_>>(), [0.00390625]);
    }
}
