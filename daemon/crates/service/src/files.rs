//! The models that can be asked for: those that are loaded, and the files below the model
//! directories, each with a name.
//!
//! A file is called by its own name without `.gguf`. Of two with one name the first by path has it,
//! and the others are called by their paths below their model directory. A file is loaded when its
//! name is first asked for.

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{ModelStatus, Snapshot};
use tokio::sync::{Semaphore, mpsc};

use crate::Service;
use crate::arrival::Arrival;
use crate::check::{MODEL_NAME_MAX, Violations, model_name};
use crate::failure::{self, Failure, Kind};
use crate::load::{Load, default_name};
use crate::model_files::{ModelDirs, ModelFile};
use crate::request_log::RequestLog;

/// How long a listing serves those who ask for names.
const LISTING_KEPT: Duration = Duration::from_secs(2);
/// How long a listing may be waited for.
const LISTING_WAIT_MAX: Duration = Duration::from_secs(10);
/// What Ollama's clients put behind a name without a tag.
const DEFAULT_TAG: &str = ":latest";

/// A file with its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFile {
    /// What it is asked for by.
    pub name: String,
    /// The file.
    pub file: ModelFile,
}

/// The files that were found last.
#[derive(Debug)]
pub(crate) struct Listing {
    turn: Arc<Semaphore>,
    last: Mutex<Option<(Instant, Arc<[NamedFile]>)>>,
}

impl Default for Listing {
    fn default() -> Self {
        Self {
            turn: Arc::new(Semaphore::new(1)),
            last: Mutex::new(None),
        }
    }
}

impl Listing {
    fn kept(&self) -> Option<Arc<[NamedFile]>> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, files) = last.as_ref()?;
        (at.elapsed() < LISTING_KEPT).then(|| Arc::clone(files))
    }
}

/// A model that can be asked for.
#[derive(Debug, Clone)]
pub enum Available {
    /// It is loaded.
    Loaded(ModelStatus),
    /// It is a file that its first use loads.
    OnDisk(NamedFile),
}

impl Available {
    /// What it is asked for by.
    pub fn name(&self) -> &str {
        match self {
            Self::Loaded(status) => status.model.name(),
            Self::OnDisk(file) => &file.name,
        }
    }

    /// Bytes of its file.
    pub fn file_bytes(&self) -> u64 {
        match self {
            Self::Loaded(status) => status.model.file().size_bytes(),
            Self::OnDisk(named) => named.file.bytes,
        }
    }

    /// When its file was last changed, in milliseconds since 1970.
    pub fn mtime_unix_ms(&self) -> i64 {
        match self {
            Self::Loaded(status) => {
                let ns = status.model.file().identity().mtime_ns;
                i64::try_from(ns / 1_000_000).unwrap_or(i64::MAX)
            }
            Self::OnDisk(named) => named.file.mtime_unix_ms,
        }
    }
}

/// Names the files, each of them once.
fn named(dirs: &ModelDirs, files: Vec<ModelFile>) -> Vec<NamedFile> {
    let mut taken = HashSet::new();
    let named = files.into_iter().filter_map(|file| {
        let short = default_name(&file.path);
        let name = if taken.contains(&short) {
            below(dirs, &file.path)?
        } else {
            short
        };
        let fits = !name.is_empty() && name.len() <= MODEL_NAME_MAX;
        (fits && taken.insert(name.clone())).then_some(NamedFile { name, file })
    });
    named.collect()
}

/// The path below its model directory, as a name.
fn below(dirs: &ModelDirs, path: &Path) -> Option<String> {
    let rest = dirs.real().find_map(|dir| path.strip_prefix(dir).ok())?;
    let above = rest.parent()?.components().map(|part| {
        let part = Path::new(part.as_os_str());
        default_name(part) + "/"
    });
    Some(above.collect::<String>() + &default_name(path))
}

impl Service {
    /// The GGUF files below the model directories, and whether these are all. Waits for others who
    /// look.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED where the directories are read for others all the while.
    pub async fn list_files(&self) -> Result<(Vec<ModelFile>, bool), Failure> {
        let turn = Arc::clone(&self.listing.turn).acquire_owned();
        let Ok(Ok(turn)) = tokio::time::timeout(LISTING_WAIT_MAX, turn).await else {
            return Err(failure::exhausted(
                "the model directories are being read for another caller",
                Duration::from_secs(1),
            ));
        };
        let dirs = Arc::clone(&self.dirs);
        let listing = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            dirs.list()
        });
        listing.await.map_err(|_| failure::draining())
    }

    /// The files with their names. `fresh` looks even if somebody did so a moment ago.
    async fn named_files(&self, fresh: bool) -> Result<Arc<[NamedFile]>, Failure> {
        if let Some(files) = self.listing.kept().filter(|_| !fresh) {
            return Ok(files);
        }
        let (files, _) = self.list_files().await?;
        let files: Arc<[NamedFile]> = named(&self.dirs, files).into();
        let last = self.listing.last.lock();
        *last.unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), Arc::clone(&files)));
        Ok(files)
    }

    /// All models that can be asked for, by name.
    ///
    /// # Errors
    /// As [`Service::list_files`].
    pub async fn available(&self) -> Result<Vec<Available>, Failure> {
        let files = self.named_files(false).await?;
        let snapshot = self.engine.snapshot();
        let is_loaded = |named: &NamedFile| {
            let mut models = snapshot.models.iter().map(|status| &status.model);
            models.any(|m| m.path() == named.file.real || m.name() == named.name)
        };
        let on_disk = files.iter().filter(|named| !is_loaded(named)).cloned();
        let loaded = snapshot.models.iter().cloned().map(Available::Loaded);
        let mut all: Vec<_> = loaded.chain(on_disk.map(Available::OnDisk)).collect();
        all.sort_by(|a, b| a.name().cmp(b.name()));
        Ok(all)
    }

    /// The model of this name, which is loaded now if it is a file. `field` is what a refusal calls
    /// the name.
    ///
    /// # Errors
    /// NOT_FOUND with the names that there are, and those of a load.
    pub async fn model_at_first_use(
        &self,
        field: &str,
        name: &str,
        arrival: &Arrival,
    ) -> Result<Arc<LoadedModel>, Failure> {
        self.admit()?;
        let mut violations = Violations::default();
        model_name(field, name, &mut violations);
        violations.result()?;
        let short = name.strip_suffix(DEFAULT_TAG).unwrap_or(name);
        if let Some(model) = self.loaded(&[name, short]) {
            return Ok(model);
        }
        let mut files = self.named_files(false).await?;
        let find = |files: &[NamedFile]| {
            let mut named = files.iter();
            named.find(|f| f.name == name || f.name == short).cloned()
        };
        let mut found = find(&files);
        if found.is_none() {
            files = self.named_files(true).await?;
            found = find(&files);
        }
        let Some(found) = found else {
            return Err(self.unknown(name, &files));
        };
        // It may be there under another name, under which it holds its weights already.
        let snapshot = self.engine.snapshot();
        let same = |status: &&ModelStatus| status.model.path() == found.file.real;
        if let Some(status) = snapshot.models.iter().find(same) {
            return Ok(Arc::clone(&status.model));
        }
        let load = Load {
            path: found.file.path.clone(),
            name: found.name.clone(),
            pin: false,
            preload: false,
        };
        let asked = format!("path={:?} at its first use", load.path);
        let log = RequestLog::audit("Load", &load.name, &asked, arrival);
        // Nobody reads the steps of such a load.
        let (steps, _) = mpsc::channel(1);
        let loaded = log.end(self.load(&load, &steps, arrival.passed()).await);
        match loaded {
            Ok(status) => Ok(status.model),
            // Somebody else was a moment faster.
            Err(failure) if failure.kind() == Kind::AlreadyExists => {
                self.loaded(&[&load.name]).ok_or(failure)
            }
            Err(failure) => Err(failure),
        }
    }

    fn loaded(&self, names: &[&str]) -> Option<Arc<LoadedModel>> {
        names.iter().find_map(|name| self.engine.model(name).ok())
    }

    fn unknown(&self, name: &str, files: &[NamedFile]) -> Failure {
        let snapshot: Arc<Snapshot> = self.engine.snapshot();
        let loaded = snapshot.models.iter().map(|status| status.model.name());
        failure::no_such_model(name, loaded, files.iter().map(|file| file.name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_file_of_a_name_is_called_by_its_path() {
        let root = tempfile::tempdir().unwrap();
        for file in ["a/m.gguf", "b/c d/m.gguf", "b/c d/n.GGUF", "b/c-d/m.gguf"] {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        let dirs = ModelDirs::new(&[root.path().to_owned()]).unwrap();
        let (files, is_whole) = dirs.list();
        assert!(is_whole);
        let names: Vec<_> = named(&dirs, files).into_iter().map(|f| f.name).collect();
        // The last one's name is taken by then, so that it can be loaded by its path only.
        assert_eq!(names, ["m", "b/c-d/m", "n"]);
    }
}
