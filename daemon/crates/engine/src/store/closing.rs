//! Closes the device while nothing is on it, and opens it again.
//!
//! ```text
//!   open --(memory is released, only the device's own block is left)--> closed
//!     ^                                                                 |  ^ |
//!     +--(a request comes)----------------------------------------------+  +-+ it does not open
//! ```
//!
//! The engine's thread closes and opens, so a request that arrives meanwhile waits for that. The
//! ledger does not change: the block that the device has for itself stays where it is, without
//! memory behind it.

use rocmforge_device::{Loss, LossKind};

use crate::store::Store;

type DeviceError = rocmforge_device::Error;

impl Store {
    /// Whether the device holds nothing but its own block, and no upload is in flight.
    pub(crate) fn is_empty(&self) -> bool {
        let usage = self.cache.usage();
        usage.total() == usage.staging && self.under_way.is_empty()
    }

    /// Closes the device, on which nothing is left but its own block, and keeps the first `aside`
    /// bytes of pages set aside in host memory. Returns whether it is closed.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if host memory does not suffice for the pages: the device
    /// stays open.
    pub(crate) fn close_device(&mut self, aside: u64) -> Result<bool, DeviceError> {
        assert!(self.is_empty(), "the device is closed while in use");
        let closed = self.device.close(aside);
        self.count_free_bytes_now();
        if self.device.is_closed() {
            // The next device begins its numbers anew.
            self.settling.clear();
        }
        closed.inspect_err(|error| self.note_loss(error))
    }

    /// Opens the device if it is closed, with an arena of the budget and its block where it was.
    /// Returns whether it was closed; after an error it still is.
    pub(crate) fn open_device(&mut self) -> Result<bool, DeviceError> {
        if !self.device.is_closed() {
            return Ok(false);
        }
        let bytes = self.budget().max(self.cache.arena_end());
        let device = &mut self.device;
        let mut opened = device.open();
        opened = opened.and_then(|()| device.set_capacity(bytes));
        if let Some(slab) = self.reserve {
            opened = opened.and_then(|()| device.set_reserve(slab.offset, slab.bytes));
        }
        if let Err(error) = opened {
            self.note_loss(&error);
            if self.lost().is_none() {
                // What was opened goes, and all that was set aside stays.
                if let Err(rest) = self.close_device(u64::MAX) {
                    tracing::warn!(error = %rest, "a GPU that did not open is not closed as a whole");
                    if !self.device.is_closed() {
                        let reason = format!("it did not open as a whole: {error}");
                        let _ = self.lost.set(Loss::new(LossKind::Unknown, reason));
                    }
                }
            }
            return Err(error);
        }
        self.openings += 1;
        self.count_free_bytes_now();
        Ok(true)
    }
}
