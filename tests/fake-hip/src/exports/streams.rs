//! Streams, and the events on them.

use std::ffi::{c_int, c_uint, c_void};

use super::{not_in_capture, put, queue};
use crate::queue::{Event, Stream, Work};
use crate::state::{CAPTURE_UNSUPPORTED, INVALID_HANDLE, NOT_READY, SUCCESS, State, call};

// SAFETY (of every body): out-pointers and arrays are what HIP's documentation asks of its caller,
// and what the daemon's table passes.
exports! {
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
}
