//! Which of a model's adapters a request asks for.

/// An adapter that a request lists.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdapterScale {
    /// The adapter's number, from 0, in the order of the load.
    pub id: i64,
    /// The adapter's scale.
    pub scale: f32,
}

/// LoRA adapters that a request asks for.
#[derive(Debug, Clone, Default)]
pub struct AdapterChoice {
    /// The name of the model as the request has it.
    pub(crate) asked: String,
    /// The adapters that the request lists.
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
