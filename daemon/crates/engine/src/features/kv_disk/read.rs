//! The read of a prefix from disk for one request.

use std::collections::VecDeque;
use std::time::Instant;

use rocmforge_kv_disk::Fetch;

use crate::features::prefix_cache::{HeldSlots, NodeId, Realm};

/// One slot of a node that is read from disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) page: usize,
    pub(super) slot: usize,
}

/// A prefix that is being read from disk for a request.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) realm: Realm,
    /// The tokens of the prefix, in whole pages.
    pub(super) tokens: Vec<u32>,
    /// Number of slots of a node.
    pub(super) slots: usize,
    pub(super) entries: VecDeque<Entry>,
    pub(super) fetch: Fetch,
    /// Nodes of the prefix that exist so far, from the first on.
    pub(super) nodes: Vec<NodeId>,
    /// Cached pages in memory that the read holds until its request begins.
    pub(super) held: HeldSlots,
    /// Number of pages of the prefix that were in memory before.
    pub(super) found: usize,
    pub(super) began: Instant,
}

impl Read {
    /// Ends the read; returns the slots that it held.
    pub(super) fn give_up(&mut self) -> HeldSlots {
        self.entries.clear();
        std::mem::take(&mut self.held)
    }
}
