//! The `fake_hip_*` functions: what a test may tell and ask the runtime that was opened.

use std::ffi::{CStr, c_char};

use crate::state::{State, state};

/// Numbers that can be asked for.
#[repr(u32)]
pub(crate) enum Number {
    DeviceAllocations,
    DeviceBytes,
    PinnedAllocations,
    Registrations,
    Streams,
    Events,
    Modules,
    Graphs,
    Queued,
    Reservations,
    /// The most that was used; asking begins anew.
    PeakBytes,
    /// Whether the process has the card open.
    Contexts,
}

/// A process that the management library lists.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Bytes of the card that it holds.
    pub bytes: u64,
    /// The share of the time that it computes.
    pub busy_percent: u32,
    /// Whether it draws and does not compute.
    pub graphics: bool,
}

/// Sets the bytes of the card that are in use, and the processes that the management library lists.
///
/// # Safety
/// There are `n` of them.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_nvml_set(used: u64, processes: *const Process, n: usize) {
    // SAFETY: the caller's promise.
    let processes = unsafe { std::slice::from_raw_parts(processes, n) };
    crate::nvml::set(used, processes.to_vec());
}

/// How often the management library is open.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_nvml_opened() -> u64 {
    crate::nvml::opened()
}

/// # Safety
/// `text` is a string that ends in zero.
unsafe fn owned(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Lets the `nth` call of `name` from now fail with `code`.
///
/// # Safety
/// `name` is a string that ends in zero.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_hip_fail(name: *const c_char, nth: u64, code: u32) {
    // SAFETY: the caller's promise.
    let name = unsafe { owned(name) };
    state().fail(&name, nth, code);
}

/// Drops all orders to fail, and the loss of the device.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_hip_recover() {
    let mut state = state();
    state.fail_no_more();
    state.lost = None;
}

/// Forgets all that is alive and queued, orders to fail and the loss of the device: as
/// if the process had ended.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_hip_reset() {
    state().reset();
}

/// Sets the card's memory and what other processes hold of it.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_hip_set_memory(total: u64, others: u64) {
    let mut state = state();
    state.memory.total = total;
    state.memory.others = others;
}

/// Fills all device memory but the first `kept` bytes of each allocation with something
/// else, as a loss of power does.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_hip_forget_memory(kept: u64) {
    state().memory.forget(kept);
}

/// Has the card announce another architecture.
///
/// # Safety
/// `arch` is a string that ends in zero.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_hip_set_arch(arch: *const c_char) {
    // SAFETY: the caller's promise.
    let arch = unsafe { owned(arch) };
    state().set_cards(Some(arch), None);
}

/// Has all cards say that they are parts of the processor, or that they are not.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_hip_set_integrated(integrated: bool) {
    state().set_cards(None, Some(integrated));
}

/// Allows registration of host memory, or refuses it.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_hip_set_register(allowed: bool) {
    state().register = allowed;
}

/// Allows reserving addresses apart from memory, or says that the device cannot.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_hip_set_virtual_memory(allowed: bool) {
    state().virtual_memory = allowed;
}

/// Switches a [`crate::Misbehaviour`] on with a number, or off with 0.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_hip_misbehave(which: u32, number: u64) {
    state().misbehaves.set(which, number);
}

/// Calls of a function so far.
///
/// # Safety
/// `name` is a string that ends in zero.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_hip_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let name = unsafe { owned(name) };
    state().calls.get(&name).copied().unwrap_or(0)
}

/// One of the numbers.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_hip_number(which: u32) -> u64 {
    let state: &mut State = &mut state();
    let peak = state.memory.used_most;
    if which == Number::PeakBytes as u32 {
        state.memory.used_most = state.memory.used;
    }
    let queues = &state.queues;
    [
        state.memory.count(),
        state.memory.used,
        state.host.count(true),
        state.host.count(false),
        queues.streams.len() as u64,
        queues.events.len() as u64,
        state.modules.len() as u64,
        (queues.graphs.len() + queues.execs.len()) as u64,
        queues.streams.values().map(|s| s.queue.len() as u64).sum(),
        state.memory.reservations(),
        peak,
        u64::from(state.is_open),
    ]
    .get(which as usize)
    .copied()
    .unwrap_or(u64::MAX)
}

/// Takes what was noted, lines joined, into `to`; gives the bytes that it has, cut to `len`.
///
/// # Safety
/// `to` is writable for `len` bytes.
// SAFETY: a name of our own.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_hip_take_violations(to: *mut u8, len: usize) -> usize {
    let mut state = state();
    let mut lines = std::mem::take(&mut state.violations);
    lines.append(&mut state.memory.unwritten);
    let text = lines.join("\n");
    let bytes = text.len().min(len);
    // SAFETY: the caller's promise, and `bytes` is at most `len`.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to, bytes) };
    bytes
}
