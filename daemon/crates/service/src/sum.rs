//! A bounded sum of bytes, of which each user may have a share.
//!
//! *Invariant:* the bytes of a [`Held`] are subtracted when it is dropped; the sum exceeds its
//! bound only by [`Held::add`], which counts memory that exists already (tests below).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A bounded sum of bytes.
#[derive(Debug)]
pub struct Sum {
    max: u64,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    all: u64,
    users: HashMap<u32, u64>,
}

impl Sum {
    /// A sum of at most `max` bytes.
    pub fn new(max: u64) -> Arc<Self> {
        Arc::new(Self {
            max,
            counts: Mutex::default(),
        })
    }

    /// A part of the sum for a user, initially 0 bytes.
    pub fn hold(self: &Arc<Self>, uid: u32) -> Held {
        Held {
            sum: Arc::clone(self),
            uid,
            bytes: 0,
        }
    }

    /// Whether this user can add no more bytes.
    pub fn is_full(&self, uid: u32) -> bool {
        let counts = self.lock();
        counts.all >= self.max || counts.of(uid) >= self.share()
    }

    fn share(&self) -> u64 {
        self.max / 4 * 3
    }

    /// Locks the counts. A poisoned lock is used: they are valid at every moment.
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    fn of(&self, uid: u32) -> u64 {
        self.users.get(&uid).copied().unwrap_or(0)
    }
}

/// A user's part of the sum; subtracted when it is dropped.
#[derive(Debug)]
pub struct Held {
    sum: Arc<Sum>,
    uid: u32,
    bytes: u64,
}

impl Held {
    /// Adds bytes, if the bound and the user's share allow it. Returns whether they do.
    pub fn grow(&mut self, bytes: u64) -> bool {
        // Looked at and taken under one lock, or two that come together would take the same rest.
        let mut counts = self.sum.lock();
        let (all, own) = (counts.all + bytes, counts.of(self.uid) + bytes);
        if all > self.sum.max || own > self.sum.share() {
            return false;
        }
        counts.all = all;
        counts.users.insert(self.uid, own);
        self.bytes += bytes;
        true
    }

    /// Adds bytes regardless of the bound.
    pub fn add(&mut self, bytes: u64) {
        let mut counts = self.sum.lock();
        counts.all += bytes;
        *counts.users.entry(self.uid).or_default() += bytes;
        self.bytes += bytes;
    }

    /// Subtracts some bytes.
    pub fn sub(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        let mut counts = self.sum.lock();
        counts.all -= bytes;
        if let Some(own) = counts.users.get_mut(&self.uid) {
            *own -= bytes;
            if *own == 0 {
                counts.users.remove(&self.uid);
            }
        }
        self.bytes -= bytes;
    }
}

impl Held {
    /// Subtracts all bytes of this part.
    pub fn clear(&mut self) {
        if self.bytes > 0 {
            self.sub(self.bytes);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_who_come_together_do_not_pass_the_bound() {
        let sum = Sum::new(100_000);
        std::thread::scope(|scope| {
            for uid in 0..8 {
                let sum = &sum;
                scope.spawn(move || {
                    let mut held = sum.hold(uid);
                    while held.grow(1) {}
                    // Nobody gives back before all have been refused.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    assert!(sum.lock().all <= 100_000);
                });
            }
        });
        assert_eq!(sum.lock().all, 0);
    }

    #[test]
    fn a_user_has_a_share_and_all_have_the_bound() {
        let sum = Sum::new(100);
        let (mut a, mut b) = (sum.hold(1), sum.hold(2));
        assert!(a.grow(75) && !a.grow(1));
        assert!(b.grow(25) && !b.grow(1));
        assert!(sum.is_full(3));
        a.sub(30);
        assert!(!sum.is_full(3) && b.grow(30));
        drop((a, b));
        assert_eq!(sum.lock().all, 0);
        assert!(sum.lock().users.is_empty());
        let mut over = sum.hold(1);
        over.add(500);
        assert!(sum.is_full(1) && sum.is_full(2));
    }
}
