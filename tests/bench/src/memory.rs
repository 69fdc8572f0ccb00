//! The machine's read bandwidth: the ceiling of decode on the host.

use std::time::Instant;

use anyhow::{Context, Result};
use memmap2::{Advice, MmapMut};

/// Bytes that a round reads: beyond any cache of a desktop or server core.
const BYTES: usize = 1 << 30;

/// Rounds of a measurement.
const ROUNDS: usize = 3;

/// Memory to read, and the best rate so far: a ceiling is what was reached once.
pub(crate) struct Bandwidth {
    map: MmapMut,
    threads: usize,
    best: f64,
}

impl Bandwidth {
    /// # Errors
    /// The system refuses the memory.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let mut map =
            MmapMut::map_anon(BYTES).context("no memory to measure its bandwidth with")?;
        // Where huge pages are refused the figure is a little lower, as it is for the weights.
        let _ = map.advise(Advice::HugePage);
        map.fill(1);
        Ok(Self {
            map,
            threads,
            best: 0.0,
        })
    }

    /// Reads the memory a few times with all threads, each its own part, in order. Called between
    /// other measurements, so that the ceiling is that of the same minutes.
    pub(crate) fn measure(&mut self) {
        let part = BYTES / self.threads;
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            let sum: u64 = std::thread::scope(|scope| {
                let parts = self.map.chunks_exact(part);
                let running: Vec<_> = parts.map(|part| scope.spawn(|| sum(part))).collect();
                let sums = running.into_iter().map(|t| t.join().unwrap_or_default());
                sums.fold(0, u64::wrapping_add)
            });
            let elapsed = begin.elapsed().as_secs_f64();
            std::hint::black_box(sum);
            self.best = self.best.max((part * self.threads) as f64 / elapsed);
        }
    }

    /// Bytes a second at best.
    pub(crate) fn bytes_per_s(&self) -> f64 {
        self.best
    }
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
