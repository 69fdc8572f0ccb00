//! The response of llama-server's `/completion`: a stream of pieces, or one object.

use std::sync::Arc;
use std::time::Instant;

use rocmforge_chat::parts::Part;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{FinishReason, TokenScore};
use rocmforge_failure::Failure;
use rocmforge_service::answers::Ended;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::error::Dialect;
use super::super::openai::logprobs::OfNative;
use super::super::reply::{Events, SSE, SSE_HEARTBEAT, event};
use super::super::timings::{self, SoFar};

/// Writer of the pieces of a completion.
#[derive(Debug)]
pub(super) struct Pieces {
    pub(super) model: String,
    pub(super) request_id: String,
    /// Whether no output is wanted, only the prompt's tokens.
    pub(super) only_prompt: bool,
    /// Fields of the last piece to return; all if the list is empty.
    pub(super) fields: Vec<String>,
    /// The model, if token probabilities are wanted, and whether those after the samplers.
    pub(super) scored: Option<(Arc<LoadedModel>, bool)>,
    /// Log-probabilities for the next piece.
    pub(super) scores: Vec<TokenScore>,
    /// The times so far, if each piece includes them.
    pub(super) so_far: Option<SoFar>,
}

/// A piece of output with the probabilities of its tokens.
#[derive(Serialize)]
pub(super) struct Piece<'a> {
    #[serde(flatten)]
    all: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<OfNative<'a>>,
}

impl Pieces {
    /// `completion_probabilities` of the next piece.
    fn probabilities(&self) -> Option<OfNative<'_>> {
        let (model, after_sampling) = self.scored.as_ref()?;
        Some(OfNative {
            model,
            scores: &self.scores,
            after_sampling: *after_sampling,
        })
    }

    /// The last piece, or the whole completion.
    pub(super) fn last(&self, content: &str, ended: &Ended) -> Piece<'_> {
        let (content, n) = match self.only_prompt {
            true => ("", 0),
            false => (content, ended.generated_tokens),
        };
        let all = json!({
            "index": 0,
            "content": content,
            "stop": true,
            "model": self.model,
            "tokens_predicted": n,
            "tokens_evaluated": ended.prompt_tokens,
            "tokens_cached": ended.reused_tokens,
            "has_new_line": content.contains('\n'),
            "truncated": false,
            "stop_type": stop_type(ended.finish),
            "stopping_word": ended.stop_string.as_deref().unwrap_or_default(),
            "timings": timings::of_ended(ended, n),
        });
        let is_wanted = |field: &str| {
            let mut fields = self.fields.iter();
            self.fields.is_empty() || fields.any(|wanted| wanted == field)
        };
        let probabilities = self.probabilities();
        Piece {
            completion_probabilities: probabilities
                .filter(|_| is_wanted("completion_probabilities")),
            all: match self.fields.is_empty() {
                true => all,
                false => {
                    let told = self.fields.iter().filter_map(|field| {
                        let value = all.pointer(&format!("/{field}"))?;
                        Some((field.clone(), value.clone()))
                    });
                    Value::Object(told.collect())
                }
            },
        }
    }
}

fn stop_type(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::EndOfText | FinishReason::StopToken { .. } => "eos",
        FinishReason::StopString { .. } => "word",
        FinishReason::MaxTokens | FinishReason::ContextFull => "limit",
    }
}

impl Events for Pieces {
    const CONTENT_TYPE: &'static str = SSE;

    fn begin(&mut self, _: &mut String) {}

    fn tokens(&mut self, n: usize) {
        if let Some(so_far) = &mut self.so_far {
            so_far.take(n, Instant::now());
        }
    }

    fn scores(&mut self, scores: Vec<TokenScore>) {
        // Those of text that was held back come with what is behind it.
        self.scores.extend(scores);
    }

    fn part(&mut self, part: Part, out: &mut String) {
        let Part::Text(text) = part else {
            return;
        };
        if self.only_prompt {
            return;
        }
        let mut all = json!({"index": 0, "content": text, "stop": false});
        if let Some(so_far) = &self.so_far {
            all["timings"] = so_far.told(Instant::now());
        }
        let piece = Piece {
            all,
            completion_probabilities: self.probabilities(),
        };
        event(None, &piece, out);
        self.scores.clear();
    }

    fn heartbeat(&mut self, out: &mut String) {
        out.push_str(SSE_HEARTBEAT);
    }

    fn end(&mut self, ended: &Ended, out: &mut String) {
        event(None, &self.last("", ended), out);
    }

    fn failed(&mut self, failure: &Failure, out: &mut String) {
        event(None, &Dialect::OpenAi.body(failure, &self.request_id), out);
    }
}
