//! Rows of an embedding, as the file has them, into a buffer of a pass: dequantized by the
//! device where they are many.

use rocmforge_device::ops::{Buf, PlacedBuf};
use rocmforge_device::{Device, Error, Scratch};
use rocmforge_kernels_cpu::reference;
use rocmforge_kernels_gpu as gpu_kernels;
use rocmforge_kernels_gpu::ops::weights::{self, Weights};
use rocmforge_ops::TensorDesc;

use super::{GpuDevice, launch_error};

/// Rows from which on the device dequantizes them. A row of 4096 in Q4_K takes the CPU some 40 us.
const DEVICE_ROWS_MIN: u64 = 2;

impl GpuDevice {
    /// See [`Device::write_rows`].
    pub(super) fn write_embedding(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        table: &TensorDesc,
        rows: &[u8],
    ) -> Result<(), Error> {
        let ty = table.ty;
        let PlacedBuf { at, width, .. } = scratch.layout.bufs[buf.0 as usize];
        let n = (rows.len() / ty.block_bytes() * ty.block_size()) as u64 / width.max(1);
        let (workspace, base) = self.place(scratch);
        let planes = gpu_kernels::device_bytes(ty, n, width).map_err(|e| launch_error(&e))?;
        let raw = base + workspace.input;
        // The rows, and behind them their numbers.
        let ids_at = (raw + rows.len() as u64).next_multiple_of(4);
        let repacked = (ids_at + n * 4).next_multiple_of(rocmforge_device::ALIGNMENT);
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
                    tensor: table.name.clone(),
                })
            };
            self.embeddings = std::mem::take(values);
            return written;
        }
        let to = self.arena.at(scratch.base + at, n * width * 4);
        self.pass.begin(scratch.base);
        let ids: Vec<u8> = (0..n as u32).flat_map(u32::to_le_bytes).collect();
        let parts = [(raw, rows), (ids_at, ids.as_slice())];
        self.sender().parts(&parts)?;
        let weights = Weights {
            ty,
            at: repacked,
            rows: n,
            cols: width,
        };
        // What is not finite shows in the logits; this flag is nobody's.
        let flag = self.reserve_addresses()?.results + 4;
        let launches = [
            weights::repack(weights, raw, 0, n, flag),
            weights::rows_f32(weights, ids_at, n, to),
        ];
        for launch in launches {
            let launch = launch.map_err(|e| launch_error(&e))?;
            // SAFETY: all places are the pass's own, as large as checked above; the stream orders
            // them.
            unsafe { self.kernels.launch(&launch, &self.compute)? };
        }
        Ok(())
    }
}
