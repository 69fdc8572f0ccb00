//! Measured rates of the disk and of prompts, saved in the store's directory, so that the first
//! request after a restart is read or computed by known rates and not as a trial.
//!
//! The file is text with a checksum in its last line. It is a hint: if it is damaged or of another
//! version, it is ignored.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use rocmforge_kv_disk::ModelTag;
use sha2::{Digest, Sha256};

const FIRST_LINE: &str = "rocmforge kv rates 1";

/// Maximum number of models whose prompt rates are saved.
const ROWS_MAX: usize = 1024;
/// Range of plausible read rates in bytes a second; others are ignored.
const READ_RANGE: RangeInclusive<f64> = 1e3..=1e13;
const ROW_RANGE: RangeInclusive<f64> = 1e-9..=1e3;
/// Minimum time between two saves of the rates.
const EVERY: Duration = Duration::from_secs(20);
const CHANGED_PART: f64 = 0.2;

/// Digest that names a model on a device.
type Name = [u8; 16];

/// Measured rates that are saved for the next process.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Rates {
    /// Read rate of the files in bytes a second.
    read: Option<f64>,
    /// Seconds for a row of a prompt, by model and device.
    rows: BTreeMap<Name, f64>,
    written_at: Option<Instant>,
    changed: bool,
}

fn name(model: ModelTag, device: &str) -> Name {
    let digest = Sha256::new().chain_update(model.0).chain_update(device);
    let mut name = [0; 16];
    name.copy_from_slice(&digest.finalize()[..16]);
    name
}

fn differs(before: Option<f64>, now: f64) -> bool {
    before.is_none_or(|before| (now - before).abs() > before * CHANGED_PART)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Name> {
    let number = u128::from_str_radix(text, 16).ok()?;
    (text.len() == 32).then(|| number.to_be_bytes())
}

fn number(text: &str, range: &RangeInclusive<f64>) -> Option<f64> {
    text.parse().ok().filter(|number| range.contains(number))
}

impl Rates {
    /// Parses saved rates; `None` if they are damaged.
    pub(super) fn parse(note: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(note).ok()?;
        let (body, sum) = text.trim_end().rsplit_once('\n')?;
        let body = format!("{body}\n");
        if sum.strip_prefix("sum ")? != hex(&Sha256::digest(&body)) {
            return None;
        }
        let mut lines = body.lines();
        if lines.next()? != FIRST_LINE {
            return None;
        }
        let mut rates = Self::default();
        for line in lines {
            let mut words = line.split(' ');
            match (words.next()?, words.next()?, words.next()) {
                ("read", rate, None) => rates.read = number(rate, &READ_RANGE),
                ("row", name, Some(seconds)) if rates.rows.len() < ROWS_MAX => {
                    let (name, seconds) = (unhex(name)?, number(seconds, &ROW_RANGE)?);
                    rates.rows.insert(name, seconds);
                }
                _ => return None,
            }
        }
        Some(rates)
    }

    /// The rates as text to save.
    fn text(&self) -> Vec<u8> {
        let mut body = format!("{FIRST_LINE}\n");
        if let Some(rate) = self.read {
            body += &format!("read {rate:e}\n");
        }
        for (name, seconds) in &self.rows {
            body += &format!("row {} {seconds:e}\n", hex(name));
        }
        let sum = hex(&Sha256::digest(&body));
        format!("{body}sum {sum}\n").into_bytes()
    }

    /// Read rate of the files in bytes a second; `None` if unknown.
    pub(super) fn read(&self) -> Option<f64> {
        self.read
    }

    /// Seconds for a row of a model's prompts on a device; `None` if unknown.
    pub(super) fn row(&self, model: ModelTag, device: &str) -> Option<f64> {
        self.rows.get(&name(model, device)).copied()
    }

    /// Records a measured read rate of the files, in bytes a second.
    pub(super) fn know_read(&mut self, rate: f64) {
        if READ_RANGE.contains(&rate) && differs(self.read, rate) {
            (self.read, self.changed) = (Some(rate), true);
        }
    }

    /// Records the time of a row of a model's prompts on a device, in seconds.
    pub(super) fn know_row(&mut self, model: ModelTag, device: &str, seconds: f64) {
        let name = name(model, device);
        if !ROW_RANGE.contains(&seconds) || !differs(self.rows.get(&name).copied(), seconds) {
            return;
        }
        self.changed = true;
        if self.rows.insert(name, seconds).is_none() && self.rows.len() > ROWS_MAX {
            // Any other one: there is no order of use, and a thousand models are more than are
            // used.
            let other = self.rows.keys().copied().find(|other| *other != name);
            other.map(|other| self.rows.remove(&other));
        }
    }

    /// The text to save if the rates changed since it was last taken, and that was at least
    /// [`EVERY`] ago or `always` is set; `None` otherwise.
    pub(super) fn due(&mut self, now: Instant, always: bool) -> Option<Vec<u8>> {
        let is_new = |at: Instant| now.saturating_duration_since(at) < EVERY;
        if !self.changed || (!always && self.written_at.is_some_and(is_new)) {
            return None;
        }
        (self.changed, self.written_at) = (false, Some(now));
        Some(self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    fn tag(n: u8) -> ModelTag {
        ModelTag([n; 16])
    }

    #[test]
    fn what_was_measured_is_known_to_who_reads_the_note() {
        let (mut rates, start) = (Rates::default(), Clock.now());
        assert_eq!(rates.due(start, true), None, "there is nothing");
        rates.know_read(1.25e9);
        rates.know_row(tag(1), "hip gfx1100", 2.5e-4);
        rates.know_row(tag(2), "hip gfx1100", 1e-3);
        let note = rates.due(start, false).unwrap();
        let read = Rates::parse(&note).unwrap();
        assert_eq!(read.read(), Some(1.25e9));
        assert_eq!(read.row(tag(1), "hip gfx1100"), Some(2.5e-4));
        assert_eq!(read.row(tag(2), "hip gfx1100"), Some(1e-3));
        assert_eq!(read.row(tag(1), "host avx2"), None, "another device");
        // What changes little is not written, and nothing twice within a while.
        rates.know_read(1.3e9);
        assert_eq!(rates.due(start + EVERY, true), None);
        rates.know_read(2e9);
        let soon = start + EVERY - Duration::from_millis(1);
        assert_eq!(rates.due(soon, false), None);
        assert!(rates.due(start + EVERY, false).is_some());
        rates.know_read(9e9);
        assert!(rates.due(start + EVERY, true).is_some(), "at the end");
    }

    #[test]
    fn what_cannot_have_been_measured_is_not_known() {
        let mut rates = Rates::default();
        for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0, 1e300] {
            rates.know_read(bad);
            rates.know_row(tag(1), "host", bad);
        }
        assert_eq!(rates, Rates::default());
        for n in 0..=u16::MAX {
            let mut model = [0; 16];
            model[..2].copy_from_slice(&n.to_le_bytes());
            rates.know_row(ModelTag(model), "host", 1e-3);
        }
        assert_eq!(rates.rows.len(), ROWS_MAX);
        let note = rates.due(Clock.now(), false).unwrap();
        assert!(note.len() <= rocmforge_kv_disk::NOTE_MAX);
    }

    #[test]
    fn a_note_with_any_other_byte_is_none() {
        let mut rates = Rates::default();
        rates.know_read(1.25e9);
        rates.know_row(tag(1), "hip gfx1100", 2.5e-4);
        let note = rates.due(Clock.now(), false).unwrap();
        assert!(Rates::parse(&note).is_some());
        for at in 0..note.len() - 1 {
            let mut damaged = note.clone();
            damaged[at] ^= 1;
            assert_eq!(Rates::parse(&damaged), None, "byte {at}");
            assert_eq!(Rates::parse(&note[..at]), None, "cut at {at}");
        }
        let of = |body: &str| {
            let body = format!("{body}\n");
            let sum = hex(&Sha256::digest(&body));
            Rates::parse(format!("{body}sum {sum}\n").as_bytes())
        };
        assert!(of(FIRST_LINE).is_some());
        for body in ["rocmforge kv rates 2", "rocmforge kv rates 1\nother 1", ""] {
            assert_eq!(of(body), None, "{body}");
        }
        let nan = of("rocmforge kv rates 1\nread NaN").unwrap();
        assert_eq!(nan.read(), None);
    }
}
