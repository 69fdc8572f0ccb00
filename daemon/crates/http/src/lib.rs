//! HTTP for applications that speak OpenAI, Anthropic, Ollama or llama-server.
//!
//! ```text
//! connection (listen) -> gate (access): request id, who calls, role
//!   -> handler: body within bounds (body) -> service (start)
//!   -> JSON at once, a long list as it is written (written), or a stream of events (reply);
//!      refusals in the dialect's words (error)
//!   -> connection: counted, and ended where nobody reads it (sending)
//! ```
//!
//! Over TCP a handshake of TLS comes first where a certificate is configured (tls, handshake).
//!
//! *Invariant:* every body, list and connection has a bound (`body.rs`, `listen.rs`; fuzz target
//! `http`). The bodies' types never leave this crate, and nothing of the rules of requests is
//! decided here but how a dialect spells them.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

mod access;
mod adapter_scales;
mod allowed;
mod anthropic;
mod body;
mod call;
mod changes;
mod control;
mod count;
mod embedding;
mod error;
mod fault;
mod format;
mod handshake;
mod image_urls;
mod listen;
mod llama;
mod lora;
mod media;
mod metrics;
mod model_events;
mod model_store;
mod ollama;
mod openai;
mod packed;
mod path;
mod picture;
mod prompt;
mod pulls;
mod refusals;
mod reply;
mod rerank;
mod samplers;
mod sampling;
mod sending;
mod small_file;
mod sse;
mod start;
mod template;
mod timings;
mod tls;
mod token;
mod ui;
mod why;
mod written;

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use axum::Router;
use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::middleware;
use axum::response::Response;
use axum::routing::{self, MethodRouter};
use rocmforge_connections::{Replies, Runtimes};
use rocmforge_hub::Hosts;
use rocmforge_service::Service;
use rustls::ServerConfig;

pub use self::allowed::Allowed;
use self::call::Call;
use self::control::Controls;
use self::image_urls::ImageUrls;
pub use self::listen::{Phase, serve};
use self::ollama::KeepAlives;
use self::openai::responses::Memory;
use self::pulls::Pulls;
pub use self::pulls::{PullConfig, hub_token};
pub use self::tls::{Tls, TlsFault};
pub use self::token::Tokens;
pub use self::ui::ShownSetting;

/// The HTTP listeners, and what clients over TCP need. Empty by default.
#[derive(Debug, Default)]
pub struct HttpListeners {
    /// A Unix socket to serve.
    pub unix: Option<UnixListener>,
    /// TCP addresses to serve.
    pub tcp: Vec<TcpListener>,
    /// Whether the service manager also holds the sockets: clients that connect while the daemon
    /// drains then wait for its successor.
    pub kept: bool,
    /// Bearer tokens, one of which clients over TCP have to send; `None` if none is needed.
    pub tokens: Option<Tokens>,
    /// The certificate of the addresses, if they are served with TLS.
    pub tls: Option<Tls>,
    /// Origins and hosts besides this machine's own that are allowed without a token.
    pub allowed: Allowed,
    /// Where models are downloaded from, and where to.
    pub pulls: PullConfig,
    /// Hosts from which images of requests are fetched.
    pub image_hosts: Hosts,
    /// The settings in force, for the page of `/ui`.
    pub settings: Vec<ShownSetting>,
}

/// State that all handlers share.
#[derive(Debug)]
pub struct Http {
    service: Arc<Service>,
    runtimes: Runtimes,
    /// Responses that are being sent.
    replies: Arc<Replies>,
    /// The tokens that clients over TCP need. The lock is held only to copy or replace them.
    tokens: RwLock<Option<Tokens>>,
    /// TLS certificate and key, if configured; a reload changes them.
    tls: RwLock<Option<Tls>>,
    /// Origins and hosts that are allowed without a token.
    allowed: Allowed,
    /// When the weights of models are freed by `keep_alive`.
    keep_alives: Arc<KeepAlives>,
    /// Earlier responses, to which requests may refer.
    memory: Arc<Memory>,
    /// Running responses that a client can control.
    controls: Arc<Controls>,
    /// Downloads of models.
    pulls: Arc<Pulls>,
    /// Fetches images that requests name by URL.
    image_urls: Arc<ImageUrls>,
    /// The settings that were in force at the start.
    settings: Vec<ShownSetting>,
}

impl Http {
    /// The state for requests to `service`: access over TCP (`tokens`, `tls`, `allowed`),
    /// downloads, settings for `/ui`, and hosts of images.
    pub fn new(
        service: Arc<Service>,
        runtimes: Runtimes,
        tokens: Option<Tokens>,
        tls: Option<Tls>,
        allowed: Allowed,
        (pulls, settings, image_hosts): (PullConfig, Vec<ShownSetting>, Hosts),
    ) -> Arc<Self> {
        if let Some(warning) = tls.as_ref().and_then(|tls| tls.warning(SystemTime::now())) {
            tracing::warn!("{warning}");
        }
        let (tokens, tls) = (RwLock::new(tokens), RwLock::new(tls));
        Arc::new(Self {
            replies: Replies::new(&service.sending),
            service,
            runtimes,
            tokens,
            tls,
            allowed,
            keep_alives: Arc::default(),
            memory: Arc::default(),
            controls: Arc::default(),
            pulls: Pulls::new(pulls),
            image_urls: Arc::new(ImageUrls::new(image_hosts)),
            settings,
        })
    }

    /// The present TLS configuration, if there is one.
    fn tls(&self) -> Option<Arc<ServerConfig>> {
        let tls = self.tls.read().unwrap_or_else(PoisonError::into_inner);
        tls.as_ref().map(Tls::config)
    }

    /// Replaces the certificate for new handshakes; open connections stay.
    pub fn set_tls(&self, tls: Tls) {
        let mut place = self.tls.write().unwrap_or_else(PoisonError::into_inner);
        *place = Some(tls);
    }

    fn tokens(&self) -> Option<Tokens> {
        let tokens = self.tokens.read();
        tokens.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the tokens that requests over TCP need.
    pub fn set_tokens(&self, tokens: Tokens) {
        let mut place = self.tokens.write().unwrap_or_else(PoisonError::into_inner);
        *place = Some(tokens);
    }
}

/// All routes, behind the access checks.
pub(crate) fn router(http: &Arc<Http>) -> Router {
    let routes = Router::new()
        .route("/health", get(llama::health))
        .route("/v1/health", get(llama::health))
        .route("/metrics", get(metrics::metrics))
        .route("/props", get(llama::props))
        .route("/slots", get(llama::slots::slots))
        .route("/why", get(why::why))
        .route("/lora-adapters", get(lora::list).post(lora::set))
        .route("/tokenize", post(llama::tokenize))
        .route("/detokenize", post(llama::native::detokenize))
        .route("/completion", post(llama::native::completion))
        .route("/completions", post(llama::native::completion))
        .route("/infill", post(llama::native::infill))
        .route("/embedding", post(llama::embedding::embedding))
        .route("/embeddings", post(llama::embedding::embedding))
        .route("/models", model_list())
        .route("/models/sse", get(model_events::models))
        .route("/models/load", post(llama::load))
        .route("/models/unload", post(llama::unload))
        .route("/v1/models", get(openai::models::list))
        .route("/v1/models/{*name}", get(openai::models::get))
        .route("/v1/chat/completions", post(openai::chat::chat))
        .route("/chat/completions", post(openai::chat::chat))
        .route("/v1/chat/completions/control", post(control::control))
        .route("/chat/completions/control", post(control::control))
        .route(
            "/v1/chat/completions/input_tokens",
            post(openai::chat::count_tokens),
        )
        .route(
            "/chat/completions/input_tokens",
            post(openai::chat::count_tokens),
        )
        .route("/v1/completions", post(openai::completions::completions))
        .route("/v1/embeddings", post(openai::embeddings::embeddings))
        .route("/v1/rerank", post(rerank::rerank))
        .route("/v2/rerank", post(rerank::rerank))
        .route("/rerank", post(rerank::rerank))
        .route("/v1/reranking", post(rerank::rerank))
        .route("/reranking", post(rerank::rerank))
        .route("/apply-template", post(llama::apply_template))
        .route("/v1/responses", post(openai::responses::responses))
        .route("/responses", post(openai::responses::responses))
        .route(
            "/v1/responses/input_tokens",
            post(openai::responses::count_tokens),
        )
        .route(
            "/responses/input_tokens",
            post(openai::responses::count_tokens),
        )
        .route("/v1/responses/{id}", kept_responses())
        .route(
            "/v1/responses/{id}/input_items",
            get(openai::responses::kept::input),
        )
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/ui", get(ui::page))
        .route("/ui/page.js", get(ui::script))
        .route("/ui/page.css", get(ui::style))
        .route("/ui/settings", get(ui::settings))
        .route("/ui/live", get(ui::live))
        .route("/", get(ollama::models::root))
        .route("/api/version", get(ollama::models::version))
        .route("/api/tags", get(ollama::models::tags))
        .route("/api/ps", get(ollama::models::ps))
        .route("/api/show", post(ollama::models::show))
        .route("/api/pull", post(ollama::pull::pull))
        .route("/api/copy", post(ollama::pull::copy))
        .route(
            "/api/delete",
            routing::delete(ollama::pull::delete).fallback(only_delete),
        )
        .route("/api/chat", post(ollama::chat::chat))
        .route("/api/embed", post(ollama::embed::embed_many))
        .route("/api/embeddings", post(ollama::embed::embed_one))
        .route("/api/generate", post(ollama::generate::generate))
        .fallback(no_route);
    let gate = middleware::from_fn_with_state(Arc::clone(http), access::gate);
    routes.layer(gate).with_state(Arc::clone(http))
}

/// The methods of `/models`: list, download and delete.
fn model_list() -> MethodRouter<Arc<Http>> {
    routing::get(llama::models)
        .post(model_store::download)
        .delete(model_store::delete)
        .fallback(only_get_post_or_delete)
}

/// The methods of a stored response: read and delete.
fn kept_responses() -> MethodRouter<Arc<Http>> {
    routing::get(openai::responses::kept::get)
        .delete(openai::responses::kept::delete)
        .fallback(only_get_or_delete)
}

/// A route for GET only; axum adds the header `Allow` to responses for other methods.
fn get<H: Handler<T, Arc<Http>>, T: 'static>(handler: H) -> MethodRouter<Arc<Http>> {
    routing::get(handler).fallback(only_get)
}

/// A route for POST only; axum adds the header `Allow` to responses for other methods.
fn post<H: Handler<T, Arc<Http>>, T: 'static>(handler: H) -> MethodRouter<Arc<Http>> {
    routing::post(handler).fallback(only_post)
}

async fn only_get(State(http): State<Arc<Http>>, request: Request) -> Response {
    no_method(&http, request, "GET").await
}

async fn only_get_or_delete(State(http): State<Arc<Http>>, request: Request) -> Response {
    no_method(&http, request, "GET or DELETE").await
}

async fn only_get_post_or_delete(State(http): State<Arc<Http>>, request: Request) -> Response {
    no_method(&http, request, "GET, POST or DELETE").await
}

async fn only_delete(State(http): State<Arc<Http>>, request: Request) -> Response {
    no_method(&http, request, "DELETE").await
}

async fn only_post(State(http): State<Arc<Http>>, request: Request) -> Response {
    no_method(&http, request, "POST").await
}

async fn no_method(http: &Http, mut request: Request, taken: &str) -> Response {
    body::discard(&mut request).await;
    let call = Call::of(http, "none", &request);
    let (method, path) = (request.method().as_str(), request.uri().path());
    call.refuse(&refusals::no_method(method, path, taken))
}

async fn no_route(State(http): State<Arc<Http>>, mut request: Request) -> Response {
    body::discard(&mut request).await;
    let call = Call::of(&http, "none", &request);
    let (method, path) = (request.method().as_str(), request.uri().path());
    call.refuse(&refusals::no_route(method, path))
}
