//! The engine thread: it owns the device, the cache, the KV pages and the
//! sequences, and nothing else does.
//!
//! ```text
//!   command --> waiting --(its KV pages, scratch and a segment fit)--> running --> done
//!                  |  ^                                                  |
//!                  |  +-- preempted: others need its room; --------------+-- rows in passes:
//!                  |      recomputed later                                  chunks of its prompt,
//!                  +-- queue full: RESOURCE_EXHAUSTED                        then a token each
//! ```
//!
//! Each turn of the loop takes the commands that wait, lets the scheduler admit what fits, and
//! runs one pass of one model: a row of each of its requests that decode, and chunks of
//! prompts. A command waits for one pass, or for a chunk with the passes between its steps. A
//! request whose reader is slow is passed over until the reader has taken an event.
//!
//! *Invariant:* nothing here waits for a client (test `a_slow_reader_holds_up_only_itself`). What
//! is waited for is an upload, a read of the model's file (rows of the embedding), what the device
//! has computed (logits, routing), a kernel at its first use, pinned memory, the mask of a grammar,
//! and a command when there is no work.

mod accounts;
mod begin;
mod closing;
pub(crate) mod commands;
mod engine;
mod gather;
mod guard;
mod images;
mod interleave;
mod models;
mod open;
mod prepare;
mod pressure;
mod promises;
mod promising;
mod publish;
mod publisher;
mod read_prefix;
mod release;
mod run;
mod schedule;
mod scoring;
mod slices;
mod speculate;
mod start;
mod step;
mod yielding;

pub use start::{EngineThread, start, start_on};
