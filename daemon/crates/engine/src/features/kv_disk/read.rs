//! A prefix that is read from disk for a request.

use std::collections::VecDeque;
use std::time::Instant;

use rocmforge_kv_disk::Fetch;

use crate::features::prefix_cache::{HeldSlots, NodeId, Realm};

/// A slot that is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) page: usize,
    pub(super) slot: usize,
}

/// A prefix that is read.
#[derive(Debug)]
pub(super) struct Read {
    pub(super) realm: Realm,
    /// The prefix's tokens, whole pages.
    pub(super) tokens: Vec<u32>,
    /// Slots of a node.
    pub(super) slots: usize,
    pub(super) entries: VecDeque<Entry>,
    pub(super) fetch: Fetch,
    /// Nodes of the prefix, from the first on.
    pub(super) nodes: Vec<NodeId>,
    /// Cached pages in memory that the read holds until its request begins.
    pub(super) held: HeldSlots,
    /// Pages that were in memory.
    pub(super) found: usize,
    pub(super) began: Instant,
}

impl Read {
    /// Ends the read; returns the pages that it held.
    pub(super) fn give_up(&mut self) -> HeldSlots {
        self.entries.clear();
        std::mem::take(&mut self.held)
    }
}
