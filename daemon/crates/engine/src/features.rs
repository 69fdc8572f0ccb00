//! The engine's features. Each is a value with its own state, which the actor calls with what it
//! needs.

pub(crate) mod background_load;
pub(crate) mod context;
pub(crate) mod cpu_compute;
pub(crate) mod equal_segments;
pub(crate) mod host_kv;
pub(crate) mod kv_disk;
pub(crate) mod prefix_cache;
pub(crate) mod preload;
pub(crate) mod speculation;
