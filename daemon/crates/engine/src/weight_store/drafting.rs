//! What draft models have of the sequences for which they draft: keys and
//! values in pages of their own.
//!
//! Nobody's request needs it, and it can be computed again. So admission does not count it: it is
//! given up before a request would wait, yield or fail for want of room, that of the longest unused
//! first. A sequence that lost it goes on without.
//!
//! *Invariant:* what a run of a draft model works with is taken out of here
//! (`WeightStore::take_drafting`), so that nothing of it is given up meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;

use rocmforge_tensor_cache::ModelId;

use super::WeightStore;
use crate::kv::SequenceMemory;
use crate::loaded::LoadedModel;

/// Where something is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DraftKey(u64);

/// What a draft model has of a sequence.
#[derive(Debug)]
pub(crate) struct DraftMemory {
    /// The draft model.
    pub(crate) model: ModelId,
    pub(crate) loaded: Arc<LoadedModel>,
    /// Its pages; nothing of them is shared.
    pub(crate) pages: SequenceMemory,
    /// Positions whose keys and values are those of the sequence's tokens.
    pub(crate) past: usize,
    /// Drafts whose keys and values were computed behind them.
    pub(crate) guessed: Vec<u32>,
}

impl DraftMemory {
    pub(crate) fn new(model: ModelId, loaded: Arc<LoadedModel>) -> Self {
        Self {
            model,
            loaded,
            pages: SequenceMemory::default(),
            past: 0,
            guessed: Vec::new(),
        }
    }

    /// Counts those drafts as computed that the sequence's tokens turned out to be; the others are
    /// written over. The last token is computed in any case, for its logits.
    pub(crate) fn settle(&mut self, tokens: &[u32]) {
        let behind = tokens.get(self.past..).unwrap_or_default().iter();
        let right = behind
            .zip(&self.guessed)
            .take_while(|(a, b)| a == b)
            .count();
        self.past = (self.past + right).min(tokens.len().saturating_sub(1));
        self.guessed.clear();
    }

    /// Gives its pages back.
    pub(crate) fn free(mut self, store: &mut WeightStore) {
        self.pages.free(store, self.loaded.model().plan());
    }
}

/// All of it, by the time of its last use.
#[derive(Debug, Default)]
pub(crate) struct DraftMemories {
    kept: BTreeMap<DraftKey, DraftMemory>,
    uses: u64,
}

impl WeightStore {
    /// Keeps what was used just now.
    pub(crate) fn keep_drafting(&mut self, memory: DraftMemory) -> DraftKey {
        let key = DraftKey(self.drafting.uses);
        self.drafting.uses += 1;
        self.drafting.kept.insert(key, memory);
        key
    }

    /// Positions that are computed of what is kept there.
    pub(crate) fn drafting_past(&self, key: DraftKey) -> usize {
        self.drafting.kept.get(&key).map_or(0, |m| m.past)
    }

    /// What is kept there, unless it was given up.
    pub(crate) fn take_drafting(&mut self, key: DraftKey) -> Option<DraftMemory> {
        self.drafting.kept.remove(&key)
    }

    /// Gives up what was used longest ago. Whether there was something.
    pub(crate) fn give_up_drafting(&mut self) -> bool {
        match self.drafting.kept.pop_first() {
            Some((_, memory)) => {
                tracing::debug!(
                    positions = memory.past,
                    "what a draft model has of a sequence gives way"
                );
                memory.free(self);
                true
            }
            None => false,
        }
    }

    /// Gives up what a draft model has.
    pub(crate) fn forget_drafting(&mut self, model: ModelId) {
        let of_model =
            |(&key, memory): (&DraftKey, &DraftMemory)| (memory.model == model).then_some(key);
        let keys: Vec<DraftKey> = self.drafting.kept.iter().filter_map(of_model).collect();
        for key in keys {
            if let Some(memory) = self.take_drafting(key) {
                memory.free(self);
            }
        }
    }

    /// Whether a draft model has something of a sequence.
    pub(crate) fn drafts_with(&self, model: ModelId) -> bool {
        self.drafting.kept.values().any(|m| m.model == model)
    }

    /// Gives up something that no request needs, for the sake of one that would not have room.
    /// Whether there was something.
    pub(super) fn make_way(&mut self) -> bool {
        self.give_up_drafting() || self.give_up_oldest()
    }

    /// Whether a draft model's weights, of so many bytes, have room beside those that
    /// running requests need. Where these have no room themselves, they are streamed, and
    /// what that costs is measured.
    pub(crate) fn leaves_room(&self, bytes: u64) -> bool {
        let in_use = self.cache.usage().blocks() - self.prefixes.kept_bytes();
        let left = self.budget().saturating_sub(in_use);
        match left.checked_sub(self.wanted_weights) {
            Some(free) => bytes <= free,
            None => true,
        }
    }
}
