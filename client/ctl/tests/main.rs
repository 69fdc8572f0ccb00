//! The command line against a daemon that stands in for the real one.

mod ctl;
mod doctor;
#[path = "../../tests/fake/mod.rs"]
mod fake;
mod private;
mod vectors;
