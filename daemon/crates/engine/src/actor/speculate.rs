//! Gives up speculative decoding if a request would not fit with it.

use rocmforge_scheduler::SeqId;
use rocmforge_tensor_cache::ModelId;

use crate::actor::engine::Engine;
use crate::request::task::Task;

impl Engine {
    /// If a request fits only without its model's MTP head or spare states, disables both for all
    /// requests of that model.
    pub(crate) fn spare_speculation(&mut self, budget: u64) {
        let speculation = &self.speculation;
        let takes_more =
            |t: &Task| t.predicts || (t.borrows_states() && speculation.takes_memory(t.model));
        let asks = |t: &&Task| (t.sized.0 != budget || t.tokens.len() > t.sized.1) && takes_more(t);
        let asking = self.requests.tasks.values().filter(asks);
        let asking: Vec<(SeqId, ModelId)> = asking.map(|t| (t.seq, t.model)).collect();
        for (seq, model) in asking {
            if !self.speculation.takes_memory(model) {
                continue;
            }
            let need = self.scheduling(budget, |scheduler, view| scheduler.needed_alone(seq, view));
            if need > budget {
                self.finish_passes();
                self.stop_drafting(|m| m == model);
            } else if let Some(task) = self.requests.tasks.get_mut(&seq) {
                task.sized = (budget, task.fits_up_to(need, budget));
            }
        }
    }

    /// Disables MTP heads and spare states for the models that `of` selects, and frees their
    /// memory. Returns whether one had used either.
    pub(crate) fn stop_drafting(&mut self, of: impl Fn(ModelId) -> bool) -> bool {
        let stopped = self.speculation.stop(&mut self.memory, &self.models, of);
        self.space.sizes.forget(|model| stopped.contains(&model));
        for task in self.requests.tasks.values_mut() {
            if stopped.contains(&task.model) {
                task.stop_predicting(&mut self.memory);
            }
        }
        !stopped.is_empty()
    }

    /// Enables MTP heads and spare states again for new requests, after the budget grew.
    pub(crate) fn draft_again(&mut self) {
        self.speculation.resume();
        self.space.sizes.forget(|_| true);
    }
}
