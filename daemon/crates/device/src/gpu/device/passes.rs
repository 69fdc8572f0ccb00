//! Passes: a batch's data goes to the device, operations are lowered and queued, and a decode step is recorded when it
//! comes the second time.

use crate::error::Error;
use crate::gpu;
use crate::ops::Batch;
use crate::{Bound, BoundStep, Scratch};

use super::graphs::{Key, Plan};
use super::launches::{Lowering, Work};
use super::pass_data::{PassData, PassShape, Places, send_bytes};
use super::{GpuDevice, failed};

impl GpuDevice {
    /// Queues one step, and measures it.
    pub(super) fn queue_step(
        &mut self,
        step: &BoundStep<'_>,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        let shape = self.send(scratch, batch)?;
        let work = self.work(std::slice::from_ref(step), scratch, batch, shape)?;
        let timed = self.runs.of(batch.n_tokens).begin(&self.compute);
        self.queue(&work, self.vendor_room(scratch))?;
        if timed {
            let bytes = match step {
                BoundStep::Run { weights, .. } => weights.map_or(0, |w| w.layout.bytes),
                BoundStep::Experts { experts, .. } => {
                    experts.iter().map(|e| e.weights.layout.bytes).sum()
                }
            };
            self.runs.of(batch.n_tokens).end(&self.compute, bytes);
        }
        Ok(())
    }

    /// Queues all segments of a pass: launched one by one, recorded, or replayed.
    pub(super) fn queue_pass(
        &mut self,
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        let shape = self.send(scratch, batch)?;
        let room = self.vendor_room(scratch);
        // The table of a layer's experts is sent between launches, which a recording would do but once.
        let routed = steps.iter().any(|s| matches!(s, BoundStep::Experts { .. }));
        if !self.config.graphs || !shape.is_decode() || routed {
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
            Err(Captured::Driver(error)) if error.is_lost() => {
                Err(failed("recording a pass", error))
            }
            Err(Captured::Queue(error @ (Error::Lost(_) | Error::Memory { .. }))) => Err(error),
            // What fails only while it is recorded would do so each time that the step comes again.
            Err(error) => {
                tracing::warn!(%error, "a decode step cannot be recorded; its kernels are launched one by one");
                self.graphs.keep(&key, None);
                self.queue(&work, room)
            }
        }
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
                arena: self.arena.base(),
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
        steps: &[BoundStep<'_>],
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
            vendor: self.products.usable(),
            work: Vec::new(),
        };
        for step in steps {
            lowering.lower(step)?;
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
                Work::Table(addresses, at) => {
                    let bytes: Vec<u8> = addresses.iter().flat_map(|a| a.to_le_bytes()).collect();
                    send_bytes(&self.pass_ring, &self.compute, *at, &bytes)?;
                    chained = false;
                }
                Work::Gemm(gemm) => {
                    self.products.gemm(gemm, vendor_room)?;
                    chained = false;
                }
            }
        }
        Ok(())
    }

    fn vendor_room(&self, scratch: Scratch<'_>) -> (u64, u64) {
        let (workspace, base) = self.place(scratch);
        (base + workspace.vendor, workspace.vendor_bytes)
    }

    /// Everything that a recording of a pass is made of.
    fn key(
        &self,
        steps: &[BoundStep<'_>],
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
            u64::from(shape.table_stride),
            u64::from(shape.positions_max),
        ];
        key.extend(batch.kv.iter().map(|g| g.layout.page_bytes() as u64));
        key.extend(batch.rope.iter().map(|r| r.n_rot() as u64));
        let place = |bound: &Bound<'_>| [std::ptr::from_ref(bound.layout) as u64, bound.slab];
        for step in steps {
            match step {
                BoundStep::Run { ops, weights, .. } => {
                    key.push(ops.as_ptr() as u64);
                    key.extend(weights.as_ref().map_or([0, 0], place));
                }
                BoundStep::Experts { ffn, experts } => {
                    key.push(std::ptr::from_ref(*ffn) as u64);
                    key.extend(experts.iter().flat_map(|e| place(&e.weights)));
                }
            }
        }
        key
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
