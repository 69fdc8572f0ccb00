//! One surface over the drivers of both vendors.
//!
//! [`Driver`] is what `device::gpu` may ask of a card: memory, copies, streams, events, modules,
//! launches, graphs. Two tables implement it (`hip.rs`, `cuda.rs`); everything above them is one
//! code and names no vendor. Handles are plain numbers: who owns what, and in which order it dies,
//! is the affair of the owners in [`super::context`], [`super::memory`] and [`super::exec`], which
//! are what the rest of the crate uses.
//!
//! A symbol, type or constant of a vendor's driver appears in the two tables only; those of its
//! product libraries in `blas`.
//! *Invariant:* no method panics and none aborts; a failure is an [`Error`] with a [`Class`]
//! (`tests/gpu_driver/refusals.rs`).
//! *Threads:* every method may be called from any thread. Except where it says otherwise, a method
//! acts on the context that the calling thread made current with [`Driver::context_bind`].

use std::ffi::CStr;
use std::fmt;

pub use super::error::{Attempt, Class, Error, Result};

/// Vendor of a GPU driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// AMD, through the HIP runtime.
    Hip,
    /// NVIDIA, through the CUDA driver API.
    Cuda,
}

impl Vendor {
    /// `hip` or `cuda`, as in `--device` and in what a device says of itself.
    pub fn name(self) -> &'static str {
        match self {
            Vendor::Hip => "hip",
            Vendor::Cuda => "cuda",
        }
    }

    /// The vendor of a [`Vendor::name`].
    pub fn named(name: &str) -> Option<Self> {
        let mut all = [Vendor::Hip, Vendor::Cuda].into_iter();
        all.find(|vendor| vendor.name() == name)
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An address in a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0 + bytes)
    }
}

/// Declares the opaque handles that a driver gives out.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub usize);
    )*};
}

handles! {
    /// A context on one device.
    ContextHandle;
    /// A stream: an ordered queue of work.
    StreamHandle;
    /// An event: a point in a stream.
    EventHandle;
    /// A loaded module.
    ModuleHandle;
    /// A kernel of a module; lives as long as the module.
    FunctionHandle;
    /// A captured graph.
    GraphHandle;
    /// A graph made ready to launch.
    GraphExecHandle;
}

/// Versions as the driver reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Versions {
    /// The driver's version, in the vendor's own notation (`6.4.43482`, `13.0`).
    pub driver: String,
    /// The runtime library's version.
    pub runtime: String,
}

/// What a device is. Read without a context, so that listing devices takes no memory on any of
/// them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// The driver's number of the GPU.
    pub ordinal: u32,
    /// The card's name.
    pub name: String,
    /// `gfx1100` or `sm_90`: what kernels are compiled for.
    pub arch: String,
    /// Compute units or streaming multiprocessors.
    pub compute_units: u32,
    /// Lanes of a wave (32 or 64) or of a warp (32).
    pub wave: u32,
    /// Bytes of shared memory (LDS) that a block may use without asking.
    pub shared_per_block: u32,
    /// Bytes of shared memory that a block may use after [`Driver::function_reserve_shared`].
    pub shared_per_block_max: u32,
    /// Bytes of device memory.
    pub total_bytes: u64,
    /// PCI address as in sysfs (`0000:03:00.0`).
    pub pci_bus_id: String,
    /// Whether the GPU is integrated (an APU).
    pub integrated: bool,
    /// Whether the GPU's memory is the machine's, so that memory of other programs reduces it.
    pub machine_memory: bool,
}

/// Memory of a device, by the driver's own count, other processes' share included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes free now.
    pub free: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Priority of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// The driver's default.
    Normal,
    /// The highest that the device has: for work that others wait for.
    High,
}

/// A kernel's launch: geometry and one by-value argument.
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// Whether the kernel may begin before the one before it on the stream has ended; it then waits
    /// itself before it reads what that one wrote. Of no effect where the driver does not know it.
    pub overlaps: bool,
}

/// The driver of one vendor, opened.
///
/// # Safety of the unsafe methods
/// Handles and addresses come from the same driver and are alive, of the calling thread's current
/// context; memory that a copy or a launch names stays valid and unshared with writers until the
/// stream has passed it. The owners in [`super::context`], [`super::memory`] and [`super::exec`]
/// keep the first half by construction.
pub trait Driver: Send + Sync {
    // ---- what it
    // is ------------------------------------------------------------------------------------------

    /// Whose it is.
    fn vendor(&self) -> Vendor;

    /// The library's file name as it was opened.
    fn library(&self) -> &str;

    /// Versions of driver and runtime.
    ///
    /// # Errors
    /// What the driver says.
    fn versions(&self) -> Result<Versions>;

    /// Starts the driver and counts its devices.
    ///
    /// # Errors
    /// What the driver says, which may be that there is no device.
    fn device_count(&self) -> Result<u32>;

    /// What device `ordinal` is. Needs no context and makes none.
    ///
    /// # Errors
    /// What the driver says.
    fn device_attributes(&self, ordinal: u32) -> Result<DeviceAttributes>;

    // ----
    // context -------------------------------------------------------------------------------------

    /// Opens the device's primary context and makes it the calling thread's current one.
    /// Takes memory on the device.
    ///
    /// # Errors
    /// [`Class::OutOfMemory`] if there is too little, and what else the driver says.
    fn context_open(&self, ordinal: u32) -> Result<ContextHandle>;

    /// Makes a context the calling thread's current one.
    ///
    /// # Errors
    /// What the driver says.
    fn context_bind(&self, context: ContextHandle) -> Result<()>;

    /// Gives a context back.
    ///
    /// # Safety
    /// Nothing of it is used afterwards; see the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn context_close(&self, context: ContextHandle) -> Result<()>;

    /// Gives back what else this process holds on a device, all contexts of which were closed: what
    /// the vendor's libraries have opened for themselves.
    ///
    /// # Safety
    /// Nothing of this process is on the device or uses it, in whichever thread.
    ///
    /// # Errors
    /// [`Error::Symbols`] where the library has no such call; what the driver says.
    unsafe fn device_reset(&self, ordinal: u32) -> Result<()>;

    /// Waits for all work of the current context.
    ///
    /// # Errors
    /// Failures of that work, [`Class::Lost`] if the device is gone.
    fn synchronize(&self) -> Result<()>;

    // ----
    // memory --------------------------------------------------------------------------------------

    /// Allocates device memory, aligned to at least 256 bytes.
    ///
    /// # Errors
    /// [`Class::OutOfMemory`].
    fn mem_alloc(&self, bytes: u64) -> Result<DevicePtr>;

    /// Frees device memory. May wait for the device.
    ///
    /// # Safety
    /// `ptr` came from [`Driver::mem_alloc`] and no work under way touches it; see the trait.
    ///
    /// # Errors
    /// What the driver says; failures of earlier work may surface here.
    unsafe fn mem_free(&self, ptr: DevicePtr) -> Result<()>;

    /// Free and total bytes of the current context's device.
    ///
    /// # Errors
    /// What the driver says.
    fn mem_info(&self) -> Result<MemoryInfo>;

    /// Allocates page-locked host memory that every context may copy from and to, zeroed or not.
    ///
    /// # Errors
    /// [`Class::OutOfMemory`].
    fn host_alloc(&self, bytes: usize) -> Result<*mut u8>;

    /// Frees page-locked host memory.
    ///
    /// # Safety
    /// `ptr` came from [`Driver::host_alloc`] and no copy under way touches it.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn host_free(&self, ptr: *mut u8) -> Result<()>;

    /// Page-locks existing memory for reading by the device only, so that copies from it run at
    /// link speed. Works on a shared, read-only file mapping. A page is page-locked once:
    /// ranges must not share pages.
    ///
    /// # Safety
    /// The range is mapped and stays so until [`Driver::host_unregister`].
    ///
    /// # Errors
    /// [`Class::NotSupported`] or [`Class::Other`] where driver or kernel cannot;
    /// [`Class::OutOfMemory`] past a limit.
    unsafe fn host_register_read_only(&self, ptr: *const u8, bytes: usize) -> Result<()>;

    /// Where kernels read memory of the host that begins at `ptr`: a range that was registered, or
    /// one of [`Driver::host_alloc`].
    ///
    /// # Errors
    /// [`Error::Symbols`] where the library has no such call; what the driver says.
    fn host_device_address(&self, ptr: *const u8) -> Result<DevicePtr>;

    /// Undoes [`Driver::host_register_read_only`].
    ///
    /// # Safety
    /// `ptr` is what was registered, and no copy under way reads from it.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn host_unregister(&self, ptr: *const u8) -> Result<()>;

    /// Queues filling of `bytes` bytes with one value.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn memset_async(
        &self,
        dst: DevicePtr,
        value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Queues a copy from host to device. Asynchronous only from page-locked memory.
    ///
    /// # Safety
    /// `src` is readable for `bytes` and unchanged until the stream has passed the copy; see the
    /// trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy_h2d_async(
        &self,
        dst: DevicePtr,
        src: *const u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Queues a copy from device to host. Asynchronous only into page-locked memory.
    ///
    /// # Safety
    /// `dst` is writable for `bytes` and not looked at until the stream has
    /// passed the copy; see the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy_d2h_async(
        &self,
        dst: *mut u8,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Queues a copy inside the device. The ranges must not overlap.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy_d2d_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Addresses apart from memory; `None` where the library lacks the functions.
    fn virtual_memory(&self) -> Option<&dyn super::virtual_memory::VirtualMemory>;

    // ---- streams and
    // events ------------------------------------------------------------------------------------

    /// Makes a stream that does not wait for the default stream.
    ///
    /// # Errors
    /// What the driver says.
    fn stream_create(&self, priority: Priority) -> Result<StreamHandle>;

    /// Destroys a stream; work on it still ends.
    ///
    /// # Safety
    /// See the trait; the stream is not used afterwards.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()>;

    /// Waits until all work on the stream has ended.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// Failures of that work.
    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()>;

    /// Whether all work on the stream has ended.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// Failures of that work.
    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool>;

    /// Lets later work on `stream` wait until `event`, as last recorded, has passed.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;

    /// Makes an event; one without `timing` is cheaper.
    ///
    /// # Errors
    /// What the driver says.
    fn event_create(&self, timing: bool) -> Result<EventHandle>;

    /// Destroys an event; a wait for it that is already queued still holds.
    ///
    /// # Safety
    /// See the trait; the event is not used afterwards.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()>;

    /// Marks the present end of `stream`.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;

    /// Whether the event's last mark has been passed; true if it was never recorded.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// Failures of the work before it.
    unsafe fn event_query(&self, event: EventHandle) -> Result<bool>;

    /// Waits until the event's last mark has been passed.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// Failures of the work before it.
    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()>;

    /// Milliseconds from one event to another, both made with `timing` and passed.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// [`Class::NotReady`] if one has not been passed.
    unsafe fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> Result<f32>;

    // ---- modules and
    // launches ----------------------------------------------------------------------------------

    /// Loads a code object: an AMD ELF image or bundle, a cubin, or PTX text.
    ///
    /// # Errors
    /// An image for another architecture, or one that is damaged. The driver trusts what
    /// an image says about its own extent: give only images that a compiler wrote or
    /// whose checksum was verified.
    fn module_load(&self, image: &[u8]) -> Result<ModuleHandle>;

    /// Unloads a module.
    ///
    /// # Safety
    /// See the trait; no kernel of it runs, and none is launched afterwards.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn module_unload(&self, module: ModuleHandle) -> Result<()>;

    /// A kernel by its unmangled name.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// [`Error::Kernel`] if the module has none of that name.
    unsafe fn module_function(&self, module: ModuleHandle, name: &CStr) -> Result<FunctionHandle>;

    /// Lets launches of a kernel use up to `bytes` of dynamic shared memory.
    /// Needed on NVIDIA above 48 KiB.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn function_reserve_shared(&self, function: FunctionHandle, bytes: u32) -> Result<()>;

    /// Queues a kernel whose only parameter is a struct passed by value; `args` are its bytes. They
    /// are copied before the call returns.
    ///
    /// # Safety
    /// `args` is exactly the struct that the kernel declares, and the addresses in it meet the
    /// kernel's own contract until the stream has passed the launch; see the trait.
    ///
    /// # Errors
    /// What the driver says; failures of earlier work may surface here.
    unsafe fn launch(
        &self,
        function: FunctionHandle,
        config: LaunchConfig,
        args: &[u8],
        stream: StreamHandle,
    ) -> Result<()>;

    // ----
    // graphs --------------------------------------------------------------------------------------

    /// Starts recording the work that is queued on `stream` instead of doing it. Other threads are
    /// not restricted; this one must not allocate, free or synchronize until the end.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn capture_begin(&self, stream: StreamHandle) -> Result<()>;

    /// Ends the recording, also after an error in between, which comes back here.
    ///
    /// # Safety
    /// See the trait; called by the thread that began.
    ///
    /// # Errors
    /// A capture that was broken by a call in between.
    unsafe fn capture_end(&self, stream: StreamHandle) -> Result<GraphHandle>;

    /// Nodes of a graph.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn graph_nodes(&self, graph: GraphHandle) -> Result<usize>;

    /// Makes a graph ready to launch; the graph itself may be destroyed afterwards.
    ///
    /// # Safety
    /// See the trait.
    ///
    /// # Errors
    /// [`Class::OutOfMemory`], and what else the driver says.
    unsafe fn graph_instantiate(&self, graph: GraphHandle) -> Result<GraphExecHandle>;

    /// Destroys a graph.
    ///
    /// # Safety
    /// See the trait; the graph is not used afterwards.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn graph_destroy(&self, graph: GraphHandle) -> Result<()>;

    /// Queues a graph's work on `stream`.
    ///
    /// # Safety
    /// The addresses that its launches and copies were recorded with still meet their
    /// contracts; see the trait.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn graph_launch(&self, exec: GraphExecHandle, stream: StreamHandle) -> Result<()>;

    /// Destroys a ready graph.
    ///
    /// # Safety
    /// See the trait; no launch of it is under way, and none follows.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn graph_exec_destroy(&self, exec: GraphExecHandle) -> Result<()>;
}
