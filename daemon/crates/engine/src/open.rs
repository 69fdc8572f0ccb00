//! Opening the device that the configuration asks for, and keeping what was found on the way.
//!
//! A vendor's library runs in this process from here on, so only those that the choice names are
//! opened: `host` opens none, `auto` AMD's and then, if that has no card, NVIDIA's.

use rocmforge_device::Device;
use rocmforge_device::gpu::{self, GpuConfig, GpuDevice, Libraries, Report, Vendor};
use rocmforge_device::host::{HostConfig, HostDevice};

use crate::config::{DeviceChoice, EngineConfig};
use crate::error::{Error, chain};

/// An open device, and what was found before it.
pub(crate) struct Opened {
    pub(crate) device: Box<dyn Device>,
    /// What was found of each vendor whose library was opened.
    pub(crate) drivers: Vec<Report>,
    /// Why `auto` passed over a device, in the order of the attempts.
    pub(crate) passed_over: Vec<String>,
}

/// Opens the device that the configuration asks for.
///
/// # Errors
/// [`Error::NoDevice`] with what was looked for and what to do.
pub(crate) fn open(config: &EngineConfig) -> Result<Opened, Error> {
    let mut opened = Attempts {
        config,
        drivers: Vec::new(),
        passed_over: Vec::new(),
    };
    let device = match config.device {
        DeviceChoice::Hip(ordinal) => opened.gpu(Vendor::Hip, ordinal),
        DeviceChoice::Cuda(ordinal) => opened.gpu(Vendor::Cuda, ordinal),
        DeviceChoice::Host => opened.host(),
        DeviceChoice::Auto => match opened.first_gpu() {
            Some(device) => Ok(device),
            None => opened.host(),
        },
    };
    Ok(Opened {
        device: device?,
        drivers: opened.drivers,
        passed_over: opened.passed_over,
    })
}

struct Attempts<'a> {
    config: &'a EngineConfig,
    drivers: Vec<Report>,
    passed_over: Vec<String>,
}

impl Attempts<'_> {
    fn first_gpu(&mut self) -> Option<Box<dyn Device>> {
        for vendor in [Vendor::Hip, Vendor::Cuda] {
            match self.gpu(vendor, 0) {
                Ok(device) => return Some(device),
                Err(error) => {
                    tracing::info!(reason = %error, "no {vendor} device");
                    self.passed_over.push(error.to_string());
                }
            }
        }
        None
    }

    fn gpu(&mut self, vendor: Vendor, ordinal: u32) -> Result<Box<dyn Device>, Error> {
        let mut config = GpuConfig::new(vendor, ordinal).with_uploads(self.config.uploads);
        config.watchdog = self.config.watchdog;
        config.child_exe.clone_from(&self.config.child_exe);
        self.drivers
            .push(gpu::report(vendor, &Libraries::from_env()));
        let images = gpu::device::usual_images(vendor);
        match GpuDevice::open(config, images) {
            Ok(device) => Ok(Box::new(device)),
            Err(error) => Err(no_device(&error)),
        }
    }

    fn host(&self) -> Result<Box<dyn Device>, Error> {
        let threads = self.config.threads;
        match HostDevice::new(HostConfig {
            threads,
            ..HostConfig::default()
        }) {
            Ok(device) => Ok(Box::new(device)),
            Err(error) => Err(no_device(&error)),
        }
    }
}

/// A device's error while it is opened or given its memory.
pub(crate) fn no_device(error: &rocmforge_device::Error) -> Error {
    Error::NoDevice(chain(error))
}
