//! The steps of a pass: each step's segments are acquired, run and released.
//!
//! No use of a segment outlives its step, so a model that is larger than the budget runs like any
//! other. Between two steps that are given to the device separately the requests are checked: a
//! pass that nobody waits for ends there.

use std::time::{Duration, Instant};

use rocmforge_device::{BoundStep, SegmentBinding};
use rocmforge_ops::Step;
use rocmforge_tensor_cache::{PassHint, Slab};

use crate::api::RequestCacheUse;
use crate::api::error::{Error, from_cache};
use crate::memory::{Acquisition, Memory};
use crate::pass::found::{HeadRead, emit_hidden, emit_rows};
use crate::pass::lookahead::Lookahead;
use crate::pass::spec::{ExpertStep, Pass, PassClient, batch, id, scratch};
use crate::pass::work::Amount;
use crate::store::Resident;

/// Work that a slice of a pass queued on the device.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Load {
    /// Amount of work to compute.
    pub(crate) amount: Amount,
    /// Whether results behind most of the work were read, so that the slice waited for it.
    pub(crate) was_read: bool,
    /// Measured device time of the whole pass, if its results were read later.
    pub(crate) timed: Option<Duration>,
}

/// The experts of a layer that a pass still has to run.
#[derive(Debug)]
pub(crate) struct ExpertsLeft {
    /// Segments whose experts have not run, in the order of their uploads.
    pub(super) pending: Vec<u32>,
    /// Maximum number of uploads that may be in flight at once.
    pub(super) window: usize,
    /// Absent experts whose weights the CPU should keep, after the layer.
    pub(super) kept_later: Vec<u32>,
    /// Whether all segments of the layer were resident.
    pub(super) all_there: bool,
    /// Index in `pending` of the expert that the pass waits for.
    pub(super) awaited: usize,
}

impl ExpertsLeft {
    /// The segment whose upload the pass waits for.
    pub(super) fn waits_for(&self) -> Option<u32> {
        self.pending.get(self.awaited).copied()
    }
}

/// State of a running pass.
pub(super) struct Run<'a, 'b> {
    pub(super) pass: &'a Pass<'a>,
    pub(super) ahead: Lookahead,
    /// Whether uploads are started ahead for segments that the CPU would otherwise compute.
    pub(super) feeds_link: bool,
    /// Segment from which on the next speculative uploads of experts are searched.
    pub(super) spare_from: u32,
    /// For the last MoE layer: when its routing was known, its number of absent experts, and how
    /// many the CPU computed.
    pub(super) last_layer: Option<(Instant, usize, usize)>,
    pub(super) counts: &'b mut RequestCacheUse,
    pub(super) client: &'b mut dyn PassClient,
    /// A held segment whose upload is in flight, while other passes may run.
    pub(super) held: Option<(u32, Slab)>,
    /// The remaining experts of a layer, if the pass stopped among them.
    pub(super) experts: Option<ExpertsLeft>,
    /// Whether the pass is suspended instead of waiting for an upload, because other models have
    /// work.
    pub(super) suspends: bool,
    /// Whether the pass is also suspended instead of waiting for the device to compute its results.
    pub(super) reads_later: bool,
    /// The pass's results, if they are read later.
    pub(super) reading: Option<HeadRead>,
    /// The work that was queued on the device.
    pub(super) given: Load,
}

/// Minimum number of uploads in flight while a pass waits for one and other passes run, so that the
/// link is busy until the pass goes on.
const UPLOADS_SUSPENDED: u32 = 4;

/// The result of a step of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepEnd {
    Done,
    /// The step's segment is held and in flight (`Run::held`).
    Waits,
}

/// Reports to the cache that a pass begins.
pub(super) fn begin(memory: &mut Memory, pass: &Pass<'_>) -> Result<(), Error> {
    let hint = PassHint {
        expects_next_pass: pass.expects_next_pass,
    };
    let begun = memory.store.cache.pass_begin(pass.model, hint);
    begun.map_err(from_cache)
}

pub(super) fn write_inputs(
    memory: &mut Memory,
    pass: &Pass<'_>,
    inputs: &[Vec<u8>],
) -> Result<(), Error> {
    for (input, rows) in pass.plan.inputs.iter().zip(inputs) {
        memory
            .store
            .device
            .write_rows(scratch(pass), input.buf, &input.table, rows)
            .map_err(|e| memory.store.device_error(Some(pass.model), e))?;
        let given = pass.given.iter().filter(|given| given.buf == input.buf);
        let parts: Vec<_> = given.map(|given| (given.row, given.values())).collect();
        if !parts.is_empty() {
            let device = &mut memory.store.device;
            let written = device.write_parts(scratch(pass), input.buf, &parts);
            written.map_err(|e| memory.store.device_error(Some(pass.model), e))?;
        }
    }
    Ok(())
}

impl Run<'_, '_> {
    pub(super) fn step(
        &mut self,
        memory: &mut Memory,
        step: &Step,
        outputs: &[u32],
    ) -> Result<StepEnd, Error> {
        let pass = self.pass;
        match step {
            Step::Run { segment: None, .. } => {
                self.given.amount.attended += pass.attended(step);
                run_step(memory, pass, step, None, outputs).map(|()| StepEnd::Done)
            }
            Step::Run {
                segment: Some(segment),
                ops,
                live_out,
            } => {
                if self.held.is_none() && memory.answers(pass, *segment)? {
                    if let Some(error) = self.client.ended() {
                        return Err(error);
                    }
                    let counts = &mut *self.counts;
                    let ran = memory.run_on_cpu(pass, *segment, ops, live_out, counts);
                    return ran.map(|()| StepEnd::Done);
                }
                self.with_segment(memory, *segment, |memory, run, slab| {
                    run.given.amount.attended += pass.attended(step);
                    run_step(memory, pass, step, Some((*segment, slab)), outputs)
                })
            }
            Step::Experts { ffn, .. } => {
                let experts = ExpertStep::of(step)
                    .ok_or_else(|| Error::Internal("a step of experts".to_owned()))?;
                self.experts(memory, experts, ffn)
            }
        }
    }

    /// Number of next steps that can be given to the device at once, now and probably in later
    /// passes too: their segments are resident and stay.
    pub(super) fn ready(&self, memory: &Memory, steps: &[Step]) -> usize {
        if !self.pass.decodes() || !(self.feeds_link || self.pass.routes()) {
            return 0;
        }
        let stays = |step: &&Step| match step {
            Step::Run { segment, .. } => {
                segment.is_none_or(|segment| memory.store.cache.stays(id(self.pass, segment)))
            }
            Step::Experts { .. } => false,
        };
        steps.iter().take_while(stays).count()
    }

    /// Gives the device several steps at once, all of whose segments are resident.
    pub(super) fn together(&mut self, memory: &mut Memory, steps: &[Step]) -> Result<(), Error> {
        if let Some(error) = self.client.ended() {
            return Err(error);
        }
        let pass = self.pass;
        memory.collect();
        let mut held = Vec::with_capacity(steps.len());
        let weights = self.hold_all(memory, steps, &mut held);
        let result = weights.and_then(|weights| {
            match (self.feeds_link, held.last()) {
                (true, _) => memory.feed_link_with(pass, &held)?,
                (false, Some(last)) => self.prefetch(memory, last + 1, self.ahead.uploads)?,
                (false, None) => {}
            }
            run_ops(memory, pass, steps, &weights, &[])
        });
        let bytes = |&index: &u32| memory.store.segment_bytes(id(pass, index));
        self.given.amount += Amount {
            bytes: held.iter().map(bytes).sum(),
            attended: steps.iter().map(|step| pass.attended(step)).sum(),
        };
        for &index in &held {
            memory.store.release(id(pass, index));
        }
        match self.feeds_link {
            true => result.and_then(|()| memory.feed_link_behind(pass, &held)),
            false => result,
        }
    }

    /// Starts up to `uploads` uploads of absent ordered segments from the segment `from` on.
    fn prefetch(&self, memory: &mut Memory, from: u32, uploads: u32) -> Result<(), Error> {
        let pass = self.pass;
        // The head is the last of the ordered segments.
        let end = match &pass.plan.steps[pass.plan.head_step] {
            Step::Run {
                segment: Some(head),
                ..
            } if pass.wants_nothing() => *head,
            _ => pass.plan.segments.len() as u32,
        };
        memory.store.prefetch(pass.model, from, end, uploads)
    }

    /// Acquires the segments of steps and returns where they are; `held` receives those that must
    /// be released, also after an error.
    fn hold_all(
        &mut self,
        memory: &mut Memory,
        steps: &[Step],
        held: &mut Vec<u32>,
    ) -> Result<Vec<Option<(u32, Slab)>>, Error> {
        let weights = steps.iter().map(|step| match step {
            Step::Run {
                segment: Some(index),
                ..
            } => {
                let slab = memory.acquire(id(self.pass, *index), self.counts)?;
                held.push(*index);
                Ok(Some((*index, slab)))
            }
            Step::Run { segment: None, .. } | Step::Experts { .. } => Ok(None),
        });
        weights.collect()
    }

    /// Acquires a segment, starts uploads ahead, runs `step`, and releases the segment also after
    /// an error. If other models have work, it does not wait for the upload but keeps the segment
    /// held.
    pub(super) fn with_segment(
        &mut self,
        memory: &mut Memory,
        index: u32,
        step: impl FnOnce(&mut Memory, &mut Self, Slab) -> Result<(), Error>,
    ) -> Result<StepEnd, Error> {
        if let Some(error) = self.client.ended() {
            return Err(error);
        }
        let (pass, ahead) = (self.pass, self.ahead);
        let segment = id(pass, index);
        memory.collect();
        let (slab, missed) = match self.take_held(memory, index)? {
            Some(slab) => (slab, true),
            None => match memory.begin_acquire(segment, self.counts)? {
                Acquisition::Resident(slab) => (slab, false),
                Acquisition::InFlight(slab) if self.suspends => {
                    self.held = Some((index, slab));
                    // The link goes on while others run.
                    if !self.feeds_link {
                        let uploads = ahead.uploads.max(UPLOADS_SUSPENDED);
                        self.prefetch(memory, index + 1, uploads)?;
                    }
                    return Ok(StepEnd::Waits);
                }
                Acquisition::InFlight(slab) => {
                    if !memory.store.end_acquire(segment)? {
                        return Err(Error::Internal(format!("{segment} did not come")));
                    }
                    (slab, true)
                }
            },
        };
        let begun = match self.feeds_link {
            true => memory.feed_link_with(pass, &[index]),
            false => self.prefetch(memory, index + 1, ahead.uploads),
        };
        self.given.amount.bytes += slab.bytes;
        let result = begun.and_then(|()| step(memory, self, slab));
        memory.store.release(segment);
        let result = match (self.feeds_link, ahead.recycles_slab && missed) {
            (true, _) => result.and_then(|()| memory.feed_link_behind(pass, &[index])),
            (false, true) => result.and_then(|()| memory.store.recycle_slab(segment)),
            (false, false) => result,
        };
        result.map(|()| StepEnd::Done)
    }

    /// The slab of a segment that an earlier slice held, once it is resident; `None` if it was not
    /// held, or its upload failed.
    fn take_held(&mut self, memory: &mut Memory, index: u32) -> Result<Option<Slab>, Error> {
        let Some((held, slab)) = self.held.take() else {
            return Ok(None);
        };
        let segment = id(self.pass, held);
        if held != index {
            memory.store.release(segment);
            return Err(Error::Internal(format!(
                "{segment} is held for another step"
            )));
        }
        Ok(memory.store.end_acquire(segment)?.then_some(slab))
    }
}

/// A pass of few rows through a model of which everything is resident: the device gets all of it
/// at once, but for the part of the head behind hidden states where those are wanted. What it finds
/// is read behind it, or, if that `reads_later`, under way.
pub(super) fn all_resident(
    memory: &mut Memory,
    pass: &Pass<'_>,
    there: &Resident,
    client: &mut dyn PassClient,
    reads_later: bool,
) -> Result<Option<HeadRead>, Error> {
    let (device, layouts) = memory.store.device_and_layouts(pass.model);
    let to_hidden = pass.outputs.is_empty() && !pass.hidden.is_empty();
    let wanted = if to_hidden { pass.hidden } else { pass.outputs };
    let batch = batch(pass, wanted);
    // Passes with adapters and without are recorded apart, and so are those with a part of the
    // head.
    let stamp = 4 * there.stamp + 2 * u64::from(to_hidden) + u64::from(pass.adapted);
    let timed = match device.queued_reads_mut() {
        Some(device) if reads_later => device.time_from_here(),
        _ => Ok(()),
    };
    let ran = match timed.and_then(|()| device.replay(stamp, scratch(pass), &batch)) {
        Ok(false) => {
            let bound = |segment: u32| SegmentBinding {
                layout: &layouts[segment as usize],
                slab: there.slabs[segment as usize].offset,
            };
            let steps = pass.plan.steps_for(!wanted.is_empty()).iter();
            let mut steps: Vec<BoundStep<'_>> = steps.map(|s| BoundStep::of(s, bound)).collect();
            if to_hidden && let Some(BoundStep::Run { ops, live_out, .. }) = steps.last_mut() {
                *ops = pass.hidden_ops()?;
                *live_out = std::slice::from_ref(&pass.plan.hidden);
            }
            device.run_all(stamp, &steps, scratch(pass), &batch)
        }
        replayed => replayed.map(|_| ()),
    };
    ran.map_err(|e| memory.store.device_error(Some(pass.model), e))?;
    let reading = match reads_later && !pass.wants_nothing() {
        true => HeadRead::begin(memory, pass)?,
        false => None,
    };
    client.begun();
    if wanted.is_empty() || reading.is_some() {
        return Ok(reading);
    }
    match to_hidden {
        true => emit_hidden(memory, pass, (0, wanted), client).map(|()| None),
        false => emit_rows(memory, pass, wanted, client).map(|()| None),
    }
}

pub(super) fn run_step(
    memory: &mut Memory,
    pass: &Pass<'_>,
    step: &Step,
    weights: Option<(u32, Slab)>,
    outputs: &[u32],
) -> Result<(), Error> {
    run_ops(
        memory,
        pass,
        std::slice::from_ref(step),
        &[weights],
        outputs,
    )
}

/// Gives the device the operations of consecutive steps of the plan, each with its segment's
/// weights.
fn run_ops(
    memory: &mut Memory,
    pass: &Pass<'_>,
    steps: &[Step],
    weights: &[Option<(u32, Slab)>],
    outputs: &[u32],
) -> Result<(), Error> {
    let first = steps.first();
    let same = |s: &Step| first.is_some_and(|first| std::ptr::eq(s, first));
    let index = pass.plan.steps.iter().position(same);
    let index = index.ok_or_else(|| Error::Internal("a step of another plan".to_owned()))?;
    let (device, layouts) = memory.store.device_and_layouts(pass.model);
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
    let index = 2 * index as u64 + u64::from(pass.adapted);
    let stamp = [u64::from(pass.model.0), index];
    let ran = device.run_again(stamp, &bound, scratch(pass), &batch(pass, outputs));
    ran.map_err(|e| memory.store.device_error(Some(pass.model), e))
}
