//! The card by the driver's own account: its versions, its memory, and what it reaches.
//!
//! This process's second opening of the card, beside the engine's: both vendors
//! share one context among them.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use rocmforge_device_gpu::ceilings::{self, Ceilings};
use rocmforge_gguf::MappedFile;
use rocmforge_gpu_driver::{self as gpu, Context, Libraries, Vendor};

/// An open card.
pub(crate) struct Card {
    context: Context,
    /// The library's name and the driver's version.
    pub(crate) driver: String,
}

impl Card {
    /// Opens the first card of a vendor.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn open(vendor: Vendor) -> Result<Self> {
        let driver = gpu::open(vendor, &Libraries::from_env())?;
        let library = driver.library().to_owned();
        // The driver has to be started before it tells anything.
        driver.device_count()?;
        let version = driver.versions().map(|versions| versions.driver);
        let version = version.unwrap_or_else(|error| format!("of unknown version ({error})"));
        let context = Context::open(driver, 0)?;
        Ok(Self {
            context,
            driver: format!("{library} {version}"),
        })
    }

    /// Bytes of its memory that are not free, by the driver's count: of every process.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn used_bytes(&self) -> Result<u64> {
        let memory = self.context.memory()?;
        Ok(memory.total.saturating_sub(memory.free))
    }

    /// What it reaches while nothing else uses it; `file` is one in the page cache.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn ceilings(&self, file: &Path) -> Result<Ceilings> {
        let file = Arc::new(MappedFile::open(file)?);
        ceilings::measure(&self.context, &file).context("measuring the card's ceilings")
    }
}
