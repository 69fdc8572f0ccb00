//! CPU compute: a missing segment is computed on the CPU, from the file's weights, while the link
//! uploads others.
//!
//! Measured rates decide whether a miss is uploaded or computed: the link's rate, and the CPU's
//! rate for as many rows and bytes (`rates.rs`), which is measured separately for weights that it
//! keeps in its kernels' layout and for those that it reads from the file. Of the experts that a
//! layer lacks some are uploaded and some computed, so that both end together; those that were used
//! most are uploaded. If the CPU would compute more experts with more weights kept, weights of some
//! are converted beside the passes. Experts that were computed are uploaded later, when nobody
//! waits for the link, so that the hit rate is nearly as if all had been uploaded. Of the ordered
//! segments that a pass lacks, the CPU computes those that a pass reaches before the link could
//! have uploaded them; the link meanwhile continues with the first that arrives in time
//! (`timetable.rs`).
//!
//! What was rejected as slow is measured again from time to time, several times in a row: idle
//! threads take long to wake, so a single measurement is not representative.
//!
//! *Invariant:* the CPU computes no operation on the KV cache or states ([`Answers::can_run`]).

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

/// Maximum number of rows of a pass of which the CPU may compute a part.
pub(crate) const ROWS_MAX: usize = 64;

/// Number of decisions after which an option that was rejected as slow (CPU compute at all, or of
/// more experts) is measured again.
const TRY_EVERY: u32 = 512;

/// Number of decisions after which CPU compute of dense segments, which takes long on a slow CPU,
/// is measured again.
const TRY_SEGMENT_EVERY: u32 = 4096;

/// Maximum number of remembered experts that the CPU computed (they are uploaded later).
const LEFT_MAX: usize = 64;

/// Number of decisions without an upload after which one is made: only uploads measure the link's
/// rate, which is lower while the CPU reads the same memory.
const LINK_EVERY: u32 = 16;

/// Where the CPU has a segment's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CpuWeights {
    /// The weights are kept in host memory in the CPU kernels' layout.
    Kept,
    /// The weights are in the file only, but there is memory to keep them.
    WithRoom,
    /// The weights are in the file only, and there is no memory to keep them.
    InFile,
}

/// Absent experts of one step, of which the CPU may compute some.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Absent {
    pub(crate) n: usize,
    /// Number of absent experts whose weights are [`CpuWeights::Kept`].
    pub(crate) kept: usize,
    /// How the CPU has the weights of the other experts.
    pub(crate) others: CpuWeights,
    /// Bytes of each absent expert's weights.
    pub(crate) bytes: u64,
    /// Number of rows that each absent expert is multiplied with.
    pub(crate) rows_each: usize,
    /// Whether the pass has one row.
    pub(crate) one_row: bool,
}

/// The CPU's share of a step's absent experts.
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

/// Decides what the CPU computes for a GPU, and runs it.
#[derive(Debug)]
pub(crate) struct CpuCompute {
    mode: Mode,
    threads: Option<NonZeroUsize>,
    /// Budget for weights that the CPU keeps in its own layout.
    keeps: Option<Budget>,
    /// The CPU's worker; created when needed, and taken out while it computes.
    host: Option<Answers>,
    /// Bytes of weights that the CPU keeps, as of its last computation.
    kept_bytes: u64,
    /// Limit for kept weights in bytes, where lower than the budget (memory pressure).
    limit: u64,
    refused: bool,
    /// Measured rates with weights kept in the kernels' layout, including the transfer of rows from
    /// the GPU and back.
    kept: Rates,
    /// Measured rates with weights that are read from the file.
    from_file: Rates,
    /// Times of layers of each model, by the share that the CPU computed.
    outcomes: HashMap<ModelId, Outcomes>,
    /// Number of decisions since an option was last tried in order to measure it.
    untried: u32,
    /// Number of segments left to uploads since one was last computed by the CPU in order to
    /// measure it.
    refused_segments: u32,
    /// Number of decisions since something was last left to the link.
    unlinked: u32,
    /// Scratch layouts of small passes.
    layouts: HashMap<(ModelId, bool, RowCounts), Arc<ScratchLayout>>,
    /// Whether the CPU can compute each segment, by model.
    computable_on_cpu: HashMap<ModelId, Arc<[bool]>>,
    /// Absent experts that the CPU computed, the latest last; candidates for a later upload.
    left: VecDeque<SegmentId>,
    /// Counts of what the CPU computed.
    pub(crate) done: Hosted,
}

/// Bytes of a budget that is given in bytes or as a share of `memory` bytes.
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
    /// CPU compute beside a device; `is_cpu` says that the device is the CPU itself, which needs
    /// none.
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

    /// Whether missing segments are never uploaded for passes that the CPU can take part in
    /// (`--cpu-compute always`).
    pub(crate) fn is_always(&self) -> bool {
        self.mode == Mode::Always
    }

    /// Where the CPU has the weights of a segment of `bytes` bytes.
    pub(crate) fn holds(&self, model: ModelId, segment: u32, bytes: u64) -> CpuWeights {
        match &self.host {
            Some(host) if host.keeps(u64::from(model.0), segment) => CpuWeights::Kept,
            Some(host) if !host.has_room(bytes) => CpuWeights::InFile,
            _ => CpuWeights::WithRoom,
        }
    }

    /// Expected seconds of the CPU for `bytes` bytes of weights multiplied with `rows_each` rows;
    /// `None` if not measured.
    fn seconds(&self, held: CpuWeights, bytes: u64, rows_each: usize) -> Option<f64> {
        let rates = match held {
            CpuWeights::Kept | CpuWeights::WithRoom => &self.kept,
            CpuWeights::InFile => &self.from_file,
        };
        rates.seconds(rows_each, bytes)
    }

    /// Expected seconds of the CPU for `n` of the absent experts: first those that it keeps, the
    /// rest as if it kept those that it has memory for.
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

    /// Number of a step's absent experts that the CPU computes, first those whose weights it keeps.
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

    /// Records that a layer of a one-row pass, with `n` missing experts of which the CPU computed
    /// `computed`, took `took` until the next layer.
    pub(crate) fn layer_took(&mut self, model: ModelId, n: usize, computed: usize, took: Duration) {
        if let Some(outcomes) = self.outcomes.get_mut(&model) {
            outcomes.note(n, computed, took);
        }
    }

    /// The measured rates for the first of these absent experts.
    fn rates_of(&mut self, absent: Absent) -> &mut Rates {
        match absent.others {
            CpuWeights::InFile if absent.kept == 0 => &mut self.from_file,
            _ => &mut self.kept,
        }
    }

    /// Expected seconds of the CPU for an absent segment of `bytes`; `None` if it should be
    /// uploaded.
    ///
    /// CPU compute is not worthwhile if it takes so long that the link would have uploaded this
    /// segment, too, behind the uploads that it can be given meanwhile.
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

    /// [`CpuCompute::answer`] for a segment that the pass has reached. A segment rejected as slow
    /// is measured again from time to time.
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

    /// Remembers an absent expert that the CPU computed, for a later upload.
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

    /// Takes the latest of a model's experts that the CPU computed from the remembered ones.
    pub(crate) fn take_left(&mut self, model: ModelId) -> Option<SegmentId> {
        let at = self.left.iter().rposition(|s| s.model == model)?;
        self.left.remove(at)
    }

    /// Whether the CPU can compute each segment of a model, by segment number.
    pub(crate) fn computable_on_cpu(&mut self, model: ModelId, plan: &Plan) -> Arc<[bool]> {
        let found = self.computable_on_cpu.entry(model);
        Arc::clone(found.or_insert_with(|| computable(plan)))
    }

    /// The scratch layout of a small pass on the CPU.
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

    /// Takes the CPU's worker, to run a step on it; return it with [`CpuCompute::put_back`].
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

    /// Returns the CPU's worker after a step. The step's rows can be read with [`CpuCompute::read`]
    /// until the next step.
    pub(crate) fn put_back(&mut self, host: Answers) {
        self.kept_bytes = host.kept_bytes();
        self.host = Some(host);
    }

    /// Records the time of a computation on the CPU, from the arrival of its rows to the upload of
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

    /// Reads the first rows of a buffer of the last step into `rows`.
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

    /// Bytes of weights that the CPU keeps in its kernels' layout.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Takes weights that were converted to the CPU kernels' layout beside the passes.
    pub(crate) fn collect(&mut self) {
        if let Some(host) = &mut self.host {
            host.collect();
        }
    }

    /// Starts to convert the first of some absent experts that the CPU does not keep to its
    /// kernels' layout, beside the passes.
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

    /// Maximum bytes of weights that the CPU may keep.
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

    /// Forgets the state of a model that is unloaded.
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

/// Whether the CPU can compute each segment of a plan, by segment number. It never computes the
/// output head.
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
