//! Reports which models' files the engine waits for, while it waits.
//!
//! The engine thread reads embedding rows and waits for uploads. A file may not respond, for
//! example if its server is gone or its disk sleeps, and the kernel does not let such a read be
//! abandoned. Files on network file systems are first read by other threads, for which the engine
//! waits with a limit, or only the model's requests wait ([`crate::model::fetcher`],
//! [`crate::features::background_load`]). The status has to show which file it is, and who waits.
//!
//! ```text
//!   nothing --(begin)--> waiting --(SILENT_AFTER)--> told: logged, and in the snapshot
//!      ^                    |                           |
//!      +--------------------+----(the file answers)-----+
//! ```
//!
//! *Invariant:* the thread that looks never touches a file or the device (it has a file's name and
//! no handle).

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::api::{FileWait, Snapshot};

/// Length of a wait for a file from which on it is reported. Reading a large segment from a disk
/// takes about a second.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// Interval at which the thread checks for long waits.
const PERIOD: Duration = Duration::from_millis(500);

type Shared = Arc<Mutex<Waits>>;

/// The files that the engine waits for, and since when.
#[derive(Debug, Default)]
struct Waits {
    now: Vec<(u64, FileWait)>,
    begun: u64,
}

impl Waits {
    /// The wait to report: among those that are too long the one that blocks most requests, and
    /// began first.
    fn long(&self, silent_after: Duration) -> Option<&FileWait> {
        let all = self.now.iter().map(|(_, wait)| wait);
        let long = all.filter(|wait| wait.since.elapsed() >= silent_after);
        long.min_by_key(|wait| (!wait.all_wait, wait.since))
    }
}

/// Watches the files that the engine waits for now, and reports long waits.
#[derive(Debug, Default)]
pub(crate) struct FileWatch {
    now: Shared,
    /// Dropped to end the thread.
    _alive: Option<Sender<()>>,
}

/// A wait for a file under way; dropping it ends the wait.
#[derive(Debug)]
pub(crate) struct Waiting(Shared, u64);

impl Drop for Waiting {
    fn drop(&mut self) {
        lock(&self.0).now.retain(|(number, _)| *number != self.1);
    }
}

/// Locks the list of waits. A poisoned lock is used: the value is valid at every moment, also after
/// a panic.
fn lock(shared: &Shared) -> MutexGuard<'_, Waits> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FileWatch {
    /// Starts the thread that reports waits for files. If it cannot be started, waits are not
    /// reported; nothing else changes.
    pub(crate) fn start(snapshot: watch::Sender<Arc<Snapshot>>) -> Self {
        Self::looking(snapshot, SILENT_AFTER, PERIOD)
    }

    fn looking(
        snapshot: watch::Sender<Arc<Snapshot>>,
        silent_after: Duration,
        period: Duration,
    ) -> Self {
        let now = Shared::default();
        let (alive, engine) = channel::<()>();
        let looked_at = Arc::clone(&now);
        let thread = std::thread::Builder::new().name("file-watch".to_owned());
        let started = thread.spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = engine.recv_timeout(period) {
                look(&looked_at, silent_after, &snapshot);
            }
        });
        if let Err(error) = &started {
            tracing::warn!(%error, "cannot start the file watchdog: hung model files will not be reported");
        }
        Self {
            now,
            _alive: started.is_ok().then_some(alive),
        }
    }

    /// Begins a wait of the engine thread for the file at `path` of `model`; it ends when the
    /// result is dropped.
    pub(crate) fn begin(&self, model: &str, path: &Path) -> Waiting {
        self.waiting(model, path, true)
    }

    /// Begins a wait for the file at `path` that only holds up the requests of `model`; it ends
    /// when the result is dropped.
    pub(crate) fn begin_in_background(&self, model: &str, path: &Path) -> Waiting {
        self.waiting(model, path, false)
    }

    fn waiting(&self, model: &str, path: &Path, all_wait: bool) -> Waiting {
        let wait = FileWait {
            model: model.to_owned(),
            path: path.to_owned(),
            since: Instant::now(),
            all_wait,
        };
        let mut waits = lock(&self.now);
        waits.begun += 1;
        let number = waits.begun;
        waits.now.push((number, wait));
        Waiting(Arc::clone(&self.now), number)
    }
}

/// Reports a wait that has become long, and its end, in the log and in the snapshot.
fn look(now: &Shared, silent_after: Duration, snapshot: &watch::Sender<Arc<Snapshot>>) {
    snapshot.send_if_modified(|snapshot| {
        let now = lock(now);
        let long = now.long(silent_after);
        if snapshot.waits_for.as_ref() == long {
            return false;
        }
        let seconds = |wait: &FileWait| wait.since.elapsed().as_secs();
        match (&snapshot.waits_for, long) {
            (_, Some(wait)) if wait.all_wait => tracing::error!(
                model = wait.model,
                path = ?wait.path,
                seconds = seconds(wait),
                "the engine waits for a file that does not answer or is very slow; all models wait with it"
            ),
            (_, Some(wait)) => tracing::warn!(
                model = wait.model,
                path = ?wait.path,
                seconds = seconds(wait),
                "requests wait for a file that does not answer or is slow; those of other models go on"
            ),
            (Some(wait), None) => tracing::warn!(
                model = wait.model,
                path = ?wait.path,
                seconds = seconds(wait),
                "the file is not waited for any more"
            ),
            (None, None) => {}
        }
        let mut next = Snapshot::clone(snapshot);
        next.waits_for = long.cloned();
        *snapshot = Arc::new(next);
        true
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_does_not_answer_is_told_until_it_does() {
        let first = Arc::new(Snapshot::empty());
        let (sender, mut seen) = watch::channel(first);
        let tick = Duration::from_millis(1);
        let files = FileWatch::looking(sender, tick, tick);
        let path = Path::new("/models/far.gguf");
        for _ in 0..2 {
            let waiting = files.begin_in_background("far", path);
            while seen.borrow_and_update().waits_for.is_none() {
                std::thread::sleep(tick);
            }
            let told = seen.borrow().waits_for.clone().expect("it is told");
            assert_eq!((told.model.as_str(), &*told.path), ("far", path));
            drop(waiting);
            while seen.borrow_and_update().waits_for.is_some() {
                std::thread::sleep(tick);
            }
        }
    }

    #[test]
    fn what_holds_up_all_is_told_before_what_holds_up_one() {
        let files = FileWatch::default();
        let told = || lock(&files.now).long(Duration::ZERO).cloned();
        let background =
            files.begin_in_background("background", Path::new("/models/background.gguf"));
        assert_eq!(told().map(|wait| wait.model), Some("background".to_owned()));
        let all = files.begin("all", Path::new("/models/all.gguf"));
        assert_eq!(told().map(|wait| wait.model), Some("all".to_owned()));
        drop(all);
        assert_eq!(told().map(|wait| wait.model), Some("background".to_owned()));
        drop(background);
        assert_eq!(told(), None);
    }

    #[test]
    fn a_short_wait_is_not_told() {
        let now = Shared::default();
        let first = Arc::new(Snapshot::empty());
        let (sender, seen) = watch::channel(first);
        let files = FileWatch {
            now: Arc::clone(&now),
            _alive: None,
        };
        let _waiting = files.begin("near", Path::new("/models/near.gguf"));
        look(&now, Duration::from_secs(3600), &sender);
        assert!(seen.borrow().waits_for.is_none());
        look(&now, Duration::ZERO, &sender);
        assert!(seen.borrow().waits_for.is_some());
    }
}
