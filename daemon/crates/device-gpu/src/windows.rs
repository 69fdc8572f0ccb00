//! Windows of file mappings that the driver has registered, so that a copy engine
//! reads the page cache itself.
//!
//! A file is cut into windows of [`WINDOW_BYTES`]. Threads that have nothing to copy register what
//! is expected to be copied from, as long as that takes no other window's room. A staging thread
//! that is about to copy from an absent window registers it where the segment was read before, or
//! is small, as a mixture's experts are, of which a window has many. Else what is read for the
//! first time goes through pinned buffers, by all threads at once, and is registered afterwards:
//! drivers register one range at a time, slower than the link copies, and keep everything else
//! waiting. A window stays registered until others need the room, the one that was used longest
//! ago first.
//!
//! ```text
//!   absent --(a thread takes it up)--> being registered --> registered
//!     ^                                      |                  |
//!     +--------------------------------------|--(evicted, forgotten)
//!                                            +--(refused)--> the file is read through pinned
//!                                                            buffers from then on
//! ```
//!
//! One thread at a time registers, and pieces of other windows go through pinned buffers meanwhile:
//! together they keep the link busy.
//!
//! *Invariant:* bytes of windows that are counted <= the bound; one that is being unregistered is
//! counted no more (`Inner::make_room`). *Invariant:* a window with users is never unregistered
//! (test `the_windows_of_an_upload_stay_until_its_copies_have_ended`); a user is an upload whose
//! copies the device may not have ended yet.
//! *Threads:* staging threads and the engine thread; the lock is not held while the driver works.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rocmforge_device::Error;
use rocmforge_gguf::limits::PART_ALIGNMENT;
use rocmforge_gguf::{MappedFile, MappedRange};
use rocmforge_gpu_driver::{Context, DevicePtr, Registration};

use super::failed;
use super::holds::Holds;

/// Bytes of a window: large enough that a registration's fixed cost is nothing beside the copy's
/// time.
pub(super) const WINDOW_BYTES: u64 = 32 << 20;

/// Slower than this, pages that lie in the page cache are not registered but looked at one by one:
/// some kernels do.
const CRAWL_BYTES_PER_S: f64 = 250e6;

/// Less is not judged by its time.
const JUDGED_BYTES: u64 = 1 << 20;

/// A file's number among those that were seen: its address, which is its own as
/// long as a window or a model keeps it.
pub(super) fn key_of(file: &Arc<MappedFile>) -> usize {
    Arc::as_ptr(file) as usize
}

// So that no window has pages of two parts of a split model.
const _: () = assert!(PART_ALIGNMENT.is_multiple_of(WINDOW_BYTES));

/// The bytes of a file that its window of this number has: up to the end of the part in which it
/// begins.
fn range_of(file: &MappedFile, number: u64) -> std::ops::Range<u64> {
    let start = number * WINDOW_BYTES;
    start..(start + WINDOW_BYTES).min(file.part_end(start).unwrap_or(start))
}

/// A window: file and number in it.
pub(super) type WindowKey = (usize, u64);

/// Bytes of the host's memory that copy engines read at full speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) host: *const u8,
    pub(super) bytes: u64,
    /// Address at which kernels read the part, if that is known.
    pub(super) device: Option<DevicePtr>,
}

enum State {
    Registering,
    Ready {
        registration: Registration,
        pages: MappedRange,
        bytes: u64,
        users: u32,
        used_at: u64,
    },
}

#[derive(Default)]
struct Inner {
    windows: HashMap<WindowKey, State>,
    /// Files whose registration was refused; kept alive so that their numbers stay theirs.
    refused: HashMap<usize, Arc<MappedFile>>,
    forgotten: HashSet<usize>,
    bytes: u64,
    clock: u64,
    /// Whether a thread is registering a window.
    registering: bool,
}

/// The registered windows of all files.
pub(super) struct Windows {
    context: Context,
    bytes_max: u64,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// Who queues something on the device, for whom registrations wait.
    holds: Arc<Holds>,
}

impl std::fmt::Debug for Windows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Windows")
            .field("bytes_max", &self.bytes_max)
            .finish_non_exhaustive()
    }
}

impl Windows {
    pub(super) fn new(context: &Context, bytes_max: u64) -> Self {
        Self {
            context: context.clone(),
            bytes_max,
            inner: Mutex::default(),
            changed: Condvar::new(),
            holds: Holds::new(),
        }
    }

    /// Who queues something on the device, for whom registrations wait.
    pub(super) fn holds(&self) -> &Arc<Holds> {
        &self.holds
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a registered window of the file has from `offset` on, to the window's end; its key goes
    /// to `used`, once, and the window has a user more. `None` where the file must be read
    /// otherwise: the driver refuses it, there is no room, another window is being registered, or
    /// this one is not registered and `registers` is false.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub(super) fn address(
        &self,
        file: &Arc<MappedFile>,
        offset: u64,
        registers: bool,
        used: &mut Vec<WindowKey>,
    ) -> Result<Option<Part>, Error> {
        let key = (key_of(file), offset / WINDOW_BYTES);
        let range = range_of(file, key.1);
        let mut inner = self.lock();
        loop {
            if self.bytes_max == 0 || inner.refuses(file) {
                return Ok(None);
            }
            inner.clock += 1;
            let (clock, registering) = (inner.clock, inner.registering);
            match inner.windows.get_mut(&key) {
                Some(State::Ready {
                    registration,
                    users,
                    used_at,
                    ..
                }) => {
                    *used_at = clock;
                    if !used.contains(&key) {
                        used.push(key);
                        *users += 1;
                    }
                    let at = offset - range.start;
                    return Ok(Some(Part {
                        host: registration.as_ptr().wrapping_add(at as usize),
                        bytes: range.end - offset,
                        device: registration.device_address().map(|first| first.offset(at)),
                    }));
                }
                Some(State::Registering) | None if !registers => return Ok(None),
                Some(State::Registering) => {
                    inner = self
                        .changed
                        .wait(inner)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                None if registering => return Ok(None),
                None => {
                    let bytes = range.end - range.start;
                    let Some(victims) = inner.make_room(self.bytes_max, bytes) else {
                        return Ok(None);
                    };
                    inner = self.bring_in(inner, victims, file, key)?;
                }
            }
        }
    }

    /// Whether windows of this file may be registered, as far as is known.
    pub(super) fn takes(&self, file: &Arc<MappedFile>) -> bool {
        self.bytes_max > 0 && !self.lock().refuses(file)
    }

    /// Registers a window that is likely to be copied from, unless that would take room from
    /// others, wait for a disk or for another registration. At most half of the bound is filled so.
    pub(super) fn register_ahead(&self, file: &Arc<MappedFile>, number: u64) {
        let key = (key_of(file), number);
        let range = range_of(file, number);
        let wanted = |inner: &Inner| {
            !inner.refuses(file)
                && !inner.windows.contains_key(&key)
                && inner.bytes + (range.end - range.start) <= self.bytes_max / 2
        };
        if !wanted(&self.lock()) || !file.is_cached(range.clone()) {
            return;
        }
        let mut inner = self.lock();
        while inner.registering {
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if wanted(&inner)
            && let Err(error) = self.bring_in(inner, Vec::new(), file, key)
        {
            // The next upload meets it too.
            tracing::debug!(%error, "registering ahead of need");
        }
    }

    /// Registers an absent window; its room is there.
    fn bring_in<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        victims: Vec<(Registration, MappedRange)>,
        file: &Arc<MappedFile>,
        key: WindowKey,
    ) -> Result<MutexGuard<'a, Inner>, Error> {
        let range = range_of(file, key.1);
        let bytes = range.end - range.start;
        inner.windows.insert(key, State::Registering);
        inner.bytes += bytes;
        inner.registering = true;
        drop(inner);
        drop(victims);
        let made = self.register(file, range.start, range.end);
        let mut inner = self.lock();
        inner.registering = false;
        self.changed.notify_all();
        match made {
            Ok(Some((registration, pages))) => {
                let ready = State::Ready {
                    registration,
                    pages,
                    bytes,
                    users: 0,
                    used_at: inner.clock,
                };
                inner.windows.insert(key, ready);
                if inner.forgotten.contains(&key.0) {
                    // Nobody will read it: it goes as soon as the lock is free.
                    let gone = inner.take(key);
                    drop(inner);
                    drop(gone);
                    inner = self.lock();
                }
                Ok(inner)
            }
            other => {
                inner.windows.remove(&key);
                inner.bytes -= bytes;
                if inner.forgotten.contains(&key.0) {
                    inner.end_of(key.0);
                } else {
                    inner.refused.insert(key.0, Arc::clone(file));
                }
                other.map(|_| inner)
            }
        }
    }

    fn register(
        &self,
        file: &Arc<MappedFile>,
        start: u64,
        end: u64,
    ) -> Result<Option<(Registration, MappedRange)>, Error> {
        let pages = match file.mapped_range(start..end) {
            Ok(Some(pages)) => pages,
            Ok(None) => return Ok(None),
            Err(error) => {
                tracing::debug!(%error, "a range of a file cannot be registered");
                return Ok(None);
            }
        };
        // What is not in the page cache is read ahead while the pages before it are pinned.
        let cached = file.is_cached(start..end);
        file.will_need(start..end);
        let (ptr, len) = (pages.as_ptr(), pages.len());
        self.holds.wait();
        let begin = Instant::now();
        let kept = Arc::new(pages.clone());
        // SAFETY: whole pages of a mapping that `kept` keeps; windows do not share pages, and one
        // is registered once at a time (its state says so). It is dropped only without users, that
        // is when its copies have ended.
        match unsafe { Registration::new(&self.context, ptr, len, kept) } {
            Ok(registration) => {
                let us = begin.elapsed().as_micros() as u64;
                tracing::trace!(start, bytes = len, us, "a window is registered");
                let rate = len as f64 / begin.elapsed().as_secs_f64().max(1e-9);
                if cached && len as u64 >= JUDGED_BYTES && rate < CRAWL_BYTES_PER_S {
                    tracing::info!(
                        file = ?file.path(),
                        "registering this file crawls, at {:.1} MB/s; it goes through pinned buffers",
                        rate / 1e6
                    );
                    return Ok(None);
                }
                Ok(Some((registration, pages)))
            }
            Err(error) if error.is_lost() => Err(failed("registering a file", error)),
            Err(error) => {
                tracing::info!(
                    file = ?file.path(),
                    %error,
                    "the driver does not register this file; it goes through pinned buffers"
                );
                Ok(None)
            }
        }
    }

    /// The uses of an upload have ended.
    pub(super) fn release(&self, used: &[WindowKey]) {
        let mut inner = self.lock();
        let mut gone = Vec::new();
        for key in used {
            if let Some(State::Ready { users, .. }) = inner.windows.get_mut(key) {
                *users -= 1;
                if *users == 0 && inner.forgotten.contains(&key.0) {
                    gone.extend(inner.take(*key));
                }
            }
        }
        drop(inner);
        drop(gone);
    }

    /// Unregisters a file that will not be read any more.
    pub(super) fn forget(&self, file: &Arc<MappedFile>) {
        let number = key_of(file);
        let mut inner = self.lock();
        inner.refused.remove(&number);
        let idle: Vec<WindowKey> = inner
            .windows
            .iter()
            .filter(|(key, state)| {
                key.0 == number && matches!(state, State::Ready { users: 0, .. })
            })
            .map(|(key, _)| *key)
            .collect();
        let gone: Vec<_> = idle.into_iter().filter_map(|key| inner.take(key)).collect();
        inner.forgotten.insert(number);
        inner.end_of(number);
        drop(inner);
        drop(gone);
    }
}

impl Inner {
    /// Whether no window of the file is to be registered: the driver refused one, the file is read
    /// past the page cache, which registering would fill, or it may not answer: whoever pins a page
    /// that does not come holds up all of the driver.
    fn refuses(&self, file: &Arc<MappedFile>) -> bool {
        file.is_direct() || file.is_far() || self.refused.contains_key(&key_of(file))
    }

    fn take(&mut self, key: WindowKey) -> Option<(Registration, MappedRange)> {
        match self.windows.remove(&key) {
            Some(State::Ready {
                registration,
                pages,
                bytes,
                ..
            }) => {
                self.bytes -= bytes;
                self.end_of(key.0);
                Some((registration, pages))
            }
            _ => None,
        }
    }

    /// A window has gone: with a forgotten file's last one, the file's number is free.
    fn end_of(&mut self, number: usize) {
        if !self.windows.keys().any(|key| key.0 == number) {
            self.forgotten.remove(&number);
        }
    }

    /// Takes out idle windows, least recently used first, until `bytes` more fit; `None`,
    /// and nothing, if they cannot.
    fn make_room(&mut self, max: u64, bytes: u64) -> Option<Vec<(Registration, MappedRange)>> {
        let idle = self.windows.values().map(|state| match state {
            State::Ready {
                users: 0, bytes, ..
            } => *bytes,
            _ => 0,
        });
        if self.bytes - idle.sum::<u64>() + bytes > max {
            return None;
        }
        let mut gone = Vec::new();
        while self.bytes + bytes > max {
            let oldest = self
                .windows
                .iter()
                .filter_map(|(key, state)| match state {
                    State::Ready {
                        users: 0, used_at, ..
                    } => Some((*used_at, *key)),
                    _ => None,
                })
                .min();
            let (_, key) = oldest.expect("idle windows make room, by their sum");
            gone.extend(self.take(key));
        }
        Some(gone)
    }
}

#[cfg(test)]
mod tests {
    use rocmforge_fake_hip::{Fake, Misbehaviour};
    use rocmforge_gguf::ReadMode;
    use rocmforge_gpu_driver::{Libraries, Vendor, open};

    use super::*;

    /// Once idle windows were given up for one that did not fit all the same.
    #[test]
    fn nothing_is_given_up_for_a_window_that_finds_no_room() {
        let fake = Fake::new();
        let libraries = Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        };
        let context = Context::open(open(Vendor::Hip, &libraries).unwrap(), 0).unwrap();
        let windows = Windows::new(&context, 3 << 20);
        let files = [1u64, 1, 1, 2].map(|mib| {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(mib << 20).unwrap();
            Arc::new(MappedFile::open(file.path()).unwrap())
        });
        let [a, b, idle, large] = &files;
        let address = |file, used: &mut Vec<_>| windows.address(file, 0, true, used).unwrap();
        let (mut used, mut ended) = (Vec::new(), Vec::new());
        for file in [a, b] {
            assert!(address(file, &mut used).is_some());
        }
        assert!(address(idle, &mut ended).is_some());
        windows.release(&ended);
        assert!(address(large, &mut used).is_none());
        assert_eq!(fake.live().registrations, 3);
        windows.release(&used[1..]);
        assert!(address(large, &mut ended).is_some());
        assert_eq!(fake.live().registrations, 2, "both idle ones went");
        for file in &files {
            windows.forget(file);
        }
        windows.release(&[used[0], ended[1]]);
        assert_eq!(fake.live().registrations, 0);
        assert_eq!(windows.lock().bytes, 0);
        assert!(windows.lock().forgotten.is_empty());
    }

    /// Some drivers refuse a range of two mappings, and what lies between parts is not there.
    #[test]
    fn no_window_has_pages_of_two_parts_of_a_model() {
        let fake = Fake::new();
        let libraries = Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        };
        let context = Context::open(open(Vendor::Hip, &libraries).unwrap(), 0).unwrap();
        let windows = Windows::new(&context, 256 << 20);
        let part = |bytes: u64| {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(bytes).unwrap();
            MappedFile::open(file.path()).unwrap()
        };
        let sizes = [WINDOW_BYTES + 5000, 5000, WINDOW_BYTES];
        let file = MappedFile::join(sizes.map(part).into(), ReadMode::Map).unwrap();
        let file = Arc::new(file);
        let mut used = Vec::new();
        for (_, range) in file.parts() {
            for offset in [range.start, range.end - 1] {
                let part = windows
                    .address(&file, offset, true, &mut used)
                    .unwrap()
                    .unwrap();
                let end = (offset / WINDOW_BYTES + 1) * WINDOW_BYTES;
                assert_eq!(offset + part.bytes, end.min(range.end));
            }
        }
        assert_eq!(fake.live().registrations, 4);
        windows.release(&used);
        windows.forget(&file);
        assert_eq!(fake.live().registrations, 0);
        assert_eq!(fake.violations(), Vec::<String>::new());
    }

    /// What the trial at the start did not see: another file system, or a kernel that crawls only
    /// now and then.
    #[test]
    fn a_file_whose_registration_crawls_goes_through_pinned_memory() {
        let fake = Fake::new();
        let libraries = Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        };
        let context = Context::open(open(Vendor::Hip, &libraries).unwrap(), 0).unwrap();
        let windows = Windows::new(&context, 64 << 20);
        let [crawls, usual] = [0, 0].map(|_| {
            let file = tempfile::NamedTempFile::new().unwrap();
            // In the page cache: written just now.
            std::fs::write(file.path(), vec![1; 2 << 20]).unwrap();
            Arc::new(MappedFile::open(file.path()).unwrap())
        });
        fake.misbehave(Misbehaviour::SlowRegistration, 400);
        assert!(
            windows
                .address(&crawls, 0, true, &mut Vec::new())
                .unwrap()
                .is_none()
        );
        assert!(!windows.takes(&crawls), "and is not asked for again");
        assert_eq!(fake.live().registrations, 0);
        fake.misbehave(Misbehaviour::SlowRegistration, 0);
        let mut used = Vec::new();
        assert!(
            windows
                .address(&usual, 0, true, &mut used)
                .unwrap()
                .is_some()
        );
        windows.release(&used);
        windows.forget(&usual);
        windows.forget(&crawls);
        assert_eq!(fake.live().registrations, 0);
    }
}
