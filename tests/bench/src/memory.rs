//! The machine's read bandwidth: the ceiling of decode on the host.

use std::time::Instant;

use anyhow::{Context, Result};
use memmap2::{Advice, MmapMut};

/// Bytes that a round reads: beyond any cache of a desktop or server core.
const BYTES: usize = 1 << 30;

/// Rounds, of which the best counts: a ceiling is what was reached once.
const ROUNDS: usize = 7;

/// Bytes a second that `threads` threads read from memory, each its own part, in order.
///
/// # Errors
/// The system refuses the memory.
pub(crate) fn read_bytes_per_s(threads: usize) -> Result<f64> {
    let mut map = MmapMut::map_anon(BYTES).context("no memory to measure its bandwidth")?;
    // Where huge pages are refused the figure is a little lower, as it is for the weights.
    let _ = map.advise(Advice::HugePage);
    map.fill(1);
    let part = BYTES / threads;
    let mut best: f64 = 0.0;
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let sum: u64 = std::thread::scope(|scope| {
            let running: Vec<_> = map
                .chunks_exact(part)
                .map(|part| scope.spawn(|| sum(part)))
                .collect();
            let sums = running.into_iter().map(|t| t.join().unwrap_or_default());
            sums.fold(0, u64::wrapping_add)
        });
        let elapsed = begin.elapsed().as_secs_f64();
        std::hint::black_box(sum);
        best = best.max((part * threads) as f64 / elapsed);
    }
    Ok(best)
}

/// The sum of the words, in eight chains so that only memory is waited for.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 16];
    for words in bytes.chunks_exact(128) {
        for (sum, word) in sums.iter_mut().zip(words.chunks_exact(8)) {
            *sum = sum.wrapping_add(u64::from_le_bytes(word.try_into().expect("eight bytes")));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_word_is_read() {
        let bytes: Vec<u8> = (0..4096u32)
            .flat_map(|i| u64::from(i).to_le_bytes())
            .collect();
        assert_eq!(super::sum(&bytes), 4095 * 4096 / 2);
    }
}
