//! `POST /api/embed`, and the older `/api/embeddings`: embeddings of length 1.
//!
//! A request without a text has the model loaded, and is answered with no vectors. A text that is
//! too long is cut, unless `truncate` is false.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_failure::Failure;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, json as answer};
use super::super::embedding::{Asked, embed, texts, vector_bytes};
use super::super::prompt::model_name;
use super::super::sampling::whole_number;
use super::super::written::List;
use super::keep_alive::{self, KeepAlives, Using};

#[derive(Debug, Deserialize)]
struct EmbedRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    #[serde(default)]
    input: Value,
    #[serde(default)]
    prompt: Value,
    dimensions: Option<i64>,
    truncate: Option<bool>,
    options: Option<Options>,
    keep_alive: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
struct Options {
    #[serde(default, deserialize_with = "whole_number")]
    num_ctx: Option<i64>,
}

/// Handler of `POST /api/embed`.
pub(in super::super) async fn embed_many(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /api/embed", &request);
    let result = many(&call, &http.keep_alives, request).await;
    call.respond(result)
}

/// Handler of `POST /api/embeddings`.
pub(in super::super) async fn embed_one(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /api/embeddings", &request);
    let result = one(&call, &http.keep_alives, request).await;
    call.respond(result)
}

/// The model of a request, marked as in use.
async fn used(
    call: &Call,
    keep_alives: &Arc<KeepAlives>,
    asked: &EmbedRequest,
) -> Result<Using, Failure> {
    let keep = keep_alive::read(asked.keep_alive.as_ref())?;
    let model = call.model(&asked.model).await?;
    Ok(keep_alives.begin(model.name(), keep))
}

async fn many(
    call: &Call,
    keep_alives: &Arc<KeepAlives>,
    request: Request,
) -> Result<Response, Failure> {
    let begin = Instant::now();
    let mut asked: EmbedRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    let _using = used(call, keep_alives, &asked).await?;
    let duration = || u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    if says_nothing(&asked.input) {
        return answer(&json!({
            "model": asked.model,
            "embeddings": [],
            "total_duration": duration(),
            "prompt_eval_count": 0,
        }));
    }
    let embedded = embed(
        call,
        Asked {
            model: &asked.model,
            texts: texts(asked.input, "input")?,
            field: "input",
            dimensions: asked.dimensions,
            n_ctx: asked.options.and_then(|options| options.num_ctx),
            truncate: asked.truncate.unwrap_or(true),
            input_type: None,
            norm: None,
            each_token: false,
        },
    )
    .await?;
    let (model, tokens) = (Value::from(asked.model), embedded.tokens);
    let list = List {
        begin: format!("{{\"model\":{model},\"embeddings\":["),
        n: embedded.vectors.len(),
        source_bytes: vector_bytes(&embedded),
        end: format!(
            "],\"total_duration\":{},\"prompt_eval_count\":{tokens}}}",
            duration()
        ),
        item: move |at, out: &mut Vec<u8>| {
            let (vector, _): &(Vec<f32>, u32) = &embedded.vectors[at];
            serde_json::to_writer(out, vector)
        },
    };
    list.answer(call)
}

/// Whether a request has no text to embed.
fn says_nothing(input: &Value) -> bool {
    match input {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => false,
    }
}

#[derive(Debug, Serialize)]
struct One {
    embedding: Option<Vec<f32>>,
}

async fn one(
    call: &Call,
    keep_alives: &Arc<KeepAlives>,
    request: Request,
) -> Result<Response, Failure> {
    let mut asked: EmbedRequest = call.read(request).await?;
    asked.model = call.meant(asked.model).await?;
    let _using = used(call, keep_alives, &asked).await?;
    if says_nothing(&asked.prompt) {
        return answer(&json!({"embedding": []}));
    }
    let mut embedded = embed(
        call,
        Asked {
            model: &asked.model,
            texts: texts(asked.prompt, "prompt")?,
            field: "prompt",
            dimensions: asked.dimensions,
            n_ctx: asked.options.and_then(|options| options.num_ctx),
            truncate: asked.truncate.unwrap_or(true),
            input_type: None,
            norm: None,
            each_token: false,
        },
    )
    .await?;
    let embedding = embedded.vectors.pop().map(|(vector, _)| vector);
    answer(&One { embedding })
}
