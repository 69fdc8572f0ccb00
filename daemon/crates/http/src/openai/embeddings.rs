//! `POST /v1/embeddings`: a vector of length 1 for each text, as numbers or, as the Python library
//! asks for them, as base64 of little-endian f32.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rocmforge_failure::{self as failure, Failure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::Http;
use super::super::call::Call;
use super::super::embedding::{Asked, embed, texts, vector_bytes};
use super::super::prompt::model_name;
use super::super::written::List;

#[derive(Debug, Deserialize)]
struct EmbeddingsRequest {
    #[serde(default, deserialize_with = "model_name")]
    model: String,
    #[serde(default)]
    input: Value,
    encoding_format: Option<String>,
    dimensions: Option<i64>,
    /// Whether a text longer than the context is truncated.
    truncate: Option<bool>,
    /// Purpose of the embedding. Jina's name is `task`, that of sentence-transformers
    /// `prompt_name`.
    #[serde(alias = "task", alias = "prompt_name")]
    input_type: Option<String>,
}

/// Handler of `POST /v1/embeddings`.
pub(in super::super) async fn embeddings(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "POST /v1/embeddings", &request);
    let result = complete(&call, request).await;
    call.respond(result)
}

async fn complete(call: &Call, request: Request) -> Result<Response, Failure> {
    let asked: EmbeddingsRequest = call.read(request).await?;
    embedded(call, asked).await
}

/// The response to a body that another route has read.
pub(in super::super) async fn answered(call: &Call, body: Value) -> Result<Response, Failure> {
    let asked: EmbeddingsRequest = serde_json::from_value(body)
        .map_err(|error| failure::invalid("body", &error.to_string()))?;
    embedded(call, asked).await
}

async fn embedded(call: &Call, mut asked: EmbeddingsRequest) -> Result<Response, Failure> {
    asked.model = call.meant(asked.model).await?;
    let as_base64 = match asked.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            let why = "give \"float\" or \"base64\"";
            return Err(failure::invalid("encoding_format", why));
        }
    };
    let embedded = embed(
        call,
        Asked {
            model: &asked.model,
            texts: texts(asked.input, "input")?,
            field: "input",
            dimensions: asked.dimensions,
            n_ctx: None,
            truncate: asked.truncate == Some(true),
            input_type: asked.input_type,
            norm: None,
            each_token: false,
        },
    )
    .await?;
    let (model, tokens) = (Value::from(asked.model), embedded.tokens);
    let list = List {
        begin: "{\"object\":\"list\",\"data\":[".to_owned(),
        n: embedded.vectors.len(),
        source_bytes: vector_bytes(&embedded),
        item: move |index, out: &mut Vec<u8>| {
            let (vector, _): &(Vec<f32>, u32) = &embedded.vectors[index];
            let embedding = match as_base64 {
                true => {
                    let bytes: Vec<u8> = vector.iter().flat_map(|v| v.to_le_bytes()).collect();
                    Values::Base64(STANDARD.encode(bytes))
                }
                false => Values::Numbers(vector),
            };
            let object = "embedding";
            serde_json::to_writer(
                out,
                &Embedding {
                    object,
                    index,
                    embedding,
                },
            )
        },
        end: format!(
            "],\"model\":{model},\"usage\":{{\"prompt_tokens\":{tokens},\"total_tokens\":{tokens}}}}}"
        ),
    };
    list.answer(call)
}

#[derive(Debug, Serialize)]
struct Embedding<'a> {
    object: &'static str,
    index: usize,
    embedding: Values<'a>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Values<'a> {
    Numbers(&'a [f32]),
    Base64(String),
}
