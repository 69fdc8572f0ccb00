//! The output head's results for a pass's rows: read right after the pass, or later, while passes
//! of other models run.

use std::time::Duration;

use rocmforge_device::ReadTicket;

use crate::api::error::Error;
use crate::memory::Memory;
use crate::pass::spec::{Interest, Pass, PassClient, RowOutput, WantedRow, scratch};

/// Maximum number of best tokens of a row that are read separately, where other rows need all
/// logits.
const ROWS_A_FEW: usize = 4;

/// The best tokens of all rows of a pass, being copied to the host.
#[derive(Debug)]
pub(crate) struct HeadRead {
    ticket: ReadTicket,
}

impl HeadRead {
    /// Starts to read the head's results for all wanted rows; `None` if some rows need all logits,
    /// or if the device computes synchronously.
    pub(super) fn begin(memory: &mut Memory, pass: &Pass<'_>) -> Result<Option<Self>, Error> {
        let n_rows = pass.outputs.len();
        let few = |interest: &Interest| match *interest {
            Interest::Best => Some(1),
            Interest::Top(k) => Some(k),
            Interest::Logits => None,
        };
        let each = pass.interests.iter().map(few);
        let most = each.reduce(|a, b| Some(a?.max(b?))).unwrap_or(Some(1));
        let at_once = pass.hidden.is_empty() && n_rows as u64 <= pass.scratch.outputs;
        let Some(k) = most.filter(|_| at_once && n_rows > 0) else {
            return Ok(None);
        };
        let device = &mut memory.store.device;
        let begun = device.begin_top_k(scratch(pass), pass.plan.logits, n_rows, k);
        let begun = begun.map_err(|e| memory.store.device_error(Some(pass.model), e))?;
        Ok(begun.map(|ticket| Self { ticket }))
    }

    /// Whether the results have arrived, so that reading them does not wait.
    pub(crate) fn has_come(&self, memory: &Memory) -> bool {
        memory.store.device.has_come(self.ticket)
    }

    /// Abandons the read, because its pass failed.
    pub(super) fn forget(self, memory: &mut Memory) {
        if let Err(error) = memory.store.device.end_top_k(self.ticket) {
            tracing::debug!(%error, "what a failed pass found is not read");
        }
    }

    /// Waits for the head and reports the tokens it found. Returns the device time of the pass, if
    /// it was measured.
    pub(super) fn end(
        self,
        memory: &mut Memory,
        pass: &Pass<'_>,
        client: &mut dyn PassClient,
    ) -> Result<Option<Duration>, Error> {
        let ended = memory.store.device.end_top_k(self.ticket);
        let (found, took) = ended.map_err(|e| memory.store.device_error(Some(pass.model), e))?;
        let best = pass.interests.iter().all(|&i| i == Interest::Best);
        for (row, found) in WantedRow::of_part(0, pass.outputs).zip(found) {
            let found = found.as_deref();
            let first = |found: &[(u32, f32)]| found.first().map(|best| best.0);
            client.take(
                row,
                match best {
                    true => RowOutput::Best(found.and_then(first)),
                    false => RowOutput::Top(found),
                },
            );
        }
        Ok(took)
    }
}

/// Reads the head's result for `rows` and reports it to the requests.
pub(super) fn emit_rows(
    memory: &mut Memory,
    pass: &Pass<'_>,
    rows: &[u32],
    client: &mut dyn PassClient,
) -> Result<(), Error> {
    let logits = pass.plan.logits;
    let first = pass.outputs.iter().position(|of| rows.first() == Some(of));
    let first = first.unwrap_or_default();
    let wanted: Vec<WantedRow> = WantedRow::of_part(first, rows).collect();
    let interest_of = |at: usize| pass.interests.get(first + at);
    let wants_all = |at: usize| interest_of(at) == Some(&Interest::Logits);
    let few = (0..rows.len()).filter(|&row| !wants_all(row));
    let few = few.map(|row| interest_of(row).copied().unwrap_or(Interest::Best));
    let few: Vec<Interest> = few.collect();
    let some_want_all = few.len() < rows.len();
    // Those who look at few tokens get few, though others look at all. Beside the many rows of a
    // score it would take longer to find those of all.
    let most = few.iter().max().copied();
    let most = most.filter(|_| rows.len() <= ROWS_A_FEW * few.len());
    let k = match most {
        Some(Interest::Best) if !some_want_all => {
            let best = memory
                .store
                .device
                .argmax(scratch(pass), logits, rows.len());
            if let Some(best) = best.map_err(|e| memory.store.device_error(Some(pass.model), e))? {
                let found = wanted.iter().zip(best);
                found.for_each(|(&row, best)| client.take(row, RowOutput::Best(best)));
                return Ok(());
            }
            None
        }
        Some(Interest::Best) => Some(1),
        Some(Interest::Top(k)) => Some(k),
        Some(Interest::Logits) | None => None,
    };
    let top = match k {
        Some(k) => {
            let top = memory
                .store
                .device
                .top_k(scratch(pass), logits, rows.len(), k);
            top.map_err(|e| memory.store.device_error(Some(pass.model), e))?
        }
        None => None,
    };
    if let Some(top) = &top {
        let few = wanted.iter().zip(top).enumerate();
        for (_, (&row, top)) in few.filter(|(at, _)| !wants_all(*at)) {
            client.take(row, RowOutput::Top(top.as_deref()));
        }
    }
    let whole = (0..rows.len()).filter(|&at| top.is_none() || wants_all(at));
    let (places, whole): (Vec<u32>, Vec<WantedRow>) =
        whole.map(|at| (at as u32, wanted[at])).unzip();
    let width = pass.scratch.bufs[usize::from(logits.0)].width as usize;
    let taken =
        memory
            .store
            .device
            .take_rows(scratch(pass), logits, &places, &mut |first, values| {
                let rows = &whole[first..][..values.len() / width];
                client.take_logits(rows, values);
            });
    taken.map_err(|e| memory.store.device_error(Some(pass.model), e))
}

/// Reads the hidden states of `rows`, of which the first is the wanted row `first`, and hands them
/// to their requests.
pub(super) fn emit_hidden(
    memory: &mut Memory,
    pass: &Pass<'_>,
    (first, rows): (usize, &[u32]),
    client: &mut dyn PassClient,
) -> Result<(), Error> {
    let hidden = pass.plan.hidden;
    let width = pass.scratch.bufs[usize::from(hidden.0)].width as usize;
    let mut buffer = vec![0.0; width * rows.len()];
    let read = memory.store.device.read(scratch(pass), hidden, &mut buffer);
    read.map_err(|e| memory.store.device_error(Some(pass.model), e))?;
    let wanted = WantedRow::of_part(first, rows);
    for (row, state) in wanted.zip(buffer.chunks_exact(width)) {
        client.take(row, RowOutput::Hidden(state));
    }
    Ok(())
}
