//! The functions of the HIP runtime that the daemon's table asks for: here what the runtime and its
//! devices are, and what all functions share.

// Each function is a foreign interface of its own; the contract of all is HIP's documentation.
#![allow(
    clippy::missing_safety_doc,
    missing_docs,
    reason = "the functions are the vendor's, and so are their contracts"
)]

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::misbehaviour::Misbehaviour;
use crate::queue::Work;
use crate::state::{
    ALREADY_REGISTERED, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, INVALID_DEVICE, INVALID_HANDLE,
    INVALID_VALUE, NO_BINARY, NO_DEVICE, NOT_FOUND, NOT_READY, NOT_REGISTERED, NOT_SUPPORTED,
    OUT_OF_MEMORY, SUCCESS, State, call, state,
};

/// Images begin with this; kernel names follow, a line each, up to a zero byte. `*` stands for all.
pub(crate) const MARKER: &[u8] = b"FAKEHIP\n";

/// Writes through an out-pointer, unless it is null.
///
/// # Safety
/// `to` is null or writable.
unsafe fn put<T>(to: *mut T, value: T) -> u32 {
    if to.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: not null; the rest is the caller's promise.
    unsafe { to.write(value) };
    SUCCESS
}

/// Declares exported functions: counted and failed by their own names, with `$state` locked.
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) |$state:ident| $body:block)*) => {$(
        // SAFETY: the name is HIP's on purpose: this library stands in for that runtime
        // and is never linked with it.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            call(stringify!($name), |$state: &mut State| $body)
        }
    )*};
}

mod graphs;
mod kernels;
mod memory;
mod streams;
mod virtual_memory;

/// Breaks a capture that is under way: the call is not allowed in one.
fn not_in_capture(state: &mut State) -> bool {
    match state.queues.capturing() {
        Some(stream) => {
            stream.capture_broken = true;
            false
        }
        None => true,
    }
}

/// Queues work on a stream that exists.
pub(crate) fn queue(state: &mut State, stream: *mut c_void, work: Work) -> u32 {
    let stream = stream as usize;
    match state.queues.streams.get(&stream) {
        None => {
            return state.misuse(
                INVALID_HANDLE,
                format!("work on unknown stream {stream:#x}"),
            );
        }
        Some(stream) if stream.spoiled => return CAPTURE_INVALIDATED,
        Some(_) => {}
    }
    state.queues.push(stream, work);
    SUCCESS
}

fn attribute(state: &State, attribute: u32, card: c_int) -> Option<c_int> {
    Some(match attribute {
        16 => c_int::from(state.integrated(card)), // Integrated
        63 => 8,                                   // MultiprocessorCount
        74 => 64 << 10,                            // MaxSharedMemoryPerBlock
        87 => state.wave,                          // WarpSize
        89 => c_int::from(state.virtual_memory),   // VirtualMemoryManagementSupported
        _ => return None,
    })
}

// SAFETY: as in `exports`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipGetErrorName(code: u32) -> *const c_char {
    let name = match code {
        SUCCESS => c"hipSuccess",
        INVALID_VALUE => c"hipErrorInvalidValue",
        OUT_OF_MEMORY => c"hipErrorOutOfMemory",
        NO_DEVICE => c"hipErrorNoDevice",
        INVALID_DEVICE => c"hipErrorInvalidDevice",
        NO_BINARY => c"hipErrorNoBinaryForGpu",
        INVALID_HANDLE => c"hipErrorInvalidHandle",
        NOT_FOUND => c"hipErrorNotFound",
        NOT_READY => c"hipErrorNotReady",
        700 => c"hipErrorIllegalAddress",
        702 => c"hipErrorLaunchTimeOut",
        ALREADY_REGISTERED => c"hipErrorHostMemoryAlreadyRegistered",
        NOT_REGISTERED => c"hipErrorHostMemoryNotRegistered",
        719 => c"hipErrorLaunchFailure",
        NOT_SUPPORTED => c"hipErrorNotSupported",
        CAPTURE_UNSUPPORTED => c"hipErrorStreamCaptureUnsupported",
        CAPTURE_INVALIDATED => c"hipErrorStreamCaptureInvalidated",
        _ => c"hipErrorUnknown",
    };
    name.as_ptr()
}

// SAFETY: as in `exports`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipGetErrorString(_code: u32) -> *const c_char {
    c"as the fake runtime was told, or noted".as_ptr()
}

/// Copies a string into a C buffer with its end.
///
/// # Safety
/// `to` is writable for `len` bytes.
unsafe fn put_str(to: *mut c_char, len: c_int, text: &str) -> u32 {
    if to.is_null() || (len as usize) <= text.len() {
        return INVALID_VALUE;
    }
    // SAFETY: room for the text and its end was checked; the rest is the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    SUCCESS
}

// SAFETY: as in `exports`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipDeviceReset() -> u32 {
    let code = call("hipDeviceReset", |s| {
        let alive = s.alive();
        s.is_open = false;
        match alive {
            0 => SUCCESS,
            // It would go; its owners would use what is no more.
            n => s.misuse(
                INVALID_VALUE,
                format!("the device is reset while {n} things are alive"),
            ),
        }
    });
    // Others' calls go on meanwhile.
    while state().misbehaves.of(Misbehaviour::HoldsReset).is_some() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    code
}

// SAFETY (of every body): out-pointers and arrays are what HIP's documentation asks of its caller,
// and what the daemon's table passes.
exports! {
    fn hipInit(_flags: c_uint) |s| { if s.devices == 0 { NO_DEVICE } else { SUCCESS } }

    fn hipDriverGetVersion(to: *mut c_int) |_s| {
        // SAFETY: see above.
        unsafe { put(to, 60_400_000) }
    }

    fn hipRuntimeGetVersion(to: *mut c_int) |_s| {
        // SAFETY: see above.
        unsafe { put(to, 60_400_000) }
    }

    fn hipGetDeviceCount(to: *mut c_int) |s| {
        // SAFETY: see above.
        unsafe { put(to, s.devices) }
    }

    fn hipSetDevice(device: c_int) |s| {
        if !(0..s.devices).contains(&device) {
            return INVALID_DEVICE;
        }
        // There is one memory, that of the card in use.
        s.memory.total = s.total(device);
        s.is_open = true;
        SUCCESS
    }

    fn hipDeviceGetName(to: *mut c_char, len: c_int, _device: c_int) |_s| {
        // SAFETY: see above.
        unsafe { put_str(to, len, "Fake GPU") }
    }

    fn hipDeviceTotalMem(to: *mut usize, device: c_int) |s| {
        // SAFETY: see above.
        unsafe { put(to, s.total(device) as usize) }
    }

    fn hipDeviceGetPCIBusId(to: *mut c_char, len: c_int, device: c_int) |_s| {
        // SAFETY: see above.
        unsafe { put_str(to, len, &format!("0000:{:02X}:00.0", device + 1)) }
    }

    fn hipDeviceGetAttribute(to: *mut c_int, which: u32, device: c_int) |s| {
        match attribute(s, which, device) {
            // SAFETY: see above.
            Some(value) => unsafe { put(to, value) },
            None => INVALID_VALUE,
        }
    }

    fn hipGetDevicePropertiesR0600(to: *mut u8, device: c_int) |s| {
        let arch = s.arch(device).as_bytes();
        if to.is_null() || arch.len() > 255 {
            return INVALID_VALUE;
        }
        // SAFETY: the structure has 1472 bytes; gcnArchName's 256 begin at 1160.
        unsafe {
            to.write_bytes(0, 1472);
            std::ptr::copy_nonoverlapping(arch.as_ptr(), to.add(1160), arch.len());
        }
        SUCCESS
    }

    fn hipDeviceSynchronize() |s| {
        if !not_in_capture(s) {
            return CAPTURE_UNSUPPORTED;
        }
        s.finish_all();
        SUCCESS
    }
}
