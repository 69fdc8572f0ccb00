//! Whether AMD's libraries for products have kernels for a chip, told by the names of their files.
//!
//! rocBLAS ends the process at its first product where it finds none. A folder that is not where
//! AMD's own packages have it says nothing; then [`super::first`] alone decides.

use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of names of files that are examined: rocBLAS has some 3000 for all chips.
const FILES_MAX: usize = 50_000;
/// How deep folders are looked into.
const DEPTH_MAX: usize = 2;

/// Where a library keeps its kernels.
pub(super) struct Kernels {
    /// The variable that names the folder.
    pub(super) variable: &'static str,
    /// The folder beside the library.
    pub(super) beside: &'static str,
}

impl Kernels {
    /// The folder of a library that was opened from a file.
    pub(super) fn folder(&self, library: &Path) -> Option<PathBuf> {
        let named = std::env::var_os(self.variable).filter(|value| !value.is_empty());
        match named {
            Some(dir) => Some(PathBuf::from(dir)),
            None => Some(library.parent()?.join(self.beside)),
        }
    }
}

/// Why a library, opened from a file, has no kernels for a chip; `None` if it has some or if that
/// cannot be determined.
pub(super) fn lacks(kernels: &Kernels, library: &Path, arch: &str) -> Option<String> {
    let dir = kernels.folder(library)?;
    let chip = arch.split(':').next().unwrap_or(arch);
    let mut files = Vec::new();
    names(&dir, DEPTH_MAX, &mut files);
    if files.is_empty() || files.len() >= FILES_MAX {
        return None;
    }
    let has = files.iter().any(|name| is_for(name, chip));
    (!has).then(|| format!("{} has no kernels for {chip}", dir.display()))
}

/// Whether a file's name says that it is for a chip, or for a family of chips.
fn is_for(name: &str, chip: &str) -> bool {
    name.contains("-generic")
        || name.match_indices(chip).any(|(at, _)| {
            let next = name[at + chip.len()..].chars().next();
            next.is_none_or(|c| !c.is_ascii_alphanumeric())
        })
}

/// Paths below a folder, from the folder on.
fn names(dir: &Path, depth: usize, files: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries.map_while(Result::ok) {
        if files.len() >= FILES_MAX {
            return;
        }
        let is_dir = entry.file_type().is_ok_and(|ty| ty.is_dir());
        if is_dir && depth > 0 {
            names(&entry.path(), depth - 1, files);
        } else if !is_dir {
            files.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNELS: Kernels = Kernels {
        variable: "ROCMFORGE_NOBODY_SETS_THIS",
        beside: "rocblas/library",
    };

    #[test]
    fn a_chip_without_a_file_of_its_own_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join("librocblas.so.5");
        assert_eq!(lacks(&KERNELS, &library, "gfx1036"), None, "no folder");
        let folder = dir.path().join(KERNELS.beside);
        fs::create_dir_all(folder.join("fallback")).unwrap();
        for name in [
            "TensileLibrary_lazy_gfx1030.dat",
            "Kernels.so-000-gfx90a-xnack+.hsaco",
            "fallback/TensileLibrary_gfx906.co",
        ] {
            fs::write(folder.join(name), "").unwrap();
        }
        for arch in ["gfx1030", "gfx90a:sramecc+:xnack-", "gfx906"] {
            assert_eq!(lacks(&KERNELS, &library, arch), None, "{arch}");
        }
        // No file of another chip whose name begins alike.
        for arch in ["gfx1036", "gfx90", "gfx9", "gfx900:xnack-"] {
            let why = lacks(&KERNELS, &library, arch).unwrap();
            assert!(why.contains("rocblas/library has no kernels"), "{why}");
        }
        fs::write(folder.join("TensileLibrary_gfx10-3-generic.co"), "").unwrap();
        assert_eq!(lacks(&KERNELS, &library, "gfx1036"), None);
    }
}
