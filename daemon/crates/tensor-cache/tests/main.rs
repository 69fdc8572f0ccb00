//! The cache as the engine uses it, by rule and in random runs.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod behaviour;
mod experts;
mod kept;
mod oracle;
mod sharing;
mod simulation;
mod streaming;
