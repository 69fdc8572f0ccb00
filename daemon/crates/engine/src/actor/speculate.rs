//! Speculation that gives way where a request would not fit with it.

use rocmforge_scheduler::SeqId;
use rocmforge_tensor_cache::ModelId;

use crate::actor::engine::Engine;
use crate::request::task::Task;

impl Engine {
    /// Where a request that would fit without its MTP head or its spare states does not fit with
    /// them, lets all of its model do without.
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

    /// Models of these do without their MTP heads and without spare states, and give up what is
    /// held for them. Whether one had used either.
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

    /// A larger budget may have room for MTP heads and spare states: requests from now on use them.
    pub(crate) fn draft_again(&mut self) {
        self.speculation.resume();
        self.space.sizes.forget(|_| true);
    }
}
