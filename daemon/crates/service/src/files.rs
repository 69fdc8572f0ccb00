//! The models that requests can name: loaded ones, and the files below the model directories.
//!
//! A file is named by its file name without `.gguf` (`naming.rs`), and is loaded at its first use.
//! A declared model has the name that the configuration gives it.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{ModelStatus, Snapshot};
use rocmforge_failure::{self as failure, Failure, Reason, Violations};
use tokio::sync::Semaphore;

use crate::Service;
use crate::arrival::Arrival;
pub use crate::available::Available;
use crate::available::Place;
use crate::check::model_name;
use crate::declared::{Book, Declared};
use crate::hub_names;
use crate::looks::Looks;
use crate::model_files::{DirState, Found, ModelDirs, ModelFile, Unserved};
pub(crate) use crate::naming::DEFAULT_TAG;
use crate::naming::name_among;
use crate::refusals;

/// How long a listing of the model directories is reused to look up names.
const LISTING_KEPT: Duration = Duration::from_secs(2);
/// Maximum wait for a listing of the model directories.
const LISTING_WAIT_MAX: Duration = Duration::from_secs(10);
/// Maximum number of files for which the log says why they are not offered.
const TOLD_MAX: usize = 128;

/// A model file with its name in requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFile {
    /// Name of the model in requests.
    pub name: String,
    /// The model file.
    pub file: ModelFile,
}

impl NamedFile {
    fn is_served(&self) -> bool {
        self.file.unserved.is_none()
    }
}

/// Contents of the model directories.
#[derive(Debug)]
pub struct Listed {
    /// The files that are offered as models, by path.
    pub served: Vec<NamedFile>,
    /// Files that are not offered as models, by path, each with the reason.
    pub unserved: Vec<ModelFile>,
    /// State of each model directory.
    pub dirs: Vec<DirState>,
    /// Whether all directories could be read completely.
    pub is_whole: bool,
}

/// The last listing of the model directories.
#[derive(Debug)]
pub(crate) struct Listing {
    turn: Arc<Semaphore>,
    looks: Arc<Looks<Found>>,
    /// Probes that find the real paths of declared files.
    real: Arc<Looks<PathBuf>>,
    last: Mutex<Option<(Instant, Arc<[NamedFile]>)>>,
    /// Files that are not offered and about which the log has spoken.
    told: Mutex<HashSet<PathBuf>>,
}

impl Default for Listing {
    fn default() -> Self {
        Self {
            turn: Arc::new(Semaphore::new(1)),
            looks: Arc::default(),
            real: Arc::default(),
            last: Mutex::new(None),
            told: Mutex::default(),
        }
    }
}

impl Listing {
    /// Logs for each file, once, why it is not offered.
    fn tell<'a>(&self, unserved: impl IntoIterator<Item = &'a ModelFile>) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        for file in unserved {
            let Some(why) = &file.unserved else { continue };
            if told.contains(&file.path) {
                continue;
            }
            if told.len() >= TOLD_MAX {
                // Said once: there is one more then.
                if told.len() == TOLD_MAX && told.insert(PathBuf::new()) {
                    tracing::warn!(
                        "more files are not offered as models than the log lists; `rocmforgectl files` lists all"
                    );
                }
                return;
            }
            told.insert(file.path.clone());
            match why.is_trouble() {
                true => tracing::warn!(path = ?file.path, "not offered as a model: {why}"),
                false => tracing::info!(path = ?file.path, "not offered as a model: {why}"),
            }
        }
    }

    fn kept(&self) -> Option<Arc<[NamedFile]>> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, files) = last.as_ref()?;
        (at.elapsed() < LISTING_KEPT).then(|| Arc::clone(files))
    }
}

/// Gives each file one name: the declared one, else its own. `real_paths` has the real paths of
/// declared files that are not among the files.
pub(crate) fn named(
    dirs: &ModelDirs,
    book: &Book,
    files: Vec<ModelFile>,
    real_paths: &HashMap<PathBuf, Arc<PathBuf>>,
) -> Vec<NamedFile> {
    let mut taken = HashSet::new();
    for model in book.models() {
        taken.insert(model.name.clone());
        taken.extend(model.aliases.iter().cloned());
    }
    let mut all = Vec::new();
    let mut declared = HashSet::new();
    for model in book.models() {
        let named_so = files.iter().find(|file| file.path == model.path);
        // One that is not below a model directory cannot be loaded, and is not listed.
        let by_links = || {
            let real = real_paths.get(&model.path)?;
            files.iter().find(|file| file.real == **real)
        };
        if let Some(file) = named_so.or_else(by_links) {
            declared.insert(file.path.clone());
            all.push(NamedFile {
                name: model.name.clone(),
                file: file.clone(),
            });
        }
    }
    let mut others: Vec<_> = files
        .into_iter()
        .filter(|file| !declared.contains(&file.path))
        .collect();
    // Who asks for one that is not offered is told why, if no other has the name.
    others.sort_by_key(|file| {
        let is_other = file.hub.as_ref().is_some_and(|hub| hub.is_other);
        (file.unserved.is_some(), is_other)
    });
    let named = others.into_iter().map(|file| NamedFile {
        name: name_among(dirs, &file.path, file.hub.as_ref(), &mut taken),
        file,
    });
    all.extend(named);
    all
}

/// The real paths of declared files that are not among `files`, as they are now or were found last.
/// Files in a directory that does not respond are left out; all are waited for together.
fn real_paths_of(
    dirs: &ModelDirs,
    book: &Book,
    files: &[ModelFile],
    looks: &Looks<PathBuf>,
) -> HashMap<PathBuf, Arc<PathBuf>> {
    let paths = book.models().iter().map(|model| &model.path);
    let others = paths.filter(|path| files.iter().all(|file| file.path != **path));
    let others: Vec<_> = others
        .filter(|path| dirs.silent_above(path).is_none())
        .collect();
    let look = |path: &&PathBuf| {
        let asked = path.to_path_buf();
        (asked.clone(), move || {
            asked.canonicalize().unwrap_or_default()
        })
    };
    let mut found = looks.look_anew(others.iter().map(look).collect());
    for path in others {
        if let Some(before) = looks.found(path).filter(|_| !found.contains_key(path)) {
            found.insert(path.clone(), before);
        }
    }
    found
}

/// The declared models whose draft model is neither declared nor a file below the model
/// directories, each with its draft model. Blocks on the file system; models are left out if a
/// directory cannot be read completely.
pub fn without_their_drafts<'a>(dirs: &ModelDirs, book: &'a Book) -> Vec<(&'a str, &'a str)> {
    let with_draft = |model: &'a Declared| Some((&*model.name, model.draft.as_deref()?));
    let mut missing: Vec<_> = book.models().iter().filter_map(with_draft).collect();
    missing.retain(|(_, draft)| book.asked(draft).is_none());
    if missing.is_empty() {
        return missing;
    }
    let (files, is_whole) = dirs.list(&Looks::default());
    if !is_whole {
        return Vec::new();
    }
    let real_paths = real_paths_of(dirs, book, &files, &Looks::default());
    let names: HashSet<_> = named(dirs, book, files, &real_paths)
        .into_iter()
        .filter(NamedFile::is_served)
        .map(|file| file.name)
        .collect();
    let is_file = |draft: &str| {
        let short = draft.strip_suffix(DEFAULT_TAG).unwrap_or(draft);
        names.contains(draft) || names.contains(short)
    };
    missing.retain(|(_, draft)| !is_file(draft));
    missing
}

impl Service {
    /// Lists the GGUF files below the model directories, with their names. One listing runs at a
    /// time.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if the directories are being read for other requests all the
    /// time.
    pub async fn list_files(&self) -> Result<Listed, Failure> {
        let (book, real_paths) = (self.declared(), Arc::clone(&self.listing.real));
        let listed = self.look_at_dirs(move |dirs, looks| {
            let (files, is_whole) = dirs.list(looks);
            let real_paths = real_paths_of(dirs, &book, &files, &real_paths);
            let (mut served, unserved): (Vec<_>, Vec<_>) = named(dirs, &book, files, &real_paths)
                .into_iter()
                .partition(NamedFile::is_served);
            let mut unserved: Vec<_> = unserved.into_iter().map(|named| named.file).collect();
            served.sort_by(|a, b| a.file.path.cmp(&b.file.path));
            unserved.sort_by(|a, b| a.path.cmp(&b.path));
            Listed {
                served,
                unserved,
                dirs: dirs.states(|dir| dirs.refusal_of(looks, dir)),
                is_whole,
            }
        });
        let listed = listed.await?;
        self.listing.tell(&listed.unserved);
        Ok(listed)
    }

    /// Runs a function that reads the model directories, one at a time.
    async fn look_at_dirs<T: Send + 'static>(
        &self,
        look: impl FnOnce(&ModelDirs, &Looks<Found>) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let turn = Arc::clone(&self.listing.turn).acquire_owned();
        let Ok(Ok(turn)) = tokio::time::timeout(LISTING_WAIT_MAX, turn).await else {
            return Err(failure::exhausted(
                "the model directories are being read for another caller; try again in a second",
                Duration::from_secs(1),
            ));
        };
        let (dirs, looks) = (Arc::clone(&self.dirs), Arc::clone(&self.listing.looks));
        let listing = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            look(&dirs, &looks)
        });
        listing.await.map_err(|_| failure::draining())
    }

    /// The files with their names; `fresh` lists them even if that was done a moment ago.
    pub(crate) async fn named_files(&self, fresh: bool) -> Result<Arc<[NamedFile]>, Failure> {
        if let Some(files) = self.listing.kept().filter(|_| !fresh) {
            return Ok(files);
        }
        // Whoever closes models of deleted files looks, too.
        self.origins.opened.notify_one();
        let (book, real_paths) = (self.declared(), Arc::clone(&self.listing.real));
        let asked = Arc::clone(&book);
        let naming = self.look_at_dirs(move |dirs, looks| {
            let (files, _) = dirs.list(looks);
            let real_paths = real_paths_of(dirs, &asked, &files, &real_paths);
            named(dirs, &asked, files, &real_paths)
        });
        let files: Arc<[NamedFile]> = naming.await?.into();
        let unserved = files.iter().filter(|named| !named.is_served());
        self.listing.tell(unserved.map(|named| &named.file));
        // Names of what was declared before are of no use to others.
        if Arc::ptr_eq(&book, &self.declared()) {
            let kept = Some((Instant::now(), Arc::clone(&files)));
            *self
                .listing
                .last
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = kept;
        }
        Ok(files)
    }

    /// All models that requests can name, sorted by name.
    ///
    /// # Errors
    /// As [`Service::list_files`].
    pub async fn available(&self) -> Result<Vec<Available>, Failure> {
        // The next request for one of these closes it.
        let name_of = |model: &Arc<LoadedModel>| model.name().to_owned();
        let deleted: Vec<String> = self.deleted().iter().map(name_of).collect();
        if !deleted.is_empty() {
            self.forget_listing();
        }
        let files = self.named_files(false).await?;
        let snapshot = self.engine.snapshot();
        let book = self.declared();
        let there = (snapshot.models.iter())
            .filter(|status| !deleted.iter().any(|name| name == status.model.name()));
        // A name that is an alias leads elsewhere, whatever was loaded under it before.
        let (hidden, loaded): (Vec<_>, Vec<_>) =
            there.partition(|status| book.is_alias(status.model.name()));
        let is_told = |named: &NamedFile| {
            // A copy has a name of its own while the file is loaded under the first one.
            let is_by = |name: &str| {
                let mut same = files.iter().filter(|f| f.file.real == named.file.real);
                same.any(|f| f.name == name)
            };
            let mut models = loaded.iter().map(|status| &status.model);
            models
                .any(|m| m.name() == named.name || m.path() == named.file.real && !is_by(m.name()))
        };
        let of_files = files
            .iter()
            .filter(|named| named.is_served() && !is_told(named));
        let of_files = of_files.map(|named| {
            // Asked for by the file's name, it is there under its hidden one.
            let of_it = |status: &&&ModelStatus| status.model.path() == named.file.real;
            Available {
                name: named.name.clone(),
                alias_of: None,
                place: match hidden.iter().find(of_it) {
                    Some(status) => Place::Loaded(Box::new((*status).clone())),
                    None => Place::OnDisk(Box::new(named.file.clone())),
                },
            }
        });
        let by_own_names = loaded.iter().map(|status| Available {
            name: status.model.name().to_owned(),
            alias_of: None,
            place: Place::Loaded(Box::new((*status).clone())),
        });
        let mut all: Vec<_> = by_own_names.chain(of_files).collect();
        let aliases = all.iter().flat_map(|model| {
            let aliases = book.aliases_of(&model.name).iter();
            aliases.map(|alias| Available {
                name: alias.clone(),
                alias_of: Some(model.name.clone()),
                place: model.place.clone(),
            })
        });
        let with_adapters = all.iter().flat_map(Available::with_adapters);
        let others: Vec<_> = aliases.chain(with_adapters).collect();
        all.extend(others);
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The model that a request with this name would use.
    ///
    /// # Errors
    /// NOT_FOUND with the available names, and those of [`Service::list_files`].
    pub async fn available_as(&self, name: &str) -> Result<Available, Failure> {
        let mut all = self.available().await?;
        let place = |name: &str| all.iter().position(|model| model.name == name);
        let short = || name.strip_suffix(DEFAULT_TAG);
        if let Some(at) = place(name).or_else(|| place(short()?)) {
            return Ok(all.swap_remove(at));
        }
        let files = all.iter().filter(|model| model.loaded().is_none());
        Err(self.unknown(name, files.map(Available::name)))
    }

    /// Discards the kept listing, so that the next lookup of a name lists again.
    pub fn forget_listing(&self) {
        let last = self.listing.last.lock();
        *last.unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The model with this name or alias, as its file is now: it is loaded if necessary, and loaded
    /// again if its file has changed. `field` names the name's field in error messages.
    ///
    /// # Errors
    /// NOT_FOUND with the available names, and those of a load.
    pub async fn model_at_first_use(
        self: &Arc<Self>,
        field: &str,
        name: &str,
        arrival: &Arrival,
    ) -> Result<Arc<LoadedModel>, Failure> {
        self.admit()?;
        let mut violations = Violations::default();
        model_name(field, name, &mut violations);
        violations.result()?;
        let book = self.declared();
        let asked = name;
        let name = self.without_adapters(name);
        let name = &*book.real_name(name);
        let short = name.strip_suffix(DEFAULT_TAG).unwrap_or(name);
        let short = &*book.real_name(short);
        if let Some(loaded) = self.loaded(&[name, short])
            && let Some(current) = self.as_its_file_is(loaded, arrival).await?
        {
            return Ok(current);
        }
        if let Some(model) = book.model(name).or_else(|| book.model(short)) {
            return self.declared_loaded(model, arrival).await;
        }
        let mut files = self.named_files(false).await?;
        let find = |files: &[NamedFile]| {
            let mut named = files.iter();
            let by_name = named.find(|f| f.name == name || f.name == short);
            by_name.or_else(|| hub_names::meant(name, files)).cloned()
        };
        let mut found = find(&files);
        if found.is_none() {
            files = self.named_files(true).await?;
            found = find(&files);
        }
        let Some(found) = found else {
            for name in [name, short] {
                if let Some(recalled) = self.recall(name, arrival).await? {
                    return Ok(recalled);
                }
            }
            return Err(self.unknown(asked, served_names(&files)));
        };
        // Others are opened all the same: the error of that says more, or there is none.
        if let Some(why @ (Unserved::Outside { .. } | Unserved::Nowhere { .. })) =
            &found.file.unserved
        {
            return Err(refusals::leads_away(&found.file.path, why));
        }
        // It may be there under another name, under which it holds its weights already.
        // Requests for the file ask for no adapter, and another model's name may have some.
        let same = |status: &&ModelStatus| {
            let model = &status.model;
            model.path() == found.file.real && model.adapters().is_empty()
        };
        let there = {
            let snapshot = self.engine.snapshot();
            let mut models = snapshot.models.iter();
            models.find(same).map(|status| Arc::clone(&status.model))
        };
        if let Some(there) = there
            && let Some(current) = self.as_its_file_is(there, arrival).await?
        {
            return Ok(current);
        }
        let opened = self.opened_at_first_use(&found.name, found.file.path, arrival);
        match opened.await {
            // It was closed since its file is gone.
            Err(failure) if failure.reason() == Reason::ModelUnloaded => {
                files = self.named_files(true).await?;
                match find(&files) {
                    Some(_) => Err(failure),
                    None => Err(self.unknown(asked, served_names(&files))),
                }
            }
            opened => opened,
        }
    }

    /// Checks that there is a model with this name or alias: loaded, declared or a file. `field`
    /// names the name's field in error messages.
    ///
    /// # Errors
    /// NOT_FOUND with the available names.
    pub async fn check_there(&self, field: &str, name: &str) -> Result<(), Failure> {
        self.admit()?;
        let mut violations = Violations::default();
        model_name(field, name, &mut violations);
        violations.result()?;
        let book = self.declared();
        let name = self.without_adapters(name);
        let short = name.strip_suffix(DEFAULT_TAG).unwrap_or(name);
        let names = [&*book.real_name(name), &*book.real_name(short)];
        let declared = names.iter().any(|name| book.model(name).is_some());
        if declared || self.loaded(&names).is_some() {
            return Ok(());
        }
        let files = self.named_files(true).await?;
        let is_there = served_names(&files).any(|file| names.contains(&file));
        match is_there || hub_names::meant(name, &files).is_some() {
            true => Ok(()),
            false => Err(self.unknown(name, served_names(&files))),
        }
    }

    fn loaded(&self, names: &[&str]) -> Option<Arc<LoadedModel>> {
        names.iter().find_map(|name| self.engine.model(name).ok())
    }

    /// The NOT_FOUND error for a name, with the available names.
    fn unknown<'a>(&self, name: &str, files: impl Iterator<Item = &'a str>) -> Failure {
        if let Some(dir) = self.dirs.unread(&self.listing.looks) {
            return refusals::directory_silent(name, dir, &self.dirs.why_silent(dir));
        }
        let snapshot: Arc<Snapshot> = self.engine.snapshot();
        let loaded = snapshot.models.iter().map(|status| status.model.name());
        let with_adapters = Self::names_with_adapters(&snapshot);
        let loaded = loaded.chain(with_adapters.iter().map(String::as_str));
        let unknown = refusals::no_such_model(name, loaded, files);
        match self.dirs.refused(&self.listing.looks) {
            Some((dir, why)) => refusals::beside_unreadable(unknown, dir, &why),
            None => unknown,
        }
    }
}

/// The names of the files that are offered as models.
fn served_names(files: &[NamedFile]) -> impl Iterator<Item = &str> {
    let served = files.iter().filter(|named| named.is_served());
    served.map(|named| named.name.as_str())
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
        let (files, is_whole) = dirs.list(&Looks::default());
        assert!(is_whole);
        let names: Vec<_> = named(&dirs, &Book::default(), files, &HashMap::new())
            .into_iter()
            .map(|f| f.name)
            .collect();
        // The last one's names are both taken by then.
        let [first @ .., last] = &names[..] else {
            panic!()
        };
        assert_eq!(first, ["m", "b/c-d/m", "n"]);
        assert!(last.starts_with("m@"), "{last}");
    }
}
