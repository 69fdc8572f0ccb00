//! The second answer to a miss: what is not on the card is computed on the host, out of the file, beside what the link brings.
//!
//! Which answer a miss gets follows from what was measured: the time of an upload by the link's rate, the time of the host by
//! its own rate for as many rows, which is another one for weights that it keeps in its kernels' form, for those that it has to
//! bring into it first, and for those that it has no room for. Of the experts that a layer lacks some are uploaded and some computed, so that both end
//! together; those that were used most are uploaded. Of the ordered segments that a pass lacks, one is on its way and the host
//! computes those before it.
//!
//! *Invariant:* nothing is computed on the host that touches keys, values or states ([`Answers::can_run`]).

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::host::{Answers, Brought};
use rocmforge_device::{Buf, Error as DeviceError, Pace, Plan, ScratchLayout};
use rocmforge_ops::RowCounts;
use rocmforge_tensor_cache::ModelId;

use crate::api::{Budget, Hosted, Offload as Mode};

/// Most rows of a pass that the host computes a part of.
pub(crate) const ROWS_MAX: usize = 64;

/// What a new sample counts for beside those before it.
const WEIGHT: f64 = 0.2;

/// First answers of a class, of which the fastest counts: threads start, and pages of the file are mapped.
const SAMPLES_MIN: u32 = 4;

/// After so many decisions one answer is measured again, whatever the last ones said.
const TRY_EVERY: u32 = 512;

/// After so many decisions without an upload there is one: the link's rate is known by uploads alone, and it was slower while the
/// host read the same memory.
const LINK_EVERY: u32 = 16;

/// Answers that share the cost of bringing an expert into the host's form: what is brought is kept for as long as it is asked
/// for now and then, and each of its answers is one upload less.
const ANSWERS_EACH: f64 = 8.0;

/// Classes of answers by the rows that a matrix is multiplied with: one for each power of two.
const CLASSES: usize = 8;

/// Seconds a byte, as measured.
#[derive(Debug, Clone, Copy, Default)]
struct Rate {
    seconds: Option<f64>,
    samples: u32,
}

impl Rate {
    fn note(&mut self, took: Duration, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let sample = took.as_secs_f64() / bytes as f64;
        self.samples = self.samples.saturating_add(1);
        let early = self.samples <= SAMPLES_MIN;
        self.seconds = Some(match self.seconds {
            None => sample,
            Some(before) if early => before.min(sample),
            Some(before) => before + (sample - before) * WEIGHT,
        });
    }
}

/// How the host has a segment's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// In its kernels' form.
    Kept,
    /// Not yet, but there is room for it.
    WithRoom,
    /// In the file alone.
    InFile,
}

/// Absent experts of one step, of which the host may compute some.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Absent {
    pub(crate) n: usize,
    /// Of those, [`Held::Kept`].
    pub(crate) kept: usize,
    /// How it has the others.
    pub(crate) others: Held,
    /// Bytes of each.
    pub(crate) bytes: u64,
    /// Rows that each is multiplied with.
    pub(crate) rows_each: usize,
}

/// The host beside a card.
#[derive(Debug)]
pub(crate) struct Offload {
    mode: Mode,
    threads: Option<NonZeroUsize>,
    /// Weights that the host may keep in its own form.
    keeps: Option<Budget>,
    /// Made when it is needed first; away while it computes.
    host: Option<Answers>,
    /// Bytes of weights that it keeps, as of its last answer.
    kept_bytes: u64,
    /// Bytes that it may keep now, if that is less.
    limit: u64,
    refused: bool,
    /// Of weights that are kept in the kernels' form, by [`class`], with the way of the rows from the card and back.
    kept: [Rate; CLASSES],
    /// The same of weights that are read out of the file.
    from_file: [Rate; CLASSES],
    /// Of bringing weights into the kernels' form.
    bringing: Rate,
    /// Decisions since one was tried for the sake of measuring.
    untried: u32,
    /// Decisions since something was left to the link.
    unlinked: u32,
    /// Layouts of the rows of small passes.
    layouts: HashMap<(ModelId, RowCounts), Arc<ScratchLayout>>,
    /// What was computed.
    pub(crate) done: Hosted,
}

fn class(rows: usize) -> usize {
    (rows.max(1).next_power_of_two().trailing_zeros() as usize).min(CLASSES - 1)
}

/// What the link does beside an answer of the host: whether it brings something, which is what is absent behind so many others
/// that the host will come to first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Beside {
    pub(crate) skipped: usize,
    pub(crate) upload: bool,
}

/// Bytes of a budget of this much memory.
pub(crate) fn bytes_of(budget: Option<Budget>, memory: u64) -> u64 {
    match budget {
        None => 0,
        Some(Budget::Bytes(bytes)) => bytes,
        Some(Budget::Percent(percent)) => {
            (memory as f64 * percent.clamp(0.0, 100.0) / 100.0) as u64
        }
    }
}

impl Offload {
    /// For a device of a kind: the host needs no other one.
    pub(crate) fn new(
        mode: Mode,
        threads: Option<NonZeroUsize>,
        keeps: Option<Budget>,
        kind: &str,
    ) -> Self {
        Self {
            mode: if kind == "host" { Mode::Never } else { mode },
            threads,
            keeps,
            host: None,
            kept_bytes: 0,
            limit: u64::MAX,
            refused: false,
            kept: [Rate::default(); CLASSES],
            from_file: [Rate::default(); CLASSES],
            bringing: Rate::default(),
            untried: 0,
            unlinked: 0,
            layouts: HashMap::new(),
            done: Hosted::default(),
        }
    }

    /// Whether a pass of so many rows may be answered by the host in part.
    pub(crate) fn takes_part(&self, rows: usize) -> bool {
        self.mode != Mode::Never && !self.refused && rows <= ROWS_MAX
    }

    /// Whether what is missing is never uploaded for a pass that the host can take part in.
    pub(crate) fn is_always(&self) -> bool {
        self.mode == Mode::Always
    }

    /// How the host has a segment of so many bytes.
    pub(crate) fn holds(&self, model: ModelId, segment: u32, bytes: u64) -> Held {
        match &self.host {
            Some(host) if host.keeps(u64::from(model.0), segment) => Held::Kept,
            Some(host) if !host.has_room(bytes) => Held::InFile,
            _ => Held::WithRoom,
        }
    }

    /// Seconds that the host takes for `bytes` of weights, if that is known.
    fn seconds(&self, held: Held, bytes: u64, rows_each: usize) -> Option<f64> {
        let class = class(rows_each);
        let a_byte = match held {
            Held::Kept => self.kept[class].seconds?,
            Held::WithRoom => self.kept[class].seconds? + self.bringing.seconds? / ANSWERS_EACH,
            Held::InFile => self.from_file[class].seconds?,
        };
        Some(a_byte * bytes as f64)
    }

    /// How many absent experts the host computes, those first that it keeps.
    pub(crate) fn share(&mut self, absent: Absent, link: Option<Pace>) -> usize {
        let Absent {
            n,
            kept,
            others,
            bytes,
            rows_each,
        } = absent;
        if self.mode == Mode::Always || n == 0 {
            return n;
        }
        let host = |held, n: usize| match n {
            0 => Some(0.0),
            n => self.seconds(held, bytes * n as u64, rows_each),
        };
        let link = |u: usize| link.map(|p| (bytes * u as u64) as f64 / p.upload_bytes_per_s);
        let ends = |h: usize| -> Option<f64> {
            let host = host(Held::Kept, h.min(kept))? + host(others, h.saturating_sub(kept))?;
            Some(host.max(link(n - h)?))
        };
        let known = ends(1).is_some() && self.samples(absent) >= SAMPLES_MIN;
        let best = (0..=n)
            .min_by(|&a, &b| f64::total_cmp(&ends(a).unwrap_or(0.0), &ends(b).unwrap_or(0.0)));
        let best = best.unwrap_or(0);
        // What was not measured, or not for long, is tried.
        self.untried = if best > 0 { 0 } else { self.untried + 1 };
        if best == 0 && (!known || self.untried >= TRY_EVERY) {
            self.untried = 0;
            return n.min(1);
        }
        self.unlinked = if best < n { 0 } else { self.unlinked + 1 };
        if self.unlinked >= LINK_EVERY && n > 1 {
            self.unlinked = 0;
            return n - 1;
        }
        best
    }

    /// Samples of what the first of some experts would be an answer of.
    fn samples(&self, absent: Absent) -> u32 {
        let class = class(absent.rows_each);
        match absent.others {
            _ if absent.kept > 0 => self.kept[class].samples,
            Held::InFile => self.from_file[class].samples,
            Held::Kept | Held::WithRoom => self.kept[class].samples.min(self.bringing.samples),
        }
    }

    /// What the link is to do while the host computes an absent segment of `bytes`; `None` if the host had better not.
    pub(crate) fn beside(
        &self,
        held: Held,
        bytes: u64,
        rows_each: usize,
        link: Option<Pace>,
    ) -> Option<Beside> {
        if self.mode == Mode::Always {
            return Some(Beside {
                skipped: 0,
                upload: false,
            });
        }
        let link = bytes as f64 / link?.upload_bytes_per_s;
        // A segment that has to be brought will be needed in each pass from now on, so its way there does not count.
        let held = match held {
            Held::WithRoom => Held::Kept,
            held => held,
        };
        // Not measured: tried.
        let host = self.seconds(held, bytes, rows_each).unwrap_or(link);
        // It saves its part of the link's time as long as it is not much slower than that.
        if host > 4.0 * link {
            return None;
        }
        Some(Beside {
            skipped: ((link / host).round() as usize).saturating_sub(1),
            upload: true,
        })
    }

    /// The layout of a small pass's rows.
    pub(crate) fn layout(
        &mut self,
        model: ModelId,
        plan: &Plan,
        counts: RowCounts,
    ) -> Arc<ScratchLayout> {
        if self.layouts.len() > 64 {
            self.layouts.clear();
        }
        let layout = self.layouts.entry((model, counts));
        let layout = layout.or_insert_with(|| Arc::new(plan.scratch(counts)));
        Arc::clone(layout)
    }

    /// Takes the host, to run a step on it; [`Offload::put_back`] is for after that.
    pub(crate) fn take(&mut self) -> Result<Answers, DeviceError> {
        if let Some(host) = self.host.take() {
            return Ok(host);
        }
        let mut made = Answers::new(self.threads, |memory| bytes_of(self.keeps, memory));
        self.refused = made.is_err();
        if let Ok(host) = &mut made {
            host.limit_kept(self.limit);
        }
        made
    }

    /// The host is back; the rows that its step left are there for [`Offload::read`] until the next.
    pub(crate) fn put_back(&mut self, host: Answers) {
        self.kept_bytes = host.kept_bytes();
        self.host = Some(host);
    }

    /// An answer took so long, from the reading of its rows to the sending of its results.
    pub(crate) fn took(&mut self, brought: Brought, rows_each: usize, took: Duration) {
        let in_form = brought.kept_bytes + brought.bytes;
        let computing = took.saturating_sub(brought.took);
        self.done.bytes += in_form + brought.file_bytes;
        self.done.took += computing;
        self.bringing.note(brought.took, brought.bytes);
        let class = class(rows_each);
        // What is of both kinds says nothing of either.
        if brought.file_bytes == 0 {
            self.kept[class].note(computing, in_form);
        } else if in_form == 0 {
            self.from_file[class].note(computing, brought.file_bytes);
        }
    }

    /// The first rows of a buffer after the last step.
    pub(crate) fn read(
        &mut self,
        layout: &ScratchLayout,
        buf: Buf,
        rows: &mut [f32],
    ) -> Result<(), DeviceError> {
        match &mut self.host {
            Some(host) => host.read(layout, buf, rows),
            None => Ok(()),
        }
    }

    /// Bytes of weights that the host keeps in its own form.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Lets the host keep so many bytes of weights from now on, if it may keep as many; memory
    /// beyond goes back.
    pub(crate) fn limit_kept(&mut self, bytes: u64) {
        self.limit = bytes;
        if let Some(host) = &mut self.host {
            host.limit_kept(bytes);
            self.kept_bytes = host.kept_bytes();
        }
    }

    /// A model is gone.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.layouts.retain(|(of, _), _| *of != model);
        if let Some(host) = &mut self.host {
            host.forget(u64::from(model.0));
            self.kept_bytes = host.kept_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offload(bytes_per_s: f64) -> Offload {
        let mut offload = Offload::new(Mode::Auto, None, None, "hip");
        let rate = Rate {
            seconds: Some(1.0 / bytes_per_s),
            samples: SAMPLES_MIN,
        };
        offload.kept = [rate; CLASSES];
        offload.from_file = [rate; CLASSES];
        offload.bringing = rate;
        offload
    }

    /// Experts of 40 MB, all kept.
    fn kept(n: usize) -> Absent {
        Absent {
            n,
            kept: n,
            others: Held::WithRoom,
            bytes: 40_000_000,
            rows_each: 1,
        }
    }

    fn link(upload_bytes_per_s: f64) -> Option<Pace> {
        Some(Pace {
            computed_bytes_per_s: 1e12,
            upload_bytes_per_s,
            ahead_bytes: 1 << 20,
        })
    }

    #[test]
    fn link_and_host_end_together() {
        // 40 MB each: 1 ms on the link, 0.5 ms on the host.
        let mut host = offload(80e9);
        assert_eq!(host.share(kept(6), link(40e9)), 4);
        assert_eq!(host.share(kept(1), link(40e9)), 1);
        assert_eq!(host.share(kept(0), link(40e9)), 0);
        // A slow host is left alone.
        assert_eq!(offload(1e9).share(kept(6), link(40e9)), 0);
    }

    #[test]
    fn what_is_not_kept_costs_its_bringing() {
        let mut host = offload(80e9);
        let others = |n, kept, others| Absent {
            kept,
            others,
            ..super::tests::kept(n)
        };
        // 1 ms each on the link, half of that on the host, which has to bring each for as long as eight answers take.
        host.bringing.seconds = Some(8.0 / 80e9);
        assert_eq!(host.share(others(6, 0, Held::WithRoom), link(40e9)), 3);
        // 2 of half a millisecond, and one of a whole.
        assert_eq!(host.share(others(5, 2, Held::WithRoom), link(40e9)), 3);
        host.from_file = [Rate {
            seconds: Some(1.0 / 10e9),
            samples: SAMPLES_MIN,
        }; CLASSES];
        // 4 ms out of the file.
        assert_eq!(host.share(others(6, 2, Held::InFile), link(40e9)), 2);
        assert_eq!(host.share(others(3, 0, Held::InFile), link(40e9)), 0);
    }

    #[test]
    fn answers_of_each_kind_are_measured_apart() {
        let mut host = Offload::new(Mode::Auto, None, None, "hip");
        let ms = Duration::from_millis;
        let kept = |kept_bytes| Brought {
            kept_bytes,
            ..Brought::default()
        };
        let brought = Brought {
            bytes: 1 << 20,
            took: ms(3),
            ..Brought::default()
        };
        host.took(brought, 1, ms(4));
        let a_byte = |ms: f64| Some(ms / 1e3);
        let mib = |held| host.seconds(held, 1 << 20, 1);
        assert_eq!(mib(Held::Kept), a_byte(1.0));
        assert_eq!(mib(Held::WithRoom), a_byte(1.0 + 3.0 / ANSWERS_EACH));
        assert_eq!(mib(Held::InFile), None);
        let file = Brought {
            file_bytes: 1 << 20,
            ..Brought::default()
        };
        host.took(file, 1, ms(2));
        host.took(
            Brought {
                kept_bytes: 1 << 20,
                ..file
            },
            1,
            ms(500),
        );
        host.took(kept(2 << 20), 1, ms(2));
        let mib = |held| host.seconds(held, 1 << 20, 1);
        assert_eq!(mib(Held::InFile), a_byte(2.0), "of both kinds: no sample");
        assert_eq!(mib(Held::Kept), a_byte(1.0));
    }

    #[test]
    fn what_was_never_measured_is_tried_once() {
        let mut host = Offload::new(Mode::Auto, None, None, "hip");
        let five = |kept| Absent {
            n: 5,
            kept,
            others: Held::WithRoom,
            bytes: 1 << 20,
            rows_each: 1,
        };
        assert_eq!(host.share(five(0), link(40e9)), 1);
        assert_eq!(host.share(five(5), link(40e9)), 1);
        let one = Beside {
            skipped: 0,
            upload: true,
        };
        assert_eq!(host.beside(Held::InFile, 1 << 20, 1, link(40e9)), Some(one));
        assert_eq!(host.beside(Held::InFile, 1 << 20, 1, None), None);
        host.mode = Mode::Always;
        assert_eq!(host.share(five(0), None), 5);
    }

    #[test]
    fn a_host_that_was_slow_is_tried_again() {
        let mut host = offload(1e9);
        let tried = (0..2 * TRY_EVERY).filter(|_| host.share(kept(6), link(40e9)) > 0);
        assert_eq!(tried.count(), 2);
    }

    #[test]
    fn a_link_that_was_slow_is_tried_again() {
        let mut host = offload(80e9);
        let uploads = (0..2 * LINK_EVERY).map(|_| 6 - host.share(kept(6), link(1e9)));
        assert_eq!(uploads.sum::<usize>(), 2);
    }

    #[test]
    fn the_link_brings_what_the_host_comes_to_later() {
        let skipped = |bytes_per_s| {
            let beside = offload(bytes_per_s).beside(Held::Kept, 40_000_000, 1, link(40e9))?;
            assert!(beside.upload);
            Some(beside.skipped)
        };
        assert_eq!(skipped(90e9), Some(1));
        assert_eq!(skipped(40e9), Some(0));
        assert_eq!(skipped(20e9), Some(0));
        assert_eq!(skipped(5e9), None);
    }

    #[test]
    fn the_host_needs_no_other_host() {
        assert!(!Offload::new(Mode::Always, None, None, "host").takes_part(1));
        assert!(Offload::new(Mode::Auto, None, None, "cuda").takes_part(ROWS_MAX));
        assert!(!Offload::new(Mode::Auto, None, None, "cuda").takes_part(ROWS_MAX + 1));
    }
}
