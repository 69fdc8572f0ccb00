//! A device without its context: what a program that uses nothing of a card leaves there is given
//! back, until the device is used again.
//!
//! ```text
//!   open --Closing::close, drop, ClosedDevice::finish--> closed --ClosedDevice::open--> open
//!                                                         |  ^
//!                                                         +--+ open fails
//! ```

use crate::error::Error;
use crate::{Device, Steps};

/// A device with a context, which can be closed.
pub trait Closing {
    /// Ends all work and takes what outlives the context, of what was set aside `aside` bytes. The
    /// device is to be dropped then.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system has none for them: the device is as it was; [`Error::Lost`].
    fn close(&mut self, aside: u64) -> Result<Box<dyn ClosedDevice>, Error>;
}

/// A closed device. It answers what needs no context (what it is, layouts, sizes, whether it can
/// run a model) and keeps what was set aside; all else is refused with [`Error::Closed`].
pub trait ClosedDevice: Device {
    /// Gives back what this process still holds on the device, which nobody has open any more.
    ///
    /// # Errors
    /// [`Error::Driver`] where something is open still, or the driver cannot; [`Error::Lost`].
    fn finish(&mut self) -> Result<(), Error>;

    /// The power state of the card by the kernel, for the log: `D0` is on, `D3cold` without power.
    fn power_state(&self) -> Option<String>;

    /// Opens the device again: its arena is empty, its block is not given, nothing is prepared;
    /// what was set aside is there. After an error this is closed as before.
    ///
    /// # Errors
    /// [`Error::Memory`] and [`Error::Driver`], after which it may be tried again;
    /// [`Error::Lost`].
    fn open(&mut self, steps: &Steps) -> Result<Box<dyn Device>, Error>;
}
