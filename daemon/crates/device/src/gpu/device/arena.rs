//! The arena: the one large allocation that slabs, pages and scratch lie in, and moves inside it.
//!
//! The ledger speaks of offsets; here they become addresses. A change of capacity takes a new allocation, copies what lies
//! below the smaller of the two ends, and gives the old one back; so the arena's address changes, and whoever keeps
//! addresses asks for [`Arena::generation`].
//!
//! *Invariant:* only the engine thread uses it. Every offset is checked against the capacity.

use crate::error::Error;
use crate::gpu::{Buffer, Context, Stream};

use super::failed;

/// The arena.
#[derive(Debug)]
pub(super) struct Arena {
    context: Context,
    buffer: Option<Buffer>,
    capacity: u64,
    generation: u64,
}

impl Arena {
    pub(super) fn new(context: &Context) -> Self {
        Self {
            context: context.clone(),
            buffer: None,
            capacity: 0,
            generation: 0,
        }
    }

    /// Changes whenever addresses do.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Bytes that may be used.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The address of `bytes` bytes at an offset.
    pub(super) fn at(&self, offset: u64, bytes: u64) -> u64 {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.capacity),
            "bytes {offset}..{offset}+{bytes} are outside of the arena's {}",
            self.capacity
        );
        self.base() + offset
    }

    /// The address of offset 0; 0 before there is memory.
    pub(super) fn base(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |b| b.ptr().0)
    }

    /// Gives all memory back and takes the first of `sizes` that the driver does not refuse. Nothing may be under way.
    pub(super) fn renew(&mut self, sizes: &[u64]) -> Result<u64, Error> {
        self.buffer = None;
        self.capacity = 0;
        self.generation += 1;
        let mut refused = Error::Config("an arena is renewed with some size".to_owned());
        for &bytes in sizes {
            match Buffer::new(&self.context, bytes) {
                Ok(buffer) => {
                    self.buffer = Some(buffer);
                    self.capacity = bytes;
                    return Ok(bytes);
                }
                Err(error) => refused = self.refused(bytes, &error),
            }
        }
        Err(refused)
    }

    fn refused(&self, bytes: u64, error: &crate::gpu::Error) -> Error {
        if error.is_lost() {
            return failed("allocating the arena", error.clone());
        }
        let free = self.context.memory().map_or(0, |m| m.free);
        let held = self.capacity;
        Error::Memory {
            kind: super::vendor_name(&self.context),
            bytes,
            message: format!("{error}; {free} bytes are free and {held} are held"),
        }
    }

    /// Makes `bytes` usable. `stream` carries the copy; nothing else may be under way on the device.
    pub(super) fn set_capacity(&mut self, bytes: u64, stream: &Stream) -> Result<(), Error> {
        let held = self.buffer.as_ref().map_or(0, Buffer::bytes);
        if bytes == held {
            self.capacity = bytes;
            return Ok(());
        }
        let fresh = match Buffer::new(&self.context, bytes) {
            Ok(fresh) => fresh,
            // A smaller arena needs no memory: the rest is simply not used.
            Err(error) if bytes < held => {
                tracing::warn!(%error, "the arena cannot be moved to a smaller one; its end stays unused");
                self.capacity = bytes;
                return Ok(());
            }
            Err(error) => return Err(self.refused(bytes, &error)),
        };
        if let Some(old) = &self.buffer {
            let kept = self.capacity.min(bytes);
            if kept > 0 {
                let driver = self.context.driver();
                driver
                    .and_then(|driver| {
                        // SAFETY: both buffers are alive until the wait below and at least this long; nothing else is
                        // under way (the caller's promise).
                        unsafe {
                            driver.copy_d2d_async(fresh.ptr(), old.ptr(), kept, stream.handle())
                        }
                    })
                    .and_then(|()| stream.synchronize())
                    .map_err(|e| failed("moving the arena", e))?;
            }
        }
        self.buffer = Some(fresh);
        self.capacity = bytes;
        self.generation += 1;
        Ok(())
    }

    /// Queues a move with the semantics of memmove, through `bounce` where the ranges are so close that pieces would be
    /// small.
    pub(super) fn move_bytes(
        &self,
        from: u64,
        to: u64,
        bytes: u64,
        bounce: (u64, u64),
        stream: &Stream,
    ) -> Result<(), Error> {
        self.at(from, bytes);
        self.at(to, bytes);
        let distance = from.abs_diff(to);
        if distance == 0 || bytes == 0 {
            return Ok(());
        }
        let Some(buffer) = &self.buffer else {
            return Ok(());
        };
        let (bounce_at, bounce_bytes) = bounce;
        let direct = distance >= bounce_bytes;
        let step = if direct { distance } else { bounce_bytes };
        let pieces = bytes.div_ceil(step);
        for i in 0..pieces {
            // Downwards from the front, upwards from the back: a piece never lands on one that is still to be read.
            let at = step * if to < from { i } else { pieces - 1 - i };
            let n = step.min(bytes - at);
            let copy = |from, to| {
                // SAFETY: ranges inside the arena, as checked; the ledger gives both to this move alone, and the stream
                // orders it with what used them before and after.
                unsafe { buffer.copy_within(from, to, n, stream) }
                    .map_err(|e| failed("moving a slab", e))
            };
            if direct {
                copy(from + at, to + at)?;
            } else {
                copy(from + at, bounce_at)?;
                copy(bounce_at, to + at)?;
            }
        }
        Ok(())
    }

    /// Queues zeros.
    pub(super) fn zero(&self, offset: u64, bytes: u64, stream: &Stream) -> Result<(), Error> {
        self.at(offset, bytes);
        let Some(buffer) = &self.buffer else {
            return Ok(());
        };
        // SAFETY: inside the arena, as checked; the ledger gives the range to the caller alone.
        unsafe { buffer.fill(offset, 0, bytes, stream) }.map_err(|e| failed("clearing memory", e))
    }
}
