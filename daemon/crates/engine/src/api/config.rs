//! Settings of the engine, which the daemon sets at start.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use rocmforge_device::Stalls;
use rocmforge_device_gpu::UploadWay;
use rocmforge_gpu_driver::others::Places;
use rocmforge_ops::KvType;

use crate::api::{Budget, Class, IdleRelease, Policy, When};
use crate::guards::sleep::Clocks;

/// The device that an engine computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best AMD GPU that can be used, else the best NVIDIA GPU, else the CPU.
    Auto,
    /// The CPU, even if there is a GPU.
    Host,
    /// An AMD GPU, by its number in the HIP runtime.
    Hip(u32),
    /// An NVIDIA GPU, by its number in the CUDA driver.
    Cuda(u32),
}

/// Default of [`EngineConfig::host_budget`].
pub const HOST_BUDGET_DEFAULT: Budget = Budget::Percent(12.5);

/// Default of [`HostPressure::percent`], in percent: systemd also asks services to give memory back
/// from there on.
pub const HOST_PRESSURE_DEFAULT_PERCENT: f64 = 10.0;

/// Default of [`EngineConfig::watchdog`].
pub const WATCHDOG_DEFAULT: Duration = Duration::from_secs(30);

/// Whose earlier requests' KV cache a request may reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixCache {
    /// No prefix cache: every prompt is computed from its first token.
    Off,
    /// Reuse the KV cache of requests of the same client only. No client can find out from response
    /// times what another one asked.
    PerClient,
    /// Reuse the KV cache of any client's requests.
    Shared,
}

/// When the machine counts as short of memory, so that the engine gives some host memory back.
#[derive(Debug, Clone)]
pub struct HostPressure {
    /// Share of time, in percent, during which some task waits for memory, from which on host
    /// memory is given back.
    pub percent: f64,
    /// Where the kernel's counts of memory stalls are read.
    pub stalls: Stalls,
    /// Interval at which the counts of stalls are read; `percent` is a share of it.
    pub every: Duration,
    /// How long the share has to stay below half of `percent` before host memory is taken again.
    pub calm: Duration,
}

impl Default for HostPressure {
    fn default() -> Self {
        Self {
            percent: HOST_PRESSURE_DEFAULT_PERCENT,
            stalls: Stalls::default(),
            every: Duration::from_secs(2),
            calm: Duration::from_secs(10),
        }
    }
}

/// Configuration of `yield_to`: memory is given up while another process uses the GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YieldTo {
    /// What the budget shrinks to; with 0 bytes the GPU is closed as well while there is no work.
    pub to: Budget,
    /// How long the other process has to have gone before memory is taken again.
    pub calm: Duration,
    /// How long another process that stays on the GPU has to be idle before memory is taken again.
    pub quiet: Duration,
}

impl YieldTo {
    /// Yields to another process by reducing the budget to `to`, with the default times.
    #[must_use]
    pub fn new(to: Budget) -> Self {
        Self {
            to,
            calm: Duration::from_secs(5),
            quiet: Duration::from_secs(300),
        }
    }
}

/// Settings of the KV cache on disk.
#[derive(Debug, Clone, PartialEq)]
pub struct KvDiskConfig {
    /// Directory for KV cache on disk, which no other process uses.
    pub directory: PathBuf,
    /// Maximum size of the directory's files; a percentage refers to the size of the file system.
    pub budget: Budget,
    /// Whether KV pages are written and read even if recomputing them would take less time; for
    /// tests.
    pub always: bool,
    /// Maximum number of bytes that may wait to be written; `None` for the store's default.
    pub queue_bytes: Option<u64>,
    /// Maximum write rate in bytes a second; `None` for the store's default.
    pub write_bytes_per_s: Option<u64>,
}

/// Gaps between tokens that are promised to requests that ask for none, by class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MaxGaps {
    /// Longest gap promised to interactive requests by default; `None` promises none.
    pub interactive: Option<Duration>,
    /// Longest gap promised to batch requests by default; `None` promises none.
    pub batch: Option<Duration>,
}

impl MaxGaps {
    /// The longest gap that requests of a class are promised by default.
    #[must_use]
    pub fn of(self, class: Class) -> Option<Duration> {
        match class {
            Class::Interactive => self.interactive,
            Class::Batch => self.batch,
        }
    }
}

/// Settings with which the engine starts.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The device that the engine computes on.
    pub device: DeviceChoice,
    /// Number of CPU threads for the CPU device's operations; `None` is one for each core.
    pub threads: Option<NonZeroUsize>,
    /// Budget of the cache: weights, KV pages and scratch.
    pub budget: Budget,
    /// Eviction policy of the segment cache.
    pub policy: Policy,
    /// Maximum number of requests that run at the same time.
    pub max_sequences: NonZeroUsize,
    /// Maximum number of requests that wait for admission.
    pub queue_capacity: usize,
    /// Longest context of a request in tokens, whatever its model was trained for.
    pub n_ctx_max: u32,
    /// Maximum number of prompt tokens that one pass computes; `None` is what the device prefers.
    pub prefill_chunk: Option<NonZeroUsize>,
    /// Maximum number of uploads in flight ahead of need; `None` is what the device prefers.
    pub prefetch: Option<u32>,
    /// Whether weights that are not on the device may be computed on the CPU instead of uploaded.
    pub cpu_compute: When,
    /// Memory that the engine may keep on the host, at most half of the host's: weights in the CPU
    /// kernels' layout, if the CPU computes missing segments; and in what they leave, KV pages and
    /// states that do not fit on the device. `None` is the default.
    pub host_budget: Option<Budget>,
    /// Whether KV pages and recurrent states that leave the device are kept in host memory. `Auto`:
    /// if copying them back takes less time than recomputing them, by measured rates. Ignored on
    /// the CPU device, whose arena is host memory itself.
    pub host_kv: When,
    /// Settings of the KV cache on disk; `None` if there is none.
    pub kv_disk: Option<KvDiskConfig>,
    /// When the device's memory is given back to the driver while there are no requests.
    pub idle_release: IdleRelease,
    /// Memory pressure at which host memory is given back; `None` keeps it always.
    pub host_pressure: Option<HostPressure>,
    /// Whether the parts of a model's file that the page cache does not hold are read with direct
    /// I/O. `Auto`: for models larger than the memory that is available when they are loaded. File
    /// systems without direct I/O are read normally.
    pub direct_io: When,
    /// Whether segments with the same content in several models are detected, and kept once.
    pub share_weights: bool,
    /// Whose earlier requests' KV cache a request may reuse.
    pub prefix_cache: PrefixCache,
    /// Element type of the KV cache, for models whose head sizes allow it; others use f16. `None`
    /// chooses by model: [`Plan::kv_type_default`](rocmforge_ops::Plan::kv_type_default).
    pub kv_type: Option<KvType>,
    /// Whether speculative decoding drafts tokens by n-grams or with a model's MTP head, if that is
    /// faster. `None` is on for the CPU device alone: there a row's result does not depend on the
    /// number of rows, so the text is the same with drafts and without. A model that was loaded
    /// with a draft model uses it unless this is `Some(false)`.
    pub speculate: Option<bool>,
    /// Whether long prompts of a resident MoE model run a few steps at a time between decode
    /// passes, instead of adding a few rows to each. `None` is on if the device captures graphs, as
    /// GPUs do.
    pub interleave: Option<bool>,
    /// How long a pass runs before other passes have their turn, between two of its steps. `None`
    /// lets the engine choose; zero stops after each step, for tests.
    pub slice: Option<Duration>,
    /// How long a request keeps its KV cache at least before it may be preempted in favour of one
    /// that has none. `None` lets the scheduler choose.
    pub term: Option<Duration>,
    /// Gaps between tokens that are promised to requests that ask for none.
    pub max_gaps: MaxGaps,
    /// Number of logits from which on several threads search them instead of the engine's thread
    /// alone. `None` lets the engine choose; 0 is always, for tests.
    pub rows_shared_from: Option<usize>,
    /// GPU memory to keep free for other programs: the budget shrinks if less is free. `None` keeps
    /// none free.
    pub keep_free: Option<Budget>,
    /// How far the budget shrinks while another process uses the GPU; `None` never shrinks it.
    pub yield_to: Option<YieldTo>,
    /// Directories and libraries from which other processes on a GPU and its power are read.
    pub places: Places,
    /// How long work of a GPU may take before the device counts as hung.
    pub watchdog: Duration,
    /// How weights are uploaded to a GPU; for measurements.
    pub uploads: UploadWay,
    /// The daemon's executable. It is run with hidden arguments as a child process for probes of a
    /// vendor's library that may end the process. `None` skips these probes.
    pub child_exe: Option<PathBuf>,
    /// Clocks whose difference shows that the machine was suspended.
    pub clocks: Clocks,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            threads: None,
            budget: Budget::Percent(80.0),
            policy: Policy::PassAware,
            max_sequences: NonZeroUsize::new(64).expect("not zero"),
            queue_capacity: 320,
            n_ctx_max: 32_768,
            prefill_chunk: None,
            prefetch: None,
            cpu_compute: When::Auto,
            host_budget: Some(HOST_BUDGET_DEFAULT),
            host_kv: When::Auto,
            kv_disk: None,
            idle_release: IdleRelease::default(),
            host_pressure: None,
            direct_io: When::Auto,
            share_weights: false,
            prefix_cache: PrefixCache::PerClient,
            kv_type: None,
            speculate: None,
            interleave: None,
            slice: None,
            term: None,
            max_gaps: MaxGaps::default(),
            rows_shared_from: None,
            keep_free: None,
            yield_to: None,
            places: Places::default(),
            watchdog: WATCHDOG_DEFAULT,
            uploads: UploadWay::default(),
            child_exe: None,
            clocks: Clocks::default(),
        }
    }
}
