//! Mirostat: the surprise of the text is held near a target (Basu et al., Mirostat: A Neural Text
//! Decoding Algorithm that Directly Controls Perplexity, 2021). Surprise is in bits.

use super::candidates::Candidates;

/// Number of most likely tokens from which version 1 estimates the exponent of Zipf's law.
const ZIPF_TOKENS: usize = 100;

/// Version of Mirostat: how it bounds the surprise of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MirostatVersion {
    /// Mirostat 1: keeps as many tokens as Zipf's law gives for the bound on surprise.
    V1,
    /// Mirostat 2: keeps the tokens whose surprise is within the bound.
    V2,
}

/// Parameters of Mirostat, which keeps the surprise of the generated text at a target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mirostat {
    /// Version of Mirostat.
    pub version: MirostatVersion,
    /// Target of the text's mean surprise in bits, above 0.
    pub tau: f32,
    /// Learning rate with which the bound follows the observed surprise, from 0 to 1.
    pub eta: f32,
}

/// Mirostat's state: the current bound on surprise.
#[derive(Debug)]
pub(super) struct Controller {
    params: Mirostat,
    /// The bound on surprise in bits; starts at twice the target.
    mu: f64,
}

impl Controller {
    pub(super) fn new(params: Mirostat) -> Self {
        Self {
            params,
            mu: 2.0 * f64::from(params.tau),
        }
    }

    /// Keeps the tokens that the bound allows, at least one.
    pub(super) fn apply(&self, candidates: &mut Candidates<'_>) {
        let weight = candidates.weight();
        let total = candidates.total(weight);
        match self.params.version {
            MirostatVersion::V1 => {
                let first = candidates.first(ZIPF_TOKENS);
                let first = &first[..first.len().min(ZIPF_TOKENS)];
                let logs = first.iter().map(|c| weight.of(c.1).ln()).collect();
                let k = tokens_of_surprise(self.mu, zipf_exponent(logs), candidates.n_vocab());
                candidates.cut(k);
            }
            MirostatVersion::V2 => {
                // -log2(w / total) <= mu
                let least = (-self.mu).exp2() * total;
                candidates.cut_below(weight.logit(least.min(1.0)));
            }
        }
    }

    /// Updates the bound by the chosen token's probability among those that were left.
    pub(super) fn observe(&mut self, probability: f64) {
        // At most what a double can tell.
        let surprise = -probability.max(f64::MIN_POSITIVE).log2();
        let error = surprise - f64::from(self.params.tau);
        self.mu -= f64::from(self.params.eta) * error;
    }
}

/// The exponent of Zipf's law that best fits probabilities, given their logarithms in descending
/// order.
fn zipf_exponent(logs: Vec<f64>) -> f64 {
    let (mut products, mut squares) = (0.0, 0.0);
    for (rank, pair) in (1u32..).zip(logs.windows(2)) {
        let t = (f64::from(rank + 1) / f64::from(rank)).ln();
        let b = pair[0] - pair[1];
        if b.is_finite() {
            products += t * b;
            squares += t * t;
        }
    }
    products / squares
}

/// Number of most likely tokens whose expected surprise is at most `mu` bits under Zipf's law.
fn tokens_of_surprise(mu: f64, exponent: f64, n_vocab: usize) -> usize {
    let epsilon = exponent - 1.0;
    let n = n_vocab as f64;
    // Near an exponent of 1 the quotient has a limit.
    let factor = match epsilon.abs() < 1e-6 {
        true => 1.0 / n.ln(),
        false => epsilon / (1.0 - n.powf(-epsilon)),
    };
    let k = (factor * mu.exp2()).powf(1.0 / exponent);
    // One token alone has no exponent.
    if k.is_nan() {
        1
    } else {
        k.clamp(1.0, n) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::sampler::SamplingParams;
    use crate::request::sampler::tests::{kept, params, sampler};

    fn mirostat(version: MirostatVersion, tau: f32, eta: f32) -> Option<Mirostat> {
        Some(Mirostat { version, tau, eta })
    }

    #[test]
    fn version_2_leaves_tokens_up_to_twice_the_target_at_first() {
        // Surprises of 1, 2, 3, 4 and 4 bits.
        let logits = [0.125f32, 0.5, 0.0625, 0.25, 0.0625].map(f32::ln);
        for (tau, ids) in [
            (0.4, &[1][..]),
            (0.6, &[1]),
            (1.1, &[1, 3]),
            (1.6, &[1, 3, 0]),
            (2.1, &[1, 3, 0, 2, 4]),
        ] {
            let kept = kept(&logits, |p| {
                p.mirostat = mirostat(MirostatVersion::V2, tau, 0.1)
            });
            assert_eq!(kept.ids(), ids, "{tau}");
        }
        // The other samplers are left out.
        let kept = kept(&logits, |p| {
            p.mirostat = mirostat(MirostatVersion::V2, 2.1, 0.1);
            (p.top_k, p.min_p) = (1, 0.9);
        });
        assert_eq!(kept.ids().len(), 5);
    }

    #[test]
    fn the_bound_follows_the_surprise_of_chosen_tokens() {
        let mut controller = Controller::new(Mirostat {
            version: MirostatVersion::V2,
            tau: 3.0,
            eta: 0.5,
        });
        assert_eq!(controller.mu, 6.0);
        // One bit is two below the target, and raises the bound by half of that.
        controller.observe(0.5);
        assert_eq!(controller.mu, 7.0);
        controller.observe(1.0 / 32.0);
        assert_eq!(controller.mu, 6.0);
        controller.observe(0.0);
        assert!(controller.mu.is_finite());
    }

    /// The surprise of what is drawn from a flat tail comes to the target.
    #[test]
    fn both_versions_hold_the_mean_surprise_at_the_target() {
        // Zipf's law with the exponent 1.1 over 5000 tokens.
        let weights: Vec<f64> = (1..=5000).map(|r| f64::from(r).powf(-1.1)).collect();
        let logits: Vec<f32> = weights.iter().map(|w| w.ln() as f32).collect();
        for version in [MirostatVersion::V1, MirostatVersion::V2] {
            let tau = 3.0;
            let mut sampler = sampler(SamplingParams {
                mirostat: mirostat(version, tau, 0.1),
                ..params(1.0)
            });
            let (mut sum, n) = (0.0, 2000);
            for _ in 0..n {
                sampler.sample(&mut logits.clone()).unwrap();
                let (probability, _) = sampler.distribution(0);
                sum -= probability.log2();
            }
            let mean = sum / f64::from(n);
            assert!((mean - f64::from(tau)).abs() < 0.1, "{version:?}: {mean}");
        }
    }

    #[test]
    fn version_1_estimates_the_exponent_of_zipfs_law() {
        let logs = |s: f64| (1..=100).map(|r| -s * f64::from(r).ln()).collect();
        for s in [0.7, 1.0, 1.3, 2.0] {
            assert!((zipf_exponent(logs(s)) - s).abs() < 1e-9, "{s}");
        }
        // Of 2^8 tokens and the exponent 2, with 6 bits: (64 / (1 - 1/256)) ^ (1/2) = 8.02.
        assert_eq!(tokens_of_surprise(6.0, 2.0, 256), 8);
        // Hostile distributions: all alike, one alone, one with all of the probability.
        for exponent in [0.0, 1.0, f64::NAN, 1e9] {
            let k = tokens_of_surprise(6.0, exponent, 256);
            assert!((1..=256).contains(&k), "{exponent}: {k}");
        }
        for logits in [&[0.0; 9][..], &[0.0], &[0.0, -1e30, -1e30]] {
            let kept = kept(logits, |p| {
                p.mirostat = mirostat(MirostatVersion::V1, 5.0, 0.1)
            });
            assert!(kept.ids().contains(&0), "{logits:?}");
        }
    }
}
