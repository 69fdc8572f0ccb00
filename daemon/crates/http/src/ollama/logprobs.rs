//! Log-probabilities of generated tokens on Ollama's routes: a list beside the text, for all tokens
//! including reasoning and calls, but not for a stop string.
//!
//! In a stream they are in the line with the text, reasoning or call of their tokens; those of
//! marks are in the next line, at the latest in the next heartbeat.

use std::sync::Arc;

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
use rocmforge_service::decoding::LOGPROBS_MAX;
use serde::Serialize;
use serde_json::Value;

use super::super::openai::logprobs::OfText;
use super::super::sampling::small;
use super::line;

/// Number of most likely tokens to return for each generated one; `None` if no log-probabilities
/// are wanted. An invalid number is passed on and rejected later, as by Ollama, whether they are
/// wanted or not.
pub(super) fn wanted(logprobs: Option<bool>, top: Option<i64>) -> Option<i32> {
    let top = top.unwrap_or(0);
    let is_in_range = (0..=i64::from(LOGPROBS_MAX)).contains(&top);
    (logprobs == Some(true) || !is_in_range).then_some(small(top))
}

/// The log-probabilities of generated tokens that were not sent yet.
#[derive(Debug, Default)]
pub(super) struct Logprobs {
    /// The model whose tokens are scored; `None` if no log-probabilities are wanted.
    model: Option<Arc<LoadedModel>>,
    /// Log-probabilities for the next line.
    waiting: Vec<TokenScore>,
}

/// A line or a response with the log-probabilities of its tokens.
#[derive(Serialize)]
pub(super) struct Scored<'a> {
    #[serde(flatten)]
    members: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<OfText<'a>>,
}

impl Logprobs {
    /// A collector for the tokens of `model`, or one that collects nothing.
    pub(super) fn by(model: Option<&Arc<LoadedModel>>) -> Self {
        Self {
            model: model.cloned(),
            waiting: Vec::new(),
        }
    }

    /// Takes the scores of tokens whose text follows.
    pub(super) fn take(&mut self, scores: Vec<TokenScore>) {
        self.waiting.extend(scores);
    }

    /// Whether there are log-probabilities that were not sent yet.
    fn are_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The fields `members` with the collected log-probabilities, if there are any.
    pub(super) fn beside(&self, members: Value) -> Scored<'_> {
        let model = self.model.as_deref().filter(|_| self.are_waiting());
        let scores = &self.waiting[..];
        Scored {
            members,
            logprobs: model.map(|model| OfText { model, scores }),
        }
    }

    /// Writes a line with the collected log-probabilities.
    pub(super) fn line(&mut self, members: Value, out: &mut String) {
        match self.are_waiting() {
            true => line(&self.beside(members), out),
            false => line(&members, out),
        }
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_tokens_counts_only_with_logprobs_unless_it_is_out_of_range() {
        for (logprobs, top, expected) in [
            (None, None, None),
            (Some(false), Some(20), None),
            (None, Some(0), None),
            (Some(true), None, Some(0)),
            (Some(true), Some(20), Some(20)),
            (None, Some(21), Some(21)),
            (Some(false), Some(-1), Some(-1)),
            (Some(true), Some(i64::MAX), Some(i32::MAX)),
        ] {
            assert_eq!(wanted(logprobs, top), expected, "{logprobs:?} {top:?}");
        }
    }
}
