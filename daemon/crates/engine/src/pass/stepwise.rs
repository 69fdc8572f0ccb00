//! A pass that runs step by step and can stop between steps, and the output head that ends it.

use rocmforge_device::{BoundStep, SegmentBinding};
use rocmforge_ops::Step;
use rocmforge_tensor_cache::{ModelId, SegmentId, Slab};

use crate::api::RequestCacheUse;
use crate::api::error::Error;
use crate::memory::Memory;
use crate::pass::found::{HeadRead, emit_hidden, emit_rows};
use crate::pass::lookahead::Lookahead;
use crate::pass::run::{ExpertsLeft, Load, Run, StepEnd, begin, run_step, write_inputs};
use crate::pass::spec::{Pass, PassClient, batch, id, scratch};
use crate::pass::work::Amount;

/// A pass between two of its steps. Its intermediate values lie in its scratch block, so passes
/// with other scratch may run before it goes on.
pub(crate) struct Stepwise<'a, 'b> {
    run: Run<'a, 'b>,
    /// Index of the next step.
    at: usize,
}

/// State of a pass that stopped between two steps: all that it needs besides its scratch and its
/// rows.
#[derive(Debug)]
pub(crate) struct Progress {
    at: usize,
    ahead: Lookahead,
    feeds_link: bool,
    spare_from: u32,
    held: Option<(u32, Slab)>,
    experts: Option<ExpertsLeft>,
    /// The copy of the results to the host, if everything is computed.
    reading: Option<HeadRead>,
}

impl Progress {
    /// Progress of a pass that was given to the device whole and waits for its results.
    pub(super) fn reading(read: HeadRead) -> Self {
        Self {
            at: 0,
            ahead: Lookahead::NOTHING,
            feeds_link: false,
            spare_from: 0,
            held: None,
            experts: None,
            reading: Some(read),
        }
    }

    /// The read that a completely computed pass waits for.
    pub(crate) fn read(&self) -> Option<&HeadRead> {
        self.reading.as_ref()
    }

    /// Takes the read of the results, if everything is computed.
    pub(super) fn take_read(&mut self) -> Option<HeadRead> {
        self.reading.take()
    }

    /// The segment whose upload the pass waits for.
    pub(crate) fn waits_for(&self, model: ModelId) -> Option<SegmentId> {
        let held = self.held.map(|(index, _)| index);
        let index = held.or_else(|| self.experts.as_ref()?.waits_for())?;
        Some(SegmentId { model, index })
    }
}

/// The result of a slice of a pass, with the work that it queued on the device.
pub(crate) enum SliceEnd {
    /// The pass is complete.
    Complete(Load),
    /// The pass stopped between two steps.
    Suspended(Progress, Load),
}

/// The output head is not counted in a slice's queued work if it has fewer rows than one part in
/// this many of the pass's.
const HEAD_ROWS_PART: usize = 4;

/// Progress of a pass at the end of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepProgress {
    /// The pass ran one or more steps.
    On,
    /// The next step's segment is held, and its upload is in flight.
    Waits,
    /// All steps ran; only the head is left.
    ToTheHead,
}

impl<'a, 'b> Stepwise<'a, 'b> {
    /// Begins a pass that may stop between steps. The cache is told of the pass here, and of its
    /// end by [`Stepwise::end`].
    pub(crate) fn begin(
        memory: &mut Memory,
        pass: &'a Pass<'a>,
        inputs: &[Vec<u8>],
        counts: &'b mut RequestCacheUse,
        client: &'b mut dyn PassClient,
    ) -> Result<Self, Error> {
        begin(memory, pass)?;
        write_inputs(memory, pass, inputs)?;
        Ok(Self::new(memory, pass, counts, client))
    }

    pub(super) fn new(
        memory: &mut Memory,
        pass: &'a Pass<'a>,
        counts: &'b mut RequestCacheUse,
        client: &'b mut dyn PassClient,
    ) -> Self {
        let uses_cpu = memory.uses_cpu(pass);
        if uses_cpu {
            memory.begin_timetable(pass);
        }
        let ahead = match uses_cpu {
            true => Lookahead::NOTHING,
            false => memory
                .store
                .lookahead(pass.model, pass.n_tokens, pass.prefetch),
        };
        Self {
            run: Run {
                pass,
                ahead,
                feeds_link: uses_cpu && !pass.routes(),
                spare_from: 0,
                last_layer: None,
                counts,
                client,
                held: None,
                experts: None,
                suspends: false,
                reads_later: false,
                reading: None,
                given: Load::default(),
            },
            at: 0,
        }
    }

    /// Continues a pass that stopped.
    pub(super) fn resume(
        memory: &mut Memory,
        pass: &'a Pass<'a>,
        progress: Progress,
        counts: &'b mut RequestCacheUse,
        client: &'b mut dyn PassClient,
    ) -> Self {
        if memory.uses_cpu(pass) {
            memory.begin_timetable(pass);
        }
        Self {
            run: Run {
                pass,
                ahead: progress.ahead,
                feeds_link: progress.feeds_link,
                spare_from: progress.spare_from,
                // What others did meanwhile is no part of a layer's time.
                last_layer: None,
                counts,
                client,
                held: progress.held,
                experts: progress.experts,
                suspends: false,
                reads_later: false,
                reading: None,
                given: Load::default(),
            },
            at: progress.at,
        }
    }

    /// Sets whether the pass stops where it would wait for an upload and, with `reads_later`, for
    /// its results; otherwise it waits.
    pub(super) fn suspends(&mut self, suspends: bool, reads_later: bool) {
        self.run.suspends = suspends;
        self.run.reads_later = reads_later;
    }

    /// Suspends the pass here.
    pub(super) fn stop(self) -> SliceEnd {
        let run = self.run;
        let progress = Progress {
            at: self.at,
            ahead: run.ahead,
            feeds_link: run.feeds_link,
            spare_from: run.spare_from,
            held: run.held,
            experts: run.experts,
            reading: run.reading,
        };
        SliceEnd::Suspended(progress, run.given)
    }

    /// Reports to the client that the device has begun the work.
    pub(super) fn begun(&mut self) {
        self.run.client.begun();
    }

    /// The work that this slice has queued on the device.
    pub(super) fn given(&self) -> Amount {
        self.run.given.amount
    }

    /// Ends the pass here and releases what it holds.
    pub(super) fn let_go(&mut self, memory: &mut Memory) {
        if let Some((index, _)) = self.run.held.take() {
            memory.store.release(id(self.run.pass, index));
        }
    }

    /// Runs the next step, or several steps that the device is given at once.
    pub(crate) fn go_on(&mut self, memory: &mut Memory) -> Result<StepProgress, Error> {
        let pass = self.run.pass;
        let left = &pass.plan.steps_for(false)[self.at..];
        let Some(first) = left.first() else {
            return Ok(StepProgress::ToTheHead);
        };
        let n = match self.run.held {
            None => self.run.ready(memory, left).max(1),
            Some(_) => 1,
        };
        match n {
            1 => {
                if self.run.step(memory, first, &[])? == StepEnd::Waits {
                    return Ok(StepProgress::Waits);
                }
            }
            _ => self.run.together(memory, &left[..n])?,
        }
        self.at += n;
        Ok(StepProgress::On)
    }

    /// Runs the output head for the wanted rows, or stops where it would wait for the head's
    /// upload.
    pub(crate) fn end(mut self, memory: &mut Memory) -> Result<SliceEnd, Error> {
        let pass = self.run.pass;
        if pass.wants_nothing() {
            return Ok(SliceEnd::Complete(self.run.given));
        }
        let step = &pass.plan.steps[pass.plan.head_step];
        let Step::Run { segment, .. } = step else {
            return Err(Error::Internal("the head of a plan routes".to_owned()));
        };
        let given = self.run.given.amount;
        let ran = match *segment {
            Some(head) => self.run.with_segment(memory, head, |memory, run, slab| {
                run_head(memory, run, step, Some((head, slab)))
            }),
            // An encoder's head may have nothing to compute with.
            None => run_head(memory, &mut self.run, step, None).map(|()| StepEnd::Done),
        };
        if ran.is_err() {
            self.let_go(memory);
            if let Some(read) = self.run.reading.take() {
                read.forget(memory);
            }
        }
        // Of many rows few are wanted: a head of these takes next to nothing beside layers.
        if pass.outputs.len() + pass.hidden.len() < pass.n_tokens / HEAD_ROWS_PART {
            self.run.given.amount = given;
        }
        Ok(match ran? {
            StepEnd::Done if self.run.reading.is_some() => self.stop(),
            StepEnd::Done => {
                self.run.given.was_read = true;
                SliceEnd::Complete(self.run.given)
            }
            StepEnd::Waits => self.stop(),
        })
    }
}

/// Runs the output head for the wanted rows, with its segment's weights, if it has any.
fn run_head(
    memory: &mut Memory,
    run: &mut Run<'_, '_>,
    step: &Step,
    weights: Option<(u32, Slab)>,
) -> Result<(), Error> {
    let pass = run.pass;
    let at_once = pass.scratch.outputs as usize;
    if run.reads_later && pass.hidden.is_empty() && pass.outputs.len() <= at_once {
        run_step(memory, pass, step, weights, pass.outputs)?;
        run.reading = HeadRead::begin(memory, pass)?;
        return match run.reading {
            Some(_) => Ok(()),
            None => emit_rows(memory, pass, pass.outputs, run.client),
        };
    }
    for chunk in pass.outputs.chunks(at_once) {
        run_step(memory, pass, step, weights, chunk)?;
        emit_rows(memory, pass, chunk, run.client)?;
        if let Some(error) = run.client.ended() {
            return Err(error);
        }
    }
    let mut first = pass.outputs.len();
    for chunk in pass.hidden.chunks(at_once) {
        run_to_hidden(memory, pass, weights, chunk)?;
        emit_hidden(memory, pass, (first, chunk), run.client)?;
        first += chunk.len();
        if let Some(error) = run.client.ended() {
            return Err(error);
        }
    }
    Ok(())
}

/// Runs the part of the output head that computes hidden states of `rows`.
fn run_to_hidden(
    memory: &mut Memory,
    pass: &Pass<'_>,
    weights: Option<(u32, Slab)>,
    rows: &[u32],
) -> Result<(), Error> {
    let (device, layouts) = memory.store.device_and_layouts(pass.model);
    let step = BoundStep::Run {
        ops: pass.hidden_ops()?,
        live_out: &[pass.plan.hidden],
        weights: weights.map(|(segment, slab)| SegmentBinding {
            layout: &layouts[segment as usize],
            slab: slab.offset,
        }),
    };
    let ran = device.run(&step, scratch(pass), &batch(pass, rows));
    ran.map_err(|e| memory.store.device_error(Some(pass.model), e))
}
