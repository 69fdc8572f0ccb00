//! Rows of logits: their largest elements, found on the device, and the rows themselves, handed
//! over to the host.

use rocmforge_kernels::gpu::ops::sample::{self, TopK};

use crate::error::Error;
use crate::ops::{Buf, PlacedBuf};
use crate::{Candidates, Scratch, TakeRows};

use super::reserve::DeviceReserve;
use super::rows::GROUP_BYTES;
use super::{GpuDevice, bytes_of_mut, launch_error};

impl GpuDevice {
    /// See [`crate::Device::top_k`]; nothing where the reserve has no room for the candidates.
    pub(super) fn largest(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
        k: usize,
    ) -> Result<Option<Vec<Option<Candidates>>>, Error> {
        let reserve = self.reserve_addresses()?;
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let n = width as u32;
        let k = k.min(width as usize);
        if rows == 0 || k == 0 || k > sample::K_MAX as usize {
            return Ok(None);
        }
        let of_row = sample::candidates_bytes(1, n, k as u32);
        // A mark has the first word of the results.
        let room = (reserve.candidates - reserve.results) as usize - 8;
        let at_once = ((reserve.candidates_bytes / of_row) as usize).min(room / (k * 8));
        if at_once == 0 {
            return Ok(None);
        }
        let mut found = Vec::with_capacity(rows);
        for first in (0..rows).step_by(at_once) {
            let n_rows = at_once.min(rows - first);
            let at = at + first as u64 * width * 4;
            let logits = self.arena.at(scratch.base + at, n_rows as u64 * width * 4);
            self.largest_of(logits, (n_rows, width), k, &reserve, &mut found)?;
        }
        Ok(Some(found))
    }

    /// The `k` largest of `rows` rows of `width` logits at an address, as many as
    /// the reserve has room for.
    fn largest_of(
        &mut self,
        logits: u64,
        (rows, width): (usize, u64),
        k: usize,
        reserve: &DeviceReserve,
        found: &mut Vec<Option<Candidates>>,
    ) -> Result<(), Error> {
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
        let mut bytes = vec![0; part * 2];
        self.readback.fetch(&self.compute, ids, &mut bytes)?;
        self.uploads.settle_used()?;
        let words = |bytes: &[u8]| -> Vec<u32> {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().map(|w| u32::from_le_bytes(*w)).collect()
        };
        let (ids, values) = (words(&bytes[..part]), words(&bytes[part..]));
        let rows = ids.chunks_exact(k).zip(values.chunks_exact(k));
        found.extend(rows.map(|(ids, values)| {
            let row = ids
                .iter()
                .zip(values)
                .map(|(&i, &v)| (i, f32::from_bits(v)));
            let row: Candidates = row.collect();
            row[0].1.is_finite().then_some(row)
        }));
        Ok(())
    }

    /// See [`crate::Device::take_rows`].
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
