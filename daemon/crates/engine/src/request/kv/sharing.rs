//! A sequence's participation in the prefix cache.

use rocmforge_device::Plan;

use crate::features::kv_disk::keys::Chain;
use crate::features::prefix_cache::{NodeId, Realm};

/// State of a sequence's participation in the prefix cache.
#[derive(Debug)]
pub(super) struct Sharing {
    pub(super) realm: Realm,
    /// The node of the last page that the sequence handed to the cache; `None` at first.
    pub(super) at: Option<NodeId>,
    /// Name of the prefix up to that node in the KV cache on disk, if there is one.
    pub(super) chain: Option<Chain>,
    /// Number of cached pages that the sequence began with.
    pub(super) found: usize,
    /// Number of pages that were found in the cache or handed to it.
    pub(super) pages: usize,
    /// Positions from which later requests are likely to continue: where prompts diverged before,
    /// and the prompt's end. The state and the window's pages are kept there.
    pub(super) marks: Vec<usize>,
    /// Positions from which later requests may continue: state and window pages are kept there
    /// speculatively, while there is room.
    pub(super) chances: Vec<usize>,
    /// Node of the last state that was kept after the prompt; the next one replaces it.
    pub(super) moving: Option<NodeId>,
}

impl Sharing {
    /// Positions at which a pass should end so that state can be kept.
    pub(super) fn stops(&self, plan: &Plan) -> Vec<usize> {
        match plan.state_elements {
            0 => Vec::new(),
            _ => [&self.marks[..], &self.chances].concat(),
        }
    }
}
