//! What the engine publishes of itself: the snapshot that status calls read.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_device::{DeviceKind, Loss, MemoryUse};
use rocmforge_gpu_driver::Report;
use rocmforge_scheduler::are_left_to_others;
use rocmforge_tensor_cache::Evictions;

use super::{BrokenGaps, Gap, Policy};
use crate::model::loaded::LoadedModel;

/// What the engine published last.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The device.
    pub device: DeviceStatus,
    /// Results of probing each vendor's driver at the start.
    pub drivers: Arc<[Report]>,
    /// Why `auto` rejected the devices before the one in use.
    pub passed_over: Arc<[String]>,
    /// Models in the order of their loading.
    pub models: Vec<ModelStatus>,
    /// The cache as a whole.
    pub cache: CacheStatus,
    /// The most bytes of segments, resident or in flight, that a snapshot ever knew of.
    pub peak_bytes: u64,
    /// The policy in force.
    pub policy: Policy,
    /// Requests that wait for admission.
    pub queued: u32,
    /// Queued requests whose clients read their streams. Only for these are unread streams of
    /// others ended.
    pub queued_and_read: u32,
    /// Maximum number of queued requests.
    pub queue_capacity: u32,
    /// Requests that run.
    pub running: u32,
    /// Numbers of requests, by client.
    pub clients: Vec<ClientStatus>,
    /// The requests in the order in which they came, at most [`LIVE_MAX`].
    pub requests: Vec<LiveRequest>,
    /// Device memory kept free for other programs, if any is.
    pub keep_free: Option<KeepFreeStatus>,
    /// Whether memory is given up for other users of the GPU, where they are looked at.
    pub yielding: Option<YieldStatus>,
    /// The budget that the next request restores, while the device's memory is released.
    pub released_budget: Option<u64>,
    /// Whether the device's context is closed meanwhile.
    pub device_closed: bool,
    /// Times that the device's memory was released, since start-up.
    pub releases: u64,
    /// What goes back of the host's memory while the machine is short of it, if there is anything
    /// that can.
    pub host_pressure: Option<HostPressureStatus>,
    /// What prompts began with, since start-up.
    pub prefixes: PrefixCounts,
    /// Images whose rows vision towers were asked for.
    pub images_read: u64,
    /// Passes of tokens that ran between the steps of a prompt's chunk, since start-up.
    pub interleaved_passes: u64,
    /// Times that a pass stopped between two of its steps, so that others had a turn, since
    /// start-up.
    pub suspensions: u64,
    /// Upload rate of the link to the device, in bytes per second, by timed copies.
    pub link_bytes_per_s: Option<u64>,
    /// Gaps between tokens that were longer than promised.
    pub broken_gaps: BrokenGaps,
    /// Times that the file of a model was read while others went on.
    pub brought_aside: u64,
    /// Bytes of weights that were uploaded beside the passes of other models.
    pub uploaded_aside_bytes: u64,
    /// What the host computed that was not on the card, since start-up.
    pub hosted: Hosted,
    /// Pages and states that are kept in the host's memory.
    pub host_tier: HostTier,
    /// The KV cache on disk, if there is one.
    pub kv_disk: Option<KvDiskStatus>,
    /// No new work is taken.
    pub draining: bool,
    /// The device failed for good, how and why.
    pub device_lost: Option<Loss>,
    /// A file that has not answered for seconds, and is waited for.
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

    /// Whether streams that nobody reads are in the way of others: somebody waits who would read
    /// what comes, or so many wait that one client's do not come in any more.
    pub fn others_wait(&self) -> bool {
        let free = self.queue_capacity.max(1).saturating_sub(self.queued);
        self.queued_and_read > 0 || are_left_to_others(self.queued as usize, free as usize)
    }
}

/// A file that the engine waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileWait {
    /// The model that is read from the file.
    pub model: String,
    /// The file; of a split model its first part.
    pub path: PathBuf,
    /// Start of the wait.
    pub since: Instant,
    /// Whether requests of all models wait with it, and not its own alone.
    pub all_wait: bool,
}

/// What the host computed in place of the card.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hosted {
    /// Bytes of weights.
    pub bytes: u64,
    /// How long that took, in all.
    pub took: Duration,
}

/// Pages of keys and values, and states, that left the device for the host's memory.
/// Counts are since start-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostTier {
    /// Bytes that they may have now: the host's budget less the weights that it keeps; 0
    /// where no KV pages are kept in host memory.
    pub budget_bytes: u64,
    /// Host memory used by KV cache, in bytes.
    pub bytes: u64,
    /// Pages and states that were copied there.
    pub saved: u64,
    /// KV pages and recurrent states copied back to the device.
    pub restored: u64,
    /// KV pages and recurrent states that were evicted without a copy: there was no room, or it did
    /// not pay.
    pub dropped: u64,
    /// Positions that preempted requests recomputed.
    pub again_tokens: u64,
}

/// The KV cache on disk. Counts are since start-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvDiskStatus {
    /// The state of the store.
    pub store: rocmforge_kv_disk::Status,
    /// Requests that began with a prefix read from disk.
    pub requests: u64,
    /// Positions of these prefixes.
    pub reused_tokens: u64,
}

/// What is kept free for others, and by how much the budget is smaller because others hold memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepFreeStatus {
    /// Bytes that are to be free; 0 where nothing is to be.
    pub bytes: u64,
    /// Bytes by which the budget is smaller now for that, or because others held memory at the
    /// start.
    pub given_up_bytes: u64,
    /// Times that memory was given back.
    pub shrinks: u64,
    /// Times that the budget grew again.
    pub grows: u64,
}

/// Other users of the GPU, and whether memory is given up for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct YieldStatus {
    /// What the budget shrinks to.
    pub to_bytes: u64,
    /// Bytes of the GPU's memory that others hold.
    pub others_bytes: u64,
    /// Whether memory is given up now.
    pub is_yielding: bool,
    /// Times that the budget was reduced.
    pub count: u64,
}

/// What the host holds of the machine's memory, and what it gave up because the machine was short
/// of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HostPressureStatus {
    /// The share of time, in percent, during which something has to wait for memory for that.
    pub percent: f64,
    /// The system does not count such waits, so nothing is given up.
    pub is_blind: bool,
    /// Bytes that it holds: weights that the CPU computes with, pages and states.
    pub held_bytes: u64,
    /// Current reduction of the host budget, in bytes.
    pub given_up_bytes: u64,
    /// Times that memory was given back.
    pub shrinks: u64,
    /// Times that the host budget grew again.
    pub grows: u64,
}

/// Maximum number of requests that a snapshot shows.
pub const LIVE_MAX: usize = 64;

/// A request that waits or runs.
#[derive(Debug, Clone)]
pub struct LiveRequest {
    /// The request's number, of [`TimesSlot::numbered`](super::times::TimesSlot::numbered); 0 if it
    /// has none. The choices of one request share it.
    pub number: u64,
    /// The request's client; see [`Asker::client`](super::Asker::client).
    pub client: u64,
    /// The request's model.
    pub model: Arc<LoadedModel>,
    /// Whether the request computes, or what it waits for.
    pub state: LiveState,
    /// Time at which the engine received the request.
    pub since: Instant,
    /// Tokens of the request's prompt or text.
    pub prompt_tokens: u32,
    /// Positions of the request that are computed, prompt and generated tokens together.
    pub computed_tokens: u32,
    /// Tokens that the request has generated.
    pub generated_tokens: u32,
    /// Decode rate: tokens a second after the first one; `None` before the second token.
    pub tokens_per_s: Option<f64>,
    /// Longest gap between two tokens of the request.
    pub longest_gap: Option<Gap>,
}

/// What a request does, or waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiveState {
    /// The request is not admitted.
    Queued,
    /// The request was preempted because others needed its KV cache memory.
    Preempted,
    /// Weights or KV cache are read from disk.
    Disk,
    /// Weights are uploaded.
    Uploads,
    /// The request waits for another one that computes their common prefix.
    Follows,
    /// The client does not read the request's stream.
    Reader,
    /// The request's prompt or text is computed.
    Prompt,
    /// The request's new tokens are computed.
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

/// The requests of a client; see [`Asker::client`](super::Asker::client).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientStatus {
    /// The client.
    pub client: u64,
    /// The client's requests that run.
    pub running: u32,
    /// The client's requests that wait.
    pub queued: u32,
}

/// Counts of prompts' tokens, of requests that may reuse.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    /// Tokens of prompts.
    pub asked_tokens: u64,
    /// Prompt tokens that were reused from the prefix cache.
    pub reused_tokens: u64,
}

/// The device, as clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceStatus {
    /// The processor, or a GPU of one vendor.
    pub kind: DeviceKind,
    /// The processor's or card's name, with the instruction set in use.
    pub name: String,
    /// The device's instruction set or architecture, for example `avx512` or `gfx1100`.
    pub arch: String,
    /// The driver's number of the GPU; 0 for the CPU.
    pub ordinal: u32,
    /// Version of its driver; empty for the host or where it is not known.
    pub driver: String,
    /// Findings about the device since it was opened; see
    /// [`rocmforge_device::DeviceInfo::findings`].
    pub findings: Vec<String>,
    /// That the CPU computes although a GPU is on the bus that cannot be used, and why.
    pub unused_gpu: Option<String>,
    /// Compute units or streaming multiprocessors; 0 for the host.
    pub compute_units: u32,
    /// The device's memory in bytes.
    pub memory_bytes: u64,
    /// Allocations asked of the driver since start-up.
    pub allocations: u64,
    /// GPU memory as the driver counts it; `None` on the CPU.
    pub memory: Option<MemoryUse>,
    /// Bytes free by its driver's count, at most half a second old while there is
    /// work; `None` on the host.
    pub free_bytes: Option<u64>,
}

/// A model and where its segments are.
#[derive(Debug, Clone)]
pub struct ModelStatus {
    /// The model.
    pub model: Arc<LoadedModel>,
    /// State of each segment, by index. Snapshots of a model of which nothing is there share it.
    pub segments: Arc<[SegmentStatus]>,
    /// The cache's counts for this model.
    pub cache: CacheStatus,
    /// Queued and running requests of the model.
    pub requests: u32,
    /// Name of the model's draft model.
    pub draft: Option<String>,
}

/// Where a segment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentState {
    /// The segment is absent: its weights are only in the file.
    Absent,
    /// The segment is in flight.
    InFlight,
    /// On the device.
    Resident,
}

/// A segment's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentStatus {
    /// The segment's bytes on the device.
    pub bytes: u64,
    /// Residency of the segment.
    pub state: SegmentState,
    /// Whether the segment is pinned.
    pub pinned: bool,
    /// Whether a running step uses the segment.
    pub in_use: bool,
}

/// Counts of the cache, of one model or of all. `budget_bytes` is the same in both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// The budget.
    pub budget_bytes: u64,
    /// Bytes on the device: weights, KV and scratch. `resident + in flight <= budget`.
    pub resident_bytes: u64,
    /// Bytes of weights in flight.
    pub in_flight_bytes: u64,
    /// Bytes of resident pinned segments.
    pub pinned_bytes: u64,
    /// Bytes of resident segments that another model's segment with the same content holds. Of one
    /// model: part of `resident_bytes`. Of all: not part of it.
    pub shared_bytes: u64,
    /// Bytes of KV pages and states that requests use, part of `resident_bytes`.
    pub kv_bytes: u64,
    /// Bytes of KV pages and states that no request uses, kept for prompts that begin alike;
    /// part of `resident_bytes`.
    pub prefix_bytes: u64,
    /// Bytes of scratch, part of `resident_bytes`.
    pub scratch_bytes: u64,
    /// Segments found resident when needed.
    pub hits: u64,
    /// Segments that were not.
    pub misses: u64,
    /// Segments evicted.
    pub evictions: u64,
    /// Evictions by cause.
    pub evictions_by: Evictions,
    /// Uploads that were completed.
    pub uploads: u64,
    /// Bytes of these uploads.
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
