//! `GET /v1/models`, for OpenAI's and Anthropic's clients: loaded models, and files that are loaded
//! at their first use.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_failure::Failure;
use rocmforge_service::files::Available;
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, json as answer, percent_decoded};
use super::super::embedding::capabilities;
use super::super::error::Dialect;
use super::super::ollama::time::rfc3339;

/// Context length of a model, if it is loaded.
fn n_ctx(call: &Call, model: &Available) -> Option<u32> {
    let trained = model.loaded()?.model.model().info().n_ctx_train;
    Some(trained.min(call.service.limits.n_ctx_max))
}

fn openai(call: &Call, model: &Available) -> Value {
    let mut value = json!({
        "id": model.name(),
        "object": "model",
        "created": model.mtime_unix_ms() / 1000,
        "owned_by": "rocmforge",
    });
    if let Some(real) = model.alias_of() {
        // vLLM's word for the model behind a name.
        value["root"] = real.into();
    }
    if let Some(status) = model.loaded() {
        let info = status.model.model().info();
        value["capabilities"] = capabilities(&status.model).into();
        value["meta"] = json!({
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_vocab": info.n_vocab,
            "n_params": info.n_params,
            "size": info.tensor_bytes,
        });
        // What vLLM's clients ask for.
        value["max_model_len"] = n_ctx(call, model).into();
    }
    value
}

fn anthropic(call: &Call, model: &Available) -> Value {
    json!({
        "type": "model",
        "id": model.name(),
        "display_name": model.name(),
        "created_at": rfc3339(model.mtime_unix_ms()),
        "max_input_tokens": n_ctx(call, model),
    })
}

/// Handler of the list of models.
pub(in super::super) async fn list(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /v1/models", &request);
    let result = listed(&call).await;
    call.respond(result)
}

async fn listed(call: &Call) -> Result<Response, Failure> {
    let models = call.service.available().await?;
    if call.dialect == Dialect::Anthropic {
        let data: Vec<_> = models.iter().map(|model| anthropic(call, model)).collect();
        let (first, last) = (
            models.first().map(Available::name),
            models.last().map(Available::name),
        );
        return answer(&json!({
            "data": data, "has_more": false, "first_id": first, "last_id": last,
        }));
    }
    let data: Vec<_> = models.iter().map(|model| openai(call, model)).collect();
    answer(&json!({"object": "list", "data": data}))
}

/// Handler of one model.
pub(in super::super) async fn get(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /v1/models/MODEL", &request);
    let path = request.uri().path().to_owned();
    let result = one(&call, &path).await;
    call.respond(result)
}

async fn one(call: &Call, path: &str) -> Result<Response, Failure> {
    let name = percent_decoded(path.strip_prefix("/v1/models/").unwrap_or_default());
    let model = call.service.available_as(&name).await?;
    match call.dialect {
        Dialect::Anthropic => answer(&anthropic(call, &model)),
        Dialect::OpenAi | Dialect::Ollama => answer(&openai(call, &model)),
    }
}
