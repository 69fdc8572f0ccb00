//! Measurements of requests by model: histograms, counts, and the expected time to first token.
//!
//! ```text
//! both skins -> Running::poll_next -> Course (one request) -> Record (one model) -> GET /metrics
//! ```
//!
//! *Invariants:* a request writes to atomics only; the lock is held to find a model's record, at a
//! request's start and at a scrape. When a record is added, at most [`KEPT_MAX`] others are of
//! models that are not loaded (`Measured::record`).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_engine::api::{
    FinishReason, GenerateSummary, ModelStatus, SegmentState, SegmentStatus, Snapshot,
};

/// Maximum number of kept records of models that are not loaded.
pub const KEPT_MAX: usize = 64;
/// Weight of a new sample in a moving average.
const WEIGHT: f64 = 0.25;
/// A prompt counts as one with resident weights if at most this share of them was absent.
const FEW_ABSENT: f64 = 0.01;
/// Histogram bounds of times to first token and of whole requests, in seconds.
pub const REQUEST_BOUNDS: [f64; 18] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0,
];
/// Histogram bounds of times between two tokens, in seconds.
pub const GAP_BOUNDS: [f64; 16] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// A histogram of times with fixed buckets.
#[derive(Debug)]
pub struct Histogram {
    /// Upper bounds in seconds, ascending.
    bounds: &'static [f64],
    /// Number of times in each bucket; one more bucket than bounds.
    counts: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum_ns: AtomicU64::new(0),
        }
    }

    fn note(&self, took: Duration, times: u64) {
        let seconds = took.as_secs_f64();
        let bucket = self.bounds.partition_point(|bound| *bound < seconds);
        self.counts[bucket].fetch_add(times, Ordering::Relaxed);
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns
            .fetch_add(ns.saturating_mul(times), Ordering::Relaxed);
    }

    /// For each bound in seconds the number of times up to it; the number of all times; their sum
    /// in seconds.
    pub fn read(&self) -> (Vec<(f64, u64)>, u64, f64) {
        let mut all = 0;
        let mut below = Vec::with_capacity(self.counts.len());
        for (i, count) in self.counts.iter().enumerate() {
            all += count.load(Ordering::Relaxed);
            below.extend(self.bounds.get(i).map(|bound| (*bound, all)));
        }
        let sum_s = self.sum_ns.load(Ordering::Relaxed) as f64 / 1e9;
        (below, all, sum_s)
    }
}

/// A moving average as the bits of an f64; zero before the first sample.
#[derive(Debug, Default)]
struct Average(AtomicU64);

impl Average {
    /// Adds a sample, which is above 0.
    fn note(&self, sample: f64) {
        if !(sample.is_finite() && sample > 0.0) {
            return;
        }
        let next = |bits| {
            let before = f64::from_bits(bits);
            let after = if bits == 0 {
                sample
            } else {
                before + (sample - before) * WEIGHT
            };
            Some(after.to_bits())
        };
        // The function never refuses.
        let _ = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }

    fn get(&self) -> Option<f64> {
        let bits = self.0.load(Ordering::Relaxed);
        (bits != 0).then(|| f64::from_bits(bits))
    }
}

/// Numbers of a model's requests by how they ended.
#[derive(Debug, Default)]
pub struct Ends {
    /// Requests that ended by an end-of-generation token or a stop string.
    pub stop: AtomicU64,
    /// Requests that ended by `max_tokens`, or because the context was full.
    pub length: AtomicU64,
    /// Requests that failed, or whose clients went away.
    pub abort: AtomicU64,
}

/// Measurements of one model's requests.
#[derive(Debug)]
pub struct Record {
    /// Times from a request's arrival to its first token.
    pub first_token: Histogram,
    /// Times from one token to the next.
    pub gap: Histogram,
    /// Times from a request's arrival to its end.
    pub whole: Histogram,
    /// Number of tokens of prompts that led to a first token. As in vLLM, a prompt with `n`
    /// completions counts once for each.
    pub prompt_tokens: AtomicU64,
    /// Number of generated tokens, including those of unfinished requests.
    pub generated_tokens: AtomicU64,
    /// Numbers of requests by how they ended.
    pub ends: Ends,
    /// Mean seconds of a prompt whose weights were resident.
    pass_s: Average,
}

impl Default for Record {
    fn default() -> Self {
        Self {
            first_token: Histogram::new(&REQUEST_BOUNDS),
            gap: Histogram::new(&GAP_BOUNDS),
            whole: Histogram::new(&REQUEST_BOUNDS),
            prompt_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            ends: Ends::default(),
            pass_s: Average::default(),
        }
    }
}

/// Measured speed of the device, over all models.
#[derive(Debug, Default)]
struct Pace {
    /// Mean seconds of a prompt for each byte of its model's weights, if all are resident.
    pass_s_per_byte: Average,
    /// Mean rate, in bytes per second, at which absent weights delayed first tokens.
    upload_rate: Average,
}

/// The measurements of all models, and of the device.
#[derive(Debug, Default)]
pub struct Measured {
    records: Mutex<HashMap<String, Arc<Record>>>,
    pace: Arc<Pace>,
}

/// Bytes of a model's weights that are not on the device, and of all of them.
fn absent_of(segments: &[SegmentStatus]) -> (u64, u64) {
    let bytes = |s: &SegmentStatus| s.bytes;
    let all = segments.iter().map(bytes).sum();
    let is_absent = |s: &&SegmentStatus| s.state != SegmentState::Resident;
    let absent = segments.iter().filter(is_absent).map(bytes).sum();
    (absent, all)
}

impl Measured {
    /// The record of a model, created if it is new.
    fn record(&self, name: &str, snapshot: &Snapshot) -> Arc<Record> {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = records.get(name) {
            return Arc::clone(record);
        }
        if records.len() >= KEPT_MAX {
            let loaded = |name: &str| snapshot.models.iter().any(|m| m.model.name() == name);
            records.retain(|name, _| loaded(name));
        }
        let record = Arc::<Record>::default();
        records.insert(name.to_owned(), Arc::clone(&record));
        record
    }

    /// Begins to measure a request with a prompt of `prompt_tokens` tokens that arrived at
    /// `arrived`.
    pub(crate) fn begin(
        &self,
        name: &str,
        prompt_tokens: u32,
        arrived: Instant,
        snapshot: &Snapshot,
    ) -> Course {
        let status = snapshot.models.iter().find(|m| m.model.name() == name);
        let (absent_bytes, weight_bytes) = status.map_or((0, 0), |m| absent_of(&m.segments));
        Course {
            record: self.record(name, snapshot),
            pace: Arc::clone(&self.pace),
            arrived,
            prompt_tokens,
            generated_tokens: 0,
            last: None,
            is_alone: snapshot.running == 0 && snapshot.queued == 0,
            absent_bytes,
            weight_bytes,
            is_ended: false,
        }
    }

    /// All records, by the names of their models.
    pub fn all(&self) -> Vec<(String, Arc<Record>)> {
        let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = records
            .iter()
            .map(|(name, record)| (name.clone(), Arc::clone(record)))
            .collect();
        drop(records);
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// Measured upload rate of weights, in bytes per second; `None` before the first upload.
    pub fn upload_rate(&self) -> Option<f64> {
        self.pace.upload_rate.get()
    }

    /// Expected seconds to the first token of a request that has the device for itself: the
    /// measured time of this model's prompts, or another model's by bytes of weights, plus the
    /// upload of absent bytes at the measured rate. `None` if something needed was not measured.
    pub fn expected_first_token_s(&self, status: &ModelStatus) -> Option<f64> {
        let (absent, all) = absent_of(&status.segments);
        let own = {
            let records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
            let record = records.get(status.model.name());
            record.and_then(|record| record.pass_s.get())
        };
        let others = || self.pace.pass_s_per_byte.get().map(|s| s * all as f64);
        let pass_s = own.or_else(others);
        if absent == 0 {
            return pass_s;
        }
        // Before any prompt had all its weights there, the rate has the time of computing in it.
        Some(pass_s.unwrap_or(0.0) + absent as f64 / self.pace.upload_rate.get()?)
    }
}

fn add(to: &AtomicU64, n: u32) {
    to.fetch_add(n.into(), Ordering::Relaxed);
}

/// Measurement of a running request. If dropped before the request's end, the request counts as
/// aborted.
#[derive(Debug)]
pub struct Course {
    record: Arc<Record>,
    pace: Arc<Pace>,
    arrived: Instant,
    prompt_tokens: u32,
    /// Number of tokens counted so far.
    generated_tokens: u32,
    /// Time of the last token.
    last: Option<Instant>,
    /// Whether no other request ran when this one arrived.
    is_alone: bool,
    /// Bytes of weights that were not on the device at the arrival, and of all weights.
    absent_bytes: u64,
    weight_bytes: u64,
    is_ended: bool,
}

impl Course {
    /// Records that `n` tokens were generated at once.
    pub(crate) fn tokens(&mut self, n: usize) {
        if n == 0 {
            return;
        }
        let now = Instant::now();
        match self.last {
            None => {
                self.record.first_token.note(now - self.arrived, 1);
                add(&self.record.prompt_tokens, self.prompt_tokens);
            }
            // Those that came together took equal parts of the time.
            Some(last) => self.record.gap.note((now - last) / n as u32, n as u64),
        }
        self.last = Some(now);
        add(&self.record.generated_tokens, n as u32);
        self.generated_tokens += n as u32;
    }

    /// Notes that the generation ended normally.
    pub(crate) fn done(&mut self, summary: &GenerateSummary) {
        self.is_ended = true;
        let record = &self.record;
        record.whole.note(self.arrived.elapsed(), 1);
        if self.last.is_none() {
            add(&record.prompt_tokens, self.prompt_tokens);
        }
        // Of those that no piece had.
        let rest = summary
            .generated_tokens
            .saturating_sub(self.generated_tokens);
        add(&record.generated_tokens, rest);
        let end = match summary.finish {
            FinishReason::EndOfText
            | FinishReason::StopString { .. }
            | FinishReason::StopToken { .. } => &record.ends.stop,
            FinishReason::MaxTokens | FinishReason::ContextFull => &record.ends.length,
        };
        add(end, 1);
        self.note_pace(summary);
    }

    /// Updates the device's speed from a request that began alone; beside others, passes take
    /// longer.
    fn note_pace(&self, summary: &GenerateSummary) {
        if !self.is_alone || self.weight_bytes == 0 {
            return;
        }
        let prompt_s = summary.ttft.saturating_sub(summary.queued).as_secs_f64();
        let (absent, all) = (self.absent_bytes as f64, self.weight_bytes as f64);
        if absent <= all * FEW_ABSENT {
            self.record.pass_s.note(prompt_s);
            self.pace.pass_s_per_byte.note(prompt_s / all);
            return;
        }
        // What computing alone takes is no part of the delay; before that is known, all is.
        let pass_s = self.record.pass_s.get();
        let delay_s = prompt_s - pass_s.filter(|pass_s| *pass_s < prompt_s).unwrap_or(0.0);
        self.pace.upload_rate.note(absent / delay_s);
    }
}

impl Drop for Course {
    fn drop(&mut self) {
        if !self.is_ended {
            self.record.ends.abort.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_a_bound_belongs_to_its_bucket() {
        let histogram = Histogram::new(&[0.1, 1.0]);
        histogram.note(Duration::from_millis(100), 1);
        histogram.note(Duration::from_millis(101), 2);
        histogram.note(Duration::from_secs(5), 1);
        let (below, all, sum_s) = histogram.read();
        assert_eq!((below, all), (vec![(0.1, 1), (1.0, 3)], 4));
        assert!((sum_s - 5.302).abs() < 1e-9);
    }

    #[test]
    fn an_average_begins_with_its_first_sample_and_follows() {
        let average = Average::default();
        assert_eq!(average.get(), None);
        for odd in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            average.note(odd);
        }
        assert_eq!(average.get(), None);
        average.note(4.0);
        average.note(8.0);
        assert_eq!(average.get(), Some(5.0));
    }
}
