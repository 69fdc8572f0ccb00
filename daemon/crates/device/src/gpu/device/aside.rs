//! Host memory in which copies of the arena's ranges are set aside: pages of keys and values, and states, that have no room on
//! the card.
//!
//! It is pinned, so that copies are queued behind what the compute stream has queued, and the engine thread does not wait for
//! them. It is taken in chunks as it is needed first, and kept until its end is set below it: a chunk costs milliseconds, which
//! are not to be paid for each page.
//!
//! *Invariant:* all copies are queued on the compute stream, so one reads what those before it wrote, and a range may go to
//! another copy as soon as the last one is queued.

use crate::error::Error;
use crate::gpu::{Context, DevicePtr, PinnedBuffer, Stream};

use super::{failed, stream_driver};

/// Bytes of a chunk.
const CHUNK_BYTES: u64 = 16 << 20;

/// The memory.
#[derive(Debug)]
pub(super) struct Aside {
    context: Context,
    /// Those that are not there yet were not needed.
    chunks: Vec<Option<PinnedBuffer>>,
    bytes: u64,
    /// The most that there were: the last chunk ends there.
    most: u64,
}

/// A part of a range that lies in one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    chunk: usize,
    /// In the chunk.
    at: u64,
    /// In the range.
    from: u64,
    bytes: u64,
}

/// The parts of a range.
fn parts(at: u64, bytes: u64) -> impl Iterator<Item = Part> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let next = at + done;
        let part = Part {
            chunk: (next / CHUNK_BYTES) as usize,
            at: next % CHUNK_BYTES,
            from: done,
            bytes: (bytes - done).min(CHUNK_BYTES - next % CHUNK_BYTES),
        };
        done += part.bytes;
        (part.bytes > 0).then_some(part)
    })
}

fn chunks_of(bytes: u64) -> usize {
    bytes.div_ceil(CHUNK_BYTES) as usize
}

impl Aside {
    /// Without memory.
    pub(super) fn new(context: &Context) -> Self {
        Self {
            context: context.clone(),
            chunks: Vec::new(),
            bytes: 0,
            most: 0,
        }
    }

    /// Whether memory would go back if there were no more than `bytes`.
    pub(super) fn takes_away(&self, bytes: u64) -> bool {
        let beyond = self.chunks.iter().skip(chunks_of(bytes));
        beyond.flatten().next().is_some()
    }

    /// Makes `bytes` usable, which are as many as the first time at most; the chunks beyond go back, in which nothing is under
    /// way. How many there are.
    pub(super) fn set_bytes(&mut self, bytes: u64) -> u64 {
        if self.most == 0 {
            self.most = bytes;
        }
        self.bytes = bytes.min(self.most);
        self.chunks.truncate(chunks_of(bytes));
        self.bytes
    }

    /// Queues a copy of a range of the card's memory to `to`.
    ///
    /// # Errors
    /// [`Error::Memory`] where the system has no more memory to pin; [`Error::Lost`], [`Error::Driver`].
    pub(super) fn save(
        &mut self,
        from: u64,
        to: u64,
        bytes: u64,
        stream: &Stream,
    ) -> Result<(), Error> {
        self.check(to, bytes);
        for part in parts(to, bytes) {
            self.need(part.chunk)?;
        }
        for part in parts(to, bytes) {
            let Some(chunk) = &self.chunks[part.chunk] else {
                unreachable!("it was taken above")
            };
            let host = chunk.as_ptr().wrapping_add(part.at as usize);
            let driver = stream_driver(stream)?;
            let source = DevicePtr(from + part.from);
            // SAFETY: the source lies in the arena, as the caller has checked; the part lies in the chunk, which goes only
            // when nothing is under way, and what else reads or writes it is queued on the same stream.
            unsafe { driver.copy_d2h_async(host, source, part.bytes, stream.handle()) }
                .map_err(|e| failed("setting a page aside", e))?;
        }
        Ok(())
    }

    /// Queues a copy of what was saved at `from` to the card's memory.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    pub(super) fn restore(
        &self,
        from: u64,
        to: u64,
        bytes: u64,
        stream: &Stream,
    ) -> Result<(), Error> {
        self.check(from, bytes);
        for part in parts(from, bytes) {
            let chunk = self.chunks.get(part.chunk).and_then(Option::as_ref);
            let host = chunk.expect("what is brought back was saved").as_ptr();
            let host = host.wrapping_add(part.at as usize);
            let driver = stream_driver(stream)?;
            let target = DevicePtr(to + part.from);
            // SAFETY: as in `save`; the target lies in the arena.
            unsafe { driver.copy_h2d_async(target, host, part.bytes, stream.handle()) }
                .map_err(|e| failed("bringing a page back", e))?;
        }
        Ok(())
    }

    fn check(&self, at: u64, bytes: u64) {
        assert!(
            at.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "bytes {at}..{at}+{bytes} are outside of the {} set aside",
            self.bytes
        );
    }

    /// Has a chunk.
    fn need(&mut self, index: usize) -> Result<(), Error> {
        if self.chunks.len() <= index {
            self.chunks.resize_with(index + 1, || None);
        }
        if self.chunks[index].is_none() {
            // The last of all may be smaller.
            let bytes = CHUNK_BYTES.min(self.most - index as u64 * CHUNK_BYTES);
            let chunk = PinnedBuffer::new(&self.context, bytes as usize);
            self.chunks[index] = Some(chunk.map_err(|error| match error.is_lost() {
                true => failed("allocating pinned memory", error),
                false => Error::Memory {
                    kind: super::vendor_name(&self.context),
                    bytes,
                    message: error.to_string(),
                },
            })?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_over_a_border_has_a_part_in_each_chunk() {
        let of = |at, bytes| parts(at, bytes).collect::<Vec<_>>();
        let part = |chunk, at, from, bytes| Part {
            chunk,
            at,
            from,
            bytes,
        };
        assert_eq!(of(256, 512), [part(0, 256, 0, 512)]);
        assert_eq!(of(CHUNK_BYTES, 256), [part(1, 0, 0, 256)]);
        assert_eq!(
            of(CHUNK_BYTES - 256, CHUNK_BYTES + 512),
            [
                part(0, CHUNK_BYTES - 256, 0, 256),
                part(1, 0, 256, CHUNK_BYTES),
                part(2, 0, 256 + CHUNK_BYTES, 256),
            ]
        );
        assert_eq!(of(0, 0), []);
    }
}
