//! Remembers models that clients loaded, in a file, so that the daemon loads them again after a
//! restart.
//!
//! ```text
//! start --read--> waiting --loaded--> loaded by hand --unloaded--> forgotten
//!                    |  ^                  ^
//!                    |  '--cannot be yet   '-- load, pin
//!                    '--unloaded, declared, or another is loaded under the name--> forgotten
//! ```
//!
//! The file lists models that clients have loaded or pinned by name (not those that a request
//! opened, nor declared ones), and those that wait. A model that cannot be loaded, for example
//! because its disk is not mounted yet, waits: it is tried again when a model directory answers, at
//! a reload, and when a request asks for it.
//!
//! *Invariant:* the file is replaced as a whole, and is never written from what a daemon that ends
//! has left (`Service::remember`). The lock is held to read or write the file, on a blocking
//! thread.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rocmforge_engine::api::Unloaded;
use rocmforge_engine::{Error, LoadedModel, MODELS_MAX};
use rocmforge_failure::Failure;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::Service;
use crate::adapters::AdapterSpec;
use crate::arrival::Arrival;
use crate::declared::Declared;
use crate::load::Load;
use crate::origins::{Loaded, Origin};
use crate::refusals;
use crate::request_log::RequestLog;
use crate::state_file;

/// Version of the file's format.
const VERSION: u32 = 1;
/// Maximum size of the file in bytes.
const FILE_MAX_BYTES: u64 = 4 << 20;

/// A model that is loaded again after a restart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Remembered {
    name: String,
    /// Path of the model's file as the load had it, absolute or below a model directory.
    path: String,
    /// Whether all segments of the model are pinned.
    #[serde(default)]
    pin: bool,
    /// Segments that are pinned, if not all are.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pinned_segments: BTreeSet<u32>,
    #[serde(default)]
    preload: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    draft: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mmproj: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    lora: Vec<AdapterSpec>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    version: u32,
    models: Vec<Remembered>,
}

/// The file of remembered models, and those of them that are not loaded yet.
#[derive(Debug)]
struct Memory {
    path: PathBuf,
    /// The models that are in the file.
    written: Mutex<Vec<Remembered>>,
    waiting: Mutex<Vec<Remembered>>,
}

impl Memory {
    fn waiting(&self) -> MutexGuard<'_, Vec<Remembered>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a waiting model of this name. Returns whether there was one.
    fn forget(&self, name: &str) -> bool {
        let mut waiting = self.waiting();
        let before = waiting.len();
        waiting.retain(|model| model.name != name);
        waiting.len() < before
    }
}

/// The memory of remembered models, if the daemon keeps one.
#[derive(Debug, Default)]
pub(crate) struct Memories(OnceLock<Arc<Memory>>);

impl Remembered {
    fn load(&self) -> Load {
        Load {
            path: PathBuf::from(&self.path),
            name: self.name.clone(),
            pin: self.pin,
            preload: false,
            template: None,
            draft: self.draft.clone(),
            mmproj: self.mmproj.as_ref().map(PathBuf::from),
            lora: self.lora.clone(),
        }
    }

    fn is_sound(&self) -> bool {
        Declared::check_name(&self.name).is_ok() && !self.path.is_empty()
    }
}

/// Reads the models in a file; none if it does not exist.
fn read(path: &Path) -> io::Result<Vec<Remembered>> {
    let Some(bytes) = state_file::read(path, FILE_MAX_BYTES)? else {
        return Ok(Vec::new());
    };
    let content: Content = serde_json::from_slice(&bytes)?;
    if content.version != VERSION {
        let message = format!("version {} where {VERSION} is known", content.version);
        return Err(io::Error::other(message));
    }
    let mut models = content.models;
    models.truncate(MODELS_MAX);
    models.retain(Remembered::is_sound);
    Ok(models)
}

/// Replaces the file atomically: readers find the old content or the new.
fn write(path: &Path, models: &[Remembered]) -> io::Result<()> {
    let content = Content {
        version: VERSION,
        models: models.to_vec(),
    };
    let mut text = serde_json::to_string_pretty(&content)?;
    text.push('\n');
    state_file::replace(path, &text)
}

impl Service {
    /// Remembers models that clients load in the file at `path` from now on, and makes the models
    /// that it lists wait for [`Service::load_remembered`]. An unreadable file is renamed and
    /// logged. Blocks on the file system.
    pub fn remember_in(&self, path: PathBuf) {
        let found = read(&path).unwrap_or_else(|error| {
            let aside = state_file::beside(&path, ".unread");
            let moved = fs::rename(&path, &aside);
            let (path, is_moved) = (path.display(), moved.is_ok());
            tracing::error!(%error, is_moved, "{path} (remember) cannot be read; it is put aside as {}", aside.display());
            Vec::new()
        });
        // What cannot be written is told now, not when a model is lost.
        if let Err(error) = write(&path, &found) {
            unwritten(&path, &error);
        }
        let memory = Memory {
            path,
            written: Mutex::new(found.clone()),
            waiting: Mutex::new(found),
        };
        if self.memories.0.set(Arc::new(memory)).is_err() {
            tracing::error!("models are remembered in one file only");
        }
    }

    /// Loads the remembered models that wait. One that cannot be loaded is logged and keeps
    /// waiting.
    pub async fn load_remembered(self: &Arc<Self>) {
        let Some(memory) = self.memories.0.get() else {
            return;
        };
        let all = memory.waiting().clone();
        let mut opening = self.opening.begin(all.iter().map(|model| &model.name));
        for model in all {
            if self.is_draining() {
                break;
            }
            if let Err(failure) = self.recall(&model.name, &Arrival::now(None)).await {
                let reason = failure.message();
                tracing::warn!(model = ?model.name, path = ?model.path, reason,
                    "a model that is remembered cannot be loaded now; unload it by name to forget it");
            }
            opening.done(&model.name);
        }
        drop(opening);
        self.remember().await;
    }

    /// Loads the remembered model of this name if it waits; else returns `None`.
    ///
    /// # Errors
    /// As for any load.
    pub(crate) async fn recall(
        self: &Arc<Self>,
        name: &str,
        arrival: &Arrival,
    ) -> Result<Option<Arc<LoadedModel>>, Failure> {
        let Some(memory) = self.memories.0.get() else {
            return Ok(None);
        };
        let waits = |model: &&Remembered| model.name == name;
        let found = memory.waiting().iter().find(waits).cloned();
        let Some(model) = found else {
            return Ok(None);
        };
        if self.declared().model(name).is_some() {
            memory.forget(name);
            return Ok(None);
        }
        let (this, by) = (Arc::clone(self), arrival.without_deadline());
        let work = || async move {
            if let Ok(there) = this.engine.model(&model.name) {
                return Ok(Some(there));
            }
            let loaded = this.load_again(&model, &by).await?;
            if let Some(memory) = this.memories.0.get() {
                memory.forget(&model.name);
            }
            Ok(Some(loaded))
        };
        arrival.limit(self.loading.join(name, work)).await
    }

    /// The adapters of a remembered model that waits to be loaded.
    pub(crate) fn remembered_adapters(&self, name: &str) -> Vec<AdapterSpec> {
        let waiting = self.memories.0.get().map(|memory| memory.waiting());
        let find = |models: MutexGuard<'_, Vec<Remembered>>| {
            let model = models.iter().find(|model| model.name == name);
            model.map(|model| model.lora.clone())
        };
        waiting.and_then(find).unwrap_or_default()
    }

    async fn load_again(
        self: &Arc<Self>,
        model: &Remembered,
        arrival: &Arrival,
    ) -> Result<Arc<LoadedModel>, Failure> {
        let asked = format!("path={:?} pin={} it is remembered", model.path, model.pin);
        let log = RequestLog::audit("Load", &model.name, &asked, arrival);
        let (steps, _) = mpsc::channel(1);
        let never = std::future::pending();
        let loaded = match self.with_draft_loaded(model.load(), arrival).await {
            Ok(load) => self.load_as(&load, &steps, never, Origin::ByHand).await,
            Err(failure) => Err(failure),
        };
        let (status, _) = log.end(loaded)?;
        self.origins.edit(&status.model, |loaded| {
            loaded.load.preload = model.preload;
            loaded.pinned_segments.clone_from(&model.pinned_segments);
        });
        let segments = Vec::from_iter(model.pinned_segments.iter().copied());
        if !segments.is_empty()
            && let Err(error) = self.engine.pin(&model.name, Some(segments), true).await
        {
            tracing::warn!(model = ?model.name, %error, "segments that were pinned are not pinned any more");
        }
        if model.preload
            && let Ok(mut events) = self.preload(&model.name, None)
        {
            // A preload ends when nobody takes its events.
            tokio::spawn(async move { while events.next().await.is_some() {} });
        }
        Ok(status.model)
    }

    /// Pins or unpins segments of a model, or all. Returns the model's pinned bytes.
    ///
    /// # Errors
    /// NOT_FOUND, and those of the engine.
    pub async fn pin(
        self: &Arc<Self>,
        model: &Arc<LoadedModel>,
        segments: Option<Vec<u32>>,
        pinned: bool,
    ) -> Result<u64, Failure> {
        let done = self
            .engine
            .pin(model.name(), segments.clone(), pinned)
            .await;
        let bytes = done.map_err(|error| refusals::from_engine(&error))?;
        let n_segments = model.model().info().segments.len() as u32;
        self.origins.edit(model, |loaded| {
            loaded.note_pins(segments.as_deref(), n_segments, pinned);
        });
        self.remember().await;
        Ok(bytes)
    }

    /// Unloads a model by its name or alias. A remembered model that is not loaded is forgotten.
    ///
    /// # Errors
    /// NOT_FOUND, and FAILED_PRECONDITION if it is in use and `force` is not set.
    pub async fn unload(self: &Arc<Self>, name: &str, force: bool) -> Result<Unloaded, Failure> {
        let name = self.real_name(name);
        let unloaded = self.engine.unload(&name, force).await;
        let memory = self.memories.0.get();
        let waited = memory.is_some_and(|memory| memory.forget(&name));
        let unloaded = match unloaded {
            Err(Error::UnknownModel { .. }) if waited => Ok(Unloaded {
                freed_bytes: 0,
                cancelled_requests: 0,
            }),
            unloaded => unloaded.map_err(|error| refusals::from_engine(&error)),
        };
        if unloaded.is_ok() || waited {
            self.remember().await;
        }
        unloaded
    }

    /// Writes the remembered models, if they differ from the file's.
    pub(crate) async fn remember(self: &Arc<Self>) {
        if let Some(memory) = self.memories.0.get() {
            let (this, memory) = (Arc::clone(self), Arc::clone(memory));
            let written = tokio::task::spawn_blocking(move || this.write_remembered(&memory));
            if let Err(error) = written.await {
                tracing::error!(%error, "models that clients load are not remembered");
            }
        }
    }

    fn write_remembered(&self, memory: &Memory) {
        // What is written last was looked at last.
        let mut written = memory
            .written
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let models = self.to_remember(memory);
        // Before models go the daemon drains, or its device is lost: what is missing then is none
        // of its clients' doing.
        let ends = self.is_draining() || self.engine.snapshot().device_lost.is_some();
        if ends || *written == models {
            return;
        }
        match write(&memory.path, &models) {
            Ok(()) => *written = models,
            Err(error) => unwritten(&memory.path, &error),
        }
    }

    fn to_remember(&self, memory: &Memory) -> Vec<Remembered> {
        let book = self.declared();
        let by_hand = |(model, loaded): (Arc<LoadedModel>, Loaded)| {
            let is_by_hand = loaded.origin == Origin::ByHand && book.model(model.name()).is_none();
            Some(Remembered {
                name: is_by_hand.then(|| model.name().to_owned())?,
                path: loaded.load.path.to_str()?.to_owned(),
                pin: loaded.load.pin,
                pinned_segments: loaded.pinned_segments,
                preload: loaded.load.preload,
                draft: loaded.load.draft,
                mmproj: loaded
                    .load
                    .mmproj
                    .and_then(|path| Some(path.to_str()?.to_owned())),
                lora: loaded.load.lora,
            })
        };
        let mut models: Vec<_> = self.origins.all().into_iter().filter_map(by_hand).collect();
        let loaded: Vec<_> = models.iter().map(|model| model.name.clone()).collect();
        let mut waiting = memory.waiting();
        waiting.retain(|model| !loaded.contains(&model.name));
        models.extend(waiting.iter().cloned());
        drop(waiting);
        models.sort_by(|a, b| a.name.cmp(&b.name));
        models
    }
}

fn unwritten(path: &Path, error: &io::Error) {
    tracing::error!(%error, "cannot write {} (remember); models that clients load are gone after a restart",
        path.display());
}
