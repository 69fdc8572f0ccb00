//! The command line against a daemon that stands in for the real one.

mod ctl;
mod doctor;
#[path = "../../tests/fake/mod.rs"]
mod fake;
#[path = "../../../daemon/crates/hub/tests/fake/mod.rs"]
mod hub;
mod images;
mod private;
mod pull;
mod top;
mod vectors;
