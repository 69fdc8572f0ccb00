//! The functions of the HIP runtime that the daemon's table asks for.

// Each function is a foreign interface of its own; the contract of all is HIP's documentation.
#![allow(
    clippy::missing_safety_doc,
    missing_docs,
    reason = "the functions are the vendor's, and so are their contracts"
)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::kernels::{self, Launch};
use crate::memory::{HostRange, Locked};
use crate::queue::{Event, Stream, Work};
use crate::state::{
    ALREADY_REGISTERED, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, INVALID_DEVICE, INVALID_HANDLE,
    INVALID_VALUE, NO_BINARY, NO_DEVICE, NOT_FOUND, NOT_READY, NOT_REGISTERED, NOT_SUPPORTED,
    OUT_OF_MEMORY, SUCCESS, State, call, state,
};

/// Images begin with this; kernel names follow, a line each, up to a zero byte. `*` stands for all.
pub(crate) const MARKER: &[u8] = b"FAKEHIP\n";
/// Longest image of names.
const IMAGE_BYTES_MAX: usize = 1 << 16;

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
        // SAFETY: the name is HIP's on purpose: this library stands in for that runtime and is never linked with it.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            call(stringify!($name), |$state: &mut State| $body)
        }
    )*};
}

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
    if !state.queues.streams.contains_key(&stream) {
        return state.misuse(
            INVALID_HANDLE,
            format!("work on unknown stream {stream:#x}"),
        );
    }
    state.queues.push(stream, work);
    SUCCESS
}

/// A copy with a host end: from or into page-locked memory it is queued; pageable memory is read at once, and waited for.
fn host_copy(
    state: &mut State,
    device: u64,
    host: usize,
    bytes: usize,
    to_device: bool,
    stream: *mut c_void,
) -> u32 {
    if state.memory.check(device, bytes).is_err() {
        return state.misuse(
            INVALID_VALUE,
            format!("a copy at {device:#x}..+{bytes}: no such device memory"),
        );
    }
    match (state.host.locked(host, bytes), to_device) {
        (Locked::Partly, _) => state.misuse(
            INVALID_VALUE,
            format!("a copy at host {host:#x}..+{bytes}: page-locked in part"),
        ),
        (Locked::Whole, true) => queue(
            state,
            stream,
            Work::H2d {
                to: device,
                from: host,
                bytes,
            },
        ),
        (Locked::Whole, false) => queue(
            state,
            stream,
            Work::D2h {
                to: host,
                from: device,
                bytes,
            },
        ),
        (Locked::No, true) => {
            if !not_in_capture(state) {
                return CAPTURE_UNSUPPORTED;
            }
            // SAFETY: the caller of hipMemcpyAsync promises a readable source.
            let from = unsafe { std::slice::from_raw_parts(host as *const u8, bytes) }.to_vec();
            queue(state, stream, Work::Staged { to: device, from })
        }
        (Locked::No, false) => {
            if !not_in_capture(state) {
                return CAPTURE_UNSUPPORTED;
            }
            let code = queue(
                state,
                stream,
                Work::D2h {
                    to: host,
                    from: device,
                    bytes,
                },
            );
            state.finish_stream(stream as usize);
            code
        }
    }
}

/// Whether queued work names this host range; a lost device does none of it any more.
fn host_in_use(state: &State, at: usize, bytes: usize) -> bool {
    if state.lost.is_some() {
        return false;
    }
    let queued = state.queues.streams.values().flat_map(|s| &s.queue);
    queued.into_iter().any(|work| work.names_host(at, bytes))
}

fn attribute(state: &State, attribute: u32) -> Option<c_int> {
    Some(match attribute {
        16 => 0,                                 // Integrated
        63 => 8,                                 // MultiprocessorCount
        74 => 64 << 10,                          // MaxSharedMemoryPerBlock
        87 => state.wave,                        // WarpSize
        89 => c_int::from(state.virtual_memory), // VirtualMemoryManagementSupported
        _ => return None,
    })
}

// SAFETY: as in `exports`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn hipGetLastError() -> u32 {
    std::mem::take(&mut state().last_error)
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

// SAFETY (of every body): out-pointers and arrays are what HIP's documentation asks of its caller, and what the daemon's
// table passes.
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
        if (0..s.devices).contains(&device) { SUCCESS } else { INVALID_DEVICE }
    }

    fn hipDeviceGetName(to: *mut c_char, len: c_int, _device: c_int) |_s| {
        // SAFETY: see above.
        unsafe { put_str(to, len, "Fake GPU") }
    }

    fn hipDeviceTotalMem(to: *mut usize, _device: c_int) |s| {
        // SAFETY: see above.
        unsafe { put(to, s.memory.total as usize) }
    }

    fn hipDeviceGetPCIBusId(to: *mut c_char, len: c_int, device: c_int) |_s| {
        // SAFETY: see above.
        unsafe { put_str(to, len, &format!("0000:{:02X}:00.0", device + 1)) }
    }

    fn hipDeviceGetAttribute(to: *mut c_int, which: u32, _device: c_int) |s| {
        match attribute(s, which) {
            // SAFETY: see above.
            Some(value) => unsafe { put(to, value) },
            None => INVALID_VALUE,
        }
    }

    fn hipGetDevicePropertiesR0600(to: *mut u8, _device: c_int) |s| {
        let arch = s.arch.as_bytes();
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

    fn hipMalloc(to: *mut u64, bytes: usize) |s| {
        if !not_in_capture(s) {
            return CAPTURE_UNSUPPORTED;
        }
        match s.memory.alloc(bytes as u64) {
            // SAFETY: see above.
            Some(address) => unsafe { put(to, address) },
            None => OUT_OF_MEMORY,
        }
    }

    fn hipFree(address: u64) |s| {
        if address == 0 {
            return SUCCESS;
        }
        if !not_in_capture(s) {
            return CAPTURE_UNSUPPORTED;
        }
        s.finish_all();
        if s.memory.free(address) {
            SUCCESS
        } else {
            s.misuse(INVALID_VALUE, format!("hipFree of {address:#x}, not allocated"))
        }
    }

    fn hipMemGetInfo(free: *mut usize, total: *mut usize) |s| {
        // SAFETY: see above.
        unsafe { put(free, s.memory.free_bytes() as usize) };
        // SAFETY: see above.
        unsafe { put(total, s.memory.total as usize) }
    }

    fn hipHostMalloc(to: *mut usize, bytes: usize, _flags: c_uint) |s| {
        // Whole pages, as the real one gives out: a registration beside it shares none.
        let mut owned = vec![u64::MAX; (bytes.next_multiple_of(4096) + 4096) / 8].into_boxed_slice();
        let at = (owned.as_mut_ptr() as usize).next_multiple_of(4096);
        s.host.0.insert(at, HostRange { bytes, owned: Some(owned) });
        // SAFETY: see above.
        unsafe { put(to, at) }
    }

    fn hipHostFree(at: usize) |s| {
        match s.host.0.get(&at) {
            Some(range) if range.owned.is_some() => {
                let bytes = range.bytes;
                if host_in_use(s, at, bytes) {
                    s.violations.push(format!("hipHostFree of {at:#x} with copies queued"));
                    s.finish_all();
                }
                s.host.0.remove(&at);
                SUCCESS
            }
            _ => s.misuse(INVALID_VALUE, format!("hipHostFree of {at:#x}, not allocated")),
        }
    }

    fn hipHostRegister(at: usize, bytes: usize, _flags: c_uint) |s| {
        if !s.register {
            return NOT_SUPPORTED;
        }
        if at == 0 || bytes == 0 {
            return INVALID_VALUE;
        }
        // By whole pages, as the hardware locks them.
        let start = at & !4095;
        if s.host.locked(start, (at + bytes).next_multiple_of(4096) - start) != Locked::No {
            return ALREADY_REGISTERED;
        }
        s.host.0.insert(at, HostRange { bytes, owned: None });
        SUCCESS
    }

    fn hipHostUnregister(at: usize) |s| {
        match s.host.0.get(&at) {
            Some(range) if range.owned.is_none() => {
                let bytes = range.bytes;
                if host_in_use(s, at, bytes) {
                    s.violations.push(format!("hipHostUnregister of {at:#x} with copies queued"));
                    s.finish_all();
                }
                s.host.0.remove(&at);
                SUCCESS
            }
            _ => NOT_REGISTERED,
        }
    }

    fn hipMemsetAsync(to: u64, value: c_int, bytes: usize, stream: *mut c_void) |s| {
        if s.memory.check(to, bytes).is_err() {
            return s.misuse(INVALID_VALUE, format!("a fill at {to:#x}..+{bytes}: no such device memory"));
        }
        queue(s, stream, Work::Memset { to, value: value as u8, bytes })
    }

    fn hipMemcpyAsync(to: u64, from: u64, bytes: usize, kind: u32, stream: *mut c_void) |s| {
        match kind {
            1 => host_copy(s, to, from as usize, bytes, true, stream),
            2 => host_copy(s, from, to as usize, bytes, false, stream),
            3 => {
                if s.memory.check(to, bytes).is_err() || s.memory.check(from, bytes).is_err() {
                    let message = format!("a copy from {from:#x} to {to:#x}, {bytes} bytes: no such device memory");
                    return s.misuse(INVALID_VALUE, message);
                }
                queue(s, stream, Work::D2d { to, from, bytes })
            }
            _ => INVALID_VALUE,
        }
    }

    fn hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) |_s| {
        // SAFETY: see above.
        unsafe { put(least, 1) };
        // SAFETY: see above.
        unsafe { put(greatest, -1) }
    }

    fn hipStreamCreateWithPriority(to: *mut usize, _flags: c_uint, _priority: c_int) |s| {
        let handle = s.handle();
        s.queues.streams.insert(handle, Stream::default());
        // SAFETY: see above.
        unsafe { put(to, handle) }
    }

    fn hipStreamDestroy(stream: usize) |s| {
        s.finish_stream(stream);
        match s.queues.streams.remove(&stream) {
            Some(_) => SUCCESS,
            None => s.misuse(INVALID_HANDLE, format!("unknown stream {stream:#x} destroyed")),
        }
    }

    fn hipStreamSynchronize(stream: usize) |s| {
        if !s.queues.streams.contains_key(&stream) {
            return INVALID_HANDLE;
        }
        if !not_in_capture(s) {
            return CAPTURE_UNSUPPORTED;
        }
        s.finish_stream(stream);
        SUCCESS
    }

    fn hipStreamQuery(stream: usize) |s| {
        let Some(queued) = s.queues.streams.get(&stream).map(|s| s.queued) else {
            return INVALID_HANDLE;
        };
        if s.step((stream, queued)) { NOT_READY } else { SUCCESS }
    }

    fn hipStreamWaitEvent(stream: *mut c_void, event: usize, _flags: c_uint) |s| {
        let Some(event) = s.queues.events.get(&event).copied() else {
            return INVALID_HANDLE;
        };
        match event.place {
            Some((on, place)) => queue(s, stream, Work::Wait { stream: on, place }),
            None => SUCCESS,
        }
    }

    fn hipEventCreateWithFlags(to: *mut usize, flags: c_uint) |s| {
        let handle = s.handle();
        s.queues.events.insert(handle, Event { timing: flags & 2 == 0, ..Event::default() });
        // SAFETY: see above.
        unsafe { put(to, handle) }
    }

    fn hipEventDestroy(event: usize) |s| {
        match s.queues.events.remove(&event) {
            Some(_) => SUCCESS,
            None => s.misuse(INVALID_HANDLE, format!("unknown event {event:#x} destroyed")),
        }
    }

    fn hipEventRecord(event: usize, stream: *mut c_void) |s| {
        if !s.queues.events.contains_key(&event) || !s.queues.streams.contains_key(&(stream as usize)) {
            return s.misuse(INVALID_HANDLE, format!("event {event:#x} recorded on stream {stream:?}"));
        }
        let place = s.queues.push(stream as usize, Work::Mark { event });
        if let Some(event) = s.queues.events.get_mut(&event) {
            event.place = Some((stream as usize, place));
            event.time = None;
        }
        SUCCESS
    }

    fn hipEventQuery(event: usize) |s| {
        match s.queues.events.get(&event).map(|e| e.place) {
            None => INVALID_HANDLE,
            Some(Some(place)) if s.step(place) => NOT_READY,
            Some(_) => SUCCESS,
        }
    }

    fn hipEventSynchronize(event: usize) |s| {
        let Some(event) = s.queues.events.get(&event).copied() else {
            return INVALID_HANDLE;
        };
        if let Some(place) = event.place {
            s.finish(place);
        }
        SUCCESS
    }

    fn hipEventElapsedTime(to: *mut f32, start: usize, end: usize) |s| {
        let of = |event| s.queues.events.get(&event).copied();
        let (Some(start), Some(end)) = (of(start), of(end)) else {
            return INVALID_HANDLE;
        };
        if !start.timing || !end.timing {
            return INVALID_HANDLE;
        }
        match (start.time, end.time) {
            // SAFETY: see above.
            (Some(start), Some(end)) => unsafe { put(to, end as f32 - start as f32) },
            _ => NOT_READY,
        }
    }

    fn hipModuleLoadData(to: *mut usize, image: *const u8) |s| {
        // SAFETY: an image of any kind has as many bytes as the marker.
        let begins = unsafe { std::slice::from_raw_parts(image, 8) };
        let kernels = if begins == MARKER {
            // SAFETY: an image with the marker is names up to a zero byte.
            let names = unsafe { CStr::from_ptr(image.add(MARKER.len()).cast()) }.to_bytes();
            if names.len() > IMAGE_BYTES_MAX {
                return INVALID_VALUE;
            }
            let names: Vec<&[u8]> = names.split(|&b| b == b'\n').collect();
            kernels::all()
                .iter()
                .filter(|k| names.iter().any(|&n| n == b"*" || n == k.name.as_bytes()))
                .collect()
        } else if begins.starts_with(b"\x7fELF") {
            // A real code object: all kernels by name, since there is no symbol table to read without trusting it.
            kernels::all().iter().collect()
        } else {
            return NO_BINARY;
        };
        let handle = s.handle();
        s.modules.insert(handle, kernels);
        // SAFETY: see above.
        unsafe { put(to, handle) }
    }

    fn hipModuleUnload(module: usize) |s| {
        s.functions.retain(|_, (of, _)| *of != module);
        match s.modules.remove(&module) {
            Some(_) => SUCCESS,
            None => s.misuse(INVALID_HANDLE, format!("unknown module {module:#x} unloaded")),
        }
    }

    fn hipModuleGetFunction(to: *mut usize, module: usize, name: *const c_char) |s| {
        let Some(kernels) = s.modules.get(&module) else {
            return INVALID_HANDLE;
        };
        // SAFETY: see above.
        let name = unsafe { CStr::from_ptr(name) }.to_bytes();
        let Some(&kernel) = kernels.iter().find(|k| k.name.as_bytes() == name) else {
            return NOT_FOUND;
        };
        let handle = s.handle();
        s.functions.insert(handle, (module, kernel));
        // SAFETY: see above.
        unsafe { put(to, handle) }
    }

    fn hipFuncGetAttribute(to: *mut c_int, which: u32, function: usize) |s| {
        if !s.functions.contains_key(&function) {
            return INVALID_HANDLE;
        }
        // SAFETY: see above.
        unsafe { put(to, match which { 0 => 1024, 4 => 32, _ => 0 }) }
    }

    fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
        to: *mut c_int, function: usize, threads: c_int, _shared: usize,
    ) |s| {
        if !s.functions.contains_key(&function) || threads <= 0 {
            return INVALID_VALUE;
        }
        // SAFETY: see above.
        unsafe { put(to, 2048 / threads) }
    }

    fn hipModuleLaunchKernel(
        function: usize, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: *mut c_void, params: *mut *mut c_void, extra: *mut *mut c_void,
    ) |s| {
        let Some(&(_, kernel)) = s.functions.get(&function) else {
            return s.misuse(INVALID_HANDLE, format!("unknown function {function:#x} launched"));
        };
        let threads = u64::from(bx) * u64::from(by) * u64::from(bz);
        if gx == 0 || gy == 0 || gz == 0 || threads == 0 || threads > 1024 || shared > 64 << 10 {
            let message = format!("{}: grid {gx} {gy} {gz}, block {bx} {by} {bz}, {shared} shared", kernel.name);
            return s.misuse(INVALID_VALUE, message);
        }
        if !params.is_null() || extra.is_null() {
            return s.misuse(INVALID_VALUE, format!("{}: arguments are not one buffer", kernel.name));
        }
        // SAFETY: the array is pointer, address, size, address of the size, end.
        let (args, bytes) = unsafe { (*extra.add(1), (*extra.add(3)).cast::<usize>().read()) };
        if bytes != kernel.arg_bytes {
            let message = format!("{}: {bytes} bytes of arguments for {}", kernel.name, kernel.arg_bytes);
            return s.misuse(INVALID_VALUE, message);
        }
        // SAFETY: the caller gives the buffer's size.
        let args = unsafe { std::slice::from_raw_parts(args.cast::<u8>(), bytes) }.to_vec();
        let launch = Launch { grid: [gx, gy, gz], args };
        queue(s, stream, Work::Kernel { kernel, launch })
    }

    fn hipStreamBeginCapture(stream: usize, _mode: u32) |s| {
        match s.queues.streams.get_mut(&stream) {
            Some(stream) if stream.capture.is_none() => {
                stream.capture = Some(Vec::new());
                stream.capture_broken = false;
                SUCCESS
            }
            _ => INVALID_HANDLE,
        }
    }

    fn hipStreamEndCapture(stream: usize, to: *mut usize) |s| {
        let Some(on) = s.queues.streams.get_mut(&stream) else {
            return INVALID_HANDLE;
        };
        let Some(work) = on.capture.take() else {
            return INVALID_VALUE;
        };
        if on.capture_broken {
            return CAPTURE_INVALIDATED;
        }
        let handle = s.handle();
        s.queues.graphs.insert(handle, work);
        // SAFETY: see above.
        unsafe { put(to, handle) }
    }

    fn hipGraphGetNodes(graph: usize, _nodes: *mut c_void, count: *mut usize) |s| {
        match s.queues.graphs.get(&graph) {
            // SAFETY: see above.
            Some(work) => unsafe { put(count, work.len()) },
            None => INVALID_HANDLE,
        }
    }

    fn hipGraphInstantiate(to: *mut usize, graph: usize, _node: *mut c_void, _log: *mut c_char, _size: usize) |s| {
        let Some(work) = s.queues.graphs.get(&graph).cloned() else {
            return INVALID_HANDLE;
        };
        let handle = s.handle();
        s.queues.execs.insert(handle, work);
        // SAFETY: see above.
        unsafe { put(to, handle) }
    }

    fn hipGraphLaunch(exec: usize, stream: *mut c_void) |s| {
        let Some(work) = s.queues.execs.get(&exec).cloned() else {
            return s.misuse(INVALID_HANDLE, format!("unknown graph {exec:#x} launched"));
        };
        for work in work {
            let code = queue(s, stream, work);
            if code != SUCCESS {
                return code;
            }
        }
        SUCCESS
    }

    fn hipGraphDestroy(graph: usize) |s| {
        if s.queues.graphs.remove(&graph).is_some() { SUCCESS } else { INVALID_HANDLE }
    }

    fn hipGraphExecDestroy(exec: usize) |s| {
        if s.queues.execs.remove(&exec).is_some() { SUCCESS } else { INVALID_HANDLE }
    }
}
