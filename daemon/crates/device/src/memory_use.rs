//! What a device's driver gave to this process.

/// What a device's driver gave, to be held against the ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes of the allocations that this process holds.
    pub allocated_bytes: u64,
    /// Bytes of them that the arena makes usable: what slabs, pages and scratch may take.
    pub capacity_bytes: u64,
    /// What the memory behind the capacity is rounded up to a multiple of, where a change of the
    /// capacity never holds more than the larger of the two; 0 where it holds both for a moment.
    pub granularity_bytes: u64,
}

impl MemoryUse {
    /// Bytes that are held and neither usable nor rounding.
    pub fn unused_bytes(&self) -> u64 {
        let rounded = self
            .capacity_bytes
            .next_multiple_of(self.granularity_bytes.max(1));
        self.allocated_bytes.saturating_sub(rounded)
    }
}
