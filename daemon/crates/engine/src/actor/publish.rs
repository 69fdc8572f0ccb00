//! The published snapshot: what status calls read instead of asking the engine.

use std::collections::HashMap;
use std::sync::Arc;

use rocmforge_tensor_cache::{
    Counters, ModelId, Policy as CachePolicy, SegmentState as CacheState, Usage,
};

use crate::actor::engine::Engine;
use crate::actor::publisher::DriverReports;
use crate::api::config::EngineConfig;
use crate::api::{
    BrokenGaps, CacheStatus, DeviceStatus, ModelStatus, Policy, SegmentState, SegmentStatus,
    Snapshot,
};
use crate::features::kv_disk::KvDisk;
use crate::features::speculation::state::Speculation;
use crate::memory::Memory;
use crate::model::loaded::LoadedModel;
use crate::model::registry::{Entry, Models};
use crate::store::Store;

impl Engine {
    /// Publishes a snapshot if `always`, if the requests changed, or if the last snapshot is old
    /// enough.
    pub(crate) fn publish(&mut self, always: bool) {
        let now = self.now();
        let always = always || self.requests.changed;
        if !self.publisher.is_due(now, always) {
            return;
        }
        self.requests.changed = false;
        self.memory.store.refresh_free_bytes();
        let models = (&self.models, &self.speculation);
        let mut snapshot = snapshot_of(&self.memory, models, &self.config, &self.publisher.found);
        let requests = &self.requests;
        let findings = &mut snapshot.device.findings;
        findings.extend(self.guards.budget_note.clone());
        findings.extend(self.guards.yield_note.clone());
        let mut asked: HashMap<*const LoadedModel, u32> = HashMap::new();
        for task in requests.all() {
            *asked.entry(Arc::as_ptr(&task.loaded)).or_default() += 1;
        }
        if !asked.is_empty() {
            let of = |model: &Arc<LoadedModel>| asked.get(&Arc::as_ptr(model)).copied();
            for ModelStatus {
                model, requests, ..
            } in &mut snapshot.models
            {
                let of_tower = model.tower().and_then(of);
                *requests = of(model).unwrap_or(0) + of_tower.unwrap_or(0);
            }
        }
        snapshot.queued = requests.scheduler.waiting() as u32;
        snapshot.queued_and_read = requests.queued_and_read(&self.background.not_ready());
        snapshot.running = requests.scheduler.running() as u32;
        snapshot.clients = requests.clients();
        snapshot.requests = requests.live(now);
        snapshot.keep_free = self.guards.keep_free.status();
        let yielding = self.guards.others.as_ref();
        snapshot.yielding = yielding.map(|(_, guard)| guard.status());
        snapshot.released_budget = self.guards.release.before();
        snapshot.releases = self.guards.release.count();
        let held = self.memory.host_bytes();
        let watch = self.guards.host_pressure.as_ref();
        snapshot.host_pressure = watch.map(|watch| watch.status(held));
        snapshot.images_read = requests.images.asked;
        snapshot.prefixes = requests.prefix_counts;
        snapshot.interleaved_passes = self.interleaving.passes;
        snapshot.link_bytes_per_s = self.space.pace.link_bytes_per_s();
        snapshot.suspensions = requests.suspended.suspensions();
        snapshot.broken_gaps = requests.promises.broken;
        snapshot.brought_aside = self.background.fetched_files;
        snapshot.uploaded_aside_bytes = self.background.uploaded_bytes;
        snapshot.draining = self.draining.is_some();
        self.publisher.send(snapshot);
    }
}

/// The state of the cache, the device and the models, without requests.
pub(crate) fn snapshot_of(
    memory: &Memory,
    (models, speculation): (&Models, &Speculation),
    config: &EngineConfig,
    found: &DriverReports,
) -> Snapshot {
    let info = memory.store.device.info();
    let of_cache = &memory.store.cache;
    let cache = cache_status(
        of_cache.budget(),
        of_cache.total(),
        memory.prefixes.kept_bytes(),
    );
    // Of many models hardly one has a tower: each is looked up in what there is.
    let towers: HashMap<ModelId, ModelId> = models
        .iter()
        .filter_map(|entry| Some((entry.reads_for?, entry.id)))
        .collect();
    Snapshot {
        device: DeviceStatus {
            kind: info.kind,
            name: info.name,
            arch: info.arch,
            ordinal: info.ordinal,
            driver: info.driver,
            findings: info.findings,
            unused_gpu: found.unused_gpu.clone(),
            compute_units: info.compute_units,
            memory_bytes: info.memory_bytes,
            allocations: info.allocations,
            memory: memory.store.device.memory_use(),
            free_bytes: memory.store.free_bytes,
        },
        drivers: Arc::clone(&found.drivers),
        passed_over: Arc::clone(&found.passed_over),
        models: models
            .named_ones()
            .filter(|entry| !entry.is_withdrawn)
            .map(|entry| {
                let tower = towers.get(&entry.id).copied();
                model_status(memory, speculation, entry, tower)
            })
            .collect(),
        peak_bytes: cache.resident_bytes + cache.in_flight_bytes,
        cache,
        policy: from_cache(of_cache.policy()),
        queued: 0,
        queued_and_read: 0,
        queue_capacity: config.queue_capacity as u32,
        running: 0,
        clients: Vec::new(),
        requests: Vec::new(),
        keep_free: None,
        yielding: None,
        released_budget: None,
        device_closed: memory.store.device.is_closed(),
        releases: 0,
        host_pressure: None,
        prefixes: crate::api::PrefixCounts::default(),
        images_read: 0,
        interleaved_passes: 0,
        suspensions: 0,
        link_bytes_per_s: None,
        broken_gaps: BrokenGaps::default(),
        brought_aside: 0,
        uploaded_aside_bytes: 0,
        hosted: memory.cpu.done,
        host_tier: memory.host_kv.status(),
        kv_disk: memory.kv_disk.as_ref().map(KvDisk::status),
        draining: false,
        device_lost: None,
        waits_for: None,
    }
}

fn model_status(
    memory: &Memory,
    speculation: &Speculation,
    entry: &Entry,
    tower: Option<ModelId>,
) -> ModelStatus {
    let cache = &memory.store.cache;
    let mut stats = cache.model_stats(entry.id);
    let mtp = speculation.mtp_of(entry.id).map(|mtp| mtp.id);
    for part in [mtp, tower].into_iter().flatten() {
        let of_part = cache.model_stats(part).usage;
        stats.usage.resident += of_part.resident;
        stats.usage.in_flight += of_part.in_flight;
        stats.usage.borrowed += of_part.borrowed;
    }
    ModelStatus {
        model: Arc::clone(&entry.loaded),
        segments: segments_of(&memory.store, entry.id),
        cache: cache_status(
            cache.budget(),
            (stats.counters, stats.usage),
            memory.prefixes.kept_bytes_of(entry.id),
        ),
        requests: 0,
        draft: speculation.draft_model(entry.id).map(|d| d.name.clone()),
    }
}

/// The state of a model's segments. Models of which nothing is resident share one list.
fn segments_of(store: &Store, model: ModelId) -> Arc<[SegmentStatus]> {
    let absent = || Some(Arc::clone(&store.sources.get(&model)?.absent));
    if store.cache.is_absent(model)
        && let Some(absent) = absent()
    {
        return absent;
    }
    let state = |place| match place {
        CacheState::Absent => SegmentState::Absent,
        CacheState::InFlight(_) => SegmentState::InFlight,
        CacheState::Resident(_) => SegmentState::Resident,
    };
    let segments = store.cache.residency(model).unwrap_or_default();
    let status = segments.iter().map(|s| SegmentStatus {
        bytes: s.bytes,
        state: state(s.residency),
        pinned: s.pinned,
        in_use: s.refs > 0,
    });
    status.collect()
}

fn cache_status(
    budget_bytes: u64,
    (counters, usage): (Counters, Usage),
    prefix_bytes: u64,
) -> CacheStatus {
    CacheStatus {
        budget_bytes,
        resident_bytes: usage.resident + usage.blocks(),
        in_flight_bytes: usage.in_flight,
        pinned_bytes: usage.pinned,
        shared_bytes: usage.borrowed,
        kv_bytes: usage.kv - prefix_bytes,
        prefix_bytes,
        scratch_bytes: usage.scratch,
        hits: counters.hits,
        misses: counters.misses,
        evictions: counters.evictions,
        evictions_by: counters.evictions_by,
        uploads: counters.uploads,
        uploaded_bytes: counters.uploaded_bytes,
    }
}

pub(crate) fn to_cache(policy: Policy) -> CachePolicy {
    match policy {
        Policy::PassAware => CachePolicy::PassAware,
        Policy::Lru => CachePolicy::Lru,
    }
}

pub(crate) fn from_cache(policy: CachePolicy) -> Policy {
    match policy {
        CachePolicy::PassAware => Policy::PassAware,
        CachePolicy::Lru => Policy::Lru,
    }
}
