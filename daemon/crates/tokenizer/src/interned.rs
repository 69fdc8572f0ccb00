//! Values made of content that many models have: each is made once, and held as long as anybody
//! uses it.
//!
//! *Invariant:* of one content a value is made once at a time; who asks for it meanwhile waits for
//! it (test `a_value_is_made_once_and_forgotten_when_nobody_has_it`).

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// What content is known by, keyed at random for this process, so that no file can be written to be
/// taken for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(u64);

/// The key of all digests of this process.
static KEY: LazyLock<foldhash::quality::RandomState> = LazyLock::new(Default::default);

impl Digest {
    /// Of these parts, in order; where one ends and the next begins counts.
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hasher = KEY.build_hasher();
        for part in parts {
            hasher.write_usize(part.len());
            hasher.write(part);
        }
        Self(hasher.finish())
    }

    /// The digest's bytes, to be a part of another one.
    pub fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }
}

/// A value's place. Its lock is held while the value is made.
type Place<T> = Arc<Mutex<Weak<T>>>;

/// Values by the content that they were made of.
#[derive(Debug)]
pub struct Interned<T>(Mutex<HashMap<Digest, Place<T>>>);

impl<T> Default for Interned<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Interned<T> {
    /// The value of this content: the one that somebody has, or what `make` makes. Blocks while
    /// another thread makes it.
    ///
    /// # Errors
    /// Those of `make`. The next one who asks tries again.
    pub fn get<E>(
        &self,
        content: Digest,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let place = self.place(content);
        let mut place = lock(&place);
        if let Some(there) = place.upgrade() {
            return Ok(there);
        }
        let made = Arc::new(make()?);
        *place = Arc::downgrade(&made);
        Ok(made)
    }

    /// The value of this content, if one exists. Blocks while another thread makes it.
    pub fn find(&self, content: Digest) -> Option<Arc<T>> {
        let place = lock(&self.0).get(&content).cloned()?;
        lock(&place).upgrade()
    }

    fn place(&self, content: Digest) -> Place<T> {
        let mut places = lock(&self.0);
        // Those that nobody has and nobody makes.
        places.retain(|_, place| {
            let is_used = Arc::strong_count(place) > 1;
            is_used || place.try_lock().is_ok_and(|there| there.strong_count() > 0)
        });
        Arc::clone(places.entry(content).or_default())
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_value_is_made_once_and_forgotten_when_nobody_has_it() {
        let (interned, made) = (Interned::<u32>::default(), AtomicU32::new(0));
        let content = Digest::of([&b"a"[..]]);
        let make = || {
            made.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(std::time::Duration::from_millis(20));
            Ok::<_, ()>(7)
        };
        std::thread::scope(|scope| {
            let get = || interned.get(content, make).unwrap();
            let all: Vec<_> = (0..8).map(|_| scope.spawn(get)).collect();
            let all: Vec<_> = all.into_iter().map(|t| t.join().unwrap()).collect();
            assert!(all.iter().all(|value| Arc::ptr_eq(value, &all[0])));
        });
        assert_eq!(made.load(Ordering::Relaxed), 1);
        // A failure is no value, and leaves room for one.
        let other = Digest::of([&b"b"[..]]);
        assert_eq!(interned.get(other, || Err(5)), Err(5));
        assert_eq!(interned.find(other), None);
        assert_eq!(interned.find(content), None, "nobody has it any more");
        let held = interned.get(content, || Ok::<_, ()>(8)).unwrap();
        assert!(
            interned
                .find(content)
                .is_some_and(|found| Arc::ptr_eq(&found, &held))
        );
        drop(held);
        interned.get(other, || Ok::<_, ()>(9)).unwrap();
        assert_eq!(interned.0.lock().unwrap().len(), 1);
    }

    #[test]
    fn parts_are_told_apart() {
        let of = |parts: &[&str]| Digest::of(parts.iter().map(|part| part.as_bytes()));
        assert_eq!(of(&["ab", "c"]), of(&["ab", "c"]));
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
        assert_ne!(of(&["ab"]), of(&["ab", ""]));
    }
}
