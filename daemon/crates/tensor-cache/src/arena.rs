//! Places inside the arena: extents in use, the holes between them, and how to make a larger hole.
//!
//! *Invariants* (`Arena::assert_consistent`): extents do not overlap; the holes are exactly what is
//! left of `0 .. end`, coalesced. After the end was lowered, extents may lie across or beyond it;
//! they are counted in `used`, and nothing new is put there.
//!
//! Weights are put at the high end of a hole and blocks at the low end: blocks cannot
//! move, and so they must not scatter over the arena, where they would cut it into pieces
//! that no large segment fits.

use std::collections::{BTreeMap, BTreeSet};

use crate::{BlockId, SegmentId, Slab};

/// Who lies in an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tenant {
    Segment(SegmentId),
    Block(BlockId),
}

/// Which end of the arena a request prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Blocks.
    Low,
    /// Weights.
    High,
}

/// One move of a slide, in the order of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shift {
    pub(crate) segment: SegmentId,
    pub(crate) from: Slab,
    pub(crate) to: Slab,
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    bytes: u64,
    tenant: Tenant,
}

#[derive(Debug)]
pub(crate) struct Arena {
    end: u64,
    used: u64,
    extents: BTreeMap<u64, Extent>,
    /// Offset to length.
    holes: BTreeMap<u64, u64>,
    /// The same holes as (length, offset), for best fit.
    holes_by_length: BTreeSet<(u64, u64)>,
}

impl Arena {
    pub(crate) fn new(end: u64) -> Arena {
        let mut arena = Arena {
            end: 0,
            used: 0,
            extents: BTreeMap::new(),
            holes: BTreeMap::new(),
            holes_by_length: BTreeSet::new(),
        };
        arena.set_end(end);
        arena
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Bytes of all extents, those beyond the end included.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// End of the highest extent.
    pub(crate) fn highest(&self) -> u64 {
        self.extents
            .last_key_value()
            .map_or(0, |(offset, extent)| offset + extent.bytes)
    }

    /// The longest hole.
    pub(crate) fn longest_hole(&self) -> u64 {
        self.holes_by_length.last().map_or(0, |(bytes, _)| *bytes)
    }

    /// Every extent, in the order of the offsets.
    pub(crate) fn extents(&self) -> impl DoubleEndedIterator<Item = (Slab, Tenant)> + '_ {
        self.extents.iter().map(|(&offset, extent)| {
            (
                Slab {
                    offset,
                    bytes: extent.bytes,
                },
                extent.tenant,
            )
        })
    }

    /// Moves the end; holes beyond it are given up, extents stay. O(extents).
    pub(crate) fn set_end(&mut self, end: u64) {
        self.end = end;
        self.holes.clear();
        self.holes_by_length.clear();
        let mut at = 0;
        let mut holes = Vec::new();
        for (offset, extent) in &self.extents {
            if *offset >= end {
                break;
            }
            holes.push((at, *offset));
            at = offset + extent.bytes;
        }
        holes.push((at, end));
        for (from, to) in holes {
            self.add_hole(from, to);
        }
    }

    /// Where `bytes` would go without moving anything: the lowest hole for blocks,
    /// the tightest for weights.
    pub(crate) fn hole(&self, bytes: u64, side: Side) -> Option<u64> {
        if bytes > self.longest_hole() {
            return None;
        }
        match side {
            Side::Low => self
                .holes
                .iter()
                .find(|(_, length)| **length >= bytes)
                .map(|(offset, _)| *offset),
            Side::High => self
                .holes_by_length
                .range((bytes, 0)..)
                .next()
                .map(|(length, offset)| offset + length - bytes),
        }
    }

    /// Takes a range that lies in a hole, but for what of it is beyond the end
    /// (an eviction taken back).
    pub(crate) fn occupy(&mut self, slab: Slab, tenant: Tenant) {
        if slab.offset < self.end {
            let (&offset, &bytes) = self
                .holes
                .range(..=slab.offset)
                .next_back()
                .expect("a slab is put into a hole");
            let hole_end = offset + bytes;
            assert!(
                slab.end().min(self.end) <= hole_end,
                "a slab overlaps an extent"
            );
            self.remove_hole(offset, bytes);
            self.add_hole(offset, slab.offset);
            self.add_hole(slab.end().min(hole_end), hole_end);
        }
        self.used += slab.bytes;
        let before = self.extents.insert(
            slab.offset,
            Extent {
                bytes: slab.bytes,
                tenant,
            },
        );
        assert!(before.is_none(), "two extents at one offset");
    }

    /// Gives a range back and coalesces it with its neighbours.
    pub(crate) fn vacate(&mut self, slab: Slab) -> Tenant {
        let extent = self
            .extents
            .remove(&slab.offset)
            .expect("only an extent is given back");
        assert_eq!(extent.bytes, slab.bytes, "an extent is given back whole");
        self.used -= slab.bytes;
        let (mut from, mut to) = (slab.offset, slab.end().min(self.end));
        if from < to {
            if let Some((&offset, &bytes)) = self.holes.range(..from).next_back()
                && offset + bytes == from
            {
                self.remove_hole(offset, bytes);
                from = offset;
            }
            if let Some(&bytes) = self.holes.get(&to) {
                self.remove_hole(to, bytes);
                to += bytes;
            }
            self.add_hole(from, to);
        }
        extent.tenant
    }

    fn add_hole(&mut self, from: u64, to: u64) {
        if from < to {
            self.holes.insert(from, to - from);
            self.holes_by_length.insert((to - from, from));
        }
    }

    fn remove_hole(&mut self, offset: u64, bytes: u64) {
        self.holes.remove(&offset);
        self.holes_by_length.remove(&(bytes, offset));
    }

    /// The cheapest way to make a hole of `bytes` by sliding movable extents together: the shifts,
    /// in an order in which none overwrites what is still to be moved, and the offset at which the
    /// request then fits. O(extents).
    ///
    /// Extents that may not move cut the arena into zones. In a zone every run of neighbouring
    /// holes whose sum is enough is a candidate; its cost is the bytes of the extents between them.
    pub(crate) fn slide(
        &self,
        bytes: u64,
        moved_max: u64,
        movable: impl Fn(SegmentId) -> bool,
    ) -> Option<(Vec<Shift>, u64)> {
        struct Hole {
            from: u64,
            to: u64,
            /// Movable bytes of the zone below this hole.
            below: u64,
        }
        let mut best: Option<(u64, u64, u64)> = None; // (cost, from, to)
        let mut zone: Vec<Hole> = Vec::new();
        let (mut first, mut sum, mut below, mut at) = (0, 0, 0, 0);
        let last = (
            self.end,
            Extent {
                bytes: 0,
                tenant: Tenant::Block(BlockId(u64::MAX)),
            },
        );
        let inside = self
            .extents
            .range(..self.end)
            .map(|(offset, extent)| (*offset, *extent));
        for (offset, extent) in inside.chain([last]) {
            if offset > at {
                zone.push(Hole {
                    from: at,
                    to: offset,
                    below,
                });
                sum += offset - at;
                while let Some(hole) = zone.get(first)
                    && sum - (hole.to - hole.from) >= bytes
                {
                    sum -= hole.to - hole.from;
                    first += 1;
                }
                if sum >= bytes {
                    let cost = below - zone[first].below;
                    if cost <= moved_max && best.is_none_or(|(least, ..)| cost < least) {
                        best = Some((cost, zone[first].from, offset));
                    }
                }
            }
            at = offset + extent.bytes;
            match extent.tenant {
                Tenant::Segment(segment) if at <= self.end && movable(segment) => {
                    below += extent.bytes
                }
                _ => {
                    zone.clear();
                    (first, sum, below) = (0, 0, 0);
                }
            }
        }
        let (_, from, mut to) = best?;
        let mut shifts = Vec::new();
        for (offset, extent) in self.extents.range(from..to).rev() {
            let Tenant::Segment(segment) = extent.tenant else {
                unreachable!("blocks end a zone")
            };
            let slab = Slab {
                offset: *offset,
                bytes: extent.bytes,
            };
            to -= slab.bytes;
            if to != slab.offset {
                shifts.push(Shift {
                    segment,
                    from: slab,
                    to: Slab {
                        offset: to,
                        bytes: slab.bytes,
                    },
                });
            }
        }
        Some((shifts, to - bytes))
    }

    /// The lowest range of `bytes` that holds no `fixed` extent.
    pub(crate) fn lowest_without(
        &self,
        bytes: u64,
        fixed: impl Fn(Tenant) -> bool,
    ) -> Option<Slab> {
        let mut at = 0;
        for (slab, tenant) in self.extents() {
            if slab.offset >= at + bytes {
                break;
            }
            if fixed(tenant) {
                at = slab.end();
            }
        }
        (at + bytes <= self.end).then_some(Slab { offset: at, bytes })
    }

    /// The extents that share a byte with `window`.
    pub(crate) fn overlapping(&self, window: Slab) -> impl Iterator<Item = (Slab, Tenant)> + '_ {
        let first = self
            .extents
            .range(..=window.offset)
            .next_back()
            .map_or(0, |(offset, _)| *offset);
        let found = self.extents.range(first..window.end());
        found
            .map(|(&offset, extent)| {
                (
                    Slab {
                        offset,
                        bytes: extent.bytes,
                    },
                    extent.tenant,
                )
            })
            .filter(move |(slab, _)| slab.end() > window.offset)
    }

    /// The high end of the tightest hole that has room for `bytes` outside `window`.
    pub(crate) fn hole_outside(&self, bytes: u64, window: Slab) -> Option<u64> {
        self.holes_by_length
            .range((bytes, 0)..)
            .find_map(|&(length, offset)| {
                let end = offset + length;
                let above = (end >= bytes + offset.max(window.end())).then(|| end - bytes);
                let below = end
                    .min(window.offset)
                    .checked_sub(bytes)
                    .filter(|at| *at >= offset);
                above.or(below)
            })
    }

    /// The longest range that would be free if everything but the `fixed`
    /// extents went, as far as the end.
    pub(crate) fn longest_without(&self, fixed: impl Fn(Tenant) -> bool) -> u64 {
        let (mut at, mut longest) = (0, 0);
        for (slab, tenant) in self.extents() {
            if slab.offset >= self.end {
                break;
            }
            if fixed(tenant) {
                longest = longest.max(slab.offset - at);
                at = slab.end();
            }
        }
        longest.max(self.end.saturating_sub(at))
    }

    /// Checks every invariant of this module. O(extents).
    pub(crate) fn assert_consistent(&self) {
        let (mut at, mut used) = (0, 0);
        let mut holes = Vec::new();
        for (slab, _) in self.extents() {
            assert!(slab.offset >= at, "extents overlap at {}", slab.offset);
            if at < slab.offset.min(self.end) {
                holes.push((at, slab.offset.min(self.end) - at));
            }
            at = slab.end();
            used += slab.bytes;
        }
        if at < self.end {
            holes.push((at, self.end - at));
        }
        assert_eq!(used, self.used);
        assert!(
            holes
                .iter()
                .copied()
                .eq(self.holes.iter().map(|(offset, bytes)| (*offset, *bytes)))
        );
        let mut by_length: Vec<_> = holes
            .iter()
            .map(|(offset, bytes)| (*bytes, *offset))
            .collect();
        by_length.sort_unstable();
        assert!(by_length.iter().eq(self.holes_by_length.iter()));
    }
}
