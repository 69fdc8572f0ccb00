//! Runs a pass in slices: each continues where the one before stopped, and stops between two steps.

use crate::api::RequestCacheUse;
use crate::api::error::Error;
use crate::memory::Memory;
use crate::pass::run::{Load, all_resident, begin, write_inputs};
use crate::pass::spec::{Pass, PassClient};
use crate::pass::stepwise::{Progress, SliceEnd, StepProgress, Stepwise};
use crate::pass::work::Amount;

/// Parameters of a slice of a pass.
#[derive(Clone, Copy)]
pub(crate) struct Slicing<'a> {
    /// Called after each step with the work that the slice has queued so far; returns whether to
    /// stop there.
    pub(crate) is_over: &'a dyn Fn(&Memory, Amount) -> bool,
    /// Whether the pass also stops where it would wait for an upload.
    pub(crate) suspends: bool,
    /// Whether the pass also stops where it would wait for the device to compute its results.
    pub(crate) reads_later: bool,
    /// Whether the pass is so short that the device may be given all of it at once.
    pub(crate) whole: bool,
    /// Whether the whole pass ends before the next promised pass of another model has to begin.
    pub(crate) fits: bool,
}

/// The start of a slice: a new pass or a suspended one.
pub(crate) enum SliceStart<'a> {
    /// The slice begins at the first step, with the rows of the inputs.
    Inputs(&'a [Vec<u8>]),
    /// The slice continues where an earlier slice stopped.
    Progress(Progress),
}

/// Runs a whole pass. `inputs` has for each input of the plan `n_tokens` rows in the tensor type of
/// its table.
pub(crate) fn run(
    memory: &mut Memory,
    pass: &Pass<'_>,
    inputs: &[Vec<u8>],
    counts: &mut RequestCacheUse,
    client: &mut dyn PassClient,
) -> Result<(), Error> {
    let slicing = Slicing {
        is_over: &|_, _| false,
        suspends: false,
        reads_later: false,
        whole: true,
        fits: true,
    };
    run_slice(
        memory,
        pass,
        SliceStart::Inputs(inputs),
        slicing,
        counts,
        client,
    )
    .map(|_| ())
}

/// Runs a slice of a pass, as [`run`], but it may stop between two steps, and may begin where an
/// earlier slice stopped. The [`Pass`] may be rebuilt between slices from the same rows and
/// scratch.
pub(crate) fn run_slice(
    memory: &mut Memory,
    pass: &Pass<'_>,
    start: SliceStart<'_>,
    slicing: Slicing<'_>,
    counts: &mut RequestCacheUse,
    client: &mut dyn PassClient,
) -> Result<SliceEnd, Error> {
    let end = match start {
        SliceStart::Inputs(inputs) => {
            begin(memory, pass)?;
            first_slice(memory, pass, inputs, slicing, counts, client)
        }
        SliceStart::Progress(mut progress) => match progress.take_read() {
            Some(read) => read.end(memory, pass, client).map(|timed| {
                SliceEnd::Complete(Load {
                    timed,
                    ..Load::default()
                })
            }),
            None => {
                let mut steps = Stepwise::resume(memory, pass, progress, counts, client);
                steps.suspends(slicing.suspends, slicing.reads_later);
                go_on(memory, steps, slicing.is_over)
            }
        },
    };
    if !matches!(end, Ok(SliceEnd::Suspended(..))) {
        memory.store.cache.pass_end(pass.model);
    }
    end
}

fn first_slice(
    memory: &mut Memory,
    pass: &Pass<'_>,
    inputs: &[Vec<u8>],
    slicing: Slicing<'_>,
    counts: &mut RequestCacheUse,
    client: &mut dyn PassClient,
) -> Result<SliceEnd, Error> {
    write_inputs(memory, pass, inputs)?;
    let at_once = match memory.store.records {
        true => pass.decodes() || pass.has_few_routed_rows() || pass.is_of_short_texts(),
        false => pass.decodes() && slicing.whole,
    };
    if at_once
        && slicing.fits
        && let Some(there) = memory.all_resident(pass.model, counts)?
    {
        let reading = all_resident(memory, pass, &there, client, slicing.reads_later)?;
        let load = Load {
            amount: Amount {
                bytes: memory.store.model_bytes(pass.model),
                attended: pass.plan.steps.iter().map(|s| pass.attended(s)).sum(),
            },
            was_read: !pass.wants_nothing() && reading.is_none(),
            timed: None,
        };
        return Ok(match reading {
            Some(read) => SliceEnd::Suspended(Progress::reading(read), load),
            None => SliceEnd::Complete(load),
        });
    }
    let mut steps = Stepwise::new(memory, pass, counts, client);
    steps.suspends(slicing.suspends, slicing.reads_later);
    go_on(memory, steps, slicing.is_over)
}

/// Continues a pass from its current step until it is complete or has to be suspended.
fn go_on(
    memory: &mut Memory,
    mut steps: Stepwise<'_, '_>,
    is_over: &dyn Fn(&Memory, Amount) -> bool,
) -> Result<SliceEnd, Error> {
    let mut is_first = true;
    loop {
        let went = steps.go_on(memory);
        if went.is_err() {
            steps.let_go(memory);
        }
        match went? {
            StepProgress::Waits => return Ok(steps.stop()),
            StepProgress::On => {
                if std::mem::take(&mut is_first) {
                    steps.begun();
                }
                if is_over(memory, steps.given()) {
                    return Ok(steps.stop());
                }
            }
            StepProgress::ToTheHead => break,
        }
    }
    steps.end(memory)
}
