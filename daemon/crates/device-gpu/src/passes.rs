//! Passes: a batch's data goes to the device, operations are lowered and queued, and a decode step
//! or a pass of short texts is recorded when it comes the second time.
//!
//! *Invariant:* where the experts are is on the device before what reads it: it is sent with every
//! pass, but for a replay of what ran last (`table_of`; test `steps_between_experts_are_replayed`).

use rocmforge_device::ops::Batch;
use rocmforge_device::{BoundStep, Error, Recording, Scratch};
use rocmforge_gpu_driver::blas::Bias;
use rocmforge_gpu_driver::{self as gpu, Graph, Priority, Stream, Vendor};

use super::graphs::{GraphUse, Key};
use super::launches::{Lowering, Queued};
use super::pass_data::{PassData, PassShape, Places};
use super::sending::Sender;
use super::workspace::is_recorded;
use super::{GpuDevice, failed};

impl GpuDevice {
    /// Queues steps, and measures them. Operations with a stamp are recorded when
    /// they come the second time.
    pub(super) fn queue_steps(
        &mut self,
        stamp: Option<[u64; 2]>,
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        let shape = PassData::shape(batch);
        self.reads.forget_time();
        self.send(scratch, batch, shape)?;
        let key = stamp.and_then(|stamp| self.steps_key(stamp, steps, scratch, batch, shape));
        // A head computes the rows that are wanted, and other steps all of them.
        let rows = match batch.outputs.len() {
            0 => batch.n_tokens,
            wanted => wanted,
        };
        let bytes = steps.iter().map(|step| match step {
            BoundStep::Run { weights, .. } => weights.map_or(0, |w| w.layout.bytes),
            BoundStep::Experts { experts, .. } => {
                experts.iter().map(|e| e.weights.layout.bytes).sum()
            }
        });
        let bytes: u64 = bytes.sum();
        let timed = self.runs.of(rows).begin_of(&self.compute, bytes);
        match key {
            Some(key) => self.queue_recorded(&key, steps, scratch, batch, shape)?,
            None => {
                let work = self.work(steps, scratch, batch, shape)?;
                self.send_table(&work.1, scratch)?;
                self.queue(&work.0, self.vendor_room(scratch))?;
            }
        }
        if timed {
            self.runs.of(rows).end(&self.compute, bytes);
        }
        Ok(())
    }

    /// What a recording of steps is known by; `None` for what is not to be recorded.
    fn steps_key(
        &self,
        [model, index]: [u64; 2],
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
        shape: PassShape,
    ) -> Option<Key> {
        if !self.config.graphs || !shape.is_decode() {
            return None;
        }
        // First what tells most of them apart.
        let mut key = vec![index, steps.len() as u64];
        for step in steps {
            let BoundStep::Run { weights, .. } = step else {
                return None;
            };
            key.push(weights.map_or(u64::MAX, |w| w.slab));
        }
        key.push(model);
        key.append(&mut self.key(0, scratch, batch, shape));
        Some(key)
    }

    /// Queues operations: launched one by one, or recorded and replayed.
    fn queue_recorded(
        &mut self,
        key: &Key,
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
        shape: PassShape,
    ) -> Result<(), Error> {
        if self.step_graphs.is_full() && !self.step_graphs.has(key) {
            self.finish()?;
            self.step_graphs.clear();
        }
        let room = self.vendor_room(scratch);
        let record = match self.step_graphs.next_use(key, self.compute.queued()) {
            GraphUse::Replay(graph) => {
                let _held = self.uploads.hold();
                // SAFETY: the key says that the addresses are those of the recording, and
                // the pass's data lies there.
                return unsafe { graph.launch(&self.compute) }
                    .map_err(|e| failed("replaying steps", e));
            }
            GraphUse::Record => true,
            GraphUse::Launch => false,
        };
        let (work, table) = self.work(steps, scratch, batch, shape)?;
        assert!(table.is_empty(), "operations read no table of experts");
        if !record {
            return self.queue(&work, room);
        }
        let captured = self.capture(&work, room)?;
        match self
            .step_graphs
            .keep(key, captured.map(|graph| (graph, table)))
        {
            Some(graph) => {
                // SAFETY: as for a replay.
                unsafe { graph.launch(&self.compute) }.map_err(|e| failed("replaying steps", e))
            }
            None => self.queue(&work, room),
        }
    }

    /// Records work; `None` where it cannot be recorded, which it could not
    /// either when it comes again.
    ///
    /// It is recorded on a stream of its own: one whose recording was broken takes nothing any more
    /// by ROCm's runtime, and another takes its place. The vendor's products are on the compute
    /// stream: by CUDA's library that can be recorded, by ROCm's they are not.
    fn capture(&mut self, work: &[Queued], room: (u64, u64)) -> Result<Option<Graph>, Error> {
        let by_library = work.iter().any(|item| matches!(item, Queued::Gemm(..)));
        if by_library && self.context.shared_driver().vendor() == Vendor::Hip {
            return Ok(None);
        }
        let on = if by_library {
            &self.compute
        } else {
            &self.recorder
        };
        let captured = on.capture(|| self.queue_on(on, work, room).map_err(Captured::Queue));
        if captured.is_err() && !by_library {
            self.recorder = Stream::new(&self.context, Priority::High)
                .map_err(|e| failed("making a stream", e))?;
        }
        match captured {
            Ok(graph) => {
                tracing::debug!(nodes = graph.nodes(), "steps are recorded");
                Ok(Some(graph))
            }
            Err(Captured::Driver(error)) if error.is_lost() => {
                Err(failed("recording a pass", error))
            }
            Err(Captured::Queue(error @ (Error::Lost(_) | Error::Memory { .. }))) => Err(error),
            Err(error) => {
                tracing::warn!(%error, "steps cannot be recorded; their kernels are launched one by one");
                Ok(None)
            }
        }
    }

    /// Sends where the experts of a pass are.
    fn send_table(&mut self, table: &[u64], scratch: Scratch<'_>) -> Result<(), Error> {
        self.table_of = None;
        if table.is_empty() {
            return Ok(());
        }
        let (workspace, base) = self.place(scratch);
        let bytes: Vec<u8> = table.iter().flat_map(|a| a.to_le_bytes()).collect();
        let at = base + workspace.table;
        self.sender().bytes(at, &bytes)
    }

    /// Sends a pass's data where the device lacks it.
    fn send(
        &mut self,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
        shape: PassShape,
    ) -> Result<(), Error> {
        let (workspace, base) = self.place(scratch);
        let reserve = self.reserve_addresses()?;
        self.pass.send(
            batch,
            shape,
            Places {
                workspace: &workspace,
                reserve: &reserve,
                arena: self.arena.base(),
                scratch: scratch.base,
                scratch_base: base,
            },
            Sender::new(&self.pass_ring, &self.compute, &self.kernels, &self.uploads),
        )
    }

    /// The work of some segments' operations, and the table of experts that it reads.
    fn work(
        &self,
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
        shape: PassShape,
    ) -> Result<(Vec<Queued>, Vec<u64>), Error> {
        let (workspace, scratch_base) = self.place(scratch);
        let reserve = self.reserve_addresses()?;
        let mut lowering = Lowering {
            target: &self.target,
            arena: self.arena.base(),
            reserve: &reserve,
            workspace,
            scratch,
            scratch_base,
            batch,
            shape,
            vendor: self.products.usable(),
            work: Vec::new(),
            table: Vec::new(),
            handed_on: None,
        };
        for (i, step) in steps.iter().enumerate() {
            lowering.lower(step, steps.get(i + 1))?;
        }
        assert!(
            lowering.handed_on.is_none(),
            "the last step hands nothing on"
        );
        Ok((lowering.work, lowering.table))
    }

    fn queue(&self, work: &[Queued], vendor_room: (u64, u64)) -> Result<(), Error> {
        self.queue_on(&self.compute, work, vendor_room)
    }

    /// Queues work on the compute stream, or on the one that records.
    fn queue_on(
        &self,
        stream: &Stream,
        work: &[Queued],
        vendor_room: (u64, u64),
    ) -> Result<(), Error> {
        // Launches that wait for their inputs themselves may overlap, in chains of such. What is
        // before the first one (a copy of the pass's data, an upload) is waited for.
        let mut chained = false;
        let _held = self.uploads.hold();
        for item in work {
            match item {
                Queued::Launch(launch) => {
                    let overlaps = launch.overlaps && chained;
                    // SAFETY: addresses were made of places that the ledger gave to this pass, of
                    // sizes that the builders and the layouts agree on; the compute stream orders
                    // them, and what overlaps reads before it waits only weights and the pass's
                    // data, which no launch writes.
                    unsafe { self.kernels.launch_after(launch, overlaps, stream)? };
                    chained = launch.overlaps;
                }
                Queued::Clear(offset, bytes) => {
                    self.arena.zero(*offset, *bytes, stream)?;
                    chained = false;
                }
                Queued::Gemm(gemm, adds_bias) => {
                    // The library has had the stream's handle since it was opened.
                    self.compute.note_queued();
                    let bias = self.products.gemm(gemm, vendor_room)?;
                    chained = false;
                    if let (Bias::Left, Some(launch)) = (bias, adds_bias) {
                        // SAFETY: as for other launches; the bias is a part of the weights.
                        unsafe { self.kernels.launch_after(launch, false, stream)? };
                        chained = launch.overlaps;
                    }
                }
            }
        }
        Ok(())
    }

    fn vendor_room(&self, scratch: Scratch<'_>) -> (u64, u64) {
        let (workspace, base) = self.place(scratch);
        (base + workspace.vendor, workspace.vendor_bytes)
    }

    /// Whether a pass is recorded when it comes again.
    fn records(&self, scratch: Scratch<'_>, shape: PassShape) -> bool {
        self.config.graphs && is_recorded(scratch.layout, shape.is_decode())
    }

    /// Everything that a recording of a pass is made of.
    fn key(&self, stamp: u64, scratch: Scratch<'_>, batch: &Batch<'_>, shape: PassShape) -> Key {
        let mut key = vec![
            stamp,
            self.arena.generation(),
            scratch.base,
            scratch.layout.bytes,
            scratch.layout.tokens,
            scratch.layout.outputs,
            batch.n_tokens as u64,
            batch.outputs.len() as u64,
            u64::from(shape.spans.table_stride),
            u64::from(shape.positions_max),
            batch.rows_of_a_sequence() as u64,
            batch.spans.len() as u64,
            u64::from(batch.has_whole_spans()),
            u64::from(shape.spans.n_tiles),
            u64::from(shape.spans.tile_rows),
            u64::from(shape.spans.single_rows),
        ];
        key.extend(batch.kv.iter().map(|g| g.layout.page_bytes() as u64));
        key.extend(batch.rope.iter().map(|r| r.n_rot() as u64));
        key
    }
}

impl Recording for GpuDevice {
    fn run_again(
        &mut self,
        stamp: [u64; 2],
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        self.queue_steps(Some(stamp), steps, scratch, batch)
    }

    fn replay(
        &mut self,
        stamp: u64,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<bool, Error> {
        let shape = PassData::shape(batch);
        if !self.records(scratch, shape) {
            return Ok(false);
        }
        let key = self.key(stamp, scratch, batch, shape);
        if !self.graphs.of(shape.is_decode()).has(&key) {
            return Ok(false);
        }
        self.send(scratch, batch, shape)?;
        if self.table_of.as_ref() != Some(&key) {
            let table = self.graphs.of(shape.is_decode()).table(&key).to_vec();
            self.send_table(&table, scratch)?;
            self.table_of = Some(key.clone());
        }
        let queued = self.compute.queued();
        let graphs = self.graphs.of(shape.is_decode());
        let GraphUse::Replay(graph) = graphs.next_use(&key, queued) else {
            return Ok(false);
        };
        let _held = self.uploads.hold();
        // SAFETY: the key says that the addresses are those of the recording, and
        // the pass's data lies there.
        unsafe { graph.launch(&self.compute) }.map_err(|e| failed("replaying a pass", e))?;
        Ok(true)
    }

    /// Queues all segments of a pass: launched one by one, or recorded and replayed.
    fn run_all(
        &mut self,
        stamp: u64,
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        if self.replay(stamp, scratch, batch)? {
            return Ok(());
        }
        let shape = PassData::shape(batch);
        self.send(scratch, batch, shape)?;
        let room = self.vendor_room(scratch);
        let (work, table) = self.work(steps, scratch, batch, shape)?;
        self.send_table(&table, scratch)?;
        if !self.records(scratch, shape) {
            return self.queue(&work, room);
        }
        let key = self.key(stamp, scratch, batch, shape);
        let decodes = shape.is_decode();
        if self.graphs.of(decodes).many_leave() {
            self.finish()?;
            self.graphs.let_go(u64::MAX);
        }
        let queued = self.compute.queued();
        let next = self.graphs.of(decodes).next_use(&key, queued);
        if !matches!(next, GraphUse::Record) {
            return self.queue(&work, room);
        }
        let captured = self.capture(&work, room)?;
        let kept = captured.map(|graph| (graph, table));
        match self.graphs.of(decodes).keep(&key, kept) {
            Some(graph) => {
                // SAFETY: as for a replay.
                unsafe { graph.launch(&self.compute) }.map_err(|e| failed("replaying a pass", e))
            }
            None => self.queue(&work, room),
        }
    }
}

/// Why a recording failed.
#[derive(Debug, thiserror::Error)]
enum Captured {
    #[error(transparent)]
    Queue(Error),
    #[error(transparent)]
    Driver(#[from] gpu::Error),
}
