//! Where libraries of ROCm are looked for beside the loader's own places.
//!
//! AMD's packages put them below /opt/rocm and leave the loader's cache alone, and a service has no
//! LD_LIBRARY_PATH. So each name is tried as it is, then in ROCm's folders, before an older name
//! is: another release of the runtime that is installed, too, may know no card of this machine.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Releases of ROCm that are examined.
const RELEASES_MAX: usize = 32;

/// Folders of the loader itself, as far as they are the same everywhere.
const SYSTEM: [&str; 6] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/lib",
];

/// Each name as it is, then its files in ROCm's folders.
pub(super) fn names(usual: &[&str]) -> Vec<String> {
    names_in(usual, &rocm_dirs())
}

fn names_in(usual: &[&str], dirs: &[PathBuf]) -> Vec<String> {
    let of_one = |name: &&str| {
        let files = dirs.iter().map(|dir| dir.join(name));
        let files = files.filter(|file| file.exists());
        let files: Vec<_> = files
            .map(|file| file.to_string_lossy().into_owned())
            .collect();
        std::iter::once((*name).to_owned()).chain(files)
    };
    usual.iter().flat_map(of_one).collect()
}

/// The first of some names that is a file of ROCm's folders and of none of the loader's.
pub fn only_in_rocm(usual: &[&str]) -> Option<PathBuf> {
    let is_usual = |name: &&str| SYSTEM.iter().any(|dir| Path::new(dir).join(name).exists());
    if env::var_os("LD_LIBRARY_PATH").is_some() || usual.iter().any(is_usual) {
        return None;
    }
    let dirs = rocm_dirs();
    let files = usual
        .iter()
        .flat_map(|name| dirs.iter().map(move |dir| dir.join(name)));
    files.into_iter().find(|file| file.exists())
}

/// ROCm's folders of libraries: `$ROCM_PATH/lib`, `/opt/rocm/lib`, `/opt/rocm-*/lib`.
fn rocm_dirs() -> Vec<PathBuf> {
    let named = env::var_os("ROCM_PATH").filter(|value| !value.is_empty());
    dirs(named.map(PathBuf::from), Path::new("/opt"))
}

fn dirs(named: Option<PathBuf>, opt: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(opt)
        .into_iter()
        .flatten()
        .map_while(Result::ok);
    let releases = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let number = name.strip_prefix("rocm-")?;
        let number: Vec<u32> = number.split('.').map_while(|n| n.parse().ok()).collect();
        Some((number, entry.path()))
    });
    let mut releases: Vec<_> = releases.take(RELEASES_MAX).collect();
    releases.sort();
    let releases = releases.into_iter().rev().map(|(_, path)| path);
    let mut dirs: Vec<PathBuf> = Vec::new();
    for root in named.into_iter().chain([opt.join("rocm")]).chain(releases) {
        let dir = root.join("lib");
        // /opt/rocm is a link to one of the releases.
        let real = fs::canonicalize(&dir).ok();
        let is_there = |seen: &PathBuf| fs::canonicalize(seen).ok() == real;
        if real.is_some() && !dirs.iter().any(is_there) {
            dirs.push(dir);
        }
    }
    dirs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_runtime_of_rocms_folders_comes_before_an_older_one_of_the_loaders() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for (release, so) in [
            ("rocm-6.4.1", "6"),
            ("rocm-7.2.0", "7"),
            ("rocm-7.10.0", "7"),
        ] {
            fs::create_dir_all(at(release).join("lib")).unwrap();
            fs::write(at(release).join(format!("lib/libamdhip64.so.{so}")), "").unwrap();
        }
        std::os::unix::fs::symlink("rocm-7.2.0", at("rocm")).unwrap();
        let found = dirs(None, root.path());
        let expected = ["rocm/lib", "rocm-7.10.0/lib", "rocm-6.4.1/lib"].map(&at);
        assert_eq!(found, expected);
        let named = dirs(Some(at("rocm-6.4.1")), root.path());
        assert_eq!(named[0], at("rocm-6.4.1/lib"));
        assert_eq!(named.len(), 3);

        let names = names_in(
            &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"],
            &found,
        );
        let file = |path: &str| at(path).to_string_lossy().into_owned();
        let expected = [
            "libamdhip64.so.7".to_owned(),
            file("rocm/lib/libamdhip64.so.7"),
            file("rocm-7.10.0/lib/libamdhip64.so.7"),
            "libamdhip64.so.6".to_owned(),
            file("rocm-6.4.1/lib/libamdhip64.so.6"),
            "libamdhip64.so.5".to_owned(),
        ];
        assert_eq!(names, expected);
        assert_eq!(dirs(None, &at("nowhere")), Vec::<PathBuf>::new());
    }
}
