//! Opens the device that the configuration asks for, and records what was found on the way.
//!
//! A vendor's library runs in this process from here on, so only those that the choice names are
//! opened: `host` opens none, `auto` AMD's and then, if no card of that can be used, NVIDIA's. Of a
//! vendor's GPUs `auto` tries those with kernels first, of these discrete before integrated ones,
//! then larger memory before smaller. A card that hangs or fails for good while it is opened ends
//! the start: its library would stay in the process, at work.
//!
//! *Invariant:* who opens a device never waits for one call of a driver for good ([`watched`], test
//! `a_driver_that_hangs_at_the_start_ends_the_daemon_with_4`).

use std::cmp::Reverse;
use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use rocmforge_device::{Device, Loss, LossKind, Steps};
use rocmforge_device_cpu::{HostConfig, HostDevice};
use rocmforge_device_gpu::{GpuConfig, GpuDevice, Images, refusal, usual_images};
use rocmforge_gpu_driver::bus::{self, BusGpu};
use rocmforge_gpu_driver::others::Card;
use rocmforge_gpu_driver::{self as gpu, DeviceAttributes, Libraries, Report, Vendor};

use crate::api::config::{DeviceChoice, EngineConfig};
use crate::api::error::{Error, no_device};

/// Minimum time that one step of opening a device may take before it counts as hung.
const STEP_WAIT_MIN: Duration = Duration::from_secs(15);

/// How often the thread that waits for the opening checks it.
const PERIOD: Duration = Duration::from_millis(100);

/// An open device, and the results of the probes before it was opened.
pub(crate) struct Opened {
    pub(crate) device: Box<dyn Device>,
    /// The GPU's place on the PCI bus; `None` for the CPU.
    pub(crate) card: Option<Card>,
    /// Results of probing each vendor's driver.
    pub(crate) drivers: Vec<Report>,
    /// Reasons for which `auto` rejected devices, in the order of the attempts.
    pub(crate) passed_over: Vec<String>,
    /// Why the CPU computes although a GPU is on the bus; `None` if no GPU is unused.
    pub(crate) unused_gpu: Option<String>,
}

/// Opens the device that the configuration asks for.
///
/// # Errors
/// [`Error::NoDevice`] says what was looked for and what to do; [`Error::DeviceLost`].
pub(crate) fn open(config: &EngineConfig, steps: &Steps) -> Result<Opened, Error> {
    let mut opened = Attempts {
        config,
        steps,
        drivers: Vec::new(),
        passed_over: Vec::new(),
        unused_gpu: None,
    };
    let device = match config.device {
        DeviceChoice::Hip(ordinal) => opened.named(Vendor::Hip, ordinal),
        DeviceChoice::Cuda(ordinal) => opened.named(Vendor::Cuda, ordinal),
        DeviceChoice::Host => opened.host(),
        DeviceChoice::Auto => match opened.best_gpu() {
            Ok(None) => opened.host(),
            Ok(Some(device)) => Ok(device),
            Err(lost) => Err(lost),
        },
    };
    let (device, card) = device?;
    Ok(Opened {
        device,
        card,
        drivers: opened.drivers,
        passed_over: opened.passed_over,
        unused_gpu: opened.unused_gpu,
    })
}

/// A device, and the GPU that it runs on; `None` for the CPU.
type DeviceOfCard = (Box<dyn Device>, Option<Card>);

struct Attempts<'a> {
    config: &'a EngineConfig,
    steps: &'a Steps,
    drivers: Vec<Report>,
    passed_over: Vec<String>,
    unused_gpu: Option<String>,
}

impl Attempts<'_> {
    /// Opens the GPU that the configuration names by vendor and number.
    fn named(&mut self, vendor: Vendor, ordinal: u32) -> Result<DeviceOfCard, Error> {
        self.report(vendor);
        self.gpu(vendor, ordinal)
    }

    /// Opens the best GPU that can be used; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    fn best_gpu(&mut self) -> Result<Option<DeviceOfCard>, Error> {
        for vendor in [Vendor::Hip, Vendor::Cuda] {
            let images = usual_images(vendor);
            let cards = ranked(vendor, self.report(vendor), &*images);
            if cards.is_empty() {
                // There is none, which opening the first one has the words for.
                match self.gpu(vendor, 0) {
                    Ok(device) => return Ok(Some(device)),
                    Err(lost @ Error::DeviceLost(_)) => return Err(lost),
                    Err(error) => self.pass_over(vendor, false, error.to_string()),
                }
            }
            for (at, card) in cards.iter().enumerate() {
                let opened = match &card.refused {
                    Some(refused) => Err(Error::NoDevice(refused.clone())),
                    None => self.gpu(vendor, card.ordinal),
                };
                match opened {
                    Ok(device) => {
                        for other in &cards[at + 1..] {
                            let reason = match &other.refused {
                                Some(refused) => refused.clone(),
                                None => format!("{other} comes after {card}"),
                            };
                            tracing::info!(%reason, "a GPU is not used");
                            self.passed_over.push(reason);
                        }
                        return Ok(Some(device));
                    }
                    Err(lost @ Error::DeviceLost(_)) => return Err(lost),
                    Err(error) => self.pass_over(vendor, true, error.to_string()),
                }
            }
        }
        if self.drivers.iter().all(|driver| driver.devices.is_empty()) {
            self.unused_gpu = unused(&bus::gpus(), &self.passed_over);
        }
        if let Some(unused) = &self.unused_gpu {
            tracing::warn!("{unused}");
        }
        Ok(None)
    }

    /// Notes why a vendor has no usable device; logged as a warning if the machine has a GPU of
    /// that vendor.
    fn pass_over(&mut self, vendor: Vendor, is_card: bool, reason: String) {
        match is_card {
            true => tracing::warn!(%reason, "a GPU of {vendor} cannot be used"),
            false => tracing::info!(%reason, "no {vendor} device"),
        }
        self.passed_over.push(reason);
    }

    /// Probes a vendor's library, records its report, and returns the devices that it lists.
    fn report(&mut self, vendor: Vendor) -> Vec<DeviceAttributes> {
        self.steps
            .begin(format!("asking the driver of {vendor} for its GPUs"));
        let report = gpu::report(vendor, &Libraries::from_env());
        let devices = report.devices.clone();
        self.drivers.push(report);
        devices
    }

    fn gpu(&self, vendor: Vendor, ordinal: u32) -> Result<DeviceOfCard, Error> {
        let mut config = GpuConfig::new(vendor, ordinal).with_uploads(self.config.uploads);
        config.watchdog = self.config.watchdog;
        config.child_exe.clone_from(&self.config.child_exe);
        match GpuDevice::open_by(config, usual_images(vendor), self.steps) {
            Ok(device) => {
                let card = device.card();
                Ok((Box::new(device), Some(card)))
            }
            Err(error) => Err(no_device(&error)),
        }
    }

    fn host(&self) -> Result<DeviceOfCard, Error> {
        self.steps.end();
        let threads = self.config.threads;
        match HostDevice::new(HostConfig {
            threads,
            ..HostConfig::default()
        }) {
            Ok(device) => Ok((Box::new(device), None)),
            Err(error) => Err(no_device(&error)),
        }
    }
}

/// The warning for GPUs on the PCI bus that no runtime lists as a device.
fn unused(gpus: &[BusGpu], passed_over: &[String]) -> Option<String> {
    if gpus.is_empty() {
        return None;
    }
    let shown: Vec<String> = gpus.iter().map(BusGpu::to_string).collect();
    Some(format!(
        "no GPU can be used, and the CPU computes, though there is one: {}; {}; `rocmforgectl doctor` says what is missing",
        shown.join(", "),
        passed_over.join("; ")
    ))
}

/// A GPU that `auto` may open.
struct Candidate {
    name: String,
    ordinal: u32,
    memory_mib: u64,
    integrated: bool,
    /// Why this GPU cannot be used; `None` if it can.
    refused: Option<String>,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.integrated {
            true => "integrated",
            false => "discrete",
        };
        let (name, memory) = (&self.name, self.memory_mib);
        write!(f, "{name} ({kind}, {memory} MiB)")
    }
}

/// Ranks a vendor's GPUs, the best first.
fn ranked(vendor: Vendor, devices: Vec<DeviceAttributes>, images: &dyn Images) -> Vec<Candidate> {
    let card = |of: DeviceAttributes| Candidate {
        refused: refusal(vendor, &of, images),
        name: format!("{vendor}:{} {}", of.ordinal, of.name),
        ordinal: of.ordinal,
        memory_mib: of.total_bytes >> 20,
        integrated: of.integrated,
    };
    let mut cards: Vec<Candidate> = devices.into_iter().map(card).collect();
    // The sort is stable: equal ones stay in the driver's order.
    cards.sort_by_key(|c| (c.refused.is_some(), c.integrated, Reverse(c.memory_mib)));
    cards
}

/// Runs `start`, which opens a device, on a thread of its own, and gives up on a step that does not
/// end.
///
/// # Errors
///
/// Errors of `start`; [`Error::DeviceLost`] if a step takes longer than the device's watchdog
/// allows, and half as long again: the thread hangs in it, and the process has to end.
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
            let reason = format!(
                "{what} has not ended after {} s: the driver hangs; look at the kernel's log (dmesg), and whether \
                 rocmforged --list-devices answers; raise --watchdog where it is only slow; --device host computes on \
                 the CPU",
                age.as_secs()
            );
            return Err(Error::DeviceLost(Loss::new(LossKind::Hang, reason)));
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

    /// Has kernels for one architecture.
    struct Only(&'static str);

    impl Images for Only {
        fn image(&self, _: &str, _: &str) -> Result<Vec<u8>, rocmforge_device::Error> {
            Ok(Vec::new())
        }

        fn refuses(&self, arch: &str) -> Option<String> {
            (arch != self.0).then(|| format!("there are no kernels for {arch}"))
        }
    }

    /// Once the first card was the only one that was tried, also where that was the processor's.
    #[test]
    fn cards_with_kernels_come_first_then_cards_of_their_own_then_the_larger() {
        let card = |ordinal, arch: &str, gib: u64, integrated| DeviceAttributes {
            ordinal,
            name: "Card".to_owned(),
            arch: arch.to_owned(),
            compute_units: 1,
            wave: 32,
            shared_per_block: 0,
            shared_per_block_max: 0,
            total_bytes: gib << 30,
            pci_bus_id: String::new(),
            integrated,
            machine_memory: integrated,
        };
        let cards = vec![
            card(0, "gfx803", 64, false),
            card(1, "gfx1100", 96, true),
            card(2, "gfx1100", 16, false),
            card(3, "gfx1100", 24, false),
            card(4, "gfx1100", 24, false),
        ];
        let cards = ranked(Vendor::Hip, cards, &Only("gfx1100"));
        let order: Vec<_> = cards.iter().map(|card| card.ordinal).collect();
        assert_eq!(order, [3, 4, 2, 1, 0]);
        let refused = cards[4].refused.as_deref().unwrap();
        assert_eq!(
            refused,
            "device hip:0 (Card): there are no kernels for gfx803"
        );
        let shown = cards[3].to_string();
        assert_eq!(shown, "hip:1 Card (integrated, 98304 MiB)");
    }

    /// Once a daemon that started before the driver computed on the CPU for good, at INFO.
    #[test]
    fn a_gpu_on_the_bus_that_cannot_be_used_is_told() {
        let gpu = BusGpu {
            vendor: Vendor::Hip,
            address: "0000:03:00.0".to_owned(),
            is_bound: false,
        };
        assert_eq!(unused(&[], &["no card".to_owned()]), None);
        let told = unused(&[gpu], &["device hip: no card".to_owned()]).unwrap();
        for words in ["the CPU computes", "0000:03:00.0", "device hip: no card"] {
            assert!(told.contains(words), "{told}");
        }
    }

    #[test]
    fn a_device_that_is_lost_is_not_one_that_is_not_there() {
        let lost = rocmforge_device::Error::Lost(Loss::new(LossKind::Hang, "no end"));
        assert!(matches!(no_device(&lost), Error::DeviceLost(why) if why.kind == LossKind::Hang));
        let none = rocmforge_device::Error::Config("no card".to_owned());
        assert!(matches!(no_device(&none), Error::NoDevice(why) if why == "no card"));
    }
}
