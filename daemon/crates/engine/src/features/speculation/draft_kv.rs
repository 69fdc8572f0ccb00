//! What draft models have of the sequences for which they draft: keys and
//! values in pages of their own.
//!
//! Nobody's request needs it, and it can be computed again. So admission does not count it: it is
//! given up before a request would wait, yield or fail for want of room, that of the longest unused
//! first. A sequence that lost it goes on without.
//!
//! *Invariant:* what a run of a draft model works with is taken out of here
//! ([`DraftKvCache::take`]), so that nothing of it is given up meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;

use rocmforge_tensor_cache::ModelId;

use crate::memory::Memory;
use crate::model::loaded::LoadedModel;
use crate::request::kv::SequenceMemory;

/// Where something is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DraftKey(u64);

/// What a draft model has of a sequence.
#[derive(Debug)]
pub(crate) struct DraftKv {
    /// The draft model.
    pub(crate) model: ModelId,
    pub(crate) loaded: Arc<LoadedModel>,
    /// The draft model's KV pages of a sequence; none are shared.
    pub(crate) pages: SequenceMemory,
    /// Positions whose keys and values are those of the sequence's tokens.
    pub(crate) past: usize,
    /// Drafts whose keys and values were computed behind them.
    pub(crate) guessed: Vec<u32>,
}

impl DraftKv {
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
    pub(crate) fn free(mut self, memory: &mut Memory) {
        self.pages.free(memory, self.loaded.model().plan());
    }
}

/// The KV caches that draft models have, by the time of their last use.
#[derive(Debug, Default)]
pub(crate) struct DraftKvCache {
    kept: BTreeMap<DraftKey, DraftKv>,
    uses: u64,
}

impl DraftKvCache {
    /// Keeps what was used just now.
    pub(crate) fn keep(&mut self, draft: DraftKv) -> DraftKey {
        let key = DraftKey(self.uses);
        self.uses += 1;
        self.kept.insert(key, draft);
        key
    }

    /// Positions that are computed of what is kept there.
    pub(crate) fn past(&self, key: DraftKey) -> usize {
        self.kept.get(&key).map_or(0, |draft| draft.past)
    }

    /// Takes the KV cache that is kept for `key`, unless it was evicted.
    pub(crate) fn take(&mut self, key: DraftKey) -> Option<DraftKv> {
        self.kept.remove(&key)
    }

    /// Takes what was used longest ago.
    pub(crate) fn take_oldest(&mut self) -> Option<DraftKv> {
        self.kept.pop_first().map(|(_, draft)| draft)
    }

    /// Takes all that a draft model has.
    pub(crate) fn take_of(&mut self, model: ModelId) -> Vec<DraftKv> {
        let of_model = self.kept.extract_if(.., |_, draft| draft.model == model);
        of_model.map(|(_, draft)| draft).collect()
    }

    /// Whether a draft model has something of a sequence.
    pub(crate) fn has(&self, model: ModelId) -> bool {
        self.kept.values().any(|draft| draft.model == model)
    }
}
