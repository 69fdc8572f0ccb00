//! The part of the HIP table that keeps addresses and memory apart.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::{HipDriver, sys};
use crate::driver::{DevicePtr, Error, Result};
use crate::virtual_memory::{MemoryHandle, VirtualMemory};
use sys::hipDeviceAttribute_t as Attribute;

const _: () = assert!(size_of::<sys::hipMemAllocationProp>() == 32);
const _: () = assert!(size_of::<sys::hipMemAccessDesc>() == 12);

fn location(ordinal: u32) -> sys::hipMemLocation {
    sys::hipMemLocation {
        type_: sys::hipMemLocationType::hipMemLocationTypeDevice,
        id: ordinal as c_int,
    }
}

fn properties(ordinal: u32) -> sys::hipMemAllocationProp {
    sys::hipMemAllocationProp {
        type_: sys::hipMemAllocationType::hipMemAllocationTypePinned,
        requestedHandleType: sys::hipMemAllocationHandleType::hipMemHandleTypeNone,
        location: location(ordinal),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::hipMemAllocationProp__bindgen_ty_1::default(),
    }
}

impl HipDriver {
    /// Whether the runtime has all the functions.
    pub(super) fn has_virtual_memory(&self) -> bool {
        let hip = &self.hip;
        hip.hipMemGetAllocationGranularity.is_some()
            && hip.hipMemAddressReserve.is_some()
            && hip.hipMemAddressFree.is_some()
            && hip.hipMemCreate.is_some()
            && hip.hipMemRelease.is_some()
            && hip.hipMemMap.is_some()
            && hip.hipMemSetAccess.is_some()
            && hip.hipMemUnmap.is_some()
    }
}

impl VirtualMemory for HipDriver {
    fn granularity(&self, ordinal: u32) -> Result<Option<u64>> {
        let supported = Attribute::hipDeviceAttributeVirtualMemoryManagementSupported;
        if self.attribute_or_zero(supported, ordinal as c_int) == 0 {
            return Ok(None);
        }
        let properties = properties(ordinal);
        let recommended =
            sys::hipMemAllocationGranularity_flags::hipMemAllocationGranularityRecommended;
        let mut bytes: usize = 0;
        optional!(
            self,
            hipMemGetAllocationGranularity(
                &raw mut bytes,
                &raw const properties,
                recommended as u32
            )
        )?;
        Ok((bytes > 0).then_some(bytes as u64))
    }

    fn reserve(&self, bytes: u64, align: u64) -> Result<DevicePtr> {
        let mut at: *mut c_void = ptr::null_mut();
        optional!(
            self,
            hipMemAddressReserve(
                &raw mut at,
                bytes as usize,
                align as usize,
                ptr::null_mut(),
                0
            )
        )?;
        Ok(DevicePtr(at as u64))
    }

    unsafe fn unreserve(&self, at: DevicePtr, bytes: u64) -> Result<()> {
        optional!(self, hipMemAddressFree(at.0 as *mut c_void, bytes as usize))
    }

    fn create(&self, ordinal: u32, bytes: u64) -> Result<MemoryHandle> {
        let properties = properties(ordinal);
        let mut memory: *mut c_void = ptr::null_mut();
        optional!(
            self,
            hipMemCreate(&raw mut memory, bytes as usize, &raw const properties, 0)
        )?;
        Ok(MemoryHandle(memory as u64))
    }

    unsafe fn release(&self, memory: MemoryHandle) -> Result<()> {
        optional!(self, hipMemRelease(memory.0 as *mut c_void))
    }

    unsafe fn map(
        &self,
        ordinal: u32,
        at: DevicePtr,
        bytes: u64,
        memory: MemoryHandle,
    ) -> Result<()> {
        let to = at.0 as *mut c_void;
        optional!(
            self,
            hipMemMap(to, bytes as usize, 0, memory.0 as *mut c_void, 0)
        )?;
        let access = sys::hipMemAccessDesc {
            location: location(ordinal),
            flags: sys::hipMemAccessFlags::hipMemAccessFlagsProtReadWrite,
        };
        let allowed: Result<(), Error> = optional!(
            self,
            hipMemSetAccess(to, bytes as usize, &raw const access, 1)
        );
        allowed.inspect_err(|_| {
            // The refusal is the error worth telling.
            let _ = optional!(self, hipMemUnmap(to, bytes as usize));
        })
    }

    unsafe fn unmap(&self, at: DevicePtr, bytes: u64) -> Result<()> {
        optional!(self, hipMemUnmap(at.0 as *mut c_void, bytes as usize))
    }
}
