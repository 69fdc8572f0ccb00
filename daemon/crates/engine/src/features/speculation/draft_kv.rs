//! KV caches of draft models for the sequences for which they draft, in separate pages.
//!
//! No request needs them, and they can be recomputed. So admission does not count them: they are
//! evicted, least recently used first, before a request would wait, be preempted or fail for want
//! of memory. A sequence that lost its draft KV cache goes on without drafts.
//!
//! *Invariant:* a run of a draft model takes the KV caches that it uses out of here
//! ([`DraftKvCache::take`]), so that none is evicted meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;

use rocmforge_tensor_cache::ModelId;

use crate::memory::Memory;
use crate::model::loaded::LoadedModel;
use crate::request::kv::SequenceMemory;

/// Key of a kept draft KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DraftKey(u64);

/// A draft model's KV cache for one sequence.
#[derive(Debug)]
pub(crate) struct DraftKv {
    /// The draft model.
    pub(crate) model: ModelId,
    pub(crate) loaded: Arc<LoadedModel>,
    /// The draft model's KV pages of the sequence; none are shared.
    pub(crate) pages: SequenceMemory,
    /// Number of positions whose K and V are those of the sequence's tokens.
    pub(crate) past: usize,
    /// Draft tokens whose K and V were computed after these positions.
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

    /// Counts those draft tokens as computed that became tokens of the sequence; the others will be
    /// overwritten. The last token is always computed again, for its logits.
    pub(crate) fn settle(&mut self, tokens: &[u32]) {
        let behind = tokens.get(self.past..).unwrap_or_default().iter();
        let right = behind
            .zip(&self.guessed)
            .take_while(|(a, b)| a == b)
            .count();
        self.past = (self.past + right).min(tokens.len().saturating_sub(1));
        self.guessed.clear();
    }

    /// Frees the KV pages.
    pub(crate) fn free(mut self, memory: &mut Memory) {
        self.pages.free(memory, self.loaded.model().plan());
    }
}

/// The KV caches of draft models, in the order of their last use.
#[derive(Debug, Default)]
pub(crate) struct DraftKvCache {
    kept: BTreeMap<DraftKey, DraftKv>,
    uses: u64,
}

impl DraftKvCache {
    /// Keeps a draft KV cache that was used just now.
    pub(crate) fn keep(&mut self, draft: DraftKv) -> DraftKey {
        let key = DraftKey(self.uses);
        self.uses += 1;
        self.kept.insert(key, draft);
        key
    }

    /// Number of computed positions of the draft KV cache under `key`; 0 if it was evicted.
    pub(crate) fn past(&self, key: DraftKey) -> usize {
        self.kept.get(&key).map_or(0, |draft| draft.past)
    }

    /// Takes the KV cache that is kept for `key`, unless it was evicted.
    pub(crate) fn take(&mut self, key: DraftKey) -> Option<DraftKv> {
        self.kept.remove(&key)
    }

    /// Takes the least recently used draft KV cache.
    pub(crate) fn take_oldest(&mut self) -> Option<DraftKv> {
        self.kept.pop_first().map(|(_, draft)| draft)
    }

    /// Takes all KV caches of a draft model.
    pub(crate) fn take_of(&mut self, model: ModelId) -> Vec<DraftKv> {
        let of_model = self.kept.extract_if(.., |_, draft| draft.model == model);
        of_model.map(|(_, draft)| draft).collect()
    }

    /// Whether a draft model has a KV cache for any sequence.
    pub(crate) fn has(&self, model: ModelId) -> bool {
        self.kept.values().any(|draft| draft.model == model)
    }
}
