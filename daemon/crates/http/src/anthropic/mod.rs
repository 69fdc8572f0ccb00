//! Anthropic's routes: `POST /v1/messages` and `/v1/messages/count_tokens`.

mod request;
mod stream;
mod tools;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_chat::parts::Part;
use rocmforge_chat::tool_calls::ToolCall;
use rocmforge_failure::{Failure, Violations};
use rocmforge_service::answers::Ended;
use serde_json::{Map, Value, json};

use self::request::MessagesRequest;
use self::stream::MessageEvents;
use super::Http;
use super::call::{Call, fresh_id, json as answer};
use super::count::Counted;
use super::{count, reply, start, timings};

/// Handler of `POST /v1/messages`.
pub(super) async fn messages(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /v1/messages", &request);
    let result = complete(&call, request).await;
    call.respond(result)
}

async fn complete(call: &Call, request: Request) -> Result<Response, Failure> {
    let mut asked: MessagesRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    let streams = asked.stream == Some(true);
    let (conversation, violations) = asked.conversation()?;
    let model = conversation.model.clone();
    let mut generation = start::chat(call, conversation, violations).await?;
    let id = format!("msg_{}", fresh_id());
    if streams {
        generation.tell_pieces();
        let prompt_tokens = generation.prompt_tokens();
        let request_id = call.id.as_str().to_owned();
        let events = MessageEvents::new(id, model, request_id, prompt_tokens);
        return reply::stream(generation, events, call).await;
    }
    let (parts, ended) = generation.collect().await?;
    let content: Vec<_> = parts.into_iter().filter_map(block).collect();
    answer(&json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason(&ended),
        "stop_sequence": ended.stop_string,
        "usage": usage(&ended),
    }))
}

/// Converts a part of an output to a content block.
fn block(part: Part) -> Option<Value> {
    Some(match part {
        Part::Text(text) => json!({"type": "text", "text": text}),
        // Thoughts are not signed here; what comes back is not checked.
        Part::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Part::Call(call) => {
            let Some(input) = input(&call) else {
                return Some(json!({"type": "text", "text": call.as_text()}));
            };
            json!({"type": "tool_use", "id": tool_use_id(), "name": call.name, "input": input})
        }
        // Calls of a whole answer are whole.
        Part::Arguments(_) => return None,
    })
}

/// A call's arguments as an object; `None` if they are not valid, for example because the output
/// was cut: clients would call the tool without arguments, so the call is sent as text.
fn input(call: &ToolCall) -> Option<Map<String, Value>> {
    serde_json::from_str(&call.arguments).ok()
}

fn tool_use_id() -> String {
    format!("toolu_{}", fresh_id())
}

fn stop_reason(ended: &Ended) -> &'static str {
    use rocmforge_engine::api::FinishReason;

    match ended.finish {
        FinishReason::MaxTokens => "max_tokens",
        FinishReason::ContextFull => "model_context_window_exceeded",
        FinishReason::StopString { .. } => "stop_sequence",
        FinishReason::EndOfText if ended.calls > 0 => "tool_use",
        FinishReason::EndOfText | FinishReason::StopToken { .. } => "end_turn",
    }
}

/// Token counts of a response. Prompt tokens from the prefix cache do not count as input.
fn usage(ended: &Ended) -> Value {
    let read = ended.reused_tokens;
    let computed = ended.prompt_tokens.saturating_sub(read);
    let mut usage = usage_of(computed, read, ended.generated_tokens);
    usage["output_tokens_details"] = json!({"thinking_tokens": ended.all.reasoning_tokens});
    timings::add_promised_gaps(ended, &mut usage);
    usage
}

fn usage_of(input: u32, read: u32, output: u32) -> Value {
    json!({
        "input_tokens": input,
        "output_tokens": output,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": read,
    })
}

/// Handler of `POST /v1/messages/count_tokens`.
pub(super) async fn count_tokens(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /v1/messages/count_tokens", &request);
    let result = count(&call, request).await;
    call.respond(result)
}

async fn count(call: &Call, request: Request) -> Result<Response, Failure> {
    let counted = Counted::anthropic(request.uri());
    let mut asked: MessagesRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    let (conversation, violations) = asked.for_counting()?;
    count::input_tokens(call, conversation, violations, counted).await
}

/// The name of a field in Anthropic's requests.
fn name(field: &str) -> String {
    match field {
        "sampling.stop" => "stop_sequences".to_owned(),
        _ => field.strip_prefix("sampling.").unwrap_or(field).to_owned(),
    }
}

/// An empty list of violations that uses these names.
fn violations() -> Violations {
    Violations::named(name)
}
