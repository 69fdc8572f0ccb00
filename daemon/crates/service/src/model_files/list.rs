//! The GGUF files below the model directories, for clients that choose one.
//!
//! *Invariants* (tests below): a link counts only if what it leads to lies below a model directory,
//! and directories behind links are not entered, so that the walk ends; it looks at no more than
//! [`ENTRIES_MAX`] entries of a model directory.

use std::collections::HashMap;
use std::fs::{DirEntry, Metadata};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rocmforge_gguf::PartName;

use super::ModelDirs;
use crate::looks::Looks;

/// Directories below a model directory that are entered, one in the other.
const DEPTH_MAX: usize = 8;
/// Entries of directories that are looked at.
const ENTRIES_MAX: usize = 1 << 16;
/// Files that are listed.
pub const FILES_MAX: usize = 4096;

/// What there is below a model directory.
#[derive(Debug, Default)]
pub(crate) struct Found {
    files: Vec<ModelFile>,
    /// Whether these are all.
    is_whole: bool,
    /// Why the directory itself cannot be read.
    refused: Option<String>,
}

/// A file that could be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFile {
    /// Where it is, as below the model directory; may be a link.
    pub path: PathBuf,
    /// What that leads to.
    pub real: PathBuf,
    /// Its size; of a split model, listed by its first part, that of all parts.
    pub bytes: u64,
    /// When it was last changed, in milliseconds since 1970.
    pub mtime_unix_ms: i64,
}

impl ModelDirs {
    /// The files whose names end in `.gguf`, by path, a split model once, and whether these are
    /// all. Blocks on the file system, for three seconds a model directory at most; call it on a
    /// blocking thread. What cannot be read is left out; of a directory that does not answer there
    /// is what it had before.
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
        files.dedup();
        is_whole &= files.len() <= FILES_MAX;
        files.truncate(FILES_MAX);
        (fold_parts(files), is_whole)
    }

    /// A model directory that has not answered yet.
    pub(crate) fn unread(&self, looks: &Looks<Found>) -> Option<&Path> {
        let unread = self.real().find(|dir| !looks.has_found(dir));
        self.silent().next().or(unread)
    }

    /// A model directory that was looked at and could not be read, and why.
    pub(crate) fn refused(&self, looks: &Looks<Found>) -> Option<(&Path, String)> {
        let mut dirs = self.real();
        dirs.find_map(|dir| Some((dir, looks.found(dir)?.refused.clone()?)))
    }

    /// What there is below a directory.
    fn walk(&self, root: &Path, entries_max: usize) -> Found {
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
                let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
                if !is_dir {
                    files.extend(self.file(&entry));
                } else if depth < DEPTH_MAX {
                    dirs.push((entry.path(), depth + 1));
                } else {
                    is_whole = false;
                }
            }
        }
        Found {
            files,
            is_whole,
            refused,
        }
    }

    fn file(&self, entry: &DirEntry) -> Option<ModelFile> {
        let path = entry.path();
        if !path.extension()?.eq_ignore_ascii_case("gguf") {
            return None;
        }
        let real = path.canonicalize().ok().filter(|real| self.holds(real))?;
        let metadata = std::fs::metadata(&real).ok().filter(Metadata::is_file)?;
        Some(ModelFile {
            bytes: metadata.len(),
            mtime_unix_ms: mtime_unix_ms(&metadata),
            path,
            real,
        })
    }
}

/// Counts the parts of a split model to its first one. Parts without it stay as they are.
fn fold_parts(files: Vec<ModelFile>) -> Vec<ModelFile> {
    let parts: Vec<Option<PartName>> = files.iter().map(|f| PartName::of(&f.path)).collect();
    let firsts = files.iter().zip(&parts).enumerate();
    let firsts: HashMap<PathBuf, usize> = firsts
        .filter(|(_, (_, part))| part.as_ref().is_some_and(|part| part.number() == 1))
        .map(|(index, (file, _))| (file.path.clone(), index))
        .collect();
    let mut folded: Vec<Option<ModelFile>> = files.into_iter().map(Some).collect();
    for (index, part) in parts.iter().enumerate() {
        let first = part.as_ref().filter(|part| part.number() > 1);
        let Some(&first) = first.and_then(|part| firsts.get(&part.path(1))) else {
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
    /// The path as text; `None` for one that no request can name.
    pub fn name(&self) -> Option<&str> {
        Path::to_str(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn names(dirs: &ModelDirs) -> Vec<String> {
        let (files, is_whole) = dirs.list(&Looks::default());
        assert!(is_whole);
        let name = |file: &ModelFile| file.path.file_name().unwrap().to_str().unwrap().to_owned();
        files.iter().map(name).collect()
    }

    #[test]
    fn links_count_by_what_they_lead_to_and_their_directories_are_not_entered() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (inside, outside) = (inside.path(), outside.path());
        fs::create_dir(inside.join("below")).unwrap();
        fs::write(inside.join("below/real.gguf"), "x").unwrap();
        fs::write(outside.join("secret.gguf"), "x").unwrap();
        symlink(inside.join("below/real.gguf"), inside.join("link.gguf")).unwrap();
        symlink(outside.join("secret.gguf"), inside.join("out.gguf")).unwrap();
        symlink(outside.join("absent.gguf"), inside.join("dangling.gguf")).unwrap();
        symlink(outside, inside.join("dir.gguf")).unwrap();
        // A walk that entered this one would not end.
        symlink(inside, inside.join("below/loop")).unwrap();
        let dirs = ModelDirs::new(&[inside.to_owned()]).unwrap();
        assert_eq!(names(&dirs), ["real.gguf", "link.gguf"]);
        // It counts where the other directory is one of models, too.
        let dirs = ModelDirs::new(&[inside.to_owned(), outside.to_owned()]).unwrap();
        let mut names = names(&dirs);
        names.sort();
        assert_eq!(names, ["link.gguf", "out.gguf", "real.gguf", "secret.gguf"]);
    }

    #[test]
    fn a_directory_that_cannot_be_read_is_told_from_an_empty_one() {
        let (gone, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let dirs = ModelDirs::new(&[empty.path().to_owned(), gone.path().to_owned()]).unwrap();
        let looks = Looks::default();
        assert_eq!(dirs.list(&looks), (Vec::new(), true));
        assert!(dirs.refused(&looks).is_none());
        // As without a right to read it, which root would have.
        let root = gone.path().canonicalize().unwrap();
        gone.close().unwrap();
        assert_eq!(dirs.list(&looks), (Vec::new(), false));
        let (dir, why) = dirs.refused(&looks).unwrap();
        assert!(dir == root && why.contains("No such file"), "{why}");
    }

    #[test]
    fn the_walk_looks_at_a_bounded_number_of_entries() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..5 {
            let below = dir.path().join(format!("d{i}"));
            fs::create_dir(&below).unwrap();
            fs::write(below.join("m.gguf"), "x").unwrap();
        }
        let dirs = ModelDirs::new(&[dir.path().to_owned()]).unwrap();
        let found = dirs.walk(dir.path(), 10);
        assert!(found.is_whole && found.files.len() == 5, "{found:?}");
        // The directories themselves, and the files of two of them.
        let found = dirs.walk(dir.path(), 7);
        assert!(!found.is_whole && found.files.len() == 2, "{found:?}");
    }
}
