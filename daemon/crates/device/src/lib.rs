//! What a model may ask of a device, and the devices that do it.
//!
//! A plan (crate `model`) speaks the operation vocabulary of [`ops`]; a [`Device`] carries it out over one arena of
//! memory whose places are decided elsewhere (crate `tensor-cache`). A device holds no policy: it uploads a segment
//! where it is told, moves a slab when it is told, and runs operations on offsets that it is given.
//!
//! *Invariant:* only the engine thread calls a [`Device`]; the threads behind it (compute pool, staging) are its own.
//! *Invariant:* all memory that a pass touches on a device is inside the arena, at places that the ledger knows.

#![deny(unsafe_code)]

mod error;
pub mod host;
pub mod ops;
mod segment;

use std::sync::Arc;

use rocmforge_gguf::MappedFile;

use rocmforge_gguf::TensorType;
use rocmforge_kernels::host::WeightType;

pub use error::Error;
pub use ops::{Batch, Buf, BufSpec, HeadShape, Op, Rows, ScratchLayout, Span};
pub use segment::{Placed, Role, SegmentLayout, TensorDesc};

/// Alignment in bytes of every slab and of every tensor and buffer inside one: a cache line, and what the widest
/// vector load of the host and the copy engines of GPUs like.
pub const ALIGNMENT: u64 = 256;

/// The kernels' name for a type of a file; `None` if no kernel computes with it.
pub fn weight_type(ty: TensorType) -> Option<WeightType> {
    WeightType::ALL.into_iter().find(|w| w.name() == ty.name())
}

/// Names of the types that kernels compute with, for messages.
pub fn supported_types() -> String {
    WeightType::ALL.map(WeightType::name).join(", ")
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `host`, `hip` or `cuda`.
    pub kind: &'static str,
    /// The processor's or card's name with the instruction set or architecture in use.
    pub name: String,
    /// Its instruction set or architecture, for example `avx512` or `gfx1100`.
    pub arch: String,
    /// Its memory in bytes: the most that a budget can be.
    pub memory_bytes: u64,
    /// Allocations asked of the driver or the system since start-up.
    pub allocations: u64,
    /// Segments whose upload should be started ahead of their turn, unless the configuration says otherwise.
    pub prefetch: u32,
}

/// One upload under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UploadTicket(pub u64);

/// A segment to be brought from its file to a place in the arena.
#[derive(Debug, Clone)]
pub struct Upload {
    /// Where its tensors are in the file.
    pub file: Arc<MappedFile>,
    /// Its tensors and their places inside the slab.
    pub layout: Arc<SegmentLayout>,
    /// Offset of the slab in the arena, in bytes.
    pub slab: u64,
}

/// A segment's weights as the operations of one step find them.
#[derive(Debug, Clone, Copy)]
pub struct Bound<'a> {
    /// The layout.
    pub layout: &'a SegmentLayout,
    /// Offset of the slab in the arena, in bytes.
    pub slab: u64,
}

/// Scratch as the operations of one pass find it.
#[derive(Debug, Clone, Copy)]
pub struct Scratch<'a> {
    /// Where each buffer lies.
    pub layout: &'a ScratchLayout,
    /// Offset of the scratch block in the arena, in bytes.
    pub base: u64,
}

/// A device: an arena, uploads into it and operations over it.
///
/// Offsets are in bytes from the arena's start and have come from the ledger; a device asserts that they lie inside
/// the capacity and does not check them for overlap.
pub trait Device: Send {
    /// What it is.
    fn info(&self) -> DeviceInfo;

    /// The places that this device wants for a segment's tensors. Pure; touches no memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a tensor type without a kernel, [`Error::Shape`] for a shape that its type forbids.
    fn layout(&self, tensors: &[TensorDesc]) -> Result<SegmentLayout, Error>;

    /// Bytes beyond the plan's own buffers that operations on `rows` rows of at most `cols` elements need.
    fn workspace_bytes(&self, rows: u64, cols: u64) -> u64;

    /// Makes the arena usable up to `bytes`. Called with slabs beyond a smaller capacity already moved or evicted.
    ///
    /// # Errors
    /// [`Error::Memory`] with the numbers.
    fn set_capacity(&mut self, bytes: u64) -> Result<(), Error>;

    /// Starts an upload.
    ///
    /// # Errors
    /// [`Error::Lost`] if the device failed. Errors of reading the file come with the ticket.
    fn begin_upload(&mut self, upload: Upload) -> Result<UploadTicket, Error>;

    /// The uploads that have ended since the last call, with their results.
    fn finished_uploads(&mut self) -> Vec<(UploadTicket, Result<(), Error>)>;

    /// Waits for one upload and takes its result.
    ///
    /// # Errors
    /// [`Error::Read`] if the file could not be read, [`Error::NotFinite`] if a tensor's scales are NaN or infinite.
    fn wait_upload(&mut self, ticket: UploadTicket) -> Result<(), Error>;

    /// Moves a slab, with the semantics of memmove, after the operations and uploads that were started before.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn move_slab(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Error>;

    /// Tells that nothing lives in this range now, so that memory may go back to the system.
    fn discard(&mut self, offset: u64, bytes: u64);

    /// Writes f32 rows into a scratch buffer, starting at its row 0.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn write(&mut self, scratch: Scratch<'_>, buf: Buf, rows: &[f32]) -> Result<(), Error>;

    /// Runs operations in order.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Unsupported`].
    fn run(
        &mut self,
        ops: &[Op],
        weights: Bound<'_>,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error>;

    /// Waits for the operations before and reads the first `out.len()` elements of a scratch buffer.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn read(&mut self, scratch: Scratch<'_>, buf: Buf, out: &mut [f32]) -> Result<(), Error>;
}
