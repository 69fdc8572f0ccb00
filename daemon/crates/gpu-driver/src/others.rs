//! What other processes do on a card: how much of its memory they hold, and how busy they keep it.
//!
//! The vendor's ways differ: NVIDIA's management library (NVML) counts by process; of an AMD card
//! the kernel counts by open file (`/proc/*/fdinfo`), which only who may trace a process can read,
//! and as a whole (sysfs). Neither needs a context, so an [`Observer`] may be asked from any
//! thread, and does not wait for the work that is queued.

mod amdgpu;
mod nvml;
mod power;

use std::path::PathBuf;
use std::time::Instant;

use super::Vendor;

pub use power::Power;

/// What other processes do on a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OthersUse {
    /// Bytes of the GPU's memory that other processes hold.
    pub bytes: u64,
    /// Whether each process was counted. If not, what this process's driver holds for itself may be
    /// among the bytes.
    pub is_exact: bool,
    /// The share of the time, in percent, that they compute; `None` where nobody says.
    pub busy_percent: Option<u32>,
}

/// What this process does on the card, which is not the others'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnUse {
    /// Bytes that the daemon has allocated.
    pub bytes: u64,
    /// Whether the process has work on the GPU.
    pub is_working: bool,
}

/// Looks at what others do on one card.
pub trait Observer: Send {
    /// Reads what other processes use of the GPU at `now`.
    ///
    /// # Errors
    /// For people: what could not be read, and what to do.
    fn look(&mut self, own: OwnUse, now: Instant) -> Result<OthersUse, String>;
}

/// Directories and libraries that observers read; tests have their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// What has `proc` and `sys`.
    pub root: PathBuf,
    /// Library to open in place of `libnvidia-ml.so.1`.
    pub nvml: Option<PathBuf>,
}

impl Default for Places {
    /// The system's; NVML as ROCMFORGE_NVML_LIBRARY says, where that is not empty.
    fn default() -> Self {
        let nvml = std::env::var_os("ROCMFORGE_NVML_LIBRARY").filter(|value| !value.is_empty());
        Self {
            root: PathBuf::from("/"),
            nvml: nvml.map(PathBuf::from),
        }
    }
}

/// A card by its place on the bus: what can be asked of it without a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// Vendor of the GPU.
    pub vendor: Vendor,
    /// The GPU's PCI address.
    pub address: String,
}

impl Card {
    /// Opens the observer of other processes on this GPU.
    ///
    /// # Errors
    /// For people: why it cannot be observed, and what to do.
    pub fn observer(&self, places: &Places) -> Result<Box<dyn Observer>, String> {
        Ok(match self.vendor {
            Vendor::Cuda => Box::new(nvml::NvmlObserver::open(&self.address, places)?),
            Vendor::Hip => Box::new(amdgpu::DrmObserver::open(&self.address, places)?),
        })
    }
}
