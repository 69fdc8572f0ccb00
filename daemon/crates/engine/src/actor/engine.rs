//! The engine's state, and the parts of it that features may use.

use std::time::Instant;

use rocmforge_device::Loss;
use tokio::sync::oneshot;

use crate::actor::publisher::Publisher;
use crate::api::config::EngineConfig;
use crate::features::background_load::BackgroundLoads;
use crate::features::context::Context;
use crate::features::preload::Preloads;
use crate::features::speculation::state::Speculation;
use crate::guards::Guards;
use crate::memory::Memory;
use crate::model::registry::Models;
use crate::pass::interleave::Interleaving;
use crate::pass::space::PassSpace;
use crate::request::requests::Requests;

/// A shutdown under way: when running requests have to end, and who waits for it.
pub(crate) struct Draining {
    pub(crate) until: Instant,
    pub(crate) replies: Vec<oneshot::Sender<()>>,
}

/// The engine's state. Each feature is one field, and is called with the other fields that it
/// needs.
pub(crate) struct Engine {
    pub(crate) config: EngineConfig,
    /// The device, the cache, and the users of their memory.
    pub(crate) memory: Memory,
    pub(crate) models: Models,
    pub(crate) requests: Requests,
    /// Scratch memory and inputs of passes.
    pub(crate) space: PassSpace,
    pub(crate) speculation: Speculation,
    pub(crate) background: BackgroundLoads,
    pub(crate) preloads: Preloads,
    pub(crate) interleaving: Interleaving,
    pub(crate) guards: Guards,
    pub(crate) publisher: Publisher,
    pub(crate) draining: Option<Draining>,
}

impl Engine {
    /// The time now, by the engine's clock.
    pub(crate) fn now(&self) -> Instant {
        self.memory.store.clock.now()
    }

    /// Speculative decoding, and the context that its methods take.
    pub(crate) fn speculation(&mut self) -> (&mut Speculation, Context<'_>) {
        let cx = Context {
            memory: &mut self.memory,
            models: &mut self.models,
            requests: &mut self.requests,
            space: &mut self.space,
        };
        (&mut self.speculation, cx)
    }

    /// The loads in the background, and what their methods take.
    pub(crate) fn background(&mut self) -> (&mut BackgroundLoads, Context<'_>, &Speculation) {
        let cx = Context {
            memory: &mut self.memory,
            models: &mut self.models,
            requests: &mut self.requests,
            space: &mut self.space,
        };
        (&mut self.background, cx, &self.speculation)
    }

    /// Why the device is lost; `None` while it works.
    pub(crate) fn lost(&self) -> Option<Loss> {
        let lost = self.guards.lost.clone();
        lost.or_else(|| self.memory.store.lost().cloned())
    }
}
