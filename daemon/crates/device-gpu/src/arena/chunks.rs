//! An arena of chunks: memory mapped one piece after the other into a reserved range of addresses.
//!
//! ```text
//!   reserved  |<---------------------- the device's memory ---------------------->|<- spare ->|
//!   mapped    [ chunk ][ chunk ][ chunk ][ short ]                                 (on its way)
//!                                                ^ capacity, rounded up
//! ```
//!
//! Chunks end at multiples of their size, the last one where the capacity does. A smaller capacity
//! gives back the chunks above it; one that it lies in is replaced by a shorter one, on the device
//! if what was given back makes room for it, else through the host's memory.
//!
//! Memory goes in one order: wait for all work on the device, unmap, give back. A chunk that the
//! driver does not unmap stays where it is and is counted.
//!
//! *Invariants* (test `an_arena_of_chunks_keeps_contents_addresses_and_the_bound`): chunks lie
//! without gaps from offset 0 on; never more is held than the larger of the capacities before and
//! after, rounded up.

use std::sync::Arc;

use rocmforge_gpu_driver::virtual_memory::{Chunk, Reservation};
use rocmforge_gpu_driver::{Context, DevicePtr, Error, PinnedBuffer, Stream};

use super::super::kernels::Kernels;
use super::border;

/// The part of the device's memory that a chunk is, and its bounds: few calls for a large arena,
/// and little that goes through the host when a small part of one is given back.
const CHUNK_PART: u64 = 64;
const CHUNK_BYTES_MIN: u64 = 16 << 20;
const CHUNK_BYTES_MAX: u64 = 1 << 30;

/// Most chunks; growing in many small steps makes many, and an arena that is
/// taken again has few again.
const CHUNKS_MAX: usize = 4096;

/// How often a driver is asked for what it should not refuse: waiting, unmapping, memory that was
/// given back only a moment ago.
const TRIES: u32 = 3;

/// Bytes that are sent over the border of two chunks, to see whether the driver
/// takes them for one range.
const PROBE_BYTES: usize = 512;

/// Bytes of each of the two chunks of that look, at most.
const PROBE_CHUNK_BYTES_MAX: u64 = 4 << 20;

/// The size of chunks on a device with so much memory.
pub(super) fn usual_bytes(total: u64) -> u64 {
    (total / CHUNK_PART).clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)
}

/// How a shrink went.
pub(super) enum Shrunk {
    /// What is mapped is the new capacity, rounded up.
    Yes,
    /// The last chunk could not be replaced: more is mapped; what it holds is there.
    Less(Error),
    /// What the last chunk held is gone, and the chunk too.
    Gone(Error),
}

/// Asks the driver up to [`TRIES`] times.
fn again(mut call: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    let mut tries = 1;
    loop {
        match call() {
            Err(error) if tries < TRIES && !error.is_lost() => {
                tracing::debug!(%error, tries, "asking the driver again");
                tries += 1;
            }
            done => return done,
        }
    }
}

/// Waits for a stream. Should that fail, work on it may still be under way, and memory is
/// about to go: then for all.
pub(super) fn wait(context: &Context, stream: &Stream) -> Result<(), Error> {
    stream.synchronize().inspect_err(|_| {
        // The first error is the one worth telling.
        let _ = context.synchronize();
    })
}

/// The memory of an arena.
#[derive(Debug)]
pub(super) struct Chunks {
    /// Where each begins, and the chunk.
    chunks: Vec<(u64, Chunk)>,
    context: Context,
    reservation: Arc<Reservation>,
    chunk_bytes: u64,
    /// Where the place begins for a chunk on its way: the end of what may be mapped.
    spare: u64,
    /// Whether the driver's count of free bytes follows what is taken and given back.
    counted: bool,
}

impl Chunks {
    /// Reserves addresses for all of the device's memory, to be mapped in multiples of
    /// `granularity_min` at least; `None` where the driver cannot.
    ///
    /// # Errors
    /// What the driver says, and an answer that shows that mapped memory does not work as it
    /// should.
    pub(super) fn reserve(
        context: &Context,
        chunk_bytes: u64,
        granularity_min: u64,
        kernels: &Kernels,
        stream: &Stream,
    ) -> Result<Option<Chunks>, Error> {
        let mut made = Self::untried(context, chunk_bytes, granularity_min)?;
        if let Some(chunks) = &mut made {
            chunks.probe(kernels, stream)?;
        }
        Ok(made)
    }

    /// The arena in chunks of a driver that has passed the probe before, without another probe.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn as_before(
        context: &Context,
        chunk_bytes: u64,
        granularity_min: u64,
    ) -> Result<Option<Chunks>, Error> {
        let mut made = Self::untried(context, chunk_bytes, granularity_min)?;
        if let Some(chunks) = &mut made {
            chunks.counted = true;
        }
        Ok(made)
    }

    /// Whether the look found nothing to do without: the count of free bytes follows, too.
    pub(super) fn passed_all(&self) -> bool {
        self.counted
    }

    fn untried(
        context: &Context,
        chunk_bytes: u64,
        granularity_min: u64,
    ) -> Result<Option<Chunks>, Error> {
        let total = context.attributes().total_bytes;
        // Twice the least granule: what the driver says may be more, up to a chunk.
        let room = total + 2 * chunk_bytes.max(granularity_min);
        let Some(reservation) = Reservation::new(context, room, granularity_min)? else {
            return Ok(None);
        };
        let chunk_bytes = chunk_bytes.next_multiple_of(reservation.granularity());
        Ok(Some(Chunks {
            chunks: Vec::new(),
            context: context.clone(),
            spare: total.next_multiple_of(reservation.granularity()),
            reservation,
            chunk_bytes,
            counted: false,
        }))
    }

    /// Looks at two chunks: whether their border is none to copies, fills and kernels, and whether
    /// their memory comes back.
    fn probe(&mut self, kernels: &Kernels, stream: &Stream) -> Result<(), Error> {
        let before = self.free();
        // Where others hold nearly all of the card, what is left is enough for the least.
        let least = self.granularity();
        let room = before.unwrap_or(0) / 4;
        let step = self.chunk_bytes.min(PROBE_CHUNK_BYTES_MAX).min(room);
        let step = (step / least * least).max(least);
        for at in [0, step] {
            self.add(at, step)?;
        }
        let between = self.free();
        self.probe_border(step, stream)?;
        border::look(&self.context, kernels, self.base(), step, stream)?;
        self.clear()?;
        // Other processes take and give back meanwhile, so half of it tells.
        let fell = |from: Option<u64>, to: Option<u64>| Some(from?.checked_sub(to?)? >= step);
        self.counted = fell(before, between) == Some(true);
        if !self.counted {
            tracing::info!(
                ?before,
                ?between,
                "the driver's count of free bytes does not follow what is taken; only the daemon's own is used"
            );
        } else if fell(self.free(), between) != Some(true) && !self.comes_back(step)? {
            return Err(kept_back(2 * step));
        }
        Ok(())
    }

    /// Free bytes by the driver's count, if it has one.
    fn free(&self) -> Option<u64> {
        self.context.followed_free_bytes().ok()
    }

    /// Whether memory that was mapped behind the others comes back by the driver's count, asked
    /// again with `bytes` bytes.
    fn comes_back(&mut self, bytes: u64) -> Result<bool, Error> {
        for tries in 0..TRIES {
            let at = self.mapped();
            match self.add(at, bytes) {
                // What was tried has not come back, and now there is no more.
                Err(error) if tries > 0 && error.is_out_of_memory() => break,
                added => added?,
            }
            let between = self.free();
            again(|| self.context.synchronize())?;
            self.give_back_from(at)?;
            if let (Some(between), Some(after)) = (between, self.free())
                && after.saturating_sub(between) >= bytes / 2
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether what a shrink gave back has come back by the driver's count: `free` bytes were free
    /// before, with `mapped` bytes mapped. Where it seems not, another chunk is tried, since other
    /// processes take memory too.
    pub(super) fn has_come_back(&mut self, free: Option<u64>, mapped: u64) -> bool {
        let given = mapped.saturating_sub(self.mapped());
        let (Some(before), Some(after)) = (free, self.free()) else {
            return true;
        };
        if !self.counted || given == 0 || after.saturating_sub(before) >= given / 2 {
            return true;
        }
        let bytes = self.granularity().max(given.min(self.chunk_bytes));
        // What cannot be tried is not held against the driver.
        self.comes_back(bytes).unwrap_or(true)
    }

    /// Free bytes before a shrink, for [`Chunks::has_come_back`].
    pub(super) fn free_before(&self) -> Option<u64> {
        if self.counted { self.free() } else { None }
    }

    /// Fills two chunks of `step` bytes and sends bytes over their border and back: some runtimes
    /// take a copy into two mappings for one that runs past its end, or refuse access to the second
    /// mapping of a range. Fills and copies inside the device are kernels of the runtime's own, the
    /// others the copy engines' work; a kernel of ours comes behind them (`border.rs`).
    fn probe_border(&self, step: u64, stream: &Stream) -> Result<(), Error> {
        let sent: Vec<u8> = (0..PROBE_BYTES).map(|i| i as u8).collect();
        let mut back = vec![0; PROBE_BYTES];
        let at = self.base().offset(step - PROBE_BYTES as u64 / 2);
        let aside = self.base();
        let driver = self.context.driver()?;
        let bytes = PROBE_BYTES as u64;
        // SAFETY: all of the two mapped chunks.
        unsafe { driver.memset_async(aside, 9, 2 * step, stream.handle()) }
            .and_then(|()| {
                // SAFETY: over their border; `sent` lives until the wait below.
                unsafe { driver.copy_h2d_async(at, sent.as_ptr(), bytes, stream.handle()) }
            })
            .and_then(|()| {
                // SAFETY: from the border to the begin of the first chunk, in stream order.
                unsafe { driver.copy_d2d_async(aside, at, bytes, stream.handle()) }
            })
            .and_then(|()| {
                // SAFETY: all of the bytes at the border.
                unsafe { driver.memset_async(at, 7, bytes, stream.handle()) }
            })
            .and_then(|()| {
                // SAFETY: back to the border, without the last byte.
                unsafe { driver.copy_d2d_async(at, aside, bytes - 1, stream.handle()) }
            })
            .and_then(|()| {
                // SAFETY: as above; `back` lives until the wait below and is not looked at before.
                unsafe { driver.copy_d2h_async(back.as_mut_ptr(), at, bytes, stream.handle()) }
            })
            .and(wait(&self.context, stream))?;
        let (kept, set) = back.split_at(PROBE_BYTES - 1);
        if kept == &sent[..PROBE_BYTES - 1] && set == [7] {
            return Ok(());
        }
        Err(Error::Answer {
            call: "copying over the border of two mappings",
            message: "other bytes came back".to_owned(),
        })
    }

    /// Offset 0.
    pub(super) fn base(&self) -> DevicePtr {
        self.reservation.ptr()
    }

    /// What capacities are rounded up to a multiple of.
    pub(super) fn granularity(&self) -> u64 {
        self.reservation.granularity()
    }

    /// Most bytes that there are addresses for: the device's memory.
    pub(super) fn most(&self) -> u64 {
        self.spare
    }

    /// Bytes that are mapped, from offset 0 on.
    pub(super) fn mapped(&self) -> u64 {
        self.chunks.last().map_or(0, |(at, c)| at + c.bytes())
    }

    /// Gives all memory back.
    ///
    /// # Errors
    /// What the driver says; a part is still mapped then.
    pub(super) fn clear(&mut self) -> Result<(), Error> {
        if self.chunks.is_empty() {
            return Ok(());
        }
        again(|| self.context.synchronize())?;
        self.give_back_from(0)
    }

    /// Gives back the chunks that begin at `end` or above, the last one first. All work on the
    /// device has been waited for: unmapping does not wait, as freeing does, and a stream that
    /// nobody asks may still be at work.
    fn give_back_from(&mut self, end: u64) -> Result<(), Error> {
        while let Some((_, last)) = self.chunks.last_mut().filter(|(at, _)| *at >= end) {
            // SAFETY: the callers have waited for all work on the device, and
            // only this thread queues any.
            again(|| unsafe { last.unmap() })?;
            self.chunks.pop();
        }
        Ok(())
    }

    /// Maps a fresh chunk behind the others.
    fn add(&mut self, at: u64, bytes: u64) -> Result<(), Error> {
        if self.chunks.len() >= CHUNKS_MAX || at + bytes > self.spare {
            return Err(Error::Range {
                operation: "mapping the arena's memory",
                offset: at,
                bytes,
                size: self.spare,
            });
        }
        let mut chunk = Chunk::new(&self.reservation, bytes)?;
        chunk.map(at)?;
        self.chunks.push((at, chunk));
        Ok(())
    }

    /// Maps what is missing to `bytes` bytes. After an error it is what it was.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn grow(&mut self, bytes: u64) -> Result<(), Error> {
        let end = bytes.next_multiple_of(self.granularity());
        let had = self.chunks.len();
        while self.mapped() < end {
            let at = self.mapped();
            let border = (at / self.chunk_bytes + 1) * self.chunk_bytes;
            if let Err(error) = self.add(at, border.min(end) - at) {
                self.chunks.truncate(had);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives back what lies above `bytes` bytes and keeps the contents of the first `kept`. All
    /// work on the device is waited for; `stream` carries copies.
    pub(super) fn shrink(
        &mut self,
        bytes: u64,
        kept: u64,
        stream: &Stream,
        pinned: &mut PinnedBuffer,
    ) -> Shrunk {
        let end = bytes.next_multiple_of(self.granularity());
        let before = self.mapped();
        if before <= end {
            return Shrunk::Yes;
        }
        let waited = again(|| self.context.synchronize());
        if let Err(error) = waited.and_then(|()| self.give_back_from(end)) {
            return Shrunk::Less(error);
        }
        if self.mapped() <= end {
            return Shrunk::Yes;
        }
        let Some(&(at, _)) = self.chunks.last() else {
            return Shrunk::Yes;
        };
        let kept = kept.saturating_sub(at);
        let (short, kept) = (end - at, kept.next_multiple_of(self.granularity()));
        if before - self.mapped() >= short {
            self.replace_on_device(short, kept, stream)
        } else {
            self.replace_through_host(short, kept, stream, pinned)
        }
    }

    /// Replaces the last chunk by one of `short` bytes with the same first `kept`
    /// bytes, for which there is room.
    fn replace_on_device(&mut self, short: u64, kept: u64, stream: &Stream) -> Shrunk {
        let base = self.base();
        let Some((at, old)) = self.chunks.last_mut() else {
            return Shrunk::Yes;
        };
        let prepared = Chunk::new(&self.reservation, short).and_then(|mut fresh| {
            fresh.map(self.spare)?;
            if kept > 0 {
                let driver = self.context.driver()?;
                let (from, to) = (base.offset(*at), base.offset(self.spare));
                // SAFETY: both chunks are mapped there, are at least this long and
                // live until the wait below.
                unsafe { driver.copy_d2d_async(to, from, kept, stream.handle()) }
                    .and(wait(&self.context, stream))?;
            }
            // SAFETY: the one copy has been waited for.
            unsafe { fresh.unmap() }?;
            // SAFETY: as above, and `shrink` has waited for all other work.
            unsafe { old.unmap() }?;
            Ok(fresh)
        });
        let mut fresh = match prepared {
            Ok(fresh) => fresh,
            Err(error) => return Shrunk::Less(error),
        };
        let Err(error) = fresh.map(*at) else {
            *old = fresh;
            return Shrunk::Yes;
        };
        match old.map(*at) {
            Ok(()) => Shrunk::Less(error),
            Err(error) => {
                self.chunks.pop();
                Shrunk::Gone(error)
            }
        }
    }

    /// Replaces the last chunk where there is room only once the old one has been given back: what
    /// the chunk holds goes through the host.
    fn replace_through_host(
        &mut self,
        short: u64,
        kept: u64,
        stream: &Stream,
        pinned: &mut PinnedBuffer,
    ) -> Shrunk {
        let Some(&(at, _)) = self.chunks.last() else {
            return Shrunk::Yes;
        };
        let bytes = match self.fetch(at, kept, stream, pinned) {
            Ok(bytes) => bytes,
            Err(error) => return Shrunk::Less(error),
        };
        if let Some((_, old)) = self.chunks.last_mut() {
            // SAFETY: the copies were waited for, and `shrink` has waited for all other work.
            if let Err(error) = unsafe { old.unmap() } {
                return Shrunk::Less(error);
            }
        }
        self.chunks.pop();
        if let Err(error) = again(|| self.add(at, short)) {
            return Shrunk::Gone(error);
        }
        if let Err(error) = again(|| self.send(at, &bytes, stream, pinned)) {
            self.chunks.pop();
            return Shrunk::Gone(error);
        }
        Shrunk::Yes
    }

    /// Copies to the host what lies at an offset.
    pub(super) fn fetch(
        &self,
        at: u64,
        bytes: u64,
        stream: &Stream,
        pinned: &mut PinnedBuffer,
    ) -> Result<Vec<u8>, Error> {
        let mut out = Vec::new();
        if out.try_reserve_exact(bytes as usize).is_err() {
            return Err(Error::Answer {
                call: "malloc",
                message: format!("no {bytes} bytes on the host"),
            });
        }
        while (out.len() as u64) < bytes {
            let done = out.len() as u64;
            let n = (bytes - done).min(pinned.bytes() as u64);
            let from = self.base().offset(at + done);
            // SAFETY: inside a mapped chunk; the pinned buffer is as long, is borrowed
            // alone, and is waited for.
            let queued = self.context.driver().and_then(|driver| unsafe {
                driver.copy_d2h_async(pinned.as_ptr(), from, n, stream.handle())
            });
            queued.and(wait(&self.context, stream))?;
            // SAFETY: the copy has ended.
            out.extend_from_slice(unsafe { &pinned.as_slice()[..n as usize] });
        }
        Ok(out)
    }

    /// Copies from the host to an offset.
    fn send(
        &self,
        at: u64,
        bytes: &[u8],
        stream: &Stream,
        pinned: &mut PinnedBuffer,
    ) -> Result<(), Error> {
        let mut done = 0;
        for part in bytes.chunks(pinned.bytes()) {
            // SAFETY: the copy of the part before has been waited for.
            let staged = unsafe { pinned.as_mut_slice() };
            staged[..part.len()].copy_from_slice(part);
            let to = self.base().offset(at + done);
            let n = part.len() as u64;
            // SAFETY: inside a mapped chunk; the pinned buffer holds as much, is borrowed
            // alone, and is waited for.
            let queued = self.context.driver().and_then(|driver| unsafe {
                driver.copy_h2d_async(to, pinned.as_ptr(), n, stream.handle())
            });
            queued.and(wait(&self.context, stream))?;
            done += n;
        }
        Ok(())
    }
}

/// The error of a driver that keeps `bytes` bytes of unmapped memory.
pub(super) fn kept_back(bytes: u64) -> Error {
    Error::Answer {
        call: "giving mapped memory back",
        message: format!(
            "{bytes} bytes stay taken by the driver's count while their addresses are reserved"
        ),
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        // What is wrong with the device is told by who uses it. A chunk that is left tries once
        // more.
        if let Err(error) = self.clear() {
            tracing::debug!(%error, "giving back the arena's memory");
        }
    }
}
