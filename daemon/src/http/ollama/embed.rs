//! `POST /api/embed`, and `/api/embeddings` as older clients have it: vectors of length 1.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_service::failure::Failure;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, json as answer};
use super::super::embedding::{Asked, embed, texts};
use super::super::prompt::whole_number;

/// `truncate` is taken and does nothing: a text that is too long is refused, not cut.
#[derive(Debug, Deserialize)]
struct EmbedRequest {
    #[serde(default)]
    model: String,
    #[serde(default)]
    input: Value,
    #[serde(default)]
    prompt: Value,
    dimensions: Option<i64>,
    options: Option<Options>,
}

#[derive(Debug, Default, Deserialize)]
struct Options {
    #[serde(default, deserialize_with = "whole_number")]
    num_ctx: Option<i64>,
}

/// The handler of the newer one.
pub(in super::super) async fn embed_many(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /api/embed", &request);
    let result = many(&call, request).await;
    call.respond(result)
}

/// The handler of the older one.
pub(in super::super) async fn embed_one(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /api/embeddings", &request);
    let result = one(&call, request).await;
    call.respond(result)
}

async fn many(call: &Call, request: Request) -> Result<Response, Failure> {
    let begin = Instant::now();
    let asked: EmbedRequest = call.read(request).await?;
    let embedded = embed(
        call,
        Asked {
            model: &asked.model,
            texts: texts(asked.input, "input")?,
            field: "input",
            dimensions: asked.dimensions,
            n_ctx: asked.options.and_then(|options| options.num_ctx),
        },
    )
    .await?;
    let vectors = embedded.vectors.into_iter().map(|(vector, _)| vector);
    answer(&json!({
        "model": asked.model,
        "embeddings": vectors.collect::<Vec<_>>(),
        "total_duration": u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX),
        "prompt_eval_count": embedded.tokens,
    }))
}

async fn one(call: &Call, request: Request) -> Result<Response, Failure> {
    let asked: EmbedRequest = call.read(request).await?;
    let mut embedded = embed(
        call,
        Asked {
            model: &asked.model,
            texts: texts(asked.prompt, "prompt")?,
            field: "prompt",
            dimensions: asked.dimensions,
            n_ctx: asked.options.and_then(|options| options.num_ctx),
        },
    )
    .await?;
    answer(&json!({"embedding": embedded.vectors.pop().map(|(vector, _)| vector)}))
}
