//! Allocation inside the arena: extents in use, the holes between them, and how to make a larger
//! hole.
//!
//! *Invariants* (`Arena::assert_consistent`): extents do not overlap; the holes are exactly what is
//! left of `0 .. end`, coalesced. After the end was lowered, extents may lie across or beyond it;
//! they are counted in `used`, and nothing new is put there.
//!
//! Weights are put at the high end of a hole and blocks at the low end: blocks cannot move, and so
//! they must not scatter over the arena, where they would cut it into pieces that no large segment
//! fits.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::{BlockId, SegmentId, Slab};

/// Owner of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tenant {
    Segment(SegmentId),
    Block(BlockId),
}

/// The end of the arena at which a request is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The low end, for blocks.
    Low,
    /// The high end, for weights.
    High,
}

/// One move of a slide; moves are executed in their order.
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
    /// Free holes: offset to length.
    holes: BTreeMap<u64, u64>,
    /// Holes as (length, offset), for best fit.
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

    /// Bytes of all extents, including those beyond the end.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Offset at which the highest extent ends.
    pub(crate) fn highest(&self) -> u64 {
        self.extents
            .last_key_value()
            .map_or(0, |(offset, extent)| offset + extent.bytes)
    }

    /// Length of the longest hole.
    pub(crate) fn longest_hole(&self) -> u64 {
        self.holes_by_length.last().map_or(0, |(bytes, _)| *bytes)
    }

    /// All extents in the order of their offsets.
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

    /// Offset at which `bytes` would be placed without moving anything: the lowest hole for blocks,
    /// the tightest for weights. `None` if no hole fits.
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

    /// Marks a range in a hole as used; parts beyond the end are allowed (an eviction that is
    /// undone).
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

    /// Frees a range, merges it with neighbouring holes, and returns its owner.
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
    /// request then fits. O(holes), and the extents of the runs that are examined.
    ///
    /// Every run of neighbouring holes whose sum is enough is a candidate if nothing between them
    /// must stay; its cost is the bytes of the extents between them.
    pub(crate) fn slide(
        &self,
        bytes: u64,
        moved_max: u64,
        movable: impl Fn(SegmentId) -> bool,
    ) -> Option<(Vec<Shift>, u64)> {
        let stays = |extent: &Extent| match extent.tenant {
            Tenant::Segment(segment) => !movable(segment),
            Tenant::Block(_) => true,
        };
        let mut best: Option<(u64, u64, u64)> = None; // (cost, from, to)
        let mut run: VecDeque<(u64, u64)> = VecDeque::new();
        let mut sum = 0;
        // The highest extent known that must stay: no run goes across it.
        let mut fixed = None;
        for (&offset, &length) in &self.holes {
            run.push_back((offset, length));
            sum += length;
            while let Some(&(_, first)) = run.front()
                && sum - first >= bytes
            {
                sum -= first;
                run.pop_front();
            }
            let (from, to) = match run.front() {
                Some(&(from, _)) if sum >= bytes => (from, offset + length),
                _ => continue,
            };
            let cost = to - from - sum;
            let is_cheaper = best.is_none_or(|(least, ..)| cost < least);
            if cost > moved_max || !is_cheaper || fixed.is_some_and(|at| at >= from) {
                continue;
            }
            let mut inside = self.extents.range(from..to).rev();
            match inside.find(|(_, extent)| stays(extent)) {
                Some((&at, _)) => fixed = Some(at),
                None => best = Some((cost, from, to)),
            }
        }
        let (_, from, mut to) = best?;
        let mut shifts = Vec::new();
        for (offset, extent) in self.extents.range(from..to).rev() {
            let Tenant::Segment(segment) = extent.tenant else {
                unreachable!("no run goes across a block")
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

    /// The extents that overlap `window`.
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

    /// Offset at the high end of the tightest hole that fits `bytes` outside `window`.
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

    /// Length of the longest range that would be free if everything but the `fixed` extents was
    /// evicted, up to the end.
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

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::ModelId;

    /// Of this model segments may move.
    const MOVABLE: ModelId = ModelId(0);

    fn random_arena(rng: &mut StdRng) -> Arena {
        let mut arena = Arena::new(400);
        let (mut at, mut index) = (0, 0);
        loop {
            at += rng.random_range(0..4) * rng.random_range(0..4);
            let bytes = rng.random_range(1..20);
            if at + bytes > arena.end() {
                return arena;
            }
            let model = ModelId(u32::from(rng.random_range(0..8) == 0));
            let tenant = match rng.random_range(0..8) {
                0 => Tenant::Block(BlockId(index)),
                _ => Tenant::Segment(SegmentId {
                    model,
                    index: index as u32,
                }),
            };
            arena.occupy(Slab { offset: at, bytes }, tenant);
            (at, index) = (at + bytes, index + 1);
        }
    }

    /// The least bytes that have to move for a hole of `bytes`, by looking at every run of holes.
    fn least_moved(arena: &Arena, bytes: u64) -> Option<u64> {
        let holes: Vec<(u64, u64)> = arena.holes.iter().map(|(&at, &n)| (at, n)).collect();
        let mut least: Option<u64> = None;
        for first in 0..holes.len() {
            for last in first..holes.len() {
                let (from, to) = (holes[first].0, holes[last].0 + holes[last].1);
                let free: u64 = holes[first..=last].iter().map(|(_, n)| n).sum();
                let moves = |extent: &Extent| matches!(extent.tenant, Tenant::Segment(s) if s.model == MOVABLE);
                if free >= bytes && arena.extents.range(from..to).all(|(_, e)| moves(e)) {
                    let cost = to - from - free;
                    least = Some(least.map_or(cost, |least| least.min(cost)));
                }
            }
        }
        least
    }

    #[test]
    fn a_slide_moves_the_fewest_bytes_that_make_a_hole() {
        let mut rng = StdRng::seed_from_u64(11);
        let (mut found, mut none) = (0, 0);
        for _ in 0..4000 {
            let mut arena = random_arena(&mut rng);
            let bytes = rng.random_range(1..60);
            let most = match rng.random() {
                true => u64::MAX,
                false => rng.random_range(0..100),
            };
            let least = least_moved(&arena, bytes).filter(|least| *least <= most);
            let slide = arena.slide(bytes, most, |segment| segment.model == MOVABLE);
            let Some((shifts, offset)) = slide else {
                assert_eq!(least, None);
                none += 1;
                continue;
            };
            found += 1;
            let moved: u64 = shifts.iter().map(|shift| shift.from.bytes).sum();
            assert_eq!(least, Some(moved));
            for shift in shifts {
                assert_eq!(shift.segment.model, MOVABLE);
                let tenant = arena.vacate(shift.from);
                arena.occupy(shift.to, tenant);
            }
            let own = SegmentId {
                model: MOVABLE,
                index: u32::MAX,
            };
            arena.occupy(Slab { offset, bytes }, Tenant::Segment(own));
            arena.assert_consistent();
        }
        assert!(found > 1000 && none > 1000, "{found} found, {none} none");
    }
}
