//! The block of the arena that the device keeps for itself, and how it is divided.
//!
//! ```text
//! flags | results | candidates | counters | page table | bounce | slot 0 .. slot SLOTS-1 | tail
//! ```
//!
//! The first word of `results` and `tail` are marks that nothing overwrites.
//!
//! *Invariant:* no two parts overlap (test `every_budget_has_a_division_that_fits`). `flags` and
//! the slots belong to uploads, everything else to the compute stream.

use rocmforge_device::{Error, Reserve};

use super::GpuDevice;

/// Slots that raw pieces of files pass through on their way into slabs.
pub(super) const SLOTS: usize = 3;

/// Uploads under way that can have a flag of their own.
pub(super) const FLAGS: u64 = 1024;

/// Bytes of the counters of split attention.
const COUNTERS_BYTES: u64 = 16 << 10;

/// Bytes behind everything else.
const TAIL_BYTES: u64 = rocmforge_device::ALIGNMENT;

const SLOT_MIN: u64 = 16 << 10;
const SLOT_MAX: u64 = 8 << 20;

/// Budgets below this get a short page table and little room for sampling.
const LARGE_BUDGET: u64 = 256 << 20;

/// Offsets in the arena.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DeviceReserve {
    pub(super) flags: u64,
    pub(super) results: u64,
    pub(super) candidates: u64,
    pub(super) candidates_bytes: u64,
    pub(super) counters: u64,
    pub(super) counters_len: u64,
    pub(super) table: u64,
    /// Entries of the page table.
    pub(super) table_len: u64,
    pub(super) bounce: u64,
    pub(super) slots: u64,
    /// A mark, behind everything.
    pub(super) tail: u64,
    /// Bytes of a slot, and of the bounce buffer.
    pub(super) slot_bytes: u64,
}

/// Bytes of results that are read back, the largest logits of rows: 128 of 64 rows.
fn results_bytes(budget: u64) -> u64 {
    if budget >= LARGE_BUDGET {
        68 << 10
    } else {
        4096
    }
}

/// Bytes of the page table: 64 sequences of 131,072 positions in pages of 32, or a quarter of one.
fn table_bytes(budget: u64) -> u64 {
    if budget >= LARGE_BUDGET {
        2 << 20
    } else {
        16 << 10
    }
}

/// Bytes of the candidates for the largest logits: of the 40 largest of 64 rows of 150,000,
/// respectively the 8 largest of one of 256,000.
fn candidates_bytes(budget: u64) -> u64 {
    if budget >= LARGE_BUDGET {
        2 << 20
    } else {
        16 << 10
    }
}

fn slot_bytes(budget: u64) -> u64 {
    (budget / 128)
        .next_multiple_of(4096)
        .clamp(SLOT_MIN, SLOT_MAX)
}

/// Bytes of everything but the bounce buffer and the slots.
fn small_bytes(budget: u64) -> u64 {
    let sampling = results_bytes(budget) + candidates_bytes(budget);
    FLAGS * 4 + sampling + COUNTERS_BYTES + table_bytes(budget) + TAIL_BYTES
}

/// Bytes for a budget.
pub(super) fn bytes(budget: u64) -> u64 {
    small_bytes(budget) + (SLOTS as u64 + 1) * slot_bytes(budget)
}

impl DeviceReserve {
    /// Divides the block; `bytes` came from [`bytes`], rounded up.
    pub(super) fn new(at: u64, bytes: u64) -> Self {
        let budget = if bytes >= self::bytes(LARGE_BUDGET) {
            LARGE_BUDGET
        } else {
            0
        };
        let (table_bytes, candidates_bytes) = (table_bytes(budget), candidates_bytes(budget));
        let slot_bytes = (bytes - small_bytes(budget)) / (SLOTS as u64 + 1);
        let slot_bytes = slot_bytes - slot_bytes % rocmforge_device::ALIGNMENT;
        let mut cursor = at;
        let mut take = |bytes: u64| {
            let at = cursor;
            cursor += bytes;
            at
        };
        Self {
            flags: take(FLAGS * 4),
            results: take(results_bytes(budget)),
            candidates: take(candidates_bytes),
            candidates_bytes,
            counters: take(COUNTERS_BYTES),
            counters_len: COUNTERS_BYTES / 4,
            table: take(table_bytes),
            table_len: table_bytes / 8,
            bounce: take(slot_bytes),
            slots: take(slot_bytes * SLOTS as u64),
            tail: take(TAIL_BYTES),
            slot_bytes,
        }
    }

    /// The reserve's parts as addresses, in an arena that begins at `base`.
    pub(super) fn addresses(self, base: u64) -> Self {
        Self {
            flags: base + self.flags,
            results: base + self.results,
            candidates: base + self.candidates,
            counters: base + self.counters,
            table: base + self.table,
            bounce: base + self.bounce,
            slots: base + self.slots,
            tail: base + self.tail,
            ..self
        }
    }
}

impl Reserve for GpuDevice {
    fn reserve_bytes(&self, budget: u64) -> u64 {
        bytes(budget)
    }

    fn set_reserve(&mut self, offset: u64, bytes: u64) -> Result<(), Error> {
        self.arena.at(offset, bytes);
        self.reserve = Some(DeviceReserve::new(offset, bytes));
        self.prepare_reserve()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_budget_has_a_division_that_fits() {
        for shift in 16..40 {
            for budget in [1u64 << shift, (1 << shift) + 12_345] {
                let bytes = bytes(budget).next_multiple_of(rocmforge_device::ALIGNMENT);
                let reserve = DeviceReserve::new(1 << 20, bytes);
                assert!(reserve.slot_bytes >= SLOT_MIN, "{budget}: {reserve:?}");
                let end = reserve.tail + TAIL_BYTES;
                // Each part with its bytes, in the order in which they lie.
                let parts = [
                    (reserve.flags, FLAGS * 4),
                    (reserve.results, reserve.candidates - reserve.results),
                    (reserve.candidates, reserve.candidates_bytes),
                    (reserve.counters, reserve.counters_len * 4),
                    (reserve.table, reserve.table_len * 8),
                    (reserve.bounce, reserve.slot_bytes),
                    (reserve.slots, reserve.slot_bytes * SLOTS as u64),
                    (reserve.tail, TAIL_BYTES),
                ];
                for pair in parts.windows(2) {
                    let ((at, bytes), (next, _)) = (pair[0], pair[1]);
                    assert!(bytes > 0 && at + bytes <= next, "{budget}: {reserve:?}");
                }
                assert!(end <= (1 << 20) + bytes, "{budget}: {reserve:?}");
                assert!(
                    budget < 8 << 20 || bytes <= budget / 16,
                    "{budget}: {bytes}"
                );
            }
        }
    }
}
