//! Rows of a buffer on their way to the host: one group of them is looked at while the next one
//! is copied.

use std::time::Duration;

use crate::error::Error;
use crate::gpu::{Context, DevicePtr, Event, PinnedBuffer, Stream};
use crate::ops::{Buf, PlacedBuf};
use crate::{Scratch, TakeRows};

use super::{GpuDevice, failed, stream_driver, wait};

/// Bytes of a group: 32 rows of a vocabulary of 128,000 tokens, which keep as many threads busy.
const GROUP_BYTES: usize = 16 << 20;

/// Two groups of rows in pinned memory.
#[derive(Debug)]
struct Halves {
    memory: PinnedBuffer,
    /// The last copy into each has ended.
    done: [Event; 2],
}

/// Pinned memory of rows that are handed over, taken when it is needed first.
#[derive(Debug)]
pub(super) struct RowGroups {
    halves: Option<Halves>,
    patience: Duration,
}

impl RowGroups {
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            halves: None,
            patience,
        }
    }

    fn halves(&mut self, context: &Context) -> Result<&mut Halves, Error> {
        if self.halves.is_none() {
            let memory = PinnedBuffer::new(context, 2 * GROUP_BYTES)
                .map_err(|e| failed("allocating pinned memory", e))?;
            let event = || Event::new(context, false).map_err(|e| failed("making an event", e));
            let done = [event()?, event()?];
            self.halves = Some(Halves { memory, done });
        }
        Ok(self.halves.as_mut().expect("made above"))
    }
}

impl Halves {
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

impl GpuDevice {
    /// See [`crate::Device::take_rows`].
    pub(super) fn hand_over(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: &[u32],
        take: TakeRows<'_>,
    ) -> Result<(), Error> {
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let (Some(last), row_bytes) = (rows.last(), width as usize * 4) else {
            return Ok(());
        };
        let bytes = (u64::from(*last) + 1) * row_bytes as u64;
        let at = self.arena.at(scratch.base + at, bytes);
        let of_group = GROUP_BYTES / row_bytes;
        if of_group == 0 {
            return self.hand_over_wide(at, width as usize, rows, take);
        }
        let patience = self.rows.patience;
        let halves = self.rows.halves(&self.context)?;
        let mut groups = rows.chunks(of_group).enumerate().peekable();
        halves.queue(
            0,
            &self.compute,
            (at, row_bytes),
            groups.peek().map_or(&[], |g| g.1),
        )?;
        while let Some((number, group)) = groups.next() {
            let half = number % 2;
            if let Some((_, next)) = groups.peek() {
                halves.queue(1 - half, &self.compute, (at, row_bytes), next)?;
            }
            wait::until_passed(&halves.done[half], patience)?;
            if number == 0 {
                self.uploads.settle_used()?;
            }
            // SAFETY: the copy into the half has ended, and the next one is queued behind this
            // group.
            let values = unsafe { halves.values(half, group.len() * width as usize) };
            take(number * of_group, values);
        }
        Ok(())
    }

    /// Rows of which none has room in a group.
    fn hand_over_wide(
        &mut self,
        at: u64,
        width: usize,
        rows: &[u32],
        take: TakeRows<'_>,
    ) -> Result<(), Error> {
        let mut values = vec![0.0; width];
        for (place, row) in rows.iter().enumerate() {
            let from = at + u64::from(*row) * width as u64 * 4;
            self.fetch(from, super::bytes_of_mut(&mut values))?;
            self.uploads.settle_used()?;
            take(place, &mut values);
        }
        Ok(())
    }
}
