//! Commands about models and their segments: load, unload, preload, pin, clear.

use std::sync::Arc;
use std::time::Duration;

use rocmforge_device::SegmentLayout;
use rocmforge_ops::{Plan, Segment};
use rocmforge_tensor_cache::{KeptBecause, ModelId, SegmentId};
use tokio::sync::mpsc;

use crate::actor::commands::{MODELS_MAX, draining};
use crate::actor::engine::Engine;
use crate::api::error::{Error, from_cache, from_device};
use crate::api::refusal::Refusal;
use crate::api::{
    Cleared, KeptReason, KeptSegment, PreloadEvent, PreloadRoom, Registered, Unloaded, When,
};
use crate::features::kv_disk::identity::Identity;
use crate::features::preload::{PRELOADS_MAX, Preload};
use crate::features::speculation::draft_model::draft_model;
use crate::model::loaded::{LoadedModel, PreparedModel};
use crate::request::images::WaitingRequest;
use crate::store::Source;

/// Chooses whether a model's file is read with direct I/O, past the page cache: as `direct_io` sets
/// it, with `auto` if the file is larger than the available memory. A file on a network file system
/// is never read so.
fn choose_reads(loaded: &LoadedModel, direct_io: When) {
    let file = loaded.file();
    let (bytes, available) = (file.size_bytes(), rocmforge_device::host_available_bytes());
    let wanted = match direct_io {
        When::Never => false,
        When::Auto => available > 0 && bytes > available,
        When::Always => true,
    };
    // What a file that may not answer has is brought into the page cache first.
    let wanted = wanted && !file.is_far();
    if wanted {
        let model = loaded.name();
        if file.prefer_direct() {
            tracing::info!(
                model,
                bytes,
                available,
                "its file is read past the page cache"
            );
        } else {
            tracing::warn!(
                model,
                bytes,
                available,
                "its file is read through the page cache: its file system has no direct reads"
            );
        }
    }
}

impl Engine {
    pub(crate) fn load(&mut self, prepared: PreparedModel) -> Result<Registered, Error> {
        if self.draining.is_some() {
            return Err(draining());
        }
        let (mut loaded, draft_name) = (prepared.loaded, prepared.draft);
        if let Ok(there) = self.models.find(loaded.name()) {
            let there = Arc::clone(&there.loaded);
            return self.load_again(there, &loaded, draft_name.as_deref());
        }
        if self.models.len() >= MODELS_MAX {
            return Err(Refusal::TooManyModels {
                max: MODELS_MAX as u64,
            }
            .into());
        }
        let draft = draft_name.map(|name| draft_model(&self.models, &loaded, &name));
        let draft = draft.transpose()?;
        // Two loads at once may each have made theirs.
        self.models.iter().any(|there| loaded.share(&there.loaded));
        loaded.set_kv_type(self.config.kv_type);
        choose_reads(&loaded, self.config.direct_io);
        let id = self.register_segments(&loaded)?;
        let tower = loaded.tower().map(|tower| {
            choose_reads(tower, self.config.direct_io);
            self.register_segments(tower)
                .map(|of_tower| (of_tower, Arc::clone(tower)))
        });
        let tower = match tower.transpose() {
            Ok(tower) => tower,
            Err(error) => {
                self.memory.unregister(id)?;
                return Err(error);
            }
        };
        // One drafts for the model; that is the better one.
        let mtp = match draft {
            Some(_) => None,
            None => {
                let (memory, models) = (&mut self.memory, &mut self.models);
                self.speculation.register_mtp(memory, models, &loaded)
            }
        };
        let now = self.now();
        if let Some(disk) = &mut self.memory.kv_disk {
            let identity = Identity::of(loaded.file());
            disk.add_model(id, identity, loaded.model().plan(), now);
        }
        self.speculation.add(id, &loaded, mtp, draft);
        let loaded = Arc::new(loaded);
        self.models.add(id, Arc::clone(&loaded));
        if let Some((of_tower, tower)) = tower {
            self.models.add_tower(of_tower, tower, id);
        }
        self.draft_again_with(&loaded);
        Ok(Registered {
            model: loaded,
            is_new: true,
        })
    }

    /// Registers a model's segments with the cache and the device.
    fn register_segments(&mut self, loaded: &LoadedModel) -> Result<ModelId, Error> {
        let plan = loaded.model().plan();
        let layouts = self.layouts(loaded, plan)?;
        let kinds = plan.segments.iter().map(|s| s.kind).collect();
        let id = self.models.next_id();
        let source = Source::new(loaded, layouts, kinds);
        self.memory.store.register(id, source)?;
        let adapted = loaded.model().adapted_plan();
        for plan in std::iter::once(plan).chain(adapted) {
            if let Err(error) = self.memory.store.prepare(id, plan) {
                self.memory.unregister(id)?;
                return Err(from_device(Some((loaded.name(), loaded.path())), error));
            }
        }
        Ok(id)
    }

    /// Handles a load whose name is taken by a loaded model: accepts the same file, rejects another
    /// one.
    fn load_again(
        &mut self,
        there: Arc<LoadedModel>,
        loaded: &LoadedModel,
        draft: Option<&str>,
    ) -> Result<Registered, Error> {
        // A mere change of permissions or links since is noticed here, and is none of the
        // content.
        match there.far() {
            Some(_) => {
                let files = &self.memory.store.files;
                let _waiting = files.begin(there.name(), there.path());
                there.bring([])?;
            }
            None => drop(there.file().check_unchanged()),
        }
        if !there.file().is_same_as(loaded.file()) {
            return Err(Error::NameTaken {
                name: loaded.name().to_owned(),
                changed: there.path() == loaded.path(),
                path: there.path().to_owned(),
            });
        }
        let file = |of: &LoadedModel| of.tower().map(|tower| Arc::clone(tower.file()));
        let same = match (file(&there), file(loaded)) {
            (Some(there), Some(new)) => there.is_same_as(&new),
            (_, None) => true,
            (None, Some(_)) => false,
        };
        if !same {
            return Err(Error::InvalidArgument {
                field: "mmproj",
                message: format!(
                    "model '{}' is loaded with another projector, or with none; unload it first",
                    loaded.name()
                ),
            });
        }
        if !loaded.adapters().is_empty() && !there.adapters().are_same_as(loaded.adapters()) {
            return Err(Error::InvalidArgument {
                field: "lora",
                message: format!(
                    "model '{}' is loaded with other adapters, or with none; unload it first",
                    loaded.name()
                ),
            });
        }
        self.reopen(loaded.name());
        if let Some(draft) = draft {
            self.attach_draft(&there, draft)?;
        }
        Ok(Registered {
            model: there,
            is_new: false,
        })
    }

    /// Sets the draft model of a model that is already loaded.
    ///
    /// # Errors
    ///
    /// As [`draft_model`].
    fn attach_draft(&mut self, of: &LoadedModel, name: &str) -> Result<(), Error> {
        let draft = draft_model(&self.models, of, name)?;
        let id = self.models.find(of.name())?.id;
        self.speculation.attach(of, id, draft);
        Ok(())
    }

    /// Attaches a newly loaded model as draft model to the models that were loaded with its name as
    /// theirs, and have had none since it was unloaded.
    fn draft_again_with(&mut self, loaded: &LoadedModel) {
        let name = loaded.name();
        for id in self.speculation.lack(name) {
            let Some(of) = self.models.get(id).map(|entry| Arc::clone(&entry.loaded)) else {
                continue;
            };
            let model = of.name();
            match self.attach_draft(&of, name) {
                Ok(()) => tracing::info!(model, draft = name, "the draft model is loaded again"),
                // It was another file, which is no reason to refuse this one.
                Err(error) => {
                    tracing::warn!(model, draft = name, %error, "the model that is loaded under its draft model's name cannot draft: nothing is drafted with it")
                }
            }
        }
    }

    /// Layouts of a plan's tensors in their slabs on this device, one for each segment.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] names an operation that no kernel of the device can run.
    fn layouts(&self, loaded: &LoadedModel, plan: &Plan) -> Result<Vec<Arc<SegmentLayout>>, Error> {
        let layout = |s: &Segment| self.memory.store.device.layout(&s.tensors).map(Arc::new);
        let layouts: Result<_, _> = plan.segments.iter().map(layout).collect();
        layouts.map_err(|e| from_device(Some((loaded.name(), loaded.path())), e))
    }

    pub(crate) fn unload(&mut self, name: &str, force: bool) -> Result<Unloaded, Error> {
        let (id, loaded) = self
            .models
            .find(name)
            .map(|e| (e.id, Arc::clone(&e.loaded)))?;
        let tower = self.models.tower_of(id).map(|tower| tower.id);
        let tasks_of = |model| {
            self.requests
                .tasks
                .values()
                .filter(move |t| Some(t.model) == model)
        };
        // A request with images has a task of the tower, or between two images none.
        let waits = |w: &WaitingRequest| Some(w.tower) == tower;
        let with_images = self.requests.images.waiting(waits);
        let busy = tasks_of(Some(id)).count() + tasks_of(tower).count().max(with_images);
        if busy > 0 && !force {
            return Err(Refusal::Busy {
                model: name.to_owned(),
                requests: busy as u64,
            }
            .into());
        }
        let pinned_bytes = self.memory.store.model_pinned_bytes(id);
        if pinned_bytes > 0 && !force {
            return Err(Refusal::Pinned {
                model: name.to_owned(),
                pinned_bytes,
            }
            .into());
        }
        let freed_bytes = self.forget_model(id, &loaded)?;
        Ok(Unloaded {
            freed_bytes,
            cancelled_requests: busy as u32,
        })
    }

    /// Ends all work for a model and forgets it. Returns the bytes that this freed.
    pub(crate) fn forget_model(&mut self, id: ModelId, loaded: &LoadedModel) -> Result<u64, Error> {
        let mut freed_of_tower = 0;
        let gone = || {
            Error::from(Refusal::Unloaded {
                model: loaded.name().to_owned(),
            })
        };
        if let Some(tower) = self.models.tower_of(id) {
            let (of_tower, tower) = (tower.id, Arc::clone(&tower.loaded));
            for waiting in self.requests.images.forget(of_tower) {
                waiting.fail(gone());
            }
            self.end_those(|task| (task.model == of_tower).then(gone));
            freed_of_tower = self.forget_model(of_tower, &tower)?;
        }
        self.end_those(|task| (task.model == id).then(gone));
        self.preloads.end(|model| model == id, gone);
        let all: Vec<u32> = (0..loaded.model().plan().segments.len() as u32).collect();
        self.memory.store.pin(id, &all, false)?;
        let mtp = self.speculation.remove(id, &self.models);
        let ids = [Some(id), mtp].into_iter().flatten();
        let usage = |id| self.memory.store.cache.model_stats(id).usage.total();
        let freed_bytes = freed_of_tower + ids.clone().map(usage).sum::<u64>();
        for id in ids {
            self.memory.unregister(id)?;
        }
        self.models.remove(id);
        self.requests
            .scheduler
            .model_unloaded(rocmforge_scheduler::ModelId(id.0));
        self.requests.suspended.forget(id);
        self.requests.times.forget(id);
        self.space.forget(id);
        self.background.forget(id);
        self.interleaving.forget(id);
        Ok(freed_bytes)
    }

    pub(crate) fn preload(
        &mut self,
        name: &str,
        segments: Option<Vec<u32>>,
        room: PreloadRoom,
        events: mpsc::Sender<PreloadEvent>,
    ) {
        let checked = if self.draining.is_some() {
            Err(draining())
        } else if self.preloads.are_full() {
            Err(Error::Exhausted {
                message: format!(
                    "{PRELOADS_MAX} preloads are under way; try again when one has ended"
                ),
                retry_after: Duration::from_secs(1),
            })
        } else {
            self.segments(name, segments)
        };
        match checked {
            Ok((model, segments)) => {
                let bytes = |&index: &u32| {
                    let bytes = self.memory.store.segment_bytes(SegmentId { model, index });
                    bytes.next_multiple_of(rocmforge_device::ALIGNMENT)
                };
                let total_bytes = segments.iter().map(bytes).sum();
                let of = (model, segments);
                let preload = Preload::new(of, total_bytes, room, events);
                self.preloads.add(preload);
            }
            Err(error) => {
                // The channel is new and has room.
                let _ = events.try_send(PreloadEvent::Failed(error));
            }
        }
    }

    /// Looks up a model by name and checks segment indices. Returns the model's id and the
    /// segments, each once and in order; all segments for `None`.
    fn segments(
        &self,
        name: &str,
        segments: Option<Vec<u32>>,
    ) -> Result<(ModelId, Vec<u32>), Error> {
        let entry = self.models.find(name)?;
        let count = entry.loaded.model().plan().segments.len() as u32;
        let Some(mut segments) = segments else {
            return Ok((entry.id, (0..count).collect()));
        };
        if let Some(index) = segments.iter().find(|&&i| i >= count) {
            return Err(Error::InvalidArgument {
                field: "segments",
                message: format!(
                    "{index} is out of range: model '{name}' has segments 0 to {}",
                    count - 1
                ),
            });
        }
        segments.sort_unstable();
        segments.dedup();
        Ok((entry.id, segments))
    }

    pub(crate) fn pin(
        &mut self,
        name: &str,
        segments: Option<Vec<u32>>,
        pinned: bool,
    ) -> Result<u64, Error> {
        let (model, mut segments) = self.segments(name, segments)?;
        if pinned {
            // What is pinned already is no part of this, and stays so if this is refused.
            let before = self
                .memory
                .store
                .cache
                .residency(model)
                .map_err(from_cache)?;
            segments.retain(|&index| !before[index as usize].pinned);
        }
        let done = self.memory.store.pin(model, &segments, pinned);
        if pinned {
            // What runs must go on, and the next request must be able to begin.
            let budget = self.memory.budget();
            let next = self.memory.store.pinned_bytes() + self.memory.store.largest_unpinned(model);
            let need = match &done {
                // It stopped at the first segment that is too much.
                Err(Error::Precondition(Refusal::NeverFits { need, pinned, .. })) => need + pinned,
                Ok(()) | Err(_) => self.room_for_running(next),
            };
            if done.is_err() || need > budget {
                self.memory.store.pin(model, &segments, false)?;
                if !matches!(&done, Err(Error::Precondition(_))) {
                    done?;
                }
                return Err(Refusal::PinTooLarge {
                    model: name.to_owned(),
                    need,
                    budget,
                }
                .into());
            }
        }
        done?;
        Ok(self.memory.store.model_pinned_bytes(model))
    }

    pub(crate) fn clear(&mut self, name: Option<&str>, disk: bool) -> Result<Cleared, Error> {
        let model = name
            .map(|n| self.models.find(n).map(|e| e.id))
            .transpose()?;
        let mut cleared = self.memory.clear(model)?;
        if let Some(kv_disk) = self.memory.kv_disk.as_mut().filter(|_| disk) {
            kv_disk.clear(model);
        }
        // Without a name all went.
        if let Some(mtp) = model.and_then(|model| self.speculation.mtp_of(model)) {
            let of_mtp = self.memory.clear(Some(mtp.id))?;
            cleared.freed += of_mtp.freed;
            cleared.segments += of_mtp.segments;
        }
        let tower = model.and_then(|model| self.models.tower_of(model));
        if let Some(tower) = tower.map(|tower| tower.id) {
            let of_tower = self.memory.clear(Some(tower))?;
            cleared.freed += of_tower.freed;
            cleared.segments += of_tower.segments;
            cleared.kept.extend(of_tower.kept);
        }
        let kept = cleared.kept.iter().filter_map(|&(segment, because)| {
            let entry = self.models.get(segment.model)?;
            Some(KeptSegment {
                model: entry.loaded.name().to_owned(),
                index: segment.index,
                name: entry.loaded.model().plan().segments[segment.index as usize]
                    .name
                    .clone(),
                bytes: self.memory.store.segment_bytes(segment),
                reason: match because {
                    KeptBecause::Pinned => KeptReason::Pinned,
                    KeptBecause::InUse => KeptReason::InUse,
                    KeptBecause::InFlight => KeptReason::InFlight,
                },
            })
        });
        Ok(Cleared {
            freed_bytes: cleared.freed,
            freed_segments: cleared.segments as u32,
            kept: kept.collect(),
        })
    }
}
