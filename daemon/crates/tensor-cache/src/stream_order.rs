//! In which order a model that does not fit gives up segments to itself.
//!
//! All that a pass has behind it is needed once in the next pass, so the misses are as many
//! whichever goes. What differs is whether an upload fits the hole that another one left, and what
//! the link does meanwhile. So all of what goes is of one size (an upload into the room of its like
//! needs no move), and lies far apart (while the segments between are computed, the next one is
//! uploaded, and the link never rests for long).
//!
//! *Invariant:* what is chosen depends on the sizes, the blocks, the pins of others and the budget
//! alone, so that pass after pass the same segments come and go (test
//! `a_model_that_does_not_fit_gives_up_segments_of_one_size_that_lie_apart`).

use std::collections::BTreeMap;

/// The sizes of a model's ordered segments, and in which order those of a size go.
#[derive(Debug)]
pub(crate) struct StreamOrder {
    /// Bytes of all segments of a size, by that size.
    totals: BTreeMap<u64, u64>,
    /// For each segment its place among those of its size; the first to go has 0.
    ranks: Vec<u32>,
}

impl StreamOrder {
    /// `bytes` of each segment.
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

    /// The smallest size of which there is enough for `absent` bytes to be missing, and one on its
    /// way while another is in use. `None` if nothing need be missing, or no one size is enough.
    pub(crate) fn pick_size(&self, absent: u64) -> Option<u64> {
        let enough = |(size, total): &(&u64, &u64)| **total >= absent + 2 * **size;
        let found = self.totals.iter().find(enough);
        found.map(|(size, _)| *size).filter(|_| absent > 0)
    }

    /// Place of a segment among those of its size.
    pub(crate) fn rank(&self, index: u32) -> u32 {
        self.ranks[index as usize]
    }
}

/// `0..n` in an order of which every beginning is spread evenly: that of the reversed bits.
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
