//! What NVIDIA's header declares, as far as we use it: types, numbers, and the table of functions.
//! Declarations are our own, of the documented ABI; functions with a second version in the library
//! (`_v2`) are taken by that name, as the header does.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::virtual_memory;
use crate::LossKind;
use crate::driver::Class;
use crate::library::table;

pub(super) type Device = c_int;
pub(super) type Context = *mut c_void;
pub(super) type Stream = *mut c_void;
pub(super) type Event = *mut c_void;
pub(super) type Module = *mut c_void;
pub(super) type Function = *mut c_void;
pub(super) type Graph = *mut c_void;
pub(super) type GraphExec = *mut c_void;
pub(super) type Address = u64;

/// CUresult, as far as we ask for it by name.
pub(super) mod code {
    pub(in crate::cuda) const SUCCESS: u32 = 0;
    pub(in crate::cuda) const OUT_OF_MEMORY: u32 = 2;
    pub(in crate::cuda) const NOT_FOUND: u32 = 500;
    pub(in crate::cuda) const NOT_READY: u32 = 600;
    pub(in crate::cuda) const NOT_SUPPORTED: u32 = 801;
    /// Launch timeout.
    pub(in crate::cuda) const HANG: u32 = 702;
    /// Uncorrectable errors of memory (ECC) and of NVLink.
    pub(in crate::cuda) const HARDWARE: [u32; 2] = [214, 220];
    /// Illegal address, assert, hardware stack, illegal instruction, misaligned address, address
    /// space, program counter, launch failed.
    pub(in crate::cuda) const FAULT: [u32; 8] = [700, 710, 714, 715, 716, 717, 718, 719];
    /// Deinitialized, context destroyed, unknown.
    pub(in crate::cuda) const UNTOLD: [u32; 3] = [4, 709, 999];
}

/// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
pub(super) const PROGRAMMATIC_STREAM_SERIALIZATION: u32 = 6;

/// CUlaunchAttribute: an id, and a union of 64 bytes of which we set the first number.
#[repr(C)]
pub(super) struct LaunchAttribute {
    pub(super) id: u32,
    pub(super) padding: u32,
    pub(super) value: [u32; 16],
}

const _: () = assert!(size_of::<LaunchAttribute>() == 72);

/// CUlaunchConfig.
#[repr(C)]
pub(super) struct LaunchDescription {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: Stream,
    pub(super) attributes: *const LaunchAttribute,
    pub(super) n_attributes: c_uint,
}

const _: () = assert!(size_of::<LaunchDescription>() == 56);

/// CUdevice_attribute.
pub(super) mod attribute {
    pub(in crate::cuda) const MAX_SHARED_MEMORY_PER_BLOCK: u32 = 8;
    pub(in crate::cuda) const WARP_SIZE: u32 = 10;
    pub(in crate::cuda) const MULTIPROCESSOR_COUNT: u32 = 16;
    pub(in crate::cuda) const INTEGRATED: u32 = 18;
    pub(in crate::cuda) const COMPUTE_CAPABILITY_MAJOR: u32 = 75;
    pub(in crate::cuda) const COMPUTE_CAPABILITY_MINOR: u32 = 76;
    pub(in crate::cuda) const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: u32 = 97;
    pub(in crate::cuda) const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: u32 = 102;
}

/// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
pub(super) const MAX_DYNAMIC_SHARED_SIZE_BYTES: u32 = 8;
/// CU_STREAM_NON_BLOCKING.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// CU_EVENT_DISABLE_TIMING.
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// CU_MEMHOSTALLOC_PORTABLE.
pub(super) const HOST_ALLOC_PORTABLE: c_uint = 1;
/// CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY: without the latter a
/// read-only mapping is refused.
pub(super) const HOST_REGISTER: c_uint = 1 | 8;
/// CU_STREAM_CAPTURE_MODE_THREAD_LOCAL.
pub(super) const CAPTURE_THREAD_LOCAL: u32 = 1;
/// CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END.
pub(super) const LAUNCH_PARAM: [usize; 3] = [1, 2, 0];

table! {
    struct Functions {
        required {
            cuInit(c_uint) -> u32;
            cuGetErrorName(u32, *mut *const c_char) -> u32;
            cuGetErrorString(u32, *mut *const c_char) -> u32;
            cuDriverGetVersion(*mut c_int) -> u32;
            cuDeviceGetCount(*mut c_int) -> u32;
            cuDeviceGet(*mut Device, c_int) -> u32;
            cuDeviceGetName(*mut c_char, c_int, Device) -> u32;
            cuDeviceTotalMem_v2(*mut usize, Device) -> u32;
            cuDeviceGetAttribute(*mut c_int, u32, Device) -> u32;
            cuDeviceGetPCIBusId(*mut c_char, c_int, Device) -> u32;
            cuDevicePrimaryCtxRetain(*mut Context, Device) -> u32;
            cuDevicePrimaryCtxRelease_v2(Device) -> u32;
            cuCtxSetCurrent(Context) -> u32;
            cuCtxSynchronize() -> u32;
            cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int) -> u32;
            cuMemAlloc_v2(*mut Address, usize) -> u32;
            cuMemFree_v2(Address) -> u32;
            cuMemGetInfo_v2(*mut usize, *mut usize) -> u32;
            cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> u32;
            cuMemFreeHost(*mut c_void) -> u32;
            cuMemHostRegister_v2(*mut c_void, usize, c_uint) -> u32;
            cuMemHostUnregister(*mut c_void) -> u32;
            cuMemsetD8Async(Address, u8, usize, Stream) -> u32;
            cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Stream) -> u32;
            cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Stream) -> u32;
            cuMemcpyDtoDAsync_v2(Address, Address, usize, Stream) -> u32;
            cuStreamCreateWithPriority(*mut Stream, c_uint, c_int) -> u32;
            cuStreamDestroy_v2(Stream) -> u32;
            cuStreamSynchronize(Stream) -> u32;
            cuStreamQuery(Stream) -> u32;
            cuStreamWaitEvent(Stream, Event, c_uint) -> u32;
            cuEventCreate(*mut Event, c_uint) -> u32;
            cuEventDestroy_v2(Event) -> u32;
            cuEventRecord(Event, Stream) -> u32;
            cuEventQuery(Event) -> u32;
            cuEventSynchronize(Event) -> u32;
            cuEventElapsedTime(*mut f32, Event, Event) -> u32;
            cuModuleLoadData(*mut Module, *const c_void) -> u32;
            cuModuleUnload(Module) -> u32;
            cuModuleGetFunction(*mut Function, Module, *const c_char) -> u32;
            cuFuncSetAttribute(Function, u32, c_int) -> u32;
            cuLaunchKernel(Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream,
                *mut *mut c_void, *mut *mut c_void) -> u32;
        }
        optional {
            cuDevicePrimaryCtxGetState(Device, *mut c_uint, *mut c_int) -> u32;
            cuDevicePrimaryCtxReset_v2(Device) -> u32;
            cuLaunchKernelEx(*const LaunchDescription, Function, *mut *mut c_void, *mut *mut c_void) -> u32;
            cuMemHostGetDevicePointer_v2(*mut Address, *mut c_void, c_uint) -> u32;
            cuStreamBeginCapture_v2(Stream, u32) -> u32;
            cuStreamEndCapture(Stream, *mut Graph) -> u32;
            cuGraphGetNodes(Graph, *mut *mut c_void, *mut usize) -> u32;
            cuGraphInstantiateWithFlags(*mut GraphExec, Graph, u64) -> u32;
            cuGraphLaunch(GraphExec, Stream) -> u32;
            cuGraphDestroy(Graph) -> u32;
            cuGraphExecDestroy(GraphExec) -> u32;
            cuMemGetAllocationGranularity(*mut usize, *const virtual_memory::Properties, u32) -> u32;
            cuMemAddressReserve(*mut Address, usize, usize, Address, u64) -> u32;
            cuMemAddressFree(Address, usize) -> u32;
            cuMemCreate(*mut u64, usize, *const virtual_memory::Properties, u64) -> u32;
            cuMemRelease(u64) -> u32;
            cuMemMap(Address, usize, usize, u64, u64) -> u32;
            cuMemSetAccess(Address, usize, *const virtual_memory::Access, usize) -> u32;
            cuMemUnmap(Address, usize) -> u32;
        }
    }
}

/// What a code means.
pub(super) fn class(result: u32) -> Class {
    match result {
        code::OUT_OF_MEMORY => Class::OutOfMemory,
        code::NOT_READY => Class::NotReady,
        code::NOT_SUPPORTED => Class::NotSupported,
        code::HANG => Class::Lost(LossKind::Hang),
        result if code::HARDWARE.contains(&result) => Class::Lost(LossKind::Hardware),
        result if code::FAULT.contains(&result) => Class::Lost(LossKind::Fault),
        result if code::UNTOLD.contains(&result) => Class::Lost(LossKind::Unknown),
        _ => Class::Other,
    }
}
