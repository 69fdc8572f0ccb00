//! Commands about models and their segments: load, unload, preload, pin, clear.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_tensor_cache::{KeptBecause, ModelId, SegmentId};
use tokio::sync::mpsc;

use crate::actor::{Engine, Entry, Preloading};
use crate::api::{Cleared, KeptReason, KeptSegment, PreloadEvent, Registered, Unloaded, When};
use crate::aside::Nearness;
use crate::commands::{MODELS_MAX, PRELOADS_MAX, draining};
use crate::error::{Error, from_cache, from_device};
use crate::interleave::Slice;
use crate::loaded::{LoadedModel, PreparedModel};
use crate::pass_times::PassTimes;
use crate::refusal::Refusal;
use crate::share::PromptShare;
use crate::states::SpareStates;
use crate::weight_store::Source;

/// Lets a model that the page cache could not keep be read past it; or any, where that is said.
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
        let (mut loaded, draft) = (prepared.loaded, prepared.draft);
        if let Ok(there) = self.find(loaded.name()) {
            // A mere change of permissions or links since is noticed here, and is none of the
            // content.
            match there.loaded.far() {
                Some(_) => {
                    let (name, path) = (there.loaded.name(), there.loaded.path());
                    let _waiting = self.store.files.begin(name, path);
                    there.loaded.bring([])?;
                }
                None => drop(there.loaded.file().check_unchanged()),
            }
            let same = there.loaded.file().is_same_as(loaded.file());
            return if same {
                let model = Arc::clone(&there.loaded);
                self.attach_draft(&model, draft.as_deref())?;
                Ok(Registered {
                    model,
                    is_new: false,
                })
            } else {
                Err(Error::NameTaken {
                    name: loaded.name().to_owned(),
                    changed: there.loaded.path() == loaded.path(),
                    path: there.loaded.path().to_owned(),
                })
            };
        }
        if self.models.len() >= MODELS_MAX {
            return Err(Refusal::TooManyModels {
                max: MODELS_MAX as u64,
            }
            .into());
        }
        let draft_name = draft;
        let draft = draft_name
            .as_ref()
            .map(|name| self.draft_model(&loaded, name))
            .transpose()?;
        // Two loads at once may each have made theirs.
        self.models.iter().any(|there| loaded.share(&there.loaded));
        loaded.set_kv_type(self.config.kv_type);
        choose_reads(&loaded, self.config.direct_io);
        let layouts = self.layouts(&loaded, loaded.model().plan())?;
        let kinds = loaded.model().plan().segments.iter().map(|s| s.kind);
        let kinds = kinds.collect();
        let id = ModelId(self.next_model);
        let source = Source::new(&loaded, layouts, kinds);
        self.store.register(id, source)?;
        self.next_model = self.next_model.wrapping_add(1);
        if let Err(error) = self.store.prepare(id, loaded.model().plan()) {
            self.store.unregister(id)?;
            return Err(from_device(Some((loaded.name(), loaded.path())), error));
        }
        // One drafts for the model; that is the better one.
        let predictor = match draft {
            Some(_) => None,
            None => self.register_predictor(&loaded),
        };
        let drafts = self.speculates || draft.is_some();
        let states = SpareStates::of(loaded.model().plan()).filter(|_| drafts);
        let loaded = Arc::new(loaded);
        self.models.push(Entry {
            id,
            loaded: Arc::clone(&loaded),
            rope: Vec::new(),
            times: PassTimes::default(),
            share: PromptShare::default(),
            slice: Slice::default(),
            predictor,
            draft,
            draft_name,
            nearness: Nearness::default(),
            states,
        });
        self.drafts_again(&loaded);
        Ok(Registered {
            model: loaded,
            is_new: true,
        })
    }

    pub(crate) fn unload(&mut self, name: &str, force: bool) -> Result<Unloaded, Error> {
        let (id, loaded) = self.find(name).map(|e| (e.id, Arc::clone(&e.loaded)))?;
        let busy = self.tasks.values().filter(|t| t.model == id).count();
        if busy > 0 && !force {
            return Err(Refusal::Busy {
                model: name.to_owned(),
                requests: busy as u64,
            }
            .into());
        }
        let pinned_bytes = self.store.model_pinned_bytes(id);
        if pinned_bytes > 0 && !force {
            return Err(Refusal::Pinned {
                model: name.to_owned(),
                pinned_bytes,
            }
            .into());
        }
        let gone = || {
            Error::from(Refusal::Unloaded {
                model: name.to_owned(),
            })
        };
        self.end_those(|task| (task.model == id).then(gone));
        let (ended, stay) = self
            .preloads
            .drain(..)
            .partition::<VecDeque<_>, _>(|p| p.model == id);
        self.preloads = stay;
        for preload in ended {
            let _ = preload.events.try_send(PreloadEvent::Failed(gone()));
        }
        let all: Vec<u32> = (0..loaded.model().plan().segments.len() as u32).collect();
        self.store.pin(id, &all, false)?;
        let predictor = self.models.iter().find(|e| e.id == id);
        let predictor = predictor.and_then(|e| e.predictor.as_ref().map(|p| p.id));
        self.drafts_no_more(id);
        let ids = [Some(id), predictor].into_iter().flatten();
        let usage = |id| self.store.cache.model_stats(id).usage.total();
        let freed_bytes = ids.clone().map(usage).sum();
        for id in ids {
            self.store.unregister(id)?;
        }
        self.models.retain(|e| e.id != id);
        self.scheduler
            .model_unloaded(rocmforge_scheduler::ModelId(id.0));
        self.scratch_sizes.borrow_mut().retain(|key, _| key.0 != id);
        self.under_way.forget(id);
        Ok(Unloaded {
            freed_bytes,
            cancelled_requests: busy as u32,
        })
    }

    pub(crate) fn preload(
        &mut self,
        name: &str,
        segments: Option<Vec<u32>>,
        events: mpsc::Sender<PreloadEvent>,
    ) {
        let what_fits = segments.is_none();
        let checked = if self.draining.is_some() {
            Err(draining())
        } else if self.preloads.len() >= PRELOADS_MAX {
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
                    let bytes = self.store.segment_bytes(SegmentId { model, index });
                    bytes.next_multiple_of(rocmforge_device::ALIGNMENT)
                };
                let total_bytes = segments.iter().map(bytes).sum();
                self.preloads.push_back(Preloading {
                    model,
                    segments: segments.into(),
                    what_fits,
                    done_bytes: 0,
                    total_bytes,
                    uploaded_bytes: 0,
                    coming: None,
                    events,
                });
            }
            Err(error) => {
                // The channel is new and has room.
                let _ = events.try_send(PreloadEvent::Failed(error));
            }
        }
    }

    /// A model's number and the segments meant, each once and in order.
    fn segments(
        &self,
        name: &str,
        segments: Option<Vec<u32>>,
    ) -> Result<(ModelId, Vec<u32>), Error> {
        let entry = self.find(name)?;
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
            let before = self.store.cache.residency(model).map_err(from_cache)?;
            segments.retain(|&index| !before[index as usize].pinned);
        }
        let done = self.store.pin(model, &segments, pinned);
        if pinned {
            // What runs must go on, and the next request must be able to begin.
            let budget = self.store.budget();
            let next = self.store.pinned_bytes() + self.store.largest_unpinned(model);
            let need = match &done {
                // It stopped at the first segment that is too much.
                Err(Error::Precondition(Refusal::NeverFits { need, pinned, .. })) => need + pinned,
                Ok(()) | Err(_) => self.room_for_running(next),
            };
            if done.is_err() || need > budget {
                self.store.pin(model, &segments, false)?;
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
        Ok(self.store.model_pinned_bytes(model))
    }

    pub(crate) fn clear(&mut self, name: Option<&str>) -> Result<Cleared, Error> {
        let model = name.map(|n| self.find(n).map(|e| e.id)).transpose()?;
        let mut cleared = self.store.clear(model)?;
        // Without a name all went.
        let predictor = self.models.iter().find(|e| Some(e.id) == model);
        if let Some(predictor) = predictor.and_then(|e| e.predictor.as_ref()) {
            let of_block = self.store.clear(Some(predictor.id))?;
            cleared.freed += of_block.freed;
            cleared.segments += of_block.segments;
        }
        let kept = cleared.kept.iter().filter_map(|&(segment, because)| {
            let entry = self.models.iter().find(|e| e.id == segment.model)?;
            Some(KeptSegment {
                model: entry.loaded.name().to_owned(),
                index: segment.index,
                name: entry.loaded.model().plan().segments[segment.index as usize]
                    .name
                    .clone(),
                bytes: self.store.segment_bytes(segment),
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
