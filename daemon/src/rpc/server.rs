//! `rocmforge.v1.Server`: the daemon itself. Answers from the published snapshot, and while the daemon drains.

use std::sync::Arc;

use rocmforge_proto::v1;
use rocmforge_proto::v1::server_server::Server;
use tonic::{Request, Response, Status};

use super::{Context, convert};

/// The service.
#[derive(Debug)]
pub(super) struct ServerService {
    context: Arc<Context>,
}

impl ServerService {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }
}

fn device_kind(kind: &str) -> v1::DeviceKind {
    match kind {
        "host" => v1::DeviceKind::Host,
        "hip" => v1::DeviceKind::Hip,
        "cuda" => v1::DeviceKind::Cuda,
        _ => v1::DeviceKind::Unspecified,
    }
}

#[tonic::async_trait]
impl Server for ServerService {
    async fn status(
        &self,
        _: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusResponse>, Status> {
        let context = &self.context;
        let snapshot = context.engine.snapshot();
        let state = if snapshot.device_lost.is_some() {
            v1::ServerState::DeviceLost
        } else if snapshot.draining || context.is_draining() {
            v1::ServerState::Draining
        } else {
            v1::ServerState::Serving
        };
        let device = &snapshot.device;
        let on_host = device.kind == "host";
        Ok(Response::new(v1::StatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: Some(v1::Device {
                kind: device_kind(&device.kind).into(),
                name: device.name.clone(),
                memory_bytes: device.memory_bytes,
                isa: device.arch.clone(),
                threads: if on_host { context.limits.threads } else { 0 },
            }),
            uptime_ms: context.started.elapsed().as_millis() as u64,
            state: state.into(),
            models: convert::summaries(&snapshot.models),
            queue_depth: snapshot.queued,
            queue_capacity: snapshot.queue_capacity,
            running: snapshot.running,
            running_capacity: context.limits.max_sequences,
            budget_bytes: snapshot.cache.budget_bytes,
            used_bytes: snapshot
                .cache
                .resident_bytes
                .saturating_add(snapshot.cache.in_flight_bytes),
            model_dirs: context
                .dirs
                .real()
                .map(|dir| dir.display().to_string())
                .collect(),
            pid: std::process::id(),
        }))
    }
}
