//! The request field `lora`: adapters of the model with their scales.

use rocmforge_service::adapters::AdapterScale;
use serde::Deserialize;

/// An adapter and its scale, `{"id": 0, "scale": 0.5}`.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct WireAdapter {
    id: i64,
    scale: f32,
}

impl From<WireAdapter> for AdapterScale {
    fn from(wire: WireAdapter) -> Self {
        Self {
            id: wire.id,
            scale: wire.scale,
        }
    }
}

/// The adapters that a request lists.
pub(super) fn listed(wire: Option<Vec<WireAdapter>>) -> Option<Vec<AdapterScale>> {
    wire.map(|list| list.into_iter().map(AdapterScale::from).collect())
}
