//! The engine's features: speculation, CPU compute, prefix cache and others. Each is a value with
//! its own state; the actor calls it with the memory, models or requests that it needs.

pub(crate) mod background_load;
pub(crate) mod context;
pub(crate) mod cpu_compute;
pub(crate) mod equal_segments;
pub(crate) mod host_kv;
pub(crate) mod kv_disk;
pub(crate) mod prefix_cache;
pub(crate) mod preload;
pub(crate) mod speculation;
