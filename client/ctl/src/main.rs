//! Command line of rocmforged.

fn main() {}
