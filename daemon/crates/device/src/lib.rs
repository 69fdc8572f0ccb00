//! What a model may ask of a device; crates of their own do it (`rocmforge-device-cpu`,
//! `rocmforge-device-gpu`).
//!
//! A plan (crate `model`) speaks the operation vocabulary of the crate `ops`; a [`Device`] carries
//! it out over one arena of memory whose places are decided elsewhere (crate `tensor-cache`). A
//! device holds no policy: it uploads a segment where it is told, moves a slab when it is told, and
//! runs operations on offsets that it is given.
//!
//! *Invariant:* only the engine thread calls a [`Device`] (which takes `&mut self`, and which the
//! engine owns); the threads behind it (compute pool, staging) are its own. *Invariant:* all memory
//! that a pass touches on a card is inside the arena, at places that the ledger knows. The host has
//! inputs of products and experts' rows on its heap beside that; they count as workspace
//! ([`Device::workspace_bytes`]).

#![deny(unsafe_code)]

mod bound;
mod closed;
mod error;
mod heap;
mod host_copies;
mod kind;
mod loss;
mod machine;
mod memory_use;
mod monitoring;
pub mod ops;
mod preparation;
pub mod progress;
mod queued_reads;
mod recording;
mod reserve;
mod segment;
mod selection;
mod stalls;
mod steps;
mod timing;
mod volatile_memory;

use std::sync::Arc;

use rocmforge_gguf::MappedFile;

pub use bound::{BoundExpert, BoundStep, ModelPlanView, Scratch, SegmentBinding};
pub use closed::{ClosedDevice, Closing};
pub use error::Error;
pub use heap::give_back_soon as give_back_heap_soon;
pub use host_copies::{CopyStart, CopyTicket, HostCopies};
pub use kind::DeviceKind;
pub use loss::{Loss, LossKind, Said};
pub use machine::available_bytes as host_available_bytes;
pub use machine::memory_bytes as host_memory_bytes;
pub use memory_use::MemoryUse;
pub use monitoring::{Monitoring, Watch};
pub use ops::{
    ALIGNMENT, Batch, Buf, BufSpec, ExpertFfn, HeadShape, NO_PAGE, Op, Plan, Role, Rows,
    ScratchLayout, Span, Step, TensorDesc,
};
pub use preparation::Preparation;
pub use queued_reads::{QueuedReads, ReadTicket, TimedCandidates};
pub use recording::Recording;
pub use reserve::Reserve;
pub use segment::{PlacedTensor, SegmentLayout, wrong_shape};
pub use selection::{Candidates, Selection};
pub use stalls::Stalls;
pub use steps::Steps;
pub use timing::{Throughput, TimedTicket, TimedWork, Timing};
pub use volatile_memory::VolatileMemory;

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// What it is, for people, labels and names of files. What a device can do has fields of its
    /// own.
    pub kind: DeviceKind,
    /// Whether it is the processor, so that the CPU has nothing to compute beside it.
    pub is_cpu: bool,
    /// The processor's or card's name with the instruction set or architecture in use.
    pub name: String,
    /// The device's instruction set or architecture, for example `avx512` or `gfx1100`.
    pub arch: String,
    /// The driver's number of the GPU; 0 for the CPU.
    pub ordinal: u32,
    /// Version of its driver in the vendor's notation; empty for the host or
    /// where the driver does not say.
    pub driver: String,
    /// What was found of the driver that people should know: how files reach the card, what is gone
    /// without.
    pub findings: Vec<String>,
    /// Compute units or streaming multiprocessors; 0 for the host.
    pub compute_units: u32,
    /// The device's memory in bytes: the most that a budget can be.
    pub memory_bytes: u64,
    /// Whether that is the machine's memory, so that what others take there is missing here.
    pub machine_memory: bool,
    /// Whether [`Monitoring::free_bytes`] takes the page cache for taken, which the system would
    /// give up.
    pub counts_page_cache: bool,
    /// Allocations asked of the driver or the system since start-up.
    pub allocations: u64,
    /// Uploads that should be under way ahead of their turn, at most, unless the
    /// configuration says otherwise.
    pub prefetch: u32,
    /// Tokens of a prompt that are best computed in one pass, unless the
    /// configuration says otherwise.
    pub prefill_chunk: u32,
    /// Whether passes of which everything is resident are recorded, and so faster than
    /// the same passes in parts.
    pub records: bool,
}

/// Gets rows of a buffer: the place of the first of them among those that were asked for, and their
/// elements, `[rows][width]`.
pub type TakeRows<'a> = &'a mut dyn FnMut(usize, &mut [f32]);

/// One upload under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UploadTicket(pub u64);

/// A segment to be brought from its file to a place in the arena.
#[derive(Debug, Clone)]
pub struct Upload {
    /// The file with the segment's tensors.
    pub file: Arc<MappedFile>,
    /// The segment's tensors and their places inside the slab.
    pub layout: Arc<SegmentLayout>,
    /// Offset of the slab in the arena, in bytes.
    pub slab: u64,
}

/// A device: an arena, uploads into it and operations over it. What only some devices can do is an
/// interface of its own, in a file of its own, with what callers do without it; a device offers it
/// by an accessor ([`Device::monitoring`] and those that follow).
///
/// Offsets are in bytes from the arena's start and have come from the ledger; a device asserts that
/// they lie inside the capacity and does not check them for overlap.
pub trait Device: Send {
    /// What it is.
    fn info(&self) -> DeviceInfo;

    /// The places that this device wants for a segment's tensors. Pure; touches no memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a tensor type without a kernel, [`Error::Shape`] for a
    /// shape that its type forbids.
    fn layout(&self, tensors: &[TensorDesc]) -> Result<SegmentLayout, Error>;

    /// Bytes that operations on these buffers need behind them: the workspace begins
    /// where the layout's bytes end.
    fn workspace_bytes(&self, layout: &ScratchLayout) -> u64;

    /// Entries of the table that the pages of a pass's sequences must have room in, each with
    /// the pages of its longest in every group of KV, as a power of two of at least 8; `None`
    /// if there is no such bound.
    fn page_table_entries(&self) -> Option<u64>;

    /// Makes the arena usable up to `bytes`, keeping what it holds. Called with slabs beyond a
    /// smaller capacity already moved or evicted.
    ///
    /// # Errors
    /// [`Error::Memory`] with the numbers, among them what could be had; the arena is then as it
    /// was.
    fn set_capacity(&mut self, bytes: u64) -> Result<(), Error>;

    /// Gives the arena's memory back to the driver and takes it again: the first of `sizes` that
    /// the driver does not refuse. Of what the arena held only the ranges in `keep` (offset and
    /// bytes) stay, and what the device has for itself. Called with no segment resident or under
    /// way; returns the capacity.
    ///
    /// # Errors
    /// [`Error::Memory`] if none can be had: the arena has no memory then. [`Error::Lost`].
    fn renew(&mut self, sizes: &[u64], keep: &[(u64, u64)]) -> Result<u64, Error>;

    /// Starts an upload.
    ///
    /// # Errors
    /// [`Error::Lost`] if the device failed. Errors of reading the file come with the ticket.
    fn begin_upload(&mut self, upload: Upload) -> Result<UploadTicket, Error>;

    /// The uploads that have ended since the last call, with their results. A device whose
    /// [`Device::wait_upload`] does not wait for the copy's end names an upload here again if it
    /// turns out later that it failed; what it brought is then not to be used.
    fn finished_uploads(&mut self) -> Vec<(UploadTicket, Result<(), Error>)>;

    /// Makes the operations that follow wait for one upload, and takes its result as far as it is
    /// known. What shows later comes with the next [`Device::read`] and
    /// [`Device::finished_uploads`].
    ///
    /// # Errors
    /// [`Error::Read`] if the file could not be read, [`Error::NotFinite`] if a tensor's
    /// scales are NaN or infinite.
    fn wait_upload(&mut self, ticket: UploadTicket) -> Result<(), Error>;

    /// Whether [`Device::wait_upload`] of an upload is known to return at once.
    fn is_queued(&self, ticket: UploadTicket) -> bool;

    /// Moves a slab, with the semantics of memmove, after the operations and uploads
    /// that were started before.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn move_slab(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Error>;

    /// Copies a range of the arena, in which no upload is under way, to the host, after the
    /// operations and copies that were started before. Waits for it.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    fn read_slab(&mut self, from: u64, into: &mut [u8]) -> Result<(), Error>;

    /// Copies bytes of the host to a range of the arena, after the operations and copies that were
    /// started before, and before those that are started from now on.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    fn write_slab(&mut self, to: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Tells that nothing lives in this range now, so that memory may go back to the system.
    fn discard(&mut self, offset: u64, bytes: u64);

    /// Writes f32 rows into a scratch buffer, starting at its row 0, before a pass.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn write(&mut self, scratch: Scratch<'_>, buf: Buf, rows: &[f32]) -> Result<(), Error>;

    /// Writes f32 rows into a scratch buffer of the pass that is under way, each part
    /// from a row of the buffer on.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn write_parts(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        parts: &[(u64, &[f32])],
    ) -> Result<(), Error>;

    /// Writes quantized rows into a scratch buffer as f32, starting at its row 0: rows of an
    /// embedding as the file has them, one after another.
    ///
    /// # Errors
    /// [`Error::NotFinite`] where a value is NaN or infinite, if that is seen here;
    /// [`Error::Lost`].
    fn write_rows(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        table: &TensorDesc,
        rows: &[u8],
    ) -> Result<(), Error>;

    /// Runs a step.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Unsupported`].
    fn run(
        &mut self,
        step: &BoundStep<'_>,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error>;

    /// Waits for the operations before and reads the first `out.len()` elements of a scratch
    /// buffer.
    ///
    /// # Errors
    /// As [`Device::read_each`].
    fn read(&mut self, scratch: Scratch<'_>, buf: Buf, out: &mut [f32]) -> Result<(), Error> {
        self.read_each(scratch, &mut [(buf, out)])
    }

    /// [`Device::read`] of several buffers, with one wait where they are small.
    ///
    /// # Errors
    /// [`Error::Lost`]; [`Error::Read`] and [`Error::NotFinite`] of an upload that
    /// the operations before used.
    fn read_each(
        &mut self,
        scratch: Scratch<'_>,
        bufs: &mut [(Buf, &mut [f32])],
    ) -> Result<(), Error>;

    /// Waits for the operations before and hands over `rows` of a scratch buffer, ascending, some
    /// at a time, while the next ones come. `take` may change the elements; what the buffer holds
    /// afterwards is not said.
    ///
    /// # Errors
    /// As [`Device::read`]; rows may have been handed over before.
    fn take_rows(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: &[u32],
        take: TakeRows<'_>,
    ) -> Result<(), Error>;

    /// What the driver and the system say of the device.
    fn monitoring(&self) -> Option<&dyn Monitoring> {
        None
    }

    /// The device's own block of the arena.
    fn reserve(&mut self) -> Option<&mut dyn Reserve> {
        None
    }

    /// What the device does ahead for models.
    fn preparation(&mut self) -> Option<&mut dyn Preparation> {
        None
    }

    /// Copies of the arena's ranges in the host's memory, where the arena is not there itself.
    fn host_copies(&mut self) -> Option<&mut dyn HostCopies> {
        None
    }

    /// Recordings of steps.
    fn recording(&mut self) -> Option<&mut dyn Recording> {
        None
    }

    /// The largest elements of rows.
    fn selection(&mut self) -> Option<&mut dyn Selection> {
        None
    }

    /// What reads behind the work have come.
    fn queued_reads(&self) -> Option<&dyn QueuedReads> {
        None
    }

    /// Reads behind the work; there where [`Device::queued_reads`] is.
    fn queued_reads_mut(&mut self) -> Option<&mut dyn QueuedReads> {
        None
    }

    /// How long the device takes.
    fn timing(&mut self) -> Option<&mut dyn Timing> {
        None
    }

    /// Checks of memory that may be lost unnoticed.
    fn volatile_memory(&mut self) -> Option<&mut dyn VolatileMemory> {
        None
    }

    /// The way to close the device, where it has a context.
    fn closing(&mut self) -> Option<&mut dyn Closing> {
        None
    }
}
