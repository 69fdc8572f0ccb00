//! Memory of the device and of the host, copies and fills.

use std::ffi::{c_int, c_uint, c_void};

use super::{not_in_capture, put, queue};
use crate::memory::{HostRange, Locked};
use crate::misbehaviour::{Misbehaviour, take_time};
use crate::queue::Work;
use crate::state::{
    ALREADY_REGISTERED, CAPTURE_UNSUPPORTED, INVALID_VALUE, NOT_REGISTERED, NOT_SUPPORTED,
    OUT_OF_MEMORY, SUCCESS, State, call,
};

/// Where kernels find registered memory, behind its address for the host: some drivers map it
/// elsewhere.
const REGISTERED: u64 = 0x00B0_0000_0000_0000;

/// A copy with a host end: from or into page-locked memory it is queued; pageable memory is
/// read at once, and waited for.
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

// SAFETY (of every body): out-pointers and arrays are what HIP's documentation asks of its caller,
// and what the daemon's table passes.
exports! {
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
        let told = s.misbehaves.of(Misbehaviour::FalseFreeBytes);
        // SAFETY: see above.
        unsafe { put(free, told.unwrap_or(s.free_bytes()) as usize) };
        // SAFETY: see above.
        unsafe { put(total, s.memory.total as usize) }
    }

    fn hipHostMalloc(to: *mut usize, bytes: usize, _flags: c_uint) |s| {
        // Whole pages, as the real one gives out: a registration beside it shares none.
        let mut owned = vec![u64::MAX; (bytes.next_multiple_of(4096) + 4096) / 8].into_boxed_slice();
        let at = (owned.as_mut_ptr() as usize).next_multiple_of(4096);
        s.host.0.insert(at, HostRange { bytes, owned: Some(owned) });
        // SAFETY: `hipHostFree` unpins it before it goes.
        unsafe { s.memory.pinned.add(at as u64, at, bytes) };
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
                s.memory.pinned.remove(at as u64);
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
        if let Some(ms) = s.misbehaves.of(Misbehaviour::SlowRegistration) {
            std::thread::sleep(std::time::Duration::from_millis(ms));
        }
        if let Some(ms) = s.misbehaves.of(Misbehaviour::CrawlingRegistration) {
            take_time(ms, bytes);
        }
        // By whole pages, as the hardware locks them.
        let start = at & !4095;
        if s.host.locked(start, (at + bytes).next_multiple_of(4096) - start) != Locked::No {
            return ALREADY_REGISTERED;
        }
        s.host.0.insert(at, HostRange { bytes, owned: None });
        // SAFETY: whoever registers promises that it is mapped until `hipHostUnregister`.
        unsafe { s.memory.pinned.add(at as u64 + REGISTERED, at, bytes) };
        SUCCESS
    }

    fn hipHostGetDevicePointer(to: *mut u64, at: usize, _flags: c_uint) |s| {
        match s.memory.pinned.address_of(at) {
            // SAFETY: see above.
            Some(address) => unsafe { put(to, address) },
            None => INVALID_VALUE,
        }
    }

    fn hipHostUnregister(at: usize) |s| {
        match s.host.0.get(&at) {
            Some(range) if range.owned.is_none() => {
                let bytes = range.bytes;
                if host_in_use(s, at, bytes) {
                    s.violations.push(format!("hipHostUnregister of {at:#x} with copies queued"));
                    s.finish_all();
                }
                s.memory.pinned.remove(at as u64 + REGISTERED);
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
}
