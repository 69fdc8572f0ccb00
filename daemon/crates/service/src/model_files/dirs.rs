//! The model directories, with their links resolved.
//!
//! ```text
//!   named --(its links are resolved)--> known: its files are listed and opened
//!     |
//!     +--(no answer within ANSWER, --> silent: the others are served; it is asked again whenever
//!         or an error)                 files are listed or opened, and by the daemon every few
//!                                      seconds, and is known once it answers
//! ```
//!
//! A directory on a server that is down does not respond at all, or with an error after minutes. So
//! each is probed on a thread of its own. One that is missing or may not be entered, as before a
//! disk is mounted, is *away*: it is probed again like a silent one.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::headers::Headers;
use super::hub;
use crate::looks::Looks;

/// Maximum total wait for all directories at the start.
const ANSWER: Duration = Duration::from_secs(5);

/// The model directories.
#[derive(Debug, Clone)]
pub struct ModelDirs {
    dirs: Arc<[Dir]>,
    looks: Arc<Looks<Result<(), Trouble>>>,
    resolve: Resolve,
    /// Reads and caches the headers of files in the directories.
    pub(super) headers: Arc<Headers>,
}

/// Function that resolves a directory's links and probes it.
type Resolve = fn(&Path) -> Result<Answer, Trouble>;

/// Why a path is not a usable model directory.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Trouble {
    /// The path is not a directory: the configuration is wrong.
    NoDirectory,
    /// The directory is missing, or may not be entered.
    Away(String),
    /// The file system's error for the directory.
    Failed(String),
}

impl Trouble {
    fn of(error: &io::Error) -> Self {
        use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
        match error.kind() {
            NotFound | NotADirectory => Trouble::Away(format!(
                "is not there ({error}); mount or create it, or correct its path"
            )),
            PermissionDenied => Trouble::Away(format!(
                "cannot be entered by the daemon's user {} ({error}); let that user enter it and the directories above \
                 it, by their mode or owner, or name another one",
                nix::unistd::geteuid()
            )),
            _ => Trouble::Failed(format!(
                "does not answer ({error}); check the server or the mount that it lies on"
            )),
        }
    }

    /// The text that follows the directory's name in messages.
    fn words(&self) -> &str {
        match self {
            Trouble::NoDirectory => "is not a directory; name the directory that the files are in",
            Trouble::Away(words) | Trouble::Failed(words) => words,
        }
    }
}

/// The state of a model directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirState {
    /// Path of the directory: with links resolved if it has responded, else as configured.
    pub path: PathBuf,
    /// What is wrong with the directory, and what to do; follows the path in messages.
    pub trouble: Option<String>,
}

#[derive(Debug)]
struct Dir {
    /// Path as configured, made absolute.
    given: PathBuf,
    /// The result of probing the directory, once it has responded.
    answer: Arc<OnceLock<Answer>>,
}

/// The result of probing a directory.
#[derive(Debug)]
struct Answer {
    /// The directory's path with links resolved.
    real: PathBuf,
    /// Directory of the blobs, if this is a snapshot in a Hugging Face cache.
    blobs: Option<PathBuf>,
    /// Why the directory cannot be read.
    refused: Option<String>,
}

/// Why a configured model directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the model directory {} (--model-dir) cannot be used: it {message}", dir.display())]
pub struct ModelDirError {
    /// The configured directory.
    pub dir: PathBuf,
    /// What is wrong with the directory.
    pub message: String,
}

impl ModelDirs {
    /// Resolves the configured directories. One that does not respond within five seconds, is
    /// missing or may not be entered is used as soon as it responds ([`ModelDirs::silent`]).
    ///
    /// # Errors
    /// [`ModelDirError`] for a path that is no directory, and for an empty path.
    pub fn new(dirs: &[PathBuf]) -> Result<Self, ModelDirError> {
        Self::resolved_by(dirs, ANSWER, resolve)
    }

    fn resolved_by(
        dirs: &[PathBuf],
        wait: Duration,
        resolve: Resolve,
    ) -> Result<Self, ModelDirError> {
        let refuse = |dir: &Path, message: String| ModelDirError {
            dir: dir.to_owned(),
            message,
        };
        let mut named: Vec<Dir> = Vec::new();
        for dir in dirs {
            let given = std::path::absolute(dir).map_err(|error| refuse(dir, error.to_string()))?;
            // One that is named again has the same look.
            if named.iter().all(|dir| dir.given != given) {
                let answer = Arc::default();
                named.push(Dir { given, answer });
            }
        }
        let all = Self {
            dirs: named.into(),
            looks: Arc::new(Looks::waiting(wait)),
            resolve,
            headers: Arc::default(),
        };
        let looks = all
            .dirs
            .iter()
            .map(|dir| (dir.given.clone(), all.look(dir)));
        let found = all.looks.look_anew(looks.collect());
        for Dir { given, .. } in all.dirs.iter() {
            if let Some(Err(trouble @ Trouble::NoDirectory)) = found.get(given).map(Arc::as_ref) {
                return Err(refuse(given, trouble.words().to_owned()));
            }
        }
        Ok(all)
    }

    /// A probe of a directory, which records the result.
    fn look(&self, dir: &Dir) -> impl FnOnce() -> Result<(), Trouble> + Send + use<> {
        let (given, known, resolve) = (dir.given.clone(), Arc::clone(&dir.answer), self.resolve);
        move || {
            let _ = known.set(resolve(&given)?);
            Ok(())
        }
    }

    /// Starts probes of the directories that have not responded, without waiting for them.
    pub fn ask_again(&self) {
        for dir in self.dirs.iter().filter(|dir| dir.answer.get().is_none()) {
            self.looks.start(&dir.given, self.look(dir));
        }
    }

    /// The directories that have responded, with links resolved.
    pub fn real(&self) -> impl Iterator<Item = &Path> {
        self.known().map(|(_, real)| real)
    }

    /// All directories: with links resolved if they have responded, else as configured.
    pub fn named(&self) -> impl Iterator<Item = &Path> {
        self.dirs.iter().map(|dir| match dir.answer.get() {
            Some(answer) => answer.real.as_path(),
            None => dir.given.as_path(),
        })
    }

    /// Directories that have not responded, as configured.
    pub fn silent(&self) -> impl Iterator<Item = &Path> {
        let silent = self.dirs.iter().filter(|dir| dir.answer.get().is_none());
        silent.map(|dir| dir.given.as_path())
    }

    /// A silent directory in which a path lies by its name.
    pub(crate) fn silent_above(&self, path: &Path) -> Option<&Path> {
        self.silent().find(|dir| path.starts_with(dir))
    }

    /// What is wrong with a silent directory, and what to do; stands behind its path.
    pub(crate) fn why_silent(&self, dir: &Path) -> String {
        let found = self.looks.found(dir);
        match found.as_deref() {
            Some(Err(trouble)) => trouble.words().to_owned(),
            _ => "does not answer; check the server or the mount that it lies on".to_owned(),
        }
    }

    /// Whether a silent directory is missing or may not be entered: what lies there now is nothing.
    pub(crate) fn is_away(&self, dir: &Path) -> bool {
        let found = self.looks.found(dir);
        matches!(found.as_deref(), Some(Err(Trouble::Away(_))))
    }

    /// Each of them as it was found last: at its first look, or when `found` was listed.
    pub(crate) fn states(&self, refused: impl Fn(&Path) -> Option<String>) -> Vec<DirState> {
        let state = |dir: &Dir| match dir.answer.get() {
            Some(answer) => DirState {
                path: answer.real.clone(),
                trouble: refused(&answer.real),
            },
            None => DirState {
                path: dir.given.clone(),
                trouble: Some(self.why_silent(&dir.given)),
            },
        };
        self.dirs.iter().map(state).collect()
    }

    /// Each of them as it was found at its first look.
    pub fn first_states(&self) -> Vec<DirState> {
        self.states(|real| {
            let mut answers = self.dirs.iter().filter_map(|dir| dir.answer.get());
            answers.find(|answer| answer.real == real)?.refused.clone()
        })
    }

    /// Whether a file lies below a model directory, by its path with links resolved, or is a blob
    /// of a snapshot that is one. The directory itself counts, so that the answer is that it is a
    /// directory.
    pub(super) fn holds(&self, real: &Path) -> bool {
        let mut answers = self.dirs.iter().filter_map(|dir| dir.answer.get());
        answers.any(|answer| {
            let blobs = answer.blobs.as_ref();
            real.starts_with(&answer.real) || blobs.is_some_and(|blobs| real.starts_with(blobs))
        })
    }

    /// Directories that have responded, as configured and with links resolved.
    pub(super) fn known(&self) -> impl Iterator<Item = (&Path, &Path)> {
        self.dirs.iter().filter_map(|dir| {
            let answer = dir.answer.get()?;
            Some((dir.given.as_path(), answer.real.as_path()))
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.dirs.is_empty()
    }
}

fn resolve(dir: &Path) -> Result<Answer, Trouble> {
    let real = dir.canonicalize().map_err(|error| Trouble::of(&error))?;
    let found = std::fs::metadata(&real).map_err(|error| Trouble::of(&error))?;
    if !found.is_dir() {
        return Err(Trouble::NoDirectory);
    }
    let refused = std::fs::read_dir(&real).err();
    Ok(Answer {
        blobs: hub::blobs_beside(&real),
        real,
        refused: refused.map(|error| refusal(&error)),
    })
}

/// The message for a model directory that cannot be read.
pub(super) fn refusal(error: &io::Error) -> String {
    let what_to_do = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "let the daemon's user read it, by its mode or owner, or name another one"
        }
        _ => "check the disk or the mount that it lies on",
    };
    format!("cannot be read, so that its files are not known ({error}); {what_to_do}")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Instant;

    use super::super::ModelFileError;
    use super::*;

    /// What the directory `silent` of the test answers: nothing while it is held.
    static SILENT: Mutex<bool> = Mutex::new(true);

    fn silent_or_not(dir: &Path) -> Result<Answer, Trouble> {
        if dir.ends_with("silent") && *SILENT.lock().unwrap() {
            return Err(Trouble::of(&io::Error::from_raw_os_error(5)));
        }
        resolve(dir)
    }

    fn until(what: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(60);
        while !what() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn one_that_does_not_answer_is_left_out_until_it_does() {
        let root = tempfile::tempdir().unwrap();
        let (silent, other) = (root.path().join("silent"), root.path().join("other"));
        for dir in [&silent, &other] {
            std::fs::create_dir(dir).unwrap();
            std::fs::write(dir.join("a.gguf"), "GGUF").unwrap();
        }
        let mut held = SILENT.lock().unwrap();
        let asked = [silent.clone(), other.clone()];
        let dirs =
            ModelDirs::resolved_by(&asked, Duration::from_millis(100), silent_or_not).unwrap();
        until(|| dirs.real().count() == 1);
        assert_eq!(dirs.silent().collect::<Vec<_>>(), [&silent]);
        assert_eq!(dirs.named().count(), 2);
        let opened = dirs.open(Path::new("a.gguf")).unwrap();
        assert_eq!(opened.path(), other.canonicalize().unwrap().join("a.gguf"));
        // What may lie there is not said to be missing.
        let refused = |path: &Path| match dirs.open(path).unwrap_err() {
            ModelFileError::DirSilent { dir, why } if dir == silent => why,
            error => panic!("{error}"),
        };
        for path in [silent.join("a.gguf"), "b.gguf".into()] {
            assert!(refused(&path).starts_with("does not answer; check"));
        }
        // Its mount gives up, and is there later.
        *held = true;
        drop(held);
        until(|| refused(&silent.join("a.gguf")).contains("Input/output error"));
        assert!(!dirs.is_away(&silent));
        *SILENT.lock().unwrap() = false;
        until(|| {
            dirs.ask_again();
            dirs.silent().next().is_none()
        });
        dirs.open(&silent.join("a.gguf")).unwrap();
    }

    #[test]
    fn one_that_is_named_twice_is_one() {
        let root = tempfile::tempdir().unwrap();
        let again = root.path().join("");
        let dirs = ModelDirs::new(&[root.path().to_owned(), again]).unwrap();
        assert_eq!((dirs.silent().count(), dirs.real().count()), (0, 1));
    }

    #[test]
    fn one_that_cannot_be_read_is_told_with_what_to_do() {
        let unread = |dir: &Path| {
            let refused = Some(refusal(&io::ErrorKind::PermissionDenied.into()));
            let (real, blobs) = (dir.to_owned(), None);
            Ok(Answer {
                real,
                blobs,
                refused,
            })
        };
        let dirs = ModelDirs::resolved_by(&["/m".into()], Duration::from_secs(60), unread).unwrap();
        let states = dirs.first_states();
        let [state] = &states[..] else { panic!() };
        let why = state.trouble.as_deref().unwrap();
        assert!(state.path == Path::new("/m"), "{states:?}");
        assert!(why.contains("let the daemon's user read it"), "{why}");
    }

    /// As a disk that is not mounted yet when the machine starts: the daemon did not, with exit
    /// code 2, which systemd does not try again.
    #[test]
    fn one_that_is_missing_or_closed_is_left_out_until_it_is_there() {
        let root = tempfile::tempdir().unwrap();
        let (away, other) = (root.path().join("away"), root.path().join("other"));
        std::fs::create_dir(&other).unwrap();
        let dirs = ModelDirs::new(&[away.join("models"), other]).unwrap();
        let states = dirs.first_states();
        let why = states[0].trouble.as_deref().unwrap();
        assert!(
            why.contains("is not there") && why.contains("mount or create it"),
            "{why}"
        );
        assert_eq!(states[1].trouble, None);
        assert!(dirs.is_away(&away.join("models")) && dirs.real().count() == 1);
        // Neither is a file above it a reason to give up; a file in its place is.
        std::fs::write(&away, "x").unwrap();
        dirs.ask_again();
        let error = ModelDirs::new(std::slice::from_ref(&away))
            .unwrap_err()
            .to_string();
        assert!(error.contains("is not a directory"), "{error}");
        assert!(ModelDirs::new(&[PathBuf::new()]).is_err(), "an empty path");
        std::fs::remove_file(&away).unwrap();
        std::fs::create_dir_all(away.join("models")).unwrap();
        std::fs::write(away.join("models/m.gguf"), "x").unwrap();
        until(|| {
            dirs.ask_again();
            dirs.silent().next().is_none()
        });
        dirs.open(Path::new("m.gguf")).unwrap();
        let closed = Trouble::of(&io::ErrorKind::PermissionDenied.into());
        assert!(
            closed.words().contains("the directories above it"),
            "{closed:?}"
        );
    }
}
