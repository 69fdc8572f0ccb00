//! Log-probabilities of generated tokens on Ollama's routes: a list beside the text, of all tokens,
//! those of thoughts and calls too, but none of a stop string.
//!
//! In a stream they stand in the line that brings the text, the thought or the call of their
//! tokens; those of marks stand in the next line. None waits longer than the next sign of life,
//! which is such a line, too.

use std::sync::Arc;

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::TokenScore;
use rocmforge_service::decoding::LOGPROBS_MAX;
use serde::Serialize;
use serde_json::Value;

use super::super::openai::logprobs::OfText;
use super::super::sampling::small;
use super::line;

/// How many of the most likely tokens are returned for each generated one; nothing where no
/// log-probabilities are wanted. A number that is out of range is told all the same: it is refused,
/// as by Ollama, whether they are wanted or not.
pub(super) fn wanted(logprobs: Option<bool>, top: Option<i64>) -> Option<i32> {
    let top = top.unwrap_or(0);
    let is_in_range = (0..=i64::from(LOGPROBS_MAX)).contains(&top);
    (logprobs == Some(true) || !is_in_range).then_some(small(top))
}

/// The log-probabilities of generated tokens that were not sent yet.
#[derive(Debug, Default)]
pub(super) struct Logprobs {
    /// The model that answers.
    model: Option<Arc<LoadedModel>>,
    /// Log-probabilities for the next line.
    waiting: Vec<TokenScore>,
}

/// A line with the log-probabilities of its tokens, or a whole answer.
#[derive(Serialize)]
pub(super) struct Scored<'a> {
    #[serde(flatten)]
    members: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<OfText<'a>>,
}

impl Logprobs {
    /// Of an answer by this model, which gives none where none are wanted.
    pub(super) fn by(model: Option<&Arc<LoadedModel>>) -> Self {
        Self {
            model: model.cloned(),
            waiting: Vec::new(),
        }
    }

    /// Takes those of tokens whose text comes next.
    pub(super) fn take(&mut self, scores: Vec<TokenScore>) {
        self.waiting.extend(scores);
    }

    /// Whether there are log-probabilities that were not sent yet.
    fn are_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// These members with the log-probabilities that wait, if there are any.
    pub(super) fn beside(&self, members: Value) -> Scored<'_> {
        let model = self.model.as_deref().filter(|_| self.are_waiting());
        let scores = &self.waiting[..];
        Scored {
            members,
            logprobs: model.map(|model| OfText { model, scores }),
        }
    }

    /// Writes a line that brings those that wait.
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
