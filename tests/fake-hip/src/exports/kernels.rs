//! Modules, their functions, and launches.

use std::ffi::{CStr, c_char, c_uint, c_void};

use super::{MARKER, put, queue};
use crate::kernels::{self, Launch};
use crate::queue::Work;
use crate::state::{INVALID_HANDLE, INVALID_VALUE, NO_BINARY, NOT_FOUND, SUCCESS, State, call};

/// Longest image of names.
const IMAGE_BYTES_MAX: usize = 1 << 16;

// SAFETY (of every body): out-pointers and arrays are what HIP's documentation asks of its caller,
// and what the daemon's table passes.
exports! {
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
            // A real code object: all kernels by name, since there is no symbol table to
            // read without trusting it.
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
}
