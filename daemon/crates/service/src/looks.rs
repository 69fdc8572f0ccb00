//! Looks at file systems that may not answer, as of a server that is gone: each on a thread of its
//! own, which nobody waits for longer than a while.
//!
//! What a look found is kept for those who come while a later one goes on. So a directory that is
//! slow is told of as it was found last, and one that does not answer costs those who look at it
//! one wait and one thread.
//!
//! *Invariant:* of each key one look goes on at a time (test
//! `one_that_hangs_is_waited_for_once_and_told_of_by_what_was_found_before`).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a look is waited for.
const WAIT_MAX: Duration = Duration::from_secs(3);

/// Looks at paths, and what they found.
#[derive(Debug)]
pub(crate) struct Looks<T>(Arc<Shared<T>>);

#[derive(Debug)]
struct Shared<T> {
    of: Mutex<HashMap<PathBuf, State<T>>>,
    changed: Condvar,
    wait_max: Duration,
}

#[derive(Debug)]
struct State<T> {
    goes_on: bool,
    looked: u64,
    found: Option<Arc<T>>,
}

impl<T> Default for State<T> {
    fn default() -> Self {
        Self {
            goes_on: false,
            looked: 0,
            found: None,
        }
    }
}

impl<T> Default for Looks<T> {
    fn default() -> Self {
        Self::waiting(WAIT_MAX)
    }
}

/// A look ends, with what it found; also where it panicked.
struct Ends<T> {
    shared: Arc<Shared<T>>,
    key: PathBuf,
    found: Option<T>,
}

impl<T> Drop for Ends<T> {
    fn drop(&mut self) {
        let mut of = self.shared.lock();
        let state = of.entry(std::mem::take(&mut self.key)).or_default();
        state.goes_on = false;
        state.looked += 1;
        if let Some(found) = self.found.take() {
            state.found = Some(Arc::new(found));
        }
        drop(of);
        self.shared.changed.notify_all();
    }
}

impl<T> Shared<T> {
    /// Nothing is done under this lock that could leave a half-made state behind.
    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, State<T>>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Looks<T> {
    fn waiting(wait_max: Duration) -> Self {
        Self(Arc::new(Shared {
            of: Mutex::default(),
            changed: Condvar::new(),
            wait_max,
        }))
    }
}

impl<T: Send + Sync + 'static> Looks<T> {
    /// What `look` finds at `key`, or what an earlier look found there where this one takes long or
    /// an earlier one still goes on; and whether it is this look's. Blocks.
    pub(crate) fn look(
        &self,
        key: &Path,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> (Option<Arc<T>>, bool) {
        let mut of = self.0.lock();
        let state = of.entry(key.to_owned()).or_default();
        if state.goes_on {
            return (state.found.clone(), false);
        }
        state.goes_on = true;
        let looked = state.looked;
        let ends = Ends {
            shared: Arc::clone(&self.0),
            key: key.to_owned(),
            found: None,
        };
        let thread = std::thread::Builder::new().name("look".to_owned());
        drop(of);
        // Where there is no thread, what was to run on it goes, and with it the mark.
        let _ = thread.spawn(move || {
            let mut ends = ends;
            ends.found = Some(look());
        });
        let until = Instant::now() + self.0.wait_max;
        let mut of = self.0.lock();
        loop {
            let state = of.entry(key.to_owned()).or_default();
            if state.looked > looked {
                return (state.found.clone(), true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return (state.found.clone(), false);
            }
            let waited = self.0.changed.wait_timeout(of, left);
            of = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn one_that_hangs_is_waited_for_once_and_told_of_by_what_was_found_before() {
        let looks = Looks::waiting(Duration::from_millis(50));
        let (near, far) = (Path::new("/near"), Path::new("/far"));
        assert_eq!(looks.look(far, || 1), (Some(Arc::new(1)), true));
        let (sender, hangs) = channel::<()>();
        let hanging = move || {
            let _ = hangs.recv();
            2
        };
        assert_eq!(looks.look(far, hanging), (Some(Arc::new(1)), false));
        let begin = Instant::now();
        for _ in 0..100 {
            let again = looks.look(far, || panic!("one look at a time"));
            assert_eq!(again, (Some(Arc::new(1)), false));
        }
        assert!(begin.elapsed() < Duration::from_secs(5), "they waited");
        assert_eq!(looks.look(near, || 7), (Some(Arc::new(7)), true));
        // It answers.
        drop(sender);
        let give_up = Instant::now() + Duration::from_secs(60);
        while looks.look(far, || 3) != (Some(Arc::new(3)), true) {
            assert!(Instant::now() < give_up, "it never answers");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn one_that_panics_ends() {
        let looks = Looks::<u32>::default();
        for _ in 0..2 {
            let found = looks.look(Path::new("/a"), || panic!("for the test"));
            assert_eq!(found, (None, true));
        }
    }
}
