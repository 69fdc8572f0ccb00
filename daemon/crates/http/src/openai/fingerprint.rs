//! `system_fingerprint`: changes whenever the same request with the same seed may get another
//! output.
//!
//! It depends on the daemon's version, the kind of device, the model's file, the template, the KV
//! type, and the adapters; not on other requests or on speculation.

use std::hash::{DefaultHasher, Hash, Hasher};

use rocmforge_engine::{AppliedAdapters, LoadedModel};
use rocmforge_service::Service;
use rocmforge_service::answers::Generation;

/// The fingerprint of a model with these adapters.
pub(super) fn of(
    service: &Service,
    model: &LoadedModel,
    adapters: Option<&AppliedAdapters>,
) -> String {
    let device = &service.engine.snapshot().device;
    let file = model.file();
    let template = model.template().and_then(|template| template.source().ok());
    let from = (
        env!("CARGO_PKG_VERSION"),
        (device.kind.name(), &device.arch),
        (file.size_bytes(), file.mtime_ns()),
        (&model.model().info().kv_type, template),
        adapters.map(AppliedAdapters::digest),
    );
    fingerprint(&from)
}

/// The fingerprint of a running generation.
pub(super) fn of_generation(service: &Service, generation: &Generation) -> Option<String> {
    let model = generation.model()?;
    Some(of(service, model, generation.adapters()))
}

fn fingerprint(from: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    from.hash(&mut hasher);
    format!("fp_{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::fingerprint;

    #[test]
    fn a_fingerprint_stays_and_is_another_for_anything_else() {
        let one = fingerprint(&("0.1.0", "host", 7_u64));
        assert_eq!(one, fingerprint(&("0.1.0", "host", 7_u64)));
        for other in [
            ("0.1.1", "host", 7),
            ("0.1.0", "cuda", 7),
            ("0.1.0", "host", 8),
        ] {
            assert_ne!(one, fingerprint(&other));
        }
    }
}
