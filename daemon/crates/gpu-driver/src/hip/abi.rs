//! What AMD's header declares, as far as we use it: types, numbers, what codes mean, and the table
//! of functions. Enums are hip-runtime-sys's.
//!
//! Codes are taken as plain integers: a newer runtime may return one that the crate's enum does not
//! list, and such a value in a Rust enum would be undefined behaviour.

use std::ffi::{c_char, c_int, c_uint, c_void};

use hip_runtime_sys as sys;
use sys::hipError_t as Code;

use crate::LossKind;
use crate::driver::Class;
use crate::library::table;

/// hipHostRegisterReadOnly, of HIP 5.7 and later.
pub(super) const HOST_REGISTER_READ_ONLY: c_uint = 0x8;
/// HIP_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END.
pub(super) const LAUNCH_PARAM: [usize; 3] = [1, 2, 3];

pub(super) type Stream = *mut c_void;
pub(super) type Event = *mut c_void;
pub(super) type Module = *mut c_void;
pub(super) type Function = *mut c_void;
pub(super) type Graph = *mut c_void;
pub(super) type GraphExec = *mut c_void;

table! {
    struct Functions {
        required {
            hipInit(c_uint) -> u32;
            hipGetErrorName(u32) -> *const c_char;
            hipGetErrorString(u32) -> *const c_char;
            hipDriverGetVersion(*mut c_int) -> u32;
            hipRuntimeGetVersion(*mut c_int) -> u32;
            hipGetDeviceCount(*mut c_int) -> u32;
            hipSetDevice(c_int) -> u32;
            hipDeviceGetName(*mut c_char, c_int, c_int) -> u32;
            hipDeviceTotalMem(*mut usize, c_int) -> u32;
            hipDeviceGetAttribute(*mut c_int, u32, c_int) -> u32;
            hipDeviceGetPCIBusId(*mut c_char, c_int, c_int) -> u32;
            hipDeviceSynchronize() -> u32;
            hipMalloc(*mut *mut c_void, usize) -> u32;
            hipFree(*mut c_void) -> u32;
            hipMemGetInfo(*mut usize, *mut usize) -> u32;
            hipHostMalloc(*mut *mut c_void, usize, c_uint) -> u32;
            hipHostFree(*mut c_void) -> u32;
            hipHostRegister(*mut c_void, usize, c_uint) -> u32;
            hipHostUnregister(*mut c_void) -> u32;
            hipMemsetAsync(*mut c_void, c_int, usize, Stream) -> u32;
            hipMemcpyAsync(*mut c_void, *const c_void, usize, u32, Stream) -> u32;
            hipStreamCreateWithPriority(*mut Stream, c_uint, c_int) -> u32;
            hipDeviceGetStreamPriorityRange(*mut c_int, *mut c_int) -> u32;
            hipStreamDestroy(Stream) -> u32;
            hipStreamSynchronize(Stream) -> u32;
            hipStreamQuery(Stream) -> u32;
            hipStreamWaitEvent(Stream, Event, c_uint) -> u32;
            hipEventCreateWithFlags(*mut Event, c_uint) -> u32;
            hipEventDestroy(Event) -> u32;
            hipEventRecord(Event, Stream) -> u32;
            hipEventQuery(Event) -> u32;
            hipEventSynchronize(Event) -> u32;
            hipEventElapsedTime(*mut f32, Event, Event) -> u32;
            hipModuleLoadData(*mut Module, *const c_void) -> u32;
            hipModuleUnload(Module) -> u32;
            hipModuleGetFunction(*mut Function, Module, *const c_char) -> u32;
            hipModuleLaunchKernel(Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream,
                *mut *mut c_void, *mut *mut c_void) -> u32;
        }
        optional {
            hipDeviceReset() -> u32;
            hipGetDevicePropertiesR0600(*mut PropertiesBytes, c_int) -> u32;
            hipGetDeviceProperties(*mut PropertiesBytes, c_int) -> u32;
            hipHostGetDevicePointer(*mut *mut c_void, *mut c_void, c_uint) -> u32;
            hipStreamBeginCapture(Stream, u32) -> u32;
            hipStreamEndCapture(Stream, *mut Graph) -> u32;
            hipGraphGetNodes(Graph, *mut *mut c_void, *mut usize) -> u32;
            hipGraphInstantiate(*mut GraphExec, Graph, *mut *mut c_void, *mut c_char, usize) -> u32;
            hipGraphLaunch(GraphExec, Stream) -> u32;
            hipGraphDestroy(Graph) -> u32;
            hipGraphExecDestroy(GraphExec) -> u32;
            hipMemGetAllocationGranularity(*mut usize, *const sys::hipMemAllocationProp, u32) -> u32;
            hipMemAddressReserve(*mut *mut c_void, usize, usize, *mut c_void, u64) -> u32;
            hipMemAddressFree(*mut c_void, usize) -> u32;
            hipMemCreate(*mut *mut c_void, usize, *const sys::hipMemAllocationProp, u64) -> u32;
            hipMemRelease(*mut c_void) -> u32;
            hipMemMap(*mut c_void, usize, usize, *mut c_void, u64) -> u32;
            hipMemSetAccess(*mut c_void, usize, *const sys::hipMemAccessDesc, usize) -> u32;
            hipMemUnmap(*mut c_void, usize) -> u32;
        }
    }
}

/// Room for any layout of the properties, present ones and some growth, aligned as C would align
/// it.
#[repr(C, align(16))]
pub(super) struct PropertiesBytes(pub(super) [u8; 8192]);

/// What a code means by itself. hipErrorUnknown stays [`Class::Other`]: the runtime uses it for
/// refusals too, and `loss.rs` looks again.
pub(super) fn class(code: u32) -> Class {
    const OUT_OF_MEMORY: u32 = Code::hipErrorOutOfMemory as u32;
    const NOT_READY: u32 = Code::hipErrorNotReady as u32;
    const NOT_SUPPORTED: u32 = Code::hipErrorNotSupported as u32;
    const UNTOLD: [u32; 2] = [
        Code::hipErrorDeinitialized as u32,
        Code::hipErrorContextIsDestroyed as u32,
    ];
    const FAULT: [u32; 4] = [
        Code::hipErrorPriorLaunchFailure as u32,
        Code::hipErrorIllegalAddress as u32,
        Code::hipErrorAssert as u32,
        Code::hipErrorLaunchFailure as u32,
    ];
    const HARDWARE: u32 = Code::hipErrorECCNotCorrectable as u32;
    const HANG: u32 = Code::hipErrorLaunchTimeOut as u32;
    match code {
        OUT_OF_MEMORY => Class::OutOfMemory,
        NOT_READY => Class::NotReady,
        NOT_SUPPORTED => Class::NotSupported,
        HARDWARE => Class::Lost(LossKind::Hardware),
        HANG => Class::Lost(LossKind::Hang),
        code if FAULT.contains(&code) => Class::Lost(LossKind::Fault),
        code if UNTOLD.contains(&code) => Class::Lost(LossKind::Unknown),
        _ => Class::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_class_that_their_reader_needs() {
        assert_eq!(class(2), Class::OutOfMemory);
        assert_eq!(class(600), Class::NotReady);
        assert_eq!(class(700), Class::Lost(LossKind::Fault));
        assert_eq!(class(719), Class::Lost(LossKind::Fault));
        assert_eq!(class(214), Class::Lost(LossKind::Hardware));
        assert_eq!(class(702), Class::Lost(LossKind::Hang));
        assert_eq!(class(4), Class::Lost(LossKind::Unknown));
        assert_eq!(class(801), Class::NotSupported);
        assert_eq!(class(1), Class::Other);
        assert_eq!(class(4_000_000), Class::Other);
    }
}
