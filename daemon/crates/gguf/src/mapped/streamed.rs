//! Copies into memory that this processor does not read again: a copy engine does.
//!
//! A usual store reads its cache line first, and what it wrote drives other lines out of the cache.
//! Streaming stores write whole lines past the cache. Processors read ahead inside of a page only,
//! so blocks of four pages are copied a line of each in turn.
//!
//! *Invariant:* whoever is told of the copy after it has returned, a copy engine too, sees all of
//! it: streaming stores are not ordered with others, so the last step is a fence.

/// Less stays in the cache until it is read.
const STREAMED_MIN_BYTES: usize = 64 << 10;

/// Copies `from` to `to`.
///
/// # Panics
/// If their lengths differ.
pub(super) fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "a copy has one length");
    match from.len() {
        0..STREAMED_MIN_BYTES => to.copy_from_slice(from),
        _ => stream(from, to),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn stream(from: &[u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
use x86_64::stream;

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    /// Bytes of a cache line, and of a page.
    const LINE: usize = 64;
    const PAGE: usize = 4096;
    /// Pages that are copied side by side: with two a copy took a little longer, with eight not
    /// less.
    const PAGES: usize = 4;

    /// Copies slices of one length. Instructions of SSE2, which every x86-64 has: wider ones took
    /// as long.
    pub(super) fn stream(from: &[u8], to: &mut [u8]) {
        let head = to.as_ptr().align_offset(LINE).min(to.len());
        let (first, from) = from.split_at(head);
        let (begin, to) = to.split_at_mut(head);
        begin.copy_from_slice(first);
        let (from_blocks, from) = from.as_chunks::<{ PAGES * PAGE }>();
        let (to_blocks, to) = to.as_chunks_mut::<{ PAGES * PAGE }>();
        for (from, to) in from_blocks.iter().zip(to_blocks) {
            let (from, to) = (from.as_chunks::<LINE>().0, to.as_chunks_mut::<LINE>().0);
            for at in 0..PAGE / LINE {
                for page in 0..PAGES {
                    let place = page * (PAGE / LINE) + at;
                    line(&from[place], &mut to[place]);
                }
            }
        }
        let (from_lines, from) = from.as_chunks::<LINE>();
        let (to_lines, to) = to.as_chunks_mut::<LINE>();
        for (from, to) in from_lines.iter().zip(to_lines) {
            line(from, to);
        }
        to.copy_from_slice(from);
        // SAFETY: an instruction of SSE, which every x86-64 has.
        unsafe { _mm_sfence() };
    }

    /// Copies a line to one that begins at a multiple of its size.
    #[inline(always)]
    fn line(from: &[u8; LINE], to: &mut [u8; LINE]) {
        debug_assert!(to.as_ptr().align_offset(LINE) == 0, "lines are whole");
        let (from, to) = (
            from.as_ptr().cast::<__m128i>(),
            to.as_mut_ptr().cast::<__m128i>(),
        );
        // SAFETY: four vectors are a line; a load may be of any address.
        let values = unsafe {
            [
                _mm_loadu_si128(from),
                _mm_loadu_si128(from.add(1)),
                _mm_loadu_si128(from.add(2)),
                _mm_loadu_si128(from.add(3)),
            ]
        };
        for (i, value) in values.into_iter().enumerate() {
            // SAFETY: inside of the line, at a multiple of 16 bytes; the fence at the end of
            // `stream` orders it with what comes behind.
            unsafe { _mm_stream_si128(to.add(i), value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{STREAMED_MIN_BYTES, copy};

    /// Bytes that look random.
    fn noise(seed: u64, len: usize) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn any_length_and_place_is_copied_and_nothing_beside_it() {
        let mins = [0, STREAMED_MIN_BYTES, STREAMED_MIN_BYTES + (16 << 10)];
        let lengths = mins.into_iter().flat_map(|min| {
            let odd = [0, 1, 15, 63, 64, 65, 127, 4095, 4096, 4097, 16_383, 16_449];
            odd.into_iter().map(move |more| min + more)
        });
        let lengths = lengths.chain([STREAMED_MIN_BYTES - 1]);
        let source = noise(7, 200 << 10);
        for (i, len) in lengths.enumerate() {
            for (skip_from, skip_to) in [(0, 0), (1, 0), (0, 1), (32, 16), (13, 63), (63, 64)] {
                let mut target = noise(i as u64, len + 200);
                let mut expected = target.clone();
                let from = &source[skip_from..][..len];
                copy(from, &mut target[skip_to..][..len]);
                expected[skip_to..][..len].copy_from_slice(from);
                assert!(target == expected, "{len} bytes, {skip_from} to {skip_to}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "one length")]
    fn lengths_that_differ_are_refused() {
        copy(&[1; 3], &mut [0; 4]);
    }
}
