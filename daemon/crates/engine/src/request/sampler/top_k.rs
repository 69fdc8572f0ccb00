//! Top-k: the k most likely tokens.

use super::candidates::Candidates;

/// Leaves the `k` most likely tokens, the lowest ids among equals.
pub(super) fn apply(k: u32, candidates: &mut Candidates<'_>) {
    candidates.cut(k as usize);
}

#[cfg(test)]
mod tests {
    use crate::request::sampler::tests::{Kept, kept};

    #[test]
    fn the_k_most_likely_stay() {
        let of = |top_k| kept(&[1.0, 3.0, 2.0, 3.0], |p| p.top_k = top_k);
        assert_eq!(of(1), Kept::of(&[(1, 1.0)]));
        assert_eq!(of(2), Kept::of(&[(1, 0.5), (3, 0.5)]));
        assert_eq!(of(0).ids(), [1, 3, 2, 0]);
        assert_eq!(of(9).ids(), [1, 3, 2, 0]);
    }
}
