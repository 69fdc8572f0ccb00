//! The LoRA adapters that a request asks for.

/// An adapter that a request lists, with its scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdapterScale {
    /// Number of the adapter, from 0, in the order of the model's load.
    pub id: i64,
    /// The adapter's scale.
    pub scale: f32,
}

/// LoRA adapters that a request asks for, by a list or in the model's name.
#[derive(Debug, Clone, Default)]
pub struct AdapterChoice {
    /// The model's name as the request has it, possibly with `+adapter` appended.
    pub(crate) asked: String,
    /// The adapters that the request lists; `None` if it has no list.
    pub(crate) listed: Option<Vec<AdapterScale>>,
}

impl AdapterChoice {
    /// The choice of a request that names a model and lists these adapters.
    pub fn new(asked: &str, listed: Option<Vec<AdapterScale>>) -> Self {
        Self {
            asked: asked.to_owned(),
            listed,
        }
    }

    /// The choice of a request that names a model and lists no adapters.
    pub fn by_name(asked: &str) -> Self {
        Self {
            asked: asked.to_owned(),
            listed: None,
        }
    }
}
