//! A pass that goes on step by step, and the head that ends it.

use rocmforge_device::{BoundStep, SegmentBinding};
use rocmforge_ops::{Op, Step};
use rocmforge_tensor_cache::{ModelId, SegmentId, Slab};

use super::{
    ExpertsLeft, Load, Pass, RowOutput, RowSink, Run, SliceEnd, Stepped, batch, begin, emit_rows,
    id, row_of, run_step, scratch, write_inputs,
};
use crate::api::RequestCacheUse;
use crate::error::Error;
use crate::lookahead::Lookahead;
use crate::weight_store::WeightStore;

/// A pass between two of its steps. All that it has so far lies in its scratch block, so passes
/// with other scratch may run before it goes on.
pub(crate) struct Stepwise<'a, 'b> {
    run: Run<'a, 'b>,
    /// The first of the steps that are left.
    at: usize,
}

/// Where a pass is that stopped between two steps: all that it needs beside its scratch and its
/// rows.
#[derive(Debug)]
pub(crate) struct Progress {
    at: usize,
    ahead: Lookahead,
    feeds_link: bool,
    spare_from: u32,
    held: Option<(u32, Slab)>,
    experts: Option<ExpertsLeft>,
}

impl Progress {
    /// The segment whose upload it waits for.
    pub(crate) fn waits_for(&self, model: ModelId) -> Option<SegmentId> {
        let held = self.held.map(|(index, _)| index);
        let index = held.or_else(|| self.experts.as_ref()?.waits_for())?;
        Some(SegmentId { model, index })
    }
}

/// How far a pass came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Went {
    /// It ran some steps.
    On,
    /// The next step's segment is held and on its way.
    Waits,
    /// Only the head is left.
    ToTheHead,
}

impl<'a, 'b> Stepwise<'a, 'b> {
    /// Begins a pass that is to stop between steps; it is begun for the cache, too, and `end` ends
    /// it there.
    pub(crate) fn begin(
        store: &mut WeightStore,
        pass: &'a Pass<'a>,
        inputs: &[Vec<u8>],
        counts: &'b mut RequestCacheUse,
        ended: &'b dyn Fn() -> Option<Error>,
    ) -> Result<Self, Error> {
        begin(store, pass)?;
        write_inputs(store, pass, inputs)?;
        Ok(Self::new(store, pass, counts, ended))
    }

    pub(super) fn new(
        store: &mut WeightStore,
        pass: &'a Pass<'a>,
        counts: &'b mut RequestCacheUse,
        ended: &'b dyn Fn() -> Option<Error>,
    ) -> Self {
        let offloaded = store.is_offloaded(pass);
        if offloaded {
            store.begin_timetable(pass);
        }
        let ahead = match offloaded {
            true => Lookahead::NOTHING,
            false => store.lookahead(pass.model, pass.n_tokens, pass.prefetch),
        };
        Self {
            run: Run {
                pass,
                ahead,
                feeds_link: offloaded && !pass.routes(),
                spare_from: 0,
                last_layer: None,
                counts,
                ended,
                held: None,
                experts: None,
                suspends: false,
                given: Load::default(),
            },
            at: 0,
        }
    }

    /// Goes on with a pass that stopped.
    pub(super) fn resume(
        store: &mut WeightStore,
        pass: &'a Pass<'a>,
        progress: Progress,
        counts: &'b mut RequestCacheUse,
        ended: &'b dyn Fn() -> Option<Error>,
    ) -> Self {
        if store.is_offloaded(pass) {
            store.begin_timetable(pass);
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
                ended,
                held: progress.held,
                experts: progress.experts,
                suspends: false,
                given: Load::default(),
            },
            at: progress.at,
        }
    }

    /// From now on it stops where it would wait for an upload, or waits.
    pub(super) fn suspends(&mut self, suspends: bool) {
        self.run.suspends = suspends;
    }

    /// It stops here.
    pub(super) fn stop(self) -> SliceEnd {
        let run = self.run;
        let progress = Progress {
            at: self.at,
            ahead: run.ahead,
            feeds_link: run.feeds_link,
            spare_from: run.spare_from,
            held: run.held,
            experts: run.experts,
        };
        SliceEnd::Suspended(progress, run.given)
    }

    /// Bytes of weights that this slice gave the device to compute with.
    pub(super) fn given_bytes(&self) -> u64 {
        self.run.given.bytes
    }

    /// It ends here: what is held is given back.
    pub(super) fn let_go(&mut self, store: &mut WeightStore) {
        if let Some((index, _)) = self.run.held.take() {
            store.release(id(self.run.pass, index));
        }
    }

    /// Runs the next step, or the next steps that the device is given at once.
    pub(crate) fn go_on(&mut self, store: &mut WeightStore) -> Result<Went, Error> {
        let pass = self.run.pass;
        let left = &pass.plan.steps_for(false)[self.at..];
        let Some(first) = left.first() else {
            return Ok(Went::ToTheHead);
        };
        let n = match self.run.held {
            None => self.run.ready(store, left).max(1),
            Some(_) => 1,
        };
        match n {
            1 => {
                if self.run.step(store, first, &[])? == Stepped::Waits {
                    return Ok(Went::Waits);
                }
            }
            _ => self.run.together(store, &left[..n])?,
        }
        self.at += n;
        Ok(Went::On)
    }

    /// Runs the head for the rows that are wanted, or stops where it would wait for its upload.
    pub(crate) fn end(
        mut self,
        store: &mut WeightStore,
        sink: RowSink<'_>,
    ) -> Result<SliceEnd, Error> {
        let pass = self.run.pass;
        if pass.wants_nothing() {
            return Ok(SliceEnd::Complete(self.run.given));
        }
        let step = &pass.plan.steps[pass.plan.head_step];
        let Step::Run { segment, .. } = step else {
            return Err(Error::Internal("the head of a plan routes".to_owned()));
        };
        let ended = self.run.ended;
        let mut run_head = |store: &mut WeightStore, head: Option<(u32, Slab)>| {
            let mut buffer = Vec::new();
            for chunk in pass.outputs.chunks(pass.scratch.outputs as usize) {
                run_step(store, pass, step, head, chunk)?;
                emit_rows(store, pass, chunk, &mut buffer, sink)?;
                if let Some(error) = ended() {
                    return Err(error);
                }
            }
            for chunk in pass.hidden.chunks(pass.scratch.outputs as usize) {
                run_to_hidden(store, pass, step, head, chunk)?;
                emit_hidden(store, pass, chunk, &mut buffer, sink)?;
                if let Some(error) = ended() {
                    return Err(error);
                }
            }
            Ok(())
        };
        let ran = match *segment {
            Some(head) => self.run.with_segment(store, head, |store, _, slab| {
                run_head(store, Some((head, slab)))
            }),
            // An encoder's head may have nothing to compute with.
            None => run_head(store, None).map(|()| Stepped::Done),
        };
        if ran.is_err() {
            self.let_go(store);
        }
        Ok(match ran? {
            Stepped::Done => {
                self.run.given.was_read = true;
                SliceEnd::Complete(self.run.given)
            }
            Stepped::Waits => self.stop(),
        })
    }
}

/// The part of the head that makes rows' hidden states.
fn run_to_hidden(
    store: &mut WeightStore,
    pass: &Pass<'_>,
    head: &Step,
    weights: Option<(u32, Slab)>,
    rows: &[u32],
) -> Result<(), Error> {
    let hidden = pass.plan.hidden;
    let Step::Run { ops, .. } = head else {
        return Err(Error::Internal("experts are no operations".to_owned()));
    };
    let makes = |op: &Op| {
        let mut found = false;
        op.buffers(&mut |_| {}, &mut |b| found |= b == hidden);
        found
    };
    let Some(last) = ops.iter().position(makes) else {
        return Err(Error::Internal("a head without its norm".to_owned()));
    };
    let (device, layouts) = store.device_and_layouts(pass.model);
    let step = BoundStep::Run {
        ops: &ops[..=last],
        live_out: &[hidden],
        weights: weights.map(|(segment, slab)| SegmentBinding {
            layout: &layouts[segment as usize],
            slab: slab.offset,
        }),
    };
    let ran = device.run(&step, scratch(pass), &batch(pass, rows));
    ran.map_err(|e| store.device_error(Some(pass.model), e))
}

/// Reads the hidden states of `rows` and tells them.
fn emit_hidden(
    store: &mut WeightStore,
    pass: &Pass<'_>,
    rows: &[u32],
    buffer: &mut Vec<f32>,
    sink: RowSink<'_>,
) -> Result<(), Error> {
    let hidden = pass.plan.hidden;
    let width = pass.scratch.bufs[usize::from(hidden.0)].width as usize;
    buffer.resize(width * rows.len(), 0.0);
    let read = store.device.read(scratch(pass), hidden, buffer);
    read.map_err(|e| store.device_error(Some(pass.model), e))?;
    rows.iter()
        .zip(buffer.chunks_exact(width))
        .try_for_each(|(&row, state)| sink(row_of(row), RowOutput::Hidden(state)))
}
