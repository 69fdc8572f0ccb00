//! Opening the device that the configuration asks for, and keeping what was found on the way.
//!
//! A vendor's library runs in this process from here on, so only those that the choice names are
//! opened: `host` opens none, `auto` AMD's and then, if that has no card, NVIDIA's.
//!
//! *Invariant:* who opens a device never waits for one call of a driver for good
//! ([`watched`], test `a_driver_that_hangs_at_the_start_ends_the_daemon_with_4`).

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use rocmforge_device::gpu::{self, GpuConfig, GpuDevice, Libraries, Report, Vendor};
use rocmforge_device::host::{HostConfig, HostDevice};
use rocmforge_device::{Device, Steps};

use crate::config::{DeviceChoice, EngineConfig};
use crate::error::{Error, chain};

/// How long a step of the opening may take at least.
const STEP_WAIT_MIN: Duration = Duration::from_secs(15);

/// How often the opening is looked at.
const PERIOD: Duration = Duration::from_millis(100);

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
pub(crate) fn open(config: &EngineConfig, steps: &Steps) -> Result<Opened, Error> {
    let mut opened = Attempts {
        config,
        steps,
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
    steps: &'a Steps,
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
        let driver = format!("asking the driver of {vendor} for its cards");
        self.steps.begin(driver);
        self.drivers
            .push(gpu::report(vendor, &Libraries::from_env()));
        let images = gpu::device::usual_images(vendor);
        match GpuDevice::open_by(config, images, self.steps) {
            Ok(device) => Ok(Box::new(device)),
            Err(error) => Err(no_device(&error)),
        }
    }

    fn host(&self) -> Result<Box<dyn Device>, Error> {
        self.steps.end();
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
    match error {
        rocmforge_device::Error::Lost(_) => stuck(chain(error)),
        _ => Error::NoDevice(chain(error)),
    }
}

/// A device that is there and does not answer.
fn stuck(message: String) -> Error {
    Error::Unavailable {
        message,
        retry_after: Duration::from_secs(5),
    }
}

/// Runs what opens a device on a thread of its own, and gives up on a step that does not end.
///
/// # Errors
/// What `start` gives; [`Error::Unavailable`] where a step has been under way for longer than the
/// device's watchdog has patience, and half as long again: the thread is left in it, and the
/// process has to end.
pub(crate) fn watched<T: Send + 'static>(
    watchdog: Duration,
    start: impl FnOnce(&Steps) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    // Steps that wait for the device have a watchdog of their own, which is to speak first.
    within((watchdog * 3 / 2).max(STEP_WAIT_MIN), start)
}

fn within<T: Send + 'static>(
    patience: Duration,
    start: impl FnOnce(&Steps) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let steps = Steps::default();
    let seen = steps.clone();
    let (send, receive) = sync_channel(1);
    let thread = std::thread::Builder::new().name("opening".to_owned());
    thread
        .spawn(move || {
            // Nobody takes it only where the process is about to end.
            let _ = send.send(start(&steps));
        })
        .map_err(|e| Error::Internal(format!("no thread to open the device: {e}")))?;
    loop {
        match receive.recv_timeout(PERIOD) {
            Ok(started) => return started,
            Err(RecvTimeoutError::Disconnected) => {
                let message = "opening the device panicked".to_owned();
                return Err(Error::Internal(message));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some((what, age)) = seen.stuck(patience) {
            return Err(stuck(format!(
                "{what} has not ended after {} s: the driver hangs; look at the kernel's log (dmesg), and whether \
                 rocmforged --list-devices answers; --device host computes on the CPU",
                age.as_secs()
            )));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_never_ends_is_given_up_and_named() {
        let error = within(Duration::from_millis(50), |steps| -> Result<(), Error> {
            steps.begin("starting the runtime");
            loop {
                std::thread::park();
            }
        });
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("starting the runtime has not ended"),
            "{text}"
        );
        let slow = within(Duration::from_millis(50), |steps| {
            steps.end();
            std::thread::sleep(Duration::from_millis(400));
            Ok(7)
        });
        assert_eq!(slow.unwrap(), 7);
    }
}
