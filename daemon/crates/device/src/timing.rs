//! How long a device takes: for parts of its work, and by what it has measured so far.

use std::time::Duration;

use crate::Device;

/// A part of the work that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedTicket(pub u64);

/// How far a device is with a part of the work that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimedWork {
    /// The device has not done all of the work.
    UnderWay,
    /// The device has done the work, and took this time, if it is known: waits for uploads and for
    /// what was queued in between are in it, what was queued before is not.
    Done(Option<Duration>),
}

/// What a device has measured of its own work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Throughput {
    /// Bytes of weights a second of a pass's operations, with all that is
    /// computed beside their products.
    pub computed_bytes_per_s: f64,
    /// Bytes a second of uploads.
    pub upload_bytes_per_s: f64,
    /// Bytes of an upload that the device can hold before a place for it is free.
    pub ahead_bytes: u64,
}

/// A device that does its work behind the host, and times it.
pub trait Timing {
    /// How fast segments are computed, for a pass of so many rows, and uploaded; `None` while it is
    /// not known.
    fn pace(&mut self, rows: usize) -> Option<Throughput>;

    /// Begins to time what is queued from here on, up to [`Timing::end_timed`]; `None` where the
    /// device times as many parts as it can.
    fn begin_timed(&mut self) -> Option<TimedTicket>;

    /// The part of the work that is timed ends behind what was queued so far.
    fn end_timed(&mut self, ticket: TimedTicket);

    /// Whether the device has done a part of the work that was ended. Nothing is waited for, and a
    /// part that is done is forgotten.
    fn look_at_timed(&mut self, ticket: TimedTicket) -> TimedWork;
}

impl dyn Device + '_ {
    /// [`Timing::pace`]; never known of a device that does its work at once.
    pub fn pace(&mut self, rows: usize) -> Option<Throughput> {
        self.timing()?.pace(rows)
    }

    /// [`Timing::look_at_timed`]; a device without has done its work.
    pub fn look_at_timed(&mut self, ticket: TimedTicket) -> TimedWork {
        let timing = self.timing();
        timing.map_or(TimedWork::Done(None), |device| device.look_at_timed(ticket))
    }
}
