//! The host's answer to a miss: a step whose weights are not on the card,
//! computed here out of the file.
//!
//! Segments that were answered before are kept in the kernels' form while they have room in a
//! bounded part of the arena (`store.rs`). The others are computed where they lie: a thread brings
//! some rows of a matrix into that form, in its own cache, and multiplies with them at once, which
//! takes two to three times as long.
//!
//! *Invariant:* the result of a row depends neither on the other rows nor on the threads, as with
//! every product of the host (`kernels/tests/matmul.rs`, `a_token_does_not_depend_on_its_batch` and
//! `workers_share_an_output`).

use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_gguf::MappedFile;
use rocmforge_kernels::host::{PackedMatrix, mat_mul, reference};
use rocmforge_ops::{Buf, Op, ScratchLayout};

use super::products::Item;
use super::store::{Key, Store};
use super::{HostConfig, HostDevice};
use crate::error::Error;
use crate::{
    Batch, BoundStep, Device, Role, Scratch, SegmentBinding, SegmentLayout, TensorDesc, Upload,
    UploadTicket,
};

/// Bytes of weights that are brought into the kernels' form at a time: what
/// stays in a core's own cache.
const PIECE_BYTES: usize = 128 << 10;

/// What is kept is a multiple of this: a huge page.
const KEPT_ALIGNMENT: u64 = 2 << 20;

/// Answers come layer by layer, at intervals in which the card works: threads that slept in
/// between would be woken one after another, which took longer than the products (2 ms with 16
/// threads of a virtual machine).
const SPIN: Duration = Duration::from_millis(2);

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
            // Each answer waits for what it keeps.
            staging_threads: Some(0),
        })?;
        let memory = host.arena.reserved();
        let keeps = keeps(memory).min(memory / 2);
        let store = Store::new(keeps - keeps % KEPT_ALIGNMENT);
        host.kept_bytes = store.most();
        Ok(Self {
            host,
            store,
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
                    | Op::Gate { .. }
                    | Op::Activate { .. }
                    | Op::Add { .. }
                    | Op::Scale { .. }
                    | Op::ScaleBy { .. }
                    | Op::AddGated { .. }
                    | Op::SoftCap { .. }
            )
        })
    }

    /// Runs a step, whose weights are those of `segments` of a model (one for each bound segment of
    /// the step) and lie in `file`, on rows `given` of the buffers that it reads. Returns where
    /// they lay. The calling thread does `own` once, before the step's operations or, where those
    /// are experts, beside them; not where an error comes before.
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
            bound.slab = end.next_multiple_of(crate::ALIGNMENT);
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

    /// Bytes that kept weights take.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.store.used()
    }

    /// Lets kept weights take so many bytes from now on, as many as at the start at the most, and
    /// gives the memory beyond back to the system.
    pub fn limit_kept(&mut self, bytes: u64) {
        let before = self.store.used();
        for moved in self.store.set_bytes(bytes - bytes % KEPT_ALIGNMENT) {
            let arena = &self.host.arena;
            arena.copy_within(moved.from, moved.to, moved.bytes);
        }
        self.discard_unused(before);
    }

    /// A model is gone.
    pub fn forget(&mut self, model: u64) {
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
            let row = first * rocmforge_kernels::host::ROW_GROUP;
            let rows = some.len() * rocmforge_kernels::host::ROW_GROUP;
            let rows = rows.min(matrix.rows() - row);
            let part = PackedMatrix::new(desc.ty, rows, matrix.cols(), matrix.isa())
                .map_err(|e| crate::segment::wrong_shape(desc, e.to_string()))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a range that the system has given memory for.
    fn resident(range: &[u8]) -> u64 {
        use std::io::{Read, Seek, SeekFrom};
        const PAGE: u64 = 4096;
        let first = range.as_ptr() as u64 / PAGE;
        let mut map = std::fs::File::open("/proc/self/pagemap").unwrap();
        map.seek(SeekFrom::Start(first * 8)).unwrap();
        let mut entries = vec![0; range.len() / PAGE as usize * 8];
        map.read_exact(&mut entries).unwrap();
        // Bit 63: the page is there; bit 62: it was swapped out.
        let taken = entries.chunks_exact(8).filter(|entry| entry[7] >> 6 != 0);
        taken.count() as u64 * PAGE
    }

    #[test]
    fn segments_are_brought_at_once_and_a_damaged_one_does_not_hold_the_others_up() {
        const ROWS: u64 = 64;
        const COLS: u64 = 256;
        // Of Q8_0: a scale in f16 and 32 codes a block.
        const BYTES: u64 = ROWS * COLS / 32 * 34;
        let mut bytes: Vec<u8> = (0..3 * BYTES).map(|i| (i * 31 % 251) as u8).collect();
        for block in bytes.chunks_exact_mut(34) {
            block[..2].copy_from_slice(&0x2000u16.to_le_bytes());
        }
        let nan = 0x7e00u16.to_le_bytes();
        bytes[BYTES as usize + 34..][..2].copy_from_slice(&nan);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        let file = Arc::new(MappedFile::open(file.path()).unwrap());
        let mut answers = Answers::new(NonZeroUsize::new(2), |_| 32 << 20).unwrap();
        let layouts: Vec<SegmentLayout> = (0..3)
            .map(|i| {
                let tensor = TensorDesc {
                    name: format!("t{i}"),
                    ty: rocmforge_ops::WeightType::Q8_0,
                    rows: ROWS,
                    cols: COLS,
                    role: Role::Matrix,
                    offset: i * BYTES,
                    bytes: BYTES,
                };
                answers.host.layout(&[tensor]).unwrap()
            })
            .collect();
        let all: Vec<&SegmentLayout> = layouts.iter().collect();
        let mut brought = Brought::default();
        let error = answers.kept(&file, (1, &[0, 1, 2]), &all, &mut brought);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("t1"), "{error}");
        let has = |answers: &Answers| [0, 1, 2].map(|s| answers.keeps(1, s));
        assert_eq!(has(&answers), [true, false, true]);
        // Two experts of a segment ask for it twice.
        let mut brought = Brought::default();
        let some = [all[0], all[2], all[2]];
        let kept = answers.kept(&file, (1, &[0, 2, 2]), &some, &mut brought);
        let kept = kept.unwrap();
        let each = layouts[0].bytes;
        assert_eq!(
            (brought.kept_bytes, brought.bytes, brought.file_bytes),
            (3 * each, 0, 0)
        );
        let slab = |kept: &Option<Kept>| kept.as_ref().unwrap().1;
        assert_eq!(slab(&kept[1]), slab(&kept[2]));
        assert_ne!(slab(&kept[0]), slab(&kept[1]));
        answers.forget(1);
        let mut brought = Brought::default();
        answers
            .kept(&file, (1, &[0, 2, 2]), &some, &mut brought)
            .unwrap();
        assert_eq!(
            (brought.kept_bytes, brought.bytes, brought.file_bytes),
            (each, 2 * each, 0)
        );
        // What lies there is what one thread makes of it.
        let matrix = super::super::packed(&layouts[2].tensors[0].desc, answers.host.isa).unwrap();
        let mut alone = vec![0; matrix.packed_bytes()];
        let from = &bytes[2 * BYTES as usize..];
        matrix
            .pack(from, 0..matrix.row_groups(), &mut alone)
            .unwrap();
        let (_, slab) = answers.store.find((1, 2)).unwrap();
        let at = slab + layouts[2].tensors[0].at;
        assert_eq!(answers.host.arena.bytes(at, alone.len()), alone);
    }

    #[test]
    fn memory_beyond_a_smaller_bound_goes_back_to_the_system() {
        const EACH: u64 = (5 << 20) + crate::ALIGNMENT;
        const MOST: u64 = 32 << 20;
        let mut answers = Answers::new(NonZeroUsize::new(1), |_| MOST).unwrap();
        assert_eq!(answers.store.most(), MOST, "the machine is too small");
        answers.host.set_capacity(MOST).unwrap();
        answers.capacity = MOST;
        let layout = Arc::new(SegmentLayout {
            tensors: Vec::new(),
            bytes: EACH,
        });
        for segment in 0..6 {
            let slab = answers.store.room(EACH).unwrap();
            let place = answers.host.arena.bytes_mut(slab, EACH as usize);
            place.fill(segment as u8 + 1);
            answers.store.keep((1, segment), Arc::clone(&layout), slab);
        }
        // The first is idle, all others are asked for.
        for segment in (1..6).cycle().take(60) {
            assert!(answers.store.find((1, segment)).is_some());
        }
        let held = |answers: &Answers| resident(answers.host.arena.bytes(0, MOST as usize));
        assert!(held(&answers) >= 6 * EACH);
        answers.limit_kept(MOST / 2 + 1);
        assert!(answers.kept_bytes() <= MOST / 2);
        assert!(held(&answers) <= MOST / 2, "{} bytes", held(&answers));
        let kept: Vec<u32> = (0..6).filter(|s| answers.keeps(1, *s)).collect();
        assert_eq!(kept, [1, 2, 5], "the last one moved to where the first was");
        for segment in kept {
            let (_, slab) = answers.store.find((1, segment)).unwrap();
            let bytes = answers.host.arena.bytes(slab, EACH as usize);
            assert!(bytes.iter().all(|b| *b == segment as u8 + 1), "{segment}");
        }
        answers.limit_kept(0);
        assert_eq!((answers.kept_bytes(), held(&answers)), (0, 0));
        answers.limit_kept(MOST);
        assert!(answers.has_room(MOST) && !answers.has_room(MOST + 1));
    }
}
