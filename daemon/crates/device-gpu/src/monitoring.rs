//! What the driver and the kernel say of a GPU, open or closed: its memory, hangs, losses.

use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::{Loss, LossKind, MemoryUse, Monitoring, Said, Watch};
use rocmforge_gpu_driver::{Calls, KernelView};

use super::GpuDevice;
use super::errors::said;

/// Looks whether a call of the driver is stuck; see [`Monitoring::watch`].
pub(super) fn watch(calls: Arc<Calls>, system: Arc<KernelView>, watchdog: Duration) -> Watch {
    // Waits have the watchdog's patience and are themselves calls; what takes
    // longer than that is stuck.
    let patience = watchdog * 2;
    Box::new(move || {
        let stuck = calls.oldest().filter(|age| *age > patience)?;
        let seconds = stuck.as_secs();
        let reason = format!("a call of the driver has not come back after {seconds} s");
        Some(Loss::new(LossKind::Hang, reason).with(said(&system)))
    })
}

impl Monitoring for GpuDevice {
    fn memory_use(&self) -> MemoryUse {
        MemoryUse {
            allocated_bytes: self.context.usage().device_bytes,
            capacity_bytes: self.arena.capacity(),
            granularity_bytes: self.arena.granularity(),
        }
    }

    fn free_bytes(&self) -> Option<u64> {
        Some(self.context.memory().ok()?.free)
    }

    fn watch(&self) -> Watch {
        let (calls, system) = (Arc::clone(self.context.calls()), Arc::clone(&self.system));
        watch(calls, system, self.config.watchdog)
    }

    fn said_of_loss(&self) -> Option<Said> {
        said(&self.system)
    }
}
