//! A thread that observes what other processes do on the GPU, so that the engine never waits for
//! the vendor's library or for files of `/proc`.
//!
//! While the device is closed the thread pauses and closes the library, which would keep the GPU
//! awake.
//!
//! *Invariant:* the thread never touches the device: it has the card's address and no handle.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rocmforge_gpu_driver::others::{Card, Observer, OthersUse, OwnUse, Places};

use crate::clock::Clock;

/// How often the engine takes the observations while there is no work.
pub(crate) const EVERY: Duration = Duration::from_millis(50);
/// Interval at which the thread reads counts of other processes.
const PERIOD: Duration = Duration::from_millis(50);
/// Number of observations that are skipped after a failed one.
const PAUSE: u32 = 20;

/// How long memory that this process freed may still be counted as used, since a driver may wipe it
/// first: meanwhile it would look like another process's.
const SETTLES: Duration = Duration::from_millis(500);

/// State shared by the engine and the thread that watches other processes.
#[derive(Debug, Default)]
struct Shared {
    own_bytes: AtomicU64,
    is_working: AtomicBool,
    rests: AtomicBool,
    /// The last observation until it is taken, with the bytes that this process held then by its
    /// own count.
    seen: Mutex<Option<(u64, Option<OthersUse>)>>,
}

/// Observes, by a thread, what other processes do on the GPU.
#[derive(Debug)]
pub(crate) struct OthersWatch {
    shared: Arc<Shared>,
    /// Bytes that this process held at the last observation, and when they last became fewer.
    held: u64,
    less_since: Option<Instant>,
    /// Dropping it ends the thread.
    _alive: Sender<()>,
}

impl OthersWatch {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// Why the GPU cannot be observed and what to do, as a message.
    pub(crate) fn start(card: Card, places: Places) -> Result<Self, String> {
        let observer = card.observer(&places)?;
        let shared = Arc::new(Shared::default());
        let (alive, engine) = channel::<()>();
        let mut looks = Looks {
            card,
            places,
            observer: Some(observer),
            pause: 0,
            is_told: false,
        };
        let told = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("others-watch".to_owned());
        let started = thread.spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = engine.recv_timeout(PERIOD) {
                looks.look(&told);
            }
        });
        started.map_err(|error| format!("no thread can be started for it: {error}"))?;
        Ok(Self {
            shared,
            held: 0,
            less_since: None,
            _alive: alive,
        })
    }

    /// Sets what this process itself does on the GPU; `None` while the GPU is closed.
    pub(crate) fn tell(&self, own: Option<OwnUse>) {
        let shared = &self.shared;
        shared.rests.store(own.is_none(), Ordering::Relaxed);
        let own = own.unwrap_or_default();
        shared.own_bytes.store(own.bytes, Ordering::Relaxed);
        shared.is_working.store(own.is_working, Ordering::Relaxed);
    }

    /// Takes the last observation; `None` if there is no new one, `Some(None)` if observing failed.
    /// Observations from when this process held another number of bytes, or had just freed some,
    /// are dropped: its own memory would be taken for another process's.
    pub(crate) fn take(&mut self, own_bytes: u64, now: Instant) -> Option<Option<OthersUse>> {
        if own_bytes < self.held {
            self.less_since = Some(now);
        }
        self.held = own_bytes;
        let settles = |since: Instant| now.saturating_duration_since(since) < SETTLES;
        let settles = self.less_since.is_some_and(settles);
        let seen = self.shared.seen.lock();
        let (told, seen) = seen.unwrap_or_else(PoisonError::into_inner).take()?;
        (told == own_bytes && !settles).then_some(seen)
    }
}

/// The state of the observing thread.
struct Looks {
    card: Card,
    places: Places,
    observer: Option<Box<dyn Observer>>,
    /// Number of observations that are skipped now.
    pause: u32,
    /// Whether the failure to observe has been logged.
    is_told: bool,
}

impl Looks {
    fn look(&mut self, shared: &Shared) {
        if shared.rests.load(Ordering::Relaxed) {
            self.observer = None;
            return;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return;
        }
        let own = OwnUse {
            bytes: shared.own_bytes.load(Ordering::Relaxed),
            is_working: shared.is_working.load(Ordering::Relaxed),
        };
        let seen = match self.seen(own) {
            Ok(seen) => {
                self.is_told = false;
                Some(seen)
            }
            Err(error) => {
                (self.observer, self.pause) = (None, PAUSE);
                if !std::mem::replace(&mut self.is_told, true) {
                    tracing::warn!(%error, "other users of the GPU cannot be seen: no memory is given up for them meanwhile");
                }
                None
            }
        };
        let place = shared.seen.lock();
        *place.unwrap_or_else(PoisonError::into_inner) = Some((own.bytes, seen));
    }

    fn seen(&mut self, own: OwnUse) -> Result<OthersUse, String> {
        if self.observer.is_none() {
            self.observer = Some(self.card.observer(&self.places)?);
        }
        match &mut self.observer {
            Some(observer) => observer.look(own, Clock.now()),
            None => Err("nobody looks".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_process_took_or_gave_back_just_now_is_not_another_ones() {
        let shared = Arc::new(Shared::default());
        let looks = Arc::clone(&shared);
        let mut watch = OthersWatch {
            shared,
            held: 0,
            less_since: None,
            _alive: channel().0,
        };
        let seen = Some(OthersUse {
            bytes: 7,
            is_exact: true,
            busy_percent: None,
        });
        let begun = Clock.now();
        // Milliseconds, what it held at the look, what it holds, and whether the look counts.
        for (ms, told, held, counts) in [
            (0, 100, 100, true),
            (50, 100, 300, false),
            (100, 300, 300, true),
            (150, 300, 200, false),
            (200, 200, 200, false),
            (649, 200, 200, false),
            (650, 200, 200, true),
        ] {
            *looks.seen.lock().unwrap() = Some((told, seen));
            let at = begun + Duration::from_millis(ms);
            assert_eq!(watch.take(held, at), counts.then_some(seen), "at {ms}");
            assert_eq!(watch.take(held, at), None, "once");
        }
    }
}
