//! The layout of a Hugging Face cache, so that a model directory may be one, or a part of one.
//!
//! ```text
//! hub/models--OWNER--REPO/refs/main                    the commit that `main` is
//!                         snapshots/COMMIT/FILE.gguf   a link to ../../blobs/HASH
//!                         blobs/HASH                   the bytes
//! ```
//!
//! A snapshot that is given as a model directory leads to blobs beside it: those count as below it.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Prefix of the directory of a repository of models.
const REPO_PREFIX: &str = "models--";
/// Number of characters of a commit that a name shows if the commit has no reference.
const SHORT_COMMIT: usize = 7;
/// Maximum number of references of a repository that are read.
const REFS_MAX: usize = 64;
const REF_BYTES_MAX: u64 = 128;

/// The place of a file in a Hugging Face cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HubPlace {
    /// `OWNER/REPO`, or `REPO` without an owner.
    pub(crate) repo: String,
    /// Name of the file's revision: its reference, else the beginning of its commit.
    pub(crate) revision: String,
    /// Whether this revision is not the one of `refs/main`.
    pub(crate) is_other: bool,
    /// Path of the file below its snapshot.
    pub(crate) below: PathBuf,
}

/// Splits a path in a cache into the repository's directory, the commit, and the steps below it.
fn split(path: &Path) -> Option<(PathBuf, &str, Vec<Component<'_>>)> {
    let parts: Vec<_> = path.components().collect();
    let is_repo = |part: &Component<'_>| {
        let name = part.as_os_str().to_str();
        name.is_some_and(|name| name.len() > REPO_PREFIX.len() && name.starts_with(REPO_PREFIX))
    };
    let at = parts.iter().rposition(is_repo)?;
    let name = parts[at].as_os_str().to_str()?;
    let dir = parts[..=at].iter().collect();
    Some((dir, name, parts[at + 1..].to_vec()))
}

/// The directory of the blobs to which a model directory's links lead, if that is in a repository
/// of a Hugging Face cache.
pub(super) fn blobs_beside(real: &Path) -> Option<PathBuf> {
    let (repo, _, behind) = split(real)?;
    let is_snapshots = behind.first()?.as_os_str() == "snapshots";
    let blobs = is_snapshots.then(|| repo.join("blobs"))?;
    let real = blobs.canonicalize().ok()?;
    real.is_dir().then_some(real)
}

/// Whether a directory of a cache is internal (blobs or references) and is not listed.
pub(super) fn is_inner(dir: &Path) -> bool {
    let name = dir.file_name().and_then(|name| name.to_str());
    let parent = dir.parent().and_then(Path::file_name);
    let is_repo = parent.is_some_and(|name| name.to_string_lossy().starts_with(REPO_PREFIX));
    is_repo && matches!(name, Some("blobs" | "refs"))
}

/// The references of repositories, each read once.
#[derive(Debug, Default)]
pub(super) struct Refs(HashMap<PathBuf, HashMap<String, String>>);

impl Refs {
    /// The place of a file, if its path lies in a cache.
    pub(super) fn place_of(&mut self, path: &Path) -> Option<HubPlace> {
        let (dir, name, behind) = split(path)?;
        let [snapshots, commit, below @ ..] = &behind[..] else {
            return None;
        };
        if snapshots.as_os_str() != "snapshots" || below.is_empty() {
            return None;
        }
        let commit = commit.as_os_str().to_str()?;
        let refs = self.0.entry(dir).or_insert_with_key(|dir| read(dir));
        let main = refs.get("main");
        let short = || commit.chars().take(SHORT_COMMIT).collect();
        // Several references may be one commit: the first by name, for the sake of a stable one.
        let named = refs.iter().filter(|(_, of)| *of == commit);
        let revision = named.map(|(name, _)| name).min().cloned();
        Some(HubPlace {
            repo: name[REPO_PREFIX.len()..].replacen("--", "/", 1),
            revision: revision.unwrap_or_else(short),
            is_other: main.is_some_and(|main| main != commit),
            below: below.iter().collect(),
        })
    }
}

/// The commit of each reference of a repository; references in subdirectories, such as pull
/// requests, are ignored.
fn read(repo: &Path) -> HashMap<String, String> {
    let Ok(found) = std::fs::read_dir(repo.join("refs")) else {
        return HashMap::new();
    };
    let read = |path: &Path| {
        let mut commit = String::new();
        let file = std::fs::File::open(path).ok()?;
        file.take(REF_BYTES_MAX).read_to_string(&mut commit).ok()?;
        Some(commit.trim().to_owned())
    };
    let files = found.flatten().take(REFS_MAX);
    let files = files.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    let refs = files.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        Some((name, read(&entry.path())?))
    });
    refs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_off_the_path_and_the_references() {
        let root = tempfile::tempdir().unwrap();
        let repo = root.path().join("models--o--r--x");
        std::fs::create_dir_all(repo.join("refs/pr")).unwrap();
        std::fs::write(repo.join("refs/main"), "0123456789\n").unwrap();
        std::fs::write(repo.join("refs/v1"), "abcdef").unwrap();
        let mut refs = Refs::default();
        let mut place = |path: &str| {
            let place = refs.place_of(&repo.join(path))?;
            assert_eq!(place.repo, "o/r--x");
            Some((place.revision, place.is_other, place.below))
        };
        let of = |revision: &str, is_other, below: &str| {
            Some((revision.to_owned(), is_other, PathBuf::from(below)))
        };
        assert_eq!(
            place("snapshots/0123456789/q/m.gguf"),
            of("main", false, "q/m.gguf")
        );
        assert_eq!(place("snapshots/abcdef/m.gguf"), of("v1", true, "m.gguf"));
        assert_eq!(
            place("snapshots/fedcba9876/m.gguf"),
            of("fedcba9", true, "m.gguf")
        );
        for none in ["snapshots/0123456789", "blobs/m.gguf", "m.gguf", ""] {
            assert_eq!(place(none), None, "{none}");
        }
        assert!(is_inner(&repo.join("blobs")) && is_inner(&repo.join("refs")));
        assert!(!is_inner(&repo.join("snapshots")) && !is_inner(&root.path().join("blobs")));
        let ownerless = root.path().join("models--gpt2/snapshots/a/m.gguf");
        let found = refs.place_of(&ownerless).unwrap();
        assert_eq!((found.repo.as_str(), found.is_other), ("gpt2", false));
    }
}
