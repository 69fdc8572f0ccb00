//! The second answer to a miss: what is not on the card is computed on the host, out of the file,
//! beside what the link brings.
//!
//! Which answer a miss gets follows from what was measured: the time of an upload by the link's
//! rate, the time of the host by its own rate for as many rows and bytes (`rates.rs`), which is
//! another one for weights that it keeps in its kernels' form, and for those that it has no room
//! for. Of the experts that a layer lacks some are uploaded and some computed, so that both end
//! together; those that were used most are uploaded. Where the host would take more of them if it
//! kept more, some of those that it left are brought into its kernels' form beside the passes.
//! What was computed is uploaded later, when nobody waits for the link, so that nearly as many are
//! found there as if all had been uploaded. Of the ordered segments that a pass lacks, the host
//! computes those that it comes to before the link could have brought them; the link goes on
//! meanwhile with the first that it has there in time (`timetable.rs`).
//!
//! What is not done for being slow is tried again now and then, and more than once: threads that
//! rested take long to wake, and a single answer of theirs says nothing of those that would follow.
//!
//! *Invariant:* nothing is computed on the host that touches keys, values or
//! states ([`Answers::can_run`]).

mod misses;
mod outcomes;
mod rates;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::{Buf, Error as DeviceError, Plan, ScratchLayout, SegmentLayout, Throughput};
use rocmforge_device_cpu::{Answers, Brought};
use rocmforge_gguf::MappedFile;
use rocmforge_ops::{RowCounts, Step};
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::api::{Budget, Hosted, When as Mode};
use crate::store::timetable::UPLOADS_AHEAD;
use outcomes::Outcomes;
use rates::Rates;

/// Maximum number of rows of a pass that the host computes a part of.
pub(crate) const ROWS_MAX: usize = 64;

/// After so many decisions it is measured again what is not done for being slow:
/// any answers, or larger ones.
const TRY_EVERY: u32 = 512;

/// After so many decisions CPU compute of segments of dense layers, which takes long on a slow CPU,
/// is measured again.
const TRY_SEGMENT_EVERY: u32 = 4096;

/// Maximum number of experts that are remembered as computed by the host.
const LEFT_MAX: usize = 64;

/// After so many decisions without an upload there is one: the link's rate is known by uploads
/// alone, and it was slower while the host read the same memory.
const LINK_EVERY: u32 = 16;

/// How the host has a segment's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CpuWeights {
    /// The weights are kept in the CPU kernels' layout.
    Kept,
    /// The weights are in the file only, but there is room to keep them.
    WithRoom,
    /// The weights are in the file only.
    InFile,
}

/// Absent experts of one step, of which the host may compute some.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Absent {
    pub(crate) n: usize,
    /// Number of absent experts whose weights are [`CpuWeights::Kept`].
    pub(crate) kept: usize,
    /// How the CPU has the weights of the other experts.
    pub(crate) others: CpuWeights,
    /// Bytes of each.
    pub(crate) bytes: u64,
    /// Rows that each is multiplied with.
    pub(crate) rows_each: usize,
    /// Whether the pass has one row.
    pub(crate) one_row: bool,
}

/// What the host does about a step's absent experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    /// Number of absent experts that the CPU computes.
    pub(crate) computes: usize,
    /// Number of missing experts, if the layer's time is to be recorded as a measurement for that
    /// number.
    pub(crate) timed: Option<usize>,
    /// Whether the CPU would compute more experts if more of their weights were kept.
    pub(crate) wants_more: bool,
}

/// The host beside a card.
#[derive(Debug)]
pub(crate) struct CpuCompute {
    mode: Mode,
    threads: Option<NonZeroUsize>,
    /// Budget for weights that the CPU keeps in its own layout.
    keeps: Option<Budget>,
    /// The CPU's part; made when needed, and taken out while it computes.
    host: Option<Answers>,
    /// Bytes of weights that the CPU keeps, as of its last computation.
    kept_bytes: u64,
    /// Current limit for these weights in bytes, if it is lower.
    limit: u64,
    refused: bool,
    /// Of weights that are kept in the kernels' form, with the way of the rows from the card and
    /// back.
    kept: Rates,
    /// Measured rates with weights that are read from the file.
    from_file: Rates,
    /// What layers of models took, by the share of the host.
    outcomes: HashMap<ModelId, Outcomes>,
    /// Decisions since something was tried for the sake of measuring.
    untried: u32,
    /// Segments that were no affair of the host's since one was tried.
    refused_segments: u32,
    /// Decisions since something was left to the link.
    unlinked: u32,
    /// Layouts of the rows of small passes.
    layouts: HashMap<(ModelId, bool, RowCounts), Arc<ScratchLayout>>,
    /// Segments that the CPU can compute, by model.
    computable_on_cpu: HashMap<ModelId, Arc<[bool]>>,
    /// Absent experts that the host computed, the latest last.
    left: VecDeque<SegmentId>,
    /// Counts of what the CPU computed.
    pub(crate) done: Hosted,
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

impl CpuCompute {
    /// Beside a device; `is_cpu`: which is the CPU itself and needs no other one.
    pub(crate) fn new(
        mode: Mode,
        threads: Option<NonZeroUsize>,
        keeps: Option<Budget>,
        is_cpu: bool,
    ) -> Self {
        Self {
            mode: if is_cpu { Mode::Never } else { mode },
            threads,
            keeps,
            host: None,
            kept_bytes: 0,
            limit: u64::MAX,
            refused: false,
            kept: Rates::default(),
            from_file: Rates::default(),
            outcomes: HashMap::new(),
            untried: 0,
            refused_segments: 0,
            unlinked: 0,
            layouts: HashMap::new(),
            computable_on_cpu: HashMap::new(),
            left: VecDeque::new(),
            done: Hosted::default(),
        }
    }

    /// Whether the CPU may compute a part of a pass with this number of rows.
    pub(crate) fn takes_part(&self, rows: usize) -> bool {
        self.mode != Mode::Never && !self.refused && rows <= ROWS_MAX
    }

    /// Whether what is missing is never uploaded for a pass that the host can take part in.
    pub(crate) fn is_always(&self) -> bool {
        self.mode == Mode::Always
    }

    /// How the CPU has the weights of a segment of `bytes` bytes.
    pub(crate) fn holds(&self, model: ModelId, segment: u32, bytes: u64) -> CpuWeights {
        match &self.host {
            Some(host) if host.keeps(u64::from(model.0), segment) => CpuWeights::Kept,
            Some(host) if !host.has_room(bytes) => CpuWeights::InFile,
            _ => CpuWeights::WithRoom,
        }
    }

    /// Seconds that the host takes for `bytes` of weights, if that is known.
    fn seconds(&self, held: CpuWeights, bytes: u64, rows_each: usize) -> Option<f64> {
        let rates = match held {
            CpuWeights::Kept | CpuWeights::WithRoom => &self.kept,
            CpuWeights::InFile => &self.from_file,
        };
        rates.seconds(rows_each, bytes)
    }

    /// Seconds that the host takes for `n` of some absent experts, those first that it keeps, and
    /// as if it kept those that it has room for.
    fn seconds_of(&self, absent: Absent, n: usize) -> Option<f64> {
        let Absent {
            bytes, rows_each, ..
        } = absent;
        let kept = match absent.others {
            CpuWeights::InFile => absent.kept.min(n),
            CpuWeights::Kept | CpuWeights::WithRoom => n,
        };
        let of = |held: CpuWeights, n: usize| match n {
            0 => Some(0.0),
            n => self.seconds(held, bytes * n as u64, rows_each),
        };
        Some(of(CpuWeights::Kept, kept)? + of(CpuWeights::InFile, n - kept)?)
    }

    /// How many of a model's absent experts the host computes, those first that it keeps.
    pub(crate) fn share(
        &mut self,
        model: ModelId,
        absent: Absent,
        link: Option<Throughput>,
    ) -> Share {
        let Absent {
            n,
            bytes,
            rows_each,
            ..
        } = absent;
        if self.mode == Mode::Always || n == 0 {
            return Share {
                computes: n,
                timed: None,
                wants_more: false,
            };
        }
        let link = |u: usize| link.map(|p| (bytes * u as u64) as f64 / p.upload_bytes_per_s);
        let known = self.rates_of(absent).are_known(rows_each);
        let ends = |h: usize| Some(self.seconds_of(absent, h)?.max(link(n - h)?));
        let best_of = |most: usize| {
            let best = (0..=most)
                .min_by(|&a, &b| f64::total_cmp(&ends(a).unwrap_or(0.0), &ends(b).unwrap_or(0.0)));
            best.unwrap_or(0)
        };
        // To bring the others first would hold up this layer for longer than the link does.
        let (most, wants_more) = match absent.others {
            CpuWeights::WithRoom => {
                let wants_more = !known || best_of(n) > absent.kept;
                (absent.kept, wants_more && absent.kept < n)
            }
            CpuWeights::Kept | CpuWeights::InFile => (n, false),
        };
        let best = best_of(most);
        let is_timed = absent.one_row && absent.others != CpuWeights::InFile;
        let computes = |computes: usize| Share {
            computes,
            timed: is_timed.then_some(n),
            wants_more,
        };
        self.untried += 1;
        if self.untried >= TRY_EVERY {
            self.untried = 0;
            let rates = self.rates_of(absent);
            match best {
                0 if most == 0 => {}
                0 => rates.forget(rows_each),
                best => rates.forget_larger(rows_each, bytes * best as u64),
            }
        }
        // What was not measured, or not for long, is tried.
        if best == 0 && !known {
            return computes(most.min(1));
        }
        let best = match is_timed {
            true => {
                let outcomes = self.outcomes.entry(model).or_insert_with(Outcomes::new);
                outcomes.best(n, best, most)
            }
            false => best,
        };
        self.unlinked = if best < n { 0 } else { self.unlinked + 1 };
        if self.unlinked >= LINK_EVERY && n > 1 {
            self.unlinked = 0;
            return computes(n - 1);
        }
        computes(best)
    }

    /// A layer of a pass of one row, which lacked `n` experts, of which the host computed some,
    /// took so long with all that came before the next one.
    pub(crate) fn layer_took(&mut self, model: ModelId, n: usize, computed: usize, took: Duration) {
        if let Some(outcomes) = self.outcomes.get_mut(&model) {
            outcomes.note(n, computed, took);
        }
    }

    /// What is known of answers of the first of some experts.
    fn rates_of(&mut self, absent: Absent) -> &mut Rates {
        match absent.others {
            CpuWeights::InFile if absent.kept == 0 => &mut self.from_file,
            _ => &mut self.kept,
        }
    }

    /// Seconds that the host takes for an absent segment of `bytes`; `None` if it had better not.
    ///
    /// Nothing is gained by an answer that takes so long that the link alone had brought this
    /// segment too, behind those that it can be given meanwhile.
    pub(crate) fn answer(
        &self,
        held: CpuWeights,
        bytes: u64,
        rows_each: usize,
        link: Option<Throughput>,
    ) -> Option<f64> {
        let link = link.map(|pace| bytes as f64 / pace.upload_bytes_per_s);
        // A segment that has to be brought will be needed in each pass from now on, so its
        // way there does not count.
        let host = self.seconds(held, bytes, rows_each);
        if self.mode == Mode::Always {
            return Some(host.or(link).unwrap_or(0.0));
        }
        let link = link?;
        let rates = match held {
            CpuWeights::InFile => &self.from_file,
            CpuWeights::Kept | CpuWeights::WithRoom => &self.kept,
        };
        // The first answers are slow: threads start, and memory is touched.
        if !rates.are_known(rows_each) {
            return Some(host.map_or(link, |host| host.min(link)));
        }
        host.filter(|&host| host <= (UPLOADS_AHEAD as f64 + 0.5) * link)
    }

    /// [`CpuCompute::answer`] of a segment that the pass has come to. What the host leaves is
    /// tried again now and then.
    pub(crate) fn answers(
        &mut self,
        held: CpuWeights,
        bytes: u64,
        rows_each: usize,
        link: Option<Throughput>,
    ) -> Option<f64> {
        let seconds = self.answer(held, bytes, rows_each, link);
        if seconds.is_none() && link.is_some() {
            self.refused_segments += 1;
            if self.refused_segments >= TRY_SEGMENT_EVERY {
                self.refused_segments = 0;
                let rates = match held {
                    CpuWeights::InFile => &mut self.from_file,
                    CpuWeights::Kept | CpuWeights::WithRoom => &mut self.kept,
                };
                rates.forget(rows_each);
            }
        }
        seconds
    }

    /// The host computed an expert that is absent still.
    pub(crate) fn leaves(&mut self, segment: SegmentId) {
        if self.is_always() {
            return;
        }
        self.left.retain(|before| *before != segment);
        if self.left.len() == LEFT_MAX {
            self.left.pop_front();
        }
        self.left.push_back(segment);
    }

    /// The latest of a model's experts that the host computed; it is none of them any more.
    pub(crate) fn take_left(&mut self, model: ModelId) -> Option<SegmentId> {
        let at = self.left.iter().rposition(|s| s.model == model)?;
        self.left.remove(at)
    }

    /// Which segments of a model the CPU can compute, by segment number.
    pub(crate) fn computable_on_cpu(&mut self, model: ModelId, plan: &Plan) -> Arc<[bool]> {
        let found = self.computable_on_cpu.entry(model);
        Arc::clone(found.or_insert_with(|| computable(plan)))
    }

    /// The layout of a small pass's rows.
    pub(crate) fn layout(
        &mut self,
        (model, adapted): (ModelId, bool),
        plan: &Plan,
        counts: RowCounts,
    ) -> Arc<ScratchLayout> {
        if self.layouts.len() > 64 {
            self.layouts.clear();
        }
        let layout = self.layouts.entry((model, adapted, counts));
        let layout = layout.or_insert_with(|| Arc::new(plan.scratch(counts)));
        Arc::clone(layout)
    }

    /// Takes the host, to run a step on it; [`CpuCompute::put_back`] is for after that.
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

    /// Takes the CPU's worker back after a step. Its rows can be read by [`CpuCompute::read`] until
    /// the next step.
    pub(crate) fn put_back(&mut self, host: Answers) {
        self.kept_bytes = host.kept_bytes();
        self.host = Some(host);
    }

    /// Notes the time of a computation on the CPU, from the arrival of its rows to the upload of
    /// its results.
    pub(crate) fn took(&mut self, brought: Brought, rows_each: usize, took: Duration) {
        let in_form = brought.kept_bytes + brought.bytes;
        let computing = took.saturating_sub(brought.took);
        self.done.bytes += in_form + brought.file_bytes;
        self.done.took += computing;
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

    /// Notes what was brought into the host's form beside the passes.
    pub(crate) fn collect(&mut self) {
        if let Some(host) = &mut self.host {
            host.collect();
        }
    }

    /// Begins to bring the first of some absent experts that the host does not keep into its form,
    /// beside the passes.
    pub(crate) fn keep_later(
        &mut self,
        file: &Arc<MappedFile>,
        model: ModelId,
        segments: impl Iterator<Item = (u32, Arc<SegmentLayout>)>,
    ) -> Result<(), DeviceError> {
        let mut host = self.take()?;
        let mut begun = Ok(());
        for (segment, layout) in segments {
            begun = begun.and_then(|()| {
                let key = (u64::from(model.0), segment);
                host.keep_later(file, key, &layout)
            });
        }
        self.put_back(host);
        begun
    }

    /// Bytes of weights that the host may keep.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Limits weights in host memory to `bytes` from now on; memory beyond that is freed.
    pub(crate) fn limit_kept(&mut self, bytes: u64) {
        self.limit = bytes;
        if let Some(host) = &mut self.host {
            host.limit_kept(bytes);
            self.kept_bytes = host.kept_bytes();
        }
    }

    /// A model is gone.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.layouts.retain(|(of, _, _), _| *of != model);
        self.outcomes.remove(&model);
        self.left.retain(|segment| segment.model != model);
        self.computable_on_cpu.remove(&model);
        if let Some(host) = &mut self.host {
            host.forget(u64::from(model.0));
            self.kept_bytes = host.kept_bytes();
        }
    }
}

/// Which segments of a plan the CPU can compute, by their number. The head is none of them.
fn computable(plan: &Plan) -> Arc<[bool]> {
    let mut can = vec![false; plan.segments.len()];
    let mut cannot = can.clone();
    for (i, step) in plan.steps.iter().enumerate() {
        let Step::Run {
            segment: Some(segment),
            ops,
            ..
        } = step
        else {
            continue;
        };
        let found = match i < plan.head_step && Answers::can_run(ops) {
            true => &mut can,
            false => &mut cannot,
        };
        found[*segment as usize] = true;
    }
    for (can, cannot) in can.iter_mut().zip(cannot) {
        *can &= !cannot;
    }
    can.into()
}
