//! The part of the CUDA table that keeps addresses and memory apart.

use std::ffi::c_void;
use std::ptr;

use super::{Address, CudaDriver, Device, attribute};
use crate::driver::{DevicePtr, Error, Result};
use crate::virtual_memory::{MemoryHandle, VirtualMemory};

/// CU_MEM_ALLOCATION_TYPE_PINNED.
const PINNED: u32 = 1;
/// CU_MEM_LOCATION_TYPE_DEVICE.
const ON_DEVICE: u32 = 1;
/// CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
const READ_WRITE: u32 = 3;
/// CU_MEM_ALLOC_GRANULARITY_RECOMMENDED.
const RECOMMENDED: u32 = 1;

/// CUmemLocation.
#[repr(C)]
struct Location {
    kind: u32,
    device: Device,
}

/// CUmemAllocationProp; the flags are for compression, RDMA and sparse arrays.
#[repr(C)]
pub(super) struct Properties {
    kind: u32,
    handle_kinds: u32,
    location: Location,
    windows: *mut c_void,
    flags: [u8; 8],
}

const _: () = assert!(size_of::<Properties>() == 32);

/// CUmemAccessDesc.
#[repr(C)]
pub(super) struct Access {
    location: Location,
    flags: u32,
}

const _: () = assert!(size_of::<Access>() == 12);

fn properties(device: Device) -> Properties {
    Properties {
        kind: PINNED,
        handle_kinds: 0,
        location: Location {
            kind: ON_DEVICE,
            device,
        },
        windows: ptr::null_mut(),
        flags: [0; 8],
    }
}

impl CudaDriver {
    /// Whether the driver has all the functions.
    pub(super) fn has_virtual_memory(&self) -> bool {
        let cuda = &self.cuda;
        cuda.cuMemGetAllocationGranularity.is_some()
            && cuda.cuMemAddressReserve.is_some()
            && cuda.cuMemAddressFree.is_some()
            && cuda.cuMemCreate.is_some()
            && cuda.cuMemRelease.is_some()
            && cuda.cuMemMap.is_some()
            && cuda.cuMemSetAccess.is_some()
            && cuda.cuMemUnmap.is_some()
    }
}

impl VirtualMemory for CudaDriver {
    fn granularity(&self, ordinal: u32) -> Result<Option<u64>> {
        let device = self.device(ordinal)?;
        let supported = self.attribute(attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
        if supported.unwrap_or(0) == 0 {
            return Ok(None);
        }
        let properties = properties(device);
        let mut bytes: usize = 0;
        optional!(
            self,
            cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, RECOMMENDED)
        )?;
        Ok((bytes > 0).then_some(bytes as u64))
    }

    fn reserve(&self, bytes: u64, align: u64) -> Result<DevicePtr> {
        let mut at: Address = 0;
        optional!(
            self,
            cuMemAddressReserve(&raw mut at, bytes as usize, align as usize, 0, 0)
        )?;
        Ok(DevicePtr(at))
    }

    unsafe fn unreserve(&self, at: DevicePtr, bytes: u64) -> Result<()> {
        optional!(self, cuMemAddressFree(at.0, bytes as usize))
    }

    fn create(&self, ordinal: u32, bytes: u64) -> Result<MemoryHandle> {
        let properties = properties(self.device(ordinal)?);
        let mut memory: u64 = 0;
        optional!(
            self,
            cuMemCreate(&raw mut memory, bytes as usize, &raw const properties, 0)
        )?;
        Ok(MemoryHandle(memory))
    }

    unsafe fn release(&self, memory: MemoryHandle) -> Result<()> {
        optional!(self, cuMemRelease(memory.0))
    }

    unsafe fn map(
        &self,
        ordinal: u32,
        at: DevicePtr,
        bytes: u64,
        memory: MemoryHandle,
    ) -> Result<()> {
        let device = self.device(ordinal)?;
        optional!(self, cuMemMap(at.0, bytes as usize, 0, memory.0, 0))?;
        let access = Access {
            location: Location {
                kind: ON_DEVICE,
                device,
            },
            flags: READ_WRITE,
        };
        let allowed: Result<(), Error> = optional!(
            self,
            cuMemSetAccess(at.0, bytes as usize, &raw const access, 1)
        );
        allowed.inspect_err(|_| {
            // The refusal is the error worth telling.
            let _ = optional!(self, cuMemUnmap(at.0, bytes as usize));
        })
    }

    unsafe fn unmap(&self, at: DevicePtr, bytes: u64) -> Result<()> {
        optional!(self, cuMemUnmap(at.0, bytes as usize))
    }
}
