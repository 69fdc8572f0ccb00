//! The fake daemon's cache, status and devices.

use rocmforge_client::proto::v1::cache_server::Cache;
use rocmforge_client::proto::v1::server_server::Server;
use rocmforge_client::proto::v1::*;
use tonic::{Request, Response, Status};

use super::Fake;
use super::answers::{device, drivers, live_request, request_times, summary, usage};

#[tonic::async_trait]
impl Cache for Fake {
    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsResponse>, Status> {
        let usage = usage();
        Ok(Response::new(StatsResponse {
            budget_bytes: 2 << 30,
            peak_bytes: 5 << 20,
            policy: CachePolicy::PassAware.into(),
            total: Some(usage),
            models: vec![ModelCacheUsage {
                name: "tiny".into(),
                usage: Some(usage),
            }],
            host_tier: Some(HostTier {
                budget_bytes: 64 << 20,
                bytes: 12 << 20,
                saved: 9,
                restored: 4,
                dropped: 1,
                computed_again_tokens: 32,
            }),
            kv_disk: None,
        }))
    }

    async fn clear(
        &self,
        request: Request<ClearRequest>,
    ) -> Result<Response<ClearResponse>, Status> {
        if let Some(name) = request.into_inner().model {
            self.check(&name)?;
        }
        Ok(Response::new(ClearResponse {
            freed_bytes: 2 << 20,
            freed_segments: 2,
            kept: vec![KeptSegment {
                model: "tiny".into(),
                index: 0,
                name: "blk.0.attn".into(),
                bytes: 1 << 20,
                reason: KeepReason::Pinned.into(),
            }],
        }))
    }

    async fn set_budget(
        &self,
        request: Request<SetBudgetRequest>,
    ) -> Result<Response<SetBudgetResponse>, Status> {
        let request = request.into_inner();
        self.seen.budget.lock().unwrap().push(request);
        let budget_bytes = match request.budget {
            Some(set_budget_request::Budget::Bytes(bytes)) => bytes,
            Some(set_budget_request::Budget::Percent(_)) => 8 << 30,
            None => return Err(Status::invalid_argument("a budget is required")),
        };
        Ok(Response::new(SetBudgetResponse {
            budget_bytes,
            effective_budget_bytes: budget_bytes,
            resident_bytes: 3 << 20,
            ..Default::default()
        }))
    }

    async fn release(
        &self,
        request: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        Ok(Response::new(ReleaseResponse {
            freed_bytes: 7 << 30,
            kept_bytes: 1 << 30,
            budget_bytes: 8 << 30,
            host_freed_bytes: if request.get_ref().host { 2 << 30 } else { 0 },
        }))
    }

    async fn set_policy(
        &self,
        request: Request<SetPolicyRequest>,
    ) -> Result<Response<SetPolicyResponse>, Status> {
        let policy = request.into_inner().policy;
        let previous = CachePolicy::PassAware.into();
        Ok(Response::new(SetPolicyResponse { previous, policy }))
    }
}

#[tonic::async_trait]
impl Server for Fake {
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let models = self.models.lock().unwrap();
        Ok(Response::new(StatusResponse {
            version: "0.1.0".into(),
            device: Some(device()),
            uptime_ms: 3_723_000,
            state: ServerState::Serving.into(),
            models: models.iter().map(|name| summary(name)).collect(),
            queue_depth: 0,
            queue_capacity: 64,
            running: 1,
            running_capacity: 8,
            budget_bytes: 2 << 30,
            used_bytes: 4 << 20,
            model_dirs: vec!["/models".into()],
            pid: 1234,
            drivers: drivers(),
            passed_over: vec!["device hip: no card".into()],
            waits_for: Some(FileWait {
                model: "far".into(),
                path: "/models/far.gguf".into(),
                waited_ms: 7_000,
                all_wait: true,
            }),
            keep_free: None,
            yielding: None,
            models_coming_back: 0,
            released_budget_bytes: None,
            device_closed: false,
            host_pressure: None,
            requests: vec![live_request()],
        }))
    }

    async fn why(&self, request: Request<WhyRequest>) -> Result<Response<WhyResponse>, Status> {
        let request = request.into_inner();
        if !request.request.is_empty() && request.request != "3" {
            return Err(Status::not_found("no such request"));
        }
        let n = request.latest.clamp(1, 2);
        let requests = (0..n).map(|at| request_times(3 - u64::from(at)));
        Ok(Response::new(WhyResponse {
            requests: requests.collect(),
        }))
    }

    async fn list_devices(
        &self,
        _: Request<ListDevicesRequest>,
    ) -> Result<Response<ListDevicesResponse>, Status> {
        Ok(Response::new(ListDevicesResponse {
            in_use: Some(device()),
            drivers: drivers(),
            passed_over: vec!["device hip: no card".into()],
        }))
    }

    async fn check_device(
        &self,
        _: Request<CheckDeviceRequest>,
    ) -> Result<Response<CheckDeviceResponse>, Status> {
        Ok(Response::new(CheckDeviceResponse {
            device: Some(device()),
            checks: Vec::new(),
            took_ms: 0.25,
        }))
    }

    async fn reload(&self, _: Request<ReloadRequest>) -> Result<Response<ReloadResponse>, Status> {
        let change = |setting: &str, before: &str, now: &str, reason: &str| SettingChange {
            setting: setting.into(),
            before: before.into(),
            now: now.into(),
            reason: reason.into(),
        };
        Ok(Response::new(ReloadResponse {
            taken: vec![
                change("log", "info", "debug", ""),
                change("limit", "", "", ""),
            ],
            not_taken: vec![change("threads", "1", "2", "not \u{1b}[31mnow")],
        }))
    }
}
