//! Choosing the next token from logits: bias, penalties, temperature, top-k, top-p, min-p, seed.

use std::collections::{HashMap, VecDeque};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rocmforge_kernels::host::ops::{self, Simd};

/// How tokens are chosen. The defaults are greedy-free, the field's usual ones.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy: the most likely token, the lowest id among equals.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely; 0 keeps all.
    pub min_p: f32,
    /// Divides (positive) or multiplies (negative) the logits of recent tokens; 1 is off.
    pub repeat_penalty: f32,
    /// Subtracted from the logits of recent tokens; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted per occurrence among the recent tokens; 0 is off.
    pub frequency_penalty: f32,
    /// How many recent tokens the penalties look at; 0 is none.
    pub penalty_last_n: u32,
    /// Seed; the same seed gives the same text. `None` draws one.
    pub seed: Option<u64>,
    /// Added to the logits of these tokens before anything else; each token once.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: 64,
            seed: None,
            logit_bias: Vec::new(),
        }
    }
}

/// Most candidates that are asked of a device. Finding them takes it about 1 us each; reading all
/// logits of a large vocabulary and looking through them here takes 0.15 ms.
const TOP_MAX: usize = 128;

/// Why no token could be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotFinite;

/// Chooses the tokens of one sequence.
///
/// The steps are those of the field in their usual order: bias and penalties on the logits, then
/// top-k, top-p and min-p on the distribution at temperature 1, then temperature, then a draw.
#[derive(Debug)]
pub(crate) struct Sampler {
    params: SamplingParams,
    rng: ChaCha8Rng,
    counts: HashMap<u32, u32>,
    recent: VecDeque<u32>,
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    pub(crate) fn new(params: SamplingParams) -> Self {
        // ChaCha8's stream for a seed is part of its crate's promise, so a seed gives the
        // same text after an upgrade.
        let rng = ChaCha8Rng::seed_from_u64(params.seed.unwrap_or_else(rand::random));
        Self {
            params,
            rng,
            counts: HashMap::new(),
            recent: VecDeque::new(),
            candidates: Vec::new(),
        }
    }

    /// Tells of a token of the prompt or a chosen one, for the penalties.
    pub(crate) fn accept(&mut self, token: u32) {
        let window = self.params.penalty_last_n as usize;
        if window == 0 || !self.penalizes() {
            return;
        }
        self.recent.push_back(token);
        *self.counts.entry(token).or_default() += 1;
        if self.recent.len() > window
            && let Some(old) = self.recent.pop_front()
            && let Some(count) = self.counts.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&old);
            }
        }
    }

    /// Whether it only ever takes the most likely token, whatever came before.
    pub(crate) fn takes_best(&self) -> bool {
        self.params.temperature == 0.0 && !self.changes_logits()
    }

    /// How many of the largest logits are all that it looks at, if so few:
    /// [`Sampler::sample_from`] takes those.
    pub(crate) fn takes_top(&self) -> Option<usize> {
        let k = self.params.top_k as usize;
        let few = (1..=TOP_MAX).contains(&k);
        (few && self.params.temperature > 0.0 && !self.changes_logits()).then_some(k)
    }

    /// Chooses a token from the [`Sampler::takes_top`] largest logits with their ids, sorted as
    /// [`ops::top_k`] does: the same token that [`Sampler::sample`] chooses from all.
    pub(crate) fn sample_from(&mut self, top: &[(u32, f32)]) -> Result<u32, NotFinite> {
        if top.iter().any(|(_, l)| l.is_nan() || *l == f32::INFINITY) {
            return Err(NotFinite);
        }
        self.candidates.clear();
        self.candidates.extend_from_slice(top);
        self.draw().ok_or(NotFinite)
    }

    /// The same from more of the largest logits than it looks at, as another sampler of the pass
    /// asked for; also what takes the best token.
    pub(crate) fn choose(&mut self, top: &[(u32, f32)]) -> Result<u32, NotFinite> {
        let looked_at = match self.takes_top() {
            Some(k) => k.min(top.len()),
            None => 1,
        };
        match top {
            [] => Err(NotFinite),
            [best, ..] if self.takes_best() => Ok(best.0),
            top => self.sample_from(&top[..looked_at]),
        }
    }

    /// Chooses a token from `logits`, `[n_vocab]`, which bias and penalties change. What is minus
    /// infinity there is never chosen.
    pub(crate) fn sample(&mut self, logits: &mut [f32]) -> Result<u32, NotFinite> {
        if logits.iter().any(|l| l.is_nan() || *l == f32::INFINITY) {
            return Err(NotFinite);
        }
        for &(token, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        self.penalize(logits);
        if self.params.temperature == 0.0 {
            return ops::argmax(Simd::detect(), logits)
                .filter(|&i| logits[i] != f32::NEG_INFINITY)
                .map(|i| i as u32)
                .ok_or(NotFinite);
        }
        let k = match self.params.top_k as usize {
            0 => logits.len(),
            k => k.min(logits.len()),
        };
        ops::top_k(Simd::detect(), logits, k, &mut self.candidates);
        self.candidates.retain(|c| c.1 != f32::NEG_INFINITY);
        self.draw().ok_or(NotFinite)
    }

    fn changes_logits(&self) -> bool {
        self.penalizes() || !self.params.logit_bias.is_empty()
    }

    fn penalizes(&self) -> bool {
        let p = &self.params;
        p.repeat_penalty != 1.0 || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0
    }

    fn penalize(&self, logits: &mut [f32]) {
        let p = &self.params;
        for (&token, &count) in &self.counts {
            let Some(logit) = logits.get_mut(token as usize) else {
                continue;
            };
            // It stays out of the choice.
            if *logit == f32::NEG_INFINITY {
                continue;
            }
            // A positive logit shrinks and a negative one grows in size, so that
            // either becomes less likely.
            let repeated = if *logit > 0.0 {
                *logit / p.repeat_penalty
            } else {
                *logit * p.repeat_penalty
            };
            let counted = p.presence_penalty + p.frequency_penalty * count as f32;
            // An infinite logit has no weight to draw by, and minus infinity is never chosen.
            *logit = finite(finite(repeated) - finite(counted));
        }
    }

    /// Draws from the candidates, which are sorted by falling logit.
    fn draw(&mut self) -> Option<u32> {
        let best = self.candidates.first()?.1;
        let probability = |logit: f32| f64::from(logit - best).exp();
        let total: f64 = self.candidates.iter().map(|c| probability(c.1)).sum();
        let mut keep = self.candidates.len();
        if self.params.top_p < 1.0 {
            let wanted = f64::from(self.params.top_p) * total;
            let mut sum = 0.0;
            keep = self
                .candidates
                .iter()
                .position(|c| {
                    sum += probability(c.1);
                    sum >= wanted
                })
                .map_or(keep, |i| i + 1);
        }
        if self.params.min_p > 0.0 {
            let least = f64::from(self.params.min_p);
            let likely = self.candidates[..keep]
                .iter()
                .take_while(|c| probability(c.1) >= least)
                .count();
            keep = likely.max(1);
        }
        self.candidates.truncate(keep);
        let inverse = 1.0 / f64::from(self.params.temperature);
        let weight = |logit: f32| (f64::from(logit - best) * inverse).exp();
        let total: f64 = self.candidates.iter().map(|c| weight(c.1)).sum();
        let mut point = self.rng.random::<f64>() * total;
        for &(token, logit) in &self.candidates {
            point -= weight(logit);
            if point < 0.0 {
                return Some(token);
            }
        }
        // Rounding can leave a rest behind the last one.
        self.candidates.last().map(|c| c.0)
    }
}

/// The finite number next to it.
fn finite(x: f32) -> f32 {
    x.clamp(f32::MIN, f32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(temperature: f32) -> SamplingParams {
        SamplingParams {
            temperature,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: Some(7),
            ..SamplingParams::default()
        }
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        let mut sampler = Sampler::new(params(0.0));
        assert_eq!(sampler.sample(&mut [0.5, 2.0, -1.0, 2.0]), Ok(1));
    }

    #[test]
    fn nan_and_infinity_never_pass() {
        for bad in [f32::NAN, f32::INFINITY] {
            assert_eq!(
                Sampler::new(params(0.0)).sample(&mut [0.0, bad]),
                Err(NotFinite)
            );
            assert_eq!(
                Sampler::new(params(1.0)).sample(&mut [0.0, bad]),
                Err(NotFinite)
            );
        }
        assert_eq!(
            Sampler::new(params(0.0)).sample(&mut [f32::NEG_INFINITY, 0.0]),
            Ok(1)
        );
    }

    #[test]
    fn what_is_minus_infinity_is_never_chosen() {
        for temperature in [0.0, 5.0] {
            let mut sampler = Sampler::new(params(temperature));
            for _ in 0..200 {
                let mut logits = [f32::NEG_INFINITY, -1e30, f32::NEG_INFINITY];
                assert_eq!(sampler.sample(&mut logits), Ok(1));
            }
            let mut none = [f32::NEG_INFINITY; 3];
            assert_eq!(sampler.sample(&mut none), Err(NotFinite));
        }
    }

    #[test]
    fn bias_moves_the_choice_and_is_looked_at_in_all_logits() {
        for temperature in [0.0, 1.0] {
            let mut sampler = Sampler::new(SamplingParams {
                logit_bias: vec![(1, 100.0), (7, 100.0)],
                top_k: 1,
                ..params(temperature)
            });
            assert_eq!((sampler.takes_best(), sampler.takes_top()), (false, None));
            assert_eq!(sampler.sample(&mut [3.0, 0.0, 9.0]), Ok(1));
        }
        let mut sampler = Sampler::new(SamplingParams {
            logit_bias: vec![(2, -100.0)],
            ..params(0.0)
        });
        assert_eq!(sampler.sample(&mut [3.0, 0.0, 9.0]), Ok(0));
    }

    #[test]
    fn draws_follow_the_softmax() {
        let mut sampler = Sampler::new(params(1.0));
        let logits = [0.0f32, 1.0, 2.0];
        let total: f32 = logits.iter().map(|l| l.exp()).sum();
        let mut seen = [0u32; 3];
        let n = 20_000;
        for _ in 0..n {
            seen[sampler.sample(&mut logits.clone()).unwrap() as usize] += 1;
        }
        for (seen, logit) in seen.iter().zip(logits) {
            let expected = logit.exp() / total;
            let found = *seen as f32 / n as f32;
            assert!((found - expected).abs() < 0.02, "{found} of {expected}");
        }
    }

    #[test]
    fn one_seed_one_sequence() {
        let run = |seed| {
            let mut sampler = Sampler::new(SamplingParams {
                seed: Some(seed),
                ..params(1.0)
            });
            (0..50)
                .map(|_| sampler.sample(&mut [0.0; 100]).unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn the_largest_logits_alone_give_the_same_tokens() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for top_k in [1, 2, 40, 128] {
            let params = SamplingParams {
                temperature: rng.random_range(0.2..2.0),
                top_k,
                top_p: rng.random_range(0.3..1.0),
                min_p: rng.random_range(0.0..0.2),
                seed: Some(rng.random()),
                ..SamplingParams::default()
            };
            let (mut whole, mut few) = (Sampler::new(params.clone()), Sampler::new(params));
            let k = whole.takes_top().unwrap();
            let mut top = Vec::new();
            for _ in 0..100 {
                // Steps, so that there are equals.
                let mut logits: Vec<f32> = (0..3000)
                    .map(|_| (rng.random_range(-8.0f32..8.0) * 16.0).round() / 16.0)
                    .collect();
                ops::top_k(Simd::detect(), &logits, k, &mut top);
                assert_eq!(few.sample_from(&top), whole.sample(&mut logits), "{top_k}");
            }
        }
        let top = |bad| Sampler::new(SamplingParams::default()).sample_from(&[(0, bad), (1, 0.0)]);
        assert_eq!([f32::NAN, f32::INFINITY].map(top), [Err(NotFinite); 2]);
    }

    #[test]
    fn all_logits_are_looked_at_for_penalties_greed_and_long_tails() {
        let takes = |params| Sampler::new(params).takes_top();
        assert_eq!(takes(SamplingParams::default()), Some(40));
        assert_eq!(takes(params(0.0)), None);
        for top_k in [0, 129] {
            let params = SamplingParams {
                top_k,
                ..SamplingParams::default()
            };
            assert_eq!(takes(params), None);
        }
        let penalized = SamplingParams {
            repeat_penalty: 1.1,
            ..SamplingParams::default()
        };
        assert_eq!(takes(penalized), None);
    }

    #[test]
    fn top_p_min_p_and_top_k_cut_the_tail() {
        let logits = [3.0f32, 2.9, 0.0, -1.0];
        let cuts = [
            SamplingParams {
                top_p: 0.6,
                ..params(5.0)
            },
            SamplingParams {
                min_p: 0.5,
                ..params(5.0)
            },
            SamplingParams {
                top_k: 2,
                ..params(5.0)
            },
        ];
        for cut in cuts {
            let mut sampler = Sampler::new(cut.clone());
            for _ in 0..300 {
                assert!(sampler.sample(&mut logits.clone()).unwrap() < 2, "{cut:?}");
            }
        }
    }

    #[test]
    fn extreme_penalties_leave_finite_logits() {
        let penalised = |repeat_penalty: f32, temperature: f32, logits: &[f32]| {
            let mut sampler = Sampler::new(SamplingParams {
                repeat_penalty,
                ..params(temperature)
            });
            (0..logits.len()).for_each(|token| sampler.accept(token as u32));
            sampler.sample(&mut logits.to_vec())
        };
        for temperature in [0.0, 1.0] {
            // The first one overflows, and stays the most likely.
            assert_eq!(penalised(1e-38, temperature, &[9.0, -3.0, -4.0]), Ok(0));
            // All that is allowed overflows, and what is not stays so.
            let held = [f32::NEG_INFINITY, -9.0, f32::NEG_INFINITY];
            assert_eq!(penalised(3e38, temperature, &held), Ok(1));
        }
    }

    #[test]
    fn penalties_forget_what_leaves_the_window() {
        let mut sampler = Sampler::new(SamplingParams {
            presence_penalty: 10.0,
            penalty_last_n: 2,
            ..params(0.0)
        });
        sampler.accept(0);
        assert_eq!(sampler.sample(&mut [1.0, 0.0]), Ok(1));
        sampler.accept(5);
        sampler.accept(6);
        assert_eq!(sampler.sample(&mut [1.0, 0.0]), Ok(0));
    }
}
