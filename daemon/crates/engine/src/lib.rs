//! The actor that owns a device: scheduler, KV cache, sampler, staging.
