//! The services of `rocmforge.v1`, with health and reflection beside them.
//!
//! *Invariants:* wire types never leave this module; a handler holds no lock, and nothing CPU-bound or blocking runs on
//! the async workers; every number and text of a request is checked before it is used.

mod arrival;
mod cache;
mod check;
mod convert;
mod gate;
mod inference;
mod models;
mod prompt;
mod request_log;
mod server;
mod status_code;
mod text_work;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::Stream;
use rocmforge_engine::api::{Budget, Snapshot};
use rocmforge_engine::{EngineHandle, LoadedModel};
use rocmforge_proto::v1::cache_server::CacheServer;
use rocmforge_proto::v1::inference_server::InferenceServer;
use rocmforge_proto::v1::models_server::ModelsServer;
use rocmforge_proto::v1::server_server::ServerServer;
use rocmforge_tokenizer::Renderer;
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::service::InterceptorLayer;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::HealthReporter;

use crate::connection::Connection;
use crate::devices::{self, Devices};
use crate::model_files::ModelDirs;
use crate::roles::{RoleBook, Roles};

/// Largest request message: room for an eight-megabyte prompt and more, so that it arrives and is judged by its tokens.
pub const REQUEST_MAX_BYTES: usize = 16 << 20;
/// Calls of one connection that may be under way.
const STREAMS_PER_CONNECTION_MAX: u32 = 256;
/// Bytes that a connection may have under way to us, and a call of it. They lie here until their call takes them.
const CONNECTION_WINDOW_BYTES: u32 = 256 << 10;
const STREAM_WINDOW_BYTES: u32 = 128 << 10;
/// Calls that were cancelled and not yet looked at, above which the transport takes a connection for an attack and closes
/// it with all its calls. A client may cancel all that it has at once, several times over.
const CANCELLED_AT_ONCE_MAX: usize = 4 * STREAMS_PER_CONNECTION_MAX as usize;
/// Header bytes of one call.
const HEADERS_MAX_BYTES: u32 = 16 << 10;
/// How often a silent connection is asked whether it lives, and how long it may take to say so. A client that was
/// stopped or hangs is dropped after both.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Headers that are read at once.
const LOADS_AT_ONCE: usize = 4;
/// Blocking threads that the services need at most; two for a listing of files and a look-up of groups.
pub const BLOCKING_THREADS: usize =
    LOADS_AT_ONCE + text_work::SHORT_AT_ONCE + text_work::LONG_AT_ONCE + devices::AT_ONCE + 2;

/// The socket that is served when none is named: the one that clients look for first.
pub fn default_socket_path() -> PathBuf {
    rocmforge_proto::default_socket_path()
}

/// Reads a budget in the notation that clients share.
pub(crate) fn parse_budget(text: &str) -> Result<Budget, String> {
    match text.parse() {
        Ok(rocmforge_proto::Budget::Bytes(bytes)) => Ok(Budget::Bytes(bytes)),
        Ok(rocmforge_proto::Budget::Percent(percent)) => Ok(Budget::Percent(percent)),
        Err(error) => Err(rocmforge_proto::BudgetError::to_string(&error)),
    }
}

/// What the services are told of the configuration.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Longest context of a request, in tokens.
    pub n_ctx_max: u32,
    /// Requests that the engine runs at once.
    pub max_sequences: u32,
    /// Threads that compute on the host device.
    pub threads: u32,
}

/// What all services share.
#[derive(Debug)]
pub(crate) struct Context {
    engine: EngineHandle,
    dirs: Arc<ModelDirs>,
    limits: Limits,
    started: Instant,
    draining: AtomicBool,
    peak_bytes: AtomicU64,
    loads: Arc<Semaphore>,
    listings: Arc<Semaphore>,
    text: text_work::TextWork,
    templates: Renderer,
    devices: Arc<Devices>,
    roles: RoleBook,
}

impl Context {
    pub(crate) fn new(
        engine: EngineHandle,
        dirs: ModelDirs,
        limits: Limits,
        templates: Renderer,
        roles: Roles,
    ) -> Self {
        Self {
            engine,
            dirs: Arc::new(dirs),
            limits,
            started: Instant::now(),
            draining: AtomicBool::new(false),
            peak_bytes: AtomicU64::new(0),
            loads: Arc::new(Semaphore::new(LOADS_AT_ONCE)),
            listings: Arc::new(Semaphore::new(1)),
            text: text_work::TextWork::new(),
            templates,
            devices: Arc::default(),
            roles: RoleBook::new(roles),
        }
    }

    /// Refuses new work from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Notes what the device holds, for the largest that was ever seen.
    pub(crate) fn note_bytes(&self, snapshot: &Snapshot) {
        let bytes = snapshot
            .cache
            .resident_bytes
            .saturating_add(snapshot.cache.in_flight_bytes);
        self.peak_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    fn peak_bytes(&self, snapshot: &Snapshot) -> u64 {
        self.note_bytes(snapshot);
        self.peak_bytes.load(Ordering::Relaxed)
    }

    /// Lets work in, or not.
    fn admit(&self) -> Result<(), Status> {
        if self.is_draining() {
            Err(status_code::draining())
        } else {
            Ok(())
        }
    }

    fn model(&self, name: &str) -> Result<Arc<LoadedModel>, Status> {
        self.engine
            .model(name)
            .map_err(|error| status_code::from_engine(&error))
    }

    fn n_ctx(&self, asked: Option<u32>, model: &LoadedModel) -> Result<u32, Status> {
        check::context(
            asked,
            model.model().info().n_ctx_train,
            self.limits.n_ctx_max,
        )
    }
}

/// The health of the whole and of each service.
#[derive(Debug, Clone)]
pub(crate) struct Health(HealthReporter);

/// `grpc.health.v1`, which tells it.
pub(crate) struct HealthService(HealthServer<tonic_health::server::HealthService>);

impl Health {
    /// The switch and the service.
    pub(crate) fn new() -> (Self, HealthService) {
        let reporter = HealthReporter::new();
        let service = tonic_health::server::HealthService::from_health_reporter(reporter.clone());
        (Self(reporter), HealthService(HealthServer::new(service)))
    }

    /// Says the same of everything.
    pub(crate) async fn set(&self, serving: bool) {
        let status = if serving {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        for service in [
            "",
            "rocmforge.v1.Models",
            "rocmforge.v1.Inference",
            "rocmforge.v1.Cache",
            "rocmforge.v1.Server",
        ] {
            self.0.set_service_status(service, status).await;
        }
    }
}

/// Serves connections until `shutdown`, then until the last of them has closed.
///
/// # Errors
/// When a connection cannot be served at all.
pub(crate) async fn serve(
    context: &Arc<Context>,
    health: HealthService,
    incoming: impl Stream<Item = std::io::Result<Connection>>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(rocmforge_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .expect("the descriptors that this build generated are sound");
    let (models, inference) = (
        models::ModelsService::new(Arc::clone(context)),
        inference::InferenceService::new(Arc::clone(context)),
    );
    let (cache, server) = (
        cache::CacheService::new(Arc::clone(context)),
        server::ServerService::new(Arc::clone(context)),
    );
    let (most_in, most_out) = (REQUEST_MAX_BYTES, rocmforge_proto::MAX_MESSAGE_BYTES);
    let bounds = gate::Bounds::new(context);
    let served = Server::builder()
        .layer(InterceptorLayer::new(arrival::stamp as fn(_) -> _))
        .layer(gate::GateLayer(Arc::clone(&bounds)))
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .http2_max_pending_accept_reset_streams(Some(CANCELLED_AT_ONCE_MAX))
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .http2_max_header_list_size(HEADERS_MAX_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(
            ModelsServer::new(models)
                .max_decoding_message_size(most_in)
                .max_encoding_message_size(most_out),
        )
        .add_service(
            InferenceServer::new(inference)
                .max_decoding_message_size(most_in)
                .max_encoding_message_size(most_out),
        )
        .add_service(
            CacheServer::new(cache)
                .max_decoding_message_size(most_in)
                .max_encoding_message_size(most_out),
        )
        .add_service(
            ServerServer::new(server)
                .max_decoding_message_size(most_in)
                .max_encoding_message_size(most_out),
        )
        .add_service(health.0)
        .add_service(reflection)
        .serve_with_incoming_shutdown(incoming, shutdown);
    tokio::select! {
        ended = served => ended,
        () = bounds.watch() => Ok(()),
    }
}
