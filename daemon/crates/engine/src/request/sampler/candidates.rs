//! The candidate tokens of a draw, and the operations of samplers on them.

use rocmforge_kernels_cpu::ops::{self, Simd};

use crate::request::sampler::buckets;

/// The logits are not finite, so that no token can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotFinite;

/// Number of tokens that are sorted first when as many are needed as reach a probability.
const FIRST_SORTED: usize = 256;
/// Factor by which more tokens are sorted if the sorted ones do not suffice.
const MORE_SORTED: usize = 8;
/// If this many times the sum of the sorted candidates does not reach the bound, all are sorted.
const FAR_FROM: f64 = 4.0;

/// The candidate tokens that are left, with their logits.
///
/// The tokens stay in the logits of the whole vocabulary as long as no sampler needs few of them in
/// order: sorting 150k tokens takes 10 ms, finding the best ones 0.15 ms.
///
/// *Invariant:* at least one token is left, and each has a finite logit.
#[derive(Debug)]
pub(crate) struct Candidates<'a> {
    /// The logits by token id, `[n_vocab]`; minus infinity for tokens that are out. `None` once
    /// `list` has them.
    all: Option<&'a mut [f32]>,
    /// Remaining tokens and logits, by falling logit and, among equals, rising id.
    list: &'a mut Vec<(u32, f32)>,
    /// Number of tokens of the vocabulary.
    n_vocab: usize,
    /// Reciprocal of the product of all temperatures applied so far.
    inverse_temperature: f64,
    /// Minimum number of tokens that each cut keeps, if there are as many.
    min_keep: usize,
}

/// Computes weights of logits: probabilities relative to the most likely token at the current
/// temperature.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Weight {
    pub(super) best: f32,
    pub(super) inverse_temperature: f64,
}

impl Weight {
    /// Weights for a distribution of which only the most likely token, with the logit `best`,
    /// counts.
    pub(crate) fn of_best(best: f32) -> Self {
        Self {
            best,
            inverse_temperature: 1.0,
        }
    }

    /// Weight of a logit relative to the most likely token's: from 0 to 1.
    pub(crate) fn of(self, logit: f32) -> f64 {
        (f64::from(logit - self.best) * self.inverse_temperature).exp()
    }

    /// Reciprocal of the temperature, if computing weights in f32 is exact enough.
    fn scale(self) -> Option<f32> {
        let scale = self.inverse_temperature as f32;
        (1e-30..=1e30).contains(&scale).then_some(scale)
    }

    /// The sum of the logits' weights, minus infinity counting 0; relative error up to 3e-6.
    fn sum(self, logits: &[f32]) -> f64 {
        match self.scale() {
            Some(scale) => ops::likelihood_sum(Simd::detect(), logits, self.best, scale),
            None => logits.iter().map(|logit| self.of(*logit)).sum(),
        }
    }

    /// Writes the weight of each logit to `out`.
    pub(super) fn fill(self, logits: &[f32], out: &mut [f32]) {
        match self.scale() {
            Some(scale) => ops::likelihoods(Simd::detect(), logits, self.best, scale, out),
            None => {
                let weights = logits.iter().map(|logit| self.of(*logit) as f32);
                out.iter_mut().zip(weights).for_each(|(out, w)| *out = w);
            }
        }
    }

    /// The logit that has this weight.
    pub(crate) fn logit(self, weight: f64) -> f64 {
        f64::from(self.best) + weight.ln() / self.inverse_temperature
    }
}

impl<'a> Candidates<'a> {
    /// Candidates of the whole vocabulary; `list` is reusable memory.
    ///
    /// # Errors
    /// No logit is finite, or one is NaN or infinity.
    pub(crate) fn of_all(
        logits: &'a mut [f32],
        list: &'a mut Vec<(u32, f32)>,
    ) -> Result<Self, NotFinite> {
        list.clear();
        check(logits)?;
        Ok(Self {
            n_vocab: logits.len(),
            all: Some(logits),
            list,
            inverse_temperature: 1.0,
            min_keep: 1,
        })
    }

    /// The most likely tokens of `n_vocab`, sorted as [`ops::top_k`] does.
    ///
    /// # Errors
    /// No logit is finite, or one is NaN or infinity.
    pub(crate) fn of_top(list: &'a mut Vec<(u32, f32)>, n_vocab: usize) -> Result<Self, NotFinite> {
        if list.iter().any(|(_, l)| l.is_nan() || *l == f32::INFINITY) {
            return Err(NotFinite);
        }
        list.retain(|c| c.1 != f32::NEG_INFINITY);
        if list.is_empty() {
            return Err(NotFinite);
        }
        Ok(Self {
            all: None,
            list,
            n_vocab,
            inverse_temperature: 1.0,
            min_keep: 1,
        })
    }

    /// Sets the minimum number of tokens that each cut keeps.
    pub(crate) fn keep_at_least(&mut self, min_keep: usize) {
        self.min_keep = min_keep.max(1);
    }

    /// Number of tokens of the vocabulary, whether left or not.
    pub(crate) fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    /// Number of tokens that are left.
    pub(crate) fn len(&self) -> usize {
        match &self.all {
            Some(all) => all.iter().filter(|l| **l != f32::NEG_INFINITY).count(),
            None => self.list.len(),
        }
    }

    /// The logits of the tokens that are left, in any order.
    pub(crate) fn logits(&self) -> impl Iterator<Item = f32> {
        let all = self.all.as_deref().unwrap_or_default();
        let list = match self.all {
            Some(_) => &[],
            None => &self.list[..],
        };
        let all = all.iter().copied().filter(|l| *l != f32::NEG_INFINITY);
        all.chain(list.iter().map(|c| c.1))
    }

    /// The function from logits to weights at the current temperature.
    pub(crate) fn weight(&self) -> Weight {
        let best = match self.all.as_deref() {
            Some(all) => ops::argmax(Simd::detect(), all).map(|at| all[at]),
            None => self.list.first().map(|c| c.1),
        };
        Weight {
            best: best.unwrap_or_default(),
            inverse_temperature: self.inverse_temperature,
        }
    }

    /// The sum of the weights of the tokens that are left; relative error up to 3e-6 for a whole
    /// vocabulary.
    pub(crate) fn total(&self, weight: Weight) -> f64 {
        match self.all.as_deref() {
            Some(all) => weight.sum(all),
            None => self.list.iter().map(|c| weight.of(c.1)).sum(),
        }
    }

    /// The sum of the weights, computed exactly.
    pub(crate) fn exact_total(&self, weight: Weight) -> f64 {
        self.logits().map(|logit| weight.of(logit)).sum()
    }

    /// Divides the logits by a temperature above 0, which may be tiny if it is dynamic.
    pub(crate) fn heat(&mut self, temperature: f64) {
        // Infinity times the difference of equal logits would be NaN.
        let inverse = self.inverse_temperature / temperature;
        self.inverse_temperature = inverse.clamp(f64::MIN_POSITIVE, f64::MAX);
    }

    /// Changes the logits of the listed tokens, of those that are left.
    pub(crate) fn change<'b, T: 'b>(
        &mut self,
        of: impl ExactSizeIterator<Item = (u32, T)>,
        with: impl Fn(f32, T) -> f32,
    ) {
        if of.len() == 0 {
            return;
        }
        self.settle();
        let changed = |logit: f32, by: T| finite(with(logit, by));
        if let Some(all) = self.all.as_deref_mut() {
            for (token, by) in of {
                let logit = all.get_mut(token as usize);
                if let Some(logit) = logit.filter(|l| **l != f32::NEG_INFINITY) {
                    *logit = changed(*logit, by);
                }
            }
            // What was sorted of them.
            self.list.clear();
            return;
        }
        let mut places: Vec<(u32, usize)> = self.list.iter().map(|c| c.0).zip(0..).collect();
        places.sort_unstable();
        for (token, by) in of {
            if let Ok(found) = places.binary_search_by_key(&token, |place| place.0) {
                let logit = &mut self.list[places[found].1].1;
                *logit = changed(*logit, by);
            }
        }
        self.list.sort_unstable_by(falling);
    }

    /// Applies the temperature so far to the logits.
    fn settle(&mut self) {
        let by = std::mem::replace(&mut self.inverse_temperature, 1.0);
        if by == 1.0 {
            return;
        }
        let hotter = |logit: &mut f32| *logit = finite((f64::from(*logit) * by) as f32);
        match self.all.as_deref_mut() {
            Some(all) => {
                let left = all.iter_mut().filter(|l| **l != f32::NEG_INFINITY);
                left.for_each(hotter);
                self.list.clear();
            }
            None => self.list.iter_mut().for_each(|c| hotter(&mut c.1)),
        }
    }

    /// The most likely tokens, at least `n` if there are as many, most likely first.
    pub(crate) fn first(&mut self, n: usize) -> &[(u32, f32)] {
        if let Some(all) = self.all.as_deref()
            && self.list.len() < n.min(all.len())
        {
            ops::top_k(Simd::detect(), all, n.min(all.len()), self.list);
            self.list.retain(|c| c.1 != f32::NEG_INFINITY);
        }
        self.list
    }

    /// All tokens that are left, most likely first.
    pub(crate) fn sorted(&mut self) -> &mut Vec<(u32, f32)> {
        let all = self.n_vocab;
        self.first(all);
        self.all = None;
        self.list
    }

    /// Keeps the `k` most likely tokens, regardless of `min_keep`.
    pub(crate) fn cut(&mut self, k: usize) {
        if let (1, Some(all)) = (k, self.all.as_deref()) {
            let best = ops::argmax(Simd::detect(), all);
            self.list.clear();
            self.list.extend(best.map(|at| (at as u32, all[at])));
        } else if self.all.is_some() {
            self.first(k);
        }
        self.all = None;
        self.list.truncate(k);
    }

    /// Keeps the tokens with at least this logit, and at least `min_keep`.
    pub(crate) fn cut_below(&mut self, least: f64) {
        let keeps = |logit: f32| f64::from(logit) >= least;
        match self.all.as_deref() {
            Some(all) => {
                self.list.clear();
                let kept = (0u32..).zip(all.iter().copied());
                let kept = kept.filter(|&(_, l)| l != f32::NEG_INFINITY && keeps(l));
                self.list.extend(kept);
                if self.list.len() < self.min_keep {
                    self.list.clear();
                    return self.cut(self.min_keep);
                }
                self.list.sort_unstable_by(falling);
                self.all = None;
            }
            None => {
                let kept = self.list.partition_point(|c| keeps(c.1));
                self.list.truncate(kept.max(self.min_keep));
            }
        }
    }

    /// Number of most likely tokens that reach `wanted` of the weights' sum; all if rounding leaves
    /// a rest.
    pub(crate) fn reach(&mut self, wanted: f64, weight: Weight) -> usize {
        let mut n = FIRST_SORTED;
        loop {
            let most = self.all.as_ref().map_or(0, |all| all.len());
            let first = self.first(n);
            let mut sum = 0.0;
            let reached = first.iter().position(|c| {
                sum += weight.of(c.1);
                sum >= wanted
            });
            match reached {
                Some(at) => return at + 1,
                None if n >= most => return first.len(),
                // A flat distribution: it is sorted once.
                None if sum * FAR_FROM < wanted => n = most,
                None => n = n.saturating_mul(MORE_SORTED).min(most),
            }
        }
    }

    /// The token at which the most likely tokens reach a share of the weights' `total`; the last
    /// one if rounding leaves a rest. The same token as by [`Candidates::reach`], without sorting a
    /// flat distribution.
    pub(crate) fn at_share(&mut self, share: f64, total: f64, weight: Weight) -> (u32, f32) {
        let wanted = share * total;
        let (mut sum, mut last) = (0.0, None);
        for &token in self.first(FIRST_SORTED) {
            sum += weight.of(token.1);
            last = Some(token);
            if sum >= wanted {
                return token;
            }
        }
        // A list had all of its tokens above.
        let all = self.all.as_deref();
        let in_bucket = all.and_then(|all| buckets::at_share(all, share, weight));
        in_bucket.or(last).expect("one token is left")
    }

    /// Removes the `n` most likely tokens; at least one stays.
    pub(crate) fn leave_out_first(&mut self, n: usize) {
        let n = n.min(self.len() - 1);
        self.first(n);
        if let Some(all) = self.all.as_deref_mut() {
            for (token, _) in &self.list[..n] {
                all[*token as usize] = f32::NEG_INFINITY;
            }
            // What is sorted begins with them.
            self.list.clear();
            return;
        }
        self.list.drain(..n);
    }

    /// Minimum number of tokens that each cut keeps.
    pub(crate) fn min_keep(&self) -> usize {
        self.min_keep
    }
}

/// Checks that a token can be chosen by these logits.
///
/// # Errors
/// None is finite, or one is NaN or infinity.
pub(super) fn check(logits: &[f32]) -> Result<(), NotFinite> {
    // Without an early end several are looked at a time. NaN is not below infinity.
    let look = |(fine, any): (bool, bool), l: &f32| {
        (fine & (*l < f32::INFINITY), any | (*l > f32::NEG_INFINITY))
    };
    match logits.iter().fold((true, false), look) {
        (true, true) => Ok(()),
        _ => Err(NotFinite),
    }
}

/// The order of [`ops::top_k`].
pub(super) fn falling(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The nearest finite number, since an infinite logit has no weight.
pub(crate) fn finite(x: f32) -> f32 {
    x.clamp(f32::MIN, f32::MAX)
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    fn left(candidates: &mut Candidates<'_>) -> Vec<u32> {
        candidates.sorted().iter().map(|c| c.0).collect()
    }

    /// What samplers do comes to the same in the vocabulary's logits and in a sorted list.
    #[test]
    fn steps_come_to_the_same_in_all_logits_and_in_a_sorted_list() {
        let logits = [0.5f32, 2.0, f32::NEG_INFINITY, -1.0, 2.0, 1.5];
        type Change = fn(&mut Candidates<'_>);
        let changes: [(Change, &[u32]); 8] = [
            (|c| c.cut(3), &[1, 4, 5]),
            (|c| c.cut(9), &[1, 4, 5, 0, 3]),
            (|c| c.cut_below(1.5), &[1, 4, 5]),
            (|c| c.cut_below(9.0), &[1]),
            (|c| c.leave_out_first(2), &[5, 0, 3]),
            (|c| c.leave_out_first(99), &[3]),
            (
                |c| {
                    c.change(
                        [(1u32, 5.0f32), (2, 5.0), (77, 5.0)].into_iter(),
                        |l, by| l - by,
                    )
                },
                &[4, 5, 0, 3, 1],
            ),
            (
                |c| {
                    c.keep_at_least(4);
                    c.cut_below(2.0);
                },
                &[1, 4, 5, 0],
            ),
        ];
        for (at, (change, expected)) in changes.into_iter().enumerate() {
            let (mut all, mut room) = (logits.to_vec(), Vec::new());
            let mut of_all = Candidates::of_all(&mut all, &mut room).unwrap();
            change(&mut of_all);
            assert_eq!(left(&mut of_all), expected, "{at}");
            let mut list = Vec::new();
            ops::top_k(Simd::detect(), &logits, 6, &mut list);
            let mut of_list = Candidates::of_top(&mut list, 6).unwrap();
            change(&mut of_list);
            assert_eq!(left(&mut of_list), expected, "{at}");
        }
    }

    #[test]
    fn as_many_are_sorted_as_reach_a_sum() {
        // So flat that the first 256 do not reach it.
        let mut logits: Vec<f32> = (0..3000).map(|i| -(i as f32) * 1e-3).collect();
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(*l).exp()).collect();
        let total: f64 = weights.iter().sum();
        for share in [1e-6, 0.1, 0.5, 0.9, 2.0] {
            let mut sum = 0.0;
            let expected = weights.iter().position(|w| {
                sum += w;
                sum >= share * total
            });
            let mut room = Vec::new();
            let mut candidates = Candidates::of_all(&mut logits, &mut room).unwrap();
            let weight = candidates.weight();
            let found = candidates.reach(share * candidates.total(weight), weight);
            assert_eq!(found, expected.map_or(3000, |at| at + 1), "{share}");
        }
    }

    /// The token at a sum is the last of those that reach it, found in one bucket or by sorting.
    #[test]
    fn the_token_at_a_sum_is_the_last_that_reaches_it() {
        let mut rng = ChaCha8Rng::seed_from_u64(11);
        let shapes: [fn(f32) -> f32; 6] = [
            |x| x,
            |x| 20.0 * x,
            // All alike, but for few.
            |x| if x < 0.999 { 1.0 } else { 5.0 },
            |_| -3.0,
            // Flat, but for what a penalty took out.
            |x| if x < 0.01 { f32::MIN } else { x },
            |x| {
                if x < 0.5 {
                    f32::NEG_INFINITY
                } else {
                    f32::MAX * (x - 0.75)
                }
            },
        ];
        for (shape, rounds) in shapes.iter().zip(1..) {
            for n in [1, 200, 256, 257, 5000] {
                let mut logits: Vec<f32> = (0..n).map(|_| shape(rng.random())).collect();
                logits[0] = 0.25;
                let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
                sorted.retain(|c| c.1 != f32::NEG_INFINITY);
                sorted.sort_unstable_by(falling);
                for _ in 0..20 {
                    let mut room = Vec::new();
                    let mut list = sorted.clone();
                    let mut of_all = Candidates::of_all(&mut logits, &mut room).unwrap();
                    let weight = of_all.weight();
                    let share = rng.random();
                    let total = of_all.total(weight);
                    let at = of_all.at_share(share, total, weight);
                    let mut of_list = Candidates::of_top(&mut list, n).unwrap();
                    let total = of_list.total(weight);
                    let expected = of_list.reach(share * total, weight) - 1;
                    let in_list = of_list.at_share(share, total, weight);
                    assert_eq!(in_list, sorted[expected], "shape {rounds}, {n}");
                    // Sums in another order may differ in their last digits.
                    let near = expected.saturating_sub(1)..(expected + 2).min(sorted.len());
                    assert!(sorted[near].contains(&at), "shape {rounds}, {n}");
                }
                let mut room = Vec::new();
                let mut of_all = Candidates::of_all(&mut logits, &mut room).unwrap();
                let weight = of_all.weight();
                let beyond = of_all.at_share(f64::INFINITY, 1.0, weight);
                assert_eq!(Some(&beyond), sorted.last(), "what rounding leaves");
            }
        }
    }

    #[test]
    fn a_temperature_is_part_of_logits_that_are_changed_behind_it() {
        let (mut all, mut room) = (vec![1.0f32, 2.0], Vec::new());
        let mut candidates = Candidates::of_all(&mut all, &mut room).unwrap();
        candidates.heat(0.5);
        candidates.change([(1u32, ())].into_iter(), |logit, ()| logit - 1.0);
        assert_eq!(candidates.sorted(), &[(1, 3.0), (0, 2.0)]);
    }
}
