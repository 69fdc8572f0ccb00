//! GPU kernels: their sources, the layout of weights on a device, and launches.
//!
//! Nothing here talks to a driver. A builder in [`ops`] turns an operation's shapes and device
//! addresses into one or more [`Launch`]es: the entry, the geometry and one by-value argument
//! struct. What changes from token to token (positions, page tables, ids) is behind addresses, so
//! that a captured graph of launches can be replayed.
//!
//! *Invariant:* every struct of arguments here has the size and the field order of its twin in
//! `hip/*.hip`; a test reads the sources and compares
//! (`structs_of_arguments_have_the_fields_of_the_source`).
//!
//! *Invariant:* every [`Launch`] names an entry that its unit's source defines;
//! a test builds one of each (`every_launch_names_an_entry_of_its_unit`).

#![cfg_attr(test, allow(clippy::too_many_lines, reason = "tables of cases"))]

pub mod amd_targets;
pub mod aot;
pub mod compile;
mod error;
pub mod launch;
pub mod layout;
pub mod ops;
mod target;
#[cfg(test)]
mod tests;
pub mod units;

pub use error::Error;
pub use launch::{Address, ArgBytes, Launch};
pub use layout::device_bytes;
use rocmforge_ops::WeightType;
pub use target::{GpuTarget, Vendor};
