//! OpenAI's routes (models, chat completions, completions, embeddings, responses), and what they
//! share.

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

/// The name of a field in OpenAI's requests.
fn name(field: &str) -> String {
    field.strip_prefix("sampling.").unwrap_or(field).to_owned()
}

/// The limit of generated tokens, if there is one: -1 means none, as in llama-server and LM Studio.
fn bounded(max_tokens: Option<i64>) -> Option<i64> {
    max_tokens.filter(|&n| n != -1)
}

/// Token counts of all completions of a request; the prompt counts once.
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
