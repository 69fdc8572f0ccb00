//! Mean time of passes, and the upload rate of the link.

use std::time::Duration;

use rocmforge_device::Throughput;

/// Bytes assumed to be uploaded in the time of a usual pass, before it is measured.
const PASS_UPLOAD_BYTES: u64 = 64 << 20;

/// Assumed upload rate of the link, in bytes per millisecond, before it is measured.
const LINK_BYTES_PER_MS: u64 = 4 << 20;

/// Number of passes after which the pace is measured again.
const PACE_PASSES: u32 = 64;

/// Mean time of passes, and the upload rate of the link.
#[derive(Debug)]
pub(crate) struct PassPace {
    /// Moving average of the seconds of a pass; 0 before the first.
    seconds: f64,
    passes: u32,
    /// Bytes that the link uploads in the time of a usual pass.
    pub(crate) upload_bytes: u64,
    /// Upload rate of the link, in bytes per millisecond.
    pub(crate) link_bytes_per_ms: u64,
    /// Whether the upload rate was measured.
    is_measured: bool,
}

impl Default for PassPace {
    fn default() -> Self {
        Self {
            seconds: 0.0,
            passes: 0,
            upload_bytes: PASS_UPLOAD_BYTES,
            link_bytes_per_ms: LINK_BYTES_PER_MS,
            is_measured: false,
        }
    }
}

impl PassPace {
    /// Records the time of a pass. `measured` queries the device's rates, which is done only now
    /// and then.
    pub(crate) fn note(&mut self, took: Duration, measured: impl FnOnce() -> Option<Throughput>) {
        let took = took.as_secs_f64();
        self.seconds = match self.passes {
            0 => took,
            _ => self.seconds + (took - self.seconds) / 8.0,
        };
        self.passes = self.passes.wrapping_add(1);
        if self.passes % PACE_PASSES == 1
            && let Some(rates) = measured()
        {
            self.upload_bytes = ((self.seconds * rates.upload_bytes_per_s) as u64).max(1);
            self.link_bytes_per_ms = ((rates.upload_bytes_per_s / 1e3) as u64).max(1);
            self.is_measured = true;
        }
    }

    /// Upload rate of the link, in bytes per second; `None` before it was measured.
    pub(crate) fn link_bytes_per_s(&self) -> Option<u64> {
        self.is_measured.then_some(self.link_bytes_per_ms * 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_brings_as_much_as_it_did_in_the_time_of_a_usual_pass() {
        let mut pace = PassPace::default();
        assert_eq!(pace.upload_bytes, PASS_UPLOAD_BYTES);
        let rates = |upload_bytes_per_s| {
            Some(Throughput {
                computed_bytes_per_s: 1e12,
                upload_bytes_per_s,
                ahead_bytes: 0,
            })
        };
        pace.note(Duration::from_millis(4), || rates(50e9));
        assert_eq!(pace.upload_bytes, 200_000_000);
        assert_eq!(pace.link_bytes_per_ms, 50_000_000);
        // The rates are asked for again only after a while.
        for _ in 1..PACE_PASSES {
            pace.note(Duration::from_millis(4), || panic!("not yet"));
        }
        pace.note(Duration::from_millis(4), || rates(25e9));
        assert_eq!(pace.upload_bytes, 100_000_000);
    }
}
