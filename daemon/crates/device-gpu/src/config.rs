//! How a GPU is opened and set up.

use std::path::PathBuf;
use std::time::Duration;

use rocmforge_device::host_memory_bytes;
use rocmforge_gguf::limits::DIRECT_ALIGNMENT;
use rocmforge_gpu_driver::{Libraries, Vendor};
use rocmforge_kernels_gpu::compile::default_cache_dir;

/// How uploads go, where that is not left to what is found of a card: so that measurements can
/// compare. No setting of the daemon's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UploadWay {
    /// No file mapping is registered: all goes through pinned memory.
    pub ring_only: bool,
    /// Streams that copies are queued on, in turn; `None` is as many as are usual.
    pub copy_streams: Option<usize>,
}

/// Settings of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuConfig {
    /// Vendor of the GPU.
    pub vendor: Vendor,
    /// The driver's number of the GPU.
    pub ordinal: u32,
    /// Libraries to open in place of the usual ones.
    pub libraries: Libraries,
    /// How long work may take before the device counts as hung.
    pub watchdog: Duration,
    /// Most bytes of file mappings that are registered with the driver at a time; 0 registers none.
    /// Registered pages cannot leave the page cache.
    pub registered_bytes_max: u64,
    /// Whether registering is tried at the start, and used only where it is faster than pinned
    /// memory.
    pub registration_trial: bool,
    /// Where trials of the driver that may not end are noted; `None` notes none.
    pub trials_dir: Option<PathBuf>,
    /// What the parts that memory is mapped in are multiples of at least, whatever the driver says.
    pub granularity_min: u64,
    /// Threads that bring pieces of files to the device.
    pub staging_threads: usize,
    /// Pinned pieces for files that cannot be registered, and the bytes of one.
    pub ring_pieces: usize,
    /// See `ring_pieces`.
    pub ring_piece_bytes: usize,
    /// Streams that uploads are copied on, in turn.
    pub copy_streams: usize,
    /// Whether decode steps are recorded and replayed.
    pub graphs: bool,
    /// Whether kernels are loaded and files registered ahead of their first use.
    pub warm_up: bool,
    /// Whether large products go to the vendor's library, where there is one.
    pub vendor_products: bool,
    /// A program that understands [`rocmforge_gpu_driver::PRODUCTS_CHILD_ARGUMENT`], in which AMD's
    /// libraries make their first product; `None` makes it here.
    pub child_exe: Option<PathBuf>,
}

impl GpuConfig {
    /// The usual settings for a card.
    pub fn new(vendor: Vendor, ordinal: u32) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            vendor,
            ordinal,
            libraries: Libraries::from_env(),
            watchdog: Duration::from_secs(30),
            registered_bytes_max: (host_memory_bytes() / 2).min(64 << 30),
            // NVIDIA's registrations are as fast everywhere as the files' pages come.
            registration_trial: vendor == Vendor::Hip,
            trials_dir: Some(default_cache_dir().join("trials")),
            granularity_min: 2 << 20,
            staging_threads: cores.div_ceil(2).clamp(2, 8),
            ring_pieces: 8,
            // A slot's rows, and the blocks around them that a direct read brings along.
            ring_piece_bytes: (8 << 20) + 2 * DIRECT_ALIGNMENT,
            // AMD's copy engines are one a stream.
            copy_streams: match vendor {
                Vendor::Hip => 2,
                Vendor::Cuda => 1,
            },
            graphs: true,
            warm_up: true,
            vendor_products: true,
            child_exe: None,
        }
    }

    /// The configuration with uploads in the given way.
    #[must_use]
    pub fn with_uploads(self, way: UploadWay) -> Self {
        Self {
            registered_bytes_max: match way.ring_only {
                true => 0,
                false => self.registered_bytes_max,
            },
            copy_streams: way.copy_streams.unwrap_or(self.copy_streams),
            ..self
        }
    }
}
