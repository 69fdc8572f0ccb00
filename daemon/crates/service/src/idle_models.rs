//! Closes idle models that a request opened by their file's name.
//!
//! Such a model costs memory (its plan, and its vocabulary if no other model has the same), a
//! descriptor a file, and the disk space of a file that was deleted. The next request opens it
//! again in milliseconds. So the least recently used ones are closed when all together exceed
//! [`Bounds`], when a load finds no free descriptor or place, and when their file has been deleted.
//! Models that are declared, loaded by a call, pinned, or in use stay.
//!
//! *Invariant:* what to close is decided from numbers alone ([`to_close`], without clock or lock);
//! the engine decides whether a model is in use ([`rocmforge_engine::EngineHandle::close`]).

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use rocmforge_engine::{EngineHandle, LoadedModel, MODELS_MAX, ModelMemory};

use crate::Service;
use crate::origins::{Loaded, Origin};

/// Models that requests opened may use one part in this many of the memory that the process may
/// have, within the bounds below.
const MEMORY_PART: u64 = 8;
const MEMORY_MIN: u64 = 64 << 20;
const MEMORY_MAX: u64 = 4 << 30;
/// Models that requests opened may use this many eighths of the process's file descriptors;
/// connections may have half of all.
const DESCRIPTOR_EIGHTHS: u64 = 3;
/// Interval at which the files of such models are checked for deletion while no request uses or
/// lists models.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Limits of all models together that requests opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Maximum bytes of host memory.
    pub(crate) bytes: u64,
    /// Maximum number of file descriptors.
    pub(crate) descriptors: u64,
    /// Maximum number of models.
    pub(crate) models: usize,
}

impl Bounds {
    /// The bounds that follow from the process's limits.
    pub(crate) fn of_process() -> Self {
        let memory = match rocmforge_engine::host_memory_bytes() {
            0 => MEMORY_MAX,
            bytes => (bytes / MEMORY_PART).clamp(MEMORY_MIN, MEMORY_MAX),
        };
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
        Self {
            bytes: memory,
            descriptors: (files / 8 * DESCRIPTOR_EIGHTHS).max(1),
            models: MODELS_MAX,
        }
    }
}

/// A model that may be closed.
#[derive(Debug, Clone)]
struct Candidate {
    name: String,
    /// Number of the request that used the model last.
    used: u64,
    memory: ModelMemory,
}

/// The model to close first, if all together exceed the bounds: the least recently used one that is
/// not in `kept`. A vocabulary shared by several models counts once.
fn to_close<'a>(
    candidates: &'a [Candidate],
    kept: &HashSet<String>,
    bounds: &Bounds,
) -> Option<&'a Candidate> {
    let own: u64 = candidates.iter().map(|c| c.memory.own_bytes).sum();
    let vocabularies: HashMap<usize, u64> = candidates
        .iter()
        .map(|c| (c.memory.vocabulary, c.memory.vocabulary_bytes))
        .collect();
    let bytes = own + vocabularies.values().sum::<u64>();
    let descriptors: u64 = candidates.iter().map(|c| c.memory.descriptors).sum();
    let within = bytes <= bounds.bytes
        && descriptors <= bounds.descriptors
        && candidates.len() <= bounds.models;
    let free = candidates.iter().filter(|c| !kept.contains(&c.name));
    free.min_by_key(|c| c.used).filter(|_| !within)
}

impl Service {
    /// The loaded models that requests opened and that are not declared.
    fn opened_by_requests(&self) -> Vec<(Arc<LoadedModel>, Loaded)> {
        let book = self.declared();
        let mut all = self.origins.all();
        all.retain(|(model, loaded)| {
            loaded.origin == Origin::FirstUse && book.model(model.name()).is_none()
        });
        all
    }

    fn candidates(&self) -> Vec<Candidate> {
        let of = |(model, loaded): (Arc<LoadedModel>, Loaded)| Candidate {
            name: model.name().to_owned(),
            used: loaded.used,
            memory: model.memory(),
        };
        self.opened_by_requests().into_iter().map(of).collect()
    }

    /// Closes models that requests opened until the rest is within the bounds. Models in use and
    /// `but` stay.
    pub(crate) async fn close_beyond_bounds(&self, but: &str) {
        let mut kept = HashSet::from([but.to_owned()]);
        loop {
            let candidates = self.candidates();
            let Some(first) = to_close(&candidates, &kept, &self.bounds) else {
                return;
            };
            if !self.close(&first.name, "others need the room").await {
                kept.insert(first.name.clone());
            }
        }
    }

    /// Closes the least recently used model that is not in use. Returns whether there was one.
    pub(crate) async fn close_one(&self) -> bool {
        let mut candidates = self.candidates();
        candidates.sort_by_key(|c| c.used);
        for candidate in &candidates {
            if self.close(&candidate.name, "others need the room").await {
                return true;
            }
        }
        false
    }

    /// Closes a model if it is not in use. Returns whether it did. Meanwhile no snapshot has it,
    /// and loads of its name wait ([`Service::closed_or_kept`]).
    pub(crate) async fn close(&self, name: &str, why: &'static str) -> bool {
        self.close_only(name, None, why).await
    }

    /// As [`Service::close`], but if `only` is given, another model that has taken its name since
    /// stays.
    pub(crate) async fn close_only(
        &self,
        name: &str,
        only: Option<Weak<LoadedModel>>,
        why: &'static str,
    ) -> bool {
        let (engine, asked) = (self.engine.clone(), name.to_owned());
        let work = move || async move { Ok(close(&engine, &asked, only, why).await) };
        // Nobody waits longer for one that panicked.
        self.closing.join(name, work).await.unwrap_or(false)
    }

    /// Waits while a model of this name is being closed: until then the engine would reject another
    /// file under its name.
    pub(crate) async fn closed_or_kept(&self, name: &str) {
        self.closing.settled(name).await;
    }

    /// Runs for as long as the service: closes models that requests opened once their files are
    /// deleted, which frees the disk space. Sleeps while there are none.
    pub async fn close_deleted(service: Weak<Self>) {
        loop {
            let Some(this) = service.upgrade() else {
                return;
            };
            if !this.origins.has_opened() {
                let opened = Arc::clone(&this.origins.opened);
                drop(this);
                opened.notified().await;
                continue;
            }
            for model in this.deleted() {
                let (name, only) = (model.name().to_owned(), Arc::downgrade(&model));
                // Whoever holds it keeps it from being closed.
                drop(model);
                // A request may have opened another file under its name by now.
                this.close_only(&name, Some(only), "its file is deleted")
                    .await;
            }
            // Those that were in use when they were to go.
            this.close_beyond_bounds("").await;
            let opened = Arc::clone(&this.origins.opened);
            drop(this);
            let _ = tokio::time::timeout(LOOK_EVERY, opened.notified()).await;
        }
    }

    /// Models that requests opened and whose files were deleted. Only checks open local files,
    /// which respond at once.
    pub(crate) fn deleted(&self) -> Vec<Arc<LoadedModel>> {
        let near = self
            .opened_by_requests()
            .into_iter()
            .map(|(model, _)| model);
        near.filter(|model| !model.file().is_far() && model.file().is_deleted())
            .collect()
    }
}

/// Implements [`Service::close`].
async fn close(
    engine: &EngineHandle,
    name: &str,
    only: Option<Weak<LoadedModel>>,
    why: &str,
) -> bool {
    let closed = match engine.close_only(name, only).await {
        Ok(closed) => closed,
        Err(error) => {
            tracing::debug!(model = ?name, %error, "a model cannot be closed");
            return false;
        }
    };
    let Some(model) = closed else {
        return false;
    };
    tracing::info!(model = ?name, path = ?model.path(), "a model that a request opened is closed: {why}");
    // To unmap a large file takes a while.
    let dropped = tokio::task::spawn_blocking(move || drop(model));
    dropped.await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, used: u64, vocabulary: usize) -> Candidate {
        Candidate {
            name: name.to_owned(),
            used,
            memory: ModelMemory {
                own_bytes: 1,
                descriptors: 2,
                vocabulary,
                vocabulary_bytes: 100,
            },
        }
    }

    const AMPLE: Bounds = Bounds {
        bytes: 1000,
        descriptors: 1000,
        models: 1000,
    };

    #[test]
    fn the_least_recently_used_goes_where_a_bound_is_exceeded() {
        let all = [
            candidate("a", 3, 1),
            candidate("b", 1, 1),
            candidate("c", 2, 2),
        ];
        let first = |kept: &[&str], bounds| {
            let kept = kept.iter().map(|name| (*name).to_owned()).collect();
            to_close(&all, &kept, &bounds).map(|c| c.name.as_str())
        };
        assert_eq!(first(&[], AMPLE), None);
        // Three of one byte, and two vocabularies of 100.
        let bytes = |bytes| Bounds { bytes, ..AMPLE };
        assert_eq!(first(&[], bytes(203)), None);
        assert_eq!(first(&[], bytes(202)), Some("b"));
        assert_eq!(first(&["b"], bytes(202)), Some("c"));
        assert_eq!(first(&["a", "b", "c"], bytes(202)), None);
        let descriptors = |descriptors| Bounds {
            descriptors,
            ..AMPLE
        };
        assert_eq!(first(&[], descriptors(6)), None);
        assert_eq!(first(&[], descriptors(5)), Some("b"));
        let models = |models| Bounds { models, ..AMPLE };
        assert_eq!(first(&[], models(3)), None);
        assert_eq!(first(&[], models(2)), Some("b"));
    }
}
