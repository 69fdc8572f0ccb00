//! The scheduler as the engine uses it, by rule and in random runs.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod bench;
mod beside;
mod contention;
mod oracle;
mod places;
mod promises;
mod room;
mod rules;
mod simulation;
mod terms;
