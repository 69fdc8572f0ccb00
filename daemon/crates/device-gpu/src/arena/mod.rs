//! The arena: the memory that slabs, pages and scratch lie in, and moves inside it.
//!
//! The ledger speaks of offsets; here they become addresses. Where the driver keeps addresses and
//! memory apart, the arena is a reserved range of addresses with memory mapped from its start
//! (`chunks.rs`): a change of capacity adds or takes memory at the end, and addresses stay.
//! Elsewhere it is one allocation, which a change moves (`whole.rs`), so that addresses change;
//! whoever keeps addresses asks for [`Arena::generation`]. An arena of chunks whose driver
//! keeps the memory that it was given back becomes one allocation too (`leaving.rs`).
//!
//! Recorded graphs hold addresses too. Growing leaves them as they are; where memory was taken
//! away, other memory may come to its addresses later, and no vendor says whether a recording looks
//! at more than the address: then they go.
//!
//! Only the engine thread uses it. *Invariant:* every offset of the ledger is checked against the
//! capacity ([`Arena::at`] asserts), those of the device's own block by the block's size.

mod border;
mod chunks;
mod leaving;
#[cfg(test)]
mod misbehaviour_tests;
#[cfg(test)]
mod tests;
mod whole;

use std::time::Duration;

use rocmforge_device::{Error, Loss, LossKind, Steps};
use rocmforge_gpu_driver::trial::{Outcome, Trials};
use rocmforge_gpu_driver::{Buffer, Context, DevicePtr, PinnedBuffer, Stream};

use super::errors::lost_as;
use super::failed;
use super::kernels::Kernels;
use chunks::{Chunks, Shrunk};

/// How much longer than others the step may take that may have to compile a kernel: as long as a
/// compiler has.
const COMPILE_WAIT: Duration = Duration::from_secs(300);

/// The arena.
#[derive(Debug)]
pub(super) struct Arena {
    context: Context,
    memory: Memory,
    capacity: u64,
    generation: u64,
    /// Why the arena is one allocation, if it is.
    note: Option<String>,
    /// Why more is held than the capacity, or why the last change was refused, if so.
    kept: Option<String>,
    /// Probes that were skipped because they passed before.
    remembered: Option<String>,
}

/// The look at mapped memory, as a trial.
const MAPPING: &str = "mapping";

/// Memory that cannot be had, so that nothing is left to go on with.
fn not_had(what: &str, error: &rocmforge_gpu_driver::Error) -> Error {
    let kind = lost_as(error).unwrap_or(LossKind::NoMemory);
    Error::Lost(Loss::new(kind, format!("{what}: {error}")))
}

/// What it lies in.
#[derive(Debug)]
enum Memory {
    Whole(Option<Buffer>),
    Chunks(Chunks),
}

impl Arena {
    /// An arena without memory. `kernels` and `stream` are for a look at whether the driver does as
    /// it says; `steps` says what is under way.
    pub(super) fn new(
        context: &Context,
        granularity_min: u64,
        kernels: &Kernels,
        trials: &Trials,
        stream: &Stream,
        steps: &Steps,
    ) -> Self {
        let chunk = chunks::usual_bytes(context.attributes().total_bytes);
        let with = format!("chunks of {chunk} bytes, granules of {granularity_min}");
        if let Some(path) = trials.passed(MAPPING, &with)
            && let Ok(Some(chunks)) = Chunks::as_before(context, chunk, granularity_min)
        {
            let found = format!(
                "memory is mapped as it was found right before, as remembered from {}",
                path.display()
            );
            tracing::info!("{found}");
            return Self {
                remembered: Some(found),
                ..Self::of(context, Memory::Chunks(chunks))
            };
        }
        // Ahead of the trial: a compiler that is ended together with the process says nothing of
        // the driver.
        steps.begin_longer("loading a kernel to look at mapped memory", COMPILE_WAIT);
        if let Err(error) = border::prepare(kernels) {
            let why = format!("the kernel that looks at mapped memory cannot be had: {error}");
            return Self::whole(context, why);
        }
        steps.begin("looking how memory is mapped");
        let made = || {
            Some(Self::with_chunks(
                context,
                chunk,
                granularity_min,
                kernels,
                stream,
            ))
        };
        match trials.run(MAPPING, made) {
            Outcome::Ended(arena) => {
                if let Memory::Chunks(chunks) = &arena.memory
                    && chunks.passed_all()
                {
                    trials.note_passed(MAPPING, &with);
                }
                arena
            }
            Outcome::NotMade(why) => Self::whole(context, why),
            // It always comes back, or does not end at all.
            Outcome::Stuck => {
                Self::whole(context, "the look at mapped memory did not end".to_owned())
            }
        }
    }

    /// An arena with chunks of `chunk` bytes, if it is made of chunks.
    fn with_chunks(
        context: &Context,
        chunk: u64,
        granularity_min: u64,
        kernels: &Kernels,
        stream: &Stream,
    ) -> Self {
        let chunks = match Chunks::reserve(context, chunk, granularity_min, kernels, stream) {
            Ok(Some(chunks)) => chunks,
            Ok(None) => {
                let why = "the driver does not keep memory and addresses apart".to_owned();
                return Self::whole(context, why);
            }
            Err(error) => {
                let why = format!("the driver does not map memory as it should: {error}");
                return Self::whole(context, why);
            }
        };
        Self::of(context, Memory::Chunks(chunks))
    }

    fn of(context: &Context, memory: Memory) -> Self {
        Self {
            context: context.clone(),
            memory,
            capacity: 0,
            generation: 0,
            note: None,
            kept: None,
            remembered: None,
        }
    }

    /// One that is a single allocation, and why.
    fn whole(context: &Context, why: String) -> Self {
        let mut arena = Self::of(context, Memory::Whole(None));
        arena.is_whole(why);
        arena
    }

    fn is_whole(&mut self, why: String) {
        tracing::info!(reason = why, "the arena is one allocation");
        self.note = Some(format!("the arena is one allocation: {why}"));
    }

    /// Why it is one allocation, if it is.
    #[cfg(test)]
    fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// What is to be told of it: why it is one allocation, why it is not as large as it should be,
    /// and what was not tried.
    pub(super) fn notes(&self) -> impl Iterator<Item = &str> {
        let notes = self.note.iter().chain(&self.kept).chain(&self.remembered);
        notes.map(String::as_str)
    }

    /// More is held than the capacity, or a change was refused.
    fn is_kept(&mut self, why: String) {
        tracing::warn!("{why}");
        self.kept = Some(why);
    }

    /// Changes whenever addresses do, and when memory behind them was taken away.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Bytes that may be used.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// What a capacity is rounded up to a multiple of, where a change of it holds no more than the
    /// larger of the two capacities; 0 where it holds both for a moment.
    pub(super) fn granularity(&self) -> u64 {
        match &self.memory {
            Memory::Whole(_) => 0,
            Memory::Chunks(chunks) => chunks.granularity(),
        }
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

    /// The address of offset 0; 0 before there is one.
    pub(super) fn base(&self) -> u64 {
        match &self.memory {
            Memory::Whole(buffer) => buffer.as_ref().map_or(0, |b| b.ptr().0),
            Memory::Chunks(chunks) => chunks.base().0,
        }
    }

    /// Gives all memory back and takes the first of `sizes` that the driver does not refuse.
    /// Nothing may be under way.
    pub(super) fn renew(&mut self, sizes: &[u64]) -> Result<u64, Error> {
        self.capacity = 0;
        self.kept = None;
        self.generation += 1;
        match &mut self.memory {
            Memory::Whole(buffer) => *buffer = None,
            Memory::Chunks(chunks) => chunks
                .clear()
                .map_err(|e| failed("giving the arena's memory back", e))?,
        }
        let mut refused = Error::Config("an arena is renewed with some size".to_owned());
        for &bytes in sizes {
            match self.take(bytes) {
                Ok(()) => return Ok(bytes),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    /// The first memory of an arena that has none.
    fn take(&mut self, bytes: u64) -> Result<(), Error> {
        if let Memory::Chunks(chunks) = &mut self.memory {
            match chunks.grow(bytes) {
                Ok(()) => {
                    self.capacity = bytes;
                    return Ok(());
                }
                Err(error)
                    if error.is_out_of_memory() || error.is_lost() || bytes > chunks.most() =>
                {
                    return Err(self.refused(bytes, &error));
                }
                // What is refused for no want of memory will not be had later either.
                Err(error) => {
                    self.memory = Memory::Whole(None);
                    self.is_whole(format!("the driver does not map its memory: {error}"));
                }
            }
        }
        let buffer = Buffer::new(&self.context, bytes).map_err(|e| self.refused(bytes, &e))?;
        self.memory = Memory::Whole(Some(buffer));
        self.capacity = bytes;
        self.generation += 1;
        Ok(())
    }

    fn refused(&self, bytes: u64, error: &rocmforge_gpu_driver::Error) -> Error {
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

    /// Makes `bytes` usable. `stream` carries copies, `pinned` what passes through the host;
    /// nothing else may be under way on the device.
    pub(super) fn set_capacity(
        &mut self,
        bytes: u64,
        stream: &Stream,
        pinned: &mut PinnedBuffer,
    ) -> Result<(), Error> {
        self.kept = None;
        match &mut self.memory {
            Memory::Whole(_) => self.set_whole(bytes, stream),
            Memory::Chunks(chunks) if chunks.mapped() == 0 => self.take(bytes),
            Memory::Chunks(chunks) if bytes > chunks.mapped() => {
                if let Err(error) = chunks.grow(bytes) {
                    return Err(self.refused(bytes, &error));
                }
                self.capacity = bytes;
                Ok(())
            }
            Memory::Chunks(chunks) => {
                let kept = self.capacity.min(bytes);
                let (before, free) = (chunks.mapped(), chunks.free_before());
                let shrunk = chunks.shrink(bytes, kept, stream, pinned);
                self.generation += u64::from(chunks.mapped() < before);
                match shrunk {
                    Shrunk::Yes if !chunks.has_come_back(free, before) => {
                        let given = before - chunks.mapped();
                        self.capacity = bytes;
                        return self.leave_chunks(&chunks::kept_back(given), stream, pinned);
                    }
                    Shrunk::Yes => {}
                    Shrunk::Less(error) if error.is_lost() => {
                        return Err(failed("making the arena smaller", error));
                    }
                    Shrunk::Less(error) => {
                        self.is_kept(format!(
                            "the arena's last part cannot be replaced by a smaller one, its end stays unused: {error}"
                        ));
                    }
                    Shrunk::Gone(error) => {
                        self.capacity = self.capacity.min(chunks.mapped());
                        return Err(not_had(
                            "the driver does not give memory back that it was given for a moment",
                            &error,
                        ));
                    }
                }
                self.capacity = bytes;
                Ok(())
            }
        }
    }

    /// Queues a move with the semantics of memmove, through `bounce` where the ranges are so close
    /// that pieces would be small.
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
        let (bounce_at, bounce_bytes) = bounce;
        let direct = distance >= bounce_bytes;
        let step = if direct { distance } else { bounce_bytes };
        let pieces = bytes.div_ceil(step);
        for i in 0..pieces {
            // Downwards from the front, upwards from the back: a piece never lands on one
            // that is still to be read.
            let at = step * if to < from { i } else { pieces - 1 - i };
            let n = step.min(bytes - at);
            let copy = |from, to| {
                let (from, to) = (self.at(from, n), self.at(to, n));
                let driver = self.context.driver();
                driver
                    // SAFETY: ranges inside the arena, as checked, and at least a piece apart; the
                    // ledger gives both to this move alone, and the stream orders it with what
                    // used them before and after.
                    .and_then(|driver| unsafe {
                        driver.copy_d2d_async(DevicePtr(to), DevicePtr(from), n, stream.handle())
                    })
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
        let to = DevicePtr(self.at(offset, bytes));
        if self.capacity == 0 {
            return Ok(());
        }
        let driver = self.context.driver();
        driver
            // SAFETY: inside the arena, as checked; the ledger gives the range to the caller alone.
            .and_then(|driver| unsafe { driver.memset_async(to, 0, bytes, stream.handle()) })
            .map_err(|e| failed("clearing memory", e))
    }
}
