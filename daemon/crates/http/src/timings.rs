//! Times of a request, as llama-server's `timings`.

use std::time::Instant;

use rocmforge_service::answers::Ended;
use serde_json::{Value, json};

fn per_token(n: u32, ms: f64) -> f64 {
    if n > 0 { ms / f64::from(n) } else { 0.0 }
}

fn per_second(n: u32, ms: f64) -> f64 {
    if ms > 0.0 {
        f64::from(n) / ms * 1e3
    } else {
        0.0
    }
}

/// `timings` of a completion that has ended, with `n` as the number of generated tokens.
pub(super) fn of_ended(ended: &Ended, n: u32) -> Value {
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let computed = ended.prompt_tokens.saturating_sub(ended.reused_tokens);
    let (prompt, predicted) = (ms(ended.times.prompt), ms(ended.times.generation));
    let mut timings = json!({
        "cache_n": ended.reused_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt,
        "prompt_per_token_ms": per_token(computed, prompt),
        "prompt_per_second": per_second(computed, prompt),
        "predicted_n": n,
        "predicted_ms": predicted,
        "predicted_per_token_ms": per_token(n, predicted),
        "predicted_per_second": per_second(n, predicted),
    });
    add_gaps(ended, &mut timings);
    timings
}

/// Adds the longest gap between tokens, and the promised one, to `timings`.
fn add_gaps(ended: &Ended, to: &mut Value) {
    if let Some(gap) = ended.summary.longest_gap {
        to["longest_gap_ms"] = (gap.took.as_secs_f64() * 1e3).into();
        to["longest_gap_cause"] = gap.cause.name().into();
    }
    if let Some((gap, broken)) = ended.summary.promised_gap {
        to["promised_gap_ms"] = (gap.as_millis() as u64).into();
        to["broken_gaps"] = broken.into();
    }
}

/// Adds promised gaps to `timings`, if a gap was promised: clients of dialects without such fields
/// get none.
pub(super) fn add_promised_gaps(ended: &Ended, to: &mut Value) {
    if ended.summary.promised_gap.is_some() {
        add_gaps(ended, to);
    }
}

/// Times of a completion that is still running. Those of the prompt are only known at its end.
#[derive(Debug, Clone)]
pub(super) struct SoFar {
    prompt_tokens: u32,
    begun: Instant,
    /// Time of the first token, and the number of tokens so far.
    first: Option<Instant>,
    tokens: u32,
}

impl SoFar {
    /// Timings of a completion that begins, with the number of its prompt tokens.
    pub(super) fn new(prompt_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            begun: Instant::now(),
            first: None,
            tokens: 0,
        }
    }

    /// Counts tokens that were generated at once.
    pub(super) fn take(&mut self, tokens: usize, now: Instant) {
        self.first.get_or_insert(now);
        self.tokens = self.tokens.saturating_add(tokens as u32);
    }

    /// The `timings` at `now`.
    pub(super) fn told(&self, now: Instant) -> Value {
        let ms = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64() * 1e3;
        let first = self.first.unwrap_or(now);
        let predicted = ms(first, now);
        // The first token is that of the prompt's pass.
        let n = self.tokens.saturating_sub(1);
        json!({
            "prompt_n": self.prompt_tokens,
            "prompt_ms": ms(self.begun, first),
            "predicted_n": self.tokens,
            "predicted_ms": predicted,
            "predicted_per_token_ms": per_token(n, predicted),
            "predicted_per_second": per_second(n, predicted),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn tokens_are_timed_from_the_first_one_on() {
        let mut so_far = SoFar::new(7);
        let at = |ms| so_far.begun + Duration::from_millis(ms);
        let (first, later) = (at(100), at(600));
        so_far.take(1, first);
        assert_eq!(so_far.told(first)["predicted_per_second"], 0.0);
        so_far.take(2, later);
        so_far.take(8, later);
        let told = so_far.told(later);
        assert_eq!(
            (&told["prompt_n"], &told["prompt_ms"]),
            (&json!(7), &json!(100.0))
        );
        assert_eq!(
            (&told["predicted_n"], &told["predicted_ms"]),
            (&json!(11), &json!(500.0))
        );
        assert_eq!(told["predicted_per_token_ms"], 50.0);
        assert_eq!(told["predicted_per_second"], 20.0);
    }
}
