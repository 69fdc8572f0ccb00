//! Deduplicates work that several callers want at once: it is done once, and all wait for its
//! result.
//!
//! The work runs in a task of its own and completes even if callers go away. All waiting callers
//! get its result, also a failure. A later caller starts the work again.
//!
//! *Invariant:* each key has at most one work running (test
//! `many_callers_have_one_work_and_all_its_outcome`). The lock is held to look into the map and to
//! put an entry there, never across an await.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use rocmforge_failure::{self as failure, Failure};

type Outcomes<T> = HashMap<String, watch::Receiver<Option<Result<T, Failure>>>>;

/// The works that are under way, by key.
pub(crate) struct Flights<T>(Arc<Mutex<Outcomes<T>>>);

impl<T> Default for Flights<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T> fmt::Debug for Flights<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(lock(&self.0).keys()).finish()
    }
}

/// Locks the map. A poisoned lock is used: it is valid at every moment.
fn lock<T>(outcomes: &Mutex<Outcomes<T>>) -> MutexGuard<'_, Outcomes<T>> {
    outcomes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A work is under way until this goes; it goes too where the work panics.
struct UnderWay<T> {
    outcomes: Arc<Mutex<Outcomes<T>>>,
    key: String,
}

impl<T> Drop for UnderWay<T> {
    fn drop(&mut self) {
        lock(&self.outcomes).remove(&self.key);
    }
}

impl<T: Clone + Send + Sync + 'static> Flights<T> {
    /// What the work under way at `key` comes to; where there is none, that of `work`, which is
    /// begun. It goes on when this future is dropped.
    ///
    /// # Errors
    /// Those of the work; INTERNAL where it panicked.
    pub(crate) async fn join<W>(&self, key: &str, work: impl FnOnce() -> W) -> Result<T, Failure>
    where
        W: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let mut outcome = self.begin(key, work);
        match outcome.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(outcome)) => outcome.clone(),
            Ok(None) | Err(_) => Err(failure::bug("loading a model panicked")),
        }
    }

    /// Waits for the end of the work under way at `key`, if there is one.
    pub(crate) async fn settled(&self, key: &str) {
        let outcome = lock(&self.0).get(key).cloned();
        if let Some(mut outcome) = outcome {
            // One that panicked has ended, too.
            let _ = outcome.wait_for(Option::is_some).await;
        }
    }

    fn begin<W>(
        &self,
        key: &str,
        work: impl FnOnce() -> W,
    ) -> watch::Receiver<Option<Result<T, Failure>>>
    where
        W: Future<Output = Result<T, Failure>> + Send + 'static,
    {
        let mut outcomes = lock(&self.0);
        if let Some(outcome) = outcomes.get(key) {
            return outcome.clone();
        }
        let (sender, receiver) = watch::channel(None);
        outcomes.insert(key.to_owned(), receiver.clone());
        let under_way = UnderWay {
            outcomes: Arc::clone(&self.0),
            key: key.to_owned(),
        };
        let work = work();
        tokio::spawn(async move {
            let outcome = work.await;
            // Before the outcome is told: who comes behind it begins anew.
            drop(under_way);
            sender.send_replace(Some(outcome));
        });
        receiver
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn many_callers_have_one_work_and_all_its_outcome() {
        let flights = Arc::new(Flights::<u32>::default());
        let (begun, go) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
        for outcome in [Ok(7), Err(failure::bug("for the test"))] {
            let join = |_| {
                let (flights, begun, go) = (flights.clone(), begun.clone(), go.clone());
                let outcome = outcome.clone();
                tokio::spawn(async move {
                    let work = || async move {
                        begun.fetch_add(1, Ordering::Relaxed);
                        go.notified().await;
                        outcome
                    };
                    flights.join("a", work).await
                })
            };
            let callers: Vec<_> = (0..50).map(join).collect();
            tokio::time::sleep(Duration::from_millis(20)).await;
            go.notify_one();
            for caller in callers {
                assert_eq!(caller.await.unwrap(), outcome);
            }
        }
        // One for each outcome; what has ended is begun anew.
        assert_eq!(begun.load(Ordering::Relaxed), 2);
        assert!(lock(&flights.0).is_empty());
    }

    async fn panics() -> Result<u32, Failure> {
        panic!("for the test")
    }

    #[tokio::test]
    async fn a_first_caller_that_goes_away_leaves_the_work_to_the_others() {
        let flights = Arc::new(Flights::<u32>::default());
        let go = Arc::new(Notify::new());
        let first = tokio::spawn({
            let (flights, go) = (flights.clone(), go.clone());
            async move {
                let work = || async move {
                    go.notified().await;
                    Ok(7)
                };
                flights.join("a", work).await
            }
        });
        while lock(&flights.0).is_empty() {
            tokio::task::yield_now().await;
        }
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        go.notify_one();
        // Another is not begun: it would panic.
        let second = flights.join("a", panics);
        assert_eq!(second.await, Ok(7));
    }

    #[tokio::test]
    async fn a_work_that_panics_is_told_and_leaves_nothing() {
        let flights = Flights::<u32>::default();
        let failure = flights.join("a", panics).await.unwrap_err();
        assert!(failure.message().contains("panicked"), "{failure:?}");
        assert!(lock(&flights.0).is_empty());
        assert_eq!(flights.join("a", || async { Ok(1) }).await, Ok(1));
    }
}
