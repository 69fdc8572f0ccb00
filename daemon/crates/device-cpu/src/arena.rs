//! The host's arena: one anonymous mapping, and disjoint views of it.
//!
//! *Invariant:* views that are alive at the same time do not overlap where one of them is mutable.
//! The type cannot know that; the ledger does (`Cache::assert_consistent`,
//! `OpBuffers::assert_apart`): every slab, page and buffer was handed out to one use.
//! All unsafe code of the host device that makes references is here.

#![expect(unsafe_code, reason = "views of one mapping")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};
use rocmforge_device::Error;

/// Sizes and offsets of huge pages; discards below one are not worth a call.
const HUGE_PAGE: u64 = 2 << 20;

/// The mapping and how much of it may be used.
#[derive(Debug)]
pub(super) struct Arena {
    map: MmapRaw,
    base: NonNull<u8>,
    capacity: AtomicU64,
}

// SAFETY: the mapping lives as long as the arena and is plain memory; access to it from several
// threads is to disjoint ranges (the module's invariant).
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves addresses for `bytes`, in whole huge pages; memory is taken from the
    /// system when it is touched.
    pub(super) fn reserve(bytes: u64) -> Result<Self, Error> {
        let bytes = bytes - bytes % HUGE_PAGE;
        let refused = |message: String| Error::Memory {
            kind: "host",
            bytes,
            message,
        };
        let len = usize::try_from(bytes).map_err(|e| refused(e.to_string()))?;
        let map = MmapOptions::new()
            .len(len)
            .no_reserve_swap()
            .map_anon()
            .map_err(|e| refused(e.to_string()))?;
        // Fewer TLB misses: a pass reads hundreds of megabytes in order. Where the system
        // refuses, only speed is lost.
        if let Err(error) = map.advise(Advice::HugePage) {
            tracing::debug!(%error, "no huge pages for the arena");
        }
        let map = MmapRaw::from(map);
        let base = NonNull::new(map.as_mut_ptr())
            .ok_or_else(|| refused("mapped at address 0".to_owned()))?;
        Ok(Self {
            map,
            base,
            capacity: AtomicU64::new(0),
        })
    }

    /// Bytes of addresses: the most that the capacity can be.
    pub(super) fn reserved(&self) -> u64 {
        self.map.len() as u64
    }

    /// Makes the first `bytes` usable and gives memory beyond them back.
    pub(super) fn set_capacity(&self, bytes: u64) -> Result<(), Error> {
        if bytes > self.reserved() {
            return Err(Error::Memory {
                kind: "host",
                bytes,
                message: format!("the machine has {} bytes", self.reserved()),
            });
        }
        let before = self.capacity.swap(bytes, Ordering::Relaxed);
        if before > bytes {
            self.discard_pages(bytes, before);
        }
        Ok(())
    }

    fn check(&self, offset: u64, bytes: u64) {
        let capacity = self.capacity.load(Ordering::Relaxed);
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= capacity),
            "bytes {offset}..{offset}+{bytes} are outside of the arena's {capacity}"
        );
    }

    /// A view of bytes.
    pub(super) fn bytes(&self, offset: u64, len: usize) -> &[u8] {
        self.check(offset, len as u64);
        // SAFETY: inside the mapping, as checked; every byte of it is initialized (zero or
        // written); nobody writes it meanwhile (the module's invariant).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset as usize), len) }
    }

    /// A mutable view of bytes.
    #[expect(
        clippy::mut_from_ref,
        reason = "disjointness comes from the ledger, see the module's invariant"
    )]
    pub(super) fn bytes_mut(&self, offset: u64, len: usize) -> &mut [u8] {
        self.check(offset, len as u64);
        // SAFETY: as in `bytes`, and nobody else has a view of it (the module's invariant).
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(offset as usize), len) }
    }

    /// A view of `len` f32.
    pub(super) fn floats(&self, offset: u64, len: usize) -> &[f32] {
        assert!(offset.is_multiple_of(4), "f32 at offset {offset}");
        let bytes = self.bytes(offset, len * 4);
        // SAFETY: the mapping is page-aligned and the offset a multiple of 4;
        // every bit pattern is an f32.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), len) }
    }

    /// A mutable view of `len` f32.
    #[expect(
        clippy::mut_from_ref,
        reason = "disjointness comes from the ledger, see the module's invariant"
    )]
    pub(super) fn floats_mut(&self, offset: u64, len: usize) -> &mut [f32] {
        assert!(offset.is_multiple_of(4), "f32 at offset {offset}");
        let bytes = self.bytes_mut(offset, len * 4);
        // SAFETY: as in `floats`; the one view that there was is turned into this one.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), len) }
    }

    /// Copies a range, which may overlap its destination.
    pub(super) fn copy_within(&self, from: u64, to: u64, bytes: u64) {
        self.check(from, bytes);
        self.check(to, bytes);
        let base = self.base.as_ptr();
        // SAFETY: both ranges are inside the mapping, as checked, and nobody has a view of either
        // (the module's invariant: the segment is idle and its new place free).
        unsafe {
            std::ptr::copy(
                base.add(from as usize),
                base.add(to as usize),
                bytes as usize,
            )
        }
    }

    /// Gives the whole huge pages of a range back to the system; they read as zero afterwards.
    pub(super) fn discard(&self, offset: u64, bytes: u64) {
        self.check(offset, bytes);
        self.discard_pages(offset, offset + bytes);
    }

    fn discard_pages(&self, start: u64, end: u64) {
        let start = start.next_multiple_of(HUGE_PAGE);
        let end = end - end % HUGE_PAGE;
        if start >= end {
            return;
        }
        // SAFETY: whole pages inside the mapping in which nothing lives: the caller's range
        // holds nothing, and the mapping is private and anonymous, so its pages turn to zero
        // and nothing else happens.
        let advised = unsafe {
            self.map.unchecked_advise_range(
                UncheckedAdvice::DontNeed,
                start as usize,
                (end - start) as usize,
            )
        };
        if let Err(error) = advised {
            tracing::warn!(%error, "memory could not be given back to the system");
        }
    }
}

/// The processor's name, as the system reports it.
pub(super) fn processor_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |(_, name)| name.trim().to_owned(),
    )
}
