//! The actor that owns a device: it admits requests, runs them step by step, and keeps the cache's
//! promises.
//!
//! [`start`] starts its thread and returns the [`EngineHandle`] through which everyone else speaks
//! to it; [`api`] declares all commands. [`prepare`] turns an open file into a model, off the
//! engine's thread.

#![forbid(unsafe_code)]

mod actor;
pub mod api;
mod clock;
mod features;
mod guards;
mod memory;
mod model;
mod pass;
mod request;
mod store;

pub use actor::commands::MODELS_MAX;
pub use actor::{EngineThread, start, start_on};
pub use api::config::{
    DeviceChoice, EngineConfig, HOST_BUDGET_DEFAULT, HOST_PRESSURE_DEFAULT_PERCENT, HostPressure,
    KvDiskConfig, MaxGaps, PrefixCache, WATCHDOG_DEFAULT, YieldTo,
};
pub use api::error::Error;
pub use api::handle::{EngineHandle, Events};
pub use api::refusal::Refusal;
pub use guards::budget::BUDGET_MIN;
pub use guards::sleep::Clocks;
pub use model::adapters::{
    ADAPTER_SCALE_MAX, AdapterFile, AppliedAdapters, LoadedAdapter, LoadedAdapters, adapter_name,
    check_scale,
};
pub use model::loaded::{
    Beside, LoadedModel, ModelMemory, PrepareStage, PreparedModel, prepare, prepare_among,
    prepare_beside, prepare_reading_images,
};
pub use model::name::{MODEL_NAME_MAX, is_name_char};
pub use model::projector::{can_read_images, is_projector_for};
pub use rocmforge_device::{Loss, LossKind, Stalls, host_memory_bytes};
pub use rocmforge_gpu_driver::others::Places;
pub use rocmforge_model::{ADAPTERS_MAX, Purpose, supported_architectures};
pub use rocmforge_ops::KvType;
