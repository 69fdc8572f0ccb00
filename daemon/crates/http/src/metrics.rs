//! `GET /metrics`: Prometheus text, made from the published snapshot only. The metrics are declared
//! in [`table`].

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use rocmforge_engine::api::{CacheStatus, HostPressureStatus, Snapshot};
use rocmforge_service::limits::PeerUse;
use rocmforge_service::measured::{Measured, Record};

use super::Http;
use super::call::with_type;

mod by_model;
mod metric;
mod table;
mod text;

const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Number of tokens of a KV block in vLLM's metrics, by which routers multiply.
const BLOCK_TOKENS: u64 = 16;

/// Sources of metric values: the snapshot and measurements.
struct Source<'a> {
    snapshot: &'a Snapshot,
    measured: &'a Measured,
    /// Measurements of the requests of each model.
    records: Vec<(String, Arc<Record>)>,
    /// Clients that sent requests within the last minutes, and some earlier ones.
    peers: Vec<PeerUse>,
    /// Maximum number of requests that run at once.
    running_max: u32,
    /// Bytes reserved for images of requests.
    image_memory: u64,
    uptime_s: f64,
    is_draining: bool,
}

impl Source<'_> {
    /// Numbers of a client's running and queued requests.
    fn requests(&self, used: &PeerUse) -> (u32, u32) {
        let client = used.peer.client();
        let found = self.snapshot.clients.iter().find(|c| c.client == client);
        found.map_or((0, 0), |c| (c.running, c.queued))
    }

    /// State of `host_pressure`, if the system counts memory pressure.
    fn host_pressure(&self) -> Option<HostPressureStatus> {
        self.snapshot.host_pressure.filter(|host| !host.is_blind)
    }
}

/// Handler of `GET /metrics`.
pub(super) async fn metrics(State(http): State<Arc<Http>>) -> Response {
    let service = &http.service;
    let snapshot = service.engine.snapshot();
    let source = Source {
        snapshot: &snapshot,
        measured: &service.measured,
        records: service.measured.all(),
        peers: service.peers(),
        running_max: service.limits.max_sequences,
        image_memory: service.images.memory().1,
        uptime_s: service.started.elapsed().as_secs_f64(),
        is_draining: service.is_draining() || snapshot.draining,
    };
    with_type(CONTENT_TYPE, Body::from(page(&source)))
}

fn page(source: &Source<'_>) -> String {
    let mut page = String::new();
    for metric in table::METRICS {
        text::write(metric, source, &mut page);
    }
    page
}

/// The budget for the next request, in bytes: while memory is released, the budget that the next
/// request restores, so that routers do not consider the daemon full.
fn budget_bytes(snapshot: &Snapshot) -> u64 {
    let released = snapshot.released_budget;
    released.unwrap_or(snapshot.cache.budget_bytes)
}

/// Share of the possible KV memory that is in use, 0 to 1. KV shares one budget with weights, which
/// are evicted for it; only what cannot be evicted counts as used.
fn kv_use(budget_bytes: u64, cache: &CacheStatus) -> f64 {
    let room = budget_bytes.saturating_sub(cache.pinned_bytes + cache.scratch_bytes);
    if room == 0 {
        return 1.0;
    }
    (cache.kv_bytes as f64 / room as f64).min(1.0)
}

/// Tokens of a KV block, and number of blocks that fit the budget, for the model that needs most
/// per token.
fn block(snapshot: &Snapshot) -> (u64, u64) {
    let models = snapshot.models.iter();
    let per_token = models.map(|m| m.model.model().info().kv_bytes_per_token);
    let block_bytes = per_token.max().unwrap_or(0).saturating_mul(BLOCK_TOKENS);
    let blocks = budget_bytes(snapshot).checked_div(block_bytes);
    (BLOCK_TOKENS, blocks.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::num::NonZeroUsize;

    use rocmforge_device::{Loss, LossKind};
    use rocmforge_engine::api::Budget;
    use rocmforge_engine::{DeviceChoice, EngineConfig};

    use super::*;

    /// The page of an idle daemon that published `change`d figures.
    fn page_with(change: impl FnOnce(&mut Snapshot)) -> String {
        let (engine, _thread) = rocmforge_engine::start(EngineConfig {
            device: DeviceChoice::Host,
            threads: NonZeroUsize::new(1),
            budget: Budget::Bytes(1 << 20),
            ..EngineConfig::default()
        })
        .unwrap();
        let mut snapshot = (*engine.snapshot()).clone();
        change(&mut snapshot);
        page(&Source {
            snapshot: &snapshot,
            measured: &Measured::default(),
            records: Vec::new(),
            peers: Vec::new(),
            running_max: 4,
            image_memory: 0,
            uptime_s: 1.5,
            is_draining: false,
        })
    }

    #[test]
    fn a_lost_device_is_counted_by_how_it_was_lost() {
        let rows = |page: &str| -> Vec<String> {
            let rows = page
                .lines()
                .filter(|line| line.starts_with("rocmforge_device_lost"));
            rows.map(str::to_owned).collect()
        };
        assert_eq!(rows(&page_with(|_| ())), ["rocmforge_device_lost 0"]);
        let loss = Loss::new(LossKind::Hang, "no end after 30 s");
        let page = page_with(|snapshot| snapshot.device_lost = Some(loss));
        assert_eq!(rows(&page), [r#"rocmforge_device_lost{kind="hang"} 1"#]);
    }

    #[test]
    fn memory_that_was_given_back_is_counted() {
        let host = |is_blind| HostPressureStatus {
            percent: 10.0,
            is_blind,
            held_bytes: 700,
            given_up_bytes: 300,
            shrinks: 2,
            grows: 1,
        };
        let page = page_with(|snapshot| snapshot.host_pressure = Some(host(false)));
        for row in [
            "rocmforge_host_pressure_held_bytes 700",
            "rocmforge_host_pressure_given_up_bytes 300",
            "rocmforge_host_pressure_shrinks_total 2",
            "rocmforge_host_pressure_grows_total 1",
        ] {
            assert!(page.lines().any(|line| line == row), "no '{row}' in {page}");
        }
        let blind = page_with(|snapshot| snapshot.host_pressure = Some(host(true)));
        assert!(!blind.contains("rocmforge_host_pressure"), "{blind}");
    }

    #[test]
    fn each_metric_is_declared_once_with_a_help_text_of_its_own() {
        let names: BTreeSet<&str> = table::METRICS.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), table::METRICS.len());
        let helps: BTreeSet<&str> = table::METRICS.iter().map(|metric| metric.help).collect();
        // Requests that run and wait have vLLM's names, too.
        assert_eq!(helps.len(), table::METRICS.len() - 2);
        for metric in table::METRICS {
            let is_counter = matches!(metric.kind, metric::Kind::Counter);
            assert_eq!(
                metric.name.ends_with("_total"),
                is_counter,
                "{}",
                metric.name
            );
            for word in [
                "Of them",
                "Those",
                " it ",
                "that took",
                "likewise",
                "The same",
            ] {
                assert!(!metric.help.contains(word), "{}: {word}", metric.name);
            }
        }
    }

    #[test]
    fn what_cannot_be_evicted_is_no_room_for_kv() {
        let cache = CacheStatus {
            pinned_bytes: 40,
            scratch_bytes: 10,
            kv_bytes: 25,
            ..CacheStatus::default()
        };
        assert!((kv_use(100, &cache) - 0.5).abs() < 1e-9);
        assert!((kv_use(0, &CacheStatus::default()) - 1.0).abs() < 1e-9);
    }

    /// A router would take it for full.
    #[test]
    fn a_released_budget_has_the_room_that_comes_back() {
        let page = page_with(|snapshot| {
            snapshot.cache.budget_bytes = 40;
            snapshot.cache.pinned_bytes = 40;
            snapshot.released_budget = Some(100);
        });
        let used = page
            .lines()
            .find_map(|line| line.strip_prefix("vllm:kv_cache_usage_perc"));
        assert!(used.is_some_and(|used| used.ends_with(" 0")), "{page}");
    }
}
