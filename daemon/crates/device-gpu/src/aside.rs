//! Host memory in which copies of the arena's ranges are set aside: pages of keys and values, and
//! states, that have no room on the card.
//!
//! It is pinned, so that copies are queued behind what the compute stream has queued, and the
//! engine thread does not wait for them. It is taken in chunks and kept until its end is set below
//! it: to pin memory takes long (14 ms for 16 MiB were measured on an H100's host), and the driver
//! keeps all other calls waiting meanwhile. So chunks are small. The first chunk that is needed is
//! waited for. Those behind it are pinned by a thread of their own, ahead of need, and what has to
//! go meanwhile finds no place.
//!
//! ```text
//!   absent --(far from all others: pinned at once)-----------------> there
//!   absent --(ahead of one that was used)--> asked for --(pinned)--> there
//!   there --(the card is closed and opened again)--> plain --(written to)--> there
//! ```
//!
//! Pinned memory goes with the card's context. When the card is closed, what is set aside is copied
//! to plain memory, a chunk at a time ([`KeptAside`]), and is read from there when the card is open
//! again: to pin all of it would keep the first request waiting.
//!
//! *Invariant:* all copies are queued on the compute stream, so one reads what those before it
//! wrote, and a range may go to another copy as soon as the last one is queued (test
//! `a_range_comes_back_as_it_was_over_the_border_of_two_chunks`).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rocmforge_device::{CopyStart, CopyTicket, Error, HostCopies};
use rocmforge_gpu_driver::{self as gpu, Context, DevicePtr, PinnedBuffer, Stream};

use super::holds::Holds;
use super::{GpuDevice, failed, stream_driver};

/// Bytes of a chunk: other calls of the driver wait while one is pinned.
const CHUNK_BYTES: u64 = 4 << 20;

/// Chunks that are pinned ahead of the last one that was used: 64 MiB.
const CHUNKS_AHEAD: usize = 16;

/// The longest pause between two chunks that are pinned.
const PAUSE_MAX: Duration = Duration::from_millis(10);

/// The memory.
#[derive(Debug)]
pub(super) struct Aside {
    context: Context,
    /// Who queues something, for whom pinning waits.
    holds: Arc<Holds>,
    chunks: Vec<Chunk>,
    thread: Option<PinThread>,
    /// The system had no memory for a chunk ahead: the next one is pinned by whoever
    /// needs it, who meets the error.
    refused: bool,
    bytes: u64,
    /// The most that there were: the last chunk ends there.
    most: u64,
}

#[derive(Debug)]
enum Chunk {
    Absent,
    /// The chunk is to be pinned by the thread.
    AskedFor,
    There(PinnedBuffer),
    /// Kept while the card was closed: copies read it, and the first that writes has it pinned.
    Plain(Box<[u8]>),
}

impl Chunk {
    fn is_held(&self) -> bool {
        matches!(self, Chunk::There(_) | Chunk::Plain(_))
    }

    /// Where it is, for copies that read it.
    fn address(&self) -> Option<*const u8> {
        match self {
            Chunk::There(buffer) => Some(buffer.as_ptr().cast_const()),
            Chunk::Plain(bytes) => Some(bytes.as_ptr()),
            Chunk::Absent | Chunk::AskedFor => None,
        }
    }
}

/// KV cache in host memory while the GPU is closed, in memory that is not pinned.
#[derive(Debug)]
pub(super) struct KeptAside {
    chunks: Vec<Option<Box<[u8]>>>,
    bytes: u64,
    most: u64,
}

impl KeptAside {
    /// As [`Aside::set_bytes`].
    pub(super) fn set_bytes(&mut self, bytes: u64) -> u64 {
        self.bytes = bytes.min(self.most);
        self.chunks.truncate(chunks_of(bytes));
        self.bytes
    }
}

/// The thread that pins chunks ahead of need.
#[derive(Debug)]
struct PinThread {
    wanted: Option<Sender<(usize, u64)>>,
    pinned: Receiver<(usize, Result<PinnedBuffer, gpu::Error>)>,
    thread: Option<JoinHandle<()>>,
}

impl PinThread {
    fn start(context: &Context, holds: &Arc<Holds>) -> std::io::Result<Self> {
        let (wanted, asked) = channel::<(usize, u64)>();
        let (told, pinned) = channel();
        let (context, holds) = (context.clone(), Arc::clone(holds));
        let thread = std::thread::Builder::new()
            .name("pin".to_owned())
            .spawn(move || {
                for (index, bytes) in asked {
                    holds.wait();
                    let begun = Instant::now();
                    let chunk = PinnedBuffer::new(&context, bytes as usize);
                    let took = begun.elapsed();
                    if told.send((index, chunk)).is_err() {
                        return;
                    }
                    // The calls that waited have their turn.
                    std::thread::sleep(took.min(PAUSE_MAX));
                }
            })?;
        Ok(Self {
            wanted: Some(wanted),
            pinned,
            thread: Some(thread),
        })
    }

    fn ask(&self, index: usize, bytes: u64) -> bool {
        let wanted = self.wanted.as_ref();
        wanted.is_some_and(|wanted| wanted.send((index, bytes)).is_ok())
    }
}

impl Drop for PinThread {
    fn drop(&mut self) {
        self.wanted = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
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

/// A copy in plain memory.
fn plain(of: &[u8]) -> Result<Box<[u8]>, Error> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(of.len())
        .map_err(|error| Error::Memory {
            kind: "host",
            bytes: of.len() as u64,
            message: error.to_string(),
        })?;
    copy.extend_from_slice(of);
    Ok(copy.into_boxed_slice())
}

fn chunks_of(bytes: u64) -> usize {
    bytes.div_ceil(CHUNK_BYTES) as usize
}

impl Aside {
    /// Without memory.
    pub(super) fn new(context: &Context, holds: Arc<Holds>) -> Self {
        Self {
            context: context.clone(),
            holds,
            chunks: Vec::new(),
            thread: None,
            refused: false,
            bytes: 0,
            most: 0,
        }
    }

    /// Takes up what was kept while the card was closed.
    pub(super) fn take_up(&mut self, kept: KeptAside) {
        let chunk = |kept: Option<Box<[u8]>>| kept.map_or(Chunk::Absent, Chunk::Plain);
        self.chunks = kept.chunks.into_iter().map(chunk).collect();
        (self.bytes, self.most) = (kept.bytes, kept.most);
    }

    /// Copies the first `used` bytes to plain memory, because the card is to be closed; the rest
    /// goes. Nothing may be under way.
    ///
    /// # Errors
    /// [`Error::Memory`] where the system has none for a chunk: the first `used` bytes are there
    /// still.
    pub(super) fn keep(&mut self, used: u64) -> Result<KeptAside, Error> {
        // It ends, and what it pins goes.
        self.thread = None;
        self.chunks.truncate(chunks_of(used));
        // Whatever fails below, nobody pins them any more.
        let asked_for = |chunk: &&mut Chunk| matches!(chunk, Chunk::AskedFor);
        for chunk in self.chunks.iter_mut().filter(asked_for) {
            *chunk = Chunk::Absent;
        }
        for chunk in &mut self.chunks {
            if let Chunk::There(buffer) = chunk {
                // SAFETY: nothing is under way, as the caller promises.
                *chunk = Chunk::Plain(plain(unsafe { buffer.as_slice() })?);
            }
        }
        let bytes = |chunk| match chunk {
            Chunk::Plain(bytes) => Some(bytes),
            Chunk::Absent | Chunk::AskedFor | Chunk::There(_) => None,
        };
        Ok(KeptAside {
            chunks: self.chunks.drain(..).map(bytes).collect(),
            bytes: self.bytes,
            most: self.most,
        })
    }

    /// Whether memory would go back if there were no more than `bytes`.
    pub(super) fn takes_away(&self, bytes: u64) -> bool {
        let mut beyond = self.chunks.iter().skip(chunks_of(bytes));
        beyond.any(Chunk::is_held)
    }

    /// Makes `bytes` usable, which are as many as the first time at most; the chunks beyond go
    /// back, in which nothing is under way. How many there are.
    pub(super) fn set_bytes(&mut self, bytes: u64) -> u64 {
        if self.most == 0 {
            self.most = bytes;
        }
        self.bytes = bytes.min(self.most);
        // What is being pinned beyond goes back, too.
        for index in chunks_of(bytes)..self.chunks.len() {
            self.take_pinned(Some(index));
        }
        self.chunks.truncate(chunks_of(bytes));
        self.bytes
    }

    /// Queues a copy of a range of the card's memory to `to`. Whether it did: not while the memory
    /// there is being pinned, unless that is to be waited for.
    ///
    /// # Errors
    /// [`Error::Memory`] where the system has no more memory to pin;
    /// [`Error::Lost`], [`Error::Driver`].
    pub(super) fn save(
        &mut self,
        from: u64,
        to: u64,
        bytes: u64,
        waits: bool,
        stream: &Stream,
    ) -> Result<bool, Error> {
        self.check(to, bytes);
        for part in parts(to, bytes) {
            if !self.need(part.chunk, waits, stream)? {
                return Ok(false);
            }
        }
        for part in parts(to, bytes) {
            let Chunk::There(chunk) = &self.chunks[part.chunk] else {
                panic!("chunk {} was taken above", part.chunk);
            };
            let host = chunk.as_ptr().wrapping_add(part.at as usize);
            let driver = stream_driver(stream)?;
            let source = DevicePtr(from + part.from);
            // SAFETY: the source lies in the arena, as the caller has checked; the part lies in the
            // chunk, which goes only when nothing is under way, and what else reads or writes it is
            // queued on the same stream.
            unsafe { driver.copy_d2h_async(host, source, part.bytes, stream.handle()) }
                .map_err(|e| failed("setting a page aside", e))?;
        }
        Ok(true)
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
            let chunk = self.chunks.get(part.chunk).and_then(Chunk::address);
            let host = chunk.expect("what is brought back was saved");
            let host = host.wrapping_add(part.at as usize);
            let driver = stream_driver(stream)?;
            let target = DevicePtr(to + part.from);
            // SAFETY: as in `save`; the target lies in the arena. A chunk of plain memory goes as
            // one that is pinned does, when nothing is under way.
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

    /// Has a chunk, and asks for those behind it. Whether it is there.
    fn need(&mut self, index: usize, waits: bool, stream: &Stream) -> Result<bool, Error> {
        if self.chunks.len() <= index {
            self.chunks.resize_with(index + 1, || Chunk::Absent);
        }
        self.take_pinned(waits.then_some(index));
        match &self.chunks[index] {
            Chunk::There(_) => {}
            Chunk::AskedFor => return Ok(false),
            Chunk::Absent => {
                self.chunks[index] = Chunk::There(self.pin(index)?);
                self.refused = false;
            }
            Chunk::Plain(kept) => {
                let mut chunk = self.pin(index)?;
                // Copies that read it may be queued.
                let passed = stream.synchronize();
                passed.map_err(|e| failed("waiting for copies of pages", e))?;
                // SAFETY: it is new, so no copy of it is under way.
                unsafe { chunk.as_mut_slice() }.copy_from_slice(kept);
                self.chunks[index] = Chunk::There(chunk);
            }
        }
        if !self.refused {
            self.ask_ahead(index);
        }
        Ok(true)
    }

    fn pin(&self, index: usize) -> Result<PinnedBuffer, Error> {
        let bytes = self.chunk_bytes(index);
        let chunk = PinnedBuffer::new(&self.context, bytes as usize);
        chunk.map_err(|error| match error.is_lost() {
            true => failed("allocating pinned memory", error),
            false => Error::Memory {
                kind: super::vendor_name(&self.context),
                bytes,
                message: error.to_string(),
            },
        })
    }

    /// Takes what the thread has pinned; waits for one chunk if it was asked for.
    fn take_pinned(&mut self, awaited: Option<usize>) {
        let Some(thread) = &self.thread else {
            return;
        };
        let waits = |chunks: &[Chunk]| {
            awaited.is_some_and(|index| matches!(chunks[index], Chunk::AskedFor))
        };
        loop {
            let pinned = match waits(&self.chunks) {
                true => thread.pinned.recv().ok(),
                false => thread.pinned.try_recv().ok(),
            };
            let Some((index, pinned)) = pinned else {
                return;
            };
            if let Some(chunk @ Chunk::AskedFor) = self.chunks.get_mut(index) {
                self.refused |= pinned.is_err();
                *chunk = pinned.map_or(Chunk::Absent, Chunk::There);
            }
        }
    }

    /// Has the chunks behind one that is used pinned.
    fn ask_ahead(&mut self, index: usize) {
        let end = (index + 1 + CHUNKS_AHEAD).min(chunks_of(self.bytes));
        for next in index + 1..end {
            if self.chunks.len() <= next {
                self.chunks.resize_with(next + 1, || Chunk::Absent);
            }
            if !matches!(self.chunks[next], Chunk::Absent) {
                continue;
            }
            if self.thread.is_none() {
                match PinThread::start(&self.context, &self.holds) {
                    Ok(thread) => self.thread = Some(thread),
                    Err(error) => {
                        tracing::warn!(%error, "no thread to pin memory ahead of need");
                        return;
                    }
                }
            }
            let bytes = self.chunk_bytes(next);
            if self.thread.as_ref().is_some_and(|t| t.ask(next, bytes)) {
                self.chunks[next] = Chunk::AskedFor;
            }
        }
    }

    /// Bytes of a chunk: the last of all may be smaller.
    fn chunk_bytes(&self, index: usize) -> u64 {
        CHUNK_BYTES.min(self.most - index as u64 * CHUNK_BYTES)
    }
}

impl HostCopies for GpuDevice {
    fn set_aside(&mut self, bytes: u64) -> Result<u64, Error> {
        if self.aside.takes_away(bytes) {
            self.finish()?;
        }
        Ok(self.aside.set_bytes(bytes))
    }

    fn save(&mut self, from: u64, to: u64, bytes: u64, waits: bool) -> Result<bool, Error> {
        let from = self.arena.at(from, bytes);
        self.aside.save(from, to, bytes, waits, &self.compute)
    }

    fn restore(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Error> {
        self.table_of = None;
        let to = self.arena.at(to, bytes);
        self.aside.restore(from, to, bytes, &self.compute)
    }

    fn begin_copy(&mut self, from: u64, bytes: u64) -> Result<CopyStart, Error> {
        let from = self.arena.at(from, bytes);
        self.outgoing
            .begin(&self.context, (from, bytes), &self.compute)
    }

    fn end_copy(&mut self, ticket: CopyTicket, waits: bool) -> Result<Option<Vec<u8>>, Error> {
        self.outgoing.end(ticket, waits)
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
