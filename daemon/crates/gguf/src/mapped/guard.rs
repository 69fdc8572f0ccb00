//! The SIGBUS guard: a page of a registered mapping that the file no longer backs becomes a
//! page of zeros and a mark.
//!
//! ```text
//! free --register--> live --SIGBUS inside--> live and broken --drop--> free
//! ```
//!
//! The handler runs on whichever thread touched the page. It reads a fixed table of atomics, maps
//! zeros with one system call, and returns, so that the load is repeated and succeeds. It allocates
//! nothing, locks nothing, and leaves errno as it was. A SIGBUS at any other address, or one that a
//! process sent, goes to the handler that was installed before.
//!
//! *Invariants:* a slot's range is stable while its generation is even and unchanged; the mark is
//! set before the zeros are mapped, so whoever sees a zero of ours also sees the mark; writers of
//! the table hold `WRITERS`, the handler never does (tests
//! `without_populate_the_guard_alone_holds`,
//! `threads_that_read_while_the_file_is_cut_all_hear_of_it`).

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::limits::MAX_MAPPINGS;

use super::pages::Pages;

/// A mapping, as the signal handler reads it.
struct Slot {
    /// Odd while `start` and `end` are being written.
    generation: AtomicUsize,
    /// First address; 0 in a free slot.
    start: AtomicUsize,
    /// End address of the mapping: one past its last page.
    end: AtomicUsize,
    broken: AtomicBool,
}

static SLOTS: [Slot; MAX_MAPPINGS] = [const {
    Slot {
        generation: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        broken: AtomicBool::new(false),
    }
}; MAX_MAPPINGS];

/// Held while a slot is taken or freed.
static WRITERS: Mutex<()> = Mutex::new(());

/// The page size, for the handler; written before the handler is installed.
static PAGE: AtomicUsize = AtomicUsize::new(0);
/// What handled SIGBUS before: `sa_sigaction` and `sa_flags`; written before
/// the handler is installed.
static PREVIOUS: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static PREVIOUS_FLAGS: AtomicUsize = AtomicUsize::new(0);

impl Slot {
    fn set(&self, start: usize, end: usize) {
        let generation = self.generation.load(Ordering::Relaxed);
        self.generation
            .store(generation.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.broken.store(false, Ordering::Relaxed);
        self.generation
            .store(generation.wrapping_add(2), Ordering::Release);
    }

    /// The end of the range, if `address` lies in it.
    fn end_if_holds(&self, address: usize) -> Option<usize> {
        let before = self.generation.load(Ordering::Acquire);
        let (start, end) = (
            self.start.load(Ordering::Relaxed),
            self.end.load(Ordering::Relaxed),
        );
        fence(Ordering::Acquire);
        let after = self.generation.load(Ordering::Relaxed);
        (before == after
            && before.is_multiple_of(2)
            && start != 0
            && (start..end).contains(&address))
        .then_some(end)
    }
}

/// A mapping's place in the table; dropped before the mapping is.
#[derive(Debug)]
pub(super) struct Registration {
    index: usize,
}

impl Registration {
    /// Whether a page of the mapping could not be had. Never becomes false again.
    pub(super) fn is_broken(&self) -> bool {
        // Loads of mapped bytes that come before the call must not be moved behind it.
        fence(Ordering::SeqCst);
        SLOTS[self.index].broken.load(Ordering::SeqCst)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _writer = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
        SLOTS[self.index].set(0, 0);
    }
}

/// The system's page size, once the handler is installed.
pub(super) fn page_bytes() -> usize {
    PAGE.load(Ordering::Relaxed)
}

/// Puts `pages` under guard, once the handler is [installed](install). `None` where the table is
/// full.
pub(super) fn register(pages: &Pages) -> Option<Registration> {
    let start = pages.at(0) as usize;
    let end = start + pages.len();
    let _writer = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
    let index = SLOTS
        .iter()
        .position(|slot| slot.start.load(Ordering::Relaxed) == 0)?;
    SLOTS[index].set(start, end);
    Some(Registration { index })
}

/// Installs the handler, once in the life of the process. False where that cannot be done.
pub(super) fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        // SAFETY: sysconf takes any name and touches no memory of ours.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let Some(page) = usize::try_from(page)
            .ok()
            .filter(|page| page.is_power_of_two())
        else {
            return false;
        };
        PAGE.store(page, Ordering::Relaxed);
        // SAFETY: sigaction is a C structure of integers, a function address and a signal set;
        // all zero is valid for it.
        let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: no new action is given and `previous` is a sigaction to write to.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous) } != 0 {
            return false;
        }
        PREVIOUS.store(previous.sa_sigaction, Ordering::Relaxed);
        PREVIOUS_FLAGS.store(previous.sa_flags as u32 as usize, Ordering::Relaxed);
        // SAFETY: as above.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = on_sigbus;
        action.sa_sigaction = handler as usize;
        // On the alternate stack where a thread has one: the previous handler may be the
        // runtime's, which expects it.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: `sa_mask` is a signal set that is ours to write.
        unsafe { libc::sigemptyset(&raw mut action.sa_mask) };
        // SAFETY: `action` is complete; `on_sigbus` has the signature that SA_SIGINFO asks for and
        // calls only async-signal-safe functions; the atomics that it reads were written above.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) == 0 }
    })
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel calls an SA_SIGINFO handler with a valid siginfo_t.
    let code = unsafe { (*info).si_code };
    // A code above 0 is the kernel's own: only then is there an address.
    if code > 0 {
        // SAFETY: as above, and the kernel fills the address in for a SIGBUS of its own.
        let address = unsafe { (*info).si_addr() } as usize;
        for slot in &SLOTS {
            if let Some(end) = slot.end_if_holds(address) {
                slot.broken.store(true, Ordering::SeqCst);
                if zeros_from(address, end) {
                    return;
                }
            }
        }
    }
    pass_on(signal, code, info, context);
}

/// Maps zeros from `address`'s page to `end`: what a shrunken file lost ends where the mapping
/// does, and a mapping that is broken anywhere is not read again, so one call does for all of it.
fn zeros_from(address: usize, end: usize) -> bool {
    let page = PAGE.load(Ordering::Relaxed);
    let start = address & !(page - 1);
    // SAFETY: errno's location is valid for the life of the thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above; the pointer is this thread's.
    let saved = unsafe { *errno };
    // SAFETY: the range lies inside of one registered mapping, which stays mapped while it is
    // registered and is read through shared references only; replacing its pages by other readable
    // pages is therefore all that a reader can notice. mmap with these arguments is a plain system
    // call, safe in a signal handler.
    let got = unsafe {
        libc::mmap(
            start as *mut c_void,
            end - start,
            libc::PROT_READ,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    // SAFETY: as above.
    unsafe { *errno = saved };
    got != libc::MAP_FAILED
}

/// Gives a signal that is not ours to whoever handled it before.
fn pass_on(signal: c_int, code: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.load(Ordering::Relaxed);
    let sent = code <= 0;
    match previous {
        libc::SIG_IGN if sent => return,
        // The kernel does not let a fault of its own be ignored.
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: `signal` is SIGBUS; signal() is async-signal-safe.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        _ if PREVIOUS_FLAGS.load(Ordering::Relaxed) & libc::SA_SIGINFO as usize != 0 => {
            // SAFETY: the address came from sigaction with SA_SIGINFO set, so it
            // is a function of this type.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(previous) };
            handler(signal, info, context);
        }
        _ => {
            // SAFETY: the address came from sigaction without SA_SIGINFO, so it
            // is a function of this type.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(previous) };
            handler(signal);
        }
    }
    // Here the default may be in force: set above, or by a handler that gave up, as the Rust
    // runtime's does on what is no stack overflow. A fault then repeats its load and ends the
    // process, with a core dump that shows where. A signal that was sent does not repeat itself.
    if sent && is_default(signal) {
        // SAFETY: raise() is async-signal-safe; the signal is delivered when this handler returns.
        unsafe { libc::raise(signal) };
    }
}

fn is_default(signal: c_int) -> bool {
    // SAFETY: all zero is a valid sigaction.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: no new action is given and `now` is a sigaction to write to;
    // sigaction() is async-signal-safe.
    let answered = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut now) } == 0;
    answered && now.sa_sigaction == libc::SIG_DFL
}
