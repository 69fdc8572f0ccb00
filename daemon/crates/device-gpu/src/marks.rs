//! Marks at both ends of the reserve, by which memory that did not survive (a reset, a
//! loss of power) is recognized.

use rocmforge_device::{Error, Loss, LossKind, VolatileMemory};

use super::GpuDevice;
use super::reserve::DeviceReserve;
use super::sending::Sender;

/// What a mark is.
const MARK: u32 = 0x5EA1_1A57;

/// Addresses of the marks in a reserve of addresses.
fn places(reserve: &DeviceReserve) -> [u64; 2] {
    [reserve.results, reserve.tail]
}

/// Writes the marks into device memory.
pub(super) fn put(reserve: &DeviceReserve, sender: Sender<'_>) -> Result<(), Error> {
    places(reserve)
        .into_iter()
        .try_for_each(|at| sender.bytes(at, &MARK.to_le_bytes()))
}

impl VolatileMemory for GpuDevice {
    /// Checks whether the marks are still in device memory.
    fn check(&mut self) -> Result<(), Error> {
        if self.reserve.is_none() {
            return Ok(());
        }
        for at in places(&self.reserve_addresses()?) {
            let mut word = [0; 4];
            self.fetch(at, &mut word)?;
            if u32::from_le_bytes(word) != MARK {
                let reason = "marks in the device's memory have gone; it was reset or lost power";
                return Err(Error::Lost(Loss::new(LossKind::ContentsLost, reason)));
            }
        }
        Ok(())
    }
}
