//! The services of `rocmforge.v1`, with health and reflection beside them.
//!
//! *Invariants:* wire types never leave this module (tidy test `wire_types_stay_in_the_rpc_layer`);
//! every number and text of a request is checked before it is used (fuzz target `grpc`). A handler
//! holds no lock, and nothing CPU-bound or blocking runs on the async workers.

mod arrival;
mod cache;
mod chat;
mod convert;
mod events;
mod gate;
mod inference;
mod models;
mod server;
mod status_code;
mod tokens;
mod vectors;
mod why;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use rocmforge_engine::api::Budget;
use rocmforge_proto::v1::cache_server::CacheServer;
use rocmforge_proto::v1::inference_server::InferenceServer;
use rocmforge_proto::v1::models_server::ModelsServer;
use rocmforge_proto::v1::server_server::ServerServer;
use rocmforge_service::{REQUEST_MAX_BYTES, Service};
use tonic::service::{InterceptorLayer, Routes};
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::HealthReporter;

use crate::connection::Connection;
use crate::runtimes::Runtimes;
use crate::{devices, traces};

/// Calls of one connection that may be under way.
const STREAMS_PER_CONNECTION_MAX: u32 = 256;
/// Bytes that a connection may have under way to us, and a call of it. They lie here
/// until their call takes them.
const CONNECTION_WINDOW_BYTES: u32 = 256 << 10;
const STREAM_WINDOW_BYTES: u32 = 128 << 10;
/// Calls that were cancelled and not yet looked at, above which the transport takes a
/// connection for an attack and closes it with all its calls. A client may cancel all that it
/// has at once, several times over.
const CANCELLED_AT_ONCE_MAX: usize = 4 * STREAMS_PER_CONNECTION_MAX as usize;
/// Header bytes of one call.
const HEADERS_MAX_BYTES: u32 = 16 << 10;
/// How often a silent connection is asked whether it lives, and how long it may take to say so. A
/// client that was stopped or hangs is dropped after both.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Blocking threads: those of the services, those that look up hosts of images, and one each for a
/// look for devices, a look-up of where traces go, and settings that are read or a self-test. What
/// finds none free waits for one.
pub const BLOCKING_THREADS: usize = rocmforge_service::BLOCKING_THREADS
    + rocmforge_hub::FETCH_THREADS
    + devices::AT_ONCE
    + traces::LOOKUPS_AT_ONCE
    + 1;

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

/// The services of `rocmforge.v1`.
pub(crate) fn routes(context: &Arc<Service>) -> Routes {
    let (models, inference) = (
        models::ModelsService::new(Arc::clone(context)),
        inference::InferenceService::new(Arc::clone(context)),
    );
    let (cache, server) = (
        cache::CacheService::new(Arc::clone(context)),
        server::ServerService::new(Arc::clone(context)),
    );
    let (most_in, most_out) = (REQUEST_MAX_BYTES, rocmforge_proto::MAX_MESSAGE_BYTES);
    Routes::default()
        .add_service(
            ModelsServer::new(models)
                .max_decoding_message_size(most_in)
                .max_encoding_message_size(most_out),
        )
        .add_service(tokens::Written(
            InferenceServer::new(inference)
                .max_decoding_message_size(most_in)
                .max_encoding_message_size(most_out),
        ))
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
}

/// Serves connections until `shutdown`, then until the last of them has closed.
///
/// # Errors
/// When a connection cannot be served at all.
pub(crate) async fn serve(
    context: &Arc<Service>,
    runtimes: Runtimes,
    health: HealthService,
    incoming: impl Stream<Item = std::io::Result<Connection>>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(rocmforge_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .expect("the descriptors that this build generated are sound");
    let bounds = gate::Bounds::new(context, runtimes);
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
        .add_routes(routes(context))
        .add_service(health.0)
        .add_service(reflection)
        .serve_with_incoming_shutdown(incoming, shutdown);
    tokio::select! {
        ended = served => ended,
        () = bounds.watch() => Ok(()),
    }
}
