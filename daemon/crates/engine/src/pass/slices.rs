//! A pass in slices: each goes on from where the one before stopped, and stops between two steps.

use super::{Pass, Progress, RowSink, Stepwise, Went, all_resident, begin, write_inputs};
use crate::api::RequestCacheUse;
use crate::error::Error;
use crate::weight_store::WeightStore;

/// What came of a slice of a pass, and what the device was given to do.
pub(crate) enum SliceEnd {
    /// The pass is complete.
    Complete(Load),
    /// It stopped between two steps.
    Suspended(Progress, Load),
}

/// What a slice gave the device to do.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Load {
    /// Bytes of weights to compute with.
    pub(crate) bytes: u64,
    /// Something was read behind most of it, and so waited for.
    pub(crate) was_read: bool,
}

/// How a slice of a pass runs.
#[derive(Clone, Copy)]
pub(crate) struct Slicing<'a> {
    /// Asked behind each step, with the bytes of weights that the slice gave the device to compute
    /// with so far: whether to stop there.
    pub(crate) is_over: &'a dyn Fn(u64) -> bool,
    /// It stops, too, where it would wait for an upload.
    pub(crate) suspends: bool,
    /// The pass is so short that the device may have it at once.
    pub(crate) whole: bool,
}

/// Where a slice begins.
pub(crate) enum Start<'a> {
    /// At the first step, with the rows of the inputs.
    Inputs(&'a [Vec<u8>]),
    /// Where the slice before stopped.
    Progress(Progress),
}

/// Runs a slice of a pass: as [`run`], but it may stop between two steps, and begin where the slice
/// before stopped. The pass may be built anew meanwhile, of the same rows and the same scratch.
pub(crate) fn run_slice(
    store: &mut WeightStore,
    pass: &Pass<'_>,
    start: Start<'_>,
    slicing: Slicing<'_>,
    (counts, ended, begun): (&mut RequestCacheUse, &dyn Fn() -> Option<Error>, &dyn Fn()),
    sink: RowSink<'_>,
) -> Result<SliceEnd, Error> {
    let end = match start {
        Start::Inputs(inputs) => {
            begin(store, pass)?;
            first_slice(store, pass, inputs, slicing, (counts, ended, begun), sink)
        }
        Start::Progress(progress) => {
            let mut steps = Stepwise::resume(store, pass, progress, counts, ended);
            steps.suspends(slicing.suspends);
            go_on(store, steps, slicing.is_over, begun, sink)
        }
    };
    if !matches!(end, Ok(SliceEnd::Suspended(..))) {
        store.cache.pass_end(pass.model);
    }
    end
}

fn first_slice(
    store: &mut WeightStore,
    pass: &Pass<'_>,
    inputs: &[Vec<u8>],
    slicing: Slicing<'_>,
    (counts, ended, begun): (&mut RequestCacheUse, &dyn Fn() -> Option<Error>, &dyn Fn()),
    sink: RowSink<'_>,
) -> Result<SliceEnd, Error> {
    write_inputs(store, pass, inputs)?;
    let at_once = match store.records {
        true => pass.decodes() || pass.has_few_routed_rows(),
        false => pass.decodes() && slicing.whole,
    };
    if at_once && let Some(there) = store.all_resident(pass.model, counts)? {
        let load = Load {
            bytes: store.model_bytes(pass.model),
            was_read: !pass.outputs.is_empty(),
        };
        return all_resident(store, pass, &there, begun, sink).map(|()| SliceEnd::Complete(load));
    }
    let mut steps = Stepwise::new(store, pass, counts, ended);
    steps.suspends(slicing.suspends);
    go_on(store, steps, slicing.is_over, begun, sink)
}

/// Runs the steps of a pass from where it is until it is over or to stop.
fn go_on(
    store: &mut WeightStore,
    mut steps: Stepwise<'_, '_>,
    is_over: &dyn Fn(u64) -> bool,
    begun: &dyn Fn(),
    sink: RowSink<'_>,
) -> Result<SliceEnd, Error> {
    let mut is_first = true;
    loop {
        let went = steps.go_on(store);
        if went.is_err() {
            steps.let_go(store);
        }
        match went? {
            Went::Waits => return Ok(steps.stop()),
            Went::On => {
                if std::mem::take(&mut is_first) {
                    begun();
                }
                if is_over(steps.given_bytes()) {
                    return Ok(steps.stop());
                }
            }
            Went::ToTheHead => break,
        }
    }
    steps.end(store, sink)
}
