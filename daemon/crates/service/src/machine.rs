//! This machine's GPUs as reported to clients: drivers, their devices, and the steps of a
//! self-test. The daemon implements [`Machine`], which probes them.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use rocmforge_engine::api::{Report, Vendor};
use serde::{Deserialize, Serialize};

use rocmforge_failure::Failure;

/// Probes the GPU drivers of this machine, and tests devices.
pub trait Machine: fmt::Debug + Send + Sync {
    /// The drivers of both vendors, as they are now or were a moment ago.
    fn drivers(&self) -> BoxFuture<'_, Arc<[FoundDriver]>>;

    /// Tests a device, such as `hip:0`.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED while another test runs.
    fn self_test(&self, device: String) -> BoxFuture<'_, Result<Vec<Told>, Failure>>;
}

/// Serializes a vendor as its name.
mod vendor_name {
    use rocmforge_engine::api::Vendor;
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub(super) fn serialize<S: Serializer>(vendor: &Vendor, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(vendor.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vendor, D::Error> {
        let name = String::deserialize(from)?;
        let unknown = || D::Error::custom(format!("'{name}' is no vendor: hip or cuda"));
        Vendor::named(&name).ok_or_else(unknown)
    }
}

/// A vendor's driver, as far as it was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundDriver {
    /// Vendor of the driver; serialized by name as `kind`.
    #[serde(rename = "kind", with = "vendor_name")]
    pub vendor: Vendor,
    /// Libraries that could not be opened, with the loader's error message.
    pub tried: Vec<(String, String)>,
    /// Name of the library that was opened; `None` if none could be.
    pub library: Option<String>,
    /// Version of the driver.
    pub driver_version: Option<String>,
    /// Version of the runtime.
    pub runtime_version: Option<String>,
    /// Devices that the driver lists.
    pub devices: Vec<FoundDevice>,
    /// Error messages of the probe.
    pub errors: Vec<String>,
}

/// A device, as its driver describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundDevice {
    /// The driver's number of the device.
    pub ordinal: u32,
    /// Name of the device.
    pub name: String,
    /// Architecture that kernels are compiled for, such as `gfx1100`.
    pub arch: String,
    /// The device's memory in bytes.
    pub memory_bytes: u64,
    /// Number of compute units or streaming multiprocessors.
    pub compute_units: u32,
    /// Number of lanes of a wave or warp.
    pub wave_size: u32,
    /// The device's PCI address.
    pub pci_address: String,
    /// Whether the GPU is integrated: it shares its memory with the host.
    pub integrated: bool,
}

impl From<&Report> for FoundDriver {
    fn from(report: &Report) -> Self {
        Self {
            vendor: report.vendor,
            tried: report
                .tried
                .iter()
                .map(|attempt| (attempt.library.clone(), attempt.message.clone()))
                .collect(),
            library: report.library.clone(),
            driver_version: report.versions.as_ref().map(|v| v.driver.clone()),
            runtime_version: report.versions.as_ref().map(|v| v.runtime.clone()),
            devices: report
                .devices
                .iter()
                .map(|device| FoundDevice {
                    ordinal: device.ordinal,
                    name: device.name.clone(),
                    arch: device.arch.clone(),
                    memory_bytes: device.total_bytes,
                    compute_units: device.compute_units,
                    wave_size: device.wave,
                    pci_address: device.pci_bus_id.clone(),
                    integrated: device.integrated,
                })
                .collect(),
            errors: report.errors.iter().map(ToString::to_string).collect(),
        }
    }
}

impl fmt::Display for FoundDriver {
    /// Writes one line for each finding.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.vendor;
        for (library, message) in &self.tried {
            writeln!(f, "{kind}: {library}: {message}")?;
        }
        let unknown = || "unknown".to_owned();
        for device in &self.devices {
            writeln!(
                f,
                "{kind}:{} {} ({}, {} compute units, {} MiB) at {}; {}, driver {}",
                device.ordinal,
                device.name,
                device.arch,
                device.compute_units,
                device.memory_bytes >> 20,
                device.pci_address,
                self.library.clone().unwrap_or_else(unknown),
                self.driver_version.clone().unwrap_or_else(unknown),
            )?;
        }
        for error in &self.errors {
            match &self.library {
                Some(library) => writeln!(f, "{kind}: {library}: {error}")?,
                None => writeln!(f, "{kind}: {error}")?,
            }
        }
        if let (Some(library), true, true) = (
            &self.library,
            self.devices.is_empty(),
            self.errors.is_empty(),
        ) {
            writeln!(f, "{kind}: {library}: no device")?;
        }
        Ok(())
    }
}

/// The result of a step of a self-test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Told {
    /// What the step tests.
    pub name: String,
    /// `passed`, `failed`, `skipped` or `note`.
    pub outcome: String,
    /// Measured figures, or a description of the error.
    pub detail: String,
    /// Time that the step took, in milliseconds.
    pub ms: f64,
}
