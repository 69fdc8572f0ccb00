//! Looks at file systems that may not answer, as of a server that is gone: each on a thread of its
//! own, which nobody waits for longer than a while.
//!
//! What a look found is kept for those who come while a later one goes on. So a directory that is
//! slow is told of as it was found last, and one that does not answer costs those who look at it
//! one wait and one thread.
//!
//! *Invariant:* of each key one look goes on at a time, but for [`HANGING_MAX`] that have hung for
//! a minute (test `one_that_hangs_is_waited_for_once_and_told_of_by_what_was_found_before`).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a look is waited for.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// After so long another look is let try: what hung may be there anew, and the thread that hangs on
/// what was there before never ends.
const ANEW_AFTER: Duration = Duration::from_secs(60);
/// Looks at one key that may hang.
const HANGING_MAX: usize = 8;

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
    /// When those began that go on.
    going_on: Vec<(u64, Instant)>,
    /// Looks that were begun, and the last of those that have ended.
    begun: u64,
    looked: u64,
    found: Option<Arc<T>>,
}

impl<T> Default for State<T> {
    fn default() -> Self {
        Self {
            going_on: Vec::new(),
            begun: 0,
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
    number: u64,
    found: Option<T>,
}

impl<T> Drop for Ends<T> {
    fn drop(&mut self) {
        let mut of = self.shared.lock();
        let state = of.entry(std::mem::take(&mut self.key)).or_default();
        state.going_on.retain(|(number, _)| *number != self.number);
        // One that hung found what was there long ago.
        if self.number > state.looked {
            state.looked = self.number;
            if let Some(found) = self.found.take() {
                state.found = Some(Arc::new(found));
            }
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

impl<T> Looks<T> {
    /// Whether a look at `key` has found anything yet.
    pub(crate) fn has_found(&self, key: &Path) -> bool {
        self.0
            .lock()
            .get(key)
            .is_some_and(|state| state.found.is_some())
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
        let hang = |(_, since): &(u64, Instant)| since.elapsed() >= ANEW_AFTER;
        if !state.going_on.iter().all(hang) || state.going_on.len() >= HANGING_MAX {
            return (state.found.clone(), false);
        }
        state.begun += 1;
        let number = state.begun;
        state.going_on.push((number, Instant::now()));
        let ends = Ends {
            shared: Arc::clone(&self.0),
            key: key.to_owned(),
            number,
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
            if state.looked >= number {
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
        // Enough for those that do not hang.
        let long = Duration::from_secs(60);
        let looks = Looks::waiting(long);
        let hasty = Looks(Arc::new(Shared {
            of: Mutex::default(),
            changed: Condvar::new(),
            wait_max: Duration::from_millis(20),
        }));
        let (near, far) = (Path::new("/near"), Path::new("/far"));
        assert_eq!(looks.look(far, || 1), (Some(Arc::new(1)), true));
        std::mem::swap(&mut *looks.0.lock(), &mut *hasty.0.lock());
        let (sender, hangs) = channel::<()>();
        let hanging = move || {
            let _ = hangs.recv();
            2
        };
        assert_eq!(hasty.look(far, hanging), (Some(Arc::new(1)), false));
        for _ in 0..100 {
            let again = hasty.look(far, || panic!("one look at a time"));
            assert_eq!(again, (Some(Arc::new(1)), false));
        }
        assert_eq!(looks.look(near, || 7), (Some(Arc::new(7)), true));
        // A minute later another may look, and the first one's end changes nothing any more.
        hasty.0.lock().get_mut(far).unwrap().going_on[0].1 -= ANEW_AFTER;
        let give_up = Instant::now() + long;
        while hasty.look(far, || 3).0 != Some(Arc::new(3)) {
            assert!(Instant::now() < give_up, "no other look is let try");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(sender);
        while !hasty.0.lock()[far].going_on.is_empty() {
            assert!(Instant::now() < give_up, "it never ends");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(hasty.0.lock()[far].found, Some(Arc::new(3)));
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
