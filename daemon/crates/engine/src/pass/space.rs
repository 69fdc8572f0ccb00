//! Memory that passes work in: scratch blocks, and reusable host buffers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use rocmforge_kernels_cpu::ops::RopeAngles;
use rocmforge_tensor_cache::{BlockId, ModelId};

use crate::memory::Memory;
use crate::pass::backlog::Backlog;
use crate::pass::pace::PassPace;
use crate::pass::row_threads::RowThreads;

/// Scratch blocks that no pass uses may take one part in this many of the budget.
const SPARE_PART: u64 = 16;

/// A scratch block and its size in bytes.
pub(crate) type ScratchBlock = (BlockId, u64);

/// Maximum number of remembered scratch sizes.
const SIZES_MAX: usize = 4096;

/// Sizes of scratch by model, rows and rows of logits. Remembered because laying out scratch takes
/// longer than all other decisions before a pass.
#[derive(Debug, Default)]
pub(crate) struct ScratchSizes {
    known: RefCell<HashMap<(ModelId, u32, u32), u64>>,
}

impl ScratchSizes {
    /// Bytes of a model's scratch for `rows` rows and `outputs` rows of logits; calls `lay_out` the
    /// first time.
    pub(crate) fn bytes(
        &self,
        (model, rows, outputs): (ModelId, u32, u32),
        lay_out: impl FnOnce() -> u64,
    ) -> u64 {
        let key = (model, rows, outputs);
        let known = self.known.borrow().get(&key).copied();
        known.unwrap_or_else(|| {
            let bytes = lay_out();
            let mut known = self.known.borrow_mut();
            if known.len() >= SIZES_MAX {
                known.clear();
            }
            known.insert(key, bytes);
            bytes
        })
    }

    /// Forgets the sizes of the models that `of` selects.
    pub(crate) fn forget(&mut self, of: impl Fn(ModelId) -> bool) {
        self.known.get_mut().retain(|key, _| !of(key.0));
    }
}

/// Scratch blocks, host buffers and limits of passes.
pub(crate) struct PassSpace {
    /// The scratch block of the pass that runs, or ran last; suspended passes have their own.
    /// Decode passes between the steps of a chunk use a part of it.
    pub(crate) scratch: Option<ScratchBlock>,
    /// Scratch blocks that no pass uses.
    spare: Vec<ScratchBlock>,
    /// The scratch block of each model's last pass: graphs that a device captured contain its
    /// address.
    last: HashMap<ModelId, BlockId>,
    /// Sizes of scratch that were laid out.
    pub(crate) sizes: ScratchSizes,
    /// Token ids of the current pass.
    pub(crate) ids: Vec<u32>,
    /// Input rows of the current pass, in the tensor types of their tables.
    pub(crate) inputs: Vec<Vec<u8>>,
    /// Hidden states of the current pass's rows, `[rows][n_embd]`, if the model's MTP head needs
    /// them.
    pub(crate) stream: Vec<f32>,
    /// RoPE angles of the current pass's rows, for each RoPE table.
    pub(crate) angles: Vec<RopeAngles>,
    /// Whether the last pass began computing, so that recurrent states may have changed in part.
    pub(crate) computing: bool,
    /// Estimate of the work that is queued on the device.
    pub(crate) backlog: Backlog,
    /// Threads that process rows of logits.
    pub(crate) row_threads: Arc<RowThreads>,
    /// Mean time of passes, and the upload rate of the link.
    pub(crate) pace: PassPace,
    /// Maximum number of uploads in flight ahead of need.
    pub(crate) prefetch: u32,
    /// Maximum number of prompt tokens that one pass computes.
    pub(crate) prefill_chunk: NonZeroUsize,
}

impl PassSpace {
    pub(crate) fn new(prefetch: u32, prefill_chunk: NonZeroUsize, row_threads: RowThreads) -> Self {
        Self {
            scratch: None,
            spare: Vec::new(),
            last: HashMap::new(),
            sizes: ScratchSizes::default(),
            ids: Vec::new(),
            inputs: Vec::new(),
            stream: Vec::new(),
            angles: Vec::new(),
            computing: false,
            backlog: Backlog::default(),
            row_threads: Arc::new(row_threads),
            pace: PassPace::default(),
            prefetch,
            prefill_chunk,
        }
    }

    /// Arena offset of the scratch block.
    pub(crate) fn scratch_at(&self, memory: &Memory) -> u64 {
        let (block, _) = self.scratch.expect("scratch was ensured");
        memory.store.cache.block(block).offset
    }

    /// Bytes of the scratch block; 0 without one.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.scratch.map_or(0, |(_, bytes)| bytes)
    }

    /// Whether there are scratch blocks that no pass uses.
    pub(crate) fn has_spare(&self) -> bool {
        !self.spare.is_empty()
    }

    /// Takes an unused scratch block of `bytes` to `most` bytes as the current one: the one that
    /// the model had last, else the smallest, so that each model gets the same block again.
    pub(crate) fn take_spare(&mut self, model: ModelId, bytes: u64, most: u64) {
        let last = self.last.get(&model).copied();
        let fits = |(_, has): &ScratchBlock| (bytes..=most).contains(has);
        let is_last = |block: &ScratchBlock| Some(block.0) == last && fits(block);
        if self.scratch.as_ref().is_some_and(is_last) {
            return;
        }
        let spare = self.spare.iter().enumerate();
        let fit = spare.filter(|(_, block)| fits(block));
        let Some((at, _)) = fit.min_by_key(|(_, block)| (!is_last(block), block.1)) else {
            return;
        };
        let found = self.spare.swap_remove(at);
        self.spare.extend(self.scratch.replace(found));
    }

    /// Forgets the state of a model that is unloaded.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.sizes.forget(|of| of == model);
        self.last.remove(&model);
    }

    /// Records that a model's pass uses the current scratch block.
    pub(crate) fn note_last(&mut self, model: ModelId) {
        if let Some((block, _)) = self.scratch {
            self.last.insert(model, block);
        }
    }

    /// Keeps a small scratch block that no pass uses now for later, if `several` models take turns;
    /// else frees it.
    pub(crate) fn keep_spare(
        &mut self,
        memory: &mut Memory,
        idle: Option<ScratchBlock>,
        several: bool,
    ) {
        let Some((block, bytes)) = idle else {
            return;
        };
        let kept: u64 = self.spare.iter().map(|spare| spare.1).sum();
        match several && kept + bytes <= memory.budget() / SPARE_PART {
            true => self.spare.push((block, bytes)),
            false => memory.store.free(block),
        }
    }

    /// Frees all scratch that no pass uses.
    pub(crate) fn free(&mut self, memory: &mut Memory) {
        self.last.clear();
        let all = self.scratch.take().into_iter().chain(self.spare.drain(..));
        for (block, _) in all {
            memory.store.free(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_laid_out_once_until_its_model_is_forgotten() {
        let mut sizes = ScratchSizes::default();
        let (one, other) = (ModelId(1), ModelId(2));
        assert_eq!(sizes.bytes((one, 8, 1), || 800), 800);
        assert_eq!(sizes.bytes((one, 8, 1), || panic!("it is known")), 800);
        assert_eq!(sizes.bytes((other, 8, 1), || 900), 900);
        sizes.forget(|model| model == one);
        assert_eq!(sizes.bytes((one, 8, 1), || 801), 801);
        assert_eq!(sizes.bytes((other, 8, 1), || panic!("it is known")), 900);
    }
}
