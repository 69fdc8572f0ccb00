//! Work that is captured, and graphs of it.

use std::ffi::{c_char, c_void};

use super::{put, queue};
use crate::state::{CAPTURE_INVALIDATED, INVALID_HANDLE, INVALID_VALUE, SUCCESS, State, call};

// SAFETY (of every body): out-pointers and arrays are what HIP's documentation asks of its caller,
// and what the daemon's table passes.
exports! {
    fn hipStreamBeginCapture(stream: usize, _mode: u32) |s| {
        match s.queues.streams.get_mut(&stream) {
            Some(stream) if stream.capture.is_none() && !stream.spoiled => {
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
            on.spoiled = true;
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
