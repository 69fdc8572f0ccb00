//! A look at the border of two mappings by a kernel: copies go by the copy engines or by kernels of
//! the runtime's own, what a pass reads and writes goes through the page tables of the units that
//! compute, and only such a kernel shows that those take two mappings for one range.
//!
//! ```text
//!   first chunk   [ from | rows | ...           | over
//!                                               + border
//!   second chunk                           over | ...              | to ]
//!
//!   written:  copy to `from` -> kernel from `from` to `over` -> copy of `over` to the host
//!   read:     copy to `over` -> kernel from `over` to `to`   -> copy of `to` to the host
//! ```
//!
//! The kernel is `gather`, which puts rows into another order: what a copy left behind is not taken
//! for its work. Every card loads it at its start anyway (`warmup::always`).

use rocmforge_device::Error as DeviceError;
use rocmforge_gpu_driver::{Context, DevicePtr, Error, Stream};
use rocmforge_kernels_gpu::Launch;
use rocmforge_kernels_gpu::ops::rows;

use super::super::errors::launch_error;
use super::super::kernels::Kernels;

/// Rows that the kernel moves, in the order in which they come out: an odd number, so that the
/// border lies inside of one.
const ORDER: [u32; 3] = [2, 0, 1];

/// Elements of a row, of four bytes; the kernel's block of threads does one.
const COLS: usize = 1024;

/// Bytes of what is moved: 6 KiB on each side of the border.
const BYTES: u64 = (ORDER.len() * COLS * 4) as u64;

/// What the look's answers are called where it fails.
const WRITTEN: &str = "writing over the border of two mappings by a kernel";
const READ: &str = "reading over the border of two mappings by a kernel";

/// Least bytes of each of the two chunks: `from` and `rows` or `to`, and half of `over`.
const STEP_MIN: u64 = 2 * BYTES;

/// Has the kernel at hand, so that the look itself does not wait for a compiler.
///
/// # Errors
/// What keeps the kernel from being had or loaded.
pub(super) fn prepare(kernels: &Kernels) -> Result<(), DeviceError> {
    kernels.prepare(&launch(DevicePtr(0), DevicePtr(0), DevicePtr(0))?)
}

/// Rows of `from`, in the order that lies at `rows`, to `to`.
fn launch(from: DevicePtr, rows: DevicePtr, to: DevicePtr) -> Result<Launch, DeviceError> {
    let n = ORDER.len() as u32;
    rows::gather(from.0, rows.0, n, COLS as u64, to.0).map_err(|e| launch_error(&e))
}

/// Numbers that tell their place, as their bytes; no float is made of them, the kernel moves what
/// it reads. `turn` makes others.
fn numbers(turn: u32) -> Vec<u8> {
    // 1.0 and up: what is no number, or too small for one, may come out as another.
    let number = |i: u32| 0x3F80_0000 + turn * 0x10_0000 + i;
    let all = (0..(ORDER.len() * COLS) as u32).map(number);
    all.flat_map(u32::to_le_bytes).collect()
}

/// What the kernel makes of bytes.
fn gathered(bytes: &[u8]) -> Vec<u8> {
    let row = |i: &u32| &bytes[*i as usize * COLS * 4..][..COLS * 4];
    ORDER.iter().flat_map(row).copied().collect()
}

/// Has the kernel write over the border of two mapped chunks of `step` bytes, the first of which
/// begins at `base`, and read over it.
///
/// # Errors
/// What the driver says, and [`Error::Answer`] where other values came out.
pub(super) fn look(
    context: &Context,
    kernels: &Kernels,
    base: DevicePtr,
    step: u64,
    stream: &Stream,
) -> Result<(), Error> {
    assert!(step >= STEP_MIN, "chunks of {step} bytes for a look");
    let (from, rows) = (base, base.offset(BYTES));
    let over = base.offset(step - BYTES / 2);
    let to = base.offset(2 * step - BYTES);
    let order: Vec<u8> = ORDER.iter().flat_map(|row| row.to_le_bytes()).collect();
    send(context, &order, rows, stream)?;
    for (call, turn, from, to) in [(WRITTEN, 0, from, over), (READ, 1, over, to)] {
        let sent = numbers(turn);
        send(context, &sent, from, stream)?;
        let refused = |error: DeviceError| Error::Answer {
            call,
            message: error.to_string(),
        };
        let launch = launch(from, rows, to).map_err(refused)?;
        // SAFETY: `from`, `rows` and `to` lie in the two chunks, do not overlap and are as long as
        // the launch says; the chunks stay until the wait below.
        unsafe { kernels.launch(&launch, stream) }.map_err(refused)?;
        let mut came = vec![0; BYTES as usize];
        // SAFETY: `to` lies in the chunks, and `came` is as long and lives until the wait.
        let queued = context.driver().and_then(|driver| unsafe {
            driver.copy_d2h_async(came.as_mut_ptr(), to, BYTES, stream.handle())
        });
        queued.and(super::chunks::wait(context, stream))?;
        let wanted = gathered(&sent);
        if let Some(at) = (0..came.len()).find(|&at| came[at] != wanted[at]) {
            let at = at as u64 / 4;
            return Err(Error::Answer {
                call,
                message: format!(
                    "value {at} of {}, of which half lie on each side, is another",
                    BYTES / 4
                ),
            });
        }
    }
    Ok(())
}

/// Copies to the card, and waits.
fn send(context: &Context, bytes: &[u8], to: DevicePtr, stream: &Stream) -> Result<(), Error> {
    let driver = context.driver()?;
    // SAFETY: the callers' places lie in the chunks; `bytes` live until the wait.
    unsafe { driver.copy_h2d_async(to, bytes.as_ptr(), bytes.len() as u64, stream.handle()) }
        .and(super::chunks::wait(context, stream))
}
