//! What NVIDIA's driver says of a card.

use std::ffi::{c_char, c_int};

use super::abi::{Device, attribute};
use super::{CudaDriver, text};
use crate::driver::{DeviceAttributes, Result};

impl CudaDriver {
    /// See [`crate::Driver::device_attributes`].
    pub(super) fn card(&self, ordinal: u32) -> Result<DeviceAttributes> {
        call!(self, cuInit(0))?;
        let device = self.device(ordinal)?;
        let mut name = [0 as c_char; 256];
        call!(
            self,
            cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device)
        )?;
        let mut pci = [0 as c_char; 64];
        call!(
            self,
            cuDeviceGetPCIBusId(pci.as_mut_ptr(), pci.len() as c_int - 1, device)
        )?;
        let mut total_bytes: usize = 0;
        call!(self, cuDeviceTotalMem_v2(&raw mut total_bytes, device))?;
        let major = self.attribute(attribute::COMPUTE_CAPABILITY_MAJOR, device)?;
        let minor = self.attribute(attribute::COMPUTE_CAPABILITY_MINOR, device)?;
        let arch = format!("sm_{major}{minor}");
        // SAFETY: zeroed beyond what the driver wrote, whose length left room for the end.
        let name = unsafe { text(name.as_ptr()) };
        // SAFETY: as above.
        let pci_bus_id = unsafe { text(pci.as_ptr()) }.to_lowercase();
        let integrated = self.attribute(attribute::INTEGRATED, device)? != 0;
        Ok(DeviceAttributes {
            ordinal,
            name,
            arch,
            compute_units: self.attribute(attribute::MULTIPROCESSOR_COUNT, device)?,
            wave: self.attribute(attribute::WARP_SIZE, device)?,
            shared_per_block: self.attribute(attribute::MAX_SHARED_MEMORY_PER_BLOCK, device)?,
            shared_per_block_max: self
                .attribute(attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)?,
            total_bytes: total_bytes as u64,
            pci_bus_id,
            integrated,
            machine_memory: integrated,
        })
    }

    pub(super) fn attribute(&self, attribute: u32, device: Device) -> Result<u32> {
        let mut value: c_int = 0;
        call!(
            self,
            cuDeviceGetAttribute(&raw mut value, attribute, device)
        )?;
        Ok(u32::try_from(value).unwrap_or(0))
    }
}
