//! Lists of models in Ollama's format: `/api/version`, `/api/tags`, `/api/ps`, `/api/show`.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_chat::tool_calls::forms;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{ModelStatus, SegmentState};
use rocmforge_failure::Failure;
use rocmforge_service::defaults::Defaults;
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, json as answer, with_type};
use super::super::embedding::capabilities;
use super::time::{in_time, rfc3339};

/// The version of Ollama's API that the daemon reports, by which clients decide which features
/// exist. Codex requires 0.13.4, which added `/v1/responses`.
const SPOKEN_VERSION: &str = "0.13.4";
/// `expires_at` of models without a `keep_alive`: they stay as long as nobody needs their memory.
const NEVER_MS: i64 = 4_102_444_800_000;

/// `GET /`, by which clients check that a server is there.
pub(in super::super) async fn root() -> Response {
    with_type(
        "text/plain; charset=utf-8",
        Body::from("rocmforged is running\n"),
    )
}

/// Handler of `GET /api/version`.
pub(in super::super) async fn version(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /api/version", &request);
    let body = json!({"version": SPOKEN_VERSION, "rocmforged": env!("CARGO_PKG_VERSION")});
    call.respond(answer(&body))
}

fn details(model: Option<&LoadedModel>) -> Value {
    let info = model.map(|model| model.model().info());
    let family = info.map_or("", |info| info.architecture);
    let families: Vec<_> = info.iter().map(|info| info.architecture).collect();
    let quantization = info.and_then(|info| {
        // A file that does not say it has the type that most of its bytes have.
        let most = || info.quantization.first().map(|share| share.ty);
        info.file_type.or_else(most)
    });
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": families,
        "parameter_size": info.map_or(String::new(), |info| size(info.n_params)),
        "quantization_level": quantization.unwrap_or_default(),
    })
}

/// A number of parameters, formatted such as `7.6B`.
fn size(n_params: u64) -> String {
    match n_params as f64 {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n if n >= 1e6 => format!("{:.2}M", n / 1e6),
        n => format!("{:.0}K", n / 1e3),
    }
}

/// A substitute for the digest of a file, which is not read: made of its size and modification
/// time.
fn digest(bytes: u64, mtime_unix_ms: i64) -> String {
    format!("{bytes:032x}{mtime_unix_ms:032x}")
}

/// Handler of `GET /api/tags`: all models.
pub(in super::super) async fn tags(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /api/tags", &request);
    let result = listed(&call).await;
    call.respond(result)
}

async fn listed(call: &Call) -> Result<Response, Failure> {
    let models = call.service.available().await?;
    let models: Vec<_> = models
        .iter()
        .map(|available| {
            let model = available.loaded().map(|status| &*status.model);
            json!({
                "name": available.name(),
                "model": available.name(),
                "modified_at": rfc3339(available.mtime_unix_ms()),
                "size": available.file_bytes(),
                "digest": digest(available.file_bytes(), available.mtime_unix_ms()),
                "details": details(model),
            })
        })
        .collect();
    answer(&json!({"models": models}))
}

/// Handler of `GET /api/ps`: loaded models.
pub(in super::super) async fn ps(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /api/ps", &request);
    let snapshot = call.service.engine.snapshot();
    let models = snapshot.models.iter();
    let models: Vec<_> = models
        .filter(|status| !http.keep_alives.is_gone(status))
        .map(|status| running(&call, status, http.keep_alives.left(status.model.name())))
        .collect();
    call.respond(answer(&json!({"models": models})))
}

fn running(call: &Call, status: &ModelStatus, left: Option<Duration>) -> Value {
    let model = &status.model;
    let file = model.file();
    let mtime_ms = i64::try_from(file.identity().mtime_ns / 1_000_000).unwrap_or(i64::MAX);
    let resident =
        |segment: &&rocmforge_engine::api::SegmentStatus| segment.state == SegmentState::Resident;
    let weights: u64 = status.segments.iter().map(|segment| segment.bytes).sum();
    let there: u64 = status
        .segments
        .iter()
        .filter(resident)
        .map(|s| s.bytes)
        .sum();
    let n_ctx = model
        .model()
        .info()
        .n_ctx_train
        .min(call.service.limits.n_ctx_max);
    json!({
        "name": model.name(),
        "model": model.name(),
        "size": weights,
        "size_vram": there,
        "digest": digest(file.size_bytes(), mtime_ms),
        "details": details(Some(model)),
        "expires_at": left.map_or_else(|| rfc3339(NEVER_MS), in_time),
        "context_length": n_ctx,
    })
}

#[derive(Debug, Deserialize)]
struct ShowRequest {
    model: Option<String>,
    /// Older name of the field `model`; some clients send both.
    name: Option<String>,
}

/// Handler of `POST /api/show`: details of one model, which is loaded for that.
pub(in super::super) async fn show(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /api/show", &request);
    let result = shown(&call, request).await;
    call.respond(result)
}

async fn shown(call: &Call, request: Request) -> Result<Response, Failure> {
    let asked: ShowRequest = call.read_small(request).await?;
    let called = asked.model.filter(|name| !name.is_empty()).or(asked.name);
    let called = call.meant(called.unwrap_or_default()).await?;
    let model = call.model(&called).await?;
    let info = model.model().info();
    let template = model.template().and_then(|template| template.source().ok());
    let template = template.unwrap_or_default();
    let mut capabilities = capabilities(&model);
    if forms::reads(template) {
        capabilities.push("tools");
    }
    if forms::thinks(template) {
        capabilities.push("thinking");
    }
    let architecture = info.architecture;
    let mtime_ms = model.file().identity().mtime_ns / 1_000_000;
    let mut described = json!({
        "general.architecture": architecture,
        "general.parameter_count": info.n_params,
    });
    for (key, value) in [
        ("context_length", info.n_ctx_train),
        ("embedding_length", info.n_embd),
        ("block_count", info.n_layer),
        ("attention.head_count", info.n_head),
        ("attention.head_count_kv", info.n_head_kv),
        ("vocab_size", info.n_vocab),
    ] {
        described[format!("{architecture}.{key}")] = value.into();
    }
    answer(&json!({
        "modelfile": "",
        "parameters": parameters(&call.service.defaults(model.name())),
        "template": template,
        "details": details(Some(&model)),
        "model_info": described,
        "capabilities": capabilities,
        "modified_at": rfc3339(i64::try_from(mtime_ms).unwrap_or(i64::MAX)),
    }))
}

/// The defaults of a declared model as lines of a Modelfile, without the daemon's own defaults.
fn parameters(defaults: &Defaults) -> String {
    let (integer, real) = (|n: i32| n.to_string(), |x: f32| x.to_string());
    let rows = [
        ("temperature", defaults.temperature.map(real)),
        ("top_k", defaults.top_k.map(integer)),
        ("top_p", defaults.top_p.map(real)),
        ("min_p", defaults.min_p.map(real)),
        ("repeat_penalty", defaults.repeat_penalty.map(real)),
        ("presence_penalty", defaults.presence_penalty.map(real)),
        ("frequency_penalty", defaults.frequency_penalty.map(real)),
        ("repeat_last_n", defaults.penalty_last_n.map(integer)),
        ("num_predict", defaults.max_tokens.map(integer)),
    ];
    let set = rows
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)));
    let lines = set.map(|(key, value)| format!("{key:<30} {value}"));
    lines.collect::<Vec<_>>().join("\n")
}
