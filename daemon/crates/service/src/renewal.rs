//! Loads models at their first use, and again when their files have changed.
//!
//! ```text
//! request --> loaded? --no--> load it ----------------------------> serve
//!               | yes            ^                                    ^
//!               v                | NOT_FOUND, if there is no file     |
//!             file? --deleted, and a request had opened it            |
//!               |---changed, replaced--> load the new one, then       |
//!               |                        forget the old one ----------+
//!               +---same----------------------------------------------+
//! ```
//!
//! The new file is opened and its header is read before the old model is unloaded: if that fails,
//! the request fails and the next one tries again, with the same arguments. Requests of a model
//! whose file was written end, as they would have. One whose file was replaced as a whole is read
//! from the old file until nobody uses it.
//!
//! *Invariants:* each name has at most one load or reload under way, and all requests for the name
//! wait for it ([`crate::flights`]); no lock is held across an await (the tidy test
//! `no_lock_is_held_across_an_await`).

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Weak};

use rocmforge_engine::LoadedModel;
use rocmforge_failure::Failure;
use tokio::sync::mpsc;

use crate::Service;
use crate::arrival::Arrival;
use crate::declared::{Declared, Registration};
use crate::load::Load;
use crate::origins::{Loaded, Origin};
use crate::refusals;
use crate::request_log::RequestLog;
use crate::standing::{Standing, is_gone, looks_same, standing};

/// Result of loading a name: the model, or `None` if its file is gone.
pub(crate) type Outcome = Option<Arc<LoadedModel>>;

impl Service {
    /// The model to use in place of a loaded one: the same if its file is unchanged, else the
    /// reloaded one. `None` if a request had opened it and its file is gone.
    ///
    /// # Errors
    /// Those of loading the new file.
    pub(crate) async fn as_its_file_is(
        self: &Arc<Self>,
        loaded: Arc<LoadedModel>,
        arrival: &Arrival,
    ) -> Result<Outcome, Failure> {
        let known = self.origins.of(&loaded);
        if let Some(draft) = known.as_ref().and_then(|known| known.load.draft.as_ref())
            && let Ok(draft) = self.engine.model(&self.real_name(draft))
            && !self.looks_same(&draft)
        {
            // What becomes of it is no affair of the model that it drafts for.
            let _ = self.renewed(draft, arrival).await;
        }
        if self.looks_same(&loaded) {
            self.origins.note_use(&loaded);
            return Ok(Some(loaded));
        }
        self.renewed(loaded, arrival).await
    }

    /// The loaded model of this name or alias, reloaded if its file has changed. A model that is
    /// not loaded is only loaded if it is remembered and waits.
    ///
    /// # Errors
    /// NOT_FOUND with the names of the loaded models, and those of loading a new file.
    pub async fn model_as_its_file_is(
        self: &Arc<Self>,
        name: &str,
        arrival: &Arrival,
    ) -> Result<Arc<LoadedModel>, Failure> {
        let there = match self.model(name) {
            Ok(loaded) => self.as_its_file_is(loaded, arrival).await?,
            Err(unknown) => match self.recall(&self.meant(name), arrival).await? {
                Some(loaded) => return Ok(loaded),
                None => return Err(unknown),
            },
        };
        there.map_or_else(|| self.model(name), Ok)
    }

    /// Whether the files of a loaded model and its projector are unchanged, by a quick check. A
    /// deleted projector stays usable through the open file.
    fn looks_same(&self, loaded: &Arc<LoadedModel>) -> bool {
        let of_tower = |tower: &Arc<LoadedModel>| {
            let (path, file) = (tower.path(), tower.file());
            looks_same(path, file) || is_gone(path, file)
        };
        looks_same(&self.path_asked(loaded), loaded.file()) && loaded.tower().is_none_or(of_tower)
    }

    /// The path by which a model was loaded.
    fn path_asked(&self, loaded: &Arc<LoadedModel>) -> PathBuf {
        let known = self.origins.of(loaded);
        known.map_or_else(|| loaded.path().to_owned(), |known| known.load.path)
    }

    /// As [`Service::as_its_file_is`], for a file that has changed in some way.
    pub(crate) async fn renewed(
        self: &Arc<Self>,
        loaded: Arc<LoadedModel>,
        arrival: &Arrival,
    ) -> Result<Outcome, Failure> {
        let name = loaded.name().to_owned();
        let (this, old) = (Arc::clone(self), Arc::downgrade(&loaded));
        // Whoever holds it keeps it from being closed.
        drop(loaded);
        let by = arrival.without_deadline();
        let asked = name.clone();
        let work = || async move { this.renew(&asked, old, &by).await };
        arrival.limit(self.loading.join(&name, work)).await
    }

    async fn renew(
        self: &Arc<Self>,
        name: &str,
        old: Weak<LoadedModel>,
        arrival: &Arrival,
    ) -> Result<Outcome, Failure> {
        let Ok(there) = self.engine.model(name) else {
            return Ok(None);
        };
        if !std::ptr::eq(old.as_ptr(), Arc::as_ptr(&there)) {
            return Ok(Some(there));
        }
        let known = self.origins.of(&there);
        let (path, file) = (self.path_asked(&there), Arc::clone(there.file()));
        let projector = there.tower().map(|tower| Arc::clone(tower.file()));
        let look = move || match (standing(&path, &file), projector) {
            (Standing::Same, Some(projector)) => match standing(projector.path(), &projector) {
                // What is open can be read still.
                Standing::Gone => Standing::Same,
                other => other,
            },
            (standing, _) => standing,
        };
        let looked = tokio::task::spawn_blocking(look).await;
        let is_opened = known
            .as_ref()
            .is_some_and(|known| known.origin == Origin::FirstUse);
        match looked.unwrap_or(Standing::Same) {
            Standing::Gone if is_opened => {
                let only = Some(Arc::downgrade(&there));
                drop(there);
                self.close_only(name, only, "its file is gone").await;
                self.forget_listing();
                Ok(None)
            }
            // What is loaded stays until it is unloaded.
            Standing::Same | Standing::Gone => Ok(Some(there)),
            Standing::Replaced if self.has_requests(&there) => Ok(Some(there)),
            Standing::Replaced | Standing::Changed => {
                let known = known.unwrap_or_else(|| unknown(&there));
                let renewed = self.take_place(&there, known, arrival).await;
                renewed.map(Some)
            }
        }
    }

    fn has_requests(&self, loaded: &Arc<LoadedModel>) -> bool {
        let snapshot = self.engine.snapshot();
        let mut models = snapshot.models.iter();
        models.any(|status| Arc::ptr_eq(&status.model, loaded) && status.requests > 0)
    }

    /// Loads a model again in place of `old`, whose file has changed or was replaced.
    async fn take_place(
        self: &Arc<Self>,
        old: &Arc<LoadedModel>,
        known: Loaded,
        arrival: &Arrival,
    ) -> Result<Arc<LoadedModel>, Failure> {
        let name = old.name();
        let book = self.declared();
        let (mut load, origin) = match book.model(name) {
            Some(model) => (model.load(), Origin::Declared(Box::new(model.clone()))),
            None => (known.load, known.origin),
        };
        load.preload = false;
        load.pin |= self.is_pinned(old);
        tracing::warn!(model = ?name, path = ?load.path, "the file of a loaded model has changed; it is loaded again");
        let asked = format!("path={:?} pin={} its file has changed", load.path, load.pin);
        let log = RequestLog::audit("Load", name, &asked, arrival);
        let (steps, _) = mpsc::channel(1);
        let loaded = match self.with_draft_loaded(load, arrival).await {
            Ok(load) => self.load_in_place_of(old, &load, &steps, origin).await,
            Err(failure) => Err(failure),
        };
        log.end(loaded)
    }

    /// Whether all segments of a model are pinned.
    fn is_pinned(&self, loaded: &Arc<LoadedModel>) -> bool {
        let snapshot = self.engine.snapshot();
        let mut models = snapshot.models.iter();
        let status = models.find(|status| Arc::ptr_eq(&status.model, loaded));
        status.is_some_and(|status| {
            !status.segments.is_empty() && status.segments.iter().all(|segment| segment.pinned)
        })
    }

    /// The loaded model of a declaration; loads it if necessary, without its preload.
    ///
    /// # Errors
    /// As for any load.
    pub(crate) async fn declared_loaded(
        self: &Arc<Self>,
        model: &Declared,
        arrival: &Arrival,
    ) -> Result<Arc<LoadedModel>, Failure> {
        let (this, declared) = (Arc::clone(self), model.clone());
        let by = arrival.without_deadline();
        let work = || async move {
            if let Ok(there) = this.engine.model(&declared.name) {
                return Ok(Some(there));
            }
            this.load_declared(&declared, &by).await?;
            Ok(this.engine.model(&declared.name).ok())
        };
        let loaded = arrival.limit(self.loading.join(&model.name, work)).await?;
        loaded.ok_or_else(|| refusals::unloaded_meanwhile(&model.name))
    }

    /// The loaded model of a file below a model directory; loads it under this name if necessary.
    ///
    /// # Errors
    /// As for any load.
    pub(crate) async fn opened_at_first_use(
        self: &Arc<Self>,
        name: &str,
        path: PathBuf,
        arrival: &Arrival,
    ) -> Result<Arc<LoadedModel>, Failure> {
        self.opened_because(name, path, "at its first use", arrival)
            .await
    }

    /// As [`Service::opened_at_first_use`]; `why` is the reason that the log states.
    ///
    /// # Errors
    /// As for any load.
    pub(crate) async fn opened_because(
        self: &Arc<Self>,
        name: &str,
        path: PathBuf,
        why: &'static str,
        arrival: &Arrival,
    ) -> Result<Arc<LoadedModel>, Failure> {
        let this = Arc::clone(self);
        let by = arrival.without_deadline();
        let load = Load {
            path,
            name: name.to_owned(),
            pin: false,
            preload: false,
            template: None,
            draft: None,
            mmproj: None,
            lora: Vec::new(),
        };
        let work = || async move {
            this.closed_or_kept(&load.name).await;
            if let Ok(there) = this.engine.model(&load.name) {
                // It could not be closed, and its file may be another by now.
                let old = Arc::downgrade(&there);
                // Whoever holds it keeps it from being closed.
                drop(there);
                return this.renew(&load.name, old, &by).await;
            }
            let arguments = format!("path={:?} {why}", load.path);
            let log = RequestLog::audit("Load", &load.name, &arguments, &by);
            // Nobody reads the steps of such a load.
            let (steps, _) = mpsc::channel(1);
            let never = std::future::pending();
            let loaded = this.load_as(&load, &steps, never, Origin::FirstUse).await;
            let (status, _) = log.end(loaded)?;
            this.close_beyond_bounds(&load.name).await;
            Ok(Some(status.model))
        };
        let loaded = arrival.limit(self.loading.join(name, work)).await?;
        loaded.ok_or_else(|| refusals::unloaded_meanwhile(name))
    }

    /// Reloads models that are not declared and whose files have changed; adds failures to
    /// `registration`.
    pub(crate) async fn renew_others(self: &Arc<Self>, registration: &mut Registration) {
        let book = self.declared();
        let others = self.origins.all().into_iter().map(|(model, _)| model);
        let others = others.filter(|model| book.model(model.name()).is_none());
        let changed: Vec<_> = others.filter(|model| !self.looks_same(model)).collect();
        for model in changed {
            let name = model.name().to_owned();
            if let Err(failure) = self.renewed(model, &Arrival::now(None)).await {
                let reason = failure.message().to_owned();
                registration.refused.push((name, reason));
            }
        }
    }

    /// As [`Service::model_at_first_use`], for the draft model of another model; boxed, because the
    /// future would contain itself.
    pub(crate) fn draft_at_first_use<'a>(
        self: &'a Arc<Self>,
        name: &'a str,
        arrival: &'a Arrival,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<LoadedModel>, Failure>> + Send + 'a>> {
        Box::pin(self.model_at_first_use("draft", name, arrival))
    }
}

/// The entry of a model whose origin is not known.
fn unknown(loaded: &Arc<LoadedModel>) -> Loaded {
    Loaded {
        model: Arc::downgrade(loaded),
        load: Load {
            path: loaded.path().to_owned(),
            name: loaded.name().to_owned(),
            pin: false,
            preload: false,
            template: None,
            draft: None,
            mmproj: None,
            lora: Vec::new(),
        },
        origin: Origin::ByHand,
        used: 0,
        used_at: None,
        pinned_segments: BTreeSet::new(),
    }
}

#[cfg(test)]
#[path = "renewal_tests.rs"]
mod tests;
