//! Trials of what a driver may do so badly that the process ends or the call never comes back.
//!
//! Some runtimes abort the process on a fault of the card, and some calls spin for good. So a file
//! says that a trial has begun, and goes when the trial has ended. A start that finds it left
//! behind [`GIVEN_UP`] times does not try again: not after once, since a person or a service
//! manager may have ended the process just then. The file's name holds what the answer depends on,
//! so another driver, runtime or kernel is tried anew.
//!
//! What passed may be remembered, so that a later start need not try it again: a file says of what
//! it was found ([`Trials::note_passed`]), and one that says anything else counts for nothing. What
//! did not pass is tried at each start, and so is what a trial measures.
//!
//! *Invariant:* the file is written and removed under its lock, so of processes that start together
//! none takes another's trial for one that did not end (test
//! `two_processes_that_start_together_both_try`).

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::library::{file_of, identity};
use crate::{Context, Versions};

/// Starts that a trial did not survive before it is left alone.
const GIVEN_UP: usize = 2;

/// A trial that takes longer than this may be one that never ends.
const YOUNG: Duration = Duration::from_secs(5);

/// Trials of this process that are under way.
static UNDER_WAY: Mutex<Vec<UnderWay>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct UnderWay {
    path: PathBuf,
    began: Instant,
    /// Contents of the trial's file before this trial.
    before: String,
}

/// Takes trials back that have only just begun, since the process is about to end for a reason that
/// is not theirs.
pub(crate) fn forget_the_young() {
    forget_the_young_below(Path::new(""));
}

fn forget_the_young_below(dir: &Path) {
    let under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    let young = |trial: &&UnderWay| trial.began.elapsed() < YOUNG && trial.path.starts_with(dir);
    for trial in under_way.iter().filter(young) {
        // What cannot be taken back counts, and a person has to remove the file one day.
        let _ = match trial.before.is_empty() {
            true => fs::remove_file(&trial.path),
            false => fs::write(&trial.path, &trial.before),
        };
    }
}

/// How a trial went.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    /// The probe ended with this result.
    Ended(T),
    /// The probe has not ended; its file stays.
    Stuck,
    /// The probe was skipped, with the reason: earlier ones did not end.
    NotMade(String),
}

/// Where trials leave their files, for one card.
#[derive(Debug, Clone)]
pub struct Trials {
    dir: Option<PathBuf>,
    card: String,
    /// Text of everything on which a trial's outcome depends: GPU, driver, library, kernel and
    /// version.
    depends_on: String,
}

impl Trials {
    /// For a card; without a folder nothing is kept, and every trial is made.
    pub fn of(context: &Context, dir: Option<&Path>) -> Self {
        let a = context.attributes();
        let driver = context.shared_driver();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let Versions {
            driver: version,
            runtime,
        } = driver.versions().unwrap_or_default();
        let library = driver.library();
        let mut hash = DefaultHasher::new();
        (&a.name, &a.arch, &a.pci_bus_id, &kernel).hash(&mut hash);
        (&version, &runtime).hash(&mut hash);
        (library, env!("CARGO_PKG_VERSION")).hash(&mut hash);
        let file = file_of(library).and_then(|file| identity(&file));
        Self {
            dir: dir.map(Path::to_owned),
            card: format!("{}-{:016x}", a.arch, hash.finish()),
            depends_on: format!(
                "card {} {} at {}\ndriver {version}, runtime {runtime}, {library} ({})\nkernel {}\nrocmforged {}\n",
                a.name,
                a.arch,
                a.pci_bus_id,
                file.unwrap_or_default(),
                kernel.trim(),
                env!("CARGO_PKG_VERSION")
            ),
        }
    }

    /// The file that says that a trial passed on this card, with what else that depends on. One
    /// that is damaged, or says it of anything else, is none.
    pub fn passed(&self, what: &str, with: &str) -> Option<PathBuf> {
        let path = self.path_of_passed(what)?;
        let expected = self.note(what, with);
        let file = File::open(&path).ok()?;
        let mut found = Vec::new();
        // A byte more tells a file that only begins alike.
        let most = expected.len() as u64 + 1;
        file.take(most).read_to_end(&mut found).ok()?;
        (found == expected.as_bytes()).then_some(path)
    }

    /// Notes that a trial passed, with what that depends on beside the card.
    pub fn note_passed(&self, what: &str, with: &str) {
        if let Some(path) = self.path_of_passed(what)
            && let Err(error) = fs::write(&path, self.note(what, with))
        {
            tracing::debug!(%error, "a trial that passed is not noted at {}", path.display());
        }
    }

    fn note(&self, what: &str, with: &str) -> String {
        format!("{what} passed\n{}{with}\n", self.depends_on)
    }

    fn path_of_passed(&self, what: &str) -> Option<PathBuf> {
        let dir = self.dir.as_ref()?;
        Some(dir.join(format!("{}-{what}.passed", self.card)))
    }

    /// The probes of a GPU, with their files in a folder.
    #[cfg(test)]
    pub(crate) fn in_dir(dir: &Path, card: &str) -> Self {
        Self {
            dir: Some(dir.to_owned()),
            card: card.to_owned(),
            depends_on: format!("card {card}\n"),
        }
    }

    /// The probes with their files named after another GPU.
    #[must_use]
    pub fn of_card(self, card: &str) -> Self {
        Self {
            card: card.to_owned(),
            ..self
        }
    }

    /// Makes a trial, unless earlier ones did not end; one that gives nothing has not come back.
    pub fn run<T>(&self, what: &str, trial: impl FnOnce() -> Option<T>) -> Outcome<T> {
        let path = self
            .dir
            .as_ref()
            .map(|dir| dir.join(format!("{}-{what}", self.card)));
        let Some((path, mut file)) = path.and_then(|path| Some((path.clone(), begin(&path)?)))
        else {
            return trial().map_or(Outcome::Stuck, Outcome::Ended);
        };
        let mut before = String::new();
        let _ = file.read_to_string(&mut before);
        let begun = before.lines().count();
        if begun >= GIVEN_UP {
            return Outcome::NotMade(format!(
                "the trial of {what} did not end {begun} times and is not made; remove {} to try again",
                path.display()
            ));
        }
        let under_way = || UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
        under_way().push(UnderWay {
            path: path.clone(),
            began: Instant::now(),
            before,
        });
        // What cannot be noted is not remembered, and that is all.
        let _ = writeln!(file, "begun by process {}", std::process::id()).and(file.sync_all());
        let Some(result) = trial() else {
            return Outcome::Stuck;
        };
        under_way().retain(|trial| trial.path != path);
        let _ = file
            .rewind()
            .and(file.set_len(0))
            .and(fs::remove_file(&path));
        Outcome::Ended(result)
    }
}

/// The file of a trial, locked; `None` where another process is at the same trial or has just ended
/// it, or nothing can be written.
fn begin(path: &Path) -> Option<File> {
    fs::create_dir_all(path.parent()?).ok()?;
    let file = File::options()
        .read(true)
        .append(true)
        .create(true)
        .open(path)
        .ok()?;
    file.try_lock().ok()?;
    // Another process may have ended its trial, and removed the file, before this one had the lock.
    let (ours, named) = (file.metadata().ok()?, fs::metadata(path).ok()?);
    ((ours.dev(), ours.ino()) == (named.dev(), named.ino())).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trials(dir: &Path) -> Trials {
        Trials::in_dir(dir, "gfx1100-1")
    }

    #[test]
    fn a_trial_that_ended_the_process_twice_is_not_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let trials = trials(dir.path());
        for before in 0..3 {
            let made = std::panic::catch_unwind(|| {
                // A panic stands for the end of the process: the file stays, and its lock goes.
                trials.run::<()>("mapping", || panic!("the card faults"))
            });
            assert_eq!(made.is_err(), before < 2, "{made:?}");
            if let Ok(outcome) = made {
                let Outcome::NotMade(reason) = outcome else {
                    panic!("{outcome:?}");
                };
                assert!(reason.contains("gfx1100-1-mapping"), "{reason}");
            }
        }
        let other = trials.run("registration", || Some(7));
        assert_eq!(other, Outcome::Ended(7), "the others are");
        fs::remove_file(dir.path().join("gfx1100-1-mapping")).unwrap();
        assert_eq!(trials.run("mapping", || Some(8)), Outcome::Ended(8));
    }

    /// Once the file of a trial that never came back was removed, since the wait for it had ended.
    #[test]
    fn a_trial_that_never_came_back_counts_as_one_that_did_not_end() {
        let dir = tempfile::tempdir().unwrap();
        let trials = trials(dir.path());
        for _ in 0..2 {
            assert_eq!(trials.run::<()>("mapping", || None), Outcome::Stuck);
        }
        let third = trials.run("mapping", || Some(1));
        assert!(matches!(&third, Outcome::NotMade(_)), "{third:?}");
    }

    #[test]
    fn a_trial_that_ends_leaves_nothing_and_forgets_what_was() {
        let dir = tempfile::tempdir().unwrap();
        let trials = trials(dir.path());
        for _ in 0..5 {
            assert_eq!(trials.run::<()>("mapping", || None), Outcome::Stuck);
            assert_eq!(trials.run("mapping", || Some(1)), Outcome::Ended(1));
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    /// A stop in the midst of a trial is no sign of what the trial does.
    #[test]
    fn a_trial_that_had_only_just_begun_when_the_process_was_ended_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let trials = trials(dir.path());
        let file = dir.path().join("gfx1100-1-ended");
        for _ in 0..3 {
            let stopped = trials.run("ended", || {
                assert!(file.exists());
                forget_the_young_below(dir.path());
                None::<()>
            });
            assert_eq!(stopped, Outcome::Stuck, "it is tried each time");
            assert!(!file.exists());
        }
        let stuck = trials.run::<()>("ended", || None);
        assert_eq!(stuck, Outcome::Stuck);
        let before = fs::read_to_string(&file).unwrap();
        let again = trials.run("ended", || {
            forget_the_young_below(dir.path());
            None::<()>
        });
        assert_eq!(again, Outcome::Stuck);
        assert_eq!(fs::read_to_string(&file).unwrap(), before, "the one before");
    }

    #[test]
    fn what_passed_is_remembered_of_the_same_card_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let trials = trials(dir.path());
        assert_eq!(trials.passed("mapping", "x"), None);
        trials.note_passed("mapping", "x");
        let path = trials.passed("mapping", "x").unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        assert_eq!(trials.passed("mapping", "y"), None);
        assert_eq!(trials.passed("products", "x"), None);
        let other = Trials {
            depends_on: "card gfx1100-1, another driver\n".to_owned(),
            ..trials.clone()
        };
        assert_eq!(other.passed("mapping", "x"), None, "of another driver");
        for damaged in ["", &whole[..whole.len() - 1], &format!("{whole}\n"), "\0"] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(trials.passed("mapping", "x"), None, "{damaged:?}");
        }
        fs::write(&path, [0xff; 4096]).unwrap();
        assert_eq!(trials.passed("mapping", "x"), None);
        trials.note_passed("mapping", "x");
        assert_eq!(trials.passed("mapping", "x"), Some(path));
        let none = Trials {
            dir: None,
            ..trials
        };
        none.note_passed("mapping", "x");
        assert_eq!(none.passed("mapping", "x"), None, "kept nowhere");
    }

    #[test]
    fn two_processes_that_start_together_both_try() {
        let dir = tempfile::tempdir().unwrap();
        let trials = trials(dir.path());
        let inner = || Some(trials.run("mapping", || Some(1)));
        let outer = trials.run("mapping", inner);
        assert_eq!(outer, Outcome::Ended(Outcome::Ended(1)));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
