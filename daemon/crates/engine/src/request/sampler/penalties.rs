//! Penalties for tokens that occurred recently: repetition, presence and frequency.

use std::collections::{HashMap, VecDeque};

use super::candidates::{Candidates, finite};

/// The strengths of the three penalties.
#[derive(Debug, Clone, Copy)]
pub(super) struct Amounts {
    /// Divides positive and multiplies negative logits; 1 is off.
    pub(super) repeat: f32,
    /// Subtracted once from the logit of a token that occurred.
    pub(super) presence: f32,
    /// Subtracted from a token's logit for each of its occurrences.
    pub(super) frequency: f32,
}

impl Amounts {
    pub(super) fn are_off(&self) -> bool {
        self.repeat == 1.0 && self.presence == 0.0 && self.frequency == 0.0
    }
}

/// The penalties' state: the recent tokens, at most `last_n`.
#[derive(Debug)]
pub(super) struct Penalties {
    amounts: Amounts,
    last_n: usize,
    counts: HashMap<u32, u32>,
    recent: VecDeque<u32>,
}

impl Penalties {
    pub(super) fn new(amounts: Amounts, last_n: u32) -> Self {
        Self {
            amounts,
            last_n: last_n as usize,
            counts: HashMap::new(),
            recent: VecDeque::new(),
        }
    }

    /// Adds the tokens of a prompt to the history.
    pub(super) fn read(&mut self, prompt: &[u32]) {
        let seen = &prompt[prompt.len().saturating_sub(self.last_n)..];
        seen.iter().for_each(|&token| self.accept(token));
    }

    /// Adds a generated token to the history.
    pub(super) fn accept(&mut self, token: u32) {
        self.recent.push_back(token);
        *self.counts.entry(token).or_default() += 1;
        if self.recent.len() > self.last_n
            && let Some(old) = self.recent.pop_front()
            && let Some(count) = self.counts.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&old);
            }
        }
    }

    pub(super) fn apply(&self, candidates: &mut Candidates<'_>) {
        let Amounts {
            repeat,
            presence,
            frequency,
        } = self.amounts;
        let seen = self.counts.iter().map(|(&token, &count)| (token, count));
        candidates.change(seen, |logit, count| {
            // A positive logit shrinks and a negative one grows in size, so that
            // either becomes less likely.
            let repeated = match logit > 0.0 {
                true => logit / repeat,
                false => logit * repeat,
            };
            let counted = presence + frequency * count as f32;
            finite(repeated) - finite(counted)
        });
    }
}

#[cfg(test)]
mod tests {
    use crate::request::sampler::SamplingParams;
    use crate::request::sampler::tests::{params, sampler};

    #[test]
    fn extreme_penalties_leave_finite_logits() {
        let penalised = |repeat_penalty: f32, temperature: f32, logits: &[f32]| {
            let mut sampler = sampler(SamplingParams {
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
        let mut sampler = sampler(SamplingParams {
            presence_penalty: 10.0,
            penalty_last_n: 2,
            ..params(0.0)
        });
        sampler.read(&[1, 0]);
        assert_eq!(sampler.sample(&mut [1.0, 0.0]), Ok(0));
        sampler.accept(5);
        sampler.accept(0);
        assert_eq!(sampler.sample(&mut [1.0, 0.0]), Ok(1));
        sampler.accept(5);
        sampler.accept(6);
        assert_eq!(sampler.sample(&mut [1.0, 0.0]), Ok(0));
    }
}
