//! Rows of a buffer on their way to the host: one group of them is looked at while the next one
//! is copied.

use std::time::Duration;

use rocmforge_device::{Error, TakeRows};
use rocmforge_gpu_driver::{Context, DevicePtr, Event, PinnedBuffer, Stream};

use super::errors::{failed, stream_driver};
use super::wait;

/// Bytes of a group: 32 rows of a vocabulary of 128,000 tokens, which keep as many threads busy.
pub(super) const GROUP_BYTES: usize = 16 << 20;

/// Pinned memory of rows that are handed over, taken when it is needed first.
#[derive(Debug, Default)]
pub(super) struct RowsMemory {
    groups: Option<RowGroups>,
    /// Whether the driver refused memory for rows.
    refused: bool,
}

/// Two groups of rows in pinned memory.
#[derive(Debug)]
pub(super) struct RowGroups {
    memory: PinnedBuffer,
    /// The last copy into each has ended.
    done: [Event; 2],
}

impl RowsMemory {
    /// The groups; `None` where rows are read one by one. Pinned memory is the host's, and a pass
    /// is not to fail for want of it.
    pub(super) fn groups(&mut self, context: &Context) -> Option<&mut RowGroups> {
        if self.groups.is_none() && !self.refused {
            match RowGroups::new(context) {
                Ok(groups) => self.groups = Some(groups),
                Err(error) => {
                    tracing::warn!(%error, "rows of logits are read one by one");
                    self.refused = true;
                }
            }
        }
        self.groups.as_mut()
    }
}

impl RowGroups {
    fn new(context: &Context) -> Result<Self, Error> {
        let memory = PinnedBuffer::new(context, 2 * GROUP_BYTES)
            .map_err(|e| failed("allocating pinned memory", e))?;
        let event = || Event::new(context, false).map_err(|e| failed("making an event", e));
        let done = [event()?, event()?];
        Ok(Self { memory, done })
    }

    /// Copies rows to the host after what a stream has queued, and hands them over in groups. They
    /// are among those that lie at `at`, each of so many bytes, at most [`GROUP_BYTES`]. `settle`
    /// looks at what was done before, once that has ended.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`], and those of `settle`.
    pub(super) fn hand_over(
        &mut self,
        (stream, patience): (&Stream, Duration),
        (at, row_bytes): (u64, usize),
        rows: &[u32],
        settle: impl FnOnce() -> Result<(), Error>,
        take: TakeRows<'_>,
    ) -> Result<(), Error> {
        let of_group = GROUP_BYTES / row_bytes;
        let mut settle = Some(settle);
        let mut groups = rows.chunks(of_group).enumerate().peekable();
        if let Some((_, first)) = groups.peek() {
            self.queue(0, stream, (at, row_bytes), first)?;
        }
        while let Some((number, group)) = groups.next() {
            let half = number % 2;
            if let Some((_, next)) = groups.peek() {
                self.queue(1 - half, stream, (at, row_bytes), next)?;
            }
            wait::until_passed(&self.done[half], patience)?;
            settle.take().map_or(Ok(()), |settle| settle())?;
            // SAFETY: the copy into the half has ended, and the next one is queued behind this
            // group.
            let values = unsafe { self.values(half, group.len() * row_bytes / 4) };
            take(number * of_group, values);
        }
        Ok(())
    }

    /// Queues the copies of a group's rows into a half. The rows of a buffer lie at `at`, each of
    /// so many bytes.
    fn queue(
        &self,
        half: usize,
        stream: &Stream,
        (at, row_bytes): (u64, usize),
        group: &[u32],
    ) -> Result<(), Error> {
        let mut place = half * GROUP_BYTES;
        for run in group.chunk_by(|row, next| row + 1 == *next) {
            let from = DevicePtr(at + u64::from(run[0]) * row_bytes as u64);
            let bytes = run.len() * row_bytes;
            let to = self.memory.as_ptr().wrapping_add(place);
            let driver = stream_driver(stream)?;
            // SAFETY: the source is inside the arena (the caller asked it for the address of all
            // rows), the destination inside the half, whose group was taken before and which is
            // not looked at before the event has passed.
            unsafe { driver.copy_d2h_async(to, from, bytes as u64, stream.handle()) }
                .map_err(|e| failed("reading from the device", e))?;
            place += bytes;
        }
        self.done[half]
            .record(stream)
            .map_err(|e| failed("recording an event", e))
    }

    /// The first elements of a half.
    ///
    /// # Safety
    /// No copy into the half is under way, and none starts while the slice lives.
    unsafe fn values(&mut self, half: usize, len: usize) -> &mut [f32] {
        assert!(len * 4 <= GROUP_BYTES, "more than a half holds");
        let first = self.memory.as_ptr().wrapping_add(half * GROUP_BYTES);
        // SAFETY: page-aligned memory of two halves, each a multiple of 4 bytes, which the buffer
        // has zeroed; every bit pattern is an f32. That nothing writes is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(first.cast(), len) }
    }
}
