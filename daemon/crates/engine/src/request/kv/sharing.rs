//! How a sequence takes part in the prefix cache.

use rocmforge_device::Plan;

use crate::features::kv_disk::keys::Chain;
use crate::features::prefix_cache::{NodeId, Realm};

/// A sequence's part of the prefix cache.
#[derive(Debug)]
pub(super) struct Sharing {
    pub(super) realm: Realm,
    /// The node of its last page that was handed over; `None` at first.
    pub(super) at: Option<NodeId>,
    /// The name of the prefix up to there, where it is kept on disk.
    pub(super) chain: Option<Chain>,
    /// Pages that it began with.
    pub(super) found: usize,
    /// Pages that were found or handed over.
    pub(super) pages: usize,
    /// Positions from which others are likely to go on: where prompts parted before, and the
    /// prompt's end. There the state is kept, and what lies in a window before.
    pub(super) marks: Vec<usize>,
    /// Positions from which others may go on: the same is kept there while there is room.
    pub(super) chances: Vec<usize>,
    /// The last state that was kept behind the prompt: the next one takes its place.
    pub(super) moving: Option<NodeId>,
}

impl Sharing {
    /// Positions at which a pass should end.
    pub(super) fn stops(&self, plan: &Plan) -> Vec<usize> {
        match plan.state_elements {
            0 => Vec::new(),
            _ => [&self.marks[..], &self.chances].concat(),
        }
    }
}
