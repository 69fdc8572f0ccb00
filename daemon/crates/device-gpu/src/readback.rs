//! From the device to the host, behind what the compute stream has queued: the engine thread waits
//! for it. What is read without waiting is in `reads.rs`.

use std::time::Duration;

use rocmforge_device::Error;
use rocmforge_gpu_driver::{Context, DevicePtr, Event, PinnedBuffer, Stream};

use super::{failed, stream_driver, wait};

/// Bytes of one read from the device at a time.
const READ_BYTES: usize = 4 << 20;

/// Pinned memory that results pass through.
#[derive(Debug)]
pub(super) struct Readback {
    memory: PinnedBuffer,
    done: Event,
    patience: Duration,
}

impl Readback {
    pub(super) fn new(context: &Context, patience: Duration) -> Result<Self, Error> {
        Ok(Self {
            memory: PinnedBuffer::new(context, READ_BYTES)
                .map_err(|e| failed("allocating pinned memory", e))?,
            done: Event::new(context, false).map_err(|e| failed("making an event", e))?,
            patience,
        })
    }

    /// The pinned memory itself: between two waits nothing is copied into it.
    pub(super) fn memory(&mut self) -> &mut PinnedBuffer {
        &mut self.memory
    }

    /// Waits for what a stream has queued.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    pub(super) fn finish(&mut self, stream: &Stream) -> Result<(), Error> {
        self.done
            .record(stream)
            .map_err(|e| failed("recording an event", e))?;
        wait::until_passed(&self.done, self.patience)
    }

    /// [`Readback::fetch`] of several ranges, with one wait where they fit beside each other.
    ///
    /// # Errors
    /// As [`Readback::finish`].
    pub(super) fn fetch_each(
        &mut self,
        stream: &Stream,
        ranges: &mut [(u64, &mut [u8])],
    ) -> Result<(), Error> {
        let total: usize = ranges.iter().map(|(_, out)| out.len()).sum();
        if total > READ_BYTES {
            let mut ranges = ranges.iter_mut();
            return ranges.try_for_each(|(at, out)| self.fetch(stream, *at, out));
        }
        let driver = stream_driver(stream)?;
        let mut place = 0;
        for (at, out) in ranges.iter() {
            let to = self.memory.as_ptr().wrapping_add(place);
            // SAFETY: as in `fetch`; all of them have room in the memory, one behind another.
            unsafe { driver.copy_d2h_async(to, DevicePtr(*at), out.len() as u64, stream.handle()) }
                .map_err(|e| failed("reading from the device", e))?;
            place += out.len();
        }
        drop(driver);
        self.finish(stream)?;
        // SAFETY: the copies into it have ended.
        let mut bytes = unsafe { self.memory.as_slice() };
        for (_, out) in ranges {
            let (mine, rest) = bytes.split_at(out.len());
            out.copy_from_slice(mine);
            bytes = rest;
        }
        Ok(())
    }

    /// Copies from an address of the arena to the host, after what a stream has queued.
    ///
    /// # Errors
    /// As [`Readback::finish`].
    pub(super) fn fetch(&mut self, stream: &Stream, at: u64, out: &mut [u8]) -> Result<(), Error> {
        for (i, part) in out.chunks_mut(READ_BYTES).enumerate() {
            let from = DevicePtr(at + (i * READ_BYTES) as u64);
            let driver = stream_driver(stream)?;
            // SAFETY: the source is inside the arena (the callers asked it for the
            // address), the destination is as long as a part at least and is not looked at
            // before the wait has ended.
            unsafe {
                driver.copy_d2h_async(
                    self.memory.as_ptr(),
                    from,
                    part.len() as u64,
                    stream.handle(),
                )
            }
            .map_err(|e| failed("reading from the device", e))?;
            drop(driver);
            self.finish(stream)?;
            // SAFETY: the copy into it has ended.
            let bytes = unsafe { self.memory.as_slice() };
            part.copy_from_slice(&bytes[..part.len()]);
        }
        Ok(())
    }
}
