//! What AMD's runtime says of a card.

use std::ffi::{c_char, c_int};

use hip_runtime_sys as sys;
use sys::hipDeviceAttribute_t as Attribute;

use super::abi::PropertiesBytes;
use super::{HipDriver, text};
use crate::driver::{DeviceAttributes, Error, Result};
use crate::sysfs::{self, CardMemory};

/// Offset and bytes of gcnArchName in what hipGetDevicePropertiesR0600 fills (1472 bytes).
const R0600_ARCH_OFFSET: usize = 1160;
const ARCH_BYTES: usize = 256;
/// Offset of the architecture's name in what hipGetDeviceProperties fills up to HIP 5.
const OLD_ARCH_OFFSET: usize = std::mem::offset_of!(sys::hipDeviceProp_t, gcnArchName);
const _: () = assert!(OLD_ARCH_OFFSET == 396 && size_of::<sys::hipDeviceProp_t>() == 792);

impl HipDriver {
    /// See [`crate::Driver::device_attributes`].
    pub(super) fn card(&self, ordinal: u32) -> Result<DeviceAttributes> {
        let device = ordinal as c_int;
        let mut name = [0 as c_char; 256];
        call!(
            self,
            hipDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device)
        )?;
        let mut pci = [0 as c_char; 64];
        call!(
            self,
            hipDeviceGetPCIBusId(pci.as_mut_ptr(), pci.len() as c_int - 1, device)
        )?;
        let mut total_bytes: usize = 0;
        call!(self, hipDeviceTotalMem(&raw mut total_bytes, device))?;
        let arch = self.arch(device)?;
        let shared =
            self.attribute(Attribute::hipDeviceAttributeMaxSharedMemoryPerBlock, device)?;
        // SAFETY: zeroed beyond what the runtime wrote, whose length left room for the end.
        let name = unsafe { text(name.as_ptr()) };
        // SAFETY: as above.
        let pci_bus_id = unsafe { text(pci.as_ptr()) }.to_lowercase();
        let integrated = self.attribute_or_zero(Attribute::hipDeviceAttributeIntegrated, device)
            != 0
            || sysfs::is_apu(&pci_bus_id);
        let mut attributes = DeviceAttributes {
            ordinal,
            name: if name.is_empty() { arch.clone() } else { name },
            arch,
            compute_units: self
                .attribute(Attribute::hipDeviceAttributeMultiprocessorCount, device)?,
            wave: self.attribute(Attribute::hipDeviceAttributeWarpSize, device)?,
            shared_per_block: shared,
            shared_per_block_max: shared,
            total_bytes: total_bytes as u64,
            pci_bus_id,
            integrated,
            machine_memory: integrated,
        };
        if let Some(kernel) = CardMemory::of(&attributes) {
            attributes.machine_memory = kernel.is_of_machine(attributes.total_bytes);
            attributes.total_bytes = kernel.total(attributes.total_bytes);
        }
        Ok(attributes)
    }

    fn attribute(&self, attribute: Attribute, ordinal: c_int) -> Result<u32> {
        let mut value: c_int = 0;
        call!(
            self,
            hipDeviceGetAttribute(&raw mut value, attribute as u32, ordinal)
        )?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// An attribute that a runtime may not know: 0 then.
    pub(super) fn attribute_or_zero(&self, attribute: Attribute, ordinal: c_int) -> u32 {
        self.attribute(attribute, ordinal).unwrap_or(0)
    }

    /// `gfx90a` of `gfx90a:sramecc+:xnack-`, which is to be had from the properties only.
    fn arch(&self, ordinal: c_int) -> Result<String> {
        let mut properties = Box::new(PropertiesBytes([0; 8192]));
        let (call, offset) = if self.hip.hipGetDevicePropertiesR0600.is_some() {
            optional!(
                self,
                hipGetDevicePropertiesR0600(&raw mut *properties, ordinal)
            )?;
            ("hipGetDevicePropertiesR0600", R0600_ARCH_OFFSET)
        } else {
            optional!(self, hipGetDeviceProperties(&raw mut *properties, ordinal))?;
            ("hipGetDeviceProperties", OLD_ARCH_OFFSET)
        };
        let bytes = &properties.0[offset..offset + ARCH_BYTES];
        let end = bytes.iter().position(|&b| b == 0).unwrap_or(ARCH_BYTES);
        let arch = String::from_utf8_lossy(&bytes[..end]).into_owned();
        if arch.starts_with("gfx") {
            let name = arch.split(':').next().unwrap_or(&arch);
            return Ok(name.to_owned());
        }
        Err(Error::Answer {
            call,
            message: format!("architecture '{arch}' where a gfx name was expected"),
        })
    }
}
