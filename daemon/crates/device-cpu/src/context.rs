//! What an operation works on, on the host: its buffers in the scratch block and its weights.

use rocmforge_device::{PlacedTensor, Scratch, SegmentBinding};
use rocmforge_kernels_cpu::PackedMatrix;
use rocmforge_ops::{Buf, Op, RowCounts, TensorIndex};

use super::HostDevice;
use super::products::Weights;

/// Elements that one share of a row-wise operation should have, so that handing it
/// out costs nothing beside it.
const SHARE_ELEMENTS: usize = 16 << 10;

/// Rows of so many elements in one share.
pub(super) fn share(width: usize) -> usize {
    (SHARE_ELEMENTS / width.max(1)).max(1)
}

/// What an operation works on, but for the device.
#[derive(Clone, Copy)]
pub(super) struct OpBuffers<'a> {
    pub(super) weights: Option<SegmentBinding<'a>>,
    pub(super) scratch: Scratch<'a>,
    pub(super) rows: RowCounts,
}

impl<'a> OpBuffers<'a> {
    pub(super) fn with_device(&self, device: &'a HostDevice) -> OpContext<'a> {
        OpContext {
            device,
            context: *self,
        }
    }

    /// The bytes of a buffer in the scratch block.
    fn range(&self, buf: Buf) -> std::ops::Range<u64> {
        let placed = &self.scratch.layout.bufs[usize::from(buf.0)];
        placed.at..placed.at + self.rows.of(placed.rows) * placed.width * 4
    }

    /// An operation must not change a buffer while it reads it as another one; what it changes
    /// in place is the exception.
    ///
    /// # Panics
    /// When two of its buffers overlap, of which one is changed.
    pub(super) fn assert_apart(&self, op: &Op) {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        op.buffers(&mut |b| reads.push(b), &mut |b| writes.push(b));
        let in_place = match op {
            Op::RmsNorm { x, out, .. }
            | Op::LayerNorm { x, out, .. }
            | Op::Clamp { x, out, .. } => (x == out).then_some(*x),
            Op::Add { x, .. }
            | Op::AddWeighted { x, .. }
            | Op::AddTable { x, .. }
            | Op::Scale { x, .. }
            | Op::ScaleBy { x, .. }
            | Op::SoftCap { x, .. }
            | Op::Rope { x, .. }
            | Op::Activate { x, .. }
            | Op::AddGated { x, .. }
            | Op::GateHeads { x, .. }
            | Op::PositionScale { x, .. } => Some(*x),
            Op::Gate { gate, .. } => Some(*gate),
            Op::RopeKv { q, k, .. } => {
                reads.retain(|b| b != k);
                writes.push(*k);
                Some(*q)
            }
            Op::AddAdapters { low, products, .. } => {
                reads.retain(|b| !products.iter().any(|p| p.out == *b));
                writes.push(*low);
                None
            }
            _ => None,
        };
        if let Some(at) = in_place.and_then(|buf| reads.iter().position(|b| *b == buf)) {
            reads.swap_remove(at);
        }
        for (i, &w) in writes.iter().enumerate() {
            for &other in reads.iter().chain(&writes[i + 1..]) {
                let (a, b) = (self.range(w), self.range(other));
                assert!(
                    a.end <= b.start || b.end <= a.start,
                    "{}: buffers {} and {} overlap",
                    op.name(),
                    w.0,
                    other.0
                );
            }
        }
    }
}

/// What an operation works on.
#[derive(Clone, Copy)]
pub(super) struct OpContext<'a> {
    pub(super) device: &'a HostDevice,
    context: OpBuffers<'a>,
}

impl<'a> OpContext<'a> {
    fn placed(&self, buf: Buf) -> &'a rocmforge_ops::buf::PlacedBuf {
        &self.context.scratch.layout.bufs[usize::from(buf.0)]
    }

    pub(super) fn width(&self, buf: Buf) -> usize {
        self.placed(buf).width as usize
    }

    pub(super) fn count(&self, buf: Buf) -> usize {
        self.context.rows.of(self.placed(buf).rows) as usize
    }

    fn at(&self, buf: Buf) -> u64 {
        self.context.scratch.base + self.placed(buf).at
    }

    pub(super) fn rows(&self, buf: Buf) -> &'a [f32] {
        let elements = self.count(buf) * self.width(buf);
        self.device.arena.floats(self.at(buf), elements)
    }

    /// The buffers of one operation lie apart ([`OpBuffers::assert_apart`]), so
    /// the views do not overlap.
    pub(super) fn rows_mut(&self, buf: Buf) -> &'a mut [f32] {
        let elements = self.count(buf) * self.width(buf);
        self.device.arena.floats_mut(self.at(buf), elements)
    }

    /// Calls `f` with ranges of rows and the rows of `buf` in each, shared out over the pool.
    pub(super) fn each_row(&self, buf: Buf, f: impl Fn(std::ops::Range<usize>, &mut [f32]) + Sync) {
        let width = self.width(buf);
        self.device
            .pool
            .run_rows(self.rows_mut(buf), width, share(width), f);
    }

    fn bound(&self) -> SegmentBinding<'a> {
        self.context
            .weights
            .expect("an operation that names a tensor runs with a segment")
    }

    pub(super) fn tensor(&self, tensor: TensorIndex) -> &'a PlacedTensor {
        &self.bound().layout.tensors[tensor]
    }

    pub(super) fn weights(&self, tensor: TensorIndex, matrix: &PackedMatrix) -> Weights<'a> {
        let placed = self.tensor(tensor);
        if let Some(file) = &self.device.from_file
            && self.bound().slab >= self.device.kept_bytes
        {
            return Weights::InFile(file, &placed.desc);
        }
        let at = self.bound().slab + placed.at;
        Weights::Packed(self.device.arena.bytes(at, matrix.packed_bytes()))
    }

    /// A tensor that is kept as f32.
    pub(super) fn floats(&self, tensor: TensorIndex) -> &'a [f32] {
        let placed = self.tensor(tensor);
        let elements = (placed.desc.rows * placed.desc.cols) as usize;
        self.device
            .arena
            .floats(self.bound().slab + placed.at, elements)
    }
}
