//! GPUs: one driver trait, two tables of vendor functions, and the owners of what a driver gives
//! out.
//!
//! ```text
//! hip.rs  cuda.rs        vendor symbols (abi.rs of each), opened with dlopen (library.rs) where
//!                        search.rs finds them;
//!                        nothing of them leaves these files
//!      \  /
//!    driver.rs           trait Driver: handles, calls, errors (error.rs) with a class
//!       |
//!    context.rs          Context: the card that is open, shared by all that lives on it; calls.rs:
//!                        what is asked of it now
//!    memory.rs  exec.rs  Buffer, PinnedBuffer, Registration / Stream, Event, Module, Kernel, Graph
//!    others.rs           what other processes do on a card, and what power it takes
//!    sysfs.rs            what the kernel says of an AMD card's memory, kernel_log.rs of its loss
//!                        (loss.rs)
//!    virtual_memory.rs   Reservation, Chunk: addresses apart from memory, where the driver can
//!    blas/  trial.rs     the vendors' products; what may end the process, tried before it is used
//! ```
//!
//! Nothing here knows a model: what is uploaded and launched is `rocmforge-device-gpu`'s to say.
//!
//! *Invariant:* the daemon starts with no runtime installed, unless a card was asked for;
//! [`probe()`] says what was looked for (test `a_probe_tells_what_was_looked_for`).

pub mod blas;
pub mod bus;
mod calls;
pub mod context;
mod cuda;
pub mod driver;
mod ending;
pub mod environment;
mod error;
pub mod exec;
mod hip;
mod image;
mod kernel_log;
mod library;
mod loss;
pub mod memory;
pub mod others;
mod probe;
mod search;
mod sysfs;
pub mod trial;
pub mod virtual_memory;

pub use blas::{CHILD_ARGUMENT as PRODUCTS_CHILD_ARGUMENT, child_main as products_child_main};
pub use calls::{Calls, Note};
pub use context::{Call, Context, Usage};
pub use driver::{
    Attempt, Class, DeviceAttributes, DevicePtr, Driver, Error, LaunchConfig, MemoryInfo, Priority,
    Vendor, Versions,
};
pub use ending::end_process;
pub use exec::{Event, Graph, Kernel, Module, Stream};
pub use kernel_log::KernelView;
pub use library::file_of as library_file;
pub use loss::{LossKind, Said};
pub use memory::{Buffer, PinnedBuffer, Registration};
pub use probe::{Libraries, Report, open, probe, report};
pub use search::only_in_rocm;
pub use sysfs::locked_memory;
