//! A GPU as a [`Device`]: one code over either vendor's driver.
//!
//! ```text
//! engine thread --> arena/ (slabs), pass_data.rs (positions, page tables), launches.rs (operations, fused by fuse.rs),
//!                   graphs.rs (recorded decode steps)          on the compute stream
//! staging threads --> uploads.rs, windows.rs (registered mappings), ring.rs (pinned memory)
//!                                                              on the copy and repack streams
//! kernel threads --> warmup.rs (a model's kernels, ahead of its first request)
//! ```
//!
//! Nothing here waits for the device but [`Device::read`], [`Device::argmax`] and changes of the capacity; everything
//! else queues work that events order.
//!
//! *Invariant:* driver allocations are made at start-up and when the capacity changes, none per upload, pass or request.
//! *Invariant:* a slab, page or buffer is touched by the compute stream only, except while it is uploaded.

mod arena;
mod config;
mod fixed;
mod fuse;
mod graphs;
mod kernels;
mod launches;
mod pace;
mod pass_data;
mod ring;
mod uploads;
mod wait;
mod warmup;
mod windows;
mod workspace;

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_gguf::MappedFile;
use rocmforge_kernels::gpu::ops::sample::{self, TopK};
use rocmforge_kernels::gpu::ops::weights::{self, Weights};
use rocmforge_kernels::gpu::{self as gpu_kernels, GpuTarget};
use rocmforge_kernels::host::{WeightType, reference};

use crate::error::Error;
use crate::ops::{Batch, Buf, Op, PlacedBuf, ScratchLayout};
use crate::{
    Bound, Candidates, Device, DeviceInfo, MemoryUse, Outline, Pace, Role, Scratch, SegmentLayout,
    TensorDesc, Upload, UploadTicket, Watch, weight_type,
};

use super::blas::Blas;
use super::{Call, Context, DevicePtr, Event, PinnedBuffer, Priority, Stream, Vendor};
use arena::Arena;
use fixed::{Fixed, SLOTS};
use graphs::{Graphs, Key, Plan};
use kernels::Kernels;
use launches::{Lowering, Work};
use pace::Runs;
use pass_data::{PassData, PassShape, Places};
use ring::Ring;
use uploads::{Uploads, UploadsConfig};
use warmup::WarmUp;
use workspace::Workspace;

pub use config::GpuConfig;
pub use kernels::{CompiledImages, ImageFolder, Images, usual_images};

/// Bytes of one read from the device at a time.
const READ_BYTES: usize = 4 << 20;

/// Pieces of pinned memory for what passes bring along, and the bytes of one.
const PASS_PIECES: usize = 16;
const PASS_PIECE_BYTES: usize = 1 << 20;

/// Rows of an embedding from which on the device dequantizes them.
const DEVICE_ROWS_MIN: u64 = 32;

/// What is written to a few places of the arena to see whether memory survived.
const SENTINEL: u32 = 0x5EA1_1A57;

/// A GPU.
#[derive(Debug)]
pub struct GpuDevice {
    // Fields drop in this order: what has work under way first, memory after it, the context last.
    warm_up: WarmUp,
    uploads: Uploads,
    graphs: Graphs,
    blas: Option<Blas>,
    /// The vendor's libraries failed at a product: the portable kernels do all of them.
    blas_failed: Cell<bool>,
    kernels: Arc<Kernels>,
    pass_ring: Ring,
    readback: PinnedBuffer,
    read_done: Event,
    compute: Stream,
    arena: Arena,
    context: Context,
    config: GpuConfig,
    target: GpuTarget,
    /// Offsets of the fixed block's parts; none before it is given.
    fixed: Option<Fixed>,
    pass: PassData,
    runs: Runs,
    /// Rows under way to the device; kept for its memory.
    embeddings: Vec<f32>,
    name: String,
    /// As the vendor writes it; empty if the driver does not say.
    driver_version: String,
}

impl GpuDevice {
    /// Opens a card.
    ///
    /// # Errors
    /// [`Error::Config`] where there is no driver or no such card, with what was looked for.
    pub fn open(config: GpuConfig, images: Box<dyn Images>) -> Result<Self, Error> {
        let refused = |e: super::Error| Error::Config(format!("device {}: {e}", config.vendor));
        let driver = super::open(config.vendor, &config.libraries).map_err(refused)?;
        let library = driver.library().to_owned();
        // The runtime is there and does not work, or finds nothing to work on.
        let no_card = |e: super::Error| {
            Error::Config(format!(
                "device {}: {library} was opened, but {e}; {}",
                config.vendor,
                what_to_look_at(config.vendor)
            ))
        };
        let count = driver.device_count().map_err(no_card)?;
        if config.ordinal >= count {
            return Err(Error::Config(format!(
                "there is no device {}:{}; {library} has {count}; {} (`rocmforged --list-devices` lists them)",
                config.vendor,
                config.ordinal,
                what_to_look_at(config.vendor)
            )));
        }
        let context = Context::open(driver, config.ordinal).map_err(no_card)?;
        Self::on(context, config, images)
    }

    /// Sets an open card up.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Config`].
    pub fn on(context: Context, config: GpuConfig, images: Box<dyn Images>) -> Result<Self, Error> {
        let attributes = context.attributes().clone();
        let target = GpuTarget {
            vendor: match config.vendor {
                Vendor::Hip => gpu_kernels::Vendor::Amd,
                Vendor::Cuda => gpu_kernels::Vendor::Nvidia,
            },
            arch: attributes.arch.clone(),
            wave: attributes.wave,
            compute_units: attributes.compute_units,
            shared_bytes_max: attributes.shared_per_block,
        };
        let kernels = Arc::new(Kernels::new(&context, images));
        let uploads = Uploads::start(
            &context,
            Arc::clone(&kernels),
            UploadsConfig {
                threads: config.staging_threads,
                ring_pieces: config.ring_pieces,
                ring_piece_bytes: config.ring_piece_bytes,
                registered_bytes_max: config.registered_bytes_max,
                patience: config.watchdog,
            },
        )?;
        let compute =
            Stream::new(&context, Priority::High).map_err(|e| failed("making a stream", e))?;
        let blas = if config.vendor_products {
            Blas::open(&context, &compute)
                .inspect_err(|error| {
                    tracing::info!(%error, "no vendor library for large products; the portable kernels do them");
                })
                .ok()
        } else {
            None
        };
        let arena = Arena::new(&context, &compute);
        let name = attributes.name.clone();
        let mut warm_up = WarmUp::new(Arc::clone(&kernels));
        if config.warm_up {
            warm_up.add(warmup::always());
        }
        let versions = context.shared_driver().versions();
        Ok(Self {
            warm_up,
            uploads,
            graphs: Graphs::default(),
            blas,
            blas_failed: Cell::new(false),
            kernels,
            pass_ring: Ring::new(&context, PASS_PIECES, PASS_PIECE_BYTES, config.watchdog)?,
            readback: PinnedBuffer::new(&context, READ_BYTES)
                .map_err(|e| failed("allocating pinned memory", e))?,
            read_done: Event::new(&context, false).map_err(|e| failed("making an event", e))?,
            compute,
            arena,
            runs: Runs::new(&context)?,
            context,
            config,
            target,
            fixed: None,
            pass: PassData::default(),
            embeddings: Vec::new(),
            name,
            driver_version: versions.map(|v| v.driver).unwrap_or_default(),
        })
    }

    /// Bytes that uploads took from registered mappings, and through pinned buffers.
    pub fn uploaded_bytes(&self) -> (u64, u64) {
        self.uploads.bytes()
    }

    /// Free and total bytes by the driver's count.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn memory(&self) -> Result<super::MemoryInfo, Error> {
        self.context
            .memory()
            .map_err(|e| failed("asking for free memory", e))
    }

    /// Bytes of device memory that this process holds by its own count.
    pub fn held_bytes(&self) -> u64 {
        self.context.usage().device_bytes
    }

    /// The fixed block's parts as addresses.
    fn fixed_addresses(&self) -> Result<Fixed, Error> {
        let fixed = self.fixed.ok_or(Error::Driver {
            operation: "staging",
            message: "the device was not given its block of the arena".to_owned(),
        })?;
        let base = self.arena.base();
        Ok(Fixed {
            flags: base + fixed.flags,
            results: base + fixed.results,
            candidates: base + fixed.candidates,
            counters: base + fixed.counters,
            table: base + fixed.table,
            bounce: base + fixed.bounce,
            slots: base + fixed.slots,
            tail: base + fixed.tail,
            ..fixed
        })
    }

    /// Addresses of the words that tell whether memory survived, at both ends of the fixed block.
    fn sentinels(&self) -> Vec<u64> {
        let fixed = self.fixed_addresses().ok();
        fixed
            .into_iter()
            .flat_map(|f| [f.results, f.tail])
            .collect()
    }

    fn put_sentinels(&mut self) -> Result<(), Error> {
        for at in self.sentinels() {
            pass_data::send_bytes(&self.pass_ring, &self.compute, at, &SENTINEL.to_le_bytes())?;
        }
        Ok(())
    }

    /// Clears the fixed block and puts the sentinels.
    fn prepare_fixed(&mut self) -> Result<(), Error> {
        if let Some(fixed) = self.fixed {
            self.arena
                .zero(fixed.flags, fixed.slots - fixed.flags, &self.compute)?;
        }
        self.put_sentinels()?;
        self.addresses_changed()?;
        self.finish()
    }

    fn addresses_changed(&mut self) -> Result<(), Error> {
        self.graphs.clear();
        self.pass.forget();
        if self.fixed.is_some() {
            let addresses = self.fixed_addresses()?;
            self.uploads.set_fixed(addresses);
        }
        Ok(())
    }

    /// Waits for what the compute stream has queued.
    fn finish(&mut self) -> Result<(), Error> {
        self.read_done
            .record(&self.compute)
            .map_err(|e| failed("recording an event", e))?;
        wait::until_passed(&self.read_done, self.config.watchdog)
    }

    /// Copies from the arena to the host, after what the compute stream has queued.
    fn fetch(&mut self, at: u64, out: &mut [u8]) -> Result<(), Error> {
        for (i, part) in out.chunks_mut(READ_BYTES).enumerate() {
            let from = DevicePtr(at + (i * READ_BYTES) as u64);
            let driver = stream_driver(&self.compute)?;
            // SAFETY: the source is inside the arena (the callers asked it for the address), the destination is as long
            // as a part at least and is not looked at before the wait has ended.
            unsafe {
                driver.copy_d2h_async(
                    self.readback.as_ptr(),
                    from,
                    part.len() as u64,
                    self.compute.handle(),
                )
            }
            .map_err(|e| failed("reading from the device", e))?;
            drop(driver);
            self.finish()?;
            // SAFETY: the copy into it has ended.
            let bytes = unsafe { self.readback.as_slice() };
            part.copy_from_slice(&bytes[..part.len()]);
        }
        Ok(())
    }

    fn place(&self, scratch: Scratch<'_>) -> (Workspace, u64) {
        let workspace = Workspace::new(scratch.layout, self.target.compute_units);
        let base = self.arena.at(scratch.base, workspace.end);
        (workspace, base)
    }

    /// Sends a pass's data where the device lacks it.
    fn send(&mut self, scratch: Scratch<'_>, batch: &Batch<'_>) -> Result<PassShape, Error> {
        let (workspace, base) = self.place(scratch);
        let shape = PassData::shape(batch);
        let fixed = self.fixed_addresses()?;
        self.pass.send(
            batch,
            shape,
            Places {
                workspace: &workspace,
                fixed: &fixed,
                scratch_base: base,
            },
            &self.pass_ring,
            &self.compute,
        )?;
        Ok(shape)
    }

    /// The work of some segments' operations.
    fn work(
        &self,
        steps: &[(&[Op], Bound<'_>)],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
        shape: PassShape,
    ) -> Result<Vec<Work>, Error> {
        let (workspace, scratch_base) = self.place(scratch);
        let fixed = self.fixed_addresses()?;
        let mut lowering = Lowering {
            target: &self.target,
            arena: self.arena.base(),
            fixed: &fixed,
            workspace,
            scratch,
            scratch_base,
            batch,
            shape,
            vendor: self.vendor_products(),
            work: Vec::new(),
        };
        for (ops, bound) in steps {
            lowering.lower(ops, *bound)?;
        }
        Ok(lowering.work)
    }

    fn queue(&self, work: &[Work], vendor_room: (u64, u64)) -> Result<(), Error> {
        // Launches that wait for their inputs themselves may overlap, in chains of such. What is before the first one (a
        // copy of the pass's data, an upload) is waited for.
        let mut chained = false;
        let _held = self.uploads.hold();
        for item in work {
            match item {
                Work::Launch(launch) => {
                    let overlaps = launch.overlaps && chained;
                    // SAFETY: addresses were made of places that the ledger gave to this pass, of sizes that the
                    // builders and the layouts agree on; the compute stream orders them, and what overlaps reads
                    // before it waits only weights and the pass's data, which no launch writes.
                    unsafe { self.kernels.launch_after(launch, overlaps, &self.compute)? };
                    chained = launch.overlaps;
                }
                Work::Gemm(gemm) => {
                    self.blas
                        .as_ref()
                        .expect("products are tiled only where there is a library")
                        .gemm(gemm, vendor_room)
                        .inspect_err(|error| self.note_products(error))?;
                    chained = false;
                }
            }
        }
        Ok(())
    }

    /// Whether large products go to a vendor's library.
    fn vendor_products(&self) -> bool {
        self.blas.is_some() && !self.blas_failed.get()
    }

    /// After a product that failed: one that no library can do fails this pass, and none after it. Want of memory and a
    /// lost device are not the library's fault.
    fn note_products(&self, error: &Error) {
        if !matches!(error, Error::Memory { .. } | Error::Lost(_))
            && !self.blas_failed.replace(true)
        {
            tracing::warn!(%error, "large products are done by the portable kernels from now on, which is slower");
        }
    }

    fn vendor_room(&self, scratch: Scratch<'_>) -> (u64, u64) {
        let (workspace, base) = self.place(scratch);
        (base + workspace.vendor, workspace.vendor_bytes)
    }

    /// Everything that a recording of a pass is made of.
    fn key(
        &self,
        steps: &[(&[Op], Bound<'_>)],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
        shape: PassShape,
    ) -> Key {
        let mut key = vec![
            self.arena.generation(),
            scratch.base,
            scratch.layout.bytes,
            scratch.layout.tokens,
            scratch.layout.outputs,
            batch.n_tokens as u64,
            batch.outputs.len() as u64,
            batch.kv.page_bytes() as u64,
            batch.rope.n_rot() as u64,
            u64::from(shape.table_stride),
            u64::from(shape.positions_max),
        ];
        for (ops, bound) in steps {
            key.extend([
                ops.as_ptr() as u64,
                std::ptr::from_ref(bound.layout) as u64,
                bound.slab,
            ]);
        }
        key
    }
}

/// The driver with a stream's context bound to this thread.
fn stream_driver(stream: &Stream) -> Result<Call<'_>, Error> {
    stream
        .context()
        .driver()
        .map_err(|e| failed("binding the device", e))
}

/// What to do where a vendor's runtime finds no card.
fn what_to_look_at(vendor: Vendor) -> &'static str {
    match vendor {
        Vendor::Hip => {
            "is the amdgpu kernel driver loaded, is the card one that this runtime supports, and may this user open \
             /dev/kfd and /dev/dri/renderD* (groups render and video)? --device host computes on the CPU"
        }
        Vendor::Cuda => {
            "is the NVIDIA kernel driver loaded (nvidia-smi), and may this user open /dev/nvidia*? --device host \
             computes on the CPU"
        }
    }
}

fn vendor_name(context: &Context) -> &'static str {
    context.shared_driver().vendor().name()
}

/// A driver's error as a device's.
fn failed(operation: &'static str, error: super::Error) -> Error {
    if error.is_lost() {
        return Error::Lost(format!("{operation}: {error}"));
    }
    if error.is_out_of_memory() {
        return Error::Memory {
            kind: "device",
            bytes: 0,
            message: format!("{operation}: {error}"),
        };
    }
    Error::Driver {
        operation,
        message: error.to_string(),
    }
}

/// A builder's error as a device's.
fn launch_error(error: &gpu_kernels::Error) -> Error {
    Error::Driver {
        operation: "preparing a launch",
        message: error.to_string(),
    }
}

fn unsupported(desc: &TensorDesc) -> Error {
    Error::Unsupported {
        operation: "layout",
        tensor: desc.name.clone(),
        ty: desc.ty.name().to_owned(),
        supported: crate::supported_types(),
    }
}

impl Device for GpuDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: vendor_name(&self.context),
            name: self.name.clone(),
            arch: self.target.arch.clone(),
            ordinal: self.config.ordinal,
            driver: self.driver_version.clone(),
            compute_units: self.target.compute_units,
            memory_bytes: self.context.attributes().total_bytes,
            allocations: self.context.usage().allocations,
            prefetch: 3,
            prefill_chunk: 2048,
        }
    }

    fn watch(&self) -> Option<Watch> {
        let oldest_call = self.context.watch_calls();
        // Waits have the watchdog's patience and are themselves calls; what takes longer than that is stuck.
        let patience = self.config.watchdog * 2;
        Some(Box::new(move || {
            let stuck = oldest_call().filter(|age| *age > patience)?;
            Some(format!(
                "a call of the driver has not come back after {} s; the device hangs",
                stuck.as_secs()
            ))
        }))
    }

    fn memory_use(&self) -> Option<MemoryUse> {
        Some(MemoryUse {
            allocated_bytes: self.held_bytes(),
            capacity_bytes: self.arena.capacity(),
            granularity_bytes: self.arena.granularity(),
        })
    }

    fn free_bytes(&self) -> Option<u64> {
        Some(self.context.memory().ok()?.free)
    }

    fn layout(&self, tensors: &[TensorDesc]) -> Result<SegmentLayout, Error> {
        SegmentLayout::place(tensors, |desc| {
            let ty = weight_type(desc.ty).ok_or_else(|| unsupported(desc))?;
            match desc.role {
                Role::Matrix => {
                    let shape = |message: String| Error::Shape {
                        tensor: desc.name.clone(),
                        ty: desc.ty.name().to_owned(),
                        cols: desc.cols,
                        rows: desc.rows,
                        message,
                    };
                    if ty.is_quantized() && desc.cols % 32 != 0 {
                        return Err(shape("rows must be a multiple of 32 elements".to_owned()));
                    }
                    gpu_kernels::device_bytes(ty, desc.rows, desc.cols)
                        .map_err(|e| shape(e.to_string()))
                }
                Role::Vector => Ok(desc.cols * 4),
            }
        })
    }

    fn workspace_bytes(&self, layout: &ScratchLayout) -> u64 {
        Workspace::new(layout, self.target.compute_units).end - layout.bytes
    }

    fn fixed_bytes(&self, budget: u64) -> u64 {
        fixed::bytes(budget)
    }

    fn set_fixed(&mut self, offset: u64, bytes: u64) -> Result<(), Error> {
        self.arena.at(offset, bytes);
        self.fixed = Some(Fixed::new(offset, bytes));
        // What is not cleared would be taken for flags, counters and a sentinel.
        self.prepare_fixed()
    }

    fn set_capacity(&mut self, bytes: u64) -> Result<(), Error> {
        self.uploads.settle_all()?;
        self.finish()?;
        let before = self.arena.generation();
        let set = self
            .arena
            .set_capacity(bytes, &self.compute, &mut self.readback);
        if self.arena.generation() != before {
            self.addresses_changed()?;
        }
        set
    }

    fn prepare(&mut self, model: &Outline<'_>) {
        if !self.config.warm_up {
            return;
        }
        match warmup::launches(&self.target, self.vendor_products(), model) {
            Ok(launches) => self.warm_up.add(launches),
            // A request that needs what cannot be had says so.
            Err(error) => tracing::debug!(%error, "kernels are not loaded ahead of need"),
        }
        self.uploads.register_ahead(model);
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
        self.graphs.clear();
        let capacity = self.arena.renew(sizes)?;
        self.addresses_changed()?;
        if self.fixed.is_some() {
            self.prepare_fixed()?;
        }
        for (&(offset, bytes), range) in keep.iter().zip(&kept) {
            let to = self.arena.at(offset, bytes);
            pass_data::send_bytes(&self.pass_ring, &self.compute, to, range)?;
        }
        self.finish()?;
        Ok(capacity)
    }

    fn begin_upload(&mut self, upload: Upload) -> Result<UploadTicket, Error> {
        let slab = self.arena.at(upload.slab, upload.layout.bytes);
        self.uploads.begin(upload, slab, &self.compute)
    }

    fn finished_uploads(&mut self) -> Vec<(UploadTicket, Result<(), Error>)> {
        self.uploads.finished()
    }

    fn wait_upload(&mut self, ticket: UploadTicket) -> Result<(), Error> {
        self.uploads.wait(ticket, &self.compute)
    }

    fn move_slab(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Error> {
        self.uploads.order_before(&self.compute)?;
        let fixed = self.fixed.ok_or(Error::Driver {
            operation: "moving a slab",
            message: "the device was not given its block of the arena".to_owned(),
        })?;
        let bounce = (fixed.bounce, fixed.slot_bytes);
        self.arena
            .move_bytes(from, to, bytes, bounce, &self.compute)
    }

    fn discard(&mut self, _offset: u64, _bytes: u64) {}

    fn forget_file(&mut self, file: &Arc<MappedFile>) {
        // Recordings know models by the addresses of their plans.
        if let Err(error) = self.finish() {
            tracing::warn!(%error, "waiting for the device before a model goes");
        }
        self.graphs.clear();
        self.uploads.forget(file);
    }

    fn write(&mut self, scratch: Scratch<'_>, buf: Buf, rows: &[f32]) -> Result<(), Error> {
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        assert!(
            rows.len() as u64 <= scratch.layout.tokens * width,
            "more rows than the buffer holds"
        );
        let to = self.arena.at(scratch.base + at, rows.len() as u64 * 4);
        self.pass.begin();
        // SAFETY: f32 has no padding, and any byte is a u8.
        let bytes =
            unsafe { std::slice::from_raw_parts(rows.as_ptr().cast::<u8>(), size_of_val(rows)) };
        pass_data::send_bytes(&self.pass_ring, &self.compute, to, bytes)
    }

    fn write_rows(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        ty: WeightType,
        rows: &[u8],
    ) -> Result<(), Error> {
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let n = (rows.len() / ty.block_bytes() * ty.block_size()) as u64 / width.max(1);
        let (workspace, base) = self.place(scratch);
        let planes = gpu_kernels::device_bytes(ty, n, width).map_err(|e| launch_error(&e))?;
        let raw = base + workspace.input;
        let repacked = (raw + rows.len() as u64).next_multiple_of(crate::ALIGNMENT);
        // Few rows are dequantized here as fast as two launches are made.
        let fits = repacked + planes <= raw + workspace.input_bytes;
        if n < DEVICE_ROWS_MIN || n > scratch.layout.tokens || !fits {
            let values = &mut std::mem::take(&mut self.embeddings);
            values.resize((n * width) as usize, 0.0);
            reference::dequantize(ty, rows, values).map_err(|e| Error::Config(e.to_string()))?;
            let finite = values.iter().all(|v| v.is_finite());
            let written = if finite {
                self.write(scratch, buf, values)
            } else {
                Err(Error::NotFinite {
                    tensor: "token_embd.weight".to_owned(),
                })
            };
            self.embeddings = std::mem::take(values);
            return written;
        }
        let to = self.arena.at(scratch.base + at, n * width * 4);
        self.pass.begin();
        pass_data::send_bytes(&self.pass_ring, &self.compute, raw, rows)?;
        let ids: Vec<u32> = (0..n as u32).collect();
        // The pass's own positions come after this on the same stream.
        let ids_at = base + workspace.positions;
        pass_data::send(
            &self.pass_ring,
            &self.compute,
            ids_at,
            &ids,
            u32::to_le_bytes,
            &mut Vec::new(),
        )?;
        let weights = Weights {
            ty,
            at: repacked,
            rows: n,
            cols: width,
        };
        // What is not finite shows in the logits; this flag is nobody's.
        let flag = self.fixed_addresses()?.results + 4;
        let launches = [
            weights::repack(weights, raw, 0, n, flag),
            weights::rows_f32(weights, ids_at, n, to),
        ];
        for launch in launches {
            let launch = launch.map_err(|e| launch_error(&e))?;
            // SAFETY: all places are the pass's own, as large as checked above; the stream orders them.
            unsafe { self.kernels.launch(&launch, &self.compute)? };
        }
        Ok(())
    }

    fn run(
        &mut self,
        ops: &[Op],
        weights: Bound<'_>,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        let shape = self.send(scratch, batch)?;
        let work = self.work(&[(ops, weights)], scratch, batch, shape)?;
        let timed = self.runs.of(batch.n_tokens).begin(&self.compute);
        self.queue(&work, self.vendor_room(scratch))?;
        if timed {
            self.runs.of(batch.n_tokens).end(&self.compute, 1);
        }
        Ok(())
    }

    fn pace(&mut self, rows: usize) -> Option<Pace> {
        let fixed = self.fixed?;
        Some(Pace {
            segment: Duration::from_secs_f64(self.runs.of(rows).seconds()?),
            upload_bytes_per_s: self.uploads.bytes_per_s()?,
            ahead_bytes: SLOTS as u64 * fixed.slot_bytes,
        })
    }

    fn run_all(
        &mut self,
        steps: &[(&[Op], Bound<'_>)],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        let shape = self.send(scratch, batch)?;
        let room = self.vendor_room(scratch);
        if !self.config.graphs || !shape.decode {
            let work = self.work(steps, scratch, batch, shape)?;
            return self.queue(&work, room);
        }
        let key = self.key(steps, scratch, batch, shape);
        let record = match self.graphs.plan(&key) {
            Plan::Replay(graph) => {
                let _held = self.uploads.hold();
                // SAFETY: the key says that the addresses are those of the recording, and the pass's data lies there.
                return unsafe { graph.launch(&self.compute) }
                    .map_err(|e| failed("replaying a pass", e));
            }
            Plan::Record => true,
            Plan::Launch => false,
        };
        let work = self.work(steps, scratch, batch, shape)?;
        if !record {
            return self.queue(&work, room);
        }
        let captured = self
            .compute
            .capture(|| self.queue(&work, room).map_err(Captured::Queue));
        match captured {
            Ok(graph) => {
                tracing::debug!(nodes = graph.nodes(), "a decode step is recorded");
                let graph = self
                    .graphs
                    .keep(&key, Some(graph))
                    .expect("the key was just planned");
                // SAFETY: as for a replay.
                unsafe { graph.launch(&self.compute) }.map_err(|e| failed("replaying a pass", e))
            }
            Err(Captured::Driver(error)) if !error.is_lost() => {
                tracing::warn!(%error, "a decode step cannot be recorded; its kernels are launched one by one");
                self.graphs.keep(&key, None);
                self.queue(&work, room)
            }
            Err(Captured::Driver(error)) => Err(failed("recording a pass", error)),
            Err(Captured::Queue(error)) => Err(error),
        }
    }

    fn argmax(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
    ) -> Result<Option<Vec<Option<u32>>>, Error> {
        let best = self.top_k(scratch, buf, rows, 1)?;
        let id = |row: Option<Candidates>| row.and_then(|best| best.first().map(|b| b.0));
        Ok(best.map(|rows| rows.into_iter().map(id).collect()))
    }

    fn top_k(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
        k: usize,
    ) -> Result<Option<Vec<Option<Candidates>>>, Error> {
        let fixed = self.fixed_addresses()?;
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let n = width as u32;
        let k = k.min(width as usize);
        if rows == 0 || k == 0 || k > sample::K_MAX as usize {
            return Ok(None);
        }
        let room = sample::candidates_bytes(rows as u64, n, k as u32);
        let part = rows * k * 4;
        // The sentinel has the first word of the results.
        if room > fixed.candidates_bytes
            || part * 2 + 8 > (fixed.candidates - fixed.results) as usize
        {
            return Ok(None);
        }
        let logits = self.arena.at(scratch.base + at, rows as u64 * width * 4);
        let (ids, values) = (fixed.results + 8, fixed.results + 8 + part as u64);
        let to = TopK {
            candidates: fixed.candidates,
            values: Some(values),
            ids,
            next: None,
        };
        let launches = sample::top_k(logits, rows as u32, width, k as u32, to)
            .map_err(|e| launch_error(&e))?;
        for launch in &launches {
            // SAFETY: the logits are the pass's, the rest is the fixed block's.
            unsafe { self.kernels.launch(launch, &self.compute)? };
        }
        let mut bytes = vec![0; part * 2];
        self.fetch(ids, &mut bytes)?;
        self.uploads.settle_used()?;
        let words = |bytes: &[u8]| -> Vec<u32> {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().map(|w| u32::from_le_bytes(*w)).collect()
        };
        let (ids, values) = (words(&bytes[..part]), words(&bytes[part..]));
        let found = ids.chunks_exact(k).zip(values.chunks_exact(k));
        let found = found.map(|(ids, values)| {
            let row = ids
                .iter()
                .zip(values)
                .map(|(&i, &v)| (i, f32::from_bits(v)));
            let row: Candidates = row.collect();
            row[0].1.is_finite().then_some(row)
        });
        Ok(Some(found.collect()))
    }

    fn peek(&mut self, offset: u64, out: &mut [u8]) -> Result<bool, Error> {
        self.fetch(self.arena.at(offset, out.len() as u64), out)?;
        Ok(true)
    }

    fn check(&mut self) -> Result<(), Error> {
        for at in self.sentinels() {
            let mut word = [0; 4];
            self.fetch(at, &mut word)?;
            if u32::from_le_bytes(word) != SENTINEL {
                return Err(Error::Lost(
                    "the device's memory does not hold what was left there; it was reset or lost power"
                        .to_owned(),
                ));
            }
        }
        Ok(())
    }

    fn read(&mut self, scratch: Scratch<'_>, buf: Buf, out: &mut [f32]) -> Result<(), Error> {
        let at = scratch.layout.bufs[buf.0 as usize].at;
        let from = self.arena.at(scratch.base + at, out.len() as u64 * 4);
        // SAFETY: f32 has no padding, every bit pattern is one, and `out` is borrowed for this call.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<u8>(), size_of_val(out))
        };
        self.fetch(from, bytes)?;
        self.uploads.settle_used()
    }
}

/// Why a recording failed.
enum Captured {
    Queue(Error),
    Driver(super::Error),
}

impl From<super::Error> for Captured {
    fn from(error: super::Error) -> Self {
        Captured::Driver(error)
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
