//! A GPU as a [`Device`]: one code over either vendor's driver.
//!
//! ```text
//! opening.rs        a card from its configuration; registration.rs: how files reach it;
//!                   closed.rs: without a context, until it is opened again
//! engine thread --> arena/ (slabs), aside.rs and outgoing.rs (pages that leave the card),
//!                   reserve.rs (the device's own block; marks.rs in it), embedding.rs,
//!                   passes.rs: pass_data.rs (positions, page tables), launches.rs (operations,
//!                   fused by fuse.rs), products.rs (the vendor's), graphs.rs (recorded decode
//!                   steps), sampling.rs, readback.rs, reads.rs, timed.rs
//!                                                              on the compute stream
//! staging threads --> uploads/, windows.rs (registered mappings), ring.rs (pinned memory)
//!                                                              on the copy and repack streams
//! kernel threads --> warmup.rs (a model's kernels, ahead of its first request)
//! ```
//!
//! This file: the device's state, and [`Device`] over its parts. The interfaces that only some
//! devices have are implemented in the file of their part: [`Monitoring`] in `monitoring.rs`,
//! [`Reserve`] in `reserve.rs`, [`Preparation`] in `warmup.rs`, [`HostCopies`] in `aside.rs`,
//! [`Recording`] in `passes.rs`, [`Selection`] and [`QueuedReads`] in `sampling.rs`, [`Timing`] in
//! `timed.rs`, [`VolatileMemory`] in `marks.rs`, [`Closing`] in `closed.rs`.
//!
//! What a pass queues is ordered by events. The engine thread waits for the device only where it
//! needs what is there ([`Device::read`], [`Device::read_slab`], [`Selection::top_k`],
//! [`QueuedReads::end_top_k`], [`VolatileMemory::check`]), where memory is about to go or to
//! change ([`Device::set_capacity`], [`Device::renew`], [`Reserve::set_reserve`],
//! [`Preparation::forget_file`]), where recordings are to be let go that may run, and
//! for a piece of a full ring.
//!
//! *Invariant:* driver allocations of device memory are made at start-up and when the capacity
//! changes, none per upload, pass or request (`exam` in the engine's `tests/gpu_fake.rs` counts
//! them); of pinned memory besides, chunks for `aside.rs`, and once what `rows.rs`, `reads.rs`
//! and `outgoing.rs` need. A slab, page or buffer is touched by the compute stream only, except
//! while it is uploaded.

mod arena;
mod aside;
pub mod ceilings;
mod closed;
mod config;
mod embedding;
mod errors;
mod floats;
mod fuse;
mod graphs;
mod holds;
mod kernels;
mod launches;
mod marks;
mod monitoring;
mod opening;
mod outgoing;
mod pace;
mod pass_data;
mod passes;
mod products;
mod readback;
mod reads;
mod registration;
mod reserve;
mod ring;
mod rows;
mod sampling;
mod segments;
mod sending;
mod timed;
mod uploads;
mod wait;
mod warmup;
mod windows;
mod workspace;

use std::sync::Arc;

use rocmforge_device::ops::{Batch, Buf, PlacedBuf, ScratchLayout};
use rocmforge_device::{
    BoundStep, Closing, Device, DeviceInfo, DeviceKind, Error, HostCopies, Monitoring, Preparation,
    QueuedReads, Recording, Reserve, Scratch, SegmentLayout, Selection, TakeRows, TensorDesc,
    Timing, Upload, UploadTicket, VolatileMemory,
};
use rocmforge_gpu_driver::others::Card;
use rocmforge_gpu_driver::{Context, KernelView, Stream, Vendor};
use rocmforge_kernels_gpu::GpuTarget;

use arena::Arena;
use aside::Aside;
use errors::{failed, launch_error, stream_driver};
use floats::{bytes_of, bytes_of_mut};
use graphs::{Graphs, PassGraphs};
use kernels::Kernels;
use outgoing::Outgoing;
use pace::Runs;
use pass_data::PassData;
use products::VendorProducts;
use readback::Readback;
use reads::Reads;
use registration::Finding;
use reserve::DeviceReserve;
use ring::Ring;
use rows::RowsMemory;
use segments::layout;
use sending::Sender;
use timed::TimedParts;
use uploads::Uploads;
use warmup::WarmUp;
use workspace::Workspace;

pub use config::{GpuConfig, UploadWay};
pub use kernels::{ImageFolder, Images, usual_images};
pub use opening::refusal;

/// A GPU.
#[derive(Debug)]
pub struct GpuDevice {
    // Fields drop in this order: what has work under way first, memory after it, the context last.
    warm_up: WarmUp,
    uploads: Uploads,
    graphs: PassGraphs,
    step_graphs: Graphs,
    products: VendorProducts,
    kernels: Arc<Kernels>,
    pass_ring: Ring,
    readback: Readback,
    reads: Reads,
    rows: RowsMemory,
    compute: Stream,
    /// Where passes and steps are recorded.
    recorder: Stream,
    outgoing: Outgoing,
    aside: Aside,
    arena: Arena,
    context: Context,
    config: GpuConfig,
    target: GpuTarget,
    /// Offsets of the reserve's parts; none before it is given.
    reserve: Option<DeviceReserve>,
    pass: PassData,
    runs: Runs,
    timed: TimedParts,
    /// The recording whose table of experts lies on the device, if nothing can
    /// have been written over it.
    table_of: Option<graphs::Key>,
    /// Rows under way to the device; kept for its memory.
    embeddings: Vec<f32>,
    name: String,
    /// As the vendor writes it; empty if the driver does not say.
    driver_version: String,
    /// Findings about the driver when the GPU was opened, as text for users.
    findings: Vec<String>,
    /// How files reach the card.
    files_way: Finding,
    /// What the kernel knows of the card.
    system: Arc<KernelView>,
}

impl GpuDevice {
    /// What was found when the card was opened, and what is to be told of the arena and of uploads.
    fn findings(&self) -> Vec<String> {
        let arena = self.arena.notes().map(str::to_owned);
        arena
            .chain(self.findings.clone())
            .chain(self.uploads.notes())
            .collect()
    }

    /// Where the card is on the bus.
    pub fn card(&self) -> Card {
        self.context.card()
    }

    /// The reserve's offsets.
    fn given_reserve(&self, operation: &'static str) -> Result<DeviceReserve, Error> {
        self.reserve.ok_or(Error::Driver {
            operation,
            message: "the device was not given its block of the arena".to_owned(),
        })
    }

    /// The reserve's parts as addresses.
    fn reserve_addresses(&self) -> Result<DeviceReserve, Error> {
        let reserve = self.given_reserve("staging")?;
        Ok(reserve.addresses(self.arena.base()))
    }

    /// Clears the reserve and leaves the marks: what is not cleared would be
    /// taken for flags and counters.
    fn prepare_reserve(&mut self) -> Result<(), Error> {
        let reserve = self.given_reserve("staging")?;
        self.arena
            .zero(reserve.flags, reserve.slots - reserve.flags, &self.compute)?;
        marks::put(&self.reserve_addresses()?, self.sender())?;
        self.addresses_changed()?;
        self.finish()
    }

    fn sender(&self) -> Sender<'_> {
        Sender::new(&self.pass_ring, &self.compute, &self.kernels, &self.uploads)
    }

    fn addresses_changed(&mut self) -> Result<(), Error> {
        self.forget_recordings();
        self.table_of = None;
        self.pass.forget();
        if self.reserve.is_some() {
            let addresses = self.reserve_addresses()?;
            self.uploads.set_reserve(addresses);
        }
        Ok(())
    }

    /// Nothing of the recordings may be under way.
    fn forget_recordings(&mut self) {
        self.graphs.clear();
        self.step_graphs.clear();
    }

    /// Waits for what the compute stream has queued.
    fn finish(&mut self) -> Result<(), Error> {
        self.readback.finish(&self.compute)
    }

    /// Copies from an address of the arena to the host, after what the compute stream has queued.
    fn fetch(&mut self, at: u64, out: &mut [u8]) -> Result<(), Error> {
        self.readback.fetch(&self.compute, at, out)
    }

    /// A pass's workspace, and the address of its scratch block.
    fn place(&self, scratch: Scratch<'_>) -> (Workspace, u64) {
        let workspace = Workspace::new(scratch.layout, &self.target);
        let base = self.arena.at(scratch.base, workspace.end);
        (workspace, base)
    }
}

fn vendor_name(context: &Context) -> &'static str {
    context.shared_driver().vendor().name()
}

impl Device for GpuDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: match self.context.shared_driver().vendor() {
                Vendor::Hip => DeviceKind::Hip,
                Vendor::Cuda => DeviceKind::Cuda,
            },
            is_cpu: false,
            name: self.name.clone(),
            arch: self.target.arch.clone(),
            ordinal: self.config.ordinal,
            driver: self.driver_version.clone(),
            findings: self.findings(),
            compute_units: self.target.compute_units,
            memory_bytes: self.context.attributes().total_bytes,
            machine_memory: self.context.attributes().machine_memory,
            counts_page_cache: self.context.shared_driver().vendor() == Vendor::Cuda,
            allocations: self.context.usage().allocations,
            prefetch: 8,
            prefill_chunk: 2048,
            records: self.config.graphs,
        }
    }

    fn layout(&self, tensors: &[TensorDesc]) -> Result<SegmentLayout, Error> {
        layout(tensors)
    }

    fn workspace_bytes(&self, layout: &ScratchLayout) -> u64 {
        Workspace::new(layout, &self.target).end - layout.bytes
    }

    fn page_table_entries(&self) -> Option<u64> {
        self.reserve.map(|reserve| reserve.table_len)
    }

    fn set_capacity(&mut self, bytes: u64) -> Result<(), Error> {
        self.uploads.settle_all()?;
        self.finish()?;
        let before = self.arena.generation();
        let set = self
            .arena
            .set_capacity(bytes, &self.compute, self.readback.memory());
        if self.arena.generation() != before {
            self.addresses_changed()?;
        }
        set
    }

    fn renew(&mut self, sizes: &[u64], keep: &[(u64, u64)]) -> Result<u64, Error> {
        self.uploads.settle_all()?;
        let mut kept = Vec::with_capacity(keep.len());
        for &(offset, bytes) in keep {
            let mut range = vec![0; bytes as usize];
            self.fetch(self.arena.at(offset, bytes), &mut range)?;
            kept.push(range);
        }
        self.finish()?;
        // Recordings take memory of the driver's own.
        self.forget_recordings();
        let capacity = self.arena.renew(sizes)?;
        self.addresses_changed()?;
        if self.reserve.is_some() {
            self.prepare_reserve()?;
        }
        for (&(offset, bytes), range) in keep.iter().zip(&kept) {
            let to = self.arena.at(offset, bytes);
            self.sender().bytes(to, range)?;
        }
        self.finish()?;
        Ok(capacity)
    }

    fn begin_upload(&mut self, upload: Upload) -> Result<UploadTicket, Error> {
        let slab = self.arena.at(upload.slab, upload.layout.bytes);
        self.table_of = None;
        self.uploads.begin(upload, slab, &self.compute)
    }

    fn finished_uploads(&mut self) -> Vec<(UploadTicket, Result<(), Error>)> {
        self.uploads.finished()
    }

    fn wait_upload(&mut self, ticket: UploadTicket) -> Result<(), Error> {
        self.uploads.wait(ticket, &self.compute)
    }

    fn is_queued(&self, ticket: UploadTicket) -> bool {
        self.uploads.is_queued(ticket)
    }

    fn move_slab(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Error> {
        self.uploads.order_before(&self.compute)?;
        self.table_of = None;
        let reserve = self.given_reserve("moving a slab")?;
        let bounce = (reserve.bounce, reserve.slot_bytes);
        self.arena
            .move_bytes(from, to, bytes, bounce, &self.compute)
    }

    fn read_slab(&mut self, from: u64, into: &mut [u8]) -> Result<(), Error> {
        let from = self.arena.at(from, into.len() as u64);
        self.readback.fetch(&self.compute, from, into)
    }

    fn write_slab(&mut self, to: u64, bytes: &[u8]) -> Result<(), Error> {
        self.table_of = None;
        let to = self.arena.at(to, bytes.len() as u64);
        self.sender().bytes(to, bytes)
    }

    fn discard(&mut self, _offset: u64, _bytes: u64) {}

    fn write(&mut self, scratch: Scratch<'_>, buf: Buf, rows: &[f32]) -> Result<(), Error> {
        self.pass.begin(scratch.base);
        self.write_parts(scratch, buf, &[(0, rows)])
    }

    fn write_parts(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        parts: &[(u64, &[f32])],
    ) -> Result<(), Error> {
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let mut placed: Vec<(u64, &[u8])> = Vec::with_capacity(parts.len());
        for &(first, rows) in parts {
            assert!(
                first * width + rows.len() as u64 <= scratch.layout.elements(buf),
                "more rows than the buffer holds"
            );
            let from = scratch.base + at + first * width * 4;
            placed.push((self.arena.at(from, rows.len() as u64 * 4), bytes_of(rows)));
        }
        self.sender().parts(&placed)
    }

    fn write_rows(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        table: &TensorDesc,
        rows: &[u8],
    ) -> Result<(), Error> {
        self.write_embedding(scratch, buf, table, rows)
    }

    fn run(
        &mut self,
        step: &BoundStep<'_>,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        self.queue_steps(None, std::slice::from_ref(step), scratch, batch)
    }

    fn read_each(
        &mut self,
        scratch: Scratch<'_>,
        bufs: &mut [(Buf, &mut [f32])],
    ) -> Result<(), Error> {
        let place = |(buf, out): &mut (Buf, &mut [f32])| {
            let at = scratch.layout.bufs[buf.0 as usize].at;
            self.arena.at(scratch.base + at, out.len() as u64 * 4)
        };
        let places: Vec<u64> = bufs.iter_mut().map(place).collect();
        let mut parts: Vec<(u64, &mut [u8])> = bufs
            .iter_mut()
            .zip(places)
            .map(|((_, out), at)| (at, bytes_of_mut(out)))
            .collect();
        self.readback.fetch_each(&self.compute, &mut parts)?;
        self.uploads.settle_used()
    }

    fn take_rows(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: &[u32],
        take: TakeRows<'_>,
    ) -> Result<(), Error> {
        self.hand_over(scratch, buf, rows, take)
    }

    fn monitoring(&self) -> Option<&dyn Monitoring> {
        Some(self)
    }

    fn reserve(&mut self) -> Option<&mut dyn Reserve> {
        Some(self)
    }

    fn preparation(&mut self) -> Option<&mut dyn Preparation> {
        Some(self)
    }

    fn host_copies(&mut self) -> Option<&mut dyn HostCopies> {
        Some(self)
    }

    fn recording(&mut self) -> Option<&mut dyn Recording> {
        Some(self)
    }

    fn selection(&mut self) -> Option<&mut dyn Selection> {
        Some(self)
    }

    fn queued_reads(&self) -> Option<&dyn QueuedReads> {
        Some(self)
    }

    fn queued_reads_mut(&mut self) -> Option<&mut dyn QueuedReads> {
        Some(self)
    }

    fn timing(&mut self) -> Option<&mut dyn Timing> {
        Some(self)
    }

    fn volatile_memory(&mut self) -> Option<&mut dyn VolatileMemory> {
        Some(self)
    }

    fn closing(&mut self) -> Option<&mut dyn Closing> {
        Some(self)
    }
}

impl Drop for GpuDevice {
    fn drop(&mut self) {
        // What is under way reads memory that goes next.
        if let Err(error) = self.compute.synchronize() {
            tracing::debug!(%error, "the device ends with an error");
        }
    }
}
