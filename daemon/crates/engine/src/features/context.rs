//! The parts of the engine that features are given between two passes.

use rocmforge_ops::positions_of_parts;
use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::ModelId;

use crate::features::speculation::state::Speculation;
use crate::memory::Memory;
use crate::model::registry::Models;
use crate::pass::costs::{TableParts, spans_within, table_entries};
use crate::pass::space::PassSpace;
use crate::request::requests::Requests;
use crate::request::task::Task;

/// While a request waits for its next token, rows of prompts are at most one part in this many of a
/// pass's rows, whatever [`crate::pass::share`] measures.
const SHARED_PART: u32 = 4;

/// The parts of the engine that a feature works with between two passes.
pub(crate) struct Context<'a> {
    pub(crate) memory: &'a mut Memory,
    pub(crate) models: &'a mut Models,
    pub(crate) requests: &'a mut Requests,
    pub(crate) space: &'a mut PassSpace,
}

impl Context<'_> {
    /// Maximum number of sequences in one pass: their pages have to fit the device's page table.
    pub(crate) fn spans_max(&self) -> u32 {
        spans_max(self.memory, self.requests)
    }

    /// Size in bytes of the pass's scratch block, and its offset in the arena.
    pub(crate) fn scratch(&self) -> (u64, u64) {
        let at = self
            .space
            .scratch
            .map_or(0, |(block, _)| self.memory.store.cache.block(block).offset);
        (self.space.scratch_bytes(), at)
    }
}

/// Maximum number of sequences in one pass: their pages have to fit the device's page table.
pub(crate) fn spans_max(memory: &Memory, requests: &Requests) -> u32 {
    let begun = || requests.all().filter(|t| t.begun);
    let longest = begun().flat_map(Task::parts).max();
    let pages = |task: &Task| {
        let (kv, rows) = (&task.loaded.model().plan().kv, task.parts());
        let parts = TableParts {
            n: rows.len(),
            longest: longest.copied().unwrap_or(0),
        };
        let positions = task.tokens.len();
        let positions = positions.max(positions_of_parts(rows.iter().copied()));
        table_entries(kv, positions, parts)
    };
    let most = begun().map(pages).max();
    spans_within(&*memory.store.device, most.unwrap_or(8))
}

/// Maximum number of prompt rows in a pass while a request waits for its next token, whatever was
/// measured.
pub(crate) fn shared_rows_max(space: &PassSpace) -> u32 {
    (space.prefill_chunk.get() as u32 / SHARED_PART).max(1)
}

/// The model that a planned pass runs.
pub(crate) fn model_of(plan: &PassPlan) -> rocmforge_tensor_cache::ModelId {
    rocmforge_tensor_cache::ModelId(plan.model.0)
}

/// Whether the weights of these models and their draft models fit a budget of `budget` bytes beside
/// the blocks that cannot be evicted and the pinned segments of other models.
pub(crate) fn have_room(
    memory: &Memory,
    speculation: &Speculation,
    models: &[ModelId],
    budget: u64,
) -> bool {
    let store = &memory.store;
    let with_drafts = |&id| std::iter::once(id).chain(speculation.beside(id));
    let weights: Vec<ModelId> = models.iter().flat_map(with_drafts).collect();
    let bytes = store.bytes_of(&weights);
    let pinned = models.iter().map(|&id| store.model_pinned_bytes(id));
    let of_others = store.pinned_bytes().saturating_sub(pinned.sum());
    let blocks = store.cache.usage().blocks() - memory.prefixes.kept_bytes();
    bytes + of_others <= budget.saturating_sub(blocks)
}
