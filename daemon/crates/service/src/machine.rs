//! This machine's GPUs as clients learn of them: drivers and their devices, and the steps of a
//! self-test. Who finds them out is behind [`Machine`].

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use rocmforge_engine::api::{Report, Vendor};
use serde::{Deserialize, Serialize};

use rocmforge_failure::Failure;

/// Asks the drivers of this machine.
pub trait Machine: fmt::Debug + Send + Sync {
    /// Both vendors' drivers, as they are now or were a moment ago.
    fn drivers(&self) -> BoxFuture<'_, Arc<[FoundDriver]>>;

    /// Tests a device, such as `hip:0`.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED while another test is made.
    fn self_test(&self, device: String) -> BoxFuture<'_, Result<Vec<Told>, Failure>>;
}

/// A vendor as its name.
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
    /// Vendor of the driver; by its name, as `kind`, where it is written.
    #[serde(rename = "kind", with = "vendor_name")]
    pub vendor: Vendor,
    /// Libraries that could not be opened, with the loader's words.
    pub tried: Vec<(String, String)>,
    /// The library that was opened.
    pub library: Option<String>,
    /// Version of the driver.
    pub driver_version: Option<String>,
    /// Version of the runtime.
    pub runtime_version: Option<String>,
    /// The driver's devices.
    pub devices: Vec<FoundDevice>,
    /// What went wrong.
    pub errors: Vec<String>,
}

/// A device, as its driver describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundDevice {
    /// The driver's number of it.
    pub ordinal: u32,
    /// The card's name.
    pub name: String,
    /// What kernels are compiled for.
    pub arch: String,
    /// The device's memory in bytes.
    pub memory_bytes: u64,
    /// Compute units or streaming multiprocessors.
    pub compute_units: u32,
    /// Lanes of a wave.
    pub wave_size: u32,
    /// PCI address.
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
    /// A line a finding.
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

/// A step of a self-test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Told {
    /// The subject of the step.
    pub name: String,
    /// `passed`, `failed`, `skipped` or `note`.
    pub outcome: String,
    /// Figures, or what is wrong.
    pub detail: String,
    /// Time that the step took, in milliseconds.
    pub ms: f64,
}
