//! The second answer to a miss: what is not on the card is computed on the host, out of the file, beside what the link brings.
//!
//! Which answer a miss gets follows from what was measured: the time of an upload by the link's rate, the time of the host by
//! its own rate for as many rows and bytes (`rates.rs`), which is another one for weights that it keeps in its kernels' form, for
//! those that it has to bring into it first, and for those that it has no room for. Of the experts that a layer lacks some are
//! uploaded and some computed, so that both end together; those that were used most are uploaded. Of the ordered segments that a
//! pass lacks, one is on its way and the host computes those before it.
//!
//! What is not done for being slow is tried again now and then, and more than once: threads that rested take long to wake, and a
//! single answer of theirs says nothing of those that would follow.
//!
//! *Invariant:* nothing is computed on the host that touches keys, values or states ([`Answers::can_run`]).

mod rates;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::host::{Answers, Brought};
use rocmforge_device::{Buf, Error as DeviceError, Pace, Plan, ScratchLayout};
use rocmforge_ops::RowCounts;
use rocmforge_tensor_cache::ModelId;

use crate::api::{Budget, Hosted, Offload as Mode};
use rates::{Rate, Rates};

/// Most rows of a pass that the host computes a part of.
pub(crate) const ROWS_MAX: usize = 64;

/// After so many decisions it is measured again what is not done for being slow: any answers, or larger ones.
const TRY_EVERY: u32 = 512;

/// The same of segments of dense layers, which take long on a slow host.
const TRY_SEGMENT_EVERY: u32 = 4096;

/// After so many decisions without an upload there is one: the link's rate is known by uploads alone, and it was slower while the
/// host read the same memory.
const LINK_EVERY: u32 = 16;

/// Answers that share the cost of bringing an expert into the host's form: what is brought is kept for as long as it is asked
/// for now and then, and each of its answers is one upload less.
const ANSWERS_EACH: f64 = 8.0;

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
    /// Of weights that are kept in the kernels' form, with the way of the rows from the card and back.
    kept: Rates,
    /// The same of weights that are read out of the file.
    from_file: Rates,
    /// Of bringing weights into the kernels' form.
    bringing: Rate,
    /// Decisions since something was tried for the sake of measuring.
    untried: u32,
    /// Segments that were no affair of the host's since one was tried.
    refused_segments: u32,
    /// Decisions since something was left to the link.
    unlinked: u32,
    /// Layouts of the rows of small passes.
    layouts: HashMap<(ModelId, RowCounts), Arc<ScratchLayout>>,
    /// What was computed.
    pub(crate) done: Hosted,
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
            kept: Rates::default(),
            from_file: Rates::default(),
            bringing: Rate::default(),
            untried: 0,
            refused_segments: 0,
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
        match held {
            Held::Kept => self.kept.seconds(rows_each, bytes),
            Held::WithRoom => {
                let kept = self.kept.seconds(rows_each, bytes)?;
                Some(kept + self.bringing.a_byte()? * bytes as f64 / ANSWERS_EACH)
            }
            Held::InFile => self.from_file.seconds(rows_each, bytes),
        }
    }

    /// Seconds that the host takes for `n` of some absent experts, those first that it keeps.
    fn seconds_of(&self, absent: Absent, n: usize) -> Option<f64> {
        let of = |n: usize| absent.bytes * n as u64;
        let rows = absent.rows_each;
        let others = n.saturating_sub(absent.kept);
        if n == 0 {
            return Some(0.0);
        }
        if others == 0 {
            return self.seconds(Held::Kept, of(n), rows);
        }
        match absent.others {
            // In one answer with those that it keeps.
            Held::Kept | Held::WithRoom => {
                let kept = self.kept.seconds(rows, of(n))?;
                Some(kept + self.bringing.a_byte()? * of(others) as f64 / ANSWERS_EACH)
            }
            Held::InFile => {
                let kept = match absent.kept {
                    0 => 0.0,
                    kept => self.seconds(Held::Kept, of(kept), rows)?,
                };
                Some(kept + self.seconds(Held::InFile, of(others), rows)?)
            }
        }
    }

    /// How many absent experts the host computes, those first that it keeps.
    pub(crate) fn share(&mut self, absent: Absent, link: Option<Pace>) -> usize {
        let Absent {
            n,
            bytes,
            rows_each,
            ..
        } = absent;
        if self.mode == Mode::Always || n == 0 {
            return n;
        }
        let link = |u: usize| link.map(|p| (bytes * u as u64) as f64 / p.upload_bytes_per_s);
        let known = self.rates_of(absent).are_known(rows_each);
        let ends = |h: usize| Some(self.seconds_of(absent, h)?.max(link(n - h)?));
        let best = (0..=n)
            .min_by(|&a, &b| f64::total_cmp(&ends(a).unwrap_or(0.0), &ends(b).unwrap_or(0.0)));
        let best = best.unwrap_or(0);
        self.untried += 1;
        if self.untried >= TRY_EVERY {
            self.untried = 0;
            if absent.others == Held::WithRoom && best <= absent.kept {
                self.bringing = Rate::default();
            }
            let rates = self.rates_of(absent);
            match best {
                0 => rates.forget(rows_each),
                best => rates.forget_larger(rows_each, bytes * best as u64),
            }
        }
        // What was not measured, or not for long, is tried.
        if best == 0 && !known {
            return n.min(1);
        }
        self.unlinked = if best < n { 0 } else { self.unlinked + 1 };
        if self.unlinked >= LINK_EVERY && n > 1 {
            self.unlinked = 0;
            return n - 1;
        }
        best
    }

    /// What is known of answers of the first of some experts.
    fn rates_of(&mut self, absent: Absent) -> &mut Rates {
        match absent.others {
            Held::InFile if absent.kept == 0 => &mut self.from_file,
            _ => &mut self.kept,
        }
    }

    /// What the link is to do while the host computes an absent segment of `bytes`; `None` if the host had better not.
    pub(crate) fn beside(
        &mut self,
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
            self.refused_segments += 1;
            if self.refused_segments >= TRY_SEGMENT_EVERY {
                self.refused_segments = 0;
                let rates = match held {
                    Held::InFile => &mut self.from_file,
                    Held::Kept | Held::WithRoom => &mut self.kept,
                };
                rates.forget(rows_each);
            }
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
        // What is of both kinds says nothing of either.
        if brought.file_bytes == 0 {
            self.kept.note(rows_each, computing, in_form);
        } else if in_form == 0 {
            self.from_file
                .note(rows_each, computing, brought.file_bytes);
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
        offload.kept = Rates::all(1.0 / bytes_per_s);
        offload.from_file = Rates::all(1.0 / bytes_per_s);
        set(&mut offload.bringing, 1.0 / bytes_per_s);
        offload
    }

    /// So many seconds a byte from now on.
    fn set(rate: &mut Rate, seconds: f64) {
        *rate = Rate::default();
        rate.note(Duration::from_secs_f64(seconds * 1e9), 1_000_000_000);
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
        set(&mut host.bringing, 8.0 / 80e9);
        assert_eq!(host.share(others(6, 0, Held::WithRoom), link(40e9)), 3);
        // 2 of half a millisecond, and one of a whole.
        assert_eq!(host.share(others(5, 2, Held::WithRoom), link(40e9)), 3);
        host.from_file = Rates::all(1.0 / 10e9);
        // 4 ms out of the file.
        assert_eq!(host.share(others(6, 2, Held::InFile), link(40e9)), 2);
        assert_eq!(host.share(others(3, 0, Held::InFile), link(40e9)), 0);
    }

    #[test]
    fn bringing_that_was_slow_is_tried_again() {
        let mut host = offload(80e9);
        let five = |kept| Absent {
            n: 5,
            ..super::tests::kept(kept)
        };
        set(&mut host.bringing, 1.0);
        let shares = |host: &mut Offload, kept| {
            let shares = (0..TRY_EVERY + 1).map(|_| host.share(five(kept), link(40e9)));
            let mut shares: Vec<usize> = shares.collect();
            shares.dedup();
            shares
        };
        assert_eq!(shares(&mut host, 2), [2, 3]);
        set(&mut host.bringing, 1.0);
        assert_eq!(shares(&mut host, 0), [0, 1]);
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
        let mut answers = 0;
        for _ in 0..3 * TRY_EVERY {
            let h = host.share(kept(6), link(40e9));
            answers += h;
            if h > 0 {
                host.kept.note(
                    1,
                    Duration::from_millis(40 * h as u64),
                    40_000_000 * h as u64,
                );
            }
        }
        // Four at first, and four every so many decisions; the fifth finds out.
        assert!((8..=24).contains(&answers), "{answers}");
        let mut slow = offload(1e9);
        let tried = (0..2 * TRY_SEGMENT_EVERY + 2).filter(|_| {
            let beside = slow.beside(Held::InFile, 40_000_000, 1, link(40e9));
            if beside.is_some() {
                slow.from_file
                    .note(1, Duration::from_millis(40), 40_000_000);
            }
            beside.is_some()
        });
        assert_eq!(tried.count(), 2);
    }

    /// A host whose answers take a time of their own.
    struct Simulated {
        /// Seconds of any answer.
        each: f64,
        bytes_per_s: f64,
        /// How many times as long one takes after a rest, when threads sleep.
        cold: f64,
    }

    impl Simulated {
        fn seconds(&self, bytes: u64) -> f64 {
            self.each + bytes as f64 / self.bytes_per_s
        }
    }

    /// Layers of a mixture that miss 5 to 8 experts of 2.5 MB each, beside a link of 40 GB/s: the seconds of the last half, and
    /// of the best shares.
    fn layers(host: &Simulated) -> (f64, f64) {
        let bytes = 2_500_000;
        let of_link = |u: usize| (bytes * u as u64) as f64 / 40e9;
        let mut offload = Offload::new(Mode::Auto, None, None, "cuda");
        let (mut took, mut best) = (0.0, 0.0);
        let (mut answers, mut rested, mut random) = (0, 100, 7u64);
        for layer in 0..8 * TRY_EVERY {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let n = 5 + (random >> 33) as usize % 4;
            let absent = Absent {
                n,
                bytes,
                ..kept(n)
            };
            let h = offload.share(absent, link(40e9));
            let all = bytes * h as u64;
            let mut seconds = of_link(n - h);
            rested += 1;
            if h > 0 {
                let mut answer = host.seconds(all);
                if rested > 4 {
                    answer *= host.cold;
                }
                seconds = seconds.max(answer);
                (answers, rested) = (answers + 1, 0);
                // The system needed a core: which says nothing of the next one.
                if answers % 64 == 0 {
                    answer += 5e-3;
                }
                offload.kept.note(1, Duration::from_secs_f64(answer), all);
            }
            if layer >= 4 * TRY_EVERY {
                let ends = |h: usize| match h {
                    0 => of_link(n),
                    h => host.seconds(bytes * h as u64).max(of_link(n - h)),
                };
                took += seconds;
                best += (0..=n).map(ends).fold(f64::INFINITY, f64::min);
            }
        }
        (took, best)
    }

    #[test]
    fn answers_come_near_the_best_shares_whatever_an_answer_costs() {
        for each in [0.0, 50e-6, 100e-6, 200e-6] {
            for bytes_per_s in [2e9, 10e9, 40e9, 80e9, 160e9] {
                for cold in [1.0, 5.0, 20.0] {
                    let (took, best) = layers(&Simulated {
                        each,
                        bytes_per_s,
                        cold,
                    });
                    let ratio = took / best;
                    assert!(
                        ratio < 1.2,
                        "{each} s, {bytes_per_s} bytes/s, {cold}: {ratio}"
                    );
                }
            }
        }
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
