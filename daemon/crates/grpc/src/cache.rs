//! `rocmforge.v1.Cache`: reports the use of the device's memory, and controls it.

use std::sync::Arc;

use rocmforge_engine::api as engine;
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_proto::v1;
use rocmforge_proto::v1::cache_server::Cache;
use rocmforge_service::Service;
use rocmforge_service::arrival::Arrival;
use rocmforge_service::check;
use rocmforge_service::refusals;
use rocmforge_service::request_log::RequestLog;
use tonic::{Request, Response, Status};

use super::status_code::status;
use super::{arrival, convert};

/// Implementation of `rocmforge.v1.Cache`.
#[derive(Debug)]
pub(super) struct CacheService {
    context: Arc<Service>,
}

impl CacheService {
    pub(super) fn new(context: Arc<Service>) -> Self {
        Self { context }
    }
}

/// Converts a budget and checks its form; the engine checks whether it is possible.
fn budget(wire: Option<v1::set_budget_request::Budget>) -> Result<engine::Budget, Failure> {
    use v1::set_budget_request::Budget;

    match wire {
        Some(Budget::Bytes(0)) => Err(failure::invalid("bytes", "0 is out of range: at least 1")),
        Some(Budget::Bytes(bytes)) => Ok(engine::Budget::Bytes(bytes)),
        // False for NaN, too.
        Some(Budget::Percent(percent)) if percent > 0.0 && percent <= 100.0 => {
            Ok(engine::Budget::Percent(percent))
        }
        Some(Budget::Percent(percent)) => Err(failure::invalid(
            "percent",
            &format!("{percent} is out of range: above 0, at most 100"),
        )),
        None => Err(failure::invalid("budget", "missing; give bytes or percent")),
    }
}

fn policy(wire: i32) -> Result<engine::Policy, Failure> {
    match v1::CachePolicy::try_from(wire) {
        Ok(v1::CachePolicy::PassAware) => Ok(engine::Policy::PassAware),
        Ok(v1::CachePolicy::Lru) => Ok(engine::Policy::Lru),
        Ok(v1::CachePolicy::Unspecified) | Err(_) => Err(failure::invalid(
            "policy",
            &format!("{wire} is no policy: CACHE_POLICY_PASS_AWARE (1) or CACHE_POLICY_LRU (2)"),
        )),
    }
}

/// Converts the status of the KV cache in host memory, if there is one or was.
fn host_tier(tier: &engine::HostTier) -> Option<v1::HostTier> {
    let wire = v1::HostTier {
        budget_bytes: tier.budget_bytes,
        bytes: tier.bytes,
        saved: tier.saved,
        restored: tier.restored,
        dropped: tier.dropped,
        computed_again_tokens: tier.again_tokens,
    };
    (tier.budget_bytes > 0 || tier.saved > 0).then_some(wire)
}

/// Converts the status of the KV cache on disk.
fn kv_disk(disk: engine::KvDiskStatus) -> v1::KvDisk {
    let engine::KvDiskStatus {
        store,
        requests,
        reused_tokens,
    } = disk;
    v1::KvDisk {
        budget_bytes: store.budget,
        bytes: store.bytes,
        entries: store.entries,
        queued_bytes: store.queued_bytes,
        is_paused: store.is_paused,
        written_bytes: store.written_bytes,
        read_bytes: store.read_bytes,
        requests,
        reused_tokens,
        refused: store.refused,
        dropped_files: store.dropped_segments,
        skipped: store.skipped.all(),
        write_errors: store.write_errors,
        read_errors: store.read_errors,
    }
}

impl CacheService {
    async fn clear_cache(
        &self,
        request: v1::ClearRequest,
        arrival: Arrival,
    ) -> Result<v1::ClearResponse, Failure> {
        self.context.admit()?;
        let mut violations = Violations::default();
        if let Some(name) = &request.model {
            check::model_name("model", name, &mut violations);
        }
        violations.result()?;
        let name = request.model.as_deref();
        let name = name.map(|name| self.context.real_name(name));
        let work = async {
            let engine = &self.context.engine;
            let cleared = match request.kv_disk {
                true => engine.clear_with_disk(name.as_deref()).await,
                false => engine.clear(name.as_deref()).await,
            };
            cleared.map_err(|error| refusals::from_engine(&error))
        };
        let cleared = arrival.limit(work).await?;
        Ok(v1::ClearResponse {
            freed_bytes: cleared.freed_bytes,
            freed_segments: cleared.freed_segments,
            kept: cleared.kept.into_iter().map(convert::kept).collect(),
        })
    }

    async fn change_budget(
        &self,
        request: v1::SetBudgetRequest,
        arrival: Arrival,
    ) -> Result<v1::SetBudgetResponse, Failure> {
        self.context.admit()?;
        let budget = budget(request.budget)?;
        let work = async {
            self.context
                .engine
                .set_budget(budget)
                .await
                .map_err(|error| refusals::from_engine(&error))
        };
        let change = arrival.limit(work).await?;
        let cache = self.context.engine.snapshot().cache;
        Ok(v1::SetBudgetResponse {
            budget_bytes: change.budget_bytes,
            effective_budget_bytes: change.budget_bytes.saturating_add(change.excess_bytes),
            resident_bytes: convert::usage(&cache).resident_bytes,
            in_flight_bytes: cache.in_flight_bytes,
            evicted_segments: u32::try_from(change.evicted_segments).unwrap_or(u32::MAX),
            evicted_bytes: change.evicted_bytes,
        })
    }

    async fn release_memory(
        &self,
        request: v1::ReleaseRequest,
        arrival: Arrival,
    ) -> Result<v1::ReleaseResponse, Failure> {
        self.context.admit()?;
        let work = async {
            let released = self.context.engine.release(request.host).await;
            released.map_err(|error| refusals::from_engine(&error))
        };
        let released = arrival.limit(work).await?;
        Ok(v1::ReleaseResponse {
            freed_bytes: released.freed_bytes,
            kept_bytes: released.kept_bytes,
            budget_bytes: released.budget_bytes,
            host_freed_bytes: released.host_freed_bytes,
        })
    }

    async fn change_policy(
        &self,
        request: v1::SetPolicyRequest,
        arrival: Arrival,
    ) -> Result<v1::SetPolicyResponse, Failure> {
        self.context.admit()?;
        let policy = policy(request.policy)?;
        let work = async {
            self.context
                .engine
                .set_policy(policy)
                .await
                .map_err(|error| refusals::from_engine(&error))
        };
        let previous = arrival.limit(work).await?;
        Ok(v1::SetPolicyResponse {
            previous: convert::policy(previous).into(),
            policy: convert::policy(policy).into(),
        })
    }
}

#[tonic::async_trait]
impl Cache for CacheService {
    async fn stats(
        &self,
        _: Request<v1::StatsRequest>,
    ) -> Result<Response<v1::StatsResponse>, Status> {
        let snapshot = self.context.engine.snapshot();
        let mut models: Vec<_> = snapshot
            .models
            .iter()
            .map(|status| v1::ModelCacheUsage {
                name: status.model.name().to_owned(),
                usage: Some(convert::usage(&status.cache)),
            })
            .collect();
        models.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Response::new(v1::StatsResponse {
            budget_bytes: snapshot.cache.budget_bytes,
            peak_bytes: snapshot.peak_bytes,
            policy: convert::policy(snapshot.policy).into(),
            total: Some(convert::usage(&snapshot.cache)),
            models,
            host_tier: host_tier(&snapshot.host_tier),
            kv_disk: snapshot.kv_disk.map(kv_disk),
        }))
    }

    async fn clear(
        &self,
        request: Request<v1::ClearRequest>,
    ) -> Result<Response<v1::ClearResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let name = request.model.as_deref().unwrap_or_default();
        let log = RequestLog::audit("Clear", name, "", &arrival);
        log.end(self.clear_cache(request, arrival).await)
            .map(Response::new)
            .map_err(status)
    }

    async fn set_budget(
        &self,
        request: Request<v1::SetBudgetRequest>,
    ) -> Result<Response<v1::SetBudgetResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let asked = match &request.budget {
            Some(v1::set_budget_request::Budget::Bytes(bytes)) => format!("bytes={bytes}"),
            Some(v1::set_budget_request::Budget::Percent(percent)) => format!("percent={percent}"),
            None => String::new(),
        };
        let log = RequestLog::audit("SetBudget", "", &asked, &arrival);
        log.end(self.change_budget(request, arrival).await)
            .map(Response::new)
            .map_err(status)
    }

    async fn release(
        &self,
        request: Request<v1::ReleaseRequest>,
    ) -> Result<Response<v1::ReleaseResponse>, Status> {
        let arrival = arrival::of(&request);
        let log = RequestLog::audit("Release", "", "", &arrival);
        log.end(self.release_memory(request.into_inner(), arrival).await)
            .map(Response::new)
            .map_err(status)
    }

    async fn set_policy(
        &self,
        request: Request<v1::SetPolicyRequest>,
    ) -> Result<Response<v1::SetPolicyResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let asked = format!("policy={}", request.policy().as_str_name());
        let log = RequestLog::audit("SetPolicy", "", &asked, &arrival);
        log.end(self.change_policy(request, arrival).await)
            .map(Response::new)
            .map_err(status)
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_failure::Kind;
    use v1::set_budget_request::Budget;

    use super::*;

    #[test]
    fn a_budget_is_a_positive_number_of_bytes_or_a_share() {
        assert_eq!(
            budget(Some(Budget::Bytes(7))).unwrap(),
            engine::Budget::Bytes(7)
        );
        assert_eq!(
            budget(Some(Budget::Percent(100.0))).unwrap(),
            engine::Budget::Percent(100.0)
        );
        let refused = [
            None,
            Some(Budget::Bytes(0)),
            Some(Budget::Percent(0.0)),
            Some(Budget::Percent(-5.0)),
            Some(Budget::Percent(100.1)),
            Some(Budget::Percent(f64::NAN)),
            Some(Budget::Percent(f64::INFINITY)),
        ];
        for wire in refused {
            assert_eq!(
                budget(wire).unwrap_err().kind(),
                Kind::InvalidArgument,
                "{wire:?}"
            );
        }
    }

    #[test]
    fn a_tier_is_told_where_there_is_one_also_when_weights_have_all_of_it() {
        assert_eq!(host_tier(&engine::HostTier::default()), None);
        let tier = engine::HostTier {
            budget_bytes: 0,
            bytes: 0,
            saved: 3,
            restored: 2,
            dropped: 1,
            again_tokens: 64,
        };
        let told = host_tier(&tier).unwrap();
        assert_eq!((told.saved, told.restored, told.dropped), (3, 2, 1));
        assert_eq!(told.computed_again_tokens, 64);
        let roomy = engine::HostTier {
            budget_bytes: 9,
            bytes: 4,
            ..engine::HostTier::default()
        };
        let told = host_tier(&roomy).unwrap();
        assert_eq!((told.budget_bytes, told.bytes), (9, 4));
    }

    #[test]
    fn policies_are_named_and_nothing_else() {
        assert_eq!(policy(1).unwrap(), engine::Policy::PassAware);
        assert_eq!(policy(2).unwrap(), engine::Policy::Lru);
        for wire in [0, 3, -1, i32::MAX] {
            let failure = policy(wire).unwrap_err();
            assert_eq!(failure.kind(), Kind::InvalidArgument);
            assert!(
                failure.message().contains("CACHE_POLICY_LRU"),
                "{}",
                failure.message()
            );
        }
    }
}
