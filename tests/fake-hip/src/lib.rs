//! A HIP runtime over host memory, for tests of the real HIP path without a GPU.
//!
//! The shared library exports the functions that the daemon's HIP table needs, and `fake_hip_*`
//! functions that control it. Tests use [`Fake`]: each has a copy of the library of its own, so
//! their states do not meet.
//!
//! What it is strict about, beyond what HIP is:
//! - device addresses are no host addresses, and every copy and kernel access is checked
//!   against the live allocations;
//! - fresh memory is poisoned with [`POISON`], and a copy to the host or a kernel that reads
//!   bytes nobody wrote is noted;
//! - queued work happens at synchronization only: a query does one step; pageable memory
//!   is read at once, pinned and registered memory when the copy happens, so that a
//!   buffer reused too early shows;
//! - reserved addresses can be used only where memory is mapped and allowed; unmapping what is not
//!   mapped, or while work is queued, is noted;
//! - giving back host memory that queued copies name, and handles that are unknown, are noted.
//!
//! Kernels (`kernels/`) are carried out by the host's own code, all of those in
//! `kernels/gpu/hip/units.txt`, so that whole models run: with no card, and with the host device's
//! text.
//!
//! The same file stands in for NVIDIA's management library, with one card at 0000:41:00.0 and the
//! processes of [`Fake::set_processes`].
//!
//! What is noted comes back from [`Fake::violations`]. A fault of queued work loses
//! the device, as on a card.
//!
//! Environment, read at the first call: FAKE_HIP_DEVICES (how many cards), FAKE_HIP_MEMORY (bytes),
//! FAKE_HIP_ARCH, FAKE_HIP_INTEGRATED=1 (each one for all cards, or a list with commas: `0,1`),
//! FAKE_HIP_WAVE, FAKE_HIP_REGISTER=0 (registration refused),
//! FAKE_HIP_VIRTUAL_MEMORY=0 (addresses come with memory only), FAKE_HIP_OTHERS_FILE (a
//! file with the bytes that other processes hold, read whenever what is free is asked
//! for), FAKE_HIP_CALLS_FILE (a file whose first line says how many calls there were, and the last
//! one's name), FAKE_HIP_MISBEHAVE=`slow-registration:500,...` (see [`Misbehaviour`]),
//! FAKE_HIP_FAIL=`call:nth:code,...` (`run:kernel:40:719` is a pseudo-call of
//! [`when_run`]: the 40th kernel faults).
//!
//! # The daemon on it
//!
//! The daemon takes it like any runtime, with images that hold names in place of code:
//!
//! ```text
//! cargo build --release -p rocmforge-fake-hip -p rocmforged
//! cargo run --release -p rocmforge-fake-hip --example fake_images -- /tmp/fake-kernels
//! ROCMFORGE_HIP_LIBRARY=target/release/librocmforge_fake_hip.so \
//!     ROCMFORGE_KERNELS=/tmp/fake-kernels \
//!     target/release/rocmforged --device hip --vram-budget 64MiB ...
//! ```
//!
//! A test writes the folder with [`write_images`] and finds the library with [`library_path`], or
//! gives the daemon [`Fake::path`] and [`Fake::images`]; what happens in the daemon's process is
//! told by FAKE_HIP_* alone, since a [`Fake`] is in the test's. FAKE_HIP_MEMORY bounds what a
//! budget in percent becomes: all of it is real memory. Where a real rocBLAS is installed the
//! daemon would hand it addresses that are none; there, [`Fake::add_products`] puts one beside the
//! runtime, which is looked for first.

mod client;
mod control;
mod exports;
mod kernels;
mod memory;
mod misbehaviour;
mod nvml;
mod pinned;
mod queue;
mod rocblas;
mod state;

pub use client::{Fake, Live, library_path, marker_image, unit_image, write_images};
pub use control::Process;
pub use memory::GRANULARITY;
pub use misbehaviour::Misbehaviour;

/// The architecture that it announces unless FAKE_HIP_ARCH says otherwise. It has no matrix
/// instructions, so that products of many rows round what they read as those of few do, and a text
/// does not depend on what shares its passes.
pub const ARCH: &str = "gfx1030";

/// A code of [`Fake::fail`] that is none of HIP's: work that is to fail with it never ends,
/// and a call never comes back.
pub const HANG: u32 = 9999;

/// What fresh device memory is filled with: NaN as f32 and f16, a huge index as an integer.
pub const POISON: u8 = 0xFF;

/// Pseudo-calls for [`Fake::fail`] that fail when queued work happens, not when it is queued.
pub mod when_run {
    /// A copy from host to device.
    pub const H2D: &str = "run:h2d";
    /// A copy from device to host.
    pub const D2H: &str = "run:d2h";
    /// A copy inside the device.
    pub const D2D: &str = "run:d2d";
    /// A fill.
    pub const MEMSET: &str = "run:memset";
    /// A kernel.
    pub const KERNEL: &str = "run:kernel";
}
