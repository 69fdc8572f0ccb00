//! From the host to the device, behind what the compute stream has queued: through pinned memory,
//! by the copy engine or by kernels.

use rocmforge_device::Error;
use rocmforge_gpu_driver::{DevicePtr, Stream};
use rocmforge_kernels_gpu::ops::rows;

use super::kernels::Kernels;
use super::ring::{Piece, Ring};
use super::uploads::Uploads;
use super::{failed, launch_error, stream_driver};

/// Bytes that kernels read out of the host's memory at a time, at most: what the
/// link brings in some 10 us.
const BY_KERNELS_BYTES: usize = 512 << 10;

/// Ranges that are sent by a kernel each, at most.
const BY_KERNELS_PARTS: usize = 16;

/// What a range begins at in a piece is a multiple of this.
const PART_ALIGNMENT: usize = 16;

/// The way to the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sender<'a> {
    ring: &'a Ring,
    stream: &'a Stream,
    /// Set while uploads are under way.
    ///
    /// A copy would wait in the copy engine until all uploads are done that are queued there:
    /// beside two of 75 MB on an H200 up to 2.6 ms, in which neither the device nor the host had
    /// anything to do. A kernel reads the bytes past it.
    kernels: Option<&'a Kernels>,
}

impl<'a> Sender<'a> {
    /// The way through pieces of `ring`, behind what `stream` has queued and past `uploads`.
    pub(super) fn new(
        ring: &'a Ring,
        stream: &'a Stream,
        kernels: &'a Kernels,
        uploads: &Uploads,
    ) -> Self {
        Self {
            ring,
            stream,
            kernels: (!uploads.is_idle()).then_some(kernels),
        }
    }

    /// Copies bytes to an address.
    pub(super) fn bytes(&self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        if let Some(kernels) = self.kernels_for(&[(at, bytes)]) {
            return self.by_kernels(kernels, &[(at, bytes)]);
        }
        for (i, part) in bytes.chunks(self.ring.piece_bytes()).enumerate() {
            let to = at + (i * self.ring.piece_bytes()) as u64;
            let piece = self.ring.take()?;
            let queued = self.copy(&piece, 0, to, part);
            self.give(piece, queued)?;
        }
        Ok(())
    }

    /// Copies bytes to addresses, through one piece of pinned memory where they fit into it.
    pub(super) fn parts(&self, parts: &[(u64, &[u8])]) -> Result<(), Error> {
        if let Some(kernels) = self.kernels_for(parts) {
            return self.by_kernels(kernels, parts);
        }
        let total: usize = parts.iter().map(|(_, bytes)| bytes.len()).sum();
        if parts.len() == 1 || total > self.ring.piece_bytes() {
            let mut parts = parts.iter();
            return parts.try_for_each(|&(at, bytes)| self.bytes(at, bytes));
        }
        let piece = self.ring.take()?;
        let mut place = 0;
        let mut queued = Ok(());
        for &(to, bytes) in parts {
            queued = queued.and_then(|()| self.copy(&piece, place, to, bytes));
            place += bytes.len();
        }
        self.give(piece, queued)
    }

    /// Kernels, if they may send some ranges: words, few and small enough.
    fn kernels_for(&self, parts: &[(u64, &[u8])]) -> Option<&Kernels> {
        let words = |(at, bytes): &(u64, &[u8])| at % 4 == 0 && bytes.len() % 4 == 0;
        let padded = parts.iter().map(|(_, bytes)| bytes.len() + PART_ALIGNMENT);
        let few = parts.len() <= BY_KERNELS_PARTS && padded.sum::<usize>() < BY_KERNELS_BYTES;
        self.kernels.filter(|_| few && parts.iter().all(words))
    }

    /// Queues a copy through a piece, from `place` on in it. The piece is ours until it is given
    /// back.
    fn copy(&self, piece: &Piece, place: usize, to: u64, bytes: &[u8]) -> Result<(), Error> {
        let from = fill(piece, place, bytes);
        let driver = stream_driver(self.stream)?;
        // SAFETY: the source is left alone until the piece's event has passed; the
        // destination is the caller's own.
        unsafe {
            driver.copy_h2d_async(
                DevicePtr(to),
                from,
                bytes.len() as u64,
                self.stream.handle(),
            )
        }
        .map_err(|e| failed("sending a pass's data", e))
    }

    /// Kernels read each range out of pinned memory.
    fn by_kernels(&self, kernels: &Kernels, parts: &[(u64, &[u8])]) -> Result<(), Error> {
        let piece = self.ring.take()?;
        // The number of the row that each kernel gathers.
        let row = fill(&piece, 0, &0u32.to_le_bytes()) as u64;
        let mut place = PART_ALIGNMENT;
        let mut queued = Ok(());
        for &(to, bytes) in parts.iter().filter(|(_, bytes)| !bytes.is_empty()) {
            let from = fill(&piece, place, bytes) as u64;
            queued = queued.and_then(|()| {
                let launch = rows::gather(from, row, 1, bytes.len() as u64 / 4, to)
                    .map_err(|e| launch_error(&e))?;
                // SAFETY: pinned memory has the same address for kernels, and is left alone until
                // the piece's event has passed; the destination is the caller's own.
                unsafe { kernels.launch(&launch, self.stream) }
            });
            place += bytes.len().next_multiple_of(PART_ALIGNMENT);
        }
        self.give(piece, queued)
    }

    /// Gives a piece back, whatever became of what was queued from it.
    fn give(&self, piece: Piece, queued: Result<(), Error>) -> Result<(), Error> {
        let given = self.ring.give(piece, self.stream);
        queued.and(given)
    }
}

/// Writes bytes to a piece that was taken, and says where they are.
fn fill(piece: &Piece, place: usize, bytes: &[u8]) -> *const u8 {
    assert!(place + bytes.len() <= piece.bytes, "a piece has room");
    let to = piece.ptr.wrapping_add(place);
    // SAFETY: the piece is ours until it is given back, and they have room in it.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    to
}
