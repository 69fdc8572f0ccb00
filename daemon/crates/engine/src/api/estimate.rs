//! Estimates the decode rate that a request would have had with more of its model resident, from
//! the request's own measured times.
//!
//! ```text
//! a pass now      |--- device ---|------ waits for uploads, disk, CPU compute ------|
//! some bytes more |--- device ---|-- less by these bytes at the link's rate --|
//! all resident    |--- device ---|   and no less than a pass whose weights are all there
//! ```
//!
//! Each pass of a model that does not fit misses the same number of bytes, as long as eviction is
//! pass-aware and no other model evicts: each byte of additional memory, or of smaller weights, is
//! a byte less that a pass misses. Where that does not hold there is no estimate.

use crate::api::EvictionCause;
use crate::api::times::{DecodeTimes, Part, RequestTimes};

/// Minimum number of tokens after the first for which a mean decode rate is reported.
const TOKENS_MIN: u32 = 8;

/// Additional memory for weights that an estimate assumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoreRoom {
    /// Bytes of weights that would be resident in addition.
    Bytes(u64),
    /// Enough memory for all weights.
    All,
}

impl DecodeTimes {
    /// Mean seconds of a pass, without the time that a slow reader held it up.
    fn pass_s(&self) -> Option<f64> {
        let took = self.parts.total() - self.parts.of(Part::Reader);
        let is_known = self.tokens >= TOKENS_MIN && self.passes > 0;
        is_known.then(|| took.as_secs_f64() / f64::from(self.passes))
    }

    /// Mean seconds of a part of the time in a pass.
    fn part_s(&self, part: Part) -> f64 {
        self.parts.of(part).as_secs_f64() / f64::from(self.passes.max(1))
    }
}

impl RequestTimes {
    /// Decode rate in tokens a second after the first token, as they were taken by the reader;
    /// `None` for fewer than 8 tokens.
    #[must_use]
    pub fn tokens_per_s(&self) -> Option<f64> {
        self.rate_of(self.decode.pass_s()?)
    }

    /// The decode rate if more weights had been resident; `None` if the request's times do not
    /// allow an estimate.
    #[must_use]
    pub fn tokens_per_s_with(&self, room: MoreRoom) -> Option<f64> {
        let decode = &self.decode;
        let now = decode.pass_s()?;
        let missing = decode.uploaded_bytes + decode.cpu_bytes;
        if missing == 0 {
            return None;
        }
        let least = self.resident_pass_s(now);
        let missing = missing as f64 / f64::from(decode.passes);
        let seconds = match room {
            MoreRoom::All => least,
            MoreRoom::Bytes(_) if !self.misses_what_has_no_room() => return None,
            MoreRoom::Bytes(bytes) if bytes as f64 >= missing => least,
            MoreRoom::Bytes(bytes) => (now - self.saved_s(now, bytes as f64 / missing)).max(least),
        };
        self.rate_of(seconds)
    }

    fn rate_of(&self, pass_s: f64) -> Option<f64> {
        let tokens = f64::from(self.decode.tokens) / f64::from(self.decode.passes);
        (pass_s > 0.0).then(|| tokens / pass_s)
    }

    /// Estimated seconds of a pass with all weights resident, given passes of `now` seconds: the
    /// model's measured time plus the time of others; if that was not measured, the time without
    /// waits, and at least what the device's rate gives.
    fn resident_pass_s(&self, now: f64) -> f64 {
        let of = |parts: &[Part]| {
            let seconds = parts.iter().map(|&part| self.decode.part_s(part));
            seconds.sum::<f64>()
        };
        let around = &self.surroundings;
        let waits = of(&[Part::Uploads, Part::Disk, Part::CpuCompute]);
        let own = of(&[Part::Decode, Part::Rest]);
        let alone = around.resident_token_s.unwrap_or_else(|| {
            let rate = around.computed_bytes_per_s.filter(|rate| *rate > 0.0);
            let by_device = rate.map(|rate| around.weights.pass_bytes as f64 / rate);
            own.max(by_device.unwrap_or_default())
        });
        (now - waits - own + alone).clamp(0.0, now)
    }

    /// Seconds of a pass of `now` seconds that `share` (0 to 1) of the waits for missing weights
    /// takes.
    fn saved_s(&self, now: f64, share: f64) -> f64 {
        let decode = &self.decode;
        let waits = decode.part_s(Part::Uploads) + decode.part_s(Part::Disk);
        let cpu = decode.part_s(Part::CpuCompute);
        // Uploads beside the computation take the link's time and not only that of the waits.
        let link = self.link.measured_bytes_per_s.filter(|rate| *rate > 0.0);
        let link = link.filter(|_| decode.parts.of(Part::Disk).is_zero());
        let uploaded = decode.uploaded_bytes as f64 / f64::from(decode.passes.max(1));
        let uploads = link.map_or(waits, |rate| uploaded / rate);
        let most = (now - cpu).max(waits);
        (uploads.clamp(waits, most) + cpu) * share
    }

    /// Whether the request's passes miss only those weights that do not fit, none that other models
    /// evicted.
    fn misses_what_has_no_room(&self) -> bool {
        let around = &self.surroundings;
        let by_others = self.displaced.iter().filter(|d| match d.cause {
            None | Some(EvictionCause::OwnPass) => false,
            Some(_) => true,
        });
        let by_others: u64 = by_others.map(|d| d.bytes).sum();
        let missing = self.uploaded_bytes + self.cpu_bytes;
        !around.model_fits
            && !around.has_experts
            && around.is_pass_aware
            && by_others * 2 <= missing
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::api::times::{Displaced, LinkUse, PartTimes, Surroundings};

    const MIB: u64 = 1 << 20;

    /// 20 tokens, a pass each: 10 ms of the device, 40 ms of waits for 40 MiB at 1 MiB/ms.
    fn times() -> RequestTimes {
        let now = crate::clock::Clock.now();
        let mut parts = PartTimes::default();
        parts.add(Part::Decode, Duration::from_millis(200));
        parts.add(Part::Uploads, Duration::from_millis(800));
        RequestTimes {
            begun: now,
            ended: now,
            parts,
            waited_for: Vec::new(),
            uploaded_bytes: 900 * MIB,
            cold_bytes: 0,
            displaced: Vec::new(),
            link: LinkUse::default(),
            cpu_bytes: 0,
            prompt_tokens: (10, 0),
            generated_tokens: 21,
            decode: DecodeTimes {
                tokens: 20,
                passes: 20,
                parts,
                uploaded_bytes: 800 * MIB,
                cpu_bytes: 0,
            },
            longest_gap: None,
            promised_gap: None,
            surroundings: Surroundings {
                is_pass_aware: true,
                model_bytes: 100 * MIB,
                budget_bytes: 70 * MIB,
                block_bytes: 10 * MIB,
                ..Surroundings::default()
            },
        }
    }

    fn near(rate: Option<f64>, expected: f64) {
        let rate = rate.expect("a rate");
        assert!((rate / expected - 1.0).abs() < 1e-6, "{rate}, {expected}");
    }

    #[test]
    fn each_byte_more_is_one_that_the_link_need_not_bring() {
        let times = times();
        near(times.tokens_per_s(), 20.0);
        let with = |bytes| times.tokens_per_s_with(MoreRoom::Bytes(bytes));
        near(with(0), 20.0);
        near(with(20 * MIB), 1e3 / 30.0);
        near(with(40 * MIB), 100.0);
        near(with(90 * MIB), 100.0);
        near(times.tokens_per_s_with(MoreRoom::All), 100.0);
    }

    #[test]
    fn uploads_beside_the_computation_take_the_links_time() {
        // 40 MiB take 50 ms, 10 ms of them while the device computes.
        let mut beside = times();
        let rate = 40.0 * MIB as f64 / 0.05;
        beside.link.measured_bytes_per_s = Some(rate);
        near(
            beside.tokens_per_s_with(MoreRoom::Bytes(20 * MIB)),
            1e3 / 25.0,
        );
        // From disk they do not come at the link's rate.
        beside
            .decode
            .parts
            .add(Part::Disk, Duration::from_millis(1));
        let cold = beside.tokens_per_s_with(MoreRoom::Bytes(20 * MIB)).unwrap();
        assert!((33.0..34.0).contains(&cold), "{cold}");
    }

    #[test]
    fn no_pass_is_faster_than_one_that_was_measured() {
        let mut measured = times();
        measured.surroundings.weights.pass_bytes = 100 * MIB;
        measured.surroundings.computed_bytes_per_s = Some(100.0 * MIB as f64 / 0.02);
        near(measured.tokens_per_s_with(MoreRoom::All), 50.0);
        measured.surroundings.resident_token_s = Some(0.016);
        near(measured.tokens_per_s_with(MoreRoom::All), 62.5);
        // What is measured of another context is no reason to be slower than now.
        measured.surroundings.resident_token_s = Some(9.0);
        near(measured.tokens_per_s_with(MoreRoom::All), 20.0);
    }

    #[test]
    fn weights_that_the_cpu_computes_with_are_missing_too() {
        let mut split = times();
        let ms = Duration::from_millis(800);
        split
            .decode
            .parts
            .shift(Part::Uploads, Part::CpuCompute, ms);
        (split.decode.cpu_bytes, split.decode.uploaded_bytes) = (800 * MIB, 0);
        near(split.tokens_per_s_with(MoreRoom::All), 100.0);
        near(
            split.tokens_per_s_with(MoreRoom::Bytes(10 * MIB)),
            1e3 / 40.0,
        );
    }

    #[test]
    fn several_tokens_of_a_pass_come_together_and_a_slow_reader_is_no_part_of_it() {
        let mut drafted = times();
        drafted.decode.tokens = 40;
        drafted
            .decode
            .parts
            .add(Part::Reader, Duration::from_secs(9));
        near(drafted.tokens_per_s(), 40.0);
        near(drafted.tokens_per_s_with(MoreRoom::All), 200.0);
    }

    #[test]
    fn there_is_no_estimate_where_the_numbers_do_not_say() {
        let some = MoreRoom::Bytes(MIB);
        let mut few = times();
        few.decode.tokens = TOKENS_MIN - 1;
        assert_eq!(
            (few.tokens_per_s(), few.tokens_per_s_with(some)),
            (None, None)
        );
        let mut resident = times();
        resident.decode.uploaded_bytes = 0;
        assert_eq!(resident.tokens_per_s_with(MoreRoom::All), None);
        let cases: [fn(&mut RequestTimes); 4] = [
            |t| t.surroundings.has_experts = true,
            |t| t.surroundings.is_pass_aware = false,
            |t| t.surroundings.model_fits = true,
            |t| {
                t.displaced.push(Displaced {
                    cause: Some(EvictionCause::OtherModel),
                    by: None,
                    bytes: 500 * MIB,
                });
            },
        ];
        for (n, change) in cases.into_iter().enumerate() {
            let mut other = times();
            change(&mut other);
            assert_eq!(other.tokens_per_s_with(some), None, "{n}");
            near(other.tokens_per_s_with(MoreRoom::All), 100.0);
        }
    }
}
