//! The GGUF files below the model directories, for clients that choose one.
//!
//! Files that are not models themselves (`unserved.rs`) are listed separately, with the reason:
//! links that lead out of the model directories, projectors, adapters, parts without the others.
//! Hidden files are left out.
//!
//! *Invariants* (tests below): a link counts only if what it leads to lies below a model directory,
//! and directories behind links are not entered, so that the walk ends; it looks at no more than
//! [`ENTRIES_MAX`] entries of a model directory.

use std::collections::{HashMap, HashSet};
use std::fs::{DirEntry, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use rocmforge_engine::supported_architectures;
use rocmforge_gguf::{Glance, OtherUse, PartName};

use super::hub::{HubPlace, Refs, is_inner};
use super::links::Leads;
use super::{DirState, FILES_MAX, ModelDirs, Unserved};
use crate::looks::Looks;

/// Maximum depth of directories below a model directory.
const DEPTH_MAX: usize = 8;
/// Maximum number of directory entries that are examined.
const ENTRIES_MAX: usize = 1 << 16;
/// Maximum time in which one listing of a directory reads new headers. Files with unread headers
/// count as models until a later listing has read them.
const HEADERS_MAX: Duration = Duration::from_millis(1500);

/// Contents of a model directory.
#[derive(Debug, Default)]
pub(crate) struct Found {
    files: Vec<ModelFile>,
    /// Whether the listing is complete.
    is_whole: bool,
    /// The error, if the directory itself cannot be read.
    refused: Option<String>,
}

/// A file that could be loaded as a model, or one that looks like it and cannot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFile {
    /// Path of the file below the model directory; may be a link.
    pub path: PathBuf,
    /// The path with links resolved; for a link that leads nowhere or out of the directories, the
    /// path itself.
    pub real: PathBuf,
    /// Size of the file in bytes; for a split model, listed by its first part, the size of all
    /// parts.
    pub bytes: u64,
    /// Modification time of the file, in milliseconds since 1970.
    pub mtime_unix_ms: i64,
    /// Why the file is not offered as a model; `None` if it is.
    pub unserved: Option<Unserved>,
    /// Place of the file in a Hugging Face cache.
    pub(crate) hub: Option<HubPlace>,
    /// Number and count of the part, if the file's name is that of a part.
    part: Option<PartName>,
}

impl ModelDirs {
    /// The files whose names end in `.gguf`, by path, a split model once, and whether these are
    /// all. Blocks on the file system, for at most three seconds for each model directory; call it
    /// on a blocking thread. Unreadable entries are left out; for a directory that does not
    /// respond, the previous listing is used.
    pub(crate) fn list(&self, looks: &Looks<Found>) -> (Vec<ModelFile>, bool) {
        let mut files = Vec::new();
        self.ask_again();
        let mut is_whole = self.silent().next().is_none();
        for dir in self.real() {
            let (dirs, root) = (self.clone(), dir.to_owned());
            let (found, is_fresh) = looks.look(dir, move || dirs.walk(&root, ENTRIES_MAX));
            if !is_fresh {
                tracing::warn!(dir = ?dir, "a model directory does not answer, or is slow");
            }
            is_whole &= is_fresh && found.as_ref().is_some_and(|found| found.is_whole);
            if let Some(found) = found {
                files.extend_from_slice(&found.files);
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        // A model directory may lie below another.
        files.dedup_by(|a, b| a.path == b.path);
        is_whole &= files.len() <= FILES_MAX;
        files.truncate(FILES_MAX);
        (once_a_revision(files), is_whole)
    }

    /// The files that are not offered as models, with the reasons, and the state of each directory.
    /// Blocks on the file system.
    pub fn unserved(&self) -> (Vec<ModelFile>, Vec<DirState>) {
        let looks = Looks::default();
        let (mut files, _) = self.list(&looks);
        files.retain(|file| file.unserved.is_some());
        (files, self.states(|dir| self.refusal_of(&looks, dir)))
    }

    /// Why a model directory could not be read at its last listing.
    pub(crate) fn refusal_of(&self, looks: &Looks<Found>, dir: &Path) -> Option<String> {
        looks.found(dir)?.refused.clone()
    }

    /// A model directory that has not been listed yet.
    pub(crate) fn unread(&self, looks: &Looks<Found>) -> Option<&Path> {
        let unread = self.real().find(|dir| !looks.has_found(dir));
        self.silent().find(|dir| !self.is_away(dir)).or(unread)
    }

    /// A model directory that cannot be read or is not there, and why.
    pub(crate) fn refused(&self, looks: &Looks<Found>) -> Option<(&Path, String)> {
        let mut dirs = self.real();
        let refused = dirs.find_map(|dir| Some((dir, self.refusal_of(looks, dir)?)));
        let mut away = self.silent().filter(|dir| self.is_away(dir));
        refused.or_else(|| away.next().map(|dir| (dir, self.why_silent(dir))))
    }

    /// Lists the contents of a model directory.
    fn walk(&self, root: &Path, entries_max: usize) -> Found {
        let mut walk = Walk {
            dirs: self,
            until: Instant::now() + HEADERS_MAX,
            refs: Refs::default(),
        };
        let mut files = Vec::new();
        let mut entries = 0;
        let mut dirs: Vec<(PathBuf, usize)> = vec![(root.to_owned(), 0)];
        let (mut is_whole, mut refused) = (true, None);
        'walk: while let Some((dir, depth)) = dirs.pop() {
            let found = match std::fs::read_dir(&dir) {
                Ok(found) => found,
                Err(error) if depth == 0 => {
                    is_whole = false;
                    refused = Some(super::dirs::refusal(&error));
                    continue;
                }
                Err(_) => continue,
            };
            for entry in found.flatten() {
                if entries >= entries_max || files.len() >= FILES_MAX {
                    is_whole = false;
                    break 'walk;
                }
                entries += 1;
                // Trash, partial downloads, what macOS keeps beside files.
                if entry.file_name().as_encoded_bytes().starts_with(b".") {
                    continue;
                }
                let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
                if !is_dir {
                    files.extend(walk.file(&entry));
                } else if depth >= DEPTH_MAX {
                    is_whole = false;
                } else if !is_inner(&entry.path()) {
                    dirs.push((entry.path(), depth + 1));
                }
            }
        }
        walk.judge_parts(&mut files, is_whole);
        Found {
            files: fold_parts(files),
            is_whole,
            refused,
        }
    }
}

/// State of a listing of one model directory.
struct Walk<'a> {
    dirs: &'a ModelDirs,
    /// Time after which no further headers are read.
    until: Instant,
    refs: Refs,
}

impl Walk<'_> {
    fn file(&mut self, entry: &DirEntry) -> Option<ModelFile> {
        let path = entry.path();
        let is_link = entry.file_type().is_ok_and(|kind| kind.is_symlink());
        let is_model = path.extension();
        let is_model = is_model.is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        if !is_model && !is_link {
            return None;
        }
        let real = path.canonicalize().ok();
        let Some(real) = real.filter(|real| self.dirs.holds(real)) else {
            let unserved = match self.dirs.leads(&path) {
                Leads::Out(target) => Unserved::Outside {
                    target,
                    is_file: is_model,
                },
                Leads::Nowhere(target) if is_model => Unserved::Nowhere { target },
                Leads::Nowhere(_) | Leads::Inside => return None,
            };
            return Some(self.described(path.clone(), path, None, Some(unserved)));
        };
        let metadata = std::fs::metadata(&real).ok().filter(Metadata::is_file)?;
        if !is_model {
            return None;
        }
        let part = PartName::of(&path);
        let unserved = match part {
            // Judged once all of them are known.
            Some(_) => None,
            None => self.unserved(&path, &real),
        };
        let mut file = self.described(path, real, part, unserved);
        (file.bytes, file.mtime_unix_ms) = (metadata.len(), mtime_unix_ms(&metadata));
        Some(file)
    }

    fn described(
        &mut self,
        path: PathBuf,
        real: PathBuf,
        part: Option<PartName>,
        unserved: Option<Unserved>,
    ) -> ModelFile {
        ModelFile {
            hub: self.refs.place_of(&path),
            path,
            real,
            bytes: 0,
            mtime_unix_ms: 0,
            unserved,
            part,
        }
    }

    /// Why a file that is not a part is not offered; `None` if it is.
    fn unserved(&self, path: &Path, real: &Path) -> Option<Unserved> {
        let name = path.file_name().unwrap_or_default();
        if Instant::now() >= self.until {
            let is_projector = name.to_string_lossy().starts_with("mmproj");
            return is_projector.then_some(Unserved::OtherUse(OtherUse::Projector));
        }
        match self.dirs.headers.glance(real, false) {
            Ok(glance) => of_header(glance?),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Some(Unserved::Unreadable)
            }
            // Who opens it is told.
            Err(_) => None,
        }
    }

    /// Marks parts whose other parts are missing, and unmarks whole files with a part's name. If
    /// the listing is incomplete, missing parts may exist.
    fn judge_parts(&mut self, files: &mut [ModelFile], is_whole: bool) {
        let there: HashSet<PathBuf> = files.iter().map(|file| file.path.clone()).collect();
        for file in files {
            let Some(part) = &file.part else { continue };
            let Ok(paths) = part.paths() else { continue };
            let n_there = paths.filter(|path| there.contains(path)).count();
            let (number, count) = (part.number(), part.count());
            let n_there = u32::try_from(n_there).unwrap_or(count);
            let is_complete = n_there == count;
            if is_complete && number > 1 {
                continue;
            }
            let (first, is_read) = (part.path(1), Instant::now() < self.until);
            // Of a complete model what the first part says counts, and is read without its end.
            let glance = match is_read {
                true => self.dirs.headers.glance(&file.real, !is_complete),
                false => Ok(None),
            };
            let glance = match glance {
                Ok(glance) => glance,
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    file.unserved = Some(Unserved::Unreadable);
                    continue;
                }
                Err(_) => None,
            };
            let is_one = glance
                .as_ref()
                .is_some_and(|glance| glance.split_count == 1);
            if is_one && !is_complete {
                file.part = None;
            }
            file.unserved = match glance.and_then(of_header) {
                // A part without tensors is no vocabulary.
                Some(Unserved::OtherUse(OtherUse::Vocabulary)) if file.part.is_some() => None,
                told => told,
            };
            if file.part.is_none() || is_complete || !is_whole || !is_read {
                continue;
            }
            file.unserved = Some(match number {
                1 => Unserved::MissingParts {
                    count,
                    there: n_there,
                },
                _ => Unserved::NoFirstPart {
                    number,
                    count,
                    first,
                },
            });
        }
    }
}

/// Why a file with this header is not offered as a model; `None` if it is.
fn of_header(glance: Glance) -> Option<Unserved> {
    if let Some(other) = glance.other_use {
        return Some(Unserved::OtherUse(other));
    }
    let name = glance.architecture?;
    let is_supported = supported_architectures().any(|known| known == name);
    (!is_supported).then_some(Unserved::Architecture(name))
}

/// Adds the sizes of a split model's parts to its first one, and drops the others. Parts without a
/// first one stay.
fn fold_parts(files: Vec<ModelFile>) -> Vec<ModelFile> {
    let is_first = |file: &ModelFile| file.part.as_ref().is_some_and(|part| part.number() == 1);
    let firsts = files.iter().enumerate().filter(|(_, file)| is_first(file));
    let firsts: HashMap<PathBuf, usize> = firsts
        .map(|(index, file)| (file.path.clone(), index))
        .collect();
    let mut folded: Vec<Option<ModelFile>> = files.into_iter().map(Some).collect();
    for index in 0..folded.len() {
        let part = folded[index].as_ref().and_then(|file| file.part.as_ref());
        let later = part.filter(|part| part.number() > 1);
        let Some(&first) = later.and_then(|part| firsts.get(&part.path(1))) else {
            continue;
        };
        if let Some(gone) = folded[index].take()
            && let Some(first) = &mut folded[first]
        {
            first.bytes += gone.bytes;
            first.mtime_unix_ms = first.mtime_unix_ms.max(gone.mtime_unix_ms);
        }
    }
    folded.into_iter().flatten().collect()
}

/// Drops identical files of several revisions in a cache, except in `main` or the first one.
fn once_a_revision(files: Vec<ModelFile>) -> Vec<ModelFile> {
    let key = |file: &ModelFile| {
        let hub = file.hub.as_ref()?;
        Some((hub.repo.clone(), hub.below.clone(), file.real.clone()))
    };
    let mut kept = HashMap::new();
    for (index, file) in files.iter().enumerate() {
        let Some(key) = key(file) else { continue };
        let is_main = file.hub.as_ref().is_some_and(|hub| !hub.is_other);
        let best = kept.entry(key).or_insert((index, is_main));
        if is_main && !best.1 {
            *best = (index, true);
        }
    }
    let is_kept = |(index, file): &(usize, ModelFile)| {
        let best = key(file).and_then(|key| kept.get(&key));
        best.is_none_or(|(best, _)| best == index)
    };
    let all = files.into_iter().enumerate().filter(is_kept);
    all.map(|(_, file)| file).collect()
}

fn mtime_unix_ms(metadata: &Metadata) -> i64 {
    let since = metadata
        .modified()
        .ok()
        .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| {
        i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
    })
}

impl ModelFile {
    /// The path for display; bytes that are not UTF-8 are replaced.
    pub fn shown(&self) -> String {
        self.path.display().to_string()
    }
}

#[cfg(test)]
#[path = "list_tests.rs"]
mod tests;
