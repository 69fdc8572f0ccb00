//! The CUDA table: NVIDIA's driver API, opened with dlopen, as [`Driver`]. Its declarations are in
//! `abi.rs`, what it says of a card in `card.rs`.
//!
//! A context is the device's primary one, so that the vendor's own libraries
//! (cuBLAS) work in the same.

mod abi;

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use super::driver::{
    Class, ContextHandle, DeviceAttributes, DevicePtr, Driver, Error, EventHandle, FunctionHandle,
    GraphExecHandle, GraphHandle, LaunchConfig, MemoryInfo, ModuleHandle, Priority, Result,
    StreamHandle, Vendor, Versions,
};
use super::image::{AlignedImage, kernel_module_version};
use super::library::Library;
use abi::*;

/// Names of the driver's library.
pub(super) const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

const HINT: &str = "install NVIDIA's driver, or name the library in ROCMFORGE_CUDA_LIBRARY";

/// NVIDIA's driver, opened.
pub(super) struct CudaDriver {
    library: Library,
    cuda: Functions,
    /// Devices of the contexts that are open: the primary context is given back by its device.
    contexts: Mutex<HashMap<ContextHandle, Device>>,
}

/// `call!(self, function(args))` for a required function: one unsafe call,
/// named as the vendor names it.
macro_rules! call {
    ($self:ident, $function:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the signature is the vendor's; out-pointers are to live locals of this method,
        // handles and addresses are what the trait's contract promises.
        let code = unsafe { ($self.cuda.$function)($($arg),*) };
        $self.check(stringify!($function), code)
    }};
}

/// Loads an optional function of the library; a call of one that is missing is an error with its
/// name.
macro_rules! optional {
    ($self:ident, $function:ident($($arg:expr),* $(,)?)) => {
        match $self.cuda.$function {
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
        let code = unsafe { ($self.cuda.$function)($($arg),*) };
        match class(code) {
            Class::NotReady => Ok(false),
            _ => $self.check(stringify!($function), code).map(|()| true),
        }
    }};
}

mod card;
mod virtual_memory;

impl CudaDriver {
    /// Opens the first of `names` that the loader finds.
    pub(super) fn open(names: &[String]) -> Result<CudaDriver> {
        let library = Library::open("CUDA", names, HINT)?;
        let cuda = Functions::load(&library)?;
        Ok(CudaDriver {
            library,
            cuda,
            contexts: Mutex::new(HashMap::new()),
        })
    }

    fn check(&self, call: &'static str, result: u32) -> Result<()> {
        if result == code::SUCCESS {
            return Ok(());
        }
        let mut name: *const c_char = ptr::null();
        let mut message: *const c_char = ptr::null();
        // SAFETY: takes any code; the out-pointer is to a live local and stays null
        // for a code it does not know.
        let named = unsafe { (self.cuda.cuGetErrorName)(result, &raw mut name) };
        // SAFETY: as above.
        let worded = unsafe { (self.cuda.cuGetErrorString)(result, &raw mut message) };
        if named != code::SUCCESS {
            name = ptr::null();
        }
        if worded != code::SUCCESS {
            message = ptr::null();
        }
        Err(Error::Call {
            call,
            code: result,
            // SAFETY: null or a static string of the library.
            name: unsafe { text(name) },
            // SAFETY: as above.
            text: unsafe { text(message) },
            class: class(result),
        })
    }

    fn device(&self, ordinal: u32) -> Result<Device> {
        let mut device: Device = 0;
        call!(self, cuDeviceGet(&raw mut device, ordinal as c_int))?;
        Ok(device)
    }
}

/// A static string of the driver.
///
/// # Safety
/// `pointer` is null or to a string that ends.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return "unknown code".to_owned();
    }
    // SAFETY: not null; the rest is the caller's promise.
    unsafe { CStr::from_ptr(pointer) }
        .to_string_lossy()
        .into_owned()
}

/// `13020` as `13.2`.
fn version(number: c_int) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

impl Driver for CudaDriver {
    fn vendor(&self) -> Vendor {
        Vendor::Cuda
    }

    fn library(&self) -> &str {
        self.library.name()
    }

    fn versions(&self) -> Result<Versions> {
        let mut api: c_int = 0;
        call!(self, cuDriverGetVersion(&raw mut api))?;
        Ok(Versions {
            driver: kernel_module_version("nvidia").unwrap_or_else(|| version(api)),
            runtime: version(api),
        })
    }

    fn device_count(&self) -> Result<u32> {
        call!(self, cuInit(0))?;
        let mut count: c_int = 0;
        call!(self, cuDeviceGetCount(&raw mut count))?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    fn device_attributes(&self, ordinal: u32) -> Result<DeviceAttributes> {
        self.card(ordinal)
    }

    fn context_open(&self, ordinal: u32) -> Result<ContextHandle> {
        call!(self, cuInit(0))?;
        let device = self.device(ordinal)?;
        let mut context: Context = ptr::null_mut();
        call!(self, cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        let handle = ContextHandle(context as usize);
        self.contexts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(handle, device);
        if let Err(error) = self.context_bind(handle) {
            // The bind's error is the one worth telling.
            let _ = call!(self, cuDevicePrimaryCtxRelease_v2(device));
            return Err(error);
        }
        Ok(handle)
    }

    fn context_bind(&self, context: ContextHandle) -> Result<()> {
        call!(self, cuCtxSetCurrent(context.0 as Context))
    }

    unsafe fn context_close(&self, context: ContextHandle) -> Result<()> {
        // The primary context is one a device, so the entry stays for another opener of the same.
        let device = self
            .contexts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&context)
            .copied();
        match device {
            Some(device) => call!(self, cuDevicePrimaryCtxRelease_v2(device)),
            None => Err(Error::Answer {
                call: "cuDevicePrimaryCtxRelease_v2",
                message: "the context was not opened here".to_owned(),
            }),
        }
    }

    /// The primary context ends with the last who retained it, who may be one of the libraries:
    /// they are not told by name, so it is destroyed if it is active still. They may release it
    /// afterwards.
    unsafe fn device_reset(&self, ordinal: u32) -> Result<()> {
        // To release a primary context does not take it off a thread.
        call!(self, cuCtxSetCurrent(ptr::null_mut()))?;
        let device = self.device(ordinal)?;
        let (mut flags, mut active): (c_uint, c_int) = (0, 0);
        optional!(
            self,
            cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active)
        )?;
        if active == 0 {
            return Ok(());
        }
        tracing::debug!("a library holds the primary context: it is destroyed");
        optional!(self, cuDevicePrimaryCtxReset_v2(device))
    }

    fn synchronize(&self) -> Result<()> {
        call!(self, cuCtxSynchronize())
    }

    fn mem_alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let mut address: Address = 0;
        call!(self, cuMemAlloc_v2(&raw mut address, bytes as usize))?;
        Ok(DevicePtr(address))
    }

    unsafe fn mem_free(&self, ptr: DevicePtr) -> Result<()> {
        call!(self, cuMemFree_v2(ptr.0))
    }

    fn mem_info(&self) -> Result<MemoryInfo> {
        let (mut free, mut total): (usize, usize) = (0, 0);
        call!(self, cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok(MemoryInfo {
            free: free as u64,
            total: total as u64,
        })
    }

    fn host_alloc(&self, bytes: usize) -> Result<*mut u8> {
        let mut ptr: *mut c_void = ptr::null_mut();
        call!(
            self,
            cuMemHostAlloc(&raw mut ptr, bytes, HOST_ALLOC_PORTABLE)
        )?;
        Ok(ptr.cast())
    }

    unsafe fn host_free(&self, ptr: *mut u8) -> Result<()> {
        call!(self, cuMemFreeHost(ptr.cast()))
    }

    unsafe fn host_register_read_only(&self, ptr: *const u8, bytes: usize) -> Result<()> {
        call!(
            self,
            cuMemHostRegister_v2(ptr.cast_mut().cast(), bytes, HOST_REGISTER)
        )
    }

    fn host_device_address(&self, ptr: *const u8) -> Result<DevicePtr> {
        let mut address = 0;
        optional!(
            self,
            cuMemHostGetDevicePointer_v2(&raw mut address, ptr.cast_mut().cast(), 0)
        )?;
        Ok(DevicePtr(address))
    }

    unsafe fn host_unregister(&self, ptr: *const u8) -> Result<()> {
        call!(self, cuMemHostUnregister(ptr.cast_mut().cast()))
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
            cuMemsetD8Async(dst.0, value, bytes as usize, stream.0 as Stream)
        )
    }

    unsafe fn copy_h2d_async(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        call!(
            self,
            cuMemcpyHtoDAsync_v2(dst.0, src.cast(), bytes as usize, stream.0 as Stream)
        )
    }

    unsafe fn copy_d2h_async(
        &self,
        dst: *mut u8,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        call!(
            self,
            cuMemcpyDtoHAsync_v2(dst.cast(), src.0, bytes as usize, stream.0 as Stream)
        )
    }

    unsafe fn copy_d2d_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        call!(
            self,
            cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes as usize, stream.0 as Stream)
        )
    }

    fn virtual_memory(&self) -> Option<&dyn super::virtual_memory::VirtualMemory> {
        self.has_virtual_memory().then_some(self)
    }

    fn stream_create(&self, priority: Priority) -> Result<StreamHandle> {
        let (mut least, mut greatest): (c_int, c_int) = (0, 0);
        call!(
            self,
            cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)
        )?;
        let priority = match priority {
            Priority::Normal => 0,
            Priority::High => greatest,
        };
        let mut stream: Stream = ptr::null_mut();
        call!(
            self,
            cuStreamCreateWithPriority(&raw mut stream, STREAM_NON_BLOCKING, priority)
        )?;
        Ok(StreamHandle(stream as usize))
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()> {
        call!(self, cuStreamDestroy_v2(stream.0 as Stream))
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        call!(self, cuStreamSynchronize(stream.0 as Stream))
    }

    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        query!(self, cuStreamQuery(stream.0 as Stream))
    }

    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        call!(
            self,
            cuStreamWaitEvent(stream.0 as Stream, event.0 as Event, 0)
        )
    }

    fn event_create(&self, timing: bool) -> Result<EventHandle> {
        let flags = if timing { 0 } else { EVENT_DISABLE_TIMING };
        let mut event: Event = ptr::null_mut();
        call!(self, cuEventCreate(&raw mut event, flags))?;
        Ok(EventHandle(event as usize))
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()> {
        call!(self, cuEventDestroy_v2(event.0 as Event))
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        call!(self, cuEventRecord(event.0 as Event, stream.0 as Stream))
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        query!(self, cuEventQuery(event.0 as Event))
    }

    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        call!(self, cuEventSynchronize(event.0 as Event))
    }

    unsafe fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> Result<f32> {
        let mut ms = 0.0_f32;
        call!(
            self,
            cuEventElapsedTime(&raw mut ms, start.0 as Event, end.0 as Event)
        )?;
        Ok(ms)
    }

    fn module_load(&self, image: &[u8]) -> Result<ModuleHandle> {
        let image = AlignedImage::new(image);
        let mut module: Module = ptr::null_mut();
        call!(
            self,
            cuModuleLoadData(&raw mut module, image.as_ptr().cast())
        )?;
        Ok(ModuleHandle(module as usize))
    }

    unsafe fn module_unload(&self, module: ModuleHandle) -> Result<()> {
        call!(self, cuModuleUnload(module.0 as Module))
    }

    unsafe fn module_function(&self, module: ModuleHandle, name: &CStr) -> Result<FunctionHandle> {
        let mut function: Function = ptr::null_mut();
        let result = call!(
            self,
            cuModuleGetFunction(&raw mut function, module.0 as Module, name.as_ptr())
        );
        match result {
            Ok(()) => Ok(FunctionHandle(function as usize)),
            Err(Error::Call {
                code: code::NOT_FOUND,
                ..
            }) => Err(Error::Kernel {
                kernel: name.to_string_lossy().into_owned(),
            }),
            Err(error) => Err(error),
        }
    }

    unsafe fn function_reserve_shared(&self, function: FunctionHandle, bytes: u32) -> Result<()> {
        call!(
            self,
            cuFuncSetAttribute(
                function.0 as Function,
                MAX_DYNAMIC_SHARED_SIZE_BYTES,
                bytes as c_int
            )
        )
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
        // As a buffer with its size, so that the driver knows where the bytes end.
        let mut extra: [*mut c_void; 5] = [
            LAUNCH_PARAM[0] as *mut c_void,
            args.as_ptr().cast_mut().cast(),
            LAUNCH_PARAM[1] as *mut c_void,
            (&raw mut bytes).cast(),
            LAUNCH_PARAM[2] as *mut c_void,
        ];
        if config.overlaps && self.cuda.cuLaunchKernelEx.is_some() {
            let mut value = [0; 16];
            value[0] = 1;
            let attribute = LaunchAttribute {
                id: PROGRAMMATIC_STREAM_SERIALIZATION,
                padding: 0,
                value,
            };
            let description = LaunchDescription {
                grid: config.grid,
                block: config.block,
                shared_bytes: config.shared_bytes,
                stream: stream.0 as Stream,
                attributes: &raw const attribute,
                n_attributes: 1,
            };
            return optional!(
                self,
                cuLaunchKernelEx(
                    &raw const description,
                    function.0 as Function,
                    ptr::null_mut(),
                    extra.as_mut_ptr()
                )
            );
        }
        call!(
            self,
            cuLaunchKernel(
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
        optional!(
            self,
            cuStreamBeginCapture_v2(stream.0 as Stream, CAPTURE_THREAD_LOCAL)
        )
    }

    unsafe fn capture_end(&self, stream: StreamHandle) -> Result<GraphHandle> {
        let mut graph: Graph = ptr::null_mut();
        optional!(self, cuStreamEndCapture(stream.0 as Stream, &raw mut graph))?;
        Ok(GraphHandle(graph as usize))
    }

    unsafe fn graph_nodes(&self, graph: GraphHandle) -> Result<usize> {
        let mut nodes: usize = 0;
        optional!(
            self,
            cuGraphGetNodes(graph.0 as Graph, ptr::null_mut(), &raw mut nodes)
        )?;
        Ok(nodes)
    }

    unsafe fn graph_instantiate(&self, graph: GraphHandle) -> Result<GraphExecHandle> {
        let mut exec: GraphExec = ptr::null_mut();
        optional!(
            self,
            cuGraphInstantiateWithFlags(&raw mut exec, graph.0 as Graph, 0)
        )?;
        Ok(GraphExecHandle(exec as usize))
    }

    unsafe fn graph_destroy(&self, graph: GraphHandle) -> Result<()> {
        optional!(self, cuGraphDestroy(graph.0 as Graph))
    }

    unsafe fn graph_launch(&self, exec: GraphExecHandle, stream: StreamHandle) -> Result<()> {
        optional!(self, cuGraphLaunch(exec.0 as GraphExec, stream.0 as Stream))
    }

    unsafe fn graph_exec_destroy(&self, exec: GraphExecHandle) -> Result<()> {
        optional!(self, cuGraphExecDestroy(exec.0 as GraphExec))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LossKind;

    #[test]
    fn versions_read_as_the_vendor_writes_them() {
        assert_eq!(version(13_020), "13.2");
        assert_eq!(version(12_080), "12.8");
    }

    #[test]
    fn codes_have_the_class_that_their_reader_needs() {
        assert_eq!(class(2), Class::OutOfMemory);
        assert_eq!(class(600), Class::NotReady);
        assert_eq!(class(700), Class::Lost(LossKind::Fault));
        assert_eq!(class(214), Class::Lost(LossKind::Hardware));
        assert_eq!(class(702), Class::Lost(LossKind::Hang));
        assert_eq!(class(999), Class::Lost(LossKind::Unknown));
        assert_eq!(class(801), Class::NotSupported);
        assert_eq!(class(1), Class::Other);
    }
}
