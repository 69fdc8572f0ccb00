//! Warm restart: segments that were resident and in use are uploaded again after a restart, in the
//! background.
//!
//! ```text
//! start --serves--> note read --> opened, last used last --> uploaded, last used first --> kept
//!                       '--------------- stop: noted with what is still coming --------------'
//! ```
//!
//! Declared and remembered models are loaded elsewhere; this module uploads what was resident of
//! them. A model that a request had opened by its file's name is opened again, if its file is the
//! same. Segments are uploaded into free memory only ([`PreloadRoom::Free`]), behind requests.
//!
//! *Invariants:* a request that arrives meanwhile joins the load under way ([`crate::flights`]). A
//! warm restart does not count as a use of a model: its idle time continues from the note (test
//! `what_comes_back_is_as_long_unused_as_it_was`). The lock is held to look at the state or to
//! write the file, on a blocking thread.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{ModelStatus, PreloadEvent, PreloadRoom, SegmentState};
use rocmforge_failure::Failure;
use rocmforge_gguf::MappedFile;
use tokio::task::JoinHandle;

use crate::Service;
use crate::arrival::Arrival;
use crate::origins::{Loaded, Origin};
use crate::state_file;
use crate::warm_note::{NOTE_MAX_BYTES, Note, Noted, runs};

/// Interval of checks whether the note has to be written.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Log message for a model that is not loaded again because its file has changed.
const OTHER_FILE: &str = "its file is another now";

/// The state of this daemon's note.
#[derive(Debug)]
struct Ledger {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The note that was written last, and when.
    written: Option<(Instant, Note)>,
    /// Models of the previous daemon's note that are not loaded again yet.
    coming: Vec<Noted>,
    /// Whether the last note of this daemon has been written.
    is_ended: bool,
    /// Whether the last write failed, which has been logged.
    is_failing: bool,
}

/// The state of the note, if the daemon keeps one.
#[derive(Debug, Default)]
pub(crate) struct Warmth(OnceLock<Arc<Ledger>>);

/// A model that is loaded again.
struct Back {
    model: Weak<LoadedModel>,
    noted: Noted,
}

/// Counts of models and bytes that were loaded again.
#[derive(Debug, Default)]
struct Came {
    models: usize,
    uploaded_bytes: u64,
}

impl Ledger {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the note and counts the attempt in it. `None` if there is no usable note; the log says
    /// why. Blocks.
    fn take(&self) -> Option<Note> {
        let path = self.path.display();
        let bytes = match state_file::read(&self.path, NOTE_MAX_BYTES) {
            Ok(bytes) => bytes?,
            Err(error) => {
                tracing::warn!(%error, "cannot read {path} (restart_warm); models of the last run are not loaded again");
                return None;
            }
        };
        let note = match Note::parse(&bytes) {
            Ok(note) => note,
            Err(error) => {
                tracing::warn!(%error, "{path} (restart_warm) is not used and will be replaced; models of the last run are not loaded again");
                return None;
            }
        };
        let tried = note.clone().tried();
        if let Err(error) = replace(&self.path, &tried) {
            tracing::warn!(%error, "cannot write {path} (restart_warm); models of the last run are not loaded again");
            return None;
        }
        Some(note)
    }

    /// Writes a note if it is due; the `last` one of a daemon always. Blocks.
    fn write(&self, note: Note, now: Instant, last: bool) {
        let mut state = self.state();
        if state.is_ended || !last && !note.is_due(state.written.as_ref(), now) {
            return;
        }
        let replaced = replace(&self.path, &note);
        if let Err(error) = &replaced
            && !state.is_failing
        {
            let path = self.path.display();
            tracing::error!(%error, "cannot write {path} (restart_warm); models that are in use do not come back after a restart");
        }
        state.is_failing = replaced.is_err();
        // One that cannot be written is tried again with the next change, not at each look.
        state.written = Some((now, note));
        state.is_ended = last;
    }

    /// Records that a model is loaded again, or cannot be.
    fn came(&self, name: &str) {
        self.state().coming.retain(|model| model.name != name);
    }
}

fn replace(path: &Path, note: &Note) -> io::Result<()> {
    state_file::replace(path, &note.text()?)
}

/// Size of a file, and the last modification time of it or its parts, as in listings.
fn identity(file: &MappedFile) -> (u64, i64) {
    let written = file.identities().map(|(_, part)| part.mtime_ns / 1_000_000);
    let last = written.max().unwrap_or(0);
    (file.size_bytes(), i64::try_from(last).unwrap_or(i64::MAX))
}

impl Service {
    /// Loads the models of the note at `path` again, then keeps the note up to date until the
    /// daemon drains.
    pub async fn keep_warm(service: Weak<Self>, path: PathBuf) {
        let ledger = Arc::new(Ledger {
            path,
            state: Mutex::default(),
        });
        let taking = Arc::clone(&ledger);
        let taken = tokio::task::spawn_blocking(move || taking.take()).await;
        let models = taken
            .ok()
            .flatten()
            .map_or_else(Vec::new, Note::into_models);
        ledger.state().coming.clone_from(&models);
        let Some(this) = service.upgrade() else {
            return;
        };
        if this.warmth.0.set(Arc::clone(&ledger)).is_err() {
            return tracing::error!("restart_warm has one file only");
        }
        if !models.is_empty() {
            this.bring_back(&ledger, models).await;
        }
        drop(this);
        while let Some(this) = service.upgrade() {
            if this.is_draining() {
                return;
            }
            this.write_if_due(&ledger).await;
            drop(this);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Models that were in use before the restart and are not back yet.
    pub fn models_coming_back(&self) -> usize {
        let ledger = self.warmth.0.get();
        ledger.map_or(0, |ledger| ledger.state().coming.len())
    }

    async fn write_if_due(&self, ledger: &Arc<Ledger>) {
        let now = Instant::now();
        // What is missing behind a lost device is none of its clients' doing.
        if self.engine.snapshot().device_lost.is_some() {
            return;
        }
        let (note, ledger) = (self.warm_note(ledger, now), Arc::clone(ledger));
        let written = tokio::task::spawn_blocking(move || ledger.write(note, now, false));
        if let Err(error) = written.await {
            tracing::error!(%error, "what is resident is not noted for a restart");
        }
    }

    /// Writes the final note before the daemon drains. Returns the task that does; `None` if no
    /// note is kept, or the previous one was not read yet.
    pub fn note_at_stop(&self) -> Option<JoinHandle<()>> {
        let ledger = Arc::clone(self.warmth.0.get()?);
        let now = Instant::now();
        let note = self.warm_note(&ledger, now);
        let write = move || ledger.write(note, now, true);
        Some(tokio::task::spawn_blocking(write))
    }

    /// The note of the resident segments of used models, and of models that are still to be loaded
    /// again.
    fn warm_note(&self, ledger: &Ledger, now: Instant) -> Note {
        let snapshot = self.engine.snapshot();
        let mut idle: HashMap<&str, Duration> = HashMap::new();
        let mut known: Vec<(&ModelStatus, Loaded)> = Vec::new();
        for status in &snapshot.models {
            let Some(loaded) = self.origins.of(&status.model) else {
                continue;
            };
            let for_long = match (status.requests, loaded.used_at) {
                (0, None) => None,
                (0, Some(at)) => Some(now.saturating_duration_since(at)),
                _ => Some(Duration::ZERO),
            };
            known.push((status, loaded));
            let Some(for_long) = for_long else {
                continue;
            };
            // Whoever uses a model uses the one that drafts for it.
            let names = [Some(status.model.name()), status.draft.as_deref()];
            for name in names.into_iter().flatten() {
                let least = idle.entry(name).or_insert(for_long);
                *least = for_long.min(*least);
            }
        }
        let noted = known.iter().filter_map(|(status, loaded)| {
            let idle = idle.get(status.model.name())?;
            self.noted(status, loaded, *idle)
        });
        let mut models: Vec<Noted> = noted.collect();
        for coming in &ledger.state().coming {
            let mut coming = coming.clone();
            if let Some(at) = models.iter().position(|model| model.name == coming.name) {
                coming.idle_s = coming.idle_s.min(models.swap_remove(at).idle_s);
            }
            models.push(coming);
        }
        Note::of(models)
    }

    fn noted(&self, status: &ModelStatus, loaded: &Loaded, idle: Duration) -> Option<Noted> {
        let name = status.model.name();
        let is_opened = loaded.origin == Origin::FirstUse && self.declared().model(name).is_none();
        let path = match is_opened {
            // One that is no text cannot be noted.
            true => Some(loaded.load.path.to_str()?.to_owned()),
            false => None,
        };
        let resident = || {
            let segments = (0..).zip(status.segments.iter());
            segments.filter(|(_, segment)| segment.state == SegmentState::Resident)
        };
        let (file_bytes, mtime_unix_ms) = identity(status.model.file());
        Some(Noted {
            name: name.to_owned(),
            path,
            file_bytes,
            mtime_unix_ms,
            idle_s: idle.as_secs(),
            n_segments: status.segments.len() as u32,
            resident: runs(resident().map(|(index, _)| index)),
            resident_bytes: resident().map(|(_, segment)| segment.bytes).sum(),
        })
    }

    /// Opens the models again, and uploads the segments that were resident and fit into free
    /// memory.
    async fn bring_back(self: &Arc<Self>, ledger: &Ledger, models: Vec<Noted>) {
        let begin = Instant::now();
        let (noted, noted_bytes) = (
            models.len(),
            models.iter().map(|model| model.resident_bytes).sum::<u64>(),
        );
        let mut there = Vec::new();
        // The one that was used last is the last to be closed again.
        for noted in models.into_iter().rev() {
            if self.is_draining() {
                return;
            }
            match self.open_again(&noted).await {
                Ok(model) => there.push(Back { model, noted }),
                Err(reason) => {
                    tracing::debug!(model = ?noted.name, reason, "a model does not come back after the restart");
                    ledger.came(&noted.name);
                }
            }
        }
        let mut came = Came::default();
        while let Some(back) = there.pop() {
            match self.upload_again(&back).await {
                Ok(bytes) => {
                    came.models += 1;
                    came.uploaded_bytes += bytes;
                }
                // What is not back is for the next daemon.
                Err(_) if self.is_draining() => return,
                Err(reason) => {
                    tracing::debug!(model = ?back.noted.name, reason, "the weights of a model do not come back after the restart");
                }
            }
            ledger.came(&back.noted.name);
        }
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        tracing::info!(
            noted,
            noted_mib = mib(noted_bytes),
            "{} models, {} MiB are back after {:.1} s",
            came.models,
            mib(came.uploaded_bytes),
            begin.elapsed().as_secs_f64()
        );
    }

    /// Opens a model again if it is not loaded; the error says why it cannot be.
    async fn open_again(self: &Arc<Self>, noted: &Noted) -> Result<Weak<LoadedModel>, String> {
        let (name, arrival) = (&*noted.name, Arrival::now(None));
        // Those that are declared or remembered.
        self.opened(name, &arrival).await.map_err(told)?;
        let there = self.engine.model(name).ok();
        let is_opened = there.is_none();
        let model = match (there, &noted.path) {
            (Some(there), _) => there,
            (None, Some(path)) => self.open_file_again(noted, path, &arrival).await?,
            (None, None) => {
                return Err("the model is neither declared nor remembered any more".to_owned());
            }
        };
        if identity(model.file()) != (noted.file_bytes, noted.mtime_unix_ms) {
            return Err(OTHER_FILE.to_owned());
        }
        let used_at = noted.used_at(Instant::now());
        self.origins.edit(&model, |loaded| match is_opened {
            true => loaded.used_at = Some(used_at),
            false => loaded.used_at = loaded.used_at.or(Some(used_at)),
        });
        Ok(Arc::downgrade(&model))
    }

    /// Opens a file if it still has the noted name and content.
    async fn open_file_again(
        self: &Arc<Self>,
        noted: &Noted,
        path: &str,
        arrival: &Arrival,
    ) -> Result<Arc<LoadedModel>, String> {
        let files = self.named_files(false).await.map_err(told)?;
        let named = files.iter().find(|named| named.name == noted.name);
        let Some(found) = named.filter(|named| named.file.path.to_str() == Some(path)) else {
            return Err("no model directory has the model's file under this name".to_owned());
        };
        let file = &found.file;
        if (file.bytes, file.mtime_unix_ms) != (noted.file_bytes, noted.mtime_unix_ms) {
            return Err(OTHER_FILE.to_owned());
        }
        if file.unserved.is_some() {
            return Err(
                "the file is no longer offered as a model; `rocmforgectl files` says why"
                    .to_owned(),
            );
        }
        let path = file.path.clone();
        let opened = self.opened_because(&noted.name, path, "as before the restart", arrival);
        opened.await.map_err(told)
    }

    /// Uploads the segments of a model that were resident and fit into free memory. Returns the
    /// uploaded bytes; the error says why there are none.
    async fn upload_again(&self, back: &Back) -> Result<u64, String> {
        let name = &*back.noted.name;
        let segments = back.noted.segments();
        let found = self.engine.model(name).map_err(|error| error.to_string())?;
        if found.model().info().segments.len() as u32 != back.noted.n_segments {
            return Err("this version divides the model into other segments".to_owned());
        }
        if !std::ptr::eq(back.model.as_ptr(), Arc::as_ptr(&found)) {
            return Err("the model was loaded again meanwhile".to_owned());
        }
        if segments.is_empty() {
            return Ok(0);
        }
        let room = PreloadRoom::Free;
        let events = self.engine.preload_into(name, Some(segments), room);
        let mut events = events.map_err(|error| error.to_string())?;
        loop {
            match events.next().await {
                Some(PreloadEvent::Progress { .. }) => {}
                Some(PreloadEvent::Done { uploaded_bytes }) => return Ok(uploaded_bytes),
                Some(PreloadEvent::Failed(error)) => return Err(error.to_string()),
                None => return Err("the engine has ended".to_owned()),
            }
        }
    }
}

/// The text of a failure for the log.
fn told(failure: Failure) -> String {
    failure.message().to_owned()
}

#[cfg(test)]
#[path = "warm_tests.rs"]
mod tests;
