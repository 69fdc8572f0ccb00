//! The published snapshot: what status calls read instead of asking the engine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_tensor_cache::{ModelStats, SegmentState as CacheState};

use crate::actor::{DriverReports, Engine, Entry};
use crate::api::{CacheStatus, DeviceStatus, ModelStatus, SegmentState, SegmentStatus, Snapshot};
use crate::config::EngineConfig;
use crate::weight_store::WeightStore;

/// Between two passes the snapshot is renewed at most this often. When a request comes, starts or
/// ends, and before a command is answered, always: whoever has an event of a request or an answer
/// reads a state that knows of it.
const RENEWAL: Duration = Duration::from_millis(5);

impl Engine {
    /// Publishes the state, now if `always` or if the requests changed, else if
    /// the last one is old enough.
    pub(crate) fn publish(&mut self, always: bool) {
        let now = Instant::now();
        let due = always || self.requests_changed;
        if !due && now.duration_since(self.published_at) < RENEWAL {
            return;
        }
        self.published_at = now;
        self.requests_changed = false;
        self.store.refresh_free_bytes();
        let mut snapshot = snapshot_of(&self.store, &self.models, &self.config, &self.found);
        snapshot.device.findings.extend(self.budget_note.clone());
        for model in &mut snapshot.models {
            let mine = |t: &&crate::task::Task| Arc::ptr_eq(&t.loaded, &model.model);
            model.requests = self.all_tasks().filter(mine).count() as u32;
        }
        snapshot.queued = self.scheduler.waiting() as u32;
        snapshot.queued_and_read = self.queued_and_read();
        snapshot.running = self.scheduler.running() as u32;
        snapshot.clients = self.clients();
        snapshot.keep_free = self.keep_free.status();
        let held = self.store.host_bytes();
        snapshot.host_pressure = self.host_pressure.as_ref().map(|watch| watch.status(held));
        snapshot.prefixes = self.prefix_counts;
        snapshot.interleaved_passes = self.interleaved_passes;
        snapshot.suspensions = self.under_way.suspensions();
        snapshot.brought_aside = self.brought_aside;
        snapshot.uploaded_aside_bytes = self.uploaded_aside_bytes;
        snapshot.draining = self.draining.is_some();
        self.snapshot.send_modify(|last| {
            snapshot.peak_bytes = snapshot.peak_bytes.max(last.peak_bytes);
            // The thread that looks at waits tells them.
            snapshot.waits_for = last.waits_for.clone();
            *last = Arc::new(snapshot);
        });
    }
}

/// The state of the cache, the device and the models, without requests.
pub(crate) fn snapshot_of(
    store: &WeightStore,
    models: &[Entry],
    config: &EngineConfig,
    found: &DriverReports,
) -> Snapshot {
    let info = store.device.info();
    let stats = store.cache.stats();
    let cache = cache_status(stats.budget, &stats.total, store.prefixes.kept_bytes());
    Snapshot {
        device: DeviceStatus {
            kind: info.kind.to_owned(),
            name: info.name,
            arch: info.arch,
            ordinal: info.ordinal,
            driver: info.driver,
            findings: info.findings,
            unused_gpu: found.unused_gpu.clone(),
            compute_units: info.compute_units,
            memory_bytes: info.memory_bytes,
            allocations: info.allocations,
            memory: store.device.memory_use(),
            free_bytes: store.free_bytes,
        },
        drivers: Arc::clone(&found.drivers),
        passed_over: Arc::clone(&found.passed_over),
        models: models
            .iter()
            .filter(|entry| !entry.is_withdrawn)
            .map(|entry| model_status(store, entry))
            .collect(),
        peak_bytes: cache.resident_bytes + cache.in_flight_bytes,
        cache,
        policy: crate::commands::from_cache(stats.policy),
        queued: 0,
        queued_and_read: 0,
        queue_capacity: config.queue_capacity as u32,
        running: 0,
        clients: Vec::new(),
        keep_free: None,
        host_pressure: None,
        prefixes: crate::api::PrefixCounts::default(),
        interleaved_passes: 0,
        suspensions: 0,
        brought_aside: 0,
        uploaded_aside_bytes: 0,
        hosted: store.offload.done,
        host_tier: store.tier.status(),
        draining: false,
        device_lost: None,
        waits_for: None,
    }
}

fn model_status(store: &WeightStore, entry: &Entry) -> ModelStatus {
    let cache = &store.cache;
    let segments = cache.residency(entry.id).unwrap_or_default();
    let mut stats = cache.model_stats(entry.id);
    if let Some(predictor) = &entry.predictor {
        let of_block = cache.model_stats(predictor.id).usage;
        stats.usage.resident += of_block.resident;
        stats.usage.in_flight += of_block.in_flight;
    }
    let state = |place| match place {
        CacheState::Absent => SegmentState::Absent,
        CacheState::InFlight(_) => SegmentState::InFlight,
        CacheState::Resident(_) => SegmentState::Resident,
    };
    ModelStatus {
        model: Arc::clone(&entry.loaded),
        segments: segments
            .iter()
            .map(|s| SegmentStatus {
                bytes: s.bytes,
                state: state(s.residency),
                pinned: s.pinned,
                in_use: s.refs > 0,
            })
            .collect(),
        cache: cache_status(
            cache.budget(),
            &stats,
            store.prefixes.kept_bytes_of(entry.id),
        ),
        requests: 0,
        draft: entry.draft.as_ref().map(|d| d.name.clone()),
    }
}

fn cache_status(budget_bytes: u64, of: &ModelStats, prefix_bytes: u64) -> CacheStatus {
    CacheStatus {
        budget_bytes,
        resident_bytes: of.usage.resident + of.usage.blocks(),
        in_flight_bytes: of.usage.in_flight,
        pinned_bytes: of.usage.pinned,
        kv_bytes: of.usage.kv - prefix_bytes,
        prefix_bytes,
        scratch_bytes: of.usage.scratch,
        hits: of.counters.hits,
        misses: of.counters.misses,
        evictions: of.counters.evictions,
        evictions_by: of.counters.evictions_by,
        uploads: of.counters.uploads,
        uploaded_bytes: of.counters.uploaded_bytes,
    }
}

/// Of an engine that has nothing.
#[cfg(test)]
pub(crate) fn empty_snapshot() -> Snapshot {
    Snapshot {
        device: DeviceStatus {
            kind: "host".to_owned(),
            name: String::new(),
            arch: String::new(),
            ordinal: 0,
            driver: String::new(),
            findings: Vec::new(),
            unused_gpu: None,
            compute_units: 0,
            memory_bytes: 0,
            allocations: 0,
            memory: None,
            free_bytes: None,
        },
        drivers: Arc::new([]),
        passed_over: Arc::new([]),
        models: Vec::new(),
        cache: CacheStatus::default(),
        peak_bytes: 0,
        policy: crate::api::Policy::PassAware,
        queued: 0,
        queued_and_read: 0,
        queue_capacity: 0,
        running: 0,
        clients: Vec::new(),
        keep_free: None,
        host_pressure: None,
        prefixes: crate::api::PrefixCounts::default(),
        interleaved_passes: 0,
        suspensions: 0,
        brought_aside: 0,
        uploaded_aside_bytes: 0,
        hosted: crate::api::Hosted::default(),
        host_tier: crate::api::HostTier::default(),
        draining: false,
        device_lost: None,
        waits_for: None,
    }
}

#[cfg(test)]
mod tests {
    use super::empty_snapshot;

    #[test]
    fn unread_streams_are_in_the_way_of_who_reads_and_of_who_cannot_even_wait() {
        let mut snapshot = empty_snapshot();
        snapshot.queue_capacity = 3;
        for (queued, queued_and_read, expected) in
            [(0, 0, false), (2, 0, false), (2, 1, true), (3, 0, true)]
        {
            (snapshot.queued, snapshot.queued_and_read) = (queued, queued_and_read);
            assert_eq!(
                snapshot.others_wait(),
                expected,
                "{queued} {queued_and_read}"
            );
        }
    }
}
