//! The daemon: owns the device and serves rocmforge.v1.

fn main() {}
