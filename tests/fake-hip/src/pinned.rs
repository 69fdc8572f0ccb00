//! Memory of the host that kernels may read: page-locked, or registered.

use std::collections::BTreeMap;

use crate::misbehaviour::take_time;

/// How kernels read it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HostReads {
    /// Milliseconds that each MiB takes.
    pub(crate) ms_per_mib: u64,
    /// Every so many bytes is another one; none for 0.
    pub(crate) wrong_every: u64,
}

struct Range {
    host: usize,
    bytes: usize,
}

/// All ranges, by their addresses for kernels.
#[derive(Default)]
pub(crate) struct Pinned {
    ranges: BTreeMap<u64, Range>,
    /// What comes of reading them just now.
    pub(crate) reads: HostReads,
}

impl Pinned {
    /// From now on kernels may read a range of the host's memory, at an address of theirs.
    ///
    /// # Safety
    /// It stays readable until [`Pinned::remove`].
    pub(crate) unsafe fn add(&mut self, address: u64, host: usize, bytes: usize) {
        self.ranges.insert(address, Range { host, bytes });
    }

    /// A range of the host's memory goes.
    pub(crate) fn remove(&mut self, address: u64) {
        self.ranges.remove(&address);
    }

    /// The address for kernels of a byte of the host's memory that they may read.
    pub(crate) fn address_of(&self, at: usize) -> Option<u64> {
        let mut all = self.ranges.iter();
        let (address, range) = all.find(|(_, r)| (r.host..r.host + r.bytes).contains(&at))?;
        Some(address + (at - range.host) as u64)
    }

    /// What the host has at an address of kernels, if they may read it.
    pub(crate) fn read(&self, address: u64, bytes: usize) -> Option<Vec<u8>> {
        let (&first, range) = self.ranges.range(..=address).next_back()?;
        let at = (address - first) as usize;
        if at.checked_add(bytes)? > range.bytes {
            return None;
        }
        let mut read = vec![0u8; bytes];
        let from = (range.host + at) as *const u8;
        // SAFETY: the range is readable, as the caller of `add` promised, and
        // a copy needs no alignment.
        unsafe { std::ptr::copy_nonoverlapping(from, read.as_mut_ptr(), bytes) };
        take_time(self.reads.ms_per_mib, bytes);
        if self.reads.wrong_every > 0 {
            let some = read.iter_mut().step_by(self.reads.wrong_every as usize);
            some.for_each(|byte| *byte ^= 1);
        }
        Some(read)
    }
}
