//! Opening a vendor's driver, and telling what was looked for and found.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::cuda::CudaDriver;
use super::driver::{Attempt, DeviceAttributes, Driver, Error, Result, Vendor, Versions};
use super::hip::HipDriver;
use super::{cuda, hip, search};

/// Devices that a report lists at most.
const DEVICES_MAX: u32 = 64;

/// Names of vendor libraries to open instead of the usual ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Libraries {
    /// Library to open in place of `libamdhip64.so.*`; libraries for products are searched beside
    /// it first.
    pub hip: Option<PathBuf>,
    /// Library to open in place of `libcuda.so.*`; libraries for products are searched beside it
    /// first.
    pub cuda: Option<PathBuf>,
}

impl Libraries {
    /// As ROCMFORGE_HIP_LIBRARY and ROCMFORGE_CUDA_LIBRARY say; an empty value counts as none.
    pub fn from_env() -> Libraries {
        let path = |name| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        Libraries {
            hip: path("ROCMFORGE_HIP_LIBRARY"),
            cuda: path("ROCMFORGE_CUDA_LIBRARY"),
        }
    }

    /// The names to try for a vendor, in order.
    fn names(&self, vendor: Vendor) -> Vec<String> {
        let (over, usual): (_, &[&str]) = match vendor {
            Vendor::Hip => (&self.hip, &hip::NAMES),
            Vendor::Cuda => (&self.cuda, &cuda::NAMES),
        };
        match over {
            Some(path) => vec![path.to_string_lossy().into_owned()],
            None if vendor == Vendor::Hip => search::names(usual),
            None => usual.iter().map(|&name| name.to_owned()).collect(),
        }
    }
}

/// Opens a vendor's driver. Neither starts it nor looks for a device.
///
/// # Errors
/// [`Error::Library`] with all that was tried, [`Error::Symbols`] for a library that is too old.
pub fn open(vendor: Vendor, libraries: &Libraries) -> Result<Arc<dyn Driver>> {
    let names = libraries.names(vendor);
    Ok(match vendor {
        Vendor::Hip => Arc::new(HipDriver::open(&names)?),
        Vendor::Cuda => Arc::new(CudaDriver::open(&names)?),
    })
}

/// Result of probing one vendor's driver.
#[derive(Debug, Clone)]
pub struct Report {
    /// The vendor.
    pub vendor: Vendor,
    /// Libraries that could not be opened, with the loader's words; empty if the first could.
    pub tried: Vec<Attempt>,
    /// The library that was opened.
    pub library: Option<String>,
    /// The driver's versions.
    pub versions: Option<Versions>,
    /// The driver's devices.
    pub devices: Vec<DeviceAttributes>,
    /// What went wrong beyond a missing library, in the driver's words.
    pub errors: Vec<Error>,
}

/// Looks for both vendors' drivers and devices. Makes no context and takes no device memory.
pub fn probe(libraries: &Libraries) -> Vec<Report> {
    [Vendor::Hip, Vendor::Cuda]
        .map(|vendor| report(vendor, libraries))
        .into()
}

/// Looks for one vendor's driver and devices, as [`probe()`] does.
pub fn report(vendor: Vendor, libraries: &Libraries) -> Report {
    let mut report = Report {
        vendor,
        tried: Vec::new(),
        library: None,
        versions: None,
        devices: Vec::new(),
        errors: Vec::new(),
    };
    let driver = match open(vendor, libraries) {
        Ok(driver) => driver,
        Err(Error::Library { tried, .. }) => {
            report.tried = tried;
            return report;
        }
        Err(error) => {
            report.errors.push(error);
            return report;
        }
    };
    report.library = Some(driver.library().to_owned());
    let count = match driver.device_count() {
        Ok(count) => count.min(DEVICES_MAX),
        Err(error) => {
            report.errors.push(error);
            0
        }
    };
    match driver.versions() {
        Ok(versions) => report.versions = Some(versions),
        // Without a device the first error says it all.
        Err(error) if report.errors.is_empty() => report.errors.push(error),
        Err(_) => {}
    }
    for ordinal in 0..count {
        match driver.device_attributes(ordinal) {
            Ok(attributes) => report.devices.push(attributes),
            Err(error) => report.errors.push(error),
        }
    }
    report
}

impl fmt::Display for Report {
    /// One line a finding: devices, else the reason why there is none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let vendor = self.vendor;
        let Some(library) = &self.library else {
            for attempt in &self.tried {
                writeln!(f, "{vendor}: {}: {}", attempt.library, attempt.message)?;
            }
            for error in &self.errors {
                writeln!(f, "{vendor}: {error}")?;
            }
            return Ok(());
        };
        let driver = match &self.versions {
            Some(v) => format!("driver {}, runtime {}", v.driver, v.runtime),
            None => "versions unknown".to_owned(),
        };
        for d in &self.devices {
            writeln!(
                f,
                "{vendor}:{} {} ({}, {} units, wave {}, {} MiB) at {}; {driver}, {library}",
                d.ordinal,
                d.name,
                d.arch,
                d.compute_units,
                d.wave,
                d.total_bytes >> 20,
                d.pci_bus_id,
            )?;
        }
        for error in &self.errors {
            writeln!(f, "{vendor}: {library} ({driver}): {error}")?;
        }
        if self.devices.is_empty() && self.errors.is_empty() {
            writeln!(f, "{vendor}: {library} ({driver}): no device")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prints what this machine has; passes with and without runtimes and cards.
    #[test]
    fn a_probe_tells_what_was_looked_for() {
        let reports = probe(&Libraries::default());
        assert_eq!(reports.len(), 2);
        for report in &reports {
            let text = report.to_string();
            print!("{text}");
            assert!(!text.is_empty(), "{report:?}");
            if report.library.is_none() && report.errors.is_empty() {
                let names = Libraries::default().names(report.vendor);
                assert_eq!(report.tried.len(), names.len());
                for (attempt, name) in report.tried.iter().zip(&names) {
                    assert_eq!(&attempt.library, name);
                    // The line has the name once.
                    let lines = text.matches(&format!("{}: ", attempt.library)).count();
                    assert_eq!(lines, 1, "{text}");
                }
            }
        }
    }

    #[test]
    fn an_override_is_the_only_library_that_is_tried() {
        let libraries = Libraries {
            hip: Some("/nonexistent/libamdhip64.so".into()),
            cuda: None,
        };
        let Err(Error::Library { tried, .. }) = open(Vendor::Hip, &libraries) else {
            panic!("a library that is not there was opened");
        };
        assert_eq!(tried.len(), 1);
        assert_eq!(tried[0].library, "/nonexistent/libamdhip64.so");
    }

    #[test]
    fn a_library_that_is_no_runtime_is_told_by_its_missing_functions() {
        let libraries = Libraries {
            hip: Some("libc.so.6".into()),
            cuda: None,
        };
        let error = match open(Vendor::Hip, &libraries) {
            Err(error) => error,
            Ok(_) => panic!("the C library was taken for a HIP runtime"),
        };
        let text = error.to_string();
        assert!(
            text.contains("hipInit") && text.contains("hipModuleLaunchKernel"),
            "{text}"
        );
        assert!(!text.contains("hipGraphLaunch"), "optional: {text}");
    }

    /// A HIP runtime on a machine without an AMD card: an error in words, no panic, no abort.
    #[test]
    fn a_runtime_without_a_card_says_so() {
        let driver = match open(Vendor::Hip, &Libraries::default()) {
            Ok(driver) => driver,
            Err(error) => {
                println!("skipped: {error}");
                return;
            }
        };
        match driver.device_count() {
            Ok(count) if count > 0 => println!("skipped: {count} devices here"),
            Ok(_) => {}
            Err(error) => {
                println!("{}: {error}", driver.library());
                let Error::Call { call, code, .. } = &error else {
                    panic!("{error:?}");
                };
                assert_eq!(*call, "hipInit");
                assert!(matches!(code, 100 | 101), "{error}");
            }
        }
        let context = super::super::Context::open(driver, 0);
        assert!(context.is_err(), "a context on no card");
    }
}
