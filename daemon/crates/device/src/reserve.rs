//! Memory of the arena that a device has for itself.

use crate::{Device, Error};

/// A device that wants a block of the arena for itself as long as it runs: staging of uploads, what
/// a pass brings along.
pub trait Reserve {
    /// Bytes of the block for a given budget: a small share of it.
    fn reserve_bytes(&self, budget: u64) -> u64;

    /// Where [`Reserve::reserve_bytes`] bytes were reserved: an arena offset and their number.
    /// Called once, before the first upload.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`]: the device cannot be used.
    fn set_reserve(&mut self, offset: u64, bytes: u64) -> Result<(), Error>;
}

impl dyn Device + '_ {
    /// [`Reserve::reserve_bytes`]; a device without wants nothing.
    pub fn reserve_bytes(&mut self, budget: u64) -> u64 {
        self.reserve()
            .map_or(0, |device| device.reserve_bytes(budget))
    }

    /// [`Reserve::set_reserve`]; a device without has no use for it.
    ///
    /// # Errors
    /// As [`Reserve::set_reserve`].
    pub fn set_reserve(&mut self, offset: u64, bytes: u64) -> Result<(), Error> {
        self.reserve()
            .map_or(Ok(()), |device| device.set_reserve(offset, bytes))
    }
}
