//! GPU kernels: how their sources become code objects.

pub mod compile;
