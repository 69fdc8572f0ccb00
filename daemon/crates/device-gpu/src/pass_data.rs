//! What changes from pass to pass (positions, page tables, rotations, wanted rows),
//! on its way to the device.
//!
//! The data of a pass is written to pinned memory and copied to fixed places before the pass's
//! operations, so a recorded graph finds new values at the addresses that it knows.
//!
//! Rows lie in the pass's scratch block, so those of a pass that goes on behind passes of others
//! are there still; the page table lies in the reserve, and is the last pass's.
//!
//! *Invariant:* what the device has is what [`PassData`] remembers having sent;
//! [`PassData::forget`] is called whenever that may be wrong (by `GpuDevice::addresses_changed`),
//! and [`PassData::begin`] for each pass, whose scratch block may have been others' memory before.

use rocmforge_device::Error;
use rocmforge_device::ops::{Batch, KvGroup, Span};
use rocmforge_kernels_gpu::ops::attention::prefill_tiles;
use rocmforge_kernels_gpu::ops::recurrent::SequencePlace;

use super::reserve::DeviceReserve;
use super::sending::Sender;
use super::workspace::{PLACE_BYTES, Workspace};

/// Scratch blocks whose rows are remembered, at most: passes that are under way at once, and those
/// that come again.
const BLOCKS_MAX: usize = 16;

/// What the device has now.
#[derive(Debug, Default)]
pub(super) struct PassData {
    /// What lies in scratch blocks, by their offsets; those that are not here must be sent to.
    blocks: Vec<(u64, SentRows)>,
    table: Vec<u64>,
    table_strides: [u32; 2],
    bytes: Vec<u8>,
}

/// What was sent to a scratch block: beside this also rotations, which follow from it.
#[derive(Debug, Default)]
struct SentRows {
    positions: Vec<u32>,
    sequences: Vec<u32>,
    outputs: Vec<u32>,
    /// First row, number of rows and first position of each part.
    parts: Vec<[u32; 3]>,
}

impl SentRows {
    /// Whether they are those of a batch, but for the rows that are wanted.
    fn are_of(&self, batch: &Batch<'_>) -> bool {
        let rows: usize = batch.spans.iter().map(|s| s.n_rows).sum();
        let is_there = |(i, s): (usize, &Span<'_>)| {
            let mine = s.first_row..s.first_row + s.n_rows;
            let first = self.positions.get(mine.clone()).and_then(<[u32]>::first);
            first == Some(&(s.first_position))
                && self.sequences[mine].iter().all(|&q| q as usize == i)
        };
        rows == self.positions.len()
            && batch.spans.iter().enumerate().all(is_there)
            && parts_of(batch).eq(self.parts.iter().copied())
    }
}

/// Where the data goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places<'a> {
    pub(super) workspace: &'a Workspace,
    /// Addresses of the reserve's parts.
    pub(super) reserve: &'a DeviceReserve,
    /// Address of the arena.
    pub(super) arena: u64,
    /// The scratch block: its offset in the arena, and its address.
    pub(super) scratch: u64,
    pub(super) scratch_base: u64,
}

/// The shape of what was sent, which launches need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PassShape {
    pub(super) spans: SpansShape,
    /// Of the parts of sequences.
    pub(super) parts: SpansShape,
    /// No position is at or beyond this.
    pub(super) positions_max: u32,
}

/// The shape of what was sent of sequences, or of their parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpansShape {
    pub(super) table_stride: u32,
    /// Tiles of spans behind the leading ones of one row.
    pub(super) n_tiles: u32,
    /// Rows of the longest tile.
    pub(super) tile_rows: u32,
    /// Spans of one row before all longer ones.
    pub(super) single_rows: u32,
}

impl PassShape {
    /// Whether every sequence has one row.
    pub(super) fn is_decode(self) -> bool {
        self.spans.n_tiles == 0
    }

    /// The first entry of a group's part of the page table: of groups whose sequences are parts
    /// behind all of the others.
    pub(super) fn table_start(&self, batch: &Batch<'_>, group: u8) -> u64 {
        let (before, rest) = batch.kv.split_at(usize::from(group));
        let count = |of: &[KvGroup], parts: bool| {
            of.iter().filter(|group| group.parts == parts).count() as u64
        };
        let each = |n: u64, spans: &[Span<'_>], shape: SpansShape| {
            n * spans.len() as u64 * u64::from(shape.table_stride)
        };
        match rest.first().is_some_and(|group| group.parts) {
            false => each(count(before, false), batch.spans, self.spans),
            true => {
                each(count(batch.kv, false), batch.spans, self.spans)
                    + each(count(before, true), batch.parts, self.parts)
            }
        }
    }
}

impl SpansShape {
    fn of(spans: &[Span<'_>], least: usize) -> Self {
        let pages = spans
            .iter()
            .flat_map(|s| s.kv_pages.iter().map(|pages| pages.len()));
        let tiles = tiles(spans);
        let single_rows = spans.iter().take_while(|s| s.n_rows == 1).count();
        Self {
            table_stride: stride_for(pages.max().unwrap_or(0), least) as u32,
            n_tiles: tiles.len() as u32,
            tile_rows: tiles.iter().map(|tile| tile[1]).max().unwrap_or(0),
            single_rows: single_rows as u32,
        }
    }
}

/// Entries of a sequence in the page table: a power of two, so that a growing
/// sequence rarely changes it.
fn stride_for(pages: usize, least: usize) -> usize {
    pages.next_power_of_two().max(least)
}

impl PassData {
    /// Everything must be sent again.
    pub(super) fn forget(&mut self) {
        self.blocks.clear();
        self.table.clear();
    }

    /// A pass begins in the scratch block at an offset.
    pub(super) fn begin(&mut self, scratch: u64) {
        self.blocks.retain(|(at, _)| *at != scratch);
    }

    /// The shape of a batch, before anything is sent.
    pub(super) fn shape(batch: &Batch<'_>) -> PassShape {
        let last = batch
            .spans
            .iter()
            .map(|s| s.first_position + s.n_rows as u32)
            .max();
        PassShape {
            spans: SpansShape::of(batch.spans, 8),
            // They are computed by one pass and do not grow.
            parts: SpansShape::of(batch.parts, 1),
            positions_max: last.unwrap_or(1).next_power_of_two().max(256),
        }
    }

    /// Sends what the device does not have yet.
    pub(super) fn send(
        &mut self,
        batch: &Batch<'_>,
        shape: PassShape,
        places: Places<'_>,
        sender: Sender<'_>,
    ) -> Result<(), Error> {
        let Places {
            workspace,
            reserve,
            scratch,
            scratch_base,
            ..
        } = places;
        let known = self.blocks.iter().position(|(at, _)| *at == scratch);
        // It is not known while it is sent, should that fail.
        let known = known.map(|at| self.blocks.swap_remove(at).1);
        let mut rows = match known.filter(|rows| rows.are_of(batch)) {
            Some(rows) => rows,
            None => self.send_rows(batch, &places, sender)?,
        };
        if !batch.outputs.is_empty() && rows.outputs != batch.outputs {
            let at = scratch_base + workspace.outputs;
            send(sender, at, batch.outputs, u32::to_le_bytes, &mut self.bytes)?;
            rows.outputs = batch.outputs.to_vec();
        }
        if self.blocks.len() >= BLOCKS_MAX {
            self.blocks.remove(0);
        }
        self.blocks.push((scratch, rows));
        self.send_table(batch, shape, reserve, sender)
    }

    fn send_rows(
        &mut self,
        batch: &Batch<'_>,
        places: &Places<'_>,
        sender: Sender<'_>,
    ) -> Result<SentRows, Error> {
        let &Places {
            workspace,
            arena,
            scratch_base,
            ..
        } = places;
        let room = (workspace.pass_end - workspace.rope) as usize;
        let elements: usize = batch
            .rope
            .iter()
            .map(|r| r.cos().len() + r.sin().len())
            .sum();
        if elements * 4 > room {
            return Err(Error::Driver {
                operation: "rotations",
                message: format!("{elements} elements are more than there is room for"),
            });
        }
        let (positions, sequences) = of_rows(batch.spans);
        let mut sent = SentRows {
            positions,
            sequences,
            outputs: Vec::new(),
            parts: parts_of(batch).collect(),
        };
        // One piece of memory from positions to the rotations' end, as it lies on the device.
        let start = workspace.positions;
        let end = workspace.rope + elements as u64 * 4;
        let bytes = &mut self.bytes;
        // What lies between the parts is read by nobody.
        bytes.resize((end - start) as usize, 0);
        let place = |at: u64| (at - start) as usize;
        put(
            &mut bytes[place(workspace.positions)..],
            &sent.positions,
            u32::to_le_bytes,
        );
        put(
            &mut bytes[place(workspace.sequences)..],
            &sent.sequences,
            u32::to_le_bytes,
        );
        if batch.outputs.len() * 4 <= (workspace.tiles - workspace.outputs) as usize {
            put(
                &mut bytes[place(workspace.outputs)..],
                batch.outputs,
                u32::to_le_bytes,
            );
            sent.outputs = batch.outputs.to_vec();
        }
        let tiles_of_parts = tiles(batch.parts);
        put(
            &mut bytes[place(workspace.tiles)..],
            tiles(batch.spans).as_flattened(),
            u32::to_le_bytes,
        );
        put_places(
            &mut bytes[place(workspace.places)..],
            batch.spans,
            arena,
            batch.has_whole_spans(),
        );
        if !batch.parts.is_empty() {
            let of = workspace.of_parts;
            let (positions, sequences) = of_rows(batch.parts);
            let tiles = tiles_of_parts.as_flattened();
            for (at, values) in [
                (of.positions, &positions[..]),
                (of.sequences, &sequences),
                (of.tiles, tiles),
            ] {
                put(&mut bytes[place(at)..], values, u32::to_le_bytes);
            }
            let places = &mut bytes[place(of.places)..];
            put_places(places, batch.parts, arena, batch.has_whole_spans());
        }
        let mut rotations = &mut bytes[place(workspace.rope)..];
        for values in batch.rope.iter().flat_map(|r| [r.cos(), r.sin()]) {
            put(rotations, values, f32::to_le_bytes);
            rotations = &mut rotations[values.len() * 4..];
        }
        sender.bytes(scratch_base + start, bytes)?;
        Ok(sent)
    }

    fn send_table(
        &mut self,
        batch: &Batch<'_>,
        shape: PassShape,
        reserve: &DeviceReserve,
        sender: Sender<'_>,
    ) -> Result<(), Error> {
        let strides = [shape.spans, shape.parts].map(|of| of.table_stride);
        let fresh = page_table(batch, shape);
        if self.table == fresh && self.table_strides == strides {
            return Ok(());
        }
        if fresh.len() as u64 > reserve.table_len {
            return Err(Error::Driver {
                operation: "page table",
                message: format!(
                    "{} entries are more than the {} that there is room for; ask for a shorter context",
                    fresh.len(),
                    reserve.table_len
                ),
            });
        }
        // The rows that changed, from the first to the last one, which sequences
        // that grew in turn keep few.
        let stride = shape.spans.table_stride as usize;
        let same = |(old, new): (&[u64], &[u64])| old == new;
        let rows = || self.table.chunks(stride).zip(fresh.chunks(stride));
        let (from, to) = match self.table.len() == fresh.len()
            && self.table_strides == strides
            && batch.parts.is_empty()
        {
            true => {
                let before = rows().take_while(|r| same(*r)).count();
                let after = rows().rev().take_while(|r| same(*r)).count();
                (before * stride, fresh.len() - after * stride)
            }
            false => (0, fresh.len()),
        };
        self.table.clear();
        send(
            sender,
            reserve.table + from as u64 * 8,
            &fresh[from..to],
            u64::to_le_bytes,
            &mut self.bytes,
        )?;
        self.table = fresh;
        self.table_strides = strides;
        Ok(())
    }
}

/// The page table: one group after the other, each with a row a sequence, and behind them those
/// whose sequences are parts.
fn page_table(batch: &Batch<'_>, shape: PassShape) -> Vec<u64> {
    let mut table = Vec::new();
    for parts in [false, true] {
        let (spans, shape) = match parts {
            false => (batch.spans, shape.spans),
            true => (batch.parts, shape.parts),
        };
        for group in (0..batch.kv.len()).filter(|&group| batch.kv[group].parts == parts) {
            for span in spans {
                let end = table.len() + shape.table_stride as usize;
                // Nobody reads the pages that a sequence does not hold; what warms
                // up kernels has none at all.
                table.extend(span.kv_pages.get(group).copied().unwrap_or_default());
                table.resize(end, 0);
            }
        }
    }
    table
}

/// The position of each row, and its sequence.
fn of_rows(spans: &[Span<'_>]) -> (Vec<u32>, Vec<u32>) {
    let (mut positions, mut sequences) = (Vec::new(), Vec::new());
    for (i, span) in (0u32..).zip(spans) {
        let first = span.first_position;
        positions.extend(first..first + span.n_rows as u32);
        sequences.extend(std::iter::repeat_n(i, span.n_rows));
    }
    (positions, sequences)
}

/// What tells the parts of one pass from those of another.
fn parts_of<'a>(batch: &'a Batch<'_>) -> impl Iterator<Item = [u32; 3]> + 'a {
    let parts = batch.parts.iter();
    parts.map(|s| [s.first_row as u32, s.n_rows as u32, s.first_position])
}

/// Puts the sequences' places. Where some attend ahead because they are images' (`wholes`), the
/// others do not.
fn put_places(to: &mut [u8], spans: &[Span<'_>], arena: u64, wholes: bool) {
    for (i, (span, to)) in spans
        .iter()
        .zip(to.chunks_exact_mut(PLACE_BYTES as usize))
        .enumerate()
    {
        let last = span.first_position + (span.n_rows as u32).saturating_sub(1);
        let drafts = spans[i + 1..].iter().take_while(|s| s.draft).count() as u32;
        let sequence = SequencePlace {
            first_row: span.first_row as u32,
            // A draft's row is computed with those that it goes on from.
            n_rows: if span.draft { 0 } else { span.n_rows as u32 },
            first_position: span.first_position,
            drafts: if span.draft { 0 } else { drafts },
            state: arena + span.state,
            state_out: arena + span.state_out,
            last: if wholes && !span.whole { 0 } else { last },
            reserved: 0,
        };
        to.copy_from_slice(&sequence.to_bytes());
    }
}

/// Tiles of the rows behind the leading spans of one row: first row, rows.
fn tiles(spans: &[Span<'_>]) -> Vec<[u32; 2]> {
    let longer = spans.iter().skip_while(|s| s.n_rows == 1);
    prefill_tiles(longer.map(|s| (s.first_row as u32, s.n_rows as u32)))
}

fn put<T: Copy, const N: usize>(to: &mut [u8], values: &[T], bytes: impl Fn(T) -> [u8; N]) {
    for (to, &value) in to.chunks_exact_mut(N).zip(values) {
        to.copy_from_slice(&bytes(value));
    }
}

/// Copies values to an address, through pinned memory.
pub(super) fn send<T: Copy, const N: usize>(
    sender: Sender<'_>,
    at: u64,
    values: &[T],
    to_bytes: impl Fn(T) -> [u8; N],
    room: &mut Vec<u8>,
) -> Result<(), Error> {
    room.clear();
    room.resize(values.len() * N, 0);
    put(room, values, to_bytes);
    sender.bytes(at, room)
}
