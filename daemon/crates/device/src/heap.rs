//! What the C library's allocator keeps for itself after large things are gone.
//!
//! A vocabulary of 128,000 tokens is hundreds of thousands of small pieces. glibc keeps the pages
//! of freed ones for pieces to come, in an arena of each thread that built one, however many they
//! are.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// What is being dropped when somebody asks is gone by then, and others that go at the same time.
const SOON: Duration = Duration::from_millis(500);

static ASKED: AtomicBool = AtomicBool::new(false);

/// Has the allocator give its free pages back to the system a little later, once for all who ask
/// until then.
pub fn give_back_soon() {
    if ASKED.swap(true, Ordering::Relaxed) {
        return;
    }
    let give_back = || {
        thread::sleep(SOON);
        ASKED.store(false, Ordering::Relaxed);
        give_back();
    };
    let thread = thread::Builder::new().name("heap".to_owned());
    if thread.spawn(give_back).is_err() {
        // The pages stay until the next one asks.
        ASKED.store(false, Ordering::Relaxed);
    }
}

#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "a function of the C library")]
fn give_back() {
    // SAFETY: it takes any number, and locks what it works on.
    let gave = unsafe { libc::malloc_trim(0) };
    tracing::debug!(gave = gave != 0, "asked the allocator for its free pages");
}

#[cfg(not(target_env = "gnu"))]
fn give_back() {}
