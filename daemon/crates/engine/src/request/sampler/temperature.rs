//! The temperature, fixed or by the entropy (dynamic temperature, entropy-based).

use super::candidates::Candidates;

/// Dynamic temperature: how the temperature follows the entropy of the distribution; off if `range`
/// is 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicTemperature {
    /// Maximum distance from the fixed temperature; the result is at least 0.
    pub range: f32,
    /// Exponent on the normalized entropy (0 to 1) that the temperature follows.
    pub exponent: f32,
}

impl Default for DynamicTemperature {
    fn default() -> Self {
        Self {
            range: 0.0,
            exponent: 1.0,
        }
    }
}

/// The temperature, which divides the logits; 0 keeps only the most likely token, the lowest id
/// among equals.
#[derive(Debug, Clone, Copy)]
pub(super) struct Temperature {
    pub(super) fixed: f32,
    pub(super) dynamic: DynamicTemperature,
}

impl Temperature {
    /// Whether only the most likely token can ever be left.
    pub(super) fn is_greedy(&self) -> bool {
        self.fixed <= 0.0 && self.dynamic.range <= 0.0
    }

    /// Whether this temperature changes nothing.
    pub(super) fn is_off(&self) -> bool {
        self.fixed == 1.0 && self.dynamic.range <= 0.0
    }

    pub(super) fn apply(&self, candidates: &mut Candidates<'_>) {
        let temperature = match self.dynamic.range > 0.0 {
            true => match self.by_entropy(candidates) {
                Some(temperature) => temperature,
                // One token is left, whatever the temperature.
                None => return,
            },
            false => f64::from(self.fixed),
        };
        if temperature <= 0.0 {
            return candidates.cut(1);
        }
        candidates.heat(temperature);
    }

    fn by_entropy(&self, candidates: &Candidates<'_>) -> Option<f64> {
        let largest = (candidates.len() as f64).ln();
        if largest <= 0.0 {
            return None;
        }
        let weight = candidates.weight();
        let total = candidates.total(weight);
        let probabilities = candidates.logits().map(|logit| weight.of(logit) / total);
        let entropy: f64 = probabilities
            .filter(|p| *p > 0.0)
            .map(|p| -p * p.ln())
            .sum();
        let share = (entropy / largest).clamp(0.0, 1.0);
        let (fixed, range) = (f64::from(self.fixed), f64::from(self.dynamic.range));
        let least = (fixed - range).max(0.0);
        let power = share.powf(f64::from(self.dynamic.exponent));
        Some(least + (fixed + range - least) * power)
    }
}

#[cfg(test)]
mod tests {
    use crate::request::sampler::tests::{Kept, kept};

    #[test]
    fn logits_are_divided_by_it() {
        let kept = kept(&[0.0, 1.0, 2.0], |p| p.temperature = 0.5);
        let weights = [1.0, 2.0f64.exp(), 4.0f64.exp()];
        let total: f64 = weights.iter().sum();
        assert_eq!(kept.ids(), [2, 1, 0]);
        for (share, weight) in kept.shares().iter().zip(weights.iter().rev()) {
            assert!((share - weight / total).abs() < 1e-6);
        }
    }

    #[test]
    fn a_dynamic_temperature_goes_with_the_entropy() {
        // 0.7, 0.2, 0.1: the entropy is 0.80182 of ln 3 = 1.09861 at most, a share of 0.72985.
        let probabilities = [0.2f64, 0.7, 0.1];
        let logits = probabilities.map(|p| p.ln() as f32);
        let entropy: f64 = probabilities.iter().map(|p| -p * p.ln()).sum();
        assert!((entropy / 3.0f64.ln() - 0.72985).abs() < 1e-4);
        for (fixed, range, exponent, temperature) in [
            (1.0, 0.5, 1.0, 0.5 + 0.72985),
            (1.0, 0.5, 2.0, 0.5 + 0.72985 * 0.72985),
            // It does not go below 0.
            (0.5, 1.5, 1.0, 2.0 * 0.72985),
        ] {
            let kept = kept(&logits, |p| {
                p.temperature = fixed;
                (p.dynatemp.range, p.dynatemp.exponent) = (range, exponent);
            });
            let weights = probabilities.map(|p| p.powf(1.0 / temperature));
            let total: f64 = weights.iter().sum();
            let expected = [1, 0, 2].map(|at: usize| weights[at] / total);
            assert_eq!(kept.ids(), [1, 0, 2]);
            for (share, expected) in kept.shares().iter().zip(expected) {
                assert!((share - expected).abs() < 1e-4, "{share} {expected}");
            }
        }
    }

    #[test]
    fn without_doubt_a_dynamic_temperature_of_its_whole_range_is_greedy() {
        let kept = kept(&[900.0, 0.0, -900.0], |p| {
            (p.temperature, p.dynatemp.range) = (1.0, 1.0);
        });
        assert_eq!(kept, Kept::of(&[(0, 1.0)]));
    }
}
