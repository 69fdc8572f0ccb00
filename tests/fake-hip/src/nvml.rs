//! The functions of NVIDIA's management library that the daemon asks for, so that the same file
//! stands in for it: who else uses the card, and what power it takes, as a test says.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::control::Process;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 2;
const NOT_FOUND: c_int = 6;
const INSUFFICIENT_SIZE: c_int = 7;
const UNINITIALIZED: c_int = 1;

/// The only card.
const ADDRESS: &str = "0000:41:00.0";
const MILLIWATTS: c_uint = 83_250;
const STATE: c_uint = 8;

#[derive(Default)]
struct State {
    opened: u32,
    used: u64,
    processes: Vec<Process>,
    /// The clock of its samples, which goes on as it is asked.
    now_us: u64,
}

static STATE_OF: Mutex<State> = Mutex::new(State {
    opened: 0,
    used: 0,
    processes: Vec::new(),
    now_us: 0,
});

fn state() -> MutexGuard<'static, State> {
    STATE_OF.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn set(used: u64, processes: Vec<Process>) {
    let mut state = state();
    (state.used, state.processes) = (used, processes);
}

/// How often it is open.
pub(crate) fn opened() -> u64 {
    u64::from(state().opened)
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
pub(crate) struct Info(c_uint, c_ulonglong, c_uint, c_uint);

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
pub(crate) struct Sample(c_uint, c_ulonglong, c_uint, c_uint, c_uint, c_uint);

/// Writes a list as the library does: where there is no room, the number that is needed.
///
/// # Safety
/// `count` is writable, and `to` has room for as many as it says.
unsafe fn list<T>(entries: Vec<T>, count: *mut c_uint, to: *mut T) -> c_int {
    // SAFETY: the caller's promise.
    let room = unsafe { count.read() } as usize;
    // SAFETY: likewise.
    unsafe { count.write(entries.len() as c_uint) };
    if room < entries.len() {
        return INSUFFICIENT_SIZE;
    }
    for (at, entry) in entries.into_iter().enumerate() {
        // SAFETY: there is room, and this place is in it.
        unsafe { to.add(at).write(entry) };
    }
    SUCCESS
}

fn of_kind(graphics: bool) -> Vec<Info> {
    let state = state();
    let mine = state.processes.iter().filter(|p| p.graphics == graphics);
    mine.map(|p| Info(p.pid, p.bytes, u32::MAX, u32::MAX))
        .collect()
}

// SAFETY: the names are NVML's on purpose, here and below: this library stands in for that one and
// is never linked with it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlInit_v2() -> c_int {
    state().opened += 1;
    SUCCESS
}

// SAFETY: see above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlShutdown() -> c_int {
    let mut state = state();
    match state.opened.checked_sub(1) {
        Some(left) => state.opened = left,
        None => return UNINITIALIZED,
    }
    SUCCESS
}

// SAFETY: see above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    address: *const c_char,
    to: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller gives a string that ends in zero, and a place.
    let is_there = unsafe { CStr::from_ptr(address) }.to_bytes() == ADDRESS.as_bytes();
    if !is_there {
        return NOT_FOUND;
    }
    // SAFETY: likewise.
    unsafe { to.write(std::ptr::dangling_mut()) };
    SUCCESS
}

// SAFETY: see above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetMemoryInfo(
    _device: *mut c_void,
    to: *mut [c_ulonglong; 3],
) -> c_int {
    // SAFETY: the caller gives a place.
    unsafe { to.write([64 << 30, 0, state().used]) };
    SUCCESS
}

// SAFETY: see above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    _device: *mut c_void,
    count: *mut c_uint,
    to: *mut Info,
) -> c_int {
    // SAFETY: the caller's promise is the same.
    unsafe { list(of_kind(false), count, to) }
}

// SAFETY: see above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    _device: *mut c_void,
    count: *mut c_uint,
    to: *mut Info,
) -> c_int {
    // SAFETY: the caller's promise is the same.
    unsafe { list(of_kind(true), count, to) }
}

// SAFETY: see above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    _device: *mut c_void,
    to: *mut Sample,
    count: *mut c_uint,
    since_us: c_ulonglong,
) -> c_int {
    let mut state = state();
    if since_us > state.now_us {
        return INVALID_ARGUMENT;
    }
    state.now_us += 1000;
    let now = state.now_us;
    let busy = state.processes.iter().filter(|p| p.busy_percent > 0);
    let samples: Vec<_> = busy
        .map(|p| Sample(p.pid, now, p.busy_percent, 0, 0, 0))
        .collect();
    match samples.is_empty() {
        true => NOT_FOUND,
        // SAFETY: the caller's promise is the same.
        false => unsafe { list(samples, count, to) },
    }
}

// SAFETY: see above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetPowerUsage(
    _device: *mut c_void,
    to: *mut c_uint,
) -> c_int {
    // SAFETY: the caller gives a place.
    unsafe { to.write(MILLIWATTS) };
    SUCCESS
}

// SAFETY: see above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlDeviceGetPerformanceState(
    _device: *mut c_void,
    to: *mut c_uint,
) -> c_int {
    // SAFETY: the caller gives a place.
    unsafe { to.write(STATE) };
    SUCCESS
}
