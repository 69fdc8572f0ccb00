//! OpenAI's routes: models, chat completions, completions, responses.

pub(super) mod chat;
pub(super) mod completions;
pub(super) mod models;
pub(super) mod responses;

use serde::Deserialize;
use serde_json::{Value, json};

use super::reply::Ended;

/// What a stream says beside the answer.
#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// A field as OpenAI's requests have it.
fn name(field: &str) -> String {
    field.strip_prefix("sampling.").unwrap_or(field).to_owned()
}

fn usage(ended: &Ended) -> Value {
    json!({
        "prompt_tokens": ended.prompt_tokens,
        "completion_tokens": ended.generated_tokens,
        "total_tokens": ended.prompt_tokens + ended.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": ended.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": ended.reasoning_tokens},
    })
}

fn finish_reason(ended: &Ended) -> &'static str {
    if ended.is_cut() {
        "length"
    } else if ended.calls > 0 {
        "tool_calls"
    } else {
        "stop"
    }
}
