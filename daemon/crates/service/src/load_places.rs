//! Limits the loads that read headers at once, also those whose files do not respond.
//!
//! ```text
//!   waits for a place --> reads (a thread of its own) --> ended
//!                              \--(SILENT_AFTER)--> silent: its place is given back, its caller is
//!                                                   refused; the thread stays until its read ends
//! ```
//!
//! *Invariant:* there are fewer than [`AT_ONCE`] + [`SILENT_MAX`] threads: with so many silent ones
//! all are rejected (test `silent_loads_are_bounded_and_keep_no_place`).
//!
//! While a load from a directory is silent, other loads from it are rejected at once. When the last
//! silent one has read for twice [`SILENT_AFTER`], all may try again, until one of them is silent,
//! too. Loads by relative paths are never rejected this way: these may lead below any model
//! directory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_failure::{self as failure, Failure};
use tokio::sync::{Semaphore, oneshot};

use crate::refusals;

/// Maximum number of loads that read headers at the same time.
const AT_ONCE: usize = 4;
/// How long a load waits for a place before it is rejected.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// Time without a byte after which reading a header is abandoned.
const SILENT_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of silent loads.
const SILENT_MAX: usize = 16;

/// The loads that read headers now.
#[derive(Debug)]
pub(crate) struct LoadPlaces {
    free: Arc<Semaphore>,
    reading: Arc<Mutex<Vec<Reading>>>,
    silent_after: Duration,
}

#[derive(Debug)]
struct Reading {
    number: u64,
    path: PathBuf,
    since: Instant,
}

impl Default for LoadPlaces {
    fn default() -> Self {
        Self {
            free: Arc::new(Semaphore::new(AT_ONCE)),
            reading: Arc::default(),
            silent_after: SILENT_AFTER,
        }
    }
}

/// Ends the reading of a load when it is dropped.
struct Ends {
    reading: Arc<Mutex<Vec<Reading>>>,
    number: u64,
}

impl Drop for Ends {
    fn drop(&mut self) {
        lock(&self.reading).retain(|other| other.number != self.number);
    }
}

impl LoadPlaces {
    /// Runs `read`, which blocks on the file at `path`, on a thread of its own.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if other loads take all places; UNAVAILABLE if the file does not
    /// respond, or others of its directory do not; those of `read`.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        path: &Path,
        read: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        self.refuse_beside_silent(path)?;
        let place = tokio::time::timeout(WAIT_MAX, Arc::clone(&self.free).acquire_owned()).await;
        let Ok(Ok(place)) = place else {
            return Err(failure::exhausted(
                "too many models are being loaded at once; try again in a second",
                Duration::from_secs(1),
            ));
        };
        // Some may have become silent meanwhile.
        self.refuse_beside_silent(path)?;
        let ends = self.begin(path);
        let (sender, outcome) = oneshot::channel();
        let (alive, ended) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("load".to_owned());
        let started = thread.spawn(move || {
            let read = read();
            drop((ends, alive));
            // Nobody waiting is no reason to stay.
            let _ = sender.send(read);
        });
        if let Err(error) = started {
            return Err(failure::exhausted(
                &format!(
                    "no thread for the load: {error}; raise the limit of processes (ulimit -u, TasksMax= in the unit)"
                ),
                Duration::from_secs(1),
            ));
        }
        let silent_after = self.silent_after;
        // Whether or not its caller still waits.
        tokio::spawn(async move {
            let _ = tokio::time::timeout(silent_after, ended).await;
            drop(place);
        });
        match tokio::time::timeout(silent_after, outcome).await {
            Ok(Ok(read)) => read,
            Ok(Err(_)) => Err(failure::bug("reading the model's header panicked")),
            Err(_) => Err(refusals::file_silent(path, silent_after)),
        }
    }

    fn refuse_beside_silent(&self, path: &Path) -> Result<(), Failure> {
        let reading = lock(&self.reading);
        let is_silent = |other: &&Reading| other.since.elapsed() >= self.silent_after;
        // A relative path may lead below any model directory.
        let beside = |other: &&Reading| path.is_absolute() && other.path.parent() == path.parent();
        let of_directory = reading.iter().filter(is_silent).filter(beside);
        // The last one: after as long again one is let try whether the directory is there anew.
        if let Some(other) = of_directory.max_by_key(|other| other.since)
            && other.since.elapsed() < 2 * self.silent_after
        {
            return Err(refusals::file_silent(&other.path, other.since.elapsed()));
        }
        if reading.iter().filter(is_silent).count() >= SILENT_MAX {
            return Err(failure::exhausted(
                "too many loads wait for files that do not answer; check the mounts that the models lie on",
                Duration::from_secs(5),
            ));
        }
        Ok(())
    }

    fn begin(&self, path: &Path) -> Ends {
        let mut reading = lock(&self.reading);
        let number = reading.last().map_or(0, |last| last.number + 1);
        reading.push(Reading {
            number,
            path: path.to_owned(),
            since: Instant::now(),
        });
        Ends {
            reading: Arc::clone(&self.reading),
            number,
        }
    }
}

/// Locks the list, also if poisoned: no code under this lock can leave an inconsistent state
/// behind.
fn lock(reading: &Mutex<Vec<Reading>>) -> MutexGuard<'_, Vec<Reading>> {
    reading.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// After this what hangs is silent.
    const SOON: Duration = Duration::from_millis(20);

    /// A load that reads until what is returned is dropped.
    async fn hang(places: &LoadPlaces, path: &str) -> (Failure, Sender<()>) {
        let (sender, hangs) = channel::<()>();
        let read = places.run(Path::new(path), move || {
            let _ = hangs.recv();
            Ok(())
        });
        (read.await.expect_err("it hangs"), sender)
    }

    #[tokio::test]
    async fn silent_loads_are_bounded_and_keep_no_place() {
        let mut places = LoadPlaces::default();
        let mut hanging = Vec::new();
        for i in 0..SILENT_MAX {
            places.silent_after = SOON;
            let (failure, sender) = hang(&places, &format!("/far{i}/model.gguf")).await;
            assert_eq!(failure.reason(), failure::Reason::ModelFileSilent);
            assert!(failure.message().contains("/far"), "{failure:?}");
            hanging.push(sender);
            places.silent_after = SILENT_AFTER;
            let near = places.run(Path::new("/near/model.gguf"), move || Ok(i));
            assert_eq!(near.await.expect("a place is free"), i);
        }
        places.silent_after = SOON;
        let near = places.run(Path::new("/near/model.gguf"), || Ok(())).await;
        assert_eq!(
            near.expect_err("too many hang").reason(),
            failure::Reason::FullNow
        );
        // They answer again.
        drop(hanging);
        let answered = async {
            while !lock(&places.reading).is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let answered = tokio::time::timeout(Duration::from_secs(60), answered).await;
        answered.expect("all have ended");
        places.silent_after = SILENT_AFTER;
        let near = places.run(Path::new("/near/model.gguf"), || Ok(())).await;
        near.expect("nothing is kept of them");
    }

    #[tokio::test]
    async fn files_beside_a_silent_one_are_refused_at_once() {
        let mut places = LoadPlaces {
            silent_after: SOON,
            ..LoadPlaces::default()
        };
        let (_, _hangs) = hang(&places, "/far/a.gguf").await;
        lock(&places.reading)[0].since = Instant::now() - SILENT_AFTER;
        places.silent_after = SILENT_AFTER;
        let near = places.run(Path::new("/near/b.gguf"), || Ok(()));
        near.await.expect("of another directory");
        let other = places.run(Path::new("/far/b.gguf"), || Ok(())).await;
        let failure = other.expect_err("it would hang");
        assert_eq!(failure.reason(), failure::Reason::ModelFileSilent);
        assert!(failure.message().contains("/far/a.gguf"), "{failure:?}");
        // After a while one is let try.
        lock(&places.reading)[0].since = Instant::now() - 2 * SILENT_AFTER;
        let again = places.run(Path::new("/far/b.gguf"), || Ok(()));
        again.await.expect("the directory may be there anew");
    }

    #[tokio::test]
    async fn a_load_that_panics_is_told_and_keeps_no_place() {
        let places = LoadPlaces::default();
        for _ in 0..2 * AT_ONCE {
            let read = places.run(Path::new("/near/a.gguf"), || -> Result<(), Failure> {
                panic!("for the test")
            });
            let failure = read.await.expect_err("it panicked");
            assert!(failure.message().contains("panicked"), "{failure:?}");
        }
        assert!(lock(&places.reading).is_empty());
    }
}
