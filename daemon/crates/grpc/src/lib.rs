//! The services of `rocmforge.v1`, with health and reflection beside them.
//!
//! *Invariants:* wire types never leave this crate (tidy test `wire_types_stay_in_the_rpc_layer`);
//! every number and text of a request is checked before it is used (fuzz target `grpc`). A handler
//! holds no lock, and nothing CPU-bound or blocking runs on the async workers.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

mod arrival;
mod cache;
mod chat;
mod connection;
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
use futures_util::future::BoxFuture;
use rocmforge_connections::Runtimes;
use rocmforge_engine::api::Budget;
use rocmforge_proto::v1::cache_server::CacheServer;
use rocmforge_proto::v1::inference_server::InferenceServer;
use rocmforge_proto::v1::models_server::ModelsServer;
use rocmforge_proto::v1::server_server::ServerServer;
use rocmforge_service::machine::Machine;
use rocmforge_service::{REQUEST_MAX_BYTES, Service};
use tokio::net::UnixListener;
use tonic::service::{InterceptorLayer, Routes};
pub use tonic::transport::Error;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::HealthReporter;

use self::connection::Connection;

/// Maximum number of calls under way on one connection.
const STREAMS_PER_CONNECTION_MAX: u32 = 256;
/// Maximum bytes in flight from a client, for a connection and for each call. They are buffered
/// until their call takes them.
const CONNECTION_WINDOW_BYTES: u32 = 256 << 10;
const STREAM_WINDOW_BYTES: u32 = 128 << 10;
/// Number of cancelled and not yet processed calls above which the transport closes a connection as
/// an attack. A client may cancel all of its calls at once, several times.
const CANCELLED_AT_ONCE_MAX: usize = 4 * STREAMS_PER_CONNECTION_MAX as usize;
/// Maximum bytes of headers of one call.
const HEADERS_MAX_BYTES: u32 = 16 << 10;
/// Interval of pings on a silent connection.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum wait for the reply to a ping: a client that was stopped or hangs is dropped after both.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Path of the socket if none is configured: the one that clients try first.
pub fn default_socket_path() -> PathBuf {
    rocmforge_proto::default_socket_path()
}

/// Parses a budget in the notation of the clients.
///
/// # Errors
/// A message that says what is wrong with it.
pub fn parse_budget(text: &str) -> Result<Budget, String> {
    match text.parse() {
        Ok(rocmforge_proto::Budget::Bytes(bytes)) => Ok(Budget::Bytes(bytes)),
        Ok(rocmforge_proto::Budget::Percent(percent)) => Ok(Budget::Percent(percent)),
        Err(error) => Err(rocmforge_proto::BudgetError::to_string(&error)),
    }
}

/// Sets the health status of the daemon and of each service.
#[derive(Debug, Clone)]
pub struct Health(HealthReporter);

/// The service `grpc.health.v1`, which reports the status.
pub struct HealthService(HealthServer<tonic_health::server::HealthService>);

impl Health {
    /// The setter of the health status, and the service that reports it.
    pub fn new() -> (Self, HealthService) {
        let reporter = HealthReporter::new();
        let service = tonic_health::server::HealthService::from_health_reporter(reporter.clone());
        (Self(reporter), HealthService(HealthServer::new(service)))
    }

    /// Sets one status for all services.
    pub async fn set(&self, serving: bool) {
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

/// All services of `rocmforge.v1`.
fn routes(context: &Arc<Service>, machine: Arc<dyn Machine>) -> Routes {
    let (models, inference) = (
        models::ModelsService::new(Arc::clone(context)),
        inference::InferenceService::new(Arc::clone(context)),
    );
    let (cache, server) = (
        cache::CacheService::new(Arc::clone(context)),
        server::ServerService::new(Arc::clone(context), machine),
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

/// Serves the connections of `listener` until `shutdown`, then until the last of them has closed.
/// No connection is accepted any more once `left` is done.
///
/// # Errors
/// The server failed.
// Behind a pointer, so that the server is compiled here: a future that is known by its type is
// compiled where it is awaited.
#[inline(never)]
pub fn serve(
    context: Arc<Service>,
    runtimes: Runtimes,
    machine: Arc<dyn Machine>,
    health: HealthService,
    listener: UnixListener,
    left: BoxFuture<'static, ()>,
    shutdown: BoxFuture<'static, ()>,
) -> BoxFuture<'static, Result<(), Error>> {
    let incoming = connection::accept(listener, left);
    Box::pin(serve_until(
        context, runtimes, machine, health, incoming, shutdown,
    ))
}

async fn serve_until(
    context: Arc<Service>,
    runtimes: Runtimes,
    machine: Arc<dyn Machine>,
    health: HealthService,
    incoming: impl Stream<Item = std::io::Result<Connection>>,
    shutdown: BoxFuture<'static, ()>,
) -> Result<(), Error> {
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(rocmforge_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .expect("the descriptors that this build generated are sound");
    let bounds = gate::Bounds::new(&context, runtimes);
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
        .add_routes(routes(&context, machine))
        .add_service(health.0)
        .add_service(reflection)
        .serve_with_incoming_shutdown(incoming, shutdown);
    tokio::select! {
        ended = served => ended,
        () = bounds.watch() => Ok(()),
    }
}
