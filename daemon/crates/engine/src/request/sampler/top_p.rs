//! Top-p, nucleus sampling: the most likely tokens that add up to a probability
//! (Holtzman et al., The Curious Case of Neural Text Degeneration, 2020).

use super::candidates::Candidates;

/// Above this `p` the sum of weights is computed exactly, since the rest is close to a quick sum's
/// error.
const NEARLY_ALL: f32 = 0.999;

/// Leaves the smallest set of the most likely tokens whose probability reaches `p`.
pub(super) fn apply(p: f32, candidates: &mut Candidates<'_>) {
    let weight = candidates.weight();
    // A quick total may be more than the sum that is nearly all.
    let total = match p < NEARLY_ALL {
        true => candidates.total(weight),
        false => candidates.exact_total(weight),
    };
    let wanted = f64::from(p) * total;
    let keep = candidates.reach(wanted, weight);
    candidates.cut(keep.max(candidates.min_keep()));
}

#[cfg(test)]
mod tests {
    use crate::request::sampler::tests::kept;

    #[test]
    fn the_smallest_set_that_reaches_the_probability_stays() {
        // 0.4, 0.3, 0.2, 0.1
        let logits = [0.1f32, 0.4, 0.3, 0.2].map(f32::ln);
        let of = |top_p| kept(&logits, |p| p.top_p = top_p);
        for (top_p, ids) in [
            (0.3, &[1][..]),
            (0.45, &[1, 2]),
            (0.69, &[1, 2]),
            (0.71, &[1, 2, 3]),
            (0.95, &[1, 2, 3, 0]),
            (1.0, &[1, 2, 3, 0]),
        ] {
            assert_eq!(of(top_p).ids(), ids, "{top_p}");
        }
        let shares = of(0.6).shares();
        assert!((shares[0] - 4.0 / 7.0).abs() < 1e-6, "{shares:?}");
    }
}
