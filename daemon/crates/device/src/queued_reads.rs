//! The largest elements of rows, read behind the work that makes the rows, while the host does
//! something else.

use std::time::Duration;

use crate::{Buf, Candidates, Device, Error, Scratch};

/// What [`QueuedReads::end_top_k`] found, and how long the device took, if that was timed.
pub type TimedCandidates = (Vec<Option<Candidates>>, Option<Duration>);

/// One read under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadTicket(pub u64);

/// A device that does its work behind the host, and to which reads of what it finds can be queued.
pub trait QueuedReads {
    /// The device is to time what is queued from here on, up to the next
    /// [`QueuedReads::begin_top_k`], if all of it is one [`crate::Recording::replay`] or
    /// [`crate::Recording::run_all`].
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn time_from_here(&mut self) -> Result<(), Error>;

    /// Begins [`crate::Selection::top_k`] behind the operations before, and waits for nothing. Each
    /// read that was begun is to be ended once. `Ok(None)` if the device has no place for its
    /// results: the caller waits.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn begin_top_k(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
        k: usize,
    ) -> Result<Option<ReadTicket>, Error>;

    /// Whether [`QueuedReads::end_top_k`] would not wait.
    fn has_come(&self, ticket: ReadTicket) -> bool;

    /// Waits for a read that was begun, and returns what [`crate::Selection::top_k`] does.
    ///
    /// # Errors
    /// As [`Device::read`].
    fn end_top_k(&mut self, ticket: ReadTicket) -> Result<TimedCandidates, Error>;
}

impl dyn Device + '_ {
    /// [`QueuedReads::begin_top_k`]; `Ok(None)` also of a device without, which does its work at
    /// once.
    ///
    /// # Errors
    /// As [`QueuedReads::begin_top_k`].
    pub fn begin_top_k(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
        k: usize,
    ) -> Result<Option<ReadTicket>, Error> {
        self.queued_reads_mut()
            .map_or(Ok(None), |device| device.begin_top_k(scratch, buf, rows, k))
    }

    /// [`QueuedReads::has_come`]; nobody waits for a device without.
    pub fn has_come(&self, ticket: ReadTicket) -> bool {
        let device = self.queued_reads();
        device.is_none_or(|device| device.has_come(ticket))
    }

    /// [`QueuedReads::end_top_k`].
    ///
    /// # Errors
    /// As [`Device::read`]; [`Error::Config`] of a device without, where no read was begun.
    pub fn end_top_k(&mut self, ticket: ReadTicket) -> Result<TimedCandidates, Error> {
        let unknown = || Error::Config(format!("no read {} was begun", ticket.0));
        self.queued_reads_mut()
            .ok_or_else(unknown)?
            .end_top_k(ticket)
    }
}
