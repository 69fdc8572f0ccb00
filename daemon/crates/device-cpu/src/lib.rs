//! The host device: the CPU with SIMD kernels over a bounded arena. The embedded
//! default and the reference.
//!
//! "VRAM" is an anonymous mapping as large as the machine's memory of which only the budget's share
//! is ever touched; an upload repacks a tensor into the layout that its kernel wants, so caching,
//! eviction and reloading are as real here as on a card.
//!
//! Threads: the engine thread calls; a pool ([`Pool`]) shares out each operation; staging
//! threads repack uploads. They touch disjoint ranges of the arena: the ledger hands out a
//! slab to one use at a time.

#![deny(unsafe_code)]

mod adapters;
mod answers;
mod arena;
mod context;
mod experts;
mod largest;
mod products;
mod recurrent;
mod run;
mod staging;
mod store;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::ops::{Batch, Buf, PlacedBuf, RowCounts};
use rocmforge_device::{
    BoundStep, Candidates, Device, DeviceInfo, DeviceKind, Error, Role, Scratch, ScratchLayout,
    SegmentLayout, Selection, TakeRows, TensorDesc, Upload, UploadTicket, host_memory_bytes,
    wrong_shape,
};
use rocmforge_gguf::MappedFile;
use rocmforge_kernels_cpu::ops::Simd;
use rocmforge_kernels_cpu::{Activations, Isa, PackedMatrix, Pool};

use arena::Arena;
use staging::Staging;

pub use answers::{Answers, Brought};

/// How the host device is set up.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostConfig {
    /// Threads of an operation; `None` is one a core that this process may use.
    pub threads: Option<NonZeroUsize>,
    /// How long these look for the next operation before they sleep; `None` is the pool's usual
    /// time.
    pub spin: Option<Duration>,
    /// Threads that bring weights while others compute; `None` is some of a machine with cores to
    /// spare. With none, weights come while they are waited for.
    pub staging_threads: Option<usize>,
}

/// The CPU as a device.
#[derive(Debug)]
pub struct HostDevice {
    arena: Arc<Arena>,
    pool: Pool,
    staging: Staging,
    isa: Isa,
    simd: Simd,
    /// The quantized input of the product under way; kept for its memory.
    activations: Activations,
    /// The inputs of the experts under way, and their results sorted by expert; kept for their
    /// memory.
    expert_inputs: Vec<Activations>,
    expert_rows: Vec<f32>,
    /// Where matrices are, if not in the arena: while [`Answers`] runs a step.
    from_file: Option<Arc<MappedFile>>,
    /// What lies below this in the arena is there even so.
    kept_bytes: u64,
    name: String,
}

impl HostDevice {
    /// Reserves the arena's addresses and starts the threads.
    ///
    /// # Errors
    /// [`Error::Config`] for an unusable setting, [`Error::Memory`] if the
    /// system refuses addresses.
    pub fn new(config: HostConfig) -> Result<Self, Error> {
        let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let threads = config.threads.unwrap_or(cores);
        let isa = Isa::detect().map_err(|e| Error::Config(e.to_string()))?;
        let simd = match isa {
            Isa::Scalar => Simd::Scalar,
            _ => Simd::detect(),
        };
        let spin = config.spin.unwrap_or(rocmforge_kernels_cpu::POOL_SPIN);
        let pool = Pool::with_spin(threads, spin).map_err(|e| Error::Config(e.to_string()))?;
        let arena = Arc::new(Arena::reserve(host_memory_bytes())?);
        // One thread reads ahead while the others compute; more only where
        // there are cores to spare.
        let usual = (threads.get() / 4).clamp(1, 8);
        let ahead = config.staging_threads.unwrap_or(usual);
        let staging = Staging::start(Arc::clone(&arena), isa, ahead, threads.get())?;
        let name = format!(
            "{}, {} threads, {}",
            arena::processor_name(),
            threads,
            isa.name()
        );
        Ok(Self {
            arena,
            pool,
            staging,
            isa,
            simd,
            activations: Activations::new(),
            expert_inputs: Vec::new(),
            expert_rows: Vec::new(),
            from_file: None,
            kept_bytes: 0,
            name,
        })
    }
}

/// The packed form of a matrix.
fn packed(desc: &TensorDesc, isa: Isa) -> Result<PackedMatrix, Error> {
    PackedMatrix::new(desc.ty, desc.rows as usize, desc.cols as usize, isa)
        .map_err(|e| wrong_shape(desc, e.to_string()))
}

impl Device for HostDevice {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: DeviceKind::Host,
            is_cpu: true,
            name: self.name.clone(),
            arch: self.isa.name().to_owned(),
            ordinal: 0,
            driver: String::new(),
            findings: Vec::new(),
            compute_units: 0,
            memory_bytes: self.arena.reserved(),
            machine_memory: true,
            counts_page_cache: false,
            allocations: 1,
            // With few cores an upload ahead of need only takes time from the operations, and
            // its slab from the prefix that stays resident (measured on the cache's traces: up
            // to 7 points of hit ratio).
            prefetch: u32::from(self.pool.threads() >= 4),
            prefill_chunk: 512,
            records: false,
        }
    }

    fn layout(&self, tensors: &[TensorDesc]) -> Result<SegmentLayout, Error> {
        SegmentLayout::place(tensors, |desc| match desc.role {
            Role::Matrix => Ok(packed(desc, self.isa)?.packed_bytes() as u64),
            Role::Vector => Ok(desc.rows * desc.cols * 4),
        })
    }

    fn workspace_bytes(&self, layout: &ScratchLayout) -> u64 {
        // The activations of one product, in the larger of their two forms.
        let counts = RowCounts {
            tokens: layout.tokens,
            outputs: layout.outputs,
        };
        let rows = layout
            .bufs
            .iter()
            .map(|b| counts.of(b.rows))
            .max()
            .unwrap_or(0);
        let cols = layout.bufs.iter().map(|b| b.width).max().unwrap_or(0);
        (rows * (cols + 64) * 4).next_multiple_of(rocmforge_device::ALIGNMENT)
    }

    fn page_table_entries(&self) -> Option<u64> {
        None
    }

    fn set_capacity(&mut self, bytes: u64) -> Result<(), Error> {
        self.arena.set_capacity(bytes)
    }

    /// The system gives memory page by page and takes it back the same way: all that the arena
    /// holds stays.
    fn renew(&mut self, sizes: &[u64], _keep: &[(u64, u64)]) -> Result<u64, Error> {
        let bytes = sizes.first().copied().unwrap_or(0);
        self.set_capacity(bytes).map(|()| bytes)
    }

    fn begin_upload(&mut self, upload: Upload) -> Result<UploadTicket, Error> {
        self.staging.begin(upload)
    }

    fn finished_uploads(&mut self) -> Vec<(UploadTicket, Result<(), Error>)> {
        self.staging.finished()
    }

    fn wait_upload(&mut self, ticket: UploadTicket) -> Result<(), Error> {
        let ended = self.staging.wait(&[ticket], &self.pool);
        ended.into_iter().collect()
    }

    fn is_queued(&self, _ticket: UploadTicket) -> bool {
        false
    }

    fn move_slab(&mut self, from: u64, to: u64, bytes: u64) -> Result<(), Error> {
        self.arena.copy_within(from, to, bytes);
        Ok(())
    }

    fn read_slab(&mut self, from: u64, into: &mut [u8]) -> Result<(), Error> {
        into.copy_from_slice(self.arena.bytes(from, into.len()));
        Ok(())
    }

    fn write_slab(&mut self, to: u64, bytes: &[u8]) -> Result<(), Error> {
        self.arena.bytes_mut(to, bytes.len()).copy_from_slice(bytes);
        Ok(())
    }

    fn discard(&mut self, offset: u64, bytes: u64) {
        self.arena.discard(offset, bytes);
    }

    fn write(&mut self, scratch: Scratch<'_>, buf: Buf, rows: &[f32]) -> Result<(), Error> {
        self.write_parts(scratch, buf, &[(0, rows)])
    }

    fn write_parts(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        parts: &[(u64, &[f32])],
    ) -> Result<(), Error> {
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        for &(first, rows) in parts {
            let at = at + first * width * 4;
            assert!(
                first * width + rows.len() as u64 <= scratch.layout.elements(buf),
                "more rows than the buffer holds"
            );
            self.arena
                .floats_mut(scratch.base + at, rows.len())
                .copy_from_slice(rows);
        }
        Ok(())
    }

    fn write_rows(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        table: &TensorDesc,
        rows: &[u8],
    ) -> Result<(), Error> {
        let ty = table.ty;
        let mut values = vec![0.0; rows.len() / ty.block_bytes() * ty.block_size()];
        let wrong = |e: rocmforge_kernels_cpu::Error| Error::Config(e.to_string());
        rocmforge_kernels_cpu::reference::dequantize(ty, rows, &mut values).map_err(wrong)?;
        if values.iter().any(|v| !v.is_finite()) {
            return Err(Error::NotFinite {
                tensor: table.name.clone(),
            });
        }
        self.write(scratch, buf, &values)
    }

    fn run(
        &mut self,
        step: &BoundStep<'_>,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        match step {
            BoundStep::Run { ops, weights, .. } => ops
                .iter()
                .try_for_each(|op| run::run(self, op, *weights, scratch, batch)),
            BoundStep::Experts { ffn, experts } => {
                experts::run(self, ffn, experts, scratch, batch, &mut || ())
            }
        }
    }

    fn read_each(
        &mut self,
        scratch: Scratch<'_>,
        bufs: &mut [(Buf, &mut [f32])],
    ) -> Result<(), Error> {
        for (buf, out) in bufs {
            let at = scratch.layout.bufs[buf.0 as usize].at;
            out.copy_from_slice(self.arena.floats(scratch.base + at, out.len()));
        }
        Ok(())
    }

    fn take_rows(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: &[u32],
        take: TakeRows<'_>,
    ) -> Result<(), Error> {
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let mut first = 0;
        for run in rows.chunk_by(|row, next| row + 1 == *next) {
            let from = scratch.base + at + u64::from(run[0]) * width * 4;
            take(
                first,
                self.arena.floats_mut(from, run.len() * width as usize),
            );
            first += run.len();
        }
        Ok(())
    }

    fn selection(&mut self) -> Option<&mut dyn Selection> {
        Some(self)
    }
}

impl Selection for HostDevice {
    fn top_k(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
        k: usize,
    ) -> Result<Option<Vec<Option<Candidates>>>, Error> {
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let width = width as usize;
        let x = self.arena.floats(scratch.base + at, rows * width);
        Ok(Some(largest::largest(&self.pool, self.simd, x, width, k)))
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_device::{ReadTicket, TimedTicket, TimedWork};

    use super::*;

    /// Callers need not ask: without an interface a device does what is said beside the interface.
    #[test]
    fn what_only_a_card_can_do_is_done_without() {
        let mut host = HostDevice::new(HostConfig::default()).unwrap();
        host.set_capacity(1 << 20).unwrap();
        let device: &mut dyn Device = &mut host;
        assert_eq!((device.memory_use(), device.free_bytes()), (None, None));
        assert!(device.reserve().is_none() && device.closing().is_none());
        assert_eq!(device.set_aside(1 << 20).unwrap(), 0);
        assert!(matches!(device.save(0, 0, 4, true), Err(Error::Config(_))));
        assert!(matches!(device.restore(0, 0, 4), Err(Error::Config(_))));
        assert_eq!(device.pace(1), None);
        assert_eq!(device.look_at_timed(TimedTicket(0)), TimedWork::Done(None));
        let unknown = device.end_top_k(ReadTicket(7)).unwrap_err();
        assert_eq!(unknown.to_string(), "no read 7 was begun");
    }

    #[test]
    fn steps_that_are_not_recorded_run_whenever_they_come() {
        let mut host = HostDevice::new(HostConfig::default()).unwrap();
        host.set_capacity(1 << 20).unwrap();
        let device: &mut dyn Device = &mut host;
        let layout = ScratchLayout {
            bufs: vec![PlacedBuf {
                at: 0,
                width: 4,
                rows: rocmforge_device::Rows::Tokens,
            }],
            bytes: 16,
            tokens: 1,
            outputs: 1,
            tables: 0,
            experts: 0,
            float_weights: false,
            both_ways: false,
            parts: false,
        };
        let scratch = Scratch {
            layout: &layout,
            base: 0,
        };
        let batch = Batch {
            n_tokens: 1,
            spans: &[],
            parts: &[],
            kv: &[],
            rope: &[],
            outputs: &[0],
        };
        device
            .write(scratch, Buf(0), &[1.0, 4.0, -2.0, 4.0])
            .unwrap();
        let ops = [rocmforge_device::Op::Scale {
            x: Buf(0),
            factor: 2.0,
        }];
        let step = || BoundStep::Run {
            ops: &ops,
            live_out: &[],
            weights: None,
        };
        let steps = [step(), step()];
        assert!(!device.replay(1, scratch, &batch).unwrap());
        device.run_all(1, &steps, scratch, &batch).unwrap();
        assert!(!device.replay(1, scratch, &batch).unwrap());
        device.run_again([1, 0], &steps, scratch, &batch).unwrap();
        let mut read = [0.0; 4];
        device.read(scratch, Buf(0), &mut read).unwrap();
        assert_eq!(read, [16.0, 64.0, -32.0, 64.0]);
        let largest = device.argmax(scratch, Buf(0), 1).unwrap();
        assert_eq!(largest, Some(vec![Some(1)]), "the first of equals");
    }
}
