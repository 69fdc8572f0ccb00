//! What a device's driver and the system say of it: its memory, hangs, losses.

use crate::{Device, Loss, MemoryUse, Said};

/// Tells, from any thread, why the device counts as hung, if it does.
pub type Watch = Box<dyn Fn() -> Option<Loss> + Send>;

/// A device whose driver counts its memory, and which can hang or be lost.
pub trait Monitoring {
    /// What the driver gave to this process.
    fn memory_use(&self) -> MemoryUse;

    /// Bytes free by the driver's own count, other processes' shares taken off; `None` where the
    /// driver does not answer or is closed. Asks the driver, so not for every step.
    fn free_bytes(&self) -> Option<u64>;

    /// A look at the device from another thread: whether it hangs so that a call of its driver does
    /// not come back, and since when.
    fn watch(&self) -> Watch;

    /// What the system has to say of a device that was lost. Asks no driver.
    fn said_of_loss(&self) -> Option<Said>;
}

impl dyn Device + '_ {
    /// [`Monitoring::memory_use`]; `None` where there is no such count, as on the host.
    pub fn memory_use(&self) -> Option<MemoryUse> {
        self.monitoring().map(|device| device.memory_use())
    }

    /// [`Monitoring::free_bytes`]; `None` where nobody counts.
    pub fn free_bytes(&self) -> Option<u64> {
        self.monitoring()?.free_bytes()
    }

    /// [`Monitoring::watch`]; `None` of a device that does not hang.
    pub fn watch(&self) -> Option<Watch> {
        self.monitoring().map(|device| device.watch())
    }

    /// [`Monitoring::said_of_loss`]; nothing of a device that is not lost.
    pub fn said_of_loss(&self) -> Option<Said> {
        self.monitoring()?.said_of_loss()
    }
}
