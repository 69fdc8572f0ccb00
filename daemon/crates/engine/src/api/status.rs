//! The snapshot that the engine publishes of itself, and that status calls read.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_device::{DeviceKind, Loss, MemoryUse};
use rocmforge_gpu_driver::Report;
use rocmforge_scheduler::are_left_to_others;
use rocmforge_tensor_cache::Evictions;

use super::{BrokenGaps, Gap, Policy};
use crate::model::loaded::LoadedModel;

/// The engine's state as it was published last.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The device and its memory.
    pub device: DeviceStatus,
    /// Results of probing each vendor's driver at the start.
    pub drivers: Arc<[Report]>,
    /// Why `auto` rejected the devices that it tried before the one in use.
    pub passed_over: Arc<[String]>,
    /// Loaded models in the order of their loading.
    pub models: Vec<ModelStatus>,
    /// Counts of the segment cache for all models together.
    pub cache: CacheStatus,
    /// The largest number of bytes of segments, resident or in flight, in any snapshot so far.
    pub peak_bytes: u64,
    /// The eviction policy in force.
    pub policy: Policy,
    /// Number of requests that wait for admission.
    pub queued: u32,
    /// Number of queued requests whose clients read their streams. Only for their sake are streams
    /// ended that nobody reads.
    pub queued_and_read: u32,
    /// Maximum number of queued requests.
    pub queue_capacity: u32,
    /// Number of running requests.
    pub running: u32,
    /// Numbers of running and queued requests of each client.
    pub clients: Vec<ClientStatus>,
    /// The requests in the order of their arrival, at most [`LIVE_MAX`].
    pub requests: Vec<LiveRequest>,
    /// Device memory kept free for other programs, if any is.
    pub keep_free: Option<KeepFreeStatus>,
    /// Other processes on the GPU, and whether memory is given up for them; `None` if they are not
    /// watched.
    pub yielding: Option<YieldStatus>,
    /// The budget, in bytes, that the next request restores, while the device's memory is released;
    /// else `None`.
    pub released_budget: Option<u64>,
    /// Whether the device's context is closed while its memory is released.
    pub device_closed: bool,
    /// Number of times that the device's memory was released, since start-up.
    pub releases: u64,
    /// Host memory that is given back while the machine is short of memory; `None` if the engine
    /// may not give any back.
    pub host_pressure: Option<HostPressureStatus>,
    /// Numbers of prompt tokens, and of those reused from the prefix cache, since start-up.
    pub prefixes: PrefixCounts,
    /// Number of images whose rows were requested from vision towers, since start-up.
    pub images_read: u64,
    /// Number of decode passes that ran between the steps of a chunk of prompts, since start-up.
    pub interleaved_passes: u64,
    /// Number of times that a pass was suspended between two of its steps so that others had a
    /// turn, since start-up.
    pub suspensions: u64,
    /// Upload rate of the link to the device, in bytes per second, by timed copies.
    pub link_bytes_per_s: Option<u64>,
    /// Numbers of gaps between tokens that were longer than promised, since start-up.
    pub broken_gaps: BrokenGaps,
    /// Number of times that a model's file was read in the background, beside other models' passes,
    /// since start-up.
    pub brought_aside: u64,
    /// Bytes of weights that were uploaded beside the passes of other models, since start-up.
    pub uploaded_aside_bytes: u64,
    /// What the CPU computed because weights were not on the device, since start-up.
    pub hosted: Hosted,
    /// The KV cache in host memory.
    pub host_tier: HostTier,
    /// The KV cache on disk, if there is one.
    pub kv_disk: Option<KvDiskStatus>,
    /// Whether the daemon shuts down and accepts no new work.
    pub draining: bool,
    /// Why the device is lost, once it is.
    pub device_lost: Option<Loss>,
    /// A file that has not responded for seconds and that the engine waits for; `None` if there is
    /// none.
    pub waits_for: Option<FileWait>,
}

impl Snapshot {
    /// The snapshot of an engine without models and requests.
    #[cfg(test)]
    pub(crate) fn empty() -> Self {
        Snapshot {
            device: DeviceStatus {
                kind: DeviceKind::Host,
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
            policy: Policy::PassAware,
            queued: 0,
            queued_and_read: 0,
            queue_capacity: 0,
            running: 0,
            clients: Vec::new(),
            requests: Vec::new(),
            keep_free: None,
            yielding: None,
            released_budget: None,
            device_closed: false,
            releases: 0,
            host_pressure: None,
            prefixes: PrefixCounts::default(),
            images_read: 0,
            interleaved_passes: 0,
            suspensions: 0,
            link_bytes_per_s: None,
            broken_gaps: BrokenGaps::default(),
            brought_aside: 0,
            uploaded_aside_bytes: 0,
            hosted: Hosted::default(),
            host_tier: HostTier::default(),
            kv_disk: None,
            draining: false,
            device_lost: None,
            waits_for: None,
        }
    }

    /// Whether unread streams hold up other clients: a request waits whose client reads its stream,
    /// or the queue is so full that requests of one client are rejected.
    pub fn others_wait(&self) -> bool {
        let free = self.queue_capacity.max(1).saturating_sub(self.queued);
        self.queued_and_read > 0 || are_left_to_others(self.queued as usize, free as usize)
    }
}

/// A file that has not responded, and who waits for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileWait {
    /// Name of the model whose file it is.
    pub model: String,
    /// Path of the file; of a split model its first part.
    pub path: PathBuf,
    /// Start of the wait.
    pub since: Instant,
    /// Whether requests of all models wait for the file, not only those of its model.
    pub all_wait: bool,
}

/// Weights that the CPU computed with because they were not on the GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hosted {
    /// Bytes of weights that the CPU computed with.
    pub bytes: u64,
    /// Total time of these computations.
    pub took: Duration,
}

/// KV pages and recurrent states that moved from the device to host memory. Counts are since
/// start-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostTier {
    /// Maximum bytes of KV cache in host memory now: the host budget less the weights kept there; 0
    /// if no KV pages are kept in host memory.
    pub budget_bytes: u64,
    /// Host memory used by KV cache, in bytes.
    pub bytes: u64,
    /// Number of KV pages and recurrent states copied to host memory.
    pub saved: u64,
    /// Number of KV pages and recurrent states copied back to the device.
    pub restored: u64,
    /// Number of KV pages and recurrent states evicted without a copy: there was no room, or
    /// recomputing them was faster.
    pub dropped: u64,
    /// Number of positions that preempted requests recomputed.
    pub again_tokens: u64,
}

/// State of the KV cache on disk. Counts are since start-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvDiskStatus {
    /// The state of the store's files and queues.
    pub store: rocmforge_kv_disk::Status,
    /// Number of requests that began with a prefix read from disk.
    pub requests: u64,
    /// Number of prompt tokens that were read from disk instead of computed.
    pub reused_tokens: u64,
}

/// Memory kept free for other programs, and how much smaller the budget is because of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepFreeStatus {
    /// Bytes of device memory to keep free; 0 for none.
    pub bytes: u64,
    /// Bytes by which the budget is smaller now to keep memory free, or because others held memory
    /// at the start.
    pub given_up_bytes: u64,
    /// Number of times that the budget shrank to keep memory free.
    pub shrinks: u64,
    /// Number of times that the budget grew again.
    pub grows: u64,
}

/// Other processes on the GPU, and whether memory is given up for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct YieldStatus {
    /// The size in bytes that the budget shrinks to while another process uses the GPU.
    pub to_bytes: u64,
    /// Bytes of the GPU's memory that other processes hold.
    pub others_bytes: u64,
    /// Whether memory is given up for another process now.
    pub is_yielding: bool,
    /// Number of times that the budget was reduced for another process.
    pub count: u64,
}

/// Host memory that the engine holds, and what it gave up because the machine was short of memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostPressureStatus {
    /// Share of time, in percent, during which tasks wait for memory, from which on host memory is
    /// given back.
    pub percent: f64,
    /// Whether the kernel does not count waits for memory, so that nothing is ever given up.
    pub is_blind: bool,
    /// Bytes of host memory that the engine holds: weights for CPU compute, KV pages and states.
    pub held_bytes: u64,
    /// Current reduction of the host budget, in bytes.
    pub given_up_bytes: u64,
    /// Number of times that host memory was given back.
    pub shrinks: u64,
    /// Number of times that the host budget grew again.
    pub grows: u64,
}

/// Maximum number of requests in a snapshot.
pub const LIVE_MAX: usize = 64;

/// A request that waits or runs.
#[derive(Debug, Clone)]
pub struct LiveRequest {
    /// The request's number ([`TimesSlot::numbered`](super::times::TimesSlot::numbered)), shared by
    /// all choices of one request; 0 if it has none.
    pub number: u64,
    /// The request's client; see [`Asker::client`](super::Asker::client).
    pub client: u64,
    /// The model that the request uses.
    pub model: Arc<LoadedModel>,
    /// Whether the request computes, or what it waits for.
    pub state: LiveState,
    /// Time at which the engine received the request.
    pub since: Instant,
    /// Number of tokens of the request's prompt or of the text to process.
    pub prompt_tokens: u32,
    /// Number of positions that are computed so far, prompt and generated tokens together.
    pub computed_tokens: u32,
    /// Number of tokens generated so far.
    pub generated_tokens: u32,
    /// Decode rate: tokens a second after the first one; `None` before the second token.
    pub tokens_per_s: Option<f64>,
    /// Longest gap so far between two tokens of the request; `None` before the second token.
    pub longest_gap: Option<Gap>,
}

/// What a request does at the moment, or what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiveState {
    /// The request waits for admission.
    Queued,
    /// The request was preempted because others needed its KV cache memory.
    Preempted,
    /// The request waits for weights or KV cache that are read from disk.
    Disk,
    /// The request waits for weights that are being uploaded.
    Uploads,
    /// The request waits for another one that is computing their common prefix.
    Follows,
    /// The request waits because its client does not read the stream.
    Reader,
    /// The device computes the request's prompt or text.
    Prompt,
    /// The device computes the request's new tokens.
    Decode,
}

impl LiveState {
    /// The state's name on the wire and in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Preempted => "preempted",
            Self::Disk => "disk",
            Self::Uploads => "uploads",
            Self::Follows => "follows",
            Self::Reader => "reader",
            Self::Prompt => "prompt",
            Self::Decode => "decode",
        }
    }
}

/// Numbers of a client's requests; see [`Asker::client`](super::Asker::client).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientStatus {
    /// The number that identifies the client.
    pub client: u64,
    /// Number of the client's running requests.
    pub running: u32,
    /// Number of the client's queued requests.
    pub queued: u32,
}

/// Counts of prompt tokens of requests that may use the prefix cache, since start-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    /// Number of prompt tokens of all such requests.
    pub asked_tokens: u64,
    /// Number of prompt tokens that were reused from the prefix cache.
    pub reused_tokens: u64,
}

/// The device's properties and memory, as status calls report them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Whether the device is the CPU or a GPU, and of which vendor.
    pub kind: DeviceKind,
    /// Name of the processor or GPU, with the instruction set in use.
    pub name: String,
    /// The device's instruction set or architecture, for example `avx512` or `gfx1100`.
    pub arch: String,
    /// The driver's number of the GPU; 0 for the CPU.
    pub ordinal: u32,
    /// Version of the GPU's driver; empty for the CPU or if it is not known.
    pub driver: String,
    /// Findings about the device since it was opened; see
    /// [`rocmforge_device::DeviceInfo::findings`].
    pub findings: Vec<String>,
    /// Why the CPU computes although a GPU is on the bus; `None` if no GPU is unused.
    pub unused_gpu: Option<String>,
    /// Number of compute units or streaming multiprocessors; 0 for the CPU.
    pub compute_units: u32,
    /// The device's memory in bytes.
    pub memory_bytes: u64,
    /// Number of allocations requested from the driver since start-up.
    pub allocations: u64,
    /// GPU memory by the driver's count; `None` on the CPU.
    pub memory: Option<MemoryUse>,
    /// Free bytes of device memory by the driver's count, at most half a second old while there is
    /// work; `None` on the CPU.
    pub free_bytes: Option<u64>,
}

/// A loaded model and the residency of its segments.
#[derive(Debug, Clone)]
pub struct ModelStatus {
    /// The loaded model.
    pub model: Arc<LoadedModel>,
    /// State of each segment, by index. Snapshots share this list while nothing of the model is
    /// resident.
    pub segments: Arc<[SegmentStatus]>,
    /// Counts of the segment cache for this model.
    pub cache: CacheStatus,
    /// Number of queued and running requests of the model.
    pub requests: u32,
    /// Name of the model's draft model, if it has one.
    pub draft: Option<String>,
}

/// Residency of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentState {
    /// The segment is absent: its weights are only in the file.
    Absent,
    /// The segment is in flight.
    InFlight,
    /// The segment is on the device.
    Resident,
}

/// State of one segment of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentStatus {
    /// Size of the segment on the device, in bytes.
    pub bytes: u64,
    /// Residency of the segment.
    pub state: SegmentState,
    /// Whether the segment is pinned.
    pub pinned: bool,
    /// Whether a step of a pass uses the segment now.
    pub in_use: bool,
}

/// Counts of the segment cache, of one model or of all. `budget_bytes` is the same in both cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// The budget of device memory, in bytes.
    pub budget_bytes: u64,
    /// Bytes on the device: weights, KV cache and scratch. `resident + in flight <= budget`.
    pub resident_bytes: u64,
    /// Bytes of weights in flight.
    pub in_flight_bytes: u64,
    /// Bytes of resident pinned segments.
    pub pinned_bytes: u64,
    /// Bytes of segments that lie in another model's slab because their content is the same. For
    /// one model they are part of `resident_bytes`, for all models not.
    pub shared_bytes: u64,
    /// Bytes of KV pages and states that requests use, part of `resident_bytes`.
    pub kv_bytes: u64,
    /// Bytes of cached prefixes: KV pages and states that no request uses; part of
    /// `resident_bytes`.
    pub prefix_bytes: u64,
    /// Bytes of scratch, part of `resident_bytes`.
    pub scratch_bytes: u64,
    /// Number of times that a needed segment was resident.
    pub hits: u64,
    /// Number of times that a needed segment was not resident.
    pub misses: u64,
    /// Number of evicted segments.
    pub evictions: u64,
    /// Number of evicted segments by cause.
    pub evictions_by: Evictions,
    /// Number of completed uploads.
    pub uploads: u64,
    /// Bytes of completed uploads.
    pub uploaded_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::Snapshot;

    #[test]
    fn unread_streams_are_in_the_way_of_who_reads_and_of_who_cannot_even_wait() {
        let mut snapshot = Snapshot::empty();
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
