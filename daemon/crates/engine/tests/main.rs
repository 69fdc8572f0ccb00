//! Whole engines: on the CPU, and on the HIP path with a fake runtime in place of a card.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod adapter_errors;
mod adapter_goldens;
mod adapters;
mod architectures;
mod aside;
mod control;
mod decoding;
mod draft;
mod embeddings;
mod encoders;
mod equal;
mod estimates;
mod fake;
mod foresight;
mod generate;
mod gpu;
mod gpu_fake;
mod gpu_fake_faults;
mod gpu_fake_host_pressure;
mod gpu_fake_offload;
mod gpu_fake_tier;
mod gpu_misbehaviours;
mod images;
mod interleave;
mod kv_disk;
mod kv_type;
mod live;
mod many;
mod mutated;
mod predict;
mod promises;
mod recovery;
mod release;
mod requests;
mod reuse;
mod scaled;
mod shares;
mod slow;
mod speculate;
mod structured;
mod terms;
mod tight;
mod why;
mod yielding;
