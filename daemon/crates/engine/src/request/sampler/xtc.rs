//! Exclude top choices (XTC): sometimes all likely tokens except the least likely of them are
//! removed, so that the text is less predictable (p-e-w, text-generation-webui, 2024).

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use super::candidates::Candidates;

/// Parameters of XTC. It is off if `probability` is 0 or `threshold` is above 0.5, which no two
/// tokens can reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xtc {
    /// Probability that XTC is applied to a token, from 0 to 1.
    pub probability: f32,
    /// Probability from which on tokens count as likely, from 0 to 1.
    pub threshold: f32,
}

impl Default for Xtc {
    fn default() -> Self {
        Self {
            probability: 0.0,
            threshold: 0.1,
        }
    }
}

impl Xtc {
    pub(super) fn is_off(&self) -> bool {
        self.probability <= 0.0 || self.threshold > 0.5
    }

    /// Draws whether XTC applies to this token, and applies it.
    pub(super) fn apply(&self, candidates: &mut Candidates<'_>, rng: &mut ChaCha8Rng) {
        // It draws for each token, so that what is drawn later does not depend on the logits.
        let chance: f32 = rng.random();
        if chance >= self.probability {
            return;
        }
        let weight = candidates.weight();
        let least = f64::from(self.threshold) * candidates.total(weight);
        let likely = candidates
            .logits()
            .filter(|logit| weight.of(*logit) >= least)
            .count();
        let out = likely.saturating_sub(1);
        if out > 0 && candidates.len() - out >= candidates.min_keep() {
            candidates.leave_out_first(out);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::request::sampler::tests::{drawn, kept};

    /// 0.4, 0.3, 0.2, 0.1
    fn logits() -> [f32; 4] {
        [0.1f32, 0.4, 0.3, 0.2].map(f32::ln)
    }

    #[test]
    fn of_the_likely_tokens_the_least_likely_stays() {
        for (threshold, ids) in [
            (0.05, &[0][..]),
            (0.15, &[3, 0]),
            (0.25, &[2, 3, 0]),
            // One alone is likely.
            (0.35, &[1, 2, 3, 0]),
            (0.5, &[1, 2, 3, 0]),
            (0.6, &[1, 2, 3, 0]),
        ] {
            let kept = kept(&logits(), |p| {
                (p.xtc.probability, p.xtc.threshold) = (1.0, threshold);
            });
            assert_eq!(kept.ids(), ids, "{threshold}");
        }
        let two = kept(&logits(), |p| {
            (p.xtc.probability, p.xtc.threshold, p.min_keep) = (1.0, 0.05, 2);
        });
        assert_eq!(two.ids().len(), 4, "it would leave too few");
    }

    #[test]
    fn it_is_done_as_often_as_asked() {
        // With 0.25: 0.75 of the distribution, and 0.25 of the one without the first two.
        let shares = drawn(&logits(), 40_000, |p| {
            (p.xtc.probability, p.xtc.threshold) = (0.25, 0.15);
        });
        let expected = [
            0.75 * 0.1 + 0.25 / 3.0,
            0.75 * 0.4,
            0.75 * 0.3,
            0.75 * 0.2 + 0.25 * 2.0 / 3.0,
        ];
        for (share, expected) in shares.iter().zip(expected) {
            assert!((share - expected).abs() < 0.01, "{shares:?} {expected}");
        }
    }
}
