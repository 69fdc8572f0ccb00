//! Derives a model's name from the names of its file and directories, for files without a declared
//! name.
//!
//! If two files share a name, the first by path keeps it, and the others are named by their paths
//! below their model directory; if that is taken, too, or too long, a number is appended to the
//! name. The number is made of the path, so that it is the same after a restart.
//!
//! A file in a Hugging Face cache is named by its repository instead of its path. Of several
//! revisions the one that is `main` has the file's own name; the others have their reference, or
//! the beginning of their commit, appended.
//!
//! *Invariant:* each file gets a name, and no two the same (test
//! `each_file_has_a_name_and_no_two_the_same`).

use std::collections::HashSet;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rocmforge_engine::is_name_char;
use rocmforge_gguf::PartName;

use crate::check::MODEL_NAME_MAX;
use crate::model_files::{HubPlace, ModelDirs};

/// The tag that Ollama's clients append to a name without one.
pub(crate) const DEFAULT_TAG: &str = ":latest";

/// The file's name without `.gguf` (in any case) and, for a split model, without the part's number.
/// Characters that a name cannot have become `-`. Combining accents, as macOS writes them, are
/// dropped.
pub fn default_name(path: &Path) -> String {
    const SUFFIX: &str = ".gguf";
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = PartName::of(path);
    let stem = match (&part, name.len().checked_sub(SUFFIX.len())) {
        (Some(part), _) => part.stem(),
        (None, Some(at))
            if name.is_char_boundary(at) && name[at..].eq_ignore_ascii_case(SUFFIX) =>
        {
            &name[..at]
        }
        _ => &name,
    };
    // A slash is what is between directories.
    let allowed = |c: char| is_name_char(c) && c != '/';
    let is_accent = |c: &char| ('\u{300}'..='\u{36f}').contains(c);
    stem.chars()
        .filter(|c| !is_accent(c))
        .map(|c| if allowed(c) { c } else { '-' })
        .collect()
}

/// Chooses a name for a file that is not in `taken`, and adds it there.
pub(crate) fn name_among(
    dirs: &ModelDirs,
    path: &Path,
    hub: Option<&HubPlace>,
    taken: &mut HashSet<String>,
) -> String {
    let rest = dirs.real().find_map(|dir| path.strip_prefix(dir).ok());
    let rest = rest.unwrap_or(path);
    let short = default_name(path);
    let usual = match hub {
        None => vec![short.clone(), below(rest)],
        Some(hub) => in_hub(hub, &short),
    };
    let numbered = (0_u32..).map(|salt| numbered(&short, rest, salt));
    let fits = |name: &String| !name.is_empty() && name.len() <= MODEL_NAME_MAX;
    let mut names = usual.into_iter().chain(numbered).filter(fits);
    // There are more numbers than files.
    let name = names.find(|name| taken.insert(name.clone()));
    name.unwrap_or_default()
}

/// A path below a model directory, turned into a name.
fn below(rest: &Path) -> String {
    let above = rest.parent().into_iter().flat_map(Path::components);
    let above = above.map(|part| default_name(Path::new(part.as_os_str())) + "/");
    above.collect::<String>() + &default_name(rest)
}

/// Possible names for a file in a Hugging Face cache, the preferred first.
fn in_hub(hub: &HubPlace, short: &str) -> Vec<String> {
    let repo: Vec<_> = hub.repo.split('/').map(allowed_of).collect();
    let long = repo.join("/") + "/" + &below(&hub.below);
    let revision = allowed_of(&hub.revision);
    let others = [format!("{short}@{revision}"), format!("{long}@{revision}")];
    let of_repo = (!hub.is_other).then_some(long);
    let first = [Some(short.to_owned()), of_repo];
    first.into_iter().flatten().chain(others).collect()
}

/// Replaces characters that a name cannot have by `-`.
fn allowed_of(part: &str) -> String {
    let allowed = |c: char| is_name_char(c) && c != '/';
    part.chars()
        .map(|c| if allowed(c) { c } else { '-' })
        .collect()
}

/// A name with a number appended that is derived from the path.
fn numbered(short: &str, rest: &Path, salt: u32) -> String {
    // FNV-1a: the standard library's hashes may be others in its next version.
    let bytes = rest.as_os_str().as_bytes().iter().copied();
    let number = bytes
        .chain(salt.to_le_bytes())
        .fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        });
    let number = format!("@{number:08x}");
    let kept = short.floor_char_boundary(MODEL_NAME_MAX - number.len());
    short[..kept].to_owned() + &number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_of_any_script_stay_and_what_no_name_has_does_not() {
        let name = |file: &str| default_name(Path::new(file));
        assert_eq!(name("/m/é ü.gguf"), "é-ü");
        // As macOS writes it.
        assert_eq!(name("/m/e\u{301} u\u{308}.gguf"), "e-u");
        assert_eq!(name("千问-7b.GGUF"), "千问-7b");
        assert_eq!(name("модель_2+.gguf"), "модель_2+");
        assert_eq!(name("a\u{202e}b💾\"c.gguf"), "a-b--c");
        assert_eq!(name("m-00001-of-00003.gguf"), "m");
        assert_eq!(name(".gguf"), "");
    }

    #[test]
    fn each_file_has_a_name_and_no_two_the_same() {
        let root = tempfile::tempdir().unwrap();
        let dirs = ModelDirs::new(&[root.path().to_owned()]).unwrap();
        let real = root.path().canonicalize().unwrap();
        let long = "長".repeat(60);
        let files = [
            "a b.gguf",
            "a!b.gguf",
            "a-b.gguf",
            "x/a-b.gguf",
            "x/a:b.gguf",
            "💾.gguf",
            "📀.gguf",
            &format!("{long}1.gguf"),
            &format!("{long}2.gguf"),
            ".gguf",
        ];
        let name_all = || {
            let mut taken = HashSet::new();
            let names = files.map(|file| name_among(&dirs, &real.join(file), None, &mut taken));
            assert_eq!(taken.len(), files.len(), "{names:?}");
            names
        };
        let names = name_all();
        assert_eq!(names, name_all(), "they stay");
        for name in &names {
            assert!(
                crate::declared::Declared::check_name(name).is_ok(),
                "{name}"
            );
        }
        assert_eq!(
            [&*names[0], &*names[3], &*names[4]],
            ["a-b", "x/a-b", "a:b"]
        );
        assert!(names[1].starts_with("a-b@") && names[2].starts_with("a-b@"));
        assert!(names[7].starts_with("長長") && names[7].len() <= MODEL_NAME_MAX);
    }
}
