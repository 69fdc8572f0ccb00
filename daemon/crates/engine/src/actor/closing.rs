//! Closing a model that nobody uses.
//!
//! ```text
//! published --close--> withdrawn --close, nobody holds it--> forgotten
//!     ^                    |
//!     +--reopen, load------+
//! ```
//!
//! Whoever finds a model in a snapshot holds it until the request is sent. So the engine first
//! withdraws a model from the snapshots. Once the engine's own pointer is the only one, nobody can
//! send a request for it any more, and it is forgotten. A request that arrives meanwhile keeps the
//! model.
//!
//! *Invariant:* a request that found its model is never refused because the model was closed (test
//! `a_model_that_somebody_holds_is_not_closed`).

use std::sync::{Arc, Weak};

use rocmforge_tensor_cache::ModelId;

use crate::actor::engine::Engine;
use crate::api::Closing;
use crate::api::error::Error;
use crate::model::loaded::LoadedModel;

impl Engine {
    /// Brings a model that nobody uses one step nearer to being forgotten: withdraws it from the
    /// snapshots, or forgets it if nobody holds it.
    pub(crate) fn close(
        &mut self,
        name: &str,
        only: Option<&Weak<LoadedModel>>,
    ) -> Result<Closing, Error> {
        let entry = self.models.find(name)?;
        let id = entry.id;
        if only.is_some_and(|only| only.as_ptr() != Arc::as_ptr(&entry.loaded)) {
            return Ok(Closing::Used);
        }
        if self.is_used(id) {
            self.reopen(name);
            return Ok(Closing::Used);
        }
        let Some(entry) = self.models.get_mut(id) else {
            return Ok(Closing::Used);
        };
        entry.is_withdrawn = true;
        self.publish(true);
        let Some(entry) = self.models.get(id) else {
            return Ok(Closing::Used);
        };
        if Arc::strong_count(&entry.loaded) > 1 {
            return Ok(Closing::Held);
        }
        let loaded = Arc::clone(&entry.loaded);
        self.forget_model(id, &loaded)?;
        Ok(Closing::Closed(loaded))
    }

    /// Puts a withdrawn model into the snapshots again.
    pub(crate) fn reopen(&mut self, name: &str) {
        if let Some(entry) = self.models.named(name) {
            entry.is_withdrawn = false;
        }
    }

    fn is_used(&self, id: ModelId) -> bool {
        let tower = self.models.tower_of(id).map(|tower| tower.id);
        let of_it = |model| model == id || Some(model) == tower;
        self.requests.tasks.values().any(|task| of_it(task.model))
            || self.preloads.any_of(id)
            || self.memory.store.model_pinned_bytes(id) > 0
            || self.speculation.is_draft_model(id)
    }
}
