//! Locally typical sampling: tokens about as surprising as the distribution is on average
//! (Meister et al., Locally Typical Sampling, 2022).

use super::candidates::Candidates;

/// Keeps the tokens whose surprise is nearest to the entropy: as few as together exceed the
/// probability `p`. The most likely token may be removed.
pub(super) fn apply(p: f32, candidates: &mut Candidates<'_>) {
    let weight = candidates.weight();
    let total = candidates.total(weight);
    let min_keep = candidates.min_keep();
    let list = candidates.sorted();
    let probabilities: Vec<f64> = list.iter().map(|c| weight.of(c.1) / total).collect();
    // What rounds to no probability has no share in the entropy.
    let likely = probabilities.iter().filter(|p| **p > 0.0);
    let entropy: f64 = likely.map(|p| -p * p.ln()).sum();
    let mut nearest: Vec<(f64, usize)> = probabilities
        .iter()
        .map(|p| (-p.ln() - entropy).abs())
        .zip(0..)
        .collect();
    nearest.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut sum = 0.0;
    let reached = nearest.iter().position(|(_, at)| {
        sum += probabilities[*at];
        sum > f64::from(p)
    });
    let keep = reached.map_or(list.len(), |at| at + 1).max(min_keep);
    nearest.truncate(keep);
    let mut stays = vec![false; list.len()];
    nearest.iter().for_each(|(_, at)| stays[*at] = true);
    let mut stays = stays.into_iter();
    list.retain(|_| stays.next() == Some(true));
}

#[cfg(test)]
mod tests {
    use crate::request::sampler::tests::kept;

    #[test]
    fn tokens_of_about_the_entropy_stay_though_others_are_likelier() {
        // 0.5, 0.2, 0.2, 0.1 of 1: the entropy is 0.5 ln 2 + 0.4 ln 5 + 0.1 ln 10 = 1.2206. The
        // surprises are 0.693, 1.609, 1.609 and 2.303, so 0.528, 0.389, 0.389 and 1.082 away.
        let logits = [0.1f32, 0.5, 0.2, 0.2].map(f32::ln);
        for (typical_p, ids) in [
            (0.1, &[2][..]),
            (0.3, &[2, 3]),
            (0.5, &[1, 2, 3]),
            (0.85, &[1, 2, 3]),
            (0.95, &[1, 2, 3, 0]),
            (1.0, &[1, 2, 3, 0]),
        ] {
            let kept = kept(&logits, |p| p.typical_p = typical_p);
            assert_eq!(kept.ids(), ids, "{typical_p}");
        }
        let two = kept(&logits, |p| (p.typical_p, p.min_keep) = (0.1, 2));
        assert_eq!(two.ids(), [2, 3]);
    }

    #[test]
    fn tokens_without_a_probability_are_no_trouble() {
        let kept = kept(&[0.0, -1e30, f32::MIN], |p| p.typical_p = 0.5);
        assert_eq!(kept.ids(), [0]);
    }
}
