//! Probes of file systems that may hang, such as those of a server that is gone: each on a thread
//! of its own, for which callers wait a limited time.
//!
//! The last result is kept for callers that arrive while a later probe runs. So a slow directory is
//! reported as it was found last, and one that does not respond costs its callers one wait and one
//! thread.
//!
//! *Invariant:* each key has one probe running at a time. Another is started only if all running
//! ones have hung for a minute, up to [`HANGING_MAX`] of a key, and up to [`SPARE_MAX`] of all keys
//! beside the first ones (tests
//! `one_that_hangs_is_waited_for_once_and_told_of_by_what_was_found_before`,
//! `those_that_hang_are_bounded_of_a_key_and_of_all_together`).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum time that a caller waits for a probe.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Time after which another probe is started beside a hung one: the file system may respond again,
/// and a thread that hangs on its former state never ends.
const ANEW_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of hung probes of one key.
const HANGING_MAX: usize = 8;
/// Maximum number of additional probes beside others of the same key, over all keys.
const SPARE_MAX: usize = 64;

/// Probes of paths, and their last results.
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
    /// Start times of probes that are running.
    going_on: Vec<(u64, Instant)>,
    /// Number of probes started, and the number of the last one that has ended.
    begun: u64,
    looked: u64,
    found: Option<Arc<T>>,
    /// Number of the probe that found the result.
    found_by: u64,
}

impl<T> Default for State<T> {
    fn default() -> Self {
        Self {
            going_on: Vec::new(),
            begun: 0,
            looked: 0,
            found: None,
            found_by: 0,
        }
    }
}

impl<T> Default for Looks<T> {
    fn default() -> Self {
        Self::waiting(WAIT_MAX)
    }
}

/// Ends a probe and stores its result when it is dropped, also after a panic.
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
                state.found_by = self.number;
            }
        }
        drop(of);
        self.shared.changed.notify_all();
    }
}

impl<T> Shared<T> {
    /// Locks the states, also if poisoned: no code under this lock can leave an inconsistent state
    /// behind.
    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, State<T>>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Looks<T> {
    /// Probes whose callers wait at most `wait_max`.
    pub(crate) fn waiting(wait_max: Duration) -> Self {
        Self(Arc::new(Shared {
            of: Mutex::default(),
            changed: Condvar::new(),
            wait_max,
        }))
    }
}

impl<T> Looks<T> {
    /// The last result of a probe of `key`.
    pub(crate) fn found(&self, key: &Path) -> Option<Arc<T>> {
        self.0.lock().get(key)?.found.clone()
    }

    /// Whether any probe of `key` has ended with a result.
    pub(crate) fn has_found(&self, key: &Path) -> bool {
        self.found(key).is_some()
    }
}

/// A probe that runs, or ended a moment ago.
struct Begun {
    number: u64,
    since: Instant,
    /// Whether this caller started the probe.
    is_own: bool,
}

impl<T: Send + Sync + 'static> Looks<T> {
    /// Runs the probe `look` of `key`. Returns its result, or an earlier result if it takes long or
    /// an earlier probe still runs, and whether the result is this probe's. If there is no earlier
    /// result, a running probe counts as this one. Blocks.
    pub(crate) fn look(
        &self,
        key: &Path,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> (Option<Arc<T>>, bool) {
        let begun = self.begin(key, look);
        let counts = begun.is_own || !self.has_found(key);
        let has_ended = counts && self.has_ended(key, &begun);
        (self.found(key), has_ended)
    }

    /// Runs probes at once, and returns the results of those that end in time, by key; earlier
    /// results do not count. A probe that already runs for a key counts in its place. All together
    /// take no longer than one. Blocks.
    pub(crate) fn look_anew<L: FnOnce() -> T + Send + 'static>(
        &self,
        looks: Vec<(PathBuf, L)>,
    ) -> HashMap<PathBuf, Arc<T>> {
        let begin = |(key, look): (PathBuf, L)| {
            let begun = self.begin(&key, look);
            (key, begun)
        };
        let begun: Vec<_> = looks.into_iter().map(begin).collect();
        let ended = begun
            .into_iter()
            .filter(|(key, begun)| self.has_ended(key, begun));
        let found = ended.filter_map(|(key, begun)| {
            let of = self.0.lock();
            let state = of.get(&key)?;
            // It panicked, or there was no thread for it.
            let found = state
                .found
                .clone()
                .filter(|_| state.found_by >= begun.number)?;
            drop(of);
            Some((key, found))
        });
        found.collect()
    }

    /// Starts a probe if none runs, for later callers.
    pub(crate) fn start(&self, key: &Path, look: impl FnOnce() -> T + Send + 'static) {
        let _ = self.begin(key, look);
    }

    /// Starts a probe, or finds the one that runs.
    fn begin(&self, key: &Path, look: impl FnOnce() -> T + Send + 'static) -> Begun {
        let mut of = self.0.lock();
        let spare = |state: &State<T>| state.going_on.len().saturating_sub(1);
        let may_spare = of.values().map(spare).sum::<usize>() < SPARE_MAX;
        let state = of.entry(key.to_owned()).or_default();
        let hang = |(_, since): &(u64, Instant)| since.elapsed() >= ANEW_AFTER;
        if let Some(&(number, since)) = state.going_on.last()
            && !(may_spare && state.going_on.len() < HANGING_MAX && state.going_on.iter().all(hang))
        {
            return Begun {
                number,
                since,
                is_own: false,
            };
        }
        state.begun += 1;
        let begun = Begun {
            number: state.begun,
            since: Instant::now(),
            is_own: true,
        };
        state.going_on.push((begun.number, begun.since));
        let ends = Ends {
            shared: Arc::clone(&self.0),
            key: key.to_owned(),
            number: begun.number,
            found: None,
        };
        let thread = std::thread::Builder::new().name("look".to_owned());
        drop(of);
        // Where there is no thread, what was to run on it goes, and with it the mark.
        let _ = thread.spawn(move || {
            let mut ends = ends;
            ends.found = Some(look());
        });
        begun
    }

    /// Waits for the end of a probe, with the time limit. Returns whether it has ended.
    fn has_ended(&self, key: &Path, begun: &Begun) -> bool {
        let mut of = self.0.lock();
        loop {
            if of
                .get(key)
                .is_some_and(|state| state.looked >= begun.number)
            {
                return true;
            }
            let left = self.0.wait_max.saturating_sub(begun.since.elapsed());
            if left.is_zero() {
                return false;
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
    fn those_that_hang_are_bounded_of_a_key_and_of_all_together() {
        let looks = Looks::<()>::default();
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock().unwrap();
        let begun_of = |key: usize| {
            let path = PathBuf::from(format!("/far{key}"));
            let begins = || {
                let gate = Arc::clone(&gate);
                let begun = looks.begin(&path, move || drop(gate.lock()));
                // It has hung for a minute by the next one.
                for (_, since) in &mut looks.0.lock().get_mut(&path).unwrap().going_on {
                    *since = Instant::now() - ANEW_AFTER;
                }
                begun.is_own
            };
            (0..2 * SPARE_MAX).filter(|_| begins()).count()
        };
        let (whole, left) = (SPARE_MAX / (HANGING_MAX - 1), SPARE_MAX % (HANGING_MAX - 1));
        for key in 0..whole {
            assert_eq!(begun_of(key), HANGING_MAX, "of one key");
        }
        assert_eq!(begun_of(whole), 1 + left, "beside the first ones");
        assert_eq!(begun_of(whole + 1), 1, "the first one of a key goes on");
        drop(closed);
    }

    #[test]
    fn those_that_are_looked_at_together_do_not_hold_one_another_up() {
        type Look = Box<dyn FnOnce() -> u32 + Send>;
        let looks = Looks::waiting(Duration::from_secs(2));
        let path = |name: &str| Path::new("/same").join(name);
        assert_eq!(looks.look(&path("panics"), || 1).0, Some(Arc::new(1)));
        let (sender, hangs) = channel::<()>();
        let hanging = move || {
            let _ = hangs.recv();
            2
        };
        let together: Vec<(PathBuf, Look)> = vec![
            (path("hangs"), Box::new(hanging)),
            (path("panics"), Box::new(|| panic!("for the test"))),
            (path("near"), Box::new(|| 3)),
        ];
        let found = looks.look_anew(together);
        assert_eq!(found, HashMap::from([(path("near"), Arc::new(3))]));
        // What hangs costs no second wait, and what lies beside it is looked at all the same.
        let again: Vec<(PathBuf, Look)> = vec![
            (path("hangs"), Box::new(|| panic!("one look at a time"))),
            (path("panics"), Box::new(|| 4)),
        ];
        let found = looks.look_anew(again);
        assert_eq!(found, HashMap::from([(path("panics"), Arc::new(4))]));
        drop(sender);
    }

    #[test]
    fn who_comes_while_a_look_goes_on_gets_what_it_finds() {
        let looks = Looks::waiting(Duration::from_secs(60));
        let (sender, goes_on) = channel::<()>();
        let path = Path::new("/a").to_owned();
        let slow = move || {
            let _ = goes_on.recv();
            5
        };
        let begun = looks.begin(&path, slow);
        let joined = looks.begin(&path, || panic!("one look at a time"));
        assert!(begun.is_own && !joined.is_own);
        drop(sender);
        assert!(looks.has_ended(&path, &joined));
        let found = looks.0.lock()[&path].found.clone();
        assert_eq!(found, Some(Arc::new(5)));
    }

    #[test]
    fn who_comes_during_the_first_look_of_all_waits_for_it() {
        let looks = Looks::waiting(Duration::from_secs(60));
        let (sender, goes_on) = channel::<()>();
        let path = Path::new("/a").to_owned();
        let slow = move || {
            let _ = goes_on.recv();
            5
        };
        looks.begin(&path, slow);
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| looks.look(&path, || panic!("one look at a time")));
            std::thread::sleep(Duration::from_millis(20));
            drop(sender);
            assert_eq!(joined.join().unwrap(), (Some(Arc::new(5)), true));
        });
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
