//! Device memory: live allocations over host memory, which bytes were written, and host ranges that copies may name.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::POISON;
use crate::kernels::Prepared;

/// Where device addresses begin: no host address of a Linux process lies there.
const BASE: u64 = 0x00A0_0000_0000_0000;
/// Allocations are aligned to this and kept apart by it, so that running past an end hits nothing.
const GRAIN: u64 = 4096;

/// Most reads of unwritten bytes that are kept as text.
const UNWRITTEN_MAX: usize = 100;

/// Why an access failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault(pub(crate) String);

struct Allocation {
    bytes: Vec<u8>,
    /// 1 where something was written, a byte a byte.
    written: Vec<u8>,
}

/// What was made of a range of device memory, for as long as nobody writes there.
struct Derived {
    bytes: usize,
    prepared: Arc<Prepared>,
}

/// A card's memory.
pub(crate) struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    next: u64,
    pub(crate) used: u64,
    pub(crate) total: u64,
    /// Bytes that other processes hold.
    pub(crate) others: u64,
    /// Reads of bytes that nobody wrote.
    pub(crate) unwritten: Vec<String>,
    /// By first address; no two overlap.
    derived: BTreeMap<u64, Derived>,
}

impl Memory {
    pub(crate) fn new(total: u64) -> Memory {
        Memory {
            allocations: BTreeMap::new(),
            next: BASE,
            used: 0,
            total,
            others: 0,
            unwritten: Vec::new(),
            derived: BTreeMap::new(),
        }
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.total.saturating_sub(self.used + self.others)
    }

    /// What was written behind the first `kept` bytes of each allocation reads as something else from now on.
    pub(crate) fn forget(&mut self, kept: u64) {
        for allocation in self.allocations.values_mut() {
            let kept = allocation.bytes.len().min(kept as usize);
            allocation.bytes[kept..].fill(!POISON);
        }
        self.derived.clear();
    }

    pub(crate) fn count(&self) -> u64 {
        self.allocations.len() as u64
    }

    pub(crate) fn alloc(&mut self, bytes: u64) -> Option<u64> {
        if bytes > self.free_bytes() {
            return None;
        }
        let address = self.next;
        self.next += bytes.next_multiple_of(GRAIN) + GRAIN;
        self.used += bytes;
        self.allocations.insert(
            address,
            Allocation {
                bytes: vec![POISON; bytes as usize],
                written: vec![0; bytes as usize],
            },
        );
        Some(address)
    }

    pub(crate) fn free(&mut self, address: u64) -> bool {
        match self.allocations.remove(&address) {
            Some(allocation) => {
                self.used -= allocation.bytes.len() as u64;
                self.changed(address, allocation.bytes.len());
                true
            }
            None => false,
        }
    }

    pub(crate) fn reset(&mut self) {
        self.allocations.clear();
        self.derived.clear();
        self.used = 0;
    }

    fn find(&mut self, address: u64, bytes: usize) -> Result<(&mut Allocation, usize), Fault> {
        let fault = || Fault(format!("no allocation holds {address:#x}..+{bytes}"));
        let (&base, allocation) = self
            .allocations
            .range_mut(..=address)
            .next_back()
            .ok_or_else(fault)?;
        let at = (address - base) as usize;
        if at
            .checked_add(bytes)
            .is_none_or(|end| end > allocation.bytes.len())
        {
            return Err(fault());
        }
        Ok((allocation, at))
    }

    pub(crate) fn check(&mut self, address: u64, bytes: usize) -> Result<(), Fault> {
        self.find(address, bytes).map(|_| ())
    }

    /// Reads; bytes that nobody wrote are noted and come as poison.
    pub(crate) fn read(&mut self, address: u64, bytes: usize, who: &str) -> Result<Vec<u8>, Fault> {
        let (allocation, at) = self.find(address, bytes)?;
        let read = allocation.bytes[at..at + bytes].to_vec();
        let written = &allocation.written[at..at + bytes];
        // All at once, which is quick; the place only if there is one.
        if written.iter().fold(1, |all, w| all & w) == 0 && self.unwritten.len() < UNWRITTEN_MAX {
            let first = self
                .find(address, bytes)
                .ok()
                .and_then(|(a, at)| a.written[at..at + bytes].iter().position(|&w| w == 0));
            self.unwritten.push(format!(
                "{who} reads {:#x} of {address:#x}..+{bytes}, never written",
                first.unwrap_or(0)
            ));
        }
        Ok(read)
    }

    pub(crate) fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Fault> {
        let (allocation, at) = self.find(address, from.len())?;
        allocation.bytes[at..at + from.len()].copy_from_slice(from);
        allocation.written[at..at + from.len()].fill(1);
        self.changed(address, from.len());
        Ok(())
    }

    /// Spoils a range that a kernel may use as it likes: what was there must not be read by anyone.
    pub(crate) fn spoil(&mut self, address: u64, bytes: usize) -> Result<(), Fault> {
        let (allocation, at) = self.find(address, bytes)?;
        allocation.bytes[at..at + bytes].fill(POISON);
        allocation.written[at..at + bytes].fill(0);
        self.changed(address, bytes);
        Ok(())
    }

    /// Copies inside the device: what was never written stays so, and is no fault by itself (a slab has padding).
    pub(crate) fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), Fault> {
        if from.abs_diff(to) < bytes as u64 {
            return Err(Fault(format!(
                "a copy of {bytes} from {from:#x} to {to:#x} overlaps"
            )));
        }
        let (source, at) = self.find(from, bytes)?;
        let read = source.bytes[at..at + bytes].to_vec();
        let written = source.written[at..at + bytes].to_vec();
        let (target, at) = self.find(to, bytes)?;
        target.bytes[at..at + bytes].copy_from_slice(&read);
        target.written[at..at + bytes].copy_from_slice(&written);
        self.changed(to, bytes);
        Ok(())
    }

    /// What was made of these bytes and still holds.
    pub(crate) fn derived(&self, address: u64, bytes: usize) -> Option<Arc<Prepared>> {
        let found = self.derived.get(&address).filter(|d| d.bytes == bytes)?;
        Some(Arc::clone(&found.prepared))
    }

    /// Keeps what was made of these bytes until somebody writes there.
    pub(crate) fn keep(&mut self, address: u64, bytes: usize, prepared: Arc<Prepared>) {
        self.changed(address, bytes);
        self.derived.insert(address, Derived { bytes, prepared });
    }

    fn changed(&mut self, address: u64, bytes: usize) {
        let end = address + bytes as u64;
        while let Some((&at, derived)) = self.derived.range(..end).next_back() {
            if at + derived.bytes as u64 <= address {
                break;
            }
            self.derived.remove(&at);
        }
    }
}

/// Page-locked host memory: allocated here, or registered.
pub(crate) struct HostRange {
    pub(crate) bytes: usize,
    /// The allocation itself; `None` for a registration.
    pub(crate) owned: Option<Box<[u64]>>,
}

/// Host ranges by first address.
#[derive(Default)]
pub(crate) struct HostRanges(pub(crate) BTreeMap<usize, HostRange>);

/// How a host range stands to what is page-locked.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// All of it lies in one range.
    Whole,
    /// It begins or ends outside.
    Partly,
    /// No part of it is page-locked.
    No,
}

impl HostRanges {
    pub(crate) fn locked(&self, at: usize, bytes: usize) -> Locked {
        let end = at + bytes;
        match self.0.range(..end).next_back() {
            Some((&base, range)) if base + range.bytes > at => {
                if base <= at && end <= base + range.bytes {
                    Locked::Whole
                } else {
                    Locked::Partly
                }
            }
            _ => Locked::No,
        }
    }

    pub(crate) fn count(&self, owned: bool) -> u64 {
        self.0
            .values()
            .filter(|r| r.owned.is_some() == owned)
            .count() as u64
    }
}
