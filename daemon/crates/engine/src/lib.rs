//! The actor that owns a device: it admits requests, runs them step by step, and
//! keeps the cache's promises.
//!
//! [`start`] starts its thread and returns the [`EngineHandle`] through which everyone else
//! speaks to it; [`api`] is all that can be asked. [`prepare`] makes a model of an open
//! file, off the engine's thread.

#![forbid(unsafe_code)]

mod actor;
pub mod api;
mod aside;
mod askers;
mod backlog;
mod begin;
mod budget;
mod closing;
mod commands;
mod config;
mod decoding;
mod draft;
mod embedding_rows;
mod encode;
mod error;
mod fetcher;
mod file_watch;
mod gaps;
mod handle;
mod host_pressure;
mod interleave;
mod keep_free;
mod kv;
mod loaded;
mod lookahead;
mod masks;
mod member;
mod models;
mod offload;
mod open;
mod pass;
mod pass_times;
mod predict;
mod prefix;
mod preload;
mod prepared;
mod pressure;
mod publish;
mod refusal;
mod rotations;
mod sampler;
mod schedule;
mod share;
mod speculate;
mod states;
mod step;
mod stop;
mod suspend;
mod task;
mod tier;
mod under_way;
mod watchdog;
mod weight_store;

pub use actor::{EngineThread, start, start_on};
pub use budget::BUDGET_MIN;
pub use commands::MODELS_MAX;
pub use config::{
    DeviceChoice, EngineConfig, HOST_BUDGET_DEFAULT, HOST_PRESSURE_DEFAULT_PERCENT, HostPressure,
    PrefixCache, WATCHDOG_DEFAULT,
};
pub use error::Error;
pub use handle::{EngineHandle, Events};
pub use loaded::{
    LoadedModel, MODEL_NAME_MAX, ModelMemory, PrepareStage, PreparedModel, is_name_char, prepare,
    prepare_among,
};
pub use refusal::Refusal;
pub use rocmforge_device::{Loss, LossKind, Stalls, host_memory_bytes};
pub use rocmforge_model::{Purpose, supported_architectures};
pub use rocmforge_ops::KvType;
pub use suspend::Clocks;
