//! The model directories, and what the kernel calls them.
//!
//! ```text
//!   named --(its links are resolved)--> known: its files are listed and opened
//!     |
//!     +--(no answer within ANSWER)--> silent: the others are served; it is asked again whenever
//!                                     files are listed or opened, and by the daemon every few
//!                                     seconds, and is known once it answers
//! ```
//!
//! A directory of a server that is down does not answer at all, or with an error after minutes. So
//! nobody who waits for something else asks one: each is looked at on a thread of its own.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::looks::Looks;

/// How long all directories are waited for together at the start.
const ANSWER: Duration = Duration::from_secs(5);

/// The model directories.
#[derive(Debug, Clone)]
pub struct ModelDirs {
    dirs: Arc<[Dir]>,
    looks: Arc<Looks<Result<(), String>>>,
    resolve: Resolve,
}

/// Resolves a directory's links and looks into it; the error says what is wrong with it.
type Resolve = fn(&Path) -> Result<Answer, String>;

#[derive(Debug)]
struct Dir {
    /// As configured, from the root on.
    given: PathBuf,
    /// Once it has answered.
    answer: Arc<OnceLock<Answer>>,
}

/// What a directory was found to be.
#[derive(Debug)]
struct Answer {
    /// Its path with links resolved.
    real: PathBuf,
    /// Why it cannot be read.
    refused: Option<String>,
}

/// Why a model directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the model directory {} (--model-dir) cannot be used: {message}; give one that is there and may be read", dir.display())]
pub struct ModelDirError {
    /// The directory.
    pub dir: PathBuf,
    /// What is wrong with it.
    pub message: String,
}

impl ModelDirs {
    /// Resolves the directories. One that does not answer within five seconds is one of them as
    /// soon as it does ([`ModelDirs::silent`]).
    ///
    /// # Errors
    /// [`ModelDirError`] for one that is missing or no directory.
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
        };
        let looks = all
            .dirs
            .iter()
            .map(|dir| (dir.given.clone(), all.look(dir)));
        let found = all.looks.look_anew(looks.collect());
        for Dir { given, .. } in all.dirs.iter() {
            if let Some(Err(message)) = found.get(given).map(Arc::as_ref) {
                return Err(refuse(given, message.clone()));
            }
        }
        Ok(all)
    }

    /// A look at a directory, which makes it known.
    fn look(&self, dir: &Dir) -> impl FnOnce() -> Result<(), String> + Send + use<> {
        let (given, known, resolve) = (dir.given.clone(), Arc::clone(&dir.answer), self.resolve);
        move || {
            let _ = known.set(resolve(&given)?);
            Ok(())
        }
    }

    /// Has those looked at that have not answered, and does not wait for it.
    pub fn ask_again(&self) {
        for dir in self.dirs.iter().filter(|dir| dir.answer.get().is_none()) {
            self.looks.start(&dir.given, self.look(dir));
        }
    }

    /// The directories that have answered, links resolved.
    pub fn real(&self) -> impl Iterator<Item = &Path> {
        self.known().map(|(_, real)| real)
    }

    /// All of them: links resolved where they have answered, else as they were given.
    pub fn named(&self) -> impl Iterator<Item = &Path> {
        self.dirs.iter().map(|dir| match dir.answer.get() {
            Some(answer) => answer.real.as_path(),
            None => dir.given.as_path(),
        })
    }

    /// Those that have not answered, as they were given.
    pub fn silent(&self) -> impl Iterator<Item = &Path> {
        let silent = self.dirs.iter().filter(|dir| dir.answer.get().is_none());
        silent.map(|dir| dir.given.as_path())
    }

    /// A silent directory in which a path lies by its name.
    pub(crate) fn silent_above(&self, path: &Path) -> Option<&Path> {
        self.silent().find(|dir| path.starts_with(dir))
    }

    /// What a silent directory's last answer was, an error.
    pub(crate) fn last_error(&self, silent: &Path) -> Option<String> {
        let found = self.looks.found(silent)?;
        found.as_ref().as_ref().err().cloned()
    }

    /// Those that cannot be read, and why.
    pub fn unlisted(&self) -> impl Iterator<Item = (&Path, &str)> {
        let answers = self.dirs.iter().filter_map(|dir| dir.answer.get());
        answers.filter_map(|answer| Some((answer.real.as_path(), answer.refused.as_deref()?)))
    }

    /// Those that have answered, as given and with links resolved.
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

fn resolve(dir: &Path) -> Result<Answer, String> {
    let real = dir.canonicalize().map_err(|error| error.to_string())?;
    let found = std::fs::metadata(&real).map_err(|error| error.to_string())?;
    if !found.is_dir() {
        return Err("it is not a directory".to_owned());
    }
    let refused = std::fs::read_dir(&real).err();
    Ok(Answer {
        real,
        refused: refused.map(|error| refusal(&error)),
    })
}

/// What is said of a model directory that cannot be read.
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
    static SILENT: Mutex<Result<(), &str>> = Mutex::new(Err("Input/output error"));

    fn silent_or_not(dir: &Path) -> Result<Answer, String> {
        if dir.ends_with("silent") {
            (*SILENT.lock().unwrap())?;
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
            assert_eq!(refused(&path), "nothing has come of it");
        }
        // Its mount gives up, and is there later.
        *held = Err("Input/output error");
        drop(held);
        until(|| refused(&silent.join("a.gguf")) == "Input/output error");
        *SILENT.lock().unwrap() = Ok(());
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
            let real = dir.to_owned();
            Ok(Answer { real, refused })
        };
        let dirs = ModelDirs::resolved_by(&["/m".into()], Duration::from_secs(60), unread).unwrap();
        let unlisted: Vec<_> = dirs.unlisted().collect();
        assert!(
            matches!(unlisted[..], [(dir, why)] if dir == "/m" && why.contains("let the daemon's user read it")),
            "{unlisted:?}"
        );
    }
}
