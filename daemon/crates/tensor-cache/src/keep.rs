//! Models that are kept: their segments are evicted only if nothing else can be.
//!
//! A pin is permanent, and pinning may fail. Keeping a model is a preference of a caller that knows
//! that its next passes are due soon: all of its segments count as needed at once, so they are
//! evicted after all others if room cannot be made otherwise, or the budget shrinks.

use crate::{Cache, ModelId};

impl Cache {
    /// Keeps these models, and no others, until it is called again; unknown ids are ignored.
    pub fn keep(&mut self, models: &[ModelId]) {
        for (id, model) in &mut self.models {
            model.kept = models.contains(id);
        }
    }

    /// Whether a model is kept.
    #[must_use]
    pub fn keeps(&self, model: ModelId) -> bool {
        self.models.get(&model).is_some_and(|model| model.kept)
    }
}
