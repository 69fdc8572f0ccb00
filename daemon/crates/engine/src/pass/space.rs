//! Where passes work: scratch blocks, and buffers of the host that are used again.

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

/// The part of the budget that scratch blocks may have which no pass needs now.
const SPARE_PART: u64 = 16;

/// A scratch block and its bytes.
pub(crate) type ScratchBlock = (BlockId, u64);

/// Sizes of scratch that are remembered.
const SIZES_MAX: usize = 4096;

/// Sizes of scratch by model, rows and rows of logits: to lay it out takes longer than all else
/// that is decided before a pass.
#[derive(Debug, Default)]
pub(crate) struct ScratchSizes {
    known: RefCell<HashMap<(ModelId, u32, u32), u64>>,
}

impl ScratchSizes {
    /// Bytes of a model's scratch for so many rows and rows of logits, laid out at first.
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

    /// Forgets the sizes of some models.
    pub(crate) fn forget(&mut self, of: impl Fn(ModelId) -> bool) {
        self.known.get_mut().retain(|key, _| !of(key.0));
    }
}

/// Where passes work, and how much they may take.
pub(crate) struct PassSpace {
    /// The scratch block of the pass that runs, or ran last; suspended ones have their own. Passes
    /// of tokens between the steps of a prompt's have a part of it.
    pub(crate) scratch: Option<ScratchBlock>,
    /// Scratch blocks that no pass has.
    spare: Vec<ScratchBlock>,
    /// The block that each model's last pass had: what a device records holds its address.
    last: HashMap<ModelId, BlockId>,
    /// Sizes of scratch that were laid out.
    pub(crate) sizes: ScratchSizes,
    /// Tokens of the pass under way.
    pub(crate) ids: Vec<u32>,
    /// Rows of its inputs, as their tables have them.
    pub(crate) inputs: Vec<Vec<u8>>,
    /// Residual streams of its rows, `[rows][n_embd]`, where the model's MTP head wants them.
    pub(crate) stream: Vec<f32>,
    /// Rotations of its rows, for each table.
    pub(crate) angles: Vec<RopeAngles>,
    /// The last pass came to computing: recurrent states may have taken in a part of it.
    pub(crate) computing: bool,
    /// What the device has to do yet.
    pub(crate) backlog: Backlog,
    /// Looks at rows of logits.
    pub(crate) row_threads: Arc<RowThreads>,
    /// How long passes take, and what the link brings meanwhile.
    pub(crate) pace: PassPace,
    /// Uploads under way ahead of their turn, at most.
    pub(crate) prefetch: u32,
    /// Tokens of a prompt that are computed in one pass, at most.
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

    /// Whether there are scratch blocks that no pass has.
    pub(crate) fn has_spare(&self) -> bool {
        !self.spare.is_empty()
    }

    /// Takes a spare block of at least so many bytes, and at most `most`, in place of the one that
    /// there is: the one that the model had last, or else the smallest. So each model comes to the
    /// same block again.
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

    /// A model is no more.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.sizes.forget(|of| of == model);
        self.last.remove(&model);
    }

    /// A model's pass has the block that there is.
    pub(crate) fn note_last(&mut self, model: ModelId) {
        if let Some((block, _)) = self.scratch {
            self.last.insert(model, block);
        }
    }

    /// Keeps a scratch block that no pass needs now, where `several` models take turns and it is
    /// small; else gives it back.
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

    /// Gives all scratch back that no pass has.
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
