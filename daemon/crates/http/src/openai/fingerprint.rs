//! `system_fingerprint`: another one where the same request with the same seed may get another
//! answer.
//!
//! That is with another version, another kind of device, a file that was changed, another template,
//! another type of keys and values, or other adapters. Who else asks, and how tokens are drafted,
//! is not in it.

use std::hash::{DefaultHasher, Hash, Hasher};

use rocmforge_engine::{AppliedAdapters, LoadedModel};
use rocmforge_service::Service;
use rocmforge_service::answers::Generation;

/// The fingerprint of what a model's answers with these adapters come from.
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

/// The fingerprint of what a generation comes from, while there is any.
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
