//! Rows of logits: their largest elements, found on the device, and the rows themselves, handed
//! over to the host.

use rocmforge_device::ops::{Buf, PlacedBuf};
use rocmforge_device::{
    Candidates, Error, QueuedReads, ReadTicket, Scratch, Selection, TakeRows, TimedCandidates,
};
use rocmforge_kernels_gpu::ops::sample::{self, TopK};

use super::floats::bytes_of_mut;
use super::reserve::DeviceReserve;
use super::rows::GROUP_BYTES;
use super::{GpuDevice, launch_error};

/// Rows whose `k` largest elements the reserve has room for at once, of so many elements each.
fn rows_at_once(reserve: &DeviceReserve, width: u64, k: usize) -> usize {
    if k == 0 || k > sample::K_MAX as usize {
        return 0;
    }
    let of_row = sample::candidates_bytes(1, width as u32, k as u32);
    // A mark has the first word of the results.
    let room = (reserve.candidates - reserve.results) as usize - 8;
    ((reserve.candidates_bytes / of_row) as usize).min(room / (k * 8))
}

/// The `k` largest elements of each row, of their ids and, behind all of these, their values.
fn candidates(bytes: &[u8], k: usize) -> Vec<Option<Candidates>> {
    let (words, _) = bytes.as_chunks::<4>();
    let (ids, values) = words.split_at(words.len() / 2);
    let rows = ids.chunks_exact(k).zip(values.chunks_exact(k));
    let of_row = |(ids, values): (&[[u8; 4]], &[[u8; 4]])| {
        let row = ids.iter().zip(values);
        let row: Candidates = row
            .map(|(id, value)| (u32::from_le_bytes(*id), f32::from_le_bytes(*value)))
            .collect();
        row[0].1.is_finite().then_some(row)
    };
    rows.map(of_row).collect()
}

impl GpuDevice {
    /// Queues what finds the `k` largest of `rows` rows of `width` logits at an address, as many as
    /// the reserve has room for; the address and bytes of their ids, and then of their values.
    fn queue_largest(
        &self,
        logits: u64,
        (rows, width): (usize, u64),
        k: usize,
        reserve: &DeviceReserve,
    ) -> Result<(u64, usize), Error> {
        let part = rows * k * 4;
        let (ids, values) = (reserve.results + 8, reserve.results + 8 + part as u64);
        let to = TopK {
            candidates: reserve.candidates,
            values: Some(values),
            ids,
            next: None,
        };
        let launches = sample::top_k(logits, rows as u32, width, k as u32, to)
            .map_err(|e| launch_error(&e))?;
        for launch in &launches {
            // SAFETY: the logits are the pass's, the rest is the reserve's.
            unsafe { self.kernels.launch(launch, &self.compute)? };
        }
        Ok((ids, part * 2))
    }

    /// See [`rocmforge_device::Device::take_rows`].
    pub(super) fn hand_over(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: &[u32],
        take: TakeRows<'_>,
    ) -> Result<(), Error> {
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let (Some(last), row_bytes) = (rows.last(), width as usize * 4) else {
            return Ok(());
        };
        let bytes = (u64::from(*last) + 1) * row_bytes as u64;
        let at = self.arena.at(scratch.base + at, bytes);
        let fits = row_bytes <= GROUP_BYTES;
        let groups = fits.then(|| self.rows.groups(&self.context)).flatten();
        if let Some(groups) = groups {
            let settle = || self.uploads.settle_used();
            let on = (&self.compute, self.config.watchdog);
            return groups.hand_over(on, (at, row_bytes), rows, settle, take);
        }
        let mut values = vec![0.0; width as usize];
        for (place, row) in rows.iter().enumerate() {
            let from = at + u64::from(*row) * row_bytes as u64;
            self.fetch(from, bytes_of_mut(&mut values))?;
            self.uploads.settle_used()?;
            take(place, &mut values);
        }
        Ok(())
    }
}

impl Selection for GpuDevice {
    /// Nothing where the reserve has no room for the candidates.
    fn top_k(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
        k: usize,
    ) -> Result<Option<Vec<Option<Candidates>>>, Error> {
        let reserve = self.reserve_addresses()?;
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let k = k.min(width as usize);
        let at_once = rows_at_once(&reserve, width, k);
        if rows == 0 || at_once == 0 {
            return Ok(None);
        }
        let mut found = Vec::with_capacity(rows);
        for first in (0..rows).step_by(at_once) {
            let n_rows = at_once.min(rows - first);
            let at = at + first as u64 * width * 4;
            let logits = self.arena.at(scratch.base + at, n_rows as u64 * width * 4);
            let (at, bytes) = self.queue_largest(logits, (n_rows, width), k, &reserve)?;
            let mut bytes = vec![0; bytes];
            self.readback.fetch(&self.compute, at, &mut bytes)?;
            self.uploads.settle_used()?;
            found.append(&mut candidates(&bytes, k));
        }
        Ok(Some(found))
    }
}

impl QueuedReads for GpuDevice {
    fn time_from_here(&mut self) -> Result<(), Error> {
        match self.reads.places(&self.context) {
            Some(places) => places.time_from_here(&self.compute),
            None => Ok(()),
        }
    }

    fn begin_top_k(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
        k: usize,
    ) -> Result<Option<ReadTicket>, Error> {
        let reserve = self.reserve_addresses()?;
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let k = k.min(width as usize);
        let fits = rows > 0 && rows <= rows_at_once(&reserve, width, k);
        let places = self.reads.places(&self.context);
        if !fits || places.is_none_or(|places| !places.has_room(rows * k * 8)) {
            return Ok(None);
        }
        let logits = self.arena.at(scratch.base + at, rows as u64 * width * 4);
        let (at, bytes) = self.queue_largest(logits, (rows, width), k, &reserve)?;
        let uploads = self.uploads.mark();
        match self.reads.places(&self.context) {
            Some(places) => places.begin(&self.compute, (at, bytes), (k, uploads)),
            None => Ok(None),
        }
    }

    fn has_come(&self, ticket: ReadTicket) -> bool {
        self.reads.has_come(ticket)
    }

    fn end_top_k(&mut self, ticket: ReadTicket) -> Result<TimedCandidates, Error> {
        let come = self.reads.end(ticket)?;
        self.graphs.let_go(come.queued);
        self.uploads.settle_before(come.uploads)?;
        Ok((candidates(&come.bytes, come.of_row), come.took))
    }
}
