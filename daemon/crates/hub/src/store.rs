//! A model directory as downloads use it: places for files, deleted files, copies, room.
//!
//! *Invariant:* nothing is written or deleted outside of the directory, whatever links lie in it
//! (test `links_lead_nobody_out_of_the_directory`).

use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use nix::sys::statvfs::statvfs;
use rocmforge_gguf::PartName;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::checksum::hex;
use crate::error::Error;
use crate::source::checked_path;
use crate::spans::replace;
use crate::transfer::{Item, with_end};

/// Longest note that is read, bytes.
const NOTE_MAX: u64 = 1 << 16;
/// Directory of copies.
const COPIES: &str = "copies";

/// Bytes of the file system that a directory lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Room {
    /// Size of the disk.
    pub total_bytes: u64,
    /// Bytes that the daemon's user may still write.
    pub free_bytes: u64,
}

/// Free and total space of the disk of `dir`.
///
/// # Errors
/// [`Error::Io`].
pub fn room(dir: &Path) -> Result<Room, Error> {
    let found = statvfs(dir).map_err(|error| Error::io(dir, error.into()))?;
    let block = found.fragment_size();
    Ok(Room {
        total_bytes: found.blocks().saturating_mul(block),
        free_bytes: found.blocks_available().saturating_mul(block),
    })
}

/// The source of a downloaded file, kept in a file beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Note {
    /// The source that was requested.
    pub(crate) source: String,
    pub(crate) url: String,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
    pub(crate) etag: Option<String>,
    /// When the file was last changed, in nanoseconds since 1970: another file has other bytes.
    pub(crate) mtime_ns: i128,
}

fn note_path(file: &Path) -> PathBuf {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    // A hidden file is no model.
    file.with_file_name(format!(".{name}.origin"))
}

fn mtime_ns(file: &Path) -> io::Result<i128> {
    let found = std::fs::metadata(file)?;
    Ok(i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec()))
}

/// Writes down where a file came from; without it the next download reads the file to know it.
pub(crate) fn note(
    item: &Item,
    source: &str,
    url: String,
    sha256: String,
    etag: Option<String>,
) -> io::Result<()> {
    let note = Note {
        source: source.to_owned(),
        url,
        bytes: item.bytes,
        sha256,
        etag,
        mtime_ns: mtime_ns(&item.dest)?,
    };
    replace(&note_path(&item.dest), &serde_json::to_vec(&note)?)
}

/// The note of a file that has not changed since it was downloaded.
pub(crate) fn noted(file: &Path) -> Option<Note> {
    let mut text = Vec::new();
    let opened = std::fs::File::open(note_path(file)).ok()?;
    opened.take(NOTE_MAX).read_to_end(&mut text).ok()?;
    let note: Note = serde_json::from_slice(&text).ok()?;
    let is_same =
        std::fs::metadata(file).ok()?.len() == note.bytes && mtime_ns(file).ok()? == note.mtime_ns;
    is_same.then_some(note)
}

/// Whether a file is there as the hub has it. Reads all of it where nobody has noted its checksum.
pub(crate) fn is_current(item: &Item, etag: Option<&str>) -> bool {
    let is_as_long = std::fs::metadata(&item.dest)
        .is_ok_and(|found| found.is_file() && found.len() == item.bytes);
    if !is_as_long {
        return false;
    }
    match (&item.sha256, noted(&item.dest)) {
        (Some(expected), Some(note)) => note.sha256 == *expected,
        (Some(expected), None) => sha256_of(&item.dest).is_ok_and(|found| found == *expected),
        (None, Some(note)) => note.etag.is_some() && note.etag.as_deref() == etag,
        (None, None) => false,
    }
}

fn sha256_of(path: &Path) -> io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&buffer[..n]),
        }
    }
}

/// The directory as it really is.
fn real(dir: &Path) -> Result<PathBuf, Error> {
    dir.canonicalize().map_err(|error| Error::io(dir, error))
}

/// The path of a file below `dir`, whose directories are made.
pub(crate) fn place(dir: &Path, below: &str) -> Result<PathBuf, Error> {
    let root = real(dir)?;
    let bad = |why: String| Error::BadName {
        name: below.chars().take(120).collect(),
        why,
    };
    let (dirs, name) = below.rsplit_once('/').unwrap_or(("", below));
    let mut at = root.clone();
    for part in dirs.split('/').filter(|part| !part.is_empty()) {
        checked_path(part).map_err(bad)?;
        at.push(part);
        match std::fs::create_dir(&at) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::io(&at, error));
            }
            Ok(()) | Err(_) => {}
        }
        at = real(&at)?;
        if !at.starts_with(&root) {
            return Err(bad(format!("a link in {} leads out of it", root.display())));
        }
    }
    checked_path(name).map_err(bad)?;
    Ok(at.join(name))
}

/// The file that `named` is, below `dir`: not a link's target, but itself.
fn below(dir: &Path, named: &Path) -> Result<PathBuf, Error> {
    let root = real(dir)?;
    let none = || Error::NoFile {
        path: named.to_owned(),
        dir: root.clone(),
    };
    let is_plain = named
        .components()
        .all(|part| !matches!(part, Component::ParentDir));
    let path = root.join(named);
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(none());
    };
    let parent = parent.canonicalize().map_err(|_| none())?;
    let is_model = path
        .extension()
        .is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
    match is_plain && is_model && parent.starts_with(&root) {
        true => Ok(parent.join(name)),
        false => Err(none()),
    }
}

/// Files that were deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// The files.
    pub files: Vec<PathBuf>,
    /// Bytes of the deleted files; links count as none.
    pub bytes: u64,
}

/// Deletes a model file, all parts of a split one, and what unfinished downloads have left of it. A
/// link is deleted, not what it leads to. Directories that become empty go, too. Blocks on the file
/// system.
///
/// # Errors
/// [`Error::NoFile`], [`Error::Io`].
pub fn remove(dir: &Path, named: &Path) -> Result<Removed, Error> {
    let path = below(dir, named)?;
    let parts = match PartName::of(&path) {
        Some(part) => part
            .paths()
            .map(Iterator::collect)
            .unwrap_or_else(|_| vec![path.clone()]),
        None => vec![path.clone()],
    };
    let mut removed = Removed::default();
    for part in parts {
        if let Ok(found) = std::fs::symlink_metadata(&part)
            && !found.is_dir()
        {
            std::fs::remove_file(&part).map_err(|error| Error::io(&part, error))?;
            removed.bytes += if found.is_file() { found.len() } else { 0 };
            removed.files.push(part.clone());
        }
        for left in [
            with_end(&part, ".part"),
            with_end(&part, ".part.json"),
            note_path(&part),
        ] {
            if std::fs::remove_file(&left).is_ok()
                && left.extension().is_some_and(|end| end == "part")
            {
                removed.files.push(left);
            }
        }
    }
    if removed.files.is_empty() {
        return Err(Error::NoFile {
            path: named.to_owned(),
            dir: dir.to_owned(),
        });
    }
    let root = real(dir)?;
    let mut above = path.parent();
    while let Some(empty) = above.filter(|above| *above != root && above.starts_with(&root)) {
        // One that is not empty stays.
        if std::fs::remove_dir(empty).is_err() {
            break;
        }
        above = empty.parent();
    }
    Ok(removed)
}

/// Makes a model file known under a second name: a link in `copies`. Blocks on the file system.
///
/// # Errors
/// [`Error::NoFile`], [`Error::BadName`], [`Error::Exists`], [`Error::Io`].
pub fn copy(dir: &Path, named: &Path, name: &str) -> Result<PathBuf, Error> {
    let path = below(dir, named)?;
    if PartName::of(&path).is_some() {
        return Err(Error::BadName {
            name: name.chars().take(120).collect(),
            why: "a split model has one name; merge its parts with gguf-split first".to_owned(),
        });
    }
    checked_path(name).map_err(|why| Error::BadName {
        name: name.chars().take(120).collect(),
        why,
    })?;
    let target = path
        .canonicalize()
        .map_err(|error| Error::io(&path, error))?;
    let link = place(
        dir,
        &format!(
            "{COPIES}/{}.gguf",
            name.strip_suffix(":latest").unwrap_or(name)
        ),
    )?;
    let up = link
        .strip_prefix(real(dir)?)
        .map_or(1, |below| below.components().count())
        - 1;
    let from_root = target.strip_prefix(real(dir)?);
    let to = match from_root {
        // So that the directory may be moved.
        Ok(below) => (0..up)
            .map(|_| Path::new(".."))
            .collect::<PathBuf>()
            .join(below),
        Err(_) => target,
    };
    match std::os::unix::fs::symlink(to, &link) {
        Ok(()) => Ok(link),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(Error::Exists { path: link })
        }
        Err(error) => Err(Error::io(&link, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_lead_nobody_out_of_the_directory() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let victim = outside.path().join("m.gguf");
        std::fs::write(&victim, "x").unwrap();
        symlink(outside.path(), root.path().join("owner")).unwrap();
        assert!(matches!(
            place(root.path(), "owner/r/m.gguf"),
            Err(Error::BadName { .. })
        ));
        assert!(
            std::fs::read_dir(outside.path()).unwrap().count() == 1,
            "no directory was made"
        );
        for named in [
            "owner/m.gguf",
            "../m.gguf",
            "x/../../m.gguf",
            "/etc/hosts.gguf",
            "missing.gguf",
            "owner",
        ] {
            let refused = remove(root.path(), Path::new(named));
            assert!(
                matches!(refused, Err(Error::NoFile { .. })),
                "{named}: {refused:?}"
            );
        }
        assert!(remove(root.path(), &victim).is_err());
        symlink(&victim, root.path().join("l.gguf")).unwrap();
        remove(root.path(), Path::new("l.gguf")).unwrap();
        assert!(victim.exists(), "the link went, not the file");
    }

    #[test]
    fn a_split_model_goes_with_its_parts_and_leftovers() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("o/r");
        std::fs::create_dir_all(&dir).unwrap();
        for file in [
            "m-00001-of-00002.gguf",
            "m-00002-of-00002.gguf",
            "m-00002-of-00002.gguf.part",
            "m-00002-of-00002.gguf.part.json",
            ".m-00001-of-00002.gguf.origin",
        ] {
            std::fs::write(dir.join(file), "12345").unwrap();
        }
        let removed = remove(root.path(), Path::new("o/r/m-00001-of-00002.gguf")).unwrap();
        assert_eq!((removed.files.len(), removed.bytes), (3, 10));
        assert_eq!(
            std::fs::read_dir(root.path()).unwrap().count(),
            0,
            "empty directories are gone"
        );
    }

    #[test]
    fn a_copy_is_a_link_that_stays_right_when_the_directory_moves() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a");
        std::fs::create_dir_all(dir.join("o")).unwrap();
        std::fs::write(dir.join("o/m.gguf"), "bytes").unwrap();
        copy(&dir, Path::new("o/m.gguf"), "mine:latest").unwrap();
        let again = copy(&dir, Path::new("o/m.gguf"), "mine");
        assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
        copy(&dir, Path::new("o/m.gguf"), "me/mine:v2").unwrap();
        let moved = root.path().join("b");
        std::fs::rename(&dir, &moved).unwrap();
        for link in ["copies/mine.gguf", "copies/me/mine:v2.gguf"] {
            assert_eq!(std::fs::read(moved.join(link)).unwrap(), b"bytes", "{link}");
        }
        for bad in ["../x", "a//b", ".x", ""] {
            assert!(copy(&moved, Path::new("o/m.gguf"), bad).is_err(), "{bad:?}");
        }
    }
}
