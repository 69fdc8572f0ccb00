//! Copies of the arena's ranges in the host's memory.

use crate::{Device, Error};

/// A copy of a range of the arena to the host that was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyTicket(pub u64);

/// Result of beginning a copy of a range of the arena to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyStart {
    /// The copy is queued; [`HostCopies::end_copy`] returns its bytes.
    Begun(CopyTicket),
    /// As many copies as there may be are under way: one has to be ended first.
    Busy,
    /// The device does not queue a copy of so many bytes: [`Device::read_slab`] reads them.
    Unsupported,
}

/// A device whose arena is not in the host's memory, and which keeps copies of its ranges there.
pub trait HostCopies {
    /// Lets copies of the arena's ranges have so many bytes of the host's memory, taken as they are
    /// needed, and gives back what is beyond. Never more than at the first call. How many bytes
    /// there are.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    fn set_aside(&mut self, bytes: u64) -> Result<u64, Error>;

    /// Copies a range of the arena, in which no upload is under way, to an offset of what was
    /// set aside: after the operations and copies that were started before, and before those
    /// that are started from now on. Does not wait for the copy. Whether there is one: not
    /// while the system's memory for it is on its way, unless that is to be waited for
    /// (`waits`), some milliseconds.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system has none for it; [`Error::Lost`], [`Error::Driver`].
    fn save(&mut self, from: u64, to: u64, bytes: u64, waits: bool) -> Result<bool, Error>;

    /// Copies what was saved at an offset to a range of the arena, in the same order. Does not
    /// wait.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    fn restore(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Error>;

    /// Begins to copy a range of the arena, in which no upload is under way, to memory that the
    /// caller gets from [`HostCopies::end_copy`]: in the order of [`HostCopies::save`]. Does not
    /// wait for the copy.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    fn begin_copy(&mut self, from: u64, bytes: u64) -> Result<CopyStart, Error>;

    /// Ends a copy and returns the range's bytes; `None` while it is under way, unless the caller
    /// `waits` for it. After an error the copy has ended, too.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`], also of a ticket that is not known.
    fn end_copy(&mut self, ticket: CopyTicket, waits: bool) -> Result<Option<Vec<u8>>, Error>;
}

fn nothing_set_aside() -> Error {
    Error::Config("nothing was set aside".to_owned())
}

impl dyn Device + '_ {
    /// [`HostCopies::set_aside`]; a device without has no bytes for copies.
    ///
    /// # Errors
    /// As [`HostCopies::set_aside`].
    pub fn set_aside(&mut self, bytes: u64) -> Result<u64, Error> {
        self.host_copies()
            .map_or(Ok(0), |device| device.set_aside(bytes))
    }

    /// [`HostCopies::save`].
    ///
    /// # Errors
    /// As [`HostCopies::save`]; [`Error::Config`] of a device without, where nothing can be set
    /// aside.
    pub fn save(&mut self, from: u64, to: u64, bytes: u64, waits: bool) -> Result<bool, Error> {
        let device = self.host_copies().ok_or_else(nothing_set_aside)?;
        device.save(from, to, bytes, waits)
    }

    /// [`HostCopies::restore`].
    ///
    /// # Errors
    /// As [`HostCopies::restore`]; [`Error::Config`] of a device without, where nothing was saved.
    pub fn restore(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Error> {
        let device = self.host_copies().ok_or_else(nothing_set_aside)?;
        device.restore(from, to, bytes)
    }

    /// [`HostCopies::begin_copy`]; a device without queues no copies.
    ///
    /// # Errors
    /// As [`HostCopies::begin_copy`].
    pub fn begin_copy(&mut self, from: u64, bytes: u64) -> Result<CopyStart, Error> {
        let device = self.host_copies();
        device.map_or(Ok(CopyStart::Unsupported), |device| {
            device.begin_copy(from, bytes)
        })
    }

    /// [`HostCopies::end_copy`].
    ///
    /// # Errors
    /// As [`HostCopies::end_copy`]; [`Error::Config`] of a device without, where no copy was begun.
    pub fn end_copy(&mut self, ticket: CopyTicket, waits: bool) -> Result<Option<Vec<u8>>, Error> {
        let device = self.host_copies().ok_or_else(nothing_set_aside)?;
        device.end_copy(ticket, waits)
    }
}
