//! Spare recurrent states: where the states behind drafts go.
//!
//! A state that has taken in a wrong draft cannot be taken back. So a pass leaves the state
//! behind a sequence's own row where it was, and the states behind its drafts in spare ones,
//! which the model lends the sequence for the pass; afterwards the one behind the last right
//! draft is the sequence's, and the others are spare again. Nothing is copied, and nothing that a
//! pass computed is computed again.
//!
//! ```text
//! rows:    token   draft   draft
//! states:  own --> own --> spare --> spare        the first draft is right, the second is not:
//!                                                 own and the first spare change places
//! ```
//!
//! Admission counts a model's spare states once. Where a request would fit only without them, its
//! model drafts none until the budget grows.

use rocmforge_device::{ALIGNMENT, Plan};
use rocmforge_tensor_cache::{BlockId, BlockKind, ModelId};

use crate::api::error::Error;
use crate::memory::Memory;

/// Maximum number of drafts of a pass, of all sequences of a model with a state.
const SPARE_MAX: u64 = 64;

/// The part of the budget that spare states may have; where that is less than one state, there is
/// one.
const SPARE_PART: u64 = 32;

/// The spare states of a model.
#[derive(Debug)]
pub(crate) struct SpareStates {
    /// Bytes of a state.
    bytes: u64,
    /// Drafts are made: not where the budget has no room for them.
    pub(crate) on: bool,
    /// Spare states that no sequence uses.
    spare: Vec<BlockId>,
}

impl SpareStates {
    /// The spare states of a model whose sequences have recurrent states.
    pub(crate) fn of(plan: &Plan) -> Option<Self> {
        (plan.state_elements > 0).then(|| Self {
            bytes: (plan.state_elements * 4).next_multiple_of(ALIGNMENT),
            on: true,
            spare: Vec::new(),
        })
    }

    /// How many there may be in a budget: so many drafts a pass may have.
    pub(crate) fn most(&self, budget: u64) -> usize {
        match self.on {
            true => (budget / SPARE_PART / self.bytes).clamp(1, SPARE_MAX) as usize,
            false => 0,
        }
    }

    /// Bytes of all spare states.
    pub(crate) fn bytes(&self, budget: u64) -> u64 {
        self.most(budget) as u64 * self.bytes
    }

    /// Has at least `n`.
    pub(crate) fn ensure(
        &mut self,
        memory: &mut Memory,
        model: ModelId,
        n: usize,
    ) -> Result<(), Error> {
        while self.spare.len() < n {
            let (block, _) = memory.reserve(BlockKind::Kv, Some(model), self.bytes)?;
            self.spare.push(block);
        }
        Ok(())
    }

    /// Lends `n` of those that there are.
    pub(crate) fn lend(&mut self, n: usize) -> Vec<BlockId> {
        self.spare.split_off(self.spare.len() - n)
    }

    /// Takes back what was lent, or what came in its place.
    pub(crate) fn take_back(&mut self, memory: &mut Memory, blocks: Vec<BlockId>) {
        self.spare.extend(blocks);
        if !self.on {
            self.free(memory);
        }
    }

    /// Gives the memory of all back.
    pub(crate) fn free(&mut self, memory: &mut Memory) {
        for block in self.spare.drain(..) {
            memory.store.free(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_few_in_a_small_budget_and_none_where_there_is_no_room() {
        let mut states = SpareStates {
            bytes: 1 << 20,
            on: true,
            spare: Vec::new(),
        };
        let most = [0, 64 << 20, 320 << 20, 1 << 40].map(|budget| states.most(budget));
        assert_eq!(most, [1, 2, 10, 64]);
        assert_eq!(states.bytes(320 << 20), 10 << 20);
        states.on = false;
        assert_eq!((states.most(1 << 40), states.bytes(1 << 40)), (0, 0));
    }
}
