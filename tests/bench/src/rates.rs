//! What many clients at once come to: rates of all together, and the longest gap of one.

use std::time::Instant;

use anyhow::{Result, bail, ensure};

/// What a client's request came to.
pub(crate) struct Text {
    /// When each token came.
    pub(crate) tokens: Vec<Instant>,
    /// When it was sent.
    pub(crate) asked: Instant,
    /// When the stream was over.
    pub(crate) ended: Instant,
}

/// Rates of some runs, in tokens a second.
#[derive(Default)]
pub(crate) struct Rates {
    /// Of all tokens, from the first request to the last end.
    pub(crate) together: Vec<f64>,
    /// Of those between the last first token and the first end.
    pub(crate) decode: Vec<f64>,
    /// Milliseconds: the longest gap between two tokens of a client.
    pub(crate) gap: Vec<f64>,
}

impl Rates {
    /// Adds what a run of all clients came to.
    ///
    /// # Errors
    /// The first text ended before the last one began, or a client has no tokens.
    pub(crate) fn count(&mut self, texts: &[Text]) -> Result<()> {
        let begin = texts.iter().map(|t| t.asked).min();
        let end = texts.iter().map(|t| t.ended).max();
        let firsts = texts.iter().filter_map(|t| t.tokens.first()).max();
        let ends = texts.iter().filter_map(|t| t.tokens.last()).min();
        let (Some(begin), Some(end), Some(&first), Some(&last)) = (begin, end, firsts, ends) else {
            bail!("a client without tokens");
        };
        let all = texts.iter().map(|t| t.tokens.len()).sum::<usize>();
        self.together.push(all as f64 / (end - begin).as_secs_f64());
        ensure!(
            first < last,
            "the first client ended before the last one began: ask for longer texts"
        );
        let in_between = |t: &Text| {
            t.tokens
                .iter()
                .filter(|at| **at > first && **at <= last)
                .count()
        };
        let decoded = texts.iter().map(in_between).sum::<usize>();
        self.decode
            .push(decoded as f64 / (last - first).as_secs_f64());
        let gaps = texts
            .iter()
            .flat_map(|t| t.tokens.windows(2).map(|w| (w[1] - w[0]).as_secs_f64()));
        self.gap.push(gaps.fold(0.0, f64::max) * 1e3);
        Ok(())
    }
}
