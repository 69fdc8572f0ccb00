//! The host's answer to a miss: a step whose weights are not on the card,
//! computed here out of the file.
//!
//! Segments are kept in the kernels' form while they have room in a bounded part of the arena
//! (`store.rs`): those that were answered before, and those that a thread brings beside the passes
//! because answers would need them ([`Answers::keep_later`]). The others are computed where they
//! lie: a thread brings some rows of a matrix into that form, in its own cache, and multiplies with
//! them at once, which takes two to three times as long.
//!
//! *Invariant:* the result of a row depends neither on the other rows nor on the threads, as with
//! every product of the host (`kernels/cpu/tests/matmul.rs`, `a_token_does_not_depend_on_its_batch`
//! and `workers_share_an_output`).

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_device::{
    Batch, BoundStep, Device, Error, Role, Scratch, SegmentBinding, SegmentLayout, TensorDesc,
    Upload, UploadTicket,
};
use rocmforge_gguf::MappedFile;
use rocmforge_kernels_cpu::{PackedMatrix, mat_mul, reference};
use rocmforge_ops::{Buf, Op, ScratchLayout};

use super::products::Item;
use super::store::{Key, Store};
use super::{HostConfig, HostDevice};

/// Bytes of weights that are brought into the kernels' form at a time: what
/// stays in a core's own cache.
const PIECE_BYTES: usize = 128 << 10;

/// What is kept is a multiple of this: a huge page.
const KEPT_ALIGNMENT: u64 = 2 << 20;

/// Answers come layer by layer, at intervals in which the card works: threads that slept in
/// between would be woken one after another, which took longer than the products (2 ms with 16
/// threads of a virtual machine).
const SPIN: Duration = Duration::from_millis(2);

/// Segments that are brought beside the passes at a time: one that the thread is at, and one that
/// follows it at once.
const COMING_MAX: usize = 2;

thread_local! {
    /// A piece in the kernels' form.
    static PIECE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Where the weights of an answer lay, and what it took to bring those that are kept from now on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Brought {
    /// Bytes of segments that were kept before.
    pub kept_bytes: u64,
    /// Bytes of segments that are kept from now on.
    pub bytes: u64,
    /// How long those were brought into the kernels' form.
    pub took: Duration,
    /// Bytes of segments that were read out of the file by the products.
    pub file_bytes: u64,
}

/// A segment in the kernels' form, and where.
type Kept = (Arc<SegmentLayout>, u64);

/// The CPU beside a card.
#[derive(Debug)]
pub struct Answers {
    host: HostDevice,
    store: Store,
    /// What is brought beside the passes; its places are the store's, and nobody else's.
    coming: Vec<(Key, Kept, UploadTicket)>,
    /// Bytes of the arena that may be used.
    capacity: u64,
}

impl Answers {
    /// Starts the threads; `None` is one for each core that this process may use, but for an eighth
    /// of them: the engine's own thread and the card's driver go on meanwhile. `keeps` says of the
    /// machine's memory how many bytes of weights may be kept.
    ///
    /// # Errors
    /// As [`HostDevice::new`].
    pub fn new(
        threads: Option<NonZeroUsize>,
        keeps: impl FnOnce(u64) -> u64,
    ) -> Result<Self, Error> {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let mut host = HostDevice::new(HostConfig {
            threads: threads.or(NonZeroUsize::new(cores - cores / 8)),
            spin: Some(SPIN),
            // For what is brought beside the passes; an answer waits for what it brings itself.
            staging_threads: Some(1),
        })?;
        let memory = host.arena.reserved();
        let keeps = keeps(memory).min(memory / 2);
        let store = Store::new(keeps - keeps % KEPT_ALIGNMENT);
        host.kept_bytes = store.most();
        Ok(Self {
            host,
            store,
            coming: Vec::new(),
            capacity: 0,
        })
    }

    /// Whether operations need nothing of the card but the rows that they read:
    /// no keys, values or states.
    #[must_use]
    pub fn can_run(ops: &[Op]) -> bool {
        ops.iter().all(|op| {
            matches!(
                op,
                Op::RmsNorm { .. }
                    | Op::LayerNorm { .. }
                    | Op::MatMul { .. }
                    | Op::AddAdapters { .. }
                    | Op::Gate { .. }
                    | Op::Activate { .. }
                    | Op::Add { .. }
                    | Op::AddWeighted { .. }
                    | Op::Scale { .. }
                    | Op::ScaleBy { .. }
                    | Op::Clamp { .. }
                    | Op::AddGated { .. }
                    | Op::SoftCap { .. }
            )
        })
    }

    /// Runs a step, whose weights are those of `segments` of a model (one for each bound segment of
    /// the step) and lie in `file`, on rows `given` of the buffers that it reads. Returns where
    /// they lay. The calling thread does `own` before the step's operations or, where those are
    /// experts, once or twice beside them; not where an error comes before.
    ///
    /// # Errors
    /// [`Error::Read`] if the file could not be read, [`Error::NotFinite`] for a damaged
    /// tensor, [`Error::Memory`].
    #[expect(clippy::too_many_arguments, reason = "what an answer is made of")]
    pub fn run(
        &mut self,
        file: &Arc<MappedFile>,
        (model, segments): (u64, &[u32]),
        step: &BoundStep<'_>,
        layout: &ScratchLayout,
        batch: &Batch<'_>,
        given: &[(Buf, &[f32])],
        own: &mut dyn FnMut(),
    ) -> Result<Brought, Error> {
        if let BoundStep::Run { ops, .. } = step {
            assert!(
                Self::can_run(ops),
                "keys, values and states stay on the card"
            );
        }
        let mut brought = Brought::default();
        let layouts: Vec<&SegmentLayout> = match step {
            BoundStep::Run { weights, .. } => weights.iter().map(|b| b.layout).collect(),
            BoundStep::Experts { experts, .. } => {
                experts.iter().map(|e| e.weights.layout).collect()
            }
        };
        assert_eq!(layouts.len(), segments.len(), "a segment for each bound");
        let kept = self.kept(file, (model, segments), &layouts, &mut brought)?;
        let base = self.store.most();
        let scratch = Scratch { layout, base };
        let mut end = base + layout.bytes + self.host.workspace_bytes(layout);
        // Each of the others gets a range of addresses as if it were resident; only its
        // vectors take memory of it.
        let mut step = step.clone();
        let mut placed: Vec<SegmentBinding<'_>> = Vec::new();
        let weights: Vec<&mut SegmentBinding<'_>> = match &mut step {
            BoundStep::Run { weights, .. } => weights.iter_mut().collect(),
            BoundStep::Experts { experts, .. } => {
                experts.iter_mut().map(|e| &mut e.weights).collect()
            }
        };
        for (bound, kept) in weights.into_iter().zip(&kept) {
            if let Some((layout, slab)) = kept {
                (bound.layout, bound.slab) = (layout, *slab);
                continue;
            }
            bound.slab = end.next_multiple_of(rocmforge_device::ALIGNMENT);
            end = bound.slab + bound.layout.bytes;
            placed.push(*bound);
        }
        self.make_usable(end)?;
        for weights in &placed {
            self.bring_vectors(file, weights)?;
        }
        for (buf, rows) in given {
            self.host.write(scratch, *buf, rows)?;
        }
        self.host.from_file = Some(Arc::clone(file));
        let ran = match &step {
            BoundStep::Run { .. } => {
                own();
                self.host.run(&step, scratch, batch)
            }
            BoundStep::Experts { ffn, experts } => {
                super::experts::run(&mut self.host, ffn, experts, scratch, batch, own)
            }
        };
        self.host.from_file = None;
        ran?;
        let unchanged = file.check_unchanged();
        let first = layouts.iter().find_map(|layout| layout.tensors.first());
        unchanged.map_err(|source| Error::Read {
            tensor: first.map_or_else(String::new, |t| t.desc.name.clone()),
            source,
        })?;
        Ok(brought)
    }

    /// Whether a segment of a model is kept.
    #[must_use]
    pub fn keeps(&self, model: u64, segment: u32) -> bool {
        self.store.has((model, segment))
    }

    /// Whether a segment of so many bytes could be kept without another one's going.
    #[must_use]
    pub fn has_room(&self, bytes: u64) -> bool {
        self.store.has_room(bytes)
    }

    /// Begins to bring a segment of a model into the kernels' form, so that later answers find it
    /// kept: nobody waits for it. Nothing is done where it is kept or comes already, where others
    /// do, and where it has no room. What is wrong with it shows where somebody needs it.
    ///
    /// # Errors
    /// [`Error::Memory`]; a tensor that the host's kernels do not have.
    pub fn keep_later(
        &mut self,
        file: &Arc<MappedFile>,
        key: (u64, u32),
        layout: &SegmentLayout,
    ) -> Result<(), Error> {
        self.collect();
        let comes = self.coming.iter().any(|(other, ..)| *other == key);
        let has_room = self.coming.len() < COMING_MAX && self.has_room(layout.bytes);
        if comes || !has_room || self.store.has(key) {
            return Ok(());
        }
        if let Some((kept, ticket)) = self.begin_keeping(file, layout)? {
            self.coming.push((key, kept, ticket));
        }
        Ok(())
    }

    /// Notes what has come that was begun by [`Answers::keep_later`].
    pub fn collect(&mut self) {
        if self.coming.is_empty() {
            return;
        }
        for (ticket, ended) in self.host.staging.finished() {
            let at = self.coming.iter().position(|(.., other)| *other == ticket);
            if let Some(at) = at {
                let (key, kept, _) = self.coming.swap_remove(at);
                self.came(key, kept, ended);
            }
        }
    }

    /// Waits for what comes of a model, or of all: places are about to move, or to go to others.
    fn settle(&mut self, model: Option<u64>) {
        let of = |key: &Key| model.is_none_or(|model| key.0 == model);
        let coming: Vec<_> = self.coming.extract_if(.., |(key, ..)| of(key)).collect();
        if coming.is_empty() {
            return;
        }
        let tickets: Vec<UploadTicket> = coming.iter().map(|(.., ticket)| *ticket).collect();
        let ended = self.host.staging.wait(&tickets, &self.host.pool);
        for ((key, kept, _), ended) in coming.into_iter().zip(ended) {
            self.came(key, kept, ended);
        }
    }

    fn came(&mut self, key: Key, (layout, slab): Kept, ended: Result<(), Error>) {
        match ended {
            Ok(()) => self.store.keep(key, layout, slab),
            Err(error) => {
                tracing::debug!(segment = key.1, %error, "not kept by the host");
                self.store.give_back(layout.bytes, slab);
            }
        }
    }

    /// Bytes that kept weights take.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.store.used()
    }

    /// Lets kept weights take so many bytes from now on, as many as at the start at the most, and
    /// gives the memory beyond back to the system.
    pub fn limit_kept(&mut self, bytes: u64) {
        self.settle(None);
        let before = self.store.used();
        for moved in self.store.set_bytes(bytes - bytes % KEPT_ALIGNMENT) {
            let arena = &self.host.arena;
            arena.copy_within(moved.from, moved.to, moved.bytes);
        }
        self.discard_unused(before);
    }

    /// A model is gone.
    pub fn forget(&mut self, model: u64) {
        self.settle(Some(model));
        let before = self.store.used();
        self.store.forget(model);
        self.discard_unused(before);
    }

    /// Gives memory back that was handed out up to `before`, and is not any more.
    fn discard_unused(&mut self, before: u64) {
        let used = self.store.used();
        if used < before {
            self.host.arena.discard(used, self.store.most() - used);
        }
    }

    /// Of segments, where those are that are kept, or are from now on.
    fn kept(
        &mut self,
        file: &Arc<MappedFile>,
        (model, segments): (u64, &[u32]),
        layouts: &[&SegmentLayout],
        brought: &mut Brought,
    ) -> Result<Vec<Option<Kept>>, Error> {
        let mut coming = self.bring_kept(file, (model, segments), layouts, brought)?;
        let found = segments.iter().zip(layouts).map(|(&segment, layout)| {
            let kept = self.store.find((model, segment));
            let came = coming.iter().position(|key| key.1 == segment);
            match (&kept, came) {
                (None, _) => brought.file_bytes += layout.bytes,
                (Some(_), None) => brought.kept_bytes += layout.bytes,
                (Some(_), Some(at)) => {
                    coming.swap_remove(at);
                    brought.bytes += layout.bytes;
                }
            }
            kept
        });
        Ok(found.collect())
    }

    /// Brings those of some segments, for which there is room, that are not kept, all at once; they
    /// are kept from now on. Tells which they are.
    fn bring_kept(
        &mut self,
        file: &Arc<MappedFile>,
        (model, segments): (u64, &[u32]),
        layouts: &[&SegmentLayout],
        brought: &mut Brought,
    ) -> Result<Vec<Key>, Error> {
        let begin = Instant::now();
        self.collect();
        let comes = |key: Key| segments.contains(&key.1) && key.0 == model;
        let waits = self.coming.iter().any(|(key, ..)| comes(*key));
        if waits {
            self.settle(Some(model));
        }
        for &segment in segments {
            self.store.hold((model, segment));
        }
        let mut coming: Vec<(Key, Kept)> = Vec::new();
        let (mut tickets, mut result) = (Vec::new(), Ok(()));
        for (&segment, layout) in segments.iter().zip(layouts) {
            let key = (model, segment);
            if self.store.has(key) || coming.iter().any(|(other, _)| *other == key) {
                continue;
            }
            match self.begin_keeping(file, layout) {
                Ok(Some((kept, ticket))) => {
                    coming.push((key, kept));
                    tickets.push(ticket);
                }
                Ok(None) => {}
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        if tickets.is_empty() {
            if waits {
                brought.took += begin.elapsed();
            }
            return result.map(|()| Vec::new());
        }
        let mut keys = Vec::with_capacity(coming.len());
        let ended = self.host.staging.wait(&tickets, &self.host.pool);
        for ((key, (layout, slab)), ended) in coming.into_iter().zip(ended) {
            match ended {
                Ok(()) => {
                    self.store.keep(key, layout, slab);
                    keys.push(key);
                }
                Err(error) => {
                    self.store.give_back(layout.bytes, slab);
                    result = result.and(Err(error));
                }
            }
        }
        brought.took += begin.elapsed();
        result.map(|()| keys)
    }

    /// Makes the arena usable up to an end.
    fn make_usable(&mut self, end: u64) -> Result<(), Error> {
        if end > self.capacity {
            self.host.set_capacity(end)?;
            self.capacity = end;
        }
        Ok(())
    }

    /// Begins to bring a segment that is to be kept; `None` if there is no room.
    fn begin_keeping(
        &mut self,
        file: &Arc<MappedFile>,
        layout: &SegmentLayout,
    ) -> Result<Option<(Kept, UploadTicket)>, Error> {
        let tensors: Vec<TensorDesc> = layout.tensors.iter().map(|t| t.desc.clone()).collect();
        let layout = Arc::new(self.host.layout(&tensors)?);
        let Some(slab) = self.store.room(layout.bytes) else {
            return Ok(None);
        };
        let upload = Upload {
            file: Arc::clone(file),
            layout: Arc::clone(&layout),
            slab,
        };
        let begun = self.make_usable(self.store.most());
        match begun.and_then(|()| self.host.begin_upload(upload)) {
            Ok(ticket) => Ok(Some(((layout, slab), ticket))),
            Err(error) => {
                self.store.give_back(layout.bytes, slab);
                Err(error)
            }
        }
    }

    /// The first rows of a buffer after a step.
    ///
    /// # Errors
    /// None on the host.
    pub fn read(
        &mut self,
        layout: &ScratchLayout,
        buf: Buf,
        rows: &mut [f32],
    ) -> Result<(), Error> {
        let base = self.store.most();
        self.host.read(Scratch { layout, base }, buf, rows)
    }

    fn bring_vectors(
        &mut self,
        file: &MappedFile,
        weights: &SegmentBinding<'_>,
    ) -> Result<(), Error> {
        let tensors = weights.layout.tensors.iter();
        for tensor in tensors.filter(|t| t.desc.role == Role::Vector) {
            let desc = &tensor.desc;
            let n = (desc.rows * desc.cols) as usize;
            let target = self.host.arena.floats_mut(weights.slab + tensor.at, n);
            let range = desc.offset..desc.offset + desc.bytes;
            let read = file.with_range(range, |bytes| {
                reference::dequantize(desc.ty, bytes, target).is_ok()
                    && target.iter().all(|v| v.is_finite())
            });
            if !read.map_err(|e| unread(desc, e))? {
                return Err(damaged(desc));
            }
        }
        Ok(())
    }
}

fn unread(desc: &TensorDesc, source: rocmforge_gguf::Error) -> Error {
    Error::Read {
        tensor: desc.name.clone(),
        source,
    }
}

fn damaged(desc: &TensorDesc) -> Error {
    Error::NotFinite {
        tensor: desc.name.clone(),
    }
}

/// Multiplies some row groups of a matrix that lies in a file.
pub(super) fn multiply_from_file(
    item: &Item<'_>,
    file: &MappedFile,
    desc: &TensorDesc,
    groups: Range<usize>,
) -> Result<(), Error> {
    let matrix = &item.matrix;
    // The kernels take groups two at a time.
    let step = (PIECE_BYTES / matrix.group_bytes().max(1)).next_multiple_of(2);
    PIECE.with_borrow_mut(|piece| {
        for first in groups.clone().step_by(step.max(2)) {
            let some = first..(first + step.max(2)).min(groups.end);
            let row = first * rocmforge_kernels_cpu::ROW_GROUP;
            let rows = some.len() * rocmforge_kernels_cpu::ROW_GROUP;
            let rows = rows.min(matrix.rows() - row);
            let part = PackedMatrix::new(desc.ty, rows, matrix.cols(), matrix.isa())
                .map_err(|e| rocmforge_device::wrong_shape(desc, e.to_string()))?;
            piece.resize(part.packed_bytes(), 0);
            let range = matrix.file_range(some);
            let range = desc.offset + range.start as u64..desc.offset + range.end as u64;
            let packed = file
                .with_range_unchecked(range, |bytes| part.pack(bytes, 0..part.row_groups(), piece));
            packed
                .map_err(|e| unread(desc, e))?
                .map_err(|_| damaged(desc))?;
            let out = item.out.of_rows(row, rows);
            mat_mul(&part, piece, item.input, 0..part.row_groups(), out);
        }
        Ok(())
    })
}
