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
mod machine;
mod memory_use;
pub mod ops;
pub mod progress;
mod segment;
mod stalls;
mod steps;

use std::sync::Arc;
use std::time::Duration;

use rocmforge_gguf::MappedFile;
use rocmforge_gpu_driver::others::Card;

pub use bound::{BoundExpert, BoundStep, ModelPlanView, Scratch, SegmentBinding};
pub use closed::ClosedDevice;
pub use error::Error;
pub use heap::give_back_soon as give_back_heap_soon;
pub use machine::available_bytes as host_available_bytes;
pub use machine::memory_bytes as host_memory_bytes;
pub use memory_use::MemoryUse;
pub use ops::{
    ALIGNMENT, Batch, Buf, BufSpec, ExpertFfn, HeadShape, NO_PAGE, Op, Plan, Role, Rows,
    ScratchLayout, Span, Step, TensorDesc,
};
pub use rocmforge_gpu_driver::{Loss, LossKind, Said};
pub use segment::{PlacedTensor, SegmentLayout, wrong_shape};
pub use stalls::Stalls;
pub use steps::Steps;

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// `host`, `hip` or `cuda`: for people, labels and names of files. What a device can do has
    /// fields of its own.
    pub kind: &'static str,
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
    /// Whether [`Device::free_bytes`] takes the page cache for taken, which the system would give
    /// up.
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

/// Elements of a row with their indices, largest first.
pub type Candidates = Vec<(u32, f32)>;

/// What [`Device::end_top_k`] found, and how long the device took, if that was timed.
pub type TimedCandidates = (Vec<Option<Candidates>>, Option<Duration>);

/// One read under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadTicket(pub u64);

/// A part of the work that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedTicket(pub u64);

/// How far a device is with a part of the work that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimedWork {
    /// The device has not done all of the work.
    UnderWay,
    /// The device has done the work, and took this time, if it is known: waits for uploads and for
    /// what was queued in between are in it, what was queued before is not.
    Done(Option<Duration>),
}

/// Gets rows of a buffer: the place of the first of them among those that were asked for, and their
/// elements, `[rows][width]`.
pub type TakeRows<'a> = &'a mut dyn FnMut(usize, &mut [f32]);

/// Tells, from any thread, why the device counts as hung, if it does.
pub type Watch = Box<dyn Fn() -> Option<Loss> + Send>;

/// One upload under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UploadTicket(pub u64);

/// What a device has measured of its own work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Throughput {
    /// Bytes of weights a second of a pass's operations, with all that is
    /// computed beside their products.
    pub computed_bytes_per_s: f64,
    /// Bytes a second of uploads.
    pub upload_bytes_per_s: f64,
    /// Bytes of an upload that the device can hold before a place for it is free.
    pub ahead_bytes: u64,
}

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

/// A device: an arena, uploads into it and operations over it.
///
/// Offsets are in bytes from the arena's start and have come from the ledger; a device asserts that
/// they lie inside the capacity and does not check them for overlap.
pub trait Device: Send {
    /// What it is.
    fn info(&self) -> DeviceInfo;

    /// What the driver gave; `None` where there is no such count, as on the host.
    fn memory_use(&self) -> Option<MemoryUse> {
        None
    }

    /// Bytes free by the driver's own count, other processes' shares taken off. Asks the
    /// driver, so not for every step.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// A look at the device from another thread: whether it hangs so that a call of its driver does
    /// not come back, and since when. `None` for a device that cannot.
    fn watch(&self) -> Option<Watch> {
        None
    }

    /// Where it is on the bus; `None` for one that is not there by itself.
    fn card(&self) -> Option<Card> {
        None
    }

    /// What the system has to say of a device that was lost. Asks no driver.
    fn said_of_loss(&self) -> Option<Said> {
        None
    }

    /// The places that this device wants for a segment's tensors. Pure; touches no memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a tensor type without a kernel, [`Error::Shape`] for a
    /// shape that its type forbids.
    fn layout(&self, tensors: &[TensorDesc]) -> Result<SegmentLayout, Error>;

    /// Bytes that operations on these buffers need behind them: the workspace begins
    /// where the layout's bytes end.
    fn workspace_bytes(&self, layout: &ScratchLayout) -> u64;

    /// Bytes of the arena that the device wants for itself as long as it runs, for a given
    /// budget: staging of uploads, what a pass brings along. A small share of the budget;
    /// 0 where nothing is wanted.
    fn reserve_bytes(&self, _budget: u64) -> u64 {
        0
    }

    /// Where [`Device::reserve_bytes`] bytes were reserved: an arena offset and their number.
    /// Called once, before the first upload.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`]: the device cannot be used.
    fn set_reserve(&mut self, _offset: u64, _bytes: u64) -> Result<(), Error> {
        Ok(())
    }

    /// Makes the arena usable up to `bytes`, keeping what it holds. Called with slabs beyond a
    /// smaller capacity already moved or evicted.
    ///
    /// # Errors
    /// [`Error::Memory`] with the numbers, among them what could be had; the arena is then as it
    /// was.
    fn set_capacity(&mut self, bytes: u64) -> Result<(), Error>;

    /// Starts getting ready for a model in the background, as far as that takes none of the arena:
    /// what its passes need to be there, and its file to be readable. Returns at once; passes and
    /// uploads do not wait for the rest.
    ///
    /// # Errors
    /// [`Error::NoKernel`] names an operation that no kernel exists for, and its
    /// shape: so no request meets it.
    fn prepare(&mut self, _model: &ModelPlanView<'_>) -> Result<(), Error> {
        Ok(())
    }

    /// Gives the arena's memory back to the driver and takes it again: the first of `sizes` that
    /// the driver does not refuse. Of what the arena held only the ranges in `keep` (offset and
    /// bytes) stay, and what the device has for itself. Called with no segment resident or under
    /// way; returns the capacity.
    ///
    /// # Errors
    /// [`Error::Memory`] if none can be had: the arena has no memory then. [`Error::Lost`].
    fn renew(&mut self, sizes: &[u64], _keep: &[(u64, u64)]) -> Result<u64, Error> {
        let bytes = sizes.first().copied().unwrap_or(0);
        self.set_capacity(bytes).map(|()| bytes)
    }

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
    fn is_queued(&self, _ticket: UploadTicket) -> bool {
        false
    }

    /// Moves a slab, with the semantics of memmove, after the operations and uploads
    /// that were started before.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn move_slab(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Error>;

    /// Lets copies of the arena's ranges have so many bytes of the host's memory, taken as they are
    /// needed, and gives back what is beyond. Never more than at the first call. How many bytes
    /// there are: none where the arena is in that memory itself.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    fn set_aside(&mut self, _bytes: u64) -> Result<u64, Error> {
        Ok(0)
    }

    /// Copies a range of the arena, in which no upload is under way, to an offset of what was
    /// set aside: after the operations and copies that were started before, and before those
    /// that are started from now on. Does not wait for the copy. Whether there is one: not
    /// while the system's memory for it is on its way, unless that is to be waited for
    /// (`waits`), some milliseconds.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system has none for it; [`Error::Lost`], [`Error::Driver`].
    fn save(&mut self, _from: u64, _to: u64, _bytes: u64, _waits: bool) -> Result<bool, Error> {
        Err(Error::Config("nothing was set aside".to_owned()))
    }

    /// Copies what was saved at an offset to a range of the arena, in the same order. Does not
    /// wait.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Driver`].
    fn restore(&mut self, _from: u64, _to: u64, _bytes: u64) -> Result<(), Error> {
        Err(Error::Config("nothing was set aside".to_owned()))
    }

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

    /// Ends all work and takes what outlives the context, of what was set aside `aside` bytes. The
    /// device is to be dropped then. `None` for one without a context.
    ///
    /// # Errors
    /// [`Error::Memory`] if the system has none for them: the device is as it was; [`Error::Lost`].
    fn close(&mut self, _aside: u64) -> Result<Option<Box<dyn ClosedDevice>>, Error> {
        Ok(None)
    }

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
    ) -> Result<(), Error> {
        let ty = table.ty;
        let mut values = vec![0.0; rows.len() / ty.block_bytes() * ty.block_size()];
        let wrong = |e: rocmforge_kernels_cpu::Error| Error::Config(e.to_string());
        rocmforge_kernels_cpu::reference::dequantize(ty, rows, &mut values).map_err(wrong)?;
        if values.iter().any(|v| !v.is_finite()) {
            return Err(Error::NotFinite {
                tensor: table.name.clone(),
            });
        }
        self.write(scratch, buf, &values)
    }

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

    /// Runs steps in order that may come again. `stamp` stands for a plan and the first of so many
    /// of its steps, and for nothing else ever until [`Device::forget_file`]; a device may record
    /// what it does for a stamp, a number of steps, their slabs and such a batch, and replay that.
    ///
    /// # Errors
    /// As [`Device::run`].
    fn run_again(
        &mut self,
        _stamp: [u64; 2],
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        steps
            .iter()
            .try_for_each(|step| self.run(step, scratch, batch))
    }

    /// Entries of the table that the pages of a pass's sequences must have room in, each with
    /// the pages of its longest in every group of KV, as a power of two of at least 8; `None`
    /// if there is no such bound.
    fn page_table_entries(&self) -> Option<u64> {
        None
    }

    /// How fast segments are computed, for a pass of so many rows, and uploaded;
    /// `None` while it is not known.
    fn pace(&mut self, _rows: usize) -> Option<Throughput> {
        None
    }

    /// Runs again what [`Device::run_all`] recorded under this stamp for such a batch. Whether
    /// there was a record; else nothing was done.
    ///
    /// # Errors
    /// As [`Device::run`].
    fn replay(
        &mut self,
        _stamp: u64,
        _scratch: Scratch<'_>,
        _batch: &Batch<'_>,
    ) -> Result<bool, Error> {
        Ok(false)
    }

    /// Runs several steps in order, all of their weights resident: a whole pass. A device may
    /// record it and replay the record when the same comes again: `stamp` stands for the steps,
    /// their weights and where these lie, and for nothing else ever.
    ///
    /// # Errors
    /// As [`Device::run`].
    fn run_all(
        &mut self,
        _stamp: u64,
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        steps
            .iter()
            .try_for_each(|step| self.run(step, scratch, batch))
    }

    /// Waits for the operations before and finds, in each of the first `rows` rows of a scratch
    /// buffer, the index of the largest element, the lowest among equals; both kinds of `None`
    /// as with [`Device::top_k`].
    ///
    /// # Errors
    /// As [`Device::read`].
    fn argmax(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
    ) -> Result<Option<Vec<Option<u32>>>, Error> {
        let best = self.top_k(scratch, buf, rows, 1)?;
        let id = |row: Option<Candidates>| row.and_then(|best| best.first().map(|b| b.0));
        Ok(best.map(|rows| rows.into_iter().map(id).collect()))
    }

    /// Waits for the operations before and finds, in each of the first `rows` rows of a scratch
    /// buffer, the `k` largest elements with their indices, largest first, the lowest index first
    /// among equals; fewer if a row has fewer. `None` for a row whose largest is NaN or infinite.
    /// `Ok(None)` if the device does not implement it: the caller reads the rows.
    ///
    /// # Errors
    /// As [`Device::read`].
    fn top_k(
        &mut self,
        _scratch: Scratch<'_>,
        _buf: Buf,
        _rows: usize,
        _k: usize,
    ) -> Result<Option<Vec<Option<Candidates>>>, Error> {
        Ok(None)
    }

    /// The device is to time what is queued from here on, up to the next [`Device::begin_top_k`],
    /// if all of it is one [`Device::replay`] or [`Device::run_all`].
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn time_from_here(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Begins [`Device::top_k`] behind the operations before, and waits for nothing. Each read that
    /// was begun is to be ended once. `Ok(None)` if the device has no place for its results:
    /// the caller waits.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn begin_top_k(
        &mut self,
        _scratch: Scratch<'_>,
        _buf: Buf,
        _rows: usize,
        _k: usize,
    ) -> Result<Option<ReadTicket>, Error> {
        Ok(None)
    }

    /// Whether [`Device::end_top_k`] would not wait.
    fn has_come(&self, _ticket: ReadTicket) -> bool {
        true
    }

    /// Waits for a read that was begun, and returns what [`Device::top_k`] does.
    ///
    /// # Errors
    /// As [`Device::read`].
    fn end_top_k(&mut self, ticket: ReadTicket) -> Result<TimedCandidates, Error> {
        Err(Error::Config(format!("no read {} was begun", ticket.0)))
    }

    /// Begins to time what is queued from here on, up to [`Device::end_timed`]; `None` where the
    /// device does its work at once, or times as many parts as it can.
    fn begin_timed(&mut self) -> Option<TimedTicket> {
        None
    }

    /// The part of the work that is timed ends behind what was queued so far.
    fn end_timed(&mut self, _ticket: TimedTicket) {}

    /// Whether the device has done a part of the work that was ended. Nothing is waited for, and a
    /// part that is done is forgotten.
    fn look_at_timed(&mut self, _ticket: TimedTicket) -> TimedWork {
        TimedWork::Done(None)
    }

    /// A file will not be read any more: what the device keeps for it can go. None of
    /// its uploads is under way.
    fn forget_file(&mut self, _file: &Arc<MappedFile>) {}

    /// Reads bytes of the arena after the operations before, to be compared with what was there
    /// another time. False where memory cannot go unnoticed, and nothing is read.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn peek(&mut self, _offset: u64, _out: &mut [u8]) -> Result<bool, Error> {
        Ok(false)
    }

    /// Looks whether the device still works and still holds what was left on it.
    /// Called after the machine slept.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn check(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Waits for the operations before and reads the first `out.len()` elements of a scratch
    /// buffer.
    ///
    /// # Errors
    /// [`Error::Lost`]; [`Error::Read`] and [`Error::NotFinite`] of an upload that
    /// the operations before used.
    fn read(&mut self, scratch: Scratch<'_>, buf: Buf, out: &mut [f32]) -> Result<(), Error>;

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

    /// [`Device::read`] of several buffers, with one wait where they are small.
    ///
    /// # Errors
    /// As [`Device::read`].
    fn read_each(
        &mut self,
        scratch: Scratch<'_>,
        bufs: &mut [(Buf, &mut [f32])],
    ) -> Result<(), Error> {
        bufs.iter_mut()
            .try_for_each(|(buf, out)| self.read(scratch, *buf, out))
    }
}
