//! One pass of a model over rows of some sequences: step by step, each step's segments
//! acquired, run and released.
//!
//! Nothing of a segment outlives its step, so a model that is larger than the budget runs like
//! any other. Between two steps that are given to the device apart the requests are looked at: a
//! pass that nobody waits for ends there.

mod experts;
mod slices;
mod stepwise;

use std::time::Instant;

use rocmforge_device::{Batch, BoundStep, Plan, Scratch, ScratchLayout, SegmentBinding, Span};
use rocmforge_kernels::host::ops::RopeAngles;
use rocmforge_ops::{MEAN_OF_SPAN, Step};
use rocmforge_tensor_cache::{ModelId, PassHint, SegmentId, Slab};

use crate::api::RequestCacheUse;
use crate::error::{Error, from_cache};
use crate::lookahead::Lookahead;
use crate::weight_store::{Begun, Resident, WeightStore};

pub(crate) use experts::{ExpertStep, ExpertsLeft};
pub(crate) use slices::{Load, SliceEnd, Slicing, Start, run_slice};
pub(crate) use stepwise::{Progress, Stepwise, Went};

/// What is told of a wanted row.
type RowSink<'a> = &'a mut dyn FnMut(usize, RowOutput<'_>) -> Result<(), Error>;

/// What a pass works on.
#[derive(Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) model: ModelId,
    pub(crate) plan: &'a Plan,
    pub(crate) angles: &'a [RopeAngles],
    /// The sequences' rows; they cover all rows of the pass.
    pub(crate) spans: &'a [Span<'a>],
    pub(crate) n_tokens: usize,
    /// Rows whose logits are wanted, ascending. If there are none, and no hidden states are wanted,
    /// the output head is not touched.
    pub(crate) outputs: &'a [u32],
    /// Rows whose hidden state is wanted instead, ascending.
    pub(crate) hidden: &'a [u32],
    /// Another pass of this model is expected right after.
    pub(crate) expects_next_pass: bool,
    pub(crate) scratch: &'a ScratchLayout,
    /// Arena offset of the scratch block.
    pub(crate) scratch_at: u64,
    /// Uploads under way ahead of their turn, at most.
    pub(crate) prefetch: u32,
    /// How much of the wanted rows is of interest.
    pub(crate) interest: Interest,
}

impl Pass<'_> {
    /// Whether the output head is not touched.
    fn wants_nothing(&self) -> bool {
        self.outputs.is_empty() && self.hidden.is_empty()
    }

    /// Whether every sequence has one row, whose logits are wanted and have room at once.
    fn decodes(&self) -> bool {
        self.spans.len() == self.n_tokens
            && self.outputs.len() == self.n_tokens
            && self.n_tokens as u64 <= self.scratch.outputs
    }

    /// Whether it is a pass of few rows of a mixture, of prompts too: in parts, each
    /// layer waits for its routing to be read. The requests are not looked at while it
    /// runs, so its rows are few.
    fn has_few_routed_rows(&self) -> bool {
        self.n_tokens <= WHOLE_ROWS
            && self.hidden.is_empty()
            && self.outputs.len() as u64 <= self.scratch.outputs
            && self.routes()
    }

    /// Whether it goes through a mixture.
    fn routes(&self) -> bool {
        let mut steps = self.plan.steps.iter();
        steps.any(|step| matches!(step, Step::Experts { .. }))
    }
}

/// How much of a wanted row is of interest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Its best token.
    Best,
    /// So many of its best tokens.
    Top(usize),
    /// All of its logits.
    Logits,
}

/// What a pass found for one wanted row: what was of interest, or, where the device
/// leaves that to the engine, all.
pub(crate) enum RowOutput<'a> {
    /// Its logits, `[n_vocab]`.
    Logits(&'a mut [f32]),
    /// Its best token, the lowest id among equals; `None` if the logits are not finite.
    Best(Option<u32>),
    /// Its best tokens with their logits, sorted by falling logit, the lowest id first among
    /// equals; `None` if they are not finite.
    Top(Option<&'a [(u32, f32)]>),
    /// Its hidden state behind the last norm, `[n_embd]`.
    Hidden(&'a [f32]),
}

/// Who takes part in a pass beside the device.
struct Run<'a, 'b> {
    pass: &'a Pass<'a>,
    ahead: Lookahead,
    /// The link is given what the host would come to when it is there already.
    feeds_link: bool,
    /// From which segment on experts are looked for that may come although no row is routed to
    /// them.
    spare_from: u32,
    /// When the last layer's routing was known, its absent experts, and those that the host
    /// computed.
    last_layer: Option<(Instant, usize, usize)>,
    counts: &'b mut RequestCacheUse,
    ended: &'b dyn Fn() -> Option<Error>,
    /// A segment that is held and whose upload is waited for, so that others may run meanwhile.
    held: Option<(u32, Slab)>,
    /// What is left of a layer's experts, where the pass stopped among them.
    experts: Option<ExpertsLeft>,
    /// Others have something to run: they are not kept waiting for an upload.
    suspends: bool,
    /// What the device was given to do.
    given: Load,
}

/// Uploads that are under way at least while a pass waits for one and others run: the link is to
/// work until the pass goes on.
const UPLOADS_SUSPENDED: u32 = 4;

/// What came of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stepped {
    Done,
    /// Its segment is held and on its way ([`Run::held`]).
    Waits,
}

/// Rows of a pass with prompts that the device gets at once, at most.
const WHOLE_ROWS: usize = 256;

/// Runs a pass. `inputs` has for each input of the plan `n_tokens` rows as its table has them;
/// `sink` is called with each wanted row and what was found for it; `ended` tells between
/// segments whether to give up; `begun` is called once the device has the first of the work, for
/// what is to be done beside it.
pub(crate) fn run(
    store: &mut WeightStore,
    pass: &Pass<'_>,
    inputs: &[Vec<u8>],
    counts: &mut RequestCacheUse,
    ended: &dyn Fn() -> Option<Error>,
    begun: &dyn Fn(),
    sink: RowSink<'_>,
) -> Result<(), Error> {
    let slicing = Slicing {
        is_over: &|_| false,
        suspends: false,
        whole: true,
    };
    run_slice(
        store,
        pass,
        Start::Inputs(inputs),
        slicing,
        (counts, ended, begun),
        sink,
    )
    .map(|_| ())
}

/// Tells the cache that a pass begins.
fn begin(store: &mut WeightStore, pass: &Pass<'_>) -> Result<(), Error> {
    let hint = PassHint {
        expects_next_pass: pass.expects_next_pass,
    };
    let begun = store.cache.pass_begin(pass.model, hint);
    begun.map_err(from_cache)
}

fn write_inputs(store: &mut WeightStore, pass: &Pass<'_>, inputs: &[Vec<u8>]) -> Result<(), Error> {
    for (input, rows) in pass.plan.inputs.iter().zip(inputs) {
        store
            .device
            .write_rows(scratch(pass), input.buf, &input.table, rows)
            .map_err(|e| store.device_error(Some(pass.model), e))?;
    }
    Ok(())
}

impl Run<'_, '_> {
    fn step(
        &mut self,
        store: &mut WeightStore,
        step: &Step,
        outputs: &[u32],
    ) -> Result<Stepped, Error> {
        let pass = self.pass;
        match step {
            Step::Run { segment: None, .. } => {
                run_step(store, pass, step, None, outputs).map(|()| Stepped::Done)
            }
            Step::Run {
                segment: Some(segment),
                ops,
                live_out,
            } => {
                if self.held.is_none() && store.answers(pass, *segment)? {
                    if let Some(error) = (self.ended)() {
                        return Err(error);
                    }
                    let counts = &mut *self.counts;
                    let ran = store.run_on_host(pass, *segment, ops, live_out, counts);
                    return ran.map(|()| Stepped::Done);
                }
                self.with_segment(store, *segment, |store, _, slab| {
                    run_step(store, pass, step, Some((*segment, slab)), outputs)
                })
            }
            Step::Experts { ffn, .. } => {
                let experts = ExpertStep::of(step)
                    .ok_or_else(|| Error::Internal("a step of experts".to_owned()))?;
                self.experts(store, experts, ffn)
            }
        }
    }

    /// How many of the steps that come next the device can be given at once, and is likely to be
    /// given at once by later passes too: their segments are resident, and stay.
    fn ready(&self, store: &WeightStore, steps: &[Step]) -> usize {
        if !self.pass.decodes() || !(self.feeds_link || self.pass.routes()) {
            return 0;
        }
        let stays = |step: &&Step| match step {
            Step::Run { segment, .. } => {
                segment.is_none_or(|segment| store.cache.stays(id(self.pass, segment)))
            }
            Step::Experts { .. } => false,
        };
        steps.iter().take_while(stays).count()
    }

    /// Gives the device the work of several steps at once, of which all is resident.
    fn together(&mut self, store: &mut WeightStore, steps: &[Step]) -> Result<(), Error> {
        if let Some(error) = (self.ended)() {
            return Err(error);
        }
        let pass = self.pass;
        store.collect();
        let mut held = Vec::with_capacity(steps.len());
        let weights = self.hold_all(store, steps, &mut held);
        let result = weights.and_then(|weights| {
            match (self.feeds_link, held.last()) {
                (true, _) => store.feed_link_with(pass, &held)?,
                (false, Some(last)) => self.prefetch(store, last + 1, self.ahead.uploads)?,
                (false, None) => {}
            }
            run_ops(store, pass, steps, &weights, &[])
        });
        let bytes = |&index: &u32| store.segment_bytes(id(pass, index));
        self.given.bytes += held.iter().map(bytes).sum::<u64>();
        for &index in &held {
            store.release(id(pass, index));
        }
        match self.feeds_link {
            true => result.and_then(|()| store.feed_link_behind(pass, &held)),
            false => result,
        }
    }

    /// Starts uploads ahead, of ordered segments from one on.
    fn prefetch(&self, store: &mut WeightStore, from: u32, uploads: u32) -> Result<(), Error> {
        let pass = self.pass;
        // The head is the last of the ordered segments.
        let end = match &pass.plan.steps[pass.plan.head_step] {
            Step::Run {
                segment: Some(head),
                ..
            } if pass.wants_nothing() => *head,
            _ => pass.plan.segments.len() as u32,
        };
        store.prefetch(pass.model, from, end, uploads)
    }

    /// Acquires the segments of steps, and tells where they are; `held` has those that must be
    /// released, whatever comes of it.
    fn hold_all(
        &mut self,
        store: &mut WeightStore,
        steps: &[Step],
        held: &mut Vec<u32>,
    ) -> Result<Vec<Option<(u32, Slab)>>, Error> {
        let weights = steps.iter().map(|step| match step {
            Step::Run {
                segment: Some(index),
                ..
            } => {
                let slab = store.acquire(id(self.pass, *index), self.counts)?;
                held.push(*index);
                Ok(Some((*index, slab)))
            }
            Step::Run { segment: None, .. } | Step::Experts { .. } => Ok(None),
        });
        weights.collect()
    }

    /// Acquires a segment, starts uploads ahead, runs `step`, and releases it whatever came of it.
    /// Where others have something to run, it does not wait for the segment, but holds it.
    fn with_segment(
        &mut self,
        store: &mut WeightStore,
        index: u32,
        step: impl FnOnce(&mut WeightStore, &mut Self, Slab) -> Result<(), Error>,
    ) -> Result<Stepped, Error> {
        if let Some(error) = (self.ended)() {
            return Err(error);
        }
        let (pass, ahead) = (self.pass, self.ahead);
        let segment = id(pass, index);
        store.collect();
        let (slab, missed) = match self.take_held(store, index)? {
            Some(slab) => (slab, true),
            None => match store.begin_acquire(segment, self.counts)? {
                Begun::There(slab) => (slab, false),
                Begun::Comes(slab) if self.suspends => {
                    self.held = Some((index, slab));
                    // The link goes on while others run.
                    if !self.feeds_link {
                        let uploads = ahead.uploads.max(UPLOADS_SUSPENDED);
                        self.prefetch(store, index + 1, uploads)?;
                    }
                    return Ok(Stepped::Waits);
                }
                Begun::Comes(slab) => {
                    if !store.end_acquire(segment)? {
                        return Err(Error::Internal(format!("{segment} did not come")));
                    }
                    (slab, true)
                }
            },
        };
        let begun = match self.feeds_link {
            true => store.feed_link_with(pass, &[index]),
            false => self.prefetch(store, index + 1, ahead.uploads),
        };
        self.given.bytes += slab.bytes;
        let result = begun.and_then(|()| step(store, self, slab));
        store.release(segment);
        let result = match (self.feeds_link, ahead.recycles_slab && missed) {
            (true, _) => result.and_then(|()| store.feed_link_behind(pass, &[index])),
            (false, true) => result.and_then(|()| store.recycle_slab(segment)),
            (false, false) => result,
        };
        result.map(|()| Stepped::Done)
    }

    /// The place of a segment that is held since the slice before, once it has come; `None` if it
    /// is not held, or its upload failed.
    fn take_held(&mut self, store: &mut WeightStore, index: u32) -> Result<Option<Slab>, Error> {
        let Some((held, slab)) = self.held.take() else {
            return Ok(None);
        };
        let segment = id(self.pass, held);
        if held != index {
            store.release(segment);
            return Err(Error::Internal(format!(
                "{segment} is held for another step"
            )));
        }
        Ok(store.end_acquire(segment)?.then_some(slab))
    }
}

/// A pass of few rows through a model of which everything is resident: the
/// device gets all of it at once.
fn all_resident(
    store: &mut WeightStore,
    pass: &Pass<'_>,
    there: &Resident,
    begun: &dyn Fn(),
    sink: RowSink<'_>,
) -> Result<(), Error> {
    let (device, layouts) = store.device_and_layouts(pass.model);
    let batch = batch(pass, pass.outputs);
    let ran = match device.replay(there.stamp, scratch(pass), &batch) {
        Ok(false) => {
            let bound = |segment: u32| SegmentBinding {
                layout: &layouts[segment as usize],
                slab: there.slabs[segment as usize].offset,
            };
            let steps = pass.plan.steps_for(!pass.outputs.is_empty()).iter();
            let steps: Vec<BoundStep<'_>> = steps.map(|s| BoundStep::of(s, bound)).collect();
            device.run_all(there.stamp, &steps, scratch(pass), &batch)
        }
        replayed => replayed.map(|_| ()),
    };
    ran.map_err(|e| store.device_error(Some(pass.model), e))?;
    begun();
    if pass.outputs.is_empty() {
        return Ok(());
    }
    emit_rows(store, pass, pass.outputs, &mut Vec::new(), sink)
}

/// Reads what the head left for `rows` and tells it.
fn emit_rows(
    store: &mut WeightStore,
    pass: &Pass<'_>,
    rows: &[u32],
    buffer: &mut Vec<f32>,
    sink: RowSink<'_>,
) -> Result<(), Error> {
    let device = &mut store.device;
    let logits = pass.plan.logits;
    match pass.interest {
        Interest::Best => {
            let best = device.argmax(scratch(pass), logits, rows.len());
            if let Some(best) = best.map_err(|e| store.device_error(Some(pass.model), e))? {
                let mut found_rows = rows.iter().zip(best);
                return found_rows
                    .try_for_each(|(&row, best)| sink(row_of(row), RowOutput::Best(best)));
            }
        }
        Interest::Top(k) => {
            let top = device.top_k(scratch(pass), logits, rows.len(), k);
            if let Some(top) = top.map_err(|e| store.device_error(Some(pass.model), e))? {
                let mut found_rows = rows.iter().zip(top);
                return found_rows
                    .try_for_each(|(&row, top)| sink(row_of(row), RowOutput::Top(top.as_deref())));
            }
        }
        Interest::Logits => {}
    }
    let n_vocab = pass.scratch.bufs[usize::from(logits.0)].width as usize;
    buffer.resize(n_vocab * rows.len(), 0.0);
    let read = store.device.read(scratch(pass), logits, buffer);
    read.map_err(|e| store.device_error(Some(pass.model), e))?;
    rows.iter()
        .zip(buffer.chunks_exact_mut(n_vocab))
        .try_for_each(|(&row, logits)| sink(row_of(row), RowOutput::Logits(logits)))
}

fn run_step(
    store: &mut WeightStore,
    pass: &Pass<'_>,
    step: &Step,
    weights: Option<(u32, Slab)>,
    outputs: &[u32],
) -> Result<(), Error> {
    run_ops(store, pass, std::slice::from_ref(step), &[weights], outputs)
}

/// Gives the device the operations of steps of the pass's plan that follow each
/// other, each with its weights.
fn run_ops(
    store: &mut WeightStore,
    pass: &Pass<'_>,
    steps: &[Step],
    weights: &[Option<(u32, Slab)>],
    outputs: &[u32],
) -> Result<(), Error> {
    let first = steps.first();
    let same = |s: &Step| first.is_some_and(|first| std::ptr::eq(s, first));
    let index = pass.plan.steps.iter().position(same);
    let index = index.ok_or_else(|| Error::Internal("a step of another plan".to_owned()))?;
    let (device, layouts) = store.device_and_layouts(pass.model);
    let bound = steps.iter().zip(weights).map(|(step, weights)| {
        let Step::Run { ops, live_out, .. } = step else {
            return Err(Error::Internal("experts are no operations".to_owned()));
        };
        Ok(BoundStep::Run {
            ops,
            live_out,
            weights: weights.map(|(segment, slab)| SegmentBinding {
                layout: &layouts[segment as usize],
                slab: slab.offset,
            }),
        })
    });
    let bound = bound.collect::<Result<Vec<_>, _>>()?;
    let stamp = [u64::from(pass.model.0), index as u64];
    let ran = device.run_again(stamp, &bound, scratch(pass), &batch(pass, outputs));
    ran.map_err(|e| store.device_error(Some(pass.model), e))
}

/// The row of an output, which may stand for its span's mean.
pub(crate) fn row_of(output: u32) -> usize {
    (output & !MEAN_OF_SPAN) as usize
}

pub(crate) fn id(pass: &Pass<'_>, index: u32) -> SegmentId {
    SegmentId {
        model: pass.model,
        index,
    }
}

pub(crate) fn scratch<'a>(pass: &Pass<'a>) -> Scratch<'a> {
    Scratch {
        layout: pass.scratch,
        base: pass.scratch_at,
    }
}

pub(crate) fn batch<'a>(pass: &Pass<'a>, outputs: &'a [u32]) -> Batch<'a> {
    Batch {
        n_tokens: pass.n_tokens,
        spans: pass.spans,
        kv: &pass.plan.kv,
        rope: pass.angles,
        outputs,
    }
}
