//! The order in which a model that does not fit evicts its own segments.
//!
//! Every segment that a pass has used is needed once in the next pass, so the number of misses does
//! not depend on the choice. What differs is whether an upload fits the hole of the evicted
//! segment, and whether the link is idle. So all evicted segments have one size (an upload into a
//! slab of its size needs no move), and lie far apart (while the segments between are computed, the
//! next one is uploaded, and the link never rests for long).
//!
//! *Invariant:* the choice depends only on the sizes, the blocks, the pins of others and the
//! budget, so that pass after pass the same segments come and go (test
//! `a_model_that_does_not_fit_gives_up_segments_of_one_size_that_lie_apart`).

use std::collections::BTreeMap;

/// Sizes of a model's ordered segments, and the order in which those of one size are evicted.
#[derive(Debug)]
pub(crate) struct StreamOrder {
    /// For each segment size, the sum of the bytes of all segments of that size.
    totals: BTreeMap<u64, u64>,
    /// For each segment its rank among those of its size; rank 0 is evicted first.
    ranks: Vec<u32>,
}

impl StreamOrder {
    /// The order for segments of these sizes in bytes, in the order of a pass.
    pub(crate) fn new(bytes: &[u64]) -> StreamOrder {
        let mut like: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (index, &size) in bytes.iter().enumerate() {
            like.entry(size).or_default().push(index);
        }
        let mut ranks = vec![0; bytes.len()];
        for indices in like.values() {
            for (rank, at) in (0..).zip(bit_reversed(indices.len())) {
                ranks[indices[at]] = rank;
            }
        }
        let total = |(size, indices): (u64, Vec<usize>)| (size, size * indices.len() as u64);
        StreamOrder {
            totals: like.into_iter().map(total).collect(),
            ranks,
        }
    }

    /// The smallest size with enough segments for `absent` bytes to be missing while one more is in
    /// flight and one in use. `None` if nothing has to be missing, or no single size suffices.
    pub(crate) fn pick_size(&self, absent: u64) -> Option<u64> {
        let enough = |(size, total): &(&u64, &u64)| **total >= absent + 2 * **size;
        let found = self.totals.iter().find(enough);
        found.map(|(size, _)| *size).filter(|_| absent > 0)
    }

    /// Rank of a segment among those of its size.
    pub(crate) fn rank(&self, index: u32) -> u32 {
        self.ranks[index as usize]
    }
}

/// The numbers `0..n` in bit-reversed order, of which every prefix is spread evenly.
fn bit_reversed(n: usize) -> impl Iterator<Item = usize> {
    let bits = n.next_power_of_two().trailing_zeros();
    let reversed = move |i: usize| i.reverse_bits().unbounded_shr(usize::BITS - bits);
    (0..1 << bits).map(reversed).filter(move |&i| i < n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_beginning_is_spread() {
        for n in 1..200 {
            let order: Vec<usize> = bit_reversed(n).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..n), "each once");
            for part in 1..=n {
                let mut taken = order[..part].to_vec();
                taken.sort_unstable();
                let widest = taken.windows(2).map(|w| w[1] - w[0]).max();
                let mean = n.next_power_of_two() / part;
                assert!(
                    widest.is_none_or(|w| w <= 2 * mean),
                    "{part} of {n}: {taken:?}"
                );
            }
        }
    }

    #[test]
    fn the_smallest_size_that_is_enough_goes() {
        let sizes = StreamOrder::new(&[24, 66, 33, 24, 66, 48, 24, 66, 33, 431]);
        assert_eq!(sizes.pick_size(0), None);
        assert_eq!(sizes.pick_size(20), Some(24), "two come and go beside it");
        assert_eq!(sizes.pick_size(25), Some(66));
        assert_eq!(sizes.pick_size(67), None, "three of 66 are not enough");
        assert_eq!([0, 3, 6].map(|i| sizes.rank(i)), [0, 2, 1]);
        assert_eq!(sizes.rank(9), 0);
    }
}
