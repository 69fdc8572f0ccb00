//! Addresses that are reserved, and memory that is mapped there.

use std::ffi::{c_int, c_void};

use super::{not_in_capture, put};
use crate::memory::{Fault, GRANULARITY};
use crate::misbehaviour::Misbehaviour;
use crate::queue::Work;
use crate::state::{
    CAPTURE_UNSUPPORTED, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS,
    State, call,
};

/// What [`Misbehaviour::FalseGranularity`] hides.
const TRUE_GRANULARITY: u64 = 2 << 20;

/// The vendor's properties of an allocation.
#[repr(C)]
pub(crate) struct Properties {
    kind: u32,
    handles: u32,
    location_kind: u32,
    location: c_int,
    windows: *mut c_void,
    flags: [u8; 8],
}

/// The vendor's description of access.
#[repr(C)]
pub(crate) struct Access {
    location_kind: u32,
    location: c_int,
    flags: u32,
}

/// Why properties are not those of pinned memory on a device that there is.
///
/// # Safety
/// `properties` is null or readable.
unsafe fn wrong(state: &State, properties: *const Properties) -> Option<u32> {
    if !state.virtual_memory {
        return Some(NOT_SUPPORTED);
    }
    // SAFETY: the caller's promise.
    let Some(p) = (unsafe { properties.as_ref() }) else {
        return Some(INVALID_VALUE);
    };
    let sound = p.kind == 1 && p.handles == 0 && p.location_kind == 1;
    if !sound || !p.windows.is_null() || p.flags[..4] != [0; 4] {
        return Some(INVALID_VALUE);
    }
    (!(0..state.devices).contains(&p.location)).then_some(INVALID_DEVICE)
}

/// The code of what memory said; a fault is a misuse.
fn told(state: &mut State, result: Result<(), Fault>) -> u32 {
    match result {
        Ok(()) => SUCCESS,
        Err(Fault(message)) => state.misuse(INVALID_VALUE, message),
    }
}

/// Whether work is queued that may use memory.
fn is_busy(state: &State) -> bool {
    let queued = state.queues.streams.values().flat_map(|s| &s.queue);
    let uses = |w: &Work| !matches!(w, Work::Wait { .. } | Work::Mark { .. });
    state.lost.is_none() && queued.into_iter().any(uses)
}

// SAFETY (of every body): as in the parent.
exports! {
    fn hipMemGetAllocationGranularity(to: *mut usize, properties: *const Properties, _which: u32) |s| {
        // SAFETY: see above.
        if let Some(code) = unsafe { wrong(s, properties) } {
            return code;
        }
        let told = s.misbehaves.of(Misbehaviour::FalseGranularity);
        // SAFETY: see above.
        unsafe { put(to, told.unwrap_or(GRANULARITY) as usize) }
    }

    fn hipMemAddressReserve(to: *mut u64, bytes: usize, align: usize, _at: u64, flags: u64) |s| {
        if !s.virtual_memory {
            return NOT_SUPPORTED;
        }
        if flags != 0 || (align != 0 && !align.is_power_of_two()) {
            return INVALID_VALUE;
        }
        match s.memory.reserve(bytes as u64, align as u64) {
            // SAFETY: see above.
            Some(address) => unsafe { put(to, address) },
            None => INVALID_VALUE,
        }
    }

    fn hipMemAddressFree(address: u64, bytes: usize) |s| {
        let freed = s.memory.unreserve(address, bytes as u64);
        told(s, freed)
    }

    fn hipMemCreate(to: *mut usize, bytes: usize, properties: *const Properties, flags: u64) |s| {
        // SAFETY: see above.
        if let Some(code) = unsafe { wrong(s, properties) } {
            return code;
        }
        if bytes == 0 || !(bytes as u64).is_multiple_of(GRANULARITY) || flags != 0 {
            return INVALID_VALUE;
        }
        if !not_in_capture(s) {
            return CAPTURE_UNSUPPORTED;
        }
        let handle = s.handle();
        match s.memory.create(handle, bytes as u64) {
            // SAFETY: see above.
            Some(()) => unsafe { put(to, handle) },
            None => OUT_OF_MEMORY,
        }
    }

    fn hipMemRelease(handle: usize) |s| {
        let released = s.memory.release(handle);
        told(s, released)
    }

    fn hipMemMap(address: u64, bytes: usize, offset: usize, handle: usize, flags: u64) |s| {
        if offset != 0 || flags != 0 {
            return INVALID_VALUE;
        }
        let usable = s.misbehaves.of(Misbehaviour::FalseGranularity).is_none()
            || (address.is_multiple_of(TRUE_GRANULARITY) && (bytes as u64).is_multiple_of(TRUE_GRANULARITY));
        let mapped = s.memory.map(address, bytes, handle, usable);
        told(s, mapped)
    }

    fn hipMemSetAccess(address: u64, bytes: usize, access: *const Access, count: usize) |s| {
        // SAFETY: see above.
        let Some(access) = (unsafe { access.as_ref() }) else {
            return INVALID_VALUE;
        };
        let device = access.location_kind == 1 && (0..s.devices).contains(&access.location);
        if s.misbehaves.of(Misbehaviour::RefusesAccess).is_some() {
            return INVALID_VALUE;
        }
        if count != 1 || !device || access.flags != 3 {
            return INVALID_VALUE;
        }
        let allowed = s.memory.allow(address, bytes);
        told(s, allowed)
    }

    fn hipMemUnmap(address: u64, bytes: usize) |s| {
        if is_busy(s) {
            return s.misuse(
                INVALID_VALUE,
                format!("unmap of {address:#x}..+{bytes} while work is queued"),
            );
        }
        let keeps = s.misbehaves.of(Misbehaviour::KeepsMemory).is_some();
        let unmapped = s.memory.unmap(address, bytes, keeps);
        told(s, unmapped)
    }
}
