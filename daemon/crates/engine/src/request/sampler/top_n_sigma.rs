//! Top-n-sigma: tokens whose logits lie within n standard deviations of the largest
//! (Tang et al., Top-nσ: Not All Logits Are You Need, 2024).

use super::candidates::Candidates;

/// Keeps the tokens whose logit is at least the largest one less `n` standard deviations of all
/// remaining logits. The temperature does not matter, since it scales both.
pub(super) fn apply(n: f32, candidates: &mut Candidates<'_>) {
    let (mut count, mut sum, mut largest) = (0.0, 0.0, f64::NEG_INFINITY);
    for logit in candidates.logits().map(f64::from) {
        count += 1.0;
        sum += logit;
        largest = largest.max(logit);
    }
    let mean = sum / count;
    let squares = candidates
        .logits()
        .map(|logit| (f64::from(logit) - mean).powi(2));
    let deviation = (squares.sum::<f64>() / count).sqrt();
    candidates.cut_below(largest - f64::from(n) * deviation);
}

#[cfg(test)]
mod tests {
    use crate::request::sampler::tests::{Kept, kept};

    #[test]
    fn tokens_within_deviations_of_the_largest_logit_stay() {
        // Mean 0 and standard deviation 2 of those that are not out.
        let logits = [2.0, f32::NEG_INFINITY, -2.0, -2.0, 2.0];
        let of = |n| kept(&logits, |p| p.top_n_sigma = n);
        assert_eq!(of(1.9), Kept::of(&[(0, 0.5), (4, 0.5)]));
        assert_eq!(of(2.1).ids(), [0, 4, 2, 3]);
        // Mean 2, standard deviation 4: all but the largest are 10 below it.
        let peaked = [10.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(kept(&peaked, |p| p.top_n_sigma = 2.4).ids(), [0]);
        assert_eq!(kept(&peaked, |p| p.top_n_sigma = 2.6).ids().len(), 5);
        assert_eq!(kept(&peaked, |p| p.top_n_sigma = 0.0).ids().len(), 5);
    }

    #[test]
    fn a_temperature_in_front_of_it_changes_nothing() {
        use crate::request::sampler::SamplerKind::{Temperature, TopNSigma};
        for temperature in [0.1, 1.0, 9.0] {
            let kept = kept(&[2.0, -2.0, -2.0, 2.0], |p| {
                (p.temperature, p.top_n_sigma) = (temperature, 1.9);
                p.order = vec![Temperature, TopNSigma];
            });
            assert_eq!(kept, Kept::of(&[(0, 0.5), (3, 0.5)]), "{temperature}");
        }
    }
}
