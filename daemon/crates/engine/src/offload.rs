//! The second answer to a miss: what is not on the card is computed on the host, out of the file, beside what the link brings.
//!
//! Which answer a miss gets follows from what was measured: the time of an upload by the link's rate, the time of the host by
//! its own rate for as many rows. Of the experts that a layer lacks some are uploaded and some computed, so that both end
//! together; those that were used most are uploaded. Of the ordered segments that a pass lacks, one is on its way and the host
//! computes those before it.
//!
//! *Invariant:* nothing is computed on the host that touches keys, values or states ([`Answers::can_run`]).

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::host::Answers;
use rocmforge_device::{Batch, BoundStep, Buf, Error as DeviceError, Pace, Plan, ScratchLayout};
use rocmforge_gguf::MappedFile;
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

/// Classes of answers by the rows that a matrix is multiplied with: one for each power of two.
const CLASSES: usize = 8;

/// The host beside a card.
#[derive(Debug)]
pub(crate) struct Offload {
    mode: Mode,
    threads: Option<NonZeroUsize>,
    /// Weights that the host may keep in its own form.
    keeps: Option<Budget>,
    /// Made when it is needed first; the error that it could not be.
    host: Option<Answers>,
    refused: bool,
    /// Seconds a byte of weights, by [`class`], with the way of the rows from the card and back.
    pace: [Option<f64>; CLASSES],
    /// Samples of each.
    samples: [u32; CLASSES],
    /// Decisions since one was tried for the sake of measuring.
    untried: u32,
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

fn bytes_of(budget: Option<Budget>, memory: u64) -> u64 {
    match budget {
        None => 0,
        Some(Budget::Bytes(bytes)) => bytes,
        Some(Budget::Percent(percent)) => {
            (memory as f64 * percent.clamp(0.0, 100.0) / 100.0) as u64
        }
    }
}

/// What is to be computed.
pub(crate) struct Work<'a> {
    pub(crate) model: ModelId,
    pub(crate) plan: &'a Plan,
    pub(crate) file: &'a Arc<MappedFile>,
    /// The segment of each bound of the step.
    pub(crate) segments: &'a [u32],
    pub(crate) step: BoundStep<'a>,
    pub(crate) batch: Batch<'a>,
    /// Rows of the buffers that it reads.
    pub(crate) given: &'a [(Buf, &'a [f32])],
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
            refused: false,
            pace: [None; CLASSES],
            samples: [0; CLASSES],
            untried: 0,
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

    /// Seconds that the host takes for `bytes` of weights, if that is known.
    fn seconds(&self, bytes: u64, rows_each: usize) -> Option<f64> {
        let a_byte = self.pace[class(rows_each)]?;
        Some(a_byte * bytes as f64)
    }

    /// How many of `n` absent experts of `bytes` each the host computes.
    pub(crate) fn share(
        &mut self,
        n: usize,
        bytes: u64,
        rows_each: usize,
        link: Option<Pace>,
    ) -> usize {
        if self.mode == Mode::Always || n == 0 {
            return n;
        }
        let host = |h: usize| self.seconds(bytes * h as u64, rows_each);
        let link = |u: usize| link.map(|p| (bytes * u as u64) as f64 / p.upload_bytes_per_s);
        let ends = |h: usize| -> Option<f64> {
            let host = if h == 0 { 0.0 } else { host(h)? };
            Some(host.max(link(n - h)?))
        };
        let known = self.samples[class(rows_each)] >= SAMPLES_MIN && ends(1).is_some();
        let best = (0..=n)
            .min_by(|&a, &b| f64::total_cmp(&ends(a).unwrap_or(0.0), &ends(b).unwrap_or(0.0)));
        let best = best.unwrap_or(0);
        // What was not measured, or not for long, is tried.
        self.untried = if best > 0 { 0 } else { self.untried + 1 };
        if best == 0 && (!known || self.untried >= TRY_EVERY) {
            self.untried = 0;
            return n.min(1);
        }
        best
    }

    /// What the link is to do while the host computes an absent segment of `bytes`; `None` if the host had better not.
    pub(crate) fn beside(
        &self,
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
        // Not measured: tried.
        let host = self.seconds(bytes, rows_each).unwrap_or(link);
        // It saves its part of the link's time as long as it is not much slower than that.
        if host > 4.0 * link {
            return None;
        }
        Some(Beside {
            skipped: ((link / host).round() as usize).saturating_sub(1),
            upload: true,
        })
    }

    /// Runs a step on the host; the rows that it leaves are there for [`Offload::read`] until the next.
    /// Tells besides how long weights were brought that are kept from now on.
    pub(crate) fn run(
        &mut self,
        work: &Work<'_>,
    ) -> Result<(Arc<ScratchLayout>, Duration), DeviceError> {
        let counts = work.batch.counts();
        let key = (work.model, counts);
        if self.layouts.len() > 64 {
            self.layouts.clear();
        }
        let layout = self.layouts.entry(key);
        let layout = layout.or_insert_with(|| Arc::new(work.plan.scratch(counts)));
        let layout = Arc::clone(layout);
        let host = match &mut self.host {
            Some(host) => host,
            None => match Answers::new(self.threads, |memory| bytes_of(self.keeps, memory)) {
                Ok(host) => self.host.insert(host),
                Err(error) => {
                    self.refused = true;
                    return Err(error);
                }
            },
        };
        let segments = (u64::from(work.model.0), work.segments);
        let brought = host.run(
            work.file,
            segments,
            &work.step,
            &layout,
            &work.batch,
            work.given,
        )?;
        Ok((layout, brought))
    }

    /// An answer took so long, from the reading of its rows to the sending of its results.
    pub(crate) fn took(&mut self, bytes: u64, rows_each: usize, took: Duration) {
        self.done.bytes += bytes;
        self.done.took += took;
        let sample = took.as_secs_f64() / bytes.max(1) as f64;
        let class = class(rows_each);
        self.samples[class] = self.samples[class].saturating_add(1);
        let early = self.samples[class] <= SAMPLES_MIN;
        let pace = &mut self.pace[class];
        *pace = Some(match *pace {
            None => sample,
            Some(before) if early => before.min(sample),
            Some(before) => before + (sample - before) * WEIGHT,
        });
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

    /// A model is gone.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.layouts.retain(|(of, _), _| *of != model);
        if let Some(host) = &mut self.host {
            host.forget(u64::from(model.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offload(bytes_per_s: f64) -> Offload {
        let mut offload = Offload::new(Mode::Auto, None, None, "hip");
        offload.pace = [Some(1.0 / bytes_per_s); CLASSES];
        offload.samples = [SAMPLES_MIN; CLASSES];
        offload
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
        assert_eq!(host.share(6, 40_000_000, 1, link(40e9)), 4);
        assert_eq!(host.share(1, 40_000_000, 1, link(40e9)), 1);
        assert_eq!(host.share(0, 40_000_000, 1, link(40e9)), 0);
        // A slow host is left alone.
        assert_eq!(offload(1e9).share(6, 40_000_000, 1, link(40e9)), 0);
    }

    #[test]
    fn what_was_never_measured_is_tried_once() {
        let mut host = Offload::new(Mode::Auto, None, None, "hip");
        assert_eq!(host.share(5, 1 << 20, 1, link(40e9)), 1);
        let one = Beside {
            skipped: 0,
            upload: true,
        };
        assert_eq!(host.beside(1 << 20, 1, link(40e9)), Some(one));
        assert_eq!(host.beside(1 << 20, 1, None), None);
        host.mode = Mode::Always;
        assert_eq!(host.share(5, 1 << 20, 1, None), 5);
    }

    #[test]
    fn a_host_that_was_slow_is_tried_again() {
        let mut host = offload(1e9);
        let tried = (0..2 * TRY_EVERY).filter(|_| host.share(6, 40_000_000, 1, link(40e9)) > 0);
        assert_eq!(tried.count(), 2);
    }

    #[test]
    fn the_link_brings_what_the_host_comes_to_later() {
        let skipped = |bytes_per_s| {
            let beside = offload(bytes_per_s).beside(40_000_000, 1, link(40e9))?;
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
