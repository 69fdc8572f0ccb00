//! The HIP table: AMD's runtime, opened with dlopen, as [`Driver`]. Its declarations are in
//! `abi.rs`, what it says of a card in `card.rs`.
//!
//! A context is the device's ordinal, made current with hipSetDevice; there is nothing to close but
//! the device as a whole (hipDeviceReset).

mod abi;

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use hip_runtime_sys as sys;
use sys::hipError_t as Code;

use super::driver::{
    Class, ContextHandle, DeviceAttributes, DevicePtr, Driver, Error, EventHandle, FunctionHandle,
    GraphExecHandle, GraphHandle, LaunchConfig, MemoryInfo, ModuleHandle, Priority, Result,
    StreamHandle, Vendor, Versions,
};
use super::image::{AlignedImage, kernel_module_version};
use super::library::Library;
use abi::*;

/// Names that the runtime has had, newest first.
pub(super) const NAMES: [&str; 4] = [
    "libamdhip64.so.7",
    "libamdhip64.so.6",
    "libamdhip64.so.5",
    "libamdhip64.so",
];

const HINT: &str = "install ROCm's HIP runtime, or name the library in ROCMFORGE_HIP_LIBRARY (it is looked for by the \
                    loader, in $ROCM_PATH/lib, /opt/rocm/lib and /opt/rocm-*/lib)";

/// The HIP runtime, opened.
pub(super) struct HipDriver {
    library: Library,
    hip: Functions,
    /// Images of loaded modules: the runtime does not say when it has read the last of one.
    images: Mutex<HashMap<ModuleHandle, AlignedImage>>,
}

/// `self.call(name, code)` for a required function: one unsafe call, named as the vendor names it.
macro_rules! call {
    ($self:ident, $function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the signature is the vendor's; out-pointers are to live locals of this method,
        // handles and addresses are what the trait's contract promises.
        let code = unsafe { ($self.hip.$function)($($arg),*) };
        $self.check(stringify!($function), code)
    }};
}

/// Loads an optional function of the library; a call of one that is missing is an error with its
/// name.
macro_rules! optional {
    ($self:ident, $function:ident($($arg:expr),* $(,)?)) => {
        match $self.hip.$function {
            Some(function) => {
                // SAFETY: as for a required function.
                let code = unsafe { function($($arg),*) };
                $self.check(stringify!($function), code)
            }
            None => Err(Error::Symbols {
                library: $self.library.name().to_owned(),
                symbols: vec![stringify!($function)],
            }),
        }
    };
}

/// Asks whether work is done. What is not done yet is no error, and no text is looked up for it:
/// this is asked again and again.
macro_rules! query {
    ($self:ident, $function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: as for `call!`.
        let code = unsafe { ($self.hip.$function)($($arg),*) };
        match class(code) {
            Class::NotReady => Ok(false),
            _ => $self.check(stringify!($function), code).map(|()| true),
        }
    }};
}

mod card;
mod loss;
mod virtual_memory;

impl HipDriver {
    /// Opens the first of `names` that the loader finds.
    pub(super) fn open(names: &[String]) -> Result<HipDriver> {
        let library = Library::open("HIP", names, HINT)?;
        let hip = Functions::load(&library)?;
        Ok(HipDriver {
            library,
            hip,
            images: Mutex::new(HashMap::new()),
        })
    }

    fn check(&self, call: &'static str, code: u32) -> Result<()> {
        if code == Code::hipSuccess as u32 {
            return Ok(());
        }
        let (name, mut text) = self.words(code);
        let (class, more) = self.meaning(call, code);
        if let Some(more) = more {
            text = format!("{text}; {more}");
        }
        Err(Error::Call {
            call,
            code,
            name,
            text,
            class,
        })
    }

    /// The name of a code, and its text.
    fn words(&self, code: u32) -> (String, String) {
        // SAFETY: the function takes any code and returns a static string or null.
        let name = unsafe { text((self.hip.hipGetErrorName)(code)) };
        // SAFETY: as above.
        let text = unsafe { text((self.hip.hipGetErrorString)(code)) };
        (name, text)
    }

    fn copy(
        &self,
        dst: *mut c_void,
        src: *const c_void,
        bytes: u64,
        kind: sys::hipMemcpyKind,
        stream: StreamHandle,
    ) -> Result<()> {
        call!(
            self,
            hipMemcpyAsync(dst, src, bytes as usize, kind as u32, stream.0 as Stream)
        )
    }
}

/// A static string of the runtime.
///
/// # Safety
/// `pointer` is null or to a string that lives as long as the library.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return "unknown code".to_owned();
    }
    // SAFETY: not null; the rest is the caller's promise.
    unsafe { CStr::from_ptr(pointer) }
        .to_string_lossy()
        .into_owned()
}

/// `60443482` as `6.4.43482`.
fn version(number: c_int) -> String {
    format!(
        "{}.{}.{}",
        number / 10_000_000,
        number / 100_000 % 100,
        number % 100_000
    )
}

impl Driver for HipDriver {
    fn vendor(&self) -> Vendor {
        Vendor::Hip
    }

    fn library(&self) -> &str {
        self.library.name()
    }

    fn versions(&self) -> Result<Versions> {
        let (mut driver, mut runtime): (c_int, c_int) = (0, 0);
        call!(self, hipDriverGetVersion(&raw mut driver))?;
        call!(self, hipRuntimeGetVersion(&raw mut runtime))?;
        Ok(Versions {
            driver: kernel_module_version("amdgpu").unwrap_or_else(|| version(driver)),
            runtime: version(runtime),
        })
    }

    fn device_count(&self) -> Result<u32> {
        call!(self, hipInit(0))?;
        let mut count: c_int = 0;
        call!(self, hipGetDeviceCount(&raw mut count))?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    fn device_attributes(&self, ordinal: u32) -> Result<DeviceAttributes> {
        self.card(ordinal)
    }

    fn context_open(&self, ordinal: u32) -> Result<ContextHandle> {
        call!(self, hipInit(0))?;
        call!(self, hipSetDevice(ordinal as c_int))?;
        Ok(ContextHandle(ordinal as usize))
    }

    fn context_bind(&self, context: ContextHandle) -> Result<()> {
        call!(self, hipSetDevice(context.0 as c_int))
    }

    unsafe fn context_close(&self, _context: ContextHandle) -> Result<()> {
        Ok(())
    }

    unsafe fn device_reset(&self, ordinal: u32) -> Result<()> {
        call!(self, hipSetDevice(ordinal as c_int))?;
        optional!(self, hipDeviceReset())
    }

    fn synchronize(&self) -> Result<()> {
        call!(self, hipDeviceSynchronize())
    }

    fn mem_alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let mut ptr: *mut c_void = ptr::null_mut();
        call!(self, hipMalloc(&raw mut ptr, bytes as usize))?;
        Ok(DevicePtr(ptr as u64))
    }

    unsafe fn mem_free(&self, ptr: DevicePtr) -> Result<()> {
        call!(self, hipFree(ptr.0 as *mut c_void))
    }

    fn mem_info(&self) -> Result<MemoryInfo> {
        let (mut free, mut total): (usize, usize) = (0, 0);
        call!(self, hipMemGetInfo(&raw mut free, &raw mut total))?;
        Ok(MemoryInfo {
            free: free as u64,
            total: total as u64,
        })
    }

    fn host_alloc(&self, bytes: usize) -> Result<*mut u8> {
        let mut ptr: *mut c_void = ptr::null_mut();
        call!(
            self,
            hipHostMalloc(&raw mut ptr, bytes, sys::hipHostMallocPortable)
        )?;
        Ok(ptr.cast())
    }

    unsafe fn host_free(&self, ptr: *mut u8) -> Result<()> {
        call!(self, hipHostFree(ptr.cast()))
    }

    unsafe fn host_register_read_only(&self, ptr: *const u8, bytes: usize) -> Result<()> {
        let ptr = ptr.cast_mut().cast::<c_void>();
        let flags = sys::hipHostRegisterPortable;
        let result = call!(
            self,
            hipHostRegister(ptr, bytes, flags | HOST_REGISTER_READ_ONLY)
        );
        match result {
            // A runtime that does not know the flag may still be able to lock the pages.
            Err(Error::Call { code, .. }) if code == Code::hipErrorInvalidValue as u32 => {
                call!(self, hipHostRegister(ptr, bytes, flags))
            }
            result => result,
        }
    }

    fn host_device_address(&self, ptr: *const u8) -> Result<DevicePtr> {
        let mut address = std::ptr::null_mut();
        optional!(
            self,
            hipHostGetDevicePointer(&raw mut address, ptr.cast_mut().cast(), 0)
        )?;
        Ok(DevicePtr(address as u64))
    }

    unsafe fn host_unregister(&self, ptr: *const u8) -> Result<()> {
        call!(self, hipHostUnregister(ptr.cast_mut().cast()))
    }

    unsafe fn memset_async(
        &self,
        dst: DevicePtr,
        value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        call!(
            self,
            hipMemsetAsync(
                dst.0 as *mut c_void,
                c_int::from(value),
                bytes as usize,
                stream.0 as Stream
            )
        )
    }

    unsafe fn copy_h2d_async(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        let kind = sys::hipMemcpyKind::hipMemcpyHostToDevice;
        self.copy(dst.0 as *mut c_void, src.cast(), bytes, kind, stream)
    }

    unsafe fn copy_d2h_async(
        &self,
        dst: *mut u8,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        let kind = sys::hipMemcpyKind::hipMemcpyDeviceToHost;
        self.copy(dst.cast(), src.0 as *const c_void, bytes, kind, stream)
    }

    unsafe fn copy_d2d_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        let kind = sys::hipMemcpyKind::hipMemcpyDeviceToDevice;
        self.copy(
            dst.0 as *mut c_void,
            src.0 as *const c_void,
            bytes,
            kind,
            stream,
        )
    }

    fn virtual_memory(&self) -> Option<&dyn super::virtual_memory::VirtualMemory> {
        self.has_virtual_memory().then_some(self)
    }

    fn stream_create(&self, priority: Priority) -> Result<StreamHandle> {
        let (mut least, mut greatest): (c_int, c_int) = (0, 0);
        call!(
            self,
            hipDeviceGetStreamPriorityRange(&raw mut least, &raw mut greatest)
        )?;
        let priority = match priority {
            Priority::Normal => 0,
            Priority::High => greatest,
        };
        let mut stream: Stream = ptr::null_mut();
        call!(
            self,
            hipStreamCreateWithPriority(&raw mut stream, sys::hipStreamNonBlocking, priority)
        )?;
        Ok(StreamHandle(stream as usize))
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()> {
        call!(self, hipStreamDestroy(stream.0 as Stream))
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        call!(self, hipStreamSynchronize(stream.0 as Stream))
    }

    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        query!(self, hipStreamQuery(stream.0 as Stream))
    }

    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        call!(
            self,
            hipStreamWaitEvent(stream.0 as Stream, event.0 as Event, 0)
        )
    }

    fn event_create(&self, timing: bool) -> Result<EventHandle> {
        let flags = if timing {
            0
        } else {
            sys::hipEventDisableTiming
        };
        let mut event: Event = ptr::null_mut();
        call!(self, hipEventCreateWithFlags(&raw mut event, flags))?;
        Ok(EventHandle(event as usize))
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()> {
        call!(self, hipEventDestroy(event.0 as Event))
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        call!(self, hipEventRecord(event.0 as Event, stream.0 as Stream))
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        query!(self, hipEventQuery(event.0 as Event))
    }

    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        call!(self, hipEventSynchronize(event.0 as Event))
    }

    unsafe fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> Result<f32> {
        let mut ms = 0.0_f32;
        call!(
            self,
            hipEventElapsedTime(&raw mut ms, start.0 as Event, end.0 as Event)
        )?;
        Ok(ms)
    }

    fn module_load(&self, image: &[u8]) -> Result<ModuleHandle> {
        let image = AlignedImage::new(image);
        let mut module: Module = ptr::null_mut();
        call!(
            self,
            hipModuleLoadData(&raw mut module, image.as_ptr().cast())
        )?;
        let handle = ModuleHandle(module as usize);
        self.images
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(handle, image);
        Ok(handle)
    }

    unsafe fn module_unload(&self, module: ModuleHandle) -> Result<()> {
        let result = call!(self, hipModuleUnload(module.0 as Module));
        if result.is_ok() {
            self.images
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&module);
        }
        result
    }

    unsafe fn module_function(&self, module: ModuleHandle, name: &CStr) -> Result<FunctionHandle> {
        let mut function: Function = ptr::null_mut();
        let result = call!(
            self,
            hipModuleGetFunction(&raw mut function, module.0 as Module, name.as_ptr())
        );
        match result {
            Ok(()) => Ok(FunctionHandle(function as usize)),
            Err(Error::Call { code, .. }) if code == Code::hipErrorNotFound as u32 => {
                Err(Error::Kernel {
                    kernel: name.to_string_lossy().into_owned(),
                })
            }
            Err(error) => Err(error),
        }
    }

    /// Nothing to ask for: a block may use all of the LDS.
    unsafe fn function_reserve_shared(&self, _function: FunctionHandle, _bytes: u32) -> Result<()> {
        Ok(())
    }

    unsafe fn launch(
        &self,
        function: FunctionHandle,
        config: LaunchConfig,
        args: &[u8],
        stream: StreamHandle,
    ) -> Result<()> {
        let [gx, gy, gz] = config.grid;
        let [bx, by, bz] = config.block;
        let mut bytes = args.len();
        // As a buffer with its size, so that the runtime knows where the bytes end.
        let mut extra: [*mut c_void; 5] = [
            LAUNCH_PARAM[0] as *mut c_void,
            args.as_ptr().cast_mut().cast(),
            LAUNCH_PARAM[1] as *mut c_void,
            (&raw mut bytes).cast(),
            LAUNCH_PARAM[2] as *mut c_void,
        ];
        call!(
            self,
            hipModuleLaunchKernel(
                function.0 as Function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                config.shared_bytes,
                stream.0 as Stream,
                ptr::null_mut(),
                extra.as_mut_ptr()
            )
        )
    }

    unsafe fn capture_begin(&self, stream: StreamHandle) -> Result<()> {
        let mode = sys::hipStreamCaptureMode::hipStreamCaptureModeThreadLocal as u32;
        optional!(self, hipStreamBeginCapture(stream.0 as Stream, mode))
    }

    unsafe fn capture_end(&self, stream: StreamHandle) -> Result<GraphHandle> {
        let mut graph: Graph = ptr::null_mut();
        optional!(
            self,
            hipStreamEndCapture(stream.0 as Stream, &raw mut graph)
        )?;
        Ok(GraphHandle(graph as usize))
    }

    unsafe fn graph_nodes(&self, graph: GraphHandle) -> Result<usize> {
        let mut nodes: usize = 0;
        optional!(
            self,
            hipGraphGetNodes(graph.0 as Graph, ptr::null_mut(), &raw mut nodes)
        )?;
        Ok(nodes)
    }

    unsafe fn graph_instantiate(&self, graph: GraphHandle) -> Result<GraphExecHandle> {
        let mut exec: GraphExec = ptr::null_mut();
        optional!(
            self,
            hipGraphInstantiate(
                &raw mut exec,
                graph.0 as Graph,
                ptr::null_mut(),
                ptr::null_mut(),
                0
            )
        )?;
        Ok(GraphExecHandle(exec as usize))
    }

    unsafe fn graph_destroy(&self, graph: GraphHandle) -> Result<()> {
        optional!(self, hipGraphDestroy(graph.0 as Graph))
    }

    unsafe fn graph_launch(&self, exec: GraphExecHandle, stream: StreamHandle) -> Result<()> {
        optional!(
            self,
            hipGraphLaunch(exec.0 as GraphExec, stream.0 as Stream)
        )
    }

    unsafe fn graph_exec_destroy(&self, exec: GraphExecHandle) -> Result<()> {
        optional!(self, hipGraphExecDestroy(exec.0 as GraphExec))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_the_vendor_writes_them() {
        assert_eq!(version(60_443_482), "6.4.43482");
        assert_eq!(version(50_213_601), "5.2.13601");
    }
}
