//! Spare recurrent states, into which passes write the states after draft tokens.
//!
//! A state that includes a rejected draft token cannot be rolled back. So a pass writes the state
//! after a sequence's own row in place, and the states after its draft tokens to spare states,
//! which the sequence borrows for the pass. Afterwards the state after the last accepted draft
//! token becomes the sequence's, and the others are spare again. Nothing is copied, and nothing
//! that a pass computed is computed again.
//!
//! ```text
//! rows:    token   draft   draft
//! states:  own --> own --> spare --> spare        the first draft is right, the second is not:
//!                                                 own and the first spare change places
//! ```
//!
//! Admission counts a model's spare states once. If a request fits only without them, its model
//! does not draft until the budget grows.

use rocmforge_device::{ALIGNMENT, Plan};
use rocmforge_tensor_cache::{BlockId, BlockKind, ModelId};

use crate::api::error::Error;
use crate::memory::Memory;

/// Maximum number of draft tokens in a pass, of all sequences of a model with recurrent states.
const SPARE_MAX: u64 = 64;

/// Spare states take at most one part in this many of the budget, but at least one state is
/// allowed.
const SPARE_PART: u64 = 32;

/// The spare recurrent states of a model.
#[derive(Debug)]
pub(crate) struct SpareStates {
    /// Bytes of one state.
    bytes: u64,
    /// Whether drafts with spare states are made; `false` if the budget has no room for them.
    pub(crate) on: bool,
    /// Blocks of states that no sequence uses.
    spare: Vec<BlockId>,
}

impl SpareStates {
    /// The spare states of a model; `None` if its sequences have no recurrent state.
    pub(crate) fn of(plan: &Plan) -> Option<Self> {
        (plan.state_elements > 0).then(|| Self {
            bytes: (plan.state_elements * 4).next_multiple_of(ALIGNMENT),
            on: true,
            spare: Vec::new(),
        })
    }

    /// Maximum number of spare states in a budget, and so of draft tokens in a pass.
    pub(crate) fn most(&self, budget: u64) -> usize {
        match self.on {
            true => (budget / SPARE_PART / self.bytes).clamp(1, SPARE_MAX) as usize,
            false => 0,
        }
    }

    /// Bytes of the maximum number of spare states in a budget.
    pub(crate) fn bytes(&self, budget: u64) -> u64 {
        self.most(budget) as u64 * self.bytes
    }

    /// Allocates spare states until there are at least `n`.
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

    /// Lends `n` of the allocated spare states.
    pub(crate) fn lend(&mut self, n: usize) -> Vec<BlockId> {
        self.spare.split_off(self.spare.len() - n)
    }

    /// Takes back lent states, or blocks that replaced them.
    pub(crate) fn take_back(&mut self, memory: &mut Memory, blocks: Vec<BlockId>) {
        self.spare.extend(blocks);
        if !self.on {
            self.free(memory);
        }
    }

    /// Frees all spare states.
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
