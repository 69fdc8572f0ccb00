//! How long the device's work takes, by events around samples of it.

use rocmforge_device::Error;
use rocmforge_gpu_driver::{Context, Event, Stream};

use super::failed;

/// What a new sample counts for beside those before it.
const WEIGHT: f64 = 0.25;

/// A sample begins once in so many turns; a pass should not be a multiple of it.
const TURNS: u32 = 5;

/// Samples of less than this part of the largest say how long launches take, not how fast the
/// device is: small models run beside large ones, and theirs would be taken for a device that is a
/// hundred times as slow.
const LARGE_PART: f64 = 0.25;

/// A sample that is so many times larger than all before it does not wait for its turn.
const LARGER: f64 = 4.0;

/// What is left of the largest size behind each sample that is too small, so that such count some
/// 100,000 samples behind the last large one.
const FORGETS: f64 = 0.99999;

/// Measures one sample of work on a stream at a time.
#[derive(Debug)]
pub(super) struct Stopwatch {
    start: Event,
    end: Event,
    /// Times that a sample could have begun.
    turns: u32,
    /// Units of the work between the events, while they have not been read.
    under_way: Option<f64>,
    rate: Rate,
}

/// Seconds a unit, of samples of about the largest size.
#[derive(Debug, Default)]
struct Rate {
    seconds: Option<f64>,
    /// Units of the largest sample.
    largest: f64,
}

impl Rate {
    fn note(&mut self, seconds: f64, units: f64) {
        if units < self.largest * LARGE_PART {
            self.largest *= FORGETS;
            return;
        }
        let sample = seconds / units;
        // What is known of much smaller ones says nothing beside it.
        let same = self.largest >= units * LARGE_PART;
        let before = self.seconds.filter(|_| same).unwrap_or(sample);
        self.seconds = Some(before + (sample - before) * WEIGHT);
        self.largest = self.largest.max(units);
    }
}

impl Stopwatch {
    pub(super) fn new(context: &Context) -> Result<Self, Error> {
        let event = || Event::new(context, true).map_err(|e| failed("making an event", e));
        Ok(Self {
            start: event()?,
            end: event()?,
            turns: 0,
            under_way: None,
            rate: Rate::default(),
        })
    }

    /// Whether [`Stopwatch::begin`] will begin a sample. Reads the last one if it has ended.
    pub(super) fn is_due(&mut self) -> bool {
        self.read();
        // Else it would be the first segment of each pass, whose kind is not that of others.
        (self.turns + 1) % TURNS == 1 && self.under_way.is_none()
    }

    /// Begins a sample if it is time for one. Whether it did: [`Stopwatch::end`] belongs behind the
    /// work then.
    pub(super) fn begin(&mut self, stream: &Stream) -> bool {
        self.begin_of(stream, 0)
    }

    /// As [`Stopwatch::begin`], of so many units: a sample that is far larger than all before it is
    /// due at once.
    pub(super) fn begin_of(&mut self, stream: &Stream, units: u64) -> bool {
        let due = self.is_due();
        let larger = units as f64 > self.rate.largest * LARGER && self.under_way.is_none();
        self.turns = (self.turns + 1) % TURNS;
        // What cannot be measured is work like any other; its errors show elsewhere.
        (due || larger) && self.start.record(stream).is_ok()
    }

    /// Ends a sample of so many units.
    pub(super) fn end(&mut self, stream: &Stream, units: u64) {
        if units > 0 && self.end.record(stream).is_ok() {
            self.under_way = Some(units as f64);
        }
    }

    fn read(&mut self) {
        let Some(units) = self.under_way else {
            return;
        };
        if !self.end.is_passed().unwrap_or(false) {
            return;
        }
        self.under_way = None;
        let Ok(ms) = self.end.elapsed_ms_since(&self.start) else {
            return;
        };
        if ms > 0.0 {
            self.rate.note(f64::from(ms) / 1e3, units);
        }
    }

    /// Units a second.
    pub(super) fn rate(&mut self) -> Option<f64> {
        self.read();
        self.rate.seconds.map(|seconds| 1.0 / seconds)
    }
}

/// Classes of passes by their number of rows: one for each power of two.
const CLASSES: usize = 16;

/// How long operations take for each byte of their weights, by the rows of the pass.
#[derive(Debug)]
pub(super) struct Runs([Stopwatch; CLASSES]);

impl Runs {
    pub(super) fn new(context: &Context) -> Result<Self, Error> {
        let mut watches = Vec::with_capacity(CLASSES);
        for _ in 0..CLASSES {
            watches.push(Stopwatch::new(context)?);
        }
        Ok(Self(
            watches.try_into().expect("as many as there are classes"),
        ))
    }

    /// The one for passes of so many rows.
    pub(super) fn of(&mut self, rows: usize) -> &mut Stopwatch {
        &mut self.0[class(rows)]
    }

    /// Bytes of weights a second in passes of so many rows. Where only small models had such
    /// passes, and others larger ones, those say more: launches of the small ones take a hundred
    /// times as long a byte.
    pub(super) fn rate(&mut self, rows: usize) -> Option<f64> {
        let class = class(rows);
        let known = self.0.iter_mut().map(|watch| {
            let rate = watch.rate();
            (watch.rate.largest, rate)
        });
        let known: Vec<(f64, Option<f64>)> = known.collect();
        nearest(class, &known)
    }
}

/// The class of passes of so many rows.
fn class(rows: usize) -> usize {
    let class = rows.max(1).next_power_of_two().trailing_zeros() as usize;
    class.min(CLASSES - 1)
}

/// The rate of a class, of each class's largest sample and rate: its own, or that of the nearest
/// one, if its own samples are small beside those.
fn nearest(class: usize, known: &[(f64, Option<f64>)]) -> Option<f64> {
    let own = known.get(class)?;
    own.1?;
    let largest = known.iter().map(|(largest, _)| *largest);
    let largest = largest.fold(0.0, f64::max);
    let trusted = known.iter().enumerate();
    let trusted = trusted.filter(|(_, (units, _))| *units >= largest * LARGE_PART);
    let rates = trusted.filter_map(|(at, (_, rate))| Some((at.abs_diff(class), (*rate)?)));
    rates.min_by_key(|(far, _)| *far).map(|(_, rate)| rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_only_small_models_had_are_as_fast_as_others() {
        let (large, small) = ((50e6, Some(2e12)), (2e5, Some(7e8)));
        let nothing = (0.0, None);
        let known = [small, large, nothing, (60e6, Some(1e12))];
        assert_eq!(nearest(0, &known), Some(2e12));
        assert_eq!(nearest(1, &known), Some(2e12));
        assert_eq!(nearest(2, &known), None, "no pass had so many");
        assert_eq!(nearest(3, &known), Some(1e12));
        // With small models alone theirs is all that is known.
        assert_eq!(nearest(0, &[small, nothing]), Some(7e8));
    }

    #[test]
    fn launches_of_a_small_model_are_not_taken_for_the_devices_rate() {
        let mut rate = Rate::default();
        // 4 MB in half a millisecond: launches.
        rate.note(5e-4, 4e6);
        assert_eq!(rate.seconds, Some(1.25e-10));
        // A layer of a large model, at 2 TB/s, counts alone from then on.
        rate.note(25e-6, 50e6);
        assert_eq!(rate.seconds, Some(5e-13));
        for _ in 0..1000 {
            rate.note(5e-4, 4e6);
        }
        assert_eq!(rate.seconds, Some(5e-13));
        // Of one a half as large it is the same device.
        rate.note(25e-6, 25e6);
        assert_eq!(rate.seconds, Some(6.25e-13));
        // Nobody has large ones any more.
        for _ in 0..200_000 {
            rate.note(5e-4, 4e6);
        }
        assert!(
            rate.seconds
                .is_some_and(|s| (s / 1.25e-10 - 1.0).abs() < 0.01)
        );
    }
}
