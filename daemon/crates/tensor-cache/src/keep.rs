//! Models that are kept: their segments go for nobody as long as anything else can.
//!
//! A pin is a promise without end, which may fail. That a model is kept is a wish of whoever knows
//! that its next passes are due soon: all of its segments count as needed at once, so where room
//! cannot be made otherwise, or the budget shrinks, they go after all others.

use crate::{Cache, ModelId};

impl Cache {
    /// Keeps these models, and no others. It holds until it is said again; names that are not
    /// registered mean nothing.
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
