//! The model directories, and what they are called by the kernel.
//!
//! ```text
//!   named --(its links are resolved)--> known: its files are listed and opened
//!     |
//!     +--(no answer within [`ANSWER`])--> silent: the others are served, and it is known as soon
//!                                         as it answers
//! ```
//!
//! A directory of a server that is down does not answer at all, so each is asked on a thread of
//! its own.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

/// How long all directories are waited for together.
const ANSWER: Duration = Duration::from_secs(5);

/// The model directories.
#[derive(Debug, Clone)]
pub struct ModelDirs {
    dirs: Arc<[Dir]>,
}

#[derive(Debug, Clone)]
pub(super) struct Dir {
    /// As configured, from the root on.
    pub(super) given: PathBuf,
    /// With links resolved, once it has answered.
    real: Arc<OnceLock<PathBuf>>,
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
    /// Resolves the directories. One that does not answer within five seconds is told in the log,
    /// and is one of them as soon as it answers.
    ///
    /// # Errors
    /// [`ModelDirError`] for one that is missing, unreadable or no directory.
    pub fn new(dirs: &[PathBuf]) -> Result<Self, ModelDirError> {
        Self::resolved_by(dirs, ANSWER, resolve)
    }

    fn resolved_by(
        dirs: &[PathBuf],
        wait: Duration,
        resolve: fn(&Path) -> Result<PathBuf, String>,
    ) -> Result<Self, ModelDirError> {
        let refuse = |dir: &Path, message: String| ModelDirError {
            dir: dir.to_owned(),
            message,
        };
        let (answers, told) = mpsc::channel();
        let mut named = Vec::new();
        for (at, dir) in dirs.iter().enumerate() {
            let given = std::path::absolute(dir).map_err(|e| refuse(dir, e.to_string()))?;
            let real = Arc::<OnceLock<PathBuf>>::default();
            let (asked, known, answers) = (given.clone(), Arc::clone(&real), answers.clone());
            let ask = move || {
                let answer = resolve(&asked).map(|real| {
                    let _ = known.set(real);
                });
                // Nobody waits any more for one that comes late.
                if let Err(mpsc::SendError((_, answer))) = answers.send((at, answer)) {
                    match answer {
                        Ok(()) => tracing::info!(dir = ?asked, "a model directory answers now"),
                        Err(message) => {
                            tracing::error!(dir = ?asked, message, "a model directory cannot be used; give another one and restart the daemon");
                        }
                    }
                }
            };
            let thread = std::thread::Builder::new().name("model-dir".to_owned());
            thread
                .spawn(ask)
                .map_err(|e| refuse(dir, format!("no thread to ask it: {e}")))?;
            named.push(Dir { given, real });
        }
        let until = Instant::now() + wait;
        for _ in dirs {
            match told.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((_, Ok(()))) => {}
                Ok((at, Err(message))) => return Err(refuse(&dirs[at], message)),
                Err(_) => break,
            }
        }
        let dirs = Self { dirs: named.into() };
        for dir in dirs.silent() {
            tracing::warn!(dir = ?dir, "a model directory does not answer; the daemon goes on without it until it does");
        }
        Ok(dirs)
    }

    /// The directories that have answered, links resolved.
    pub fn real(&self) -> impl Iterator<Item = &Path> {
        self.known().map(|(_, real)| real)
    }

    /// All of them: links resolved where they have answered, else as they were given.
    pub fn named(&self) -> impl Iterator<Item = &Path> {
        self.dirs
            .iter()
            .map(|dir| dir.real.get().unwrap_or(&dir.given).as_path())
    }

    /// Those that have not answered, as they were given.
    pub(crate) fn silent(&self) -> impl Iterator<Item = &Path> {
        let silent = self.dirs.iter().filter(|dir| dir.real.get().is_none());
        silent.map(|dir| dir.given.as_path())
    }

    /// Those that have answered, as given and with links resolved.
    pub(super) fn known(&self) -> impl Iterator<Item = (&Path, &Path)> {
        self.dirs.iter().filter_map(|dir| {
            let real = dir.real.get()?;
            Some((dir.given.as_path(), real.as_path()))
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.dirs.is_empty()
    }
}

fn resolve(dir: &Path) -> Result<PathBuf, String> {
    let real = dir.canonicalize().map_err(|e| e.to_string())?;
    match real.is_dir() {
        true => Ok(real),
        false => Err("it is not a directory".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::ModelFileError;
    use super::*;

    /// Held while the directory of the test does not answer.
    static SILENT: Mutex<()> = Mutex::new(());

    fn silent_or_not(dir: &Path) -> Result<PathBuf, String> {
        if dir.ends_with("silent") {
            drop(SILENT.lock().unwrap());
        }
        resolve(dir)
    }

    #[test]
    fn one_that_does_not_answer_is_left_out_until_it_does() {
        let root = tempfile::tempdir().unwrap();
        let (silent, other) = (root.path().join("silent"), root.path().join("other"));
        for dir in [&silent, &other] {
            std::fs::create_dir(dir).unwrap();
            std::fs::write(dir.join("a.gguf"), "GGUF").unwrap();
        }
        let held = SILENT.lock().unwrap();
        let asked = [silent.clone(), other.clone()];
        let dirs =
            ModelDirs::resolved_by(&asked, Duration::from_millis(100), silent_or_not).unwrap();
        assert_eq!(dirs.silent().collect::<Vec<_>>(), [&silent]);
        assert_eq!(dirs.real().count(), 1);
        assert_eq!(dirs.named().count(), 2);
        let opened = dirs.open(Path::new("a.gguf")).unwrap();
        assert_eq!(opened.path(), other.canonicalize().unwrap().join("a.gguf"));
        // What may lie there is not said to be missing, and nothing there is touched.
        for path in [silent.join("a.gguf"), "b.gguf".into()] {
            let error = dirs.open(&path).unwrap_err();
            assert!(
                matches!(&error, ModelFileError::DirSilent { dir } if *dir == silent),
                "{error}"
            );
        }
        drop(held);
        let until = Instant::now() + Duration::from_secs(60);
        while dirs.silent().next().is_some() {
            assert!(Instant::now() < until, "it answers, and is not known");
            std::thread::yield_now();
        }
        dirs.open(&silent.join("a.gguf")).unwrap();
    }
}
