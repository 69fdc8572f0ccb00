//! Whether a loaded model's file is still what its path leads to.
//!
//! | what happened to the path | [`Standing`] |
//! |---|---|
//! | nothing, or permissions, links and times of reading | `Same` |
//! | written in place, cut short, touched | `Changed` |
//! | another file was renamed to it, or a link leads elsewhere | `Replaced` |
//! | deleted, or renamed | `Gone` |
//!
//! Only paths of local file systems are checked, which never hangs. Files on network file systems
//! are judged by the results of reads.

use std::io::{Error, ErrorKind};
use std::path::Path;

use rocmforge_gguf::{Identity, MappedFile};

/// What happened to a model's file since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The file has the content that was opened, and its path leads to it.
    Same,
    /// The file was written, or cut short, since it was opened.
    Changed,
    /// The file's path leads to another file.
    Replaced,
    /// The file's path leads nowhere.
    Gone,
}

/// The path at which the first part is checked: the one in the request, which may lead elsewhere by
/// now, unless it is relative to the model directories.
fn first<'a>(asked: &'a Path, real: &'a Path) -> &'a Path {
    if asked.is_absolute() { asked } else { real }
}

/// Whether the file is unchanged, by a quick check of each part. If not, [`standing`] says what
/// happened.
pub(crate) fn looks_same(asked: &Path, file: &MappedFile) -> bool {
    if file.has_changed() {
        return false;
    }
    if file.is_far() {
        return true;
    }
    file.identities().enumerate().all(|(n, (path, was))| {
        let path = if n == 0 { first(asked, path) } else { path };
        std::fs::metadata(path).is_ok_and(|found| Identity::of(&found) == was)
    })
}

/// Whether the file's path leads nowhere, by a quick check; the open file can still be read.
pub(crate) fn is_gone(asked: &Path, file: &MappedFile) -> bool {
    if file.is_far() {
        return false;
    }
    let found = file.identities().next();
    found.is_some_and(|(path, _)| {
        let found = std::fs::metadata(first(asked, path));
        found.is_err_and(|error| is_not_found(&error))
    })
}

fn is_not_found(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Compares the open file with what is at its path now. Blocks, since content may be read.
pub(crate) fn standing(asked: &Path, file: &MappedFile) -> Standing {
    if file.is_far() {
        return match file.has_changed() {
            true => Standing::Changed,
            false => Standing::Same,
        };
    }
    for (n, (path, was)) in file.identities().enumerate() {
        let path = if n == 0 { first(asked, path) } else { path };
        match std::fs::metadata(path) {
            Ok(found) if Identity::of(&found).is_same_inode(&was) => {}
            Ok(_) => return Standing::Replaced,
            // Of a split model the load says which parts are missing.
            Err(error) if is_not_found(&error) && n == 0 => return Standing::Gone,
            Err(error) if is_not_found(&error) => return Standing::Replaced,
            // What is open can be read still.
            Err(_) => {}
        }
    }
    match file.check_unchanged() {
        Err(rocmforge_gguf::Error::Changed { .. }) => Standing::Changed,
        Ok(()) | Err(_) => Standing::Same,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::time::SystemTime;

    use super::*;

    /// What `change` makes of a file that is open.
    fn after(change: impl FnOnce(&Path)) -> Standing {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gguf");
        fs::write(&path, "first").unwrap();
        let file = MappedFile::open(&path).unwrap();
        assert!(looks_same(&path, &file));
        assert_eq!(standing(&path, &file), Standing::Same);
        change(&path);
        let standing = standing(&path, &file);
        // A look that finds that the content is the same is enough for the next ones.
        assert_eq!(looks_same(&path, &file), standing == Standing::Same);
        assert_eq!(is_gone(&path, &file), standing == Standing::Gone);
        standing
    }

    #[test]
    fn what_happens_to_a_path_is_told_apart() {
        let nothing = after(|_| {});
        assert_eq!(nothing, Standing::Same);
        let mode = |path: &Path| {
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        };
        assert_eq!(after(mode), Standing::Same);
        let copied_over = |path: &Path| fs::write(path, "other content").unwrap();
        assert_eq!(after(copied_over), Standing::Changed);
        let cut_short = |path: &Path| {
            let file = fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(2).unwrap();
        };
        assert_eq!(after(cut_short), Standing::Changed);
        let touched = |path: &Path| {
            let file = fs::OpenOptions::new().write(true).open(path).unwrap();
            let later = SystemTime::now() + std::time::Duration::from_secs(5);
            file.set_modified(later).unwrap();
        };
        assert_eq!(after(touched), Standing::Changed);
        let renamed_over = |path: &Path| {
            let other = path.with_extension("new");
            fs::write(&other, "first").unwrap();
            fs::rename(other, path).unwrap();
        };
        assert_eq!(after(renamed_over), Standing::Replaced);
        let made_anew = |path: &Path| {
            // The old inode is open, so that the new one is another.
            fs::remove_file(path).unwrap();
            fs::write(path, "first").unwrap();
        };
        assert_eq!(after(made_anew), Standing::Replaced);
        assert_eq!(after(|path| fs::remove_file(path).unwrap()), Standing::Gone);
        let renamed = |path: &Path| fs::rename(path, path.with_extension("old")).unwrap();
        assert_eq!(after(renamed), Standing::Gone);
    }

    #[test]
    fn a_link_that_leads_elsewhere_counts_and_a_deleted_file_is_seen_as_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["first", "second"] {
            fs::write(path(name), name).unwrap();
        }
        let link = path("link.gguf");
        symlink(path("first"), &link).unwrap();
        let file = MappedFile::open(&path("first")).unwrap();
        assert_eq!(standing(&link, &file), Standing::Same);
        fs::remove_file(&link).unwrap();
        symlink(path("second"), &link).unwrap();
        assert!(!looks_same(&link, &file));
        assert_eq!(standing(&link, &file), Standing::Replaced);
        // A relative path is below some model directory; the file's own counts.
        assert_eq!(standing(Path::new("link.gguf"), &file), Standing::Same);
        assert!(!file.is_deleted());
        fs::remove_file(path("first")).unwrap();
        assert!(file.is_deleted());
    }
}
