//! Device memory: live allocations over host memory, which bytes were written, and host
//! ranges that copies may name.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::POISON;
use crate::kernels::Prepared;
use crate::pinned::Pinned;

/// Where device addresses begin: no host address of a Linux process lies there.
const BASE: u64 = 0x00A0_0000_0000_0000;
/// Allocations are aligned to this and kept apart by it, so that running past an end hits nothing.
const GRAIN: u64 = 4096;
/// Reservations and what is mapped into them begin and end at multiples of it.
pub const GRANULARITY: u64 = 64 << 10;

/// Most reads of unwritten bytes that are kept as text.
const UNWRITTEN_MAX: usize = 100;

/// Why an access failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault(pub(crate) String);

struct Allocation {
    bytes: Vec<u8>,
    /// 1 where something was written, a byte a byte.
    written: Vec<u8>,
    /// What is mapped into a reservation, by offset; `None` for an allocation,
    /// which is there as a whole.
    mapped: Option<BTreeMap<usize, Mapping>>,
    /// Bytes of memory that was mapped here, went, and comes back with the addresses only.
    kept: u64,
}

impl Allocation {
    /// Whether every byte of a range has memory that may be used.
    fn covers(&self, at: usize, bytes: usize) -> bool {
        let Some(mapped) = &self.mapped else {
            return true;
        };
        let mut at = at;
        let end = at + bytes;
        while at < end {
            match mapped.range(..=at).next_back() {
                Some((from, m)) if m.access && m.usable && from + m.bytes > at => {
                    at = from + m.bytes
                }
                _ => return false,
            }
        }
        true
    }

    /// Bytes from `at` on to the first border of two mappings, `bytes` at most.
    fn before_border(&self, at: usize, bytes: usize) -> usize {
        let mapping = self
            .mapped
            .as_ref()
            .and_then(|m| m.range(..=at).next_back());
        mapping.map_or(bytes, |(from, m)| bytes.min(from + m.bytes - at))
    }
}

/// Memory that is mapped into a reservation. Its contents are in the reservation's bytes meanwhile.
struct Mapping {
    bytes: usize,
    handle: usize,
    access: bool,
    /// Whether it works once access is allowed.
    usable: bool,
}

/// Memory without an address.
struct Physical {
    bytes: usize,
    /// What it holds and what was written, while it is not mapped.
    contents: Option<(Vec<u8>, Vec<u8>)>,
    /// Given back; it goes when it is unmapped.
    released: bool,
    /// The reservation that it goes with, if not by itself.
    kept_by: Option<u64>,
}

/// What was made of a range of device memory, for as long as nobody writes there.
struct Derived {
    bytes: usize,
    prepared: Arc<Prepared>,
}

/// A card's memory.
pub(crate) struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    physicals: BTreeMap<usize, Physical>,
    next: u64,
    pub(crate) used: u64,
    /// Most that was used since somebody asked.
    pub(crate) used_most: u64,
    pub(crate) total: u64,
    /// Bytes that other processes hold.
    pub(crate) others: u64,
    /// Reads of bytes that nobody wrote.
    pub(crate) unwritten: Vec<String>,
    /// By first address; no two overlap.
    derived: BTreeMap<u64, Derived>,
    /// Memory of the host that kernels may read.
    pub(crate) pinned: Pinned,
    /// What does not get over the border of two mappings just now.
    pub(crate) stops: Stops,
}

/// What ends at the border of two mappings.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stops {
    /// What is written behind it is lost.
    pub(crate) writes: bool,
    /// What is read behind it is zeros.
    pub(crate) reads: bool,
}

impl Memory {
    pub(crate) fn new(total: u64) -> Memory {
        Memory {
            allocations: BTreeMap::new(),
            physicals: BTreeMap::new(),
            next: BASE,
            used: 0,
            used_most: 0,
            total,
            others: 0,
            unwritten: Vec::new(),
            derived: BTreeMap::new(),
            pinned: Pinned::default(),
            stops: Stops::default(),
        }
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.total.saturating_sub(self.used + self.others)
    }

    /// What was written behind the first `kept` bytes of each allocation reads as
    /// something else from now on.
    pub(crate) fn forget(&mut self, kept: u64) {
        for allocation in self.allocations.values_mut() {
            match &allocation.mapped {
                None => {
                    let kept = allocation.bytes.len().min(kept as usize);
                    allocation.bytes[kept..].fill(!POISON);
                }
                // The ends of a reservation, not of what is mapped there.
                Some(mapped) => {
                    for (&at, m) in mapped {
                        let from = (kept as usize).clamp(at, at + m.bytes);
                        allocation.bytes[from..at + m.bytes].fill(!POISON);
                    }
                }
            }
        }
        for (bytes, _) in self
            .physicals
            .values_mut()
            .flat_map(|p| p.contents.as_mut())
        {
            bytes.fill(!POISON);
        }
        self.derived.clear();
    }

    /// Allocations, with an address or without.
    pub(crate) fn count(&self) -> u64 {
        self.allocations.len() as u64 - self.reservations() + self.physicals.len() as u64
    }

    /// Ranges of addresses that are reserved.
    pub(crate) fn reservations(&self) -> u64 {
        let reserved = self.allocations.values().filter(|a| a.mapped.is_some());
        reserved.count() as u64
    }

    fn take(&mut self, bytes: u64) -> Option<()> {
        if bytes > self.free_bytes() {
            return None;
        }
        self.used += bytes;
        self.used_most = self.used_most.max(self.used);
        Some(())
    }

    pub(crate) fn alloc(&mut self, bytes: u64) -> Option<u64> {
        self.take(bytes)?;
        let address = self.next;
        self.next += bytes.next_multiple_of(GRAIN) + GRAIN;
        self.allocations.insert(
            address,
            Allocation {
                bytes: vec![POISON; bytes as usize],
                written: vec![0; bytes as usize],
                mapped: None,
                kept: 0,
            },
        );
        Some(address)
    }

    /// Reserves addresses at a multiple of `align`, of which none can be used.
    pub(crate) fn reserve(&mut self, bytes: u64, align: u64) -> Option<u64> {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return None;
        }
        let address = self.next.next_multiple_of(align.max(GRANULARITY));
        self.next = address + bytes + GRAIN;
        // Zeroed memory that nobody touches is none.
        self.allocations.insert(
            address,
            Allocation {
                bytes: vec![0; bytes as usize],
                written: vec![0; bytes as usize],
                mapped: Some(BTreeMap::new()),
                kept: 0,
            },
        );
        Some(address)
    }

    /// Gives a reservation back; nothing may be mapped in it.
    pub(crate) fn unreserve(&mut self, address: u64, bytes: u64) -> Result<(), Fault> {
        let sound = self.allocations.get(&address).is_some_and(|a| {
            a.bytes.len() as u64 == bytes && a.mapped.as_ref().is_some_and(BTreeMap::is_empty)
        });
        if !sound {
            return Err(Fault(format!(
                "{address:#x}..+{bytes} is no reservation without mappings"
            )));
        }
        self.used -= self.allocations.remove(&address).map_or(0, |a| a.kept);
        Ok(())
    }

    /// Takes memory without an address; `None` where there is too little.
    pub(crate) fn create(&mut self, handle: usize, bytes: u64) -> Option<()> {
        self.take(bytes)?;
        let contents = (vec![POISON; bytes as usize], vec![0; bytes as usize]);
        self.physicals.insert(
            handle,
            Physical {
                bytes: bytes as usize,
                contents: Some(contents),
                released: false,
                kept_by: None,
            },
        );
        Some(())
    }

    /// Gives memory without an address back; what is mapped goes when it no longer is.
    pub(crate) fn release(&mut self, handle: usize) -> Result<(), Fault> {
        match self.physicals.get_mut(&handle) {
            Some(physical) if !physical.released => physical.released = true,
            _ => return Err(Fault(format!("release of unknown memory {handle:#x}"))),
        }
        self.end(handle);
        Ok(())
    }

    /// Memory that is neither mapped nor anybody's goes.
    fn end(&mut self, handle: usize) {
        let over = |p: &Physical| p.released && p.contents.is_some();
        if self.physicals.get(&handle).is_some_and(over)
            && let Some(physical) = self.physicals.remove(&handle)
        {
            let keeper = physical
                .kept_by
                .and_then(|at| self.allocations.get_mut(&at));
            match keeper {
                Some(keeper) => keeper.kept += physical.bytes as u64,
                None => self.used -= physical.bytes as u64,
            }
        }
    }

    /// The reservation that holds a range, and the range's offset in it.
    fn reservation(&mut self, address: u64, bytes: usize) -> Option<(&mut Allocation, usize)> {
        let (&base, reserved) = self.allocations.range_mut(..=address).next_back()?;
        let at = (address - base) as usize;
        let fits = at.checked_add(bytes)? <= reserved.bytes.len() && reserved.mapped.is_some();
        fits.then_some((reserved, at))
    }

    /// Maps the whole of some memory at a place of a reservation where nothing is.
    pub(crate) fn map(
        &mut self,
        address: u64,
        bytes: usize,
        handle: usize,
        usable: bool,
    ) -> Result<(), Fault> {
        let fault = |why| {
            Err(Fault(format!(
                "map of {handle:#x} at {address:#x}..+{bytes}: {why}"
            )))
        };
        if !address.is_multiple_of(GRANULARITY) {
            return fault("not at a multiple of the granularity");
        }
        let contents = match self.physicals.get_mut(&handle) {
            Some(physical) if physical.bytes == bytes && !physical.released => {
                physical.contents.take()
            }
            _ => return fault("no such memory of so many bytes"),
        };
        let Some(contents) = contents else {
            return fault("it is mapped already");
        };
        let mut place = self.reservation(address, bytes);
        if let Some((reserved, at)) = &mut place
            && let Some(mapped) = &mut reserved.mapped
            && mapped
                .range(..*at + bytes)
                .next_back()
                .is_none_or(|(from, m)| from + m.bytes <= *at)
        {
            let mapping = Mapping {
                bytes,
                handle,
                access: false,
                usable,
            };
            mapped.insert(*at, mapping);
            reserved.bytes[*at..*at + bytes].copy_from_slice(&contents.0);
            reserved.written[*at..*at + bytes].copy_from_slice(&contents.1);
            return Ok(());
        }
        if let Some(physical) = self.physicals.get_mut(&handle) {
            physical.contents = Some(contents);
        }
        fault("no reserved place without a mapping")
    }

    /// Allows the device to use what is mapped at exactly this range.
    pub(crate) fn allow(&mut self, address: u64, bytes: usize) -> Result<(), Fault> {
        if let Some((reserved, at)) = self.reservation(address, bytes)
            && let Some(mapping) = reserved.mapped.as_mut().and_then(|m| m.get_mut(&at))
            && mapping.bytes == bytes
        {
            mapping.access = true;
            return Ok(());
        }
        Err(Fault(format!(
            "access to {address:#x}..+{bytes}, where no such range is mapped"
        )))
    }

    /// Unmaps what is mapped at exactly this range. Where the reservation `keeps` memory, its bytes
    /// stay counted as used.
    pub(crate) fn unmap(&mut self, address: u64, bytes: usize, keeps: bool) -> Result<(), Fault> {
        let fault = Fault(format!(
            "unmap of {address:#x}..+{bytes}, where no such range is mapped"
        ));
        let Some((reserved, at)) = self.reservation(address, bytes) else {
            return Err(fault);
        };
        let Some(mapped) = &mut reserved.mapped else {
            return Err(fault);
        };
        if mapped.get(&at).is_none_or(|m| m.bytes != bytes) {
            return Err(fault);
        }
        let handle = mapped.remove(&at).map_or(0, |m| m.handle);
        let contents = (
            reserved.bytes[at..at + bytes].to_vec(),
            reserved.written[at..at + bytes].to_vec(),
        );
        if let Some(physical) = self.physicals.get_mut(&handle) {
            physical.contents = Some(contents);
            physical.kept_by = keeps.then_some(address - at as u64);
        }
        self.changed(address, bytes);
        self.end(handle);
        Ok(())
    }

    pub(crate) fn free(&mut self, address: u64) -> bool {
        if self
            .allocations
            .get(&address)
            .is_some_and(|a| a.mapped.is_some())
        {
            return false;
        }
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
        self.physicals.clear();
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
            || !allocation.covers(at, bytes)
        {
            return Err(fault());
        }
        Ok((allocation, at))
    }

    pub(crate) fn check(&mut self, address: u64, bytes: usize) -> Result<(), Fault> {
        self.find(address, bytes).map(|_| ())
    }

    /// Reads, also out of pinned memory; bytes of the device that nobody wrote are
    /// noted and come as poison.
    pub(crate) fn read(&mut self, address: u64, bytes: usize, who: &str) -> Result<Vec<u8>, Fault> {
        if let Some(read) = self.pinned.read(address, bytes) {
            return Ok(read);
        }
        let stops = self.stops.reads;
        let (allocation, at) = self.find(address, bytes)?;
        let mut read = allocation.bytes[at..at + bytes].to_vec();
        if stops {
            read[allocation.before_border(at, bytes)..].fill(0);
        }
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
        let stops = self.stops.writes;
        let (allocation, at) = self.find(address, from.len())?;
        let from = match stops {
            true => &from[..allocation.before_border(at, from.len())],
            false => from,
        };
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

    /// Copies inside the device: what was never written stays so, and is no fault by
    /// itself (a slab has padding).
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

    /// Whether what is page-locked at an address was allocated here, not registered.
    pub(crate) fn is_ours(&self, at: usize) -> bool {
        let range = self.0.range(..=at).next_back();
        range.is_some_and(|(_, range)| range.owned.is_some())
    }

    pub(crate) fn count(&self, owned: bool) -> u64 {
        self.0
            .values()
            .filter(|r| r.owned.is_some() == owned)
            .count() as u64
    }
}
