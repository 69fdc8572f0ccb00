//! Settings of the engine.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use rocmforge_device::Stalls;
use rocmforge_device_gpu::UploadWay;
use rocmforge_gpu_driver::others::Places;
use rocmforge_ops::KvType;

use crate::api::{Budget, Class, IdleRelease, Policy, When};
use crate::guards::sleep::Clocks;

/// Device to compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best AMD GPU that can be used, else the best NVIDIA GPU, else the host.
    Auto,
    /// The CPU.
    Host,
    /// An AMD GPU by the runtime's number of it.
    Hip(u32),
    /// An NVIDIA GPU by the driver's number of it.
    Cuda(u32),
}

/// Usual value of [`EngineConfig::host_budget`].
pub const HOST_BUDGET_DEFAULT: Budget = Budget::Percent(12.5);

/// Usual value of [`HostPressure::percent`]: from there on systemd, too, asks services by default
/// to give memory back.
pub const HOST_PRESSURE_DEFAULT_PERCENT: f64 = 10.0;

/// Usual value of [`EngineConfig::watchdog`].
pub const WATCHDOG_DEFAULT: Duration = Duration::from_secs(30);

/// Whose earlier requests' KV cache a request may reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixCache {
    /// No prefix cache: every prompt is computed from its first token.
    Off,
    /// Requests of one client share. No client can find out from response times what another one
    /// asked.
    PerClient,
    /// Everybody's.
    Shared,
}

/// When the machine is short of memory, so that some of the host's goes back.
#[derive(Debug, Clone)]
pub struct HostPressure {
    /// While something waits for memory during this share of the time, in percent.
    pub percent: f64,
    /// Source of the counts of stalls.
    pub stalls: Stalls,
    /// How often the counts are looked at: the time that the share is of.
    pub every: Duration,
    /// How long there has to be less than half of that share before some is taken again.
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

/// The KV cache on disk.
#[derive(Debug, Clone, PartialEq)]
pub struct KvDiskConfig {
    /// Directory for KV cache on disk, which no other process uses.
    pub directory: PathBuf,
    /// Bytes of its files at most; a share is of the file system's size.
    pub budget: Budget,
    /// Pages are written and read whether or not that takes less time than computing them, for
    /// tests.
    pub always: bool,
    /// Bytes that may wait to be written; `None` for the store's own limit.
    pub queue_bytes: Option<u64>,
    /// Maximum write rate in bytes a second; `None` for the store's own limit.
    pub write_bytes_per_s: Option<u64>,
}

/// The longest gap between tokens that requests are promised which ask for none, by class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MaxGaps {
    /// Default longest gap of interactive requests.
    pub interactive: Option<Duration>,
    /// Default longest gap of batch requests.
    pub batch: Option<Duration>,
}

impl MaxGaps {
    /// The longest gap of a class.
    #[must_use]
    pub fn of(self, class: Class) -> Option<Duration> {
        match class {
            Class::Interactive => self.interactive,
            Class::Batch => self.batch,
        }
    }
}

/// Settings of the engine, for its start.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The device.
    pub device: DeviceChoice,
    /// Threads of the host device's operations; `None` is one a core.
    pub threads: Option<NonZeroUsize>,
    /// Budget of the cache: weights, KV pages and scratch.
    pub budget: Budget,
    /// Eviction policy of the segment cache.
    pub policy: Policy,
    /// Requests that run at the same time.
    pub max_sequences: NonZeroUsize,
    /// Requests that may wait for admission.
    pub queue_capacity: usize,
    /// Longest context of a request in tokens, whatever its model was trained for.
    pub n_ctx_max: u32,
    /// Tokens of a prompt that are computed in one pass.
    ///
    /// `None` is what the device prefers.
    pub prefill_chunk: Option<NonZeroUsize>,
    /// Uploads under way ahead of their turn, at most; `None` is what the device prefers.
    pub prefetch: Option<u32>,
    /// Whether weights that are not on the device may be computed on the CPU instead of uploaded.
    pub cpu_compute: When,
    /// What the host may keep in its own memory, half of it at most: weights in the form that it
    /// computes with, where it computes what is not on the card; and in what they leave, pages of
    /// keys and values, and states, that have no room on the card.
    pub host_budget: Option<Budget>,
    /// Whether KV pages and recurrent states that leave the device are kept in host memory: auto is
    /// where copying them back takes less time than recomputing them, by what was measured of both.
    /// Ignored on the host device, whose arena is in that memory itself.
    pub host_kv: When,
    /// The KV cache on disk; `None` is none.
    pub kv_disk: Option<KvDiskConfig>,
    /// When the device's memory is given back to the driver while there are no requests.
    pub idle_release: IdleRelease,
    /// Memory pressure at which host memory is given back; `None` is never.
    pub host_pressure: Option<HostPressure>,
    /// Whether what the page cache does not hold of a model is read past it: auto is of models
    /// larger than the memory that is available when they are loaded. A file system that has no
    /// direct reads is read as ever.
    pub direct_io: When,
    /// Whether segments of several models with the same content are looked for, and kept once.
    pub share_weights: bool,
    /// Whose earlier requests' KV cache a request may reuse.
    pub prefix_cache: PrefixCache,
    /// What keys and values are stored as, where a model's heads fit it; else f16. `None` is by the
    /// model: [`Plan::kv_type_default`](rocmforge_ops::Plan::kv_type_default).
    pub kv_type: Option<KvType>,
    /// Whether tokens are drafted, from what a text has said before or by a model's block
    /// that predicts one more, where that pays. `None` is on the host alone: there a row's
    /// result does not depend on the number of rows, and so the text is the same whenever
    /// drafts are made. A model that was loaded with a draft model has its drafts as well,
    /// unless this is `Some(false)`.
    pub speculate: Option<bool>,
    /// Whether long prompts of a resident MoE model go through the layers in parts, between
    /// the passes of others' tokens, instead of a few rows beside each. `None` is where the device
    /// records passes, as GPUs do.
    pub interleave: Option<bool>,
    /// How long a pass goes on before others have their turn, between two of its steps. `None`
    /// leaves it to the engine; zero stops behind each step, for tests.
    pub slice: Option<Duration>,
    /// How long a request has its room for KV cache at least before it gives all of it for a while
    /// to who has none. `None` leaves it to the scheduler.
    pub term: Option<Duration>,
    /// The gaps that requests are promised which ask for none.
    pub max_gaps: MaxGaps,
    /// How many logits are looked at by several threads, and not by the engine's alone. `None`
    /// leaves it to the engine; 0 is always, for tests.
    pub rows_shared_from: Option<usize>,
    /// Bytes of a GPU's memory that are to be free for others: the budget shrinks where
    /// they are not; `None` is none.
    pub keep_free: Option<Budget>,
    /// What the budget shrinks to while another process uses the GPU; `None` is no shrink.
    pub yield_to: Option<YieldTo>,
    /// Directories and libraries from which other processes on a GPU and its power are read.
    pub places: Places,
    /// How long work of a GPU may take before the device counts as hung.
    pub watchdog: Duration,
    /// How uploads to a GPU go, for measurements.
    pub uploads: UploadWay,
    /// This program, run again with the hidden arguments that it understands: what a vendor's
    /// library may end a process with is tried there first. `None` tries nothing.
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
