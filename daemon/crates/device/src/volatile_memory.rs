//! Memory that can go while the process lives on.

use crate::Error;

/// A device whose memory may be lost unnoticed, by a reset or without power in a sleep, although
/// every call works.
pub trait VolatileMemory {
    /// Looks whether the device still works and still holds what was left on it. Called after the
    /// machine slept.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn check(&mut self) -> Result<(), Error>;
}
