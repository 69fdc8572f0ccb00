//! The engine on the HIP path without a card: a fake runtime, and how the tests' engines are set up on it.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::time::Duration;

use rocmforge_device::gpu::device::ImageFolder;
use rocmforge_device::gpu::{GpuConfig, GpuDevice, Libraries, Vendor};
use rocmforge_engine::api::Budget;
use rocmforge_engine::{EngineConfig, EngineHandle, EngineThread, Error, start_on};
use rocmforge_fake_hip::Fake;

/// An engine whose thread is waited for, so that what it held is given back when it is gone.
pub(crate) struct Running {
    handle: Option<EngineHandle>,
    thread: Option<EngineThread>,
}

impl Running {
    /// Lets go of the engine and says how it ended.
    pub(crate) fn end(mut self) -> Result<(), Error> {
        self.handle = None;
        self.thread.take().unwrap().join()
    }
}

impl std::ops::Deref for Running {
    type Target = EngineHandle;

    fn deref(&self) -> &EngineHandle {
        self.handle.as_ref().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How the device is opened: small pinned memory, since a fake one is real memory that must be filled.
pub(crate) fn gpu_config(fake: &Fake) -> GpuConfig {
    GpuConfig {
        libraries: Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        },
        watchdog: Duration::from_secs(20),
        ring_pieces: 2,
        ring_piece_bytes: 64 << 10,
        staging_threads: 2,
        // A vendor's library on this machine knows nothing of the fake's memory.
        vendor_products: false,
        ..GpuConfig::new(Vendor::Hip, 0)
    }
}

/// Starts an engine on the fake.
pub(crate) fn start(fake: &Fake, config: GpuConfig, budget: u64) -> Result<Running, Error> {
    let images = ImageFolder(fake.images());
    let device = GpuDevice::open(config, Box::new(images)).map_err(|e| Error::InvalidArgument {
        field: "device",
        message: e.to_string(),
    })?;
    let config = EngineConfig {
        budget: Budget::Bytes(budget),
        ..EngineConfig::default()
    };
    let (handle, thread) = start_on(Box::new(device), config)?;
    Ok(Running {
        handle: Some(handle),
        thread: Some(thread),
    })
}
