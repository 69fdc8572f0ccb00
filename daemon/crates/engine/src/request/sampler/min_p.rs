//! Min-p: tokens at least as likely as a share of the most likely one (Nguyen et al., Turning Up
//! the Heat: Min-p Sampling, 2024).

use super::candidates::Candidates;

/// Leaves the tokens whose probability is at least `p` times that of the most likely one.
pub(super) fn apply(p: f32, candidates: &mut Candidates<'_>) {
    let least = candidates.weight().logit(f64::from(p));
    candidates.cut_below(least);
}

#[cfg(test)]
mod tests {
    use crate::request::sampler::tests::kept;

    #[test]
    fn tokens_above_the_share_of_the_most_likely_stay() {
        // 0.4, 0.3, 0.2, 0.1: shares of the first of 1, 0.75, 0.5, 0.25
        let logits = [0.1f32, 0.4, 0.3, 0.2].map(f32::ln);
        for (min_p, ids) in [
            (0.0, &[1, 2, 3, 0][..]),
            (0.24, &[1, 2, 3, 0]),
            (0.26, &[1, 2, 3]),
            (0.7, &[1, 2]),
            (0.99, &[1]),
        ] {
            assert_eq!(kept(&logits, |p| p.min_p = min_p).ids(), ids, "{min_p}");
        }
        // It is looked at before the temperature.
        let hot = kept(&logits, |p| (p.min_p, p.temperature) = (0.7, 50.0));
        assert_eq!(hot.ids(), [1, 2]);
    }
}
