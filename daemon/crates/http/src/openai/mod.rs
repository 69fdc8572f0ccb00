//! OpenAI's routes: models, chat completions, completions, embeddings, responses.

pub(super) mod chat;
pub(super) mod completions;
pub(super) mod embeddings;
mod fingerprint;
pub(super) mod logprobs;
pub(super) mod models;
pub(super) mod responses;

use serde::Deserialize;
use serde_json::{Value, json};

use rocmforge_service::answers::Ended;

/// `stream_options` of a request.
#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// A field as OpenAI's requests have it.
fn name(field: &str) -> String {
    field.strip_prefix("sampling.").unwrap_or(field).to_owned()
}

/// The most tokens of an answer, if it has a bound: -1 is without one, as
/// llama-server and LM Studio have it.
fn bounded(max_tokens: Option<i64>) -> Option<i64> {
    max_tokens.filter(|&n| n != -1)
}

/// What all answers of a request took; the prompt is computed for each and counted once.
fn usage(ended: &Ended) -> Value {
    json!({
        "prompt_tokens": ended.prompt_tokens,
        "completion_tokens": ended.all.tokens,
        "total_tokens": ended.prompt_tokens + ended.all.tokens,
        "prompt_tokens_details": {"cached_tokens": ended.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": ended.all.reasoning_tokens},
    })
}

fn finish_reason(ended: &Ended) -> &'static str {
    if ended.is_cut() {
        "length"
    } else if ended.told_calls > 0 && !ended.cuts_call {
        "tool_calls"
    } else {
        "stop"
    }
}
