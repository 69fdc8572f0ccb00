//! Finds the projector with which a model reads images: the file that a load names, or the one in
//! the model's directory that fits.
//!
//! Hubs publish projectors beside the models, as `mmproj-F16.gguf` or with the model's name in
//! front. A projector's header says which models it fits, not its name.

use std::path::{Path, PathBuf};

use rocmforge_engine::{can_read_images, is_projector_for};
use rocmforge_failure::{self as failure, Failure};
use rocmforge_gguf::MappedFile;

use crate::model_files::{ModelDirs, ModelFileError};
use crate::refusals;

/// Text that the names of projector files contain.
const MARK: &str = "mmproj";
/// Maximum number of entries of a directory that are examined.
const ENTRIES_MAX: usize = 4096;
/// Maximum number of projector files of a directory whose headers are read.
const CANDIDATES_MAX: usize = 16;

/// Why a model's projector could not be determined.
#[derive(Debug)]
pub(crate) enum ProjectorError {
    /// The projector file that was named cannot be opened.
    File(ModelFileError),
    /// Several projectors beside the model fit.
    Several(Vec<PathBuf>),
}

impl ProjectorError {
    /// Converts the error to a failure of the load.
    pub(crate) fn into_failure(self) -> Failure {
        match self {
            Self::File(error) => refusals::from_model_file(&error),
            Self::Several(paths) => {
                let names: Vec<_> = paths
                    .iter()
                    .map(|path| path.display().to_string())
                    .collect();
                let message = format!(
                    "several projectors beside the model fit it: {}; name one of them with mmproj",
                    names.join(", ")
                );
                failure::invalid("mmproj", &message)
            }
        }
    }
}

/// The projector of a model whose `file` was opened as `path`: the one that is `named`, else the
/// only one in its directory that fits. Blocks on the file system.
pub(crate) fn projector_of(
    dirs: &ModelDirs,
    (path, file): (&Path, &MappedFile),
    named: Option<&Path>,
) -> Result<Option<MappedFile>, ProjectorError> {
    if let Some(named) = named {
        return dirs.open(named).map(Some).map_err(ProjectorError::File);
    }
    let candidates = beside(dirs, path, file);
    // The load itself tells what is wrong with a header. Models share directories, so most
    // projectors beside one that reads text only are others'.
    if candidates.is_empty() || !can_read_images(file).unwrap_or(false) {
        return Ok(None);
    }
    let mut fitting: Vec<(PathBuf, MappedFile)> = Vec::new();
    for candidate in candidates {
        let projector = match dirs.open(&candidate) {
            Ok(projector) => projector,
            Err(error @ ModelFileError::TooManyFiles { .. }) => {
                return Err(ProjectorError::File(error));
            }
            Err(error) => {
                tracing::debug!(path = ?candidate, %error, "a projector is passed over");
                continue;
            }
        };
        // Caches of hubs have several names for one file.
        if projector.is_same_as(file)
            || fitting
                .iter()
                .any(|(_, other)| other.is_same_as(&projector))
        {
            continue;
        }
        match is_projector_for(file, &projector) {
            Ok(()) => fitting.push((candidate, projector)),
            Err(error) => {
                tracing::info!(path = ?candidate, model = ?file.path(), %error,
                    "a projector beside a model is passed over");
            }
        }
    }
    match fitting.len() {
        0 | 1 => Ok(fitting.pop().map(|(_, projector)| projector)),
        _ => {
            let paths = fitting.into_iter().map(|(path, _)| path);
            Err(ProjectorError::Several(paths.collect()))
        }
    }
}

/// Files in a model's directory whose names are those of projectors, sorted.
fn beside(dirs: &ModelDirs, path: &Path, file: &MappedFile) -> Vec<PathBuf> {
    let is_it = |path: &PathBuf| path.canonicalize().is_ok_and(|real| real == file.path());
    let asked = match path.is_absolute() {
        true => Some(path.to_owned()),
        false => dirs.real().map(|dir| dir.join(path)).find(is_it),
    };
    let asked = asked.unwrap_or_else(|| file.path().to_owned());
    let entries = asked.parent().map(std::fs::read_dir);
    let Some(Ok(entries)) = entries else {
        return Vec::new();
    };
    let is_named = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.unwrap_or_default().to_ascii_lowercase();
        name.contains(MARK) && name.ends_with(".gguf") && !name.starts_with('.')
    };
    let paths = entries
        .take(ENTRIES_MAX)
        .flatten()
        .map(|entry| entry.path());
    let mut found: Vec<_> = paths.filter(is_named).collect();
    found.sort();
    found.truncate(CANDIDATES_MAX);
    found
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures");
        root.join(name)
    }

    /// A model of Qwen3-VL in a directory of its own.
    struct Beside {
        dir: tempfile::TempDir,
        dirs: ModelDirs,
    }

    impl Beside {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let model = dir.path().join("models/m.gguf");
            fs::create_dir(model.parent().unwrap()).unwrap();
            fs::copy(fixture("arch/qwen3vl.gguf"), &model).unwrap();
            let dirs = ModelDirs::new(&[dir.path().to_owned()]).unwrap();
            Self { dir, dirs }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join("models").join(name)
        }

        fn add(&self, name: &str, of: &str) {
            fs::copy(
                fixture(&format!("images/{of}-mmproj.gguf")),
                self.path(name),
            )
            .unwrap();
        }

        fn find(&self, path: &Path, named: Option<&Path>) -> Result<Option<String>, String> {
            let file = self.dirs.open(path).unwrap();
            let found = projector_of(&self.dirs, (path, &file), named);
            let name = |file: MappedFile| {
                let name = file.path().file_name().unwrap();
                name.to_str().unwrap().to_owned()
            };
            found
                .map(|file| file.map(name))
                .map_err(|error| error.into_failure().message().to_owned())
        }
    }

    #[test]
    fn the_one_projector_beside_a_model_that_fits_is_its() {
        let models = Beside::new();
        let model = models.path("m.gguf");
        assert_eq!(models.find(&model, None), Ok(None));
        // Of another model, and no projector at all.
        models.add("mmproj-other.gguf", "qwen35");
        fs::copy(&model, models.path("mmproj-text.gguf")).unwrap();
        fs::write(models.path("mmproj-empty.gguf"), "").unwrap();
        assert_eq!(models.find(&model, None), Ok(None));
        models.add("m.MMPROJ-f16.gguf", "qwen3vl");
        let found = Ok(Some("m.MMPROJ-f16.gguf".to_owned()));
        assert_eq!(models.find(&model, None), found);
        assert_eq!(models.find(Path::new("models/m.gguf"), None), found);
        // Another name for it.
        std::os::unix::fs::symlink(models.path("m.MMPROJ-f16.gguf"), models.path("mmproj.gguf"))
            .unwrap();
        assert_eq!(models.find(&model, None), found);
    }

    #[test]
    fn several_that_fit_are_told_and_a_named_one_is_taken() {
        let models = Beside::new();
        let model = models.path("m.gguf");
        for name in ["mmproj-BF16.gguf", "mmproj-F16.gguf"] {
            models.add(name, "qwen3vl");
        }
        let told = models.find(&model, None).unwrap_err();
        let words = [
            "mmproj-BF16.gguf, ",
            "mmproj-F16.gguf; name one of them with mmproj",
        ];
        assert!(words.iter().all(|words| told.contains(words)), "{told}");
        let named = models.path("mmproj-F16.gguf");
        let found = models.find(&model, Some(&named));
        assert_eq!(found, Ok(Some("mmproj-F16.gguf".to_owned())));
        let away = models.find(&model, Some(Path::new("models/none.gguf")));
        assert!(away.unwrap_err().contains("no such file"));
    }
}
