//! `rocmforge.v1.Server`: reports on the daemon and its devices from the published snapshot, also
//! while the daemon drains.

use std::sync::Arc;

use rocmforge_engine::api::{DeviceKind, DeviceStatus, Snapshot, Vendor};
use rocmforge_proto::v1;
use rocmforge_proto::v1::server_server::Server;
use rocmforge_service::Service;
use rocmforge_service::machine::{FoundDriver, Machine, Told};
use rocmforge_service::reloading::Change;
use rocmforge_service::request_log::RequestLog;
use tonic::{Request, Response, Status};

use super::status_code::status;
use super::{arrival, convert, why};

/// Implementation of `rocmforge.v1.Server`.
#[derive(Debug)]
pub(super) struct ServerService {
    context: Arc<Service>,
    machine: Arc<dyn Machine>,
}

impl ServerService {
    pub(super) fn new(context: Arc<Service>, machine: Arc<dyn Machine>) -> Self {
        Self { context, machine }
    }
}

/// Converts the status of the device in use.
fn device(context: &Service, snapshot: &Snapshot) -> v1::Device {
    let device = &snapshot.device;
    v1::Device {
        kind: device_kind(device.kind).into(),
        name: device.name.clone(),
        memory_bytes: device.memory_bytes,
        isa: device.arch.clone(),
        threads: match device.kind {
            DeviceKind::Host => context.limits.threads,
            DeviceKind::Hip | DeviceKind::Cuda => 0,
        },
        ordinal: device.ordinal,
        driver_version: device.driver.clone(),
        compute_units: device.compute_units,
        allocations: device.allocations,
        findings: device.findings.clone(),
        unused_gpu: device.unused_gpu.clone().unwrap_or_default(),
        memory: device.memory.map(|memory| v1::DeviceMemory {
            free_bytes: device.free_bytes.unwrap_or_default(),
            allocated_bytes: memory.allocated_bytes,
            capacity_bytes: memory.capacity_bytes,
        }),
    }
}

/// Converts a probed driver; `in_use` is the device that the daemon computes on.
fn driver(found: &FoundDriver, in_use: &DeviceStatus) -> v1::GpuDriver {
    let kind = match found.vendor {
        Vendor::Hip => DeviceKind::Hip,
        Vendor::Cuda => DeviceKind::Cuda,
    };
    let devices = found.devices.iter().map(|device| {
        let used = in_use.kind == kind && in_use.ordinal == device.ordinal;
        v1::GpuDevice {
            ordinal: device.ordinal,
            name: device.name.clone(),
            arch: device.arch.clone(),
            memory_bytes: device.memory_bytes,
            free_bytes: in_use.free_bytes.filter(|_| used),
            compute_units: device.compute_units,
            wave_size: device.wave_size,
            pci_address: device.pci_address.clone(),
            integrated: device.integrated,
            in_use: used,
        }
    });
    v1::GpuDriver {
        kind: device_kind(kind).into(),
        tried: found
            .tried
            .iter()
            .map(|(library, message)| v1::LibraryAttempt {
                library: library.clone(),
                message: message.clone(),
            })
            .collect(),
        library: found.library.clone().unwrap_or_default(),
        driver_version: found.driver_version.clone().unwrap_or_default(),
        runtime_version: found.runtime_version.clone().unwrap_or_default(),
        devices: devices.collect(),
        errors: found.errors.clone(),
    }
}

fn state(context: &Service, snapshot: &Snapshot) -> v1::ServerState {
    if snapshot.device_lost.is_some() {
        v1::ServerState::DeviceLost
    } else if snapshot.draining || context.is_draining() {
        v1::ServerState::Draining
    } else {
        v1::ServerState::Serving
    }
}

fn device_kind(kind: DeviceKind) -> v1::DeviceKind {
    match kind {
        DeviceKind::Host => v1::DeviceKind::Host,
        DeviceKind::Hip => v1::DeviceKind::Hip,
        DeviceKind::Cuda => v1::DeviceKind::Cuda,
    }
}

#[tonic::async_trait]
impl Server for ServerService {
    async fn status(
        &self,
        request: Request<v1::StatusRequest>,
    ) -> Result<Response<v1::StatusResponse>, Status> {
        let context = &self.context;
        let viewer = context.viewer(&arrival::of(&request)).await;
        let snapshot = context.engine.snapshot();
        let state = state(context, &snapshot);
        Ok(Response::new(v1::StatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            device: Some(device(context, &snapshot)),
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
                .named()
                .map(|dir| dir.display().to_string())
                .collect(),
            pid: std::process::id(),
            drivers: snapshot
                .drivers
                .iter()
                .map(|report| driver(&FoundDriver::from(report), &snapshot.device))
                .collect(),
            passed_over: snapshot.passed_over.to_vec(),
            waits_for: snapshot.waits_for.as_ref().map(|wait| v1::FileWait {
                model: wait.model.clone(),
                path: wait.path.display().to_string(),
                waited_ms: wait.since.elapsed().as_millis() as u64,
                all_wait: wait.all_wait,
            }),
            keep_free: snapshot.keep_free.map(|kept| v1::KeepFree {
                bytes: kept.bytes,
                given_up_bytes: kept.given_up_bytes,
                shrinks: kept.shrinks,
                grows: kept.grows,
            }),
            models_coming_back: context.models_coming_back() as u32,
            yielding: snapshot.yielding.map(|others| v1::Yielding {
                active: others.is_yielding,
                to_bytes: others.to_bytes,
                others_bytes: others.others_bytes,
                count: others.count,
            }),
            released_budget_bytes: snapshot.released_budget,
            device_closed: snapshot.device_closed,
            host_pressure: snapshot.host_pressure.map(|host| v1::HostPressure {
                percent: host.percent,
                not_counted: host.is_blind,
                held_bytes: host.held_bytes,
                given_up_bytes: host.given_up_bytes,
                shrinks: host.shrinks,
                grows: host.grows,
            }),
            requests: context
                .live(&snapshot, &viewer)
                .into_iter()
                .map(convert::live)
                .collect(),
        }))
    }

    async fn list_devices(
        &self,
        _: Request<v1::ListDevicesRequest>,
    ) -> Result<Response<v1::ListDevicesResponse>, Status> {
        let found = self.machine.drivers().await;
        let snapshot = self.context.engine.snapshot();
        let drivers = found.iter().map(|found| driver(found, &snapshot.device));
        Ok(Response::new(v1::ListDevicesResponse {
            in_use: Some(device(&self.context, &snapshot)),
            drivers: drivers.collect(),
            passed_over: snapshot.passed_over.to_vec(),
        }))
    }

    async fn check_device(
        &self,
        request: Request<v1::CheckDeviceRequest>,
    ) -> Result<Response<v1::CheckDeviceResponse>, Status> {
        let arrival = arrival::of(&request);
        let snapshot = self.context.engine.snapshot();
        let in_use = &snapshot.device;
        let name = format!("{}:{}", in_use.kind, in_use.ordinal);
        let log = RequestLog::audit("CheckDevice", "", &name, &arrival);
        let checks = match in_use.kind {
            DeviceKind::Host => Ok(Vec::new()),
            DeviceKind::Hip | DeviceKind::Cuda => arrival.limit(self.machine.self_test(name)).await,
        };
        let checks = log.end(checks).map_err(status)?;
        Ok(Response::new(v1::CheckDeviceResponse {
            device: Some(device(&self.context, &snapshot)),
            checks: checks.into_iter().map(check).collect(),
            took_ms: arrival.at.elapsed().as_secs_f64() * 1e3,
        }))
    }

    async fn why(
        &self,
        request: Request<v1::WhyRequest>,
    ) -> Result<Response<v1::WhyResponse>, Status> {
        let arrival = arrival::of(&request);
        let which = why::which(request.into_inner());
        let viewer = self.context.viewer(&arrival).await;
        let reports = self.context.why(&viewer, &which).map_err(status)?;
        Ok(Response::new(v1::WhyResponse {
            requests: reports.into_iter().map(why::request_times).collect(),
        }))
    }

    async fn reload(
        &self,
        request: Request<v1::ReloadRequest>,
    ) -> Result<Response<v1::ReloadResponse>, Status> {
        let arrival = arrival::of(&request);
        let log = RequestLog::audit("Reload", "", "", &arrival);
        let reloaded = log.end(self.context.reload(&arrival).await);
        let reloaded = reloaded.map_err(status)?;
        Ok(Response::new(v1::ReloadResponse {
            taken: reloaded.taken.into_iter().map(change).collect(),
            not_taken: reloaded.not_taken.into_iter().map(change).collect(),
        }))
    }
}

fn change(told: Change) -> v1::SettingChange {
    v1::SettingChange {
        setting: told.setting,
        before: told.before,
        now: told.now,
        reason: told.reason,
    }
}

fn check(told: Told) -> v1::DeviceCheck {
    let outcome = match told.outcome.as_str() {
        "passed" => v1::CheckOutcome::Passed,
        "failed" => v1::CheckOutcome::Failed,
        "skipped" => v1::CheckOutcome::Skipped,
        "note" => v1::CheckOutcome::Note,
        _ => v1::CheckOutcome::Unspecified,
    };
    v1::DeviceCheck {
        name: told.name,
        outcome: outcome.into(),
        detail: told.detail,
        ms: told.ms,
    }
}
