//! Waits for GPUs whose drivers are not ready when the daemon starts, as at boot.
//!
//! ```text
//! no GPU on the bus, or the kernel has its nodes -> start
//! a GPU on the bus, its runtime lists no device  -> wait, with growing pauses, up to WAIT_MAX
//! still none, device = "auto"                    -> the CPU computes, and the daemon looks again;
//!                                                   once a device is listed, and no request runs,
//!                                                   it ends so that the service manager starts it
//!                                                   on the GPU
//! still none, device = "hip", "cuda"             -> no device: exit code 3, and the unit retries
//! ```
//!
//! Runtimes are asked in processes of their own: one that found no device does not look again in
//! the process that asked it.

use std::time::{Duration, Instant};

use rocmforge_engine::api::Vendor;
use rocmforge_engine::{DeviceChoice, EngineHandle};
use rocmforge_gpu_driver::bus::{self, BusGpu};
use rocmforge_service::machine::FoundDriver;
use sd_notify::NotifyState;

use crate::devices::{Devices, OWN_PROGRAM};
use crate::lifecycle::notify;

/// Maximum time that a start waits for a driver.
const WAIT_MAX: Duration = Duration::from_secs(20);
/// First pause between two probes; each further pause is half as long again.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(4);
/// Time limit for a runtime to list its devices.
const ASK_MAX: Duration = Duration::from_secs(10);
/// First pause between probes while the CPU computes; the next constant is the longest.
const LOOK_MIN: Duration = Duration::from_secs(5);
const LOOK_MAX: Duration = Duration::from_secs(60);
/// How long no request may run or wait before the daemon ends to use a GPU.
const IDLE: Duration = Duration::from_secs(5);

/// The GPUs on the bus that a choice of device may use.
fn wanted(choice: DeviceChoice) -> Vec<BusGpu> {
    let fits = |gpu: &BusGpu| match choice {
        DeviceChoice::Host => false,
        DeviceChoice::Auto => true,
        DeviceChoice::Hip(_) => gpu.vendor == Vendor::Hip,
        DeviceChoice::Cuda(_) => gpu.vendor == Vendor::Cuda,
    };
    bus::gpus().into_iter().filter(fits).collect()
}

/// Waits for the driver of a GPU that is on the bus. Blocks.
pub fn wait(choice: DeviceChoice) {
    let gpus = wanted(choice);
    let is_ready = |gpus: &[BusGpu]| gpus.iter().all(|gpu| bus::is_ready(gpu.vendor));
    if gpus.is_empty() || is_ready(&gpus) {
        return;
    }
    let devices = Devices::asking(OWN_PROGRAM.into(), ASK_MAX);
    wait_for(&gpus, &|| devices.ask(), WAIT_MAX);
}

/// Result of probing the runtimes for devices.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// A device of one of the GPUs' vendors is listed; describes it.
    Device(String),
    /// A runtime exists and lists no device; describes it.
    None(String),
    /// No runtime exists.
    NoRuntime,
}

fn look(gpus: &[BusGpu], found: &[FoundDriver]) -> Found {
    let of_gpus = |driver: &&FoundDriver| gpus.iter().any(|g| g.vendor == driver.vendor);
    let drivers: Vec<&FoundDriver> = found.iter().filter(of_gpus).collect();
    if let Some(device) = drivers.iter().find_map(|driver| driver.devices.first()) {
        return Found::Device(device.name.clone());
    }
    let runtimes = drivers
        .iter()
        .filter(|driver| driver.library.is_some() || hangs(driver));
    let words: Vec<String> = runtimes.map(|d| d.to_string().trim().to_owned()).collect();
    match words.is_empty() {
        true => Found::NoRuntime,
        false => Found::None(words.join("; ")),
    }
}

/// Whether the driver's process gave no answer in time: then no library is named.
fn hangs(driver: &FoundDriver) -> bool {
    driver.tried.is_empty() && !driver.errors.is_empty()
}

/// Probes until a device is listed, no runtime exists, or `most` has passed. Returns whether a
/// device is listed.
fn wait_for(gpus: &[BusGpu], ask: &dyn Fn() -> Vec<FoundDriver>, most: Duration) -> bool {
    let until = Instant::now() + most;
    let mut pause = PAUSE_MIN;
    let mut is_told = false;
    loop {
        let reason = match look(gpus, &ask()) {
            Found::Device(name) => {
                if is_told {
                    tracing::info!(device = name, "the GPU is ready");
                }
                return true;
            }
            Found::NoRuntime => return false,
            Found::None(reason) => reason,
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        if !std::mem::replace(&mut is_told, true) {
            let gpu = &gpus[0];
            tracing::warn!(
                reason,
                wait_max_s = most.as_secs(),
                "the {gpu} is on the bus, and its runtime lists no device yet: waiting for its driver"
            );
            notify(&[NotifyState::Status("waiting for the driver of the GPU")]);
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 3 / 2).min(PAUSE_MAX);
    }
}

/// Whether a service manager will start the daemon again when it ends with a failure.
fn is_managed() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// If the CPU computes because no GPU could be used: waits until a GPU can be used and no request
/// runs. Never returns if there is no such GPU, or if nothing would restart the daemon.
pub(crate) async fn follow(engine: &EngineHandle) {
    let gpus = bus::gpus();
    if engine.snapshot().device.unused_gpu.is_none() || gpus.is_empty() {
        return std::future::pending().await;
    }
    let mut pause = LOOK_MIN;
    let name = loop {
        tokio::time::sleep(pause).await;
        pause = (pause * 3 / 2).min(LOOK_MAX);
        let gpus = gpus.clone();
        let asked = tokio::task::spawn_blocking(move || {
            let devices = Devices::asking(OWN_PROGRAM.into(), ASK_MAX);
            look(&gpus, &devices.ask())
        });
        if let Ok(Found::Device(name)) = asked.await {
            break name;
        }
    };
    if !is_managed() {
        tracing::warn!(
            device = name,
            "a GPU can be used now, and the CPU computes: start the daemon again to compute on the GPU"
        );
        return std::future::pending().await;
    }
    tracing::warn!(
        device = name,
        "a GPU can be used now: the daemon ends once no request runs, so that the service manager starts it on the GPU"
    );
    let mut idle = Duration::ZERO;
    while idle < IDLE {
        const STEP: Duration = Duration::from_millis(500);
        tokio::time::sleep(STEP).await;
        let snapshot = engine.snapshot();
        idle = match snapshot.running + snapshot.queued {
            0 => idle + STEP,
            _ => Duration::ZERO,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rocmforge_service::machine::FoundDevice;

    use super::*;

    fn gpu(vendor: Vendor) -> BusGpu {
        BusGpu {
            vendor,
            address: "0000:03:00.0".to_owned(),
            is_bound: false,
        }
    }

    fn driver(vendor: Vendor, library: Option<&str>, devices: usize) -> FoundDriver {
        let device = FoundDevice {
            ordinal: 0,
            name: "Card".to_owned(),
            arch: "gfx1100".to_owned(),
            memory_bytes: 1,
            compute_units: 1,
            wave_size: 32,
            pci_address: String::new(),
            integrated: false,
        };
        FoundDriver {
            vendor,
            tried: vec![("libx.so".to_owned(), "no such file".to_owned())],
            library: library.map(str::to_owned),
            driver_version: None,
            runtime_version: None,
            devices: vec![device; devices],
            errors: Vec::new(),
        }
    }

    #[test]
    fn a_driver_that_comes_late_is_waited_for() {
        let asked = Cell::new(0);
        let ask = || {
            asked.set(asked.get() + 1);
            let devices = usize::from(asked.get() == 3);
            vec![
                driver(Vendor::Hip, Some("libamdhip64.so"), devices),
                driver(Vendor::Cuda, None, 0),
            ]
        };
        assert!(wait_for(&[gpu(Vendor::Hip)], &ask, WAIT_MAX));
        assert_eq!(asked.get(), 3);
    }

    #[test]
    fn the_wait_has_an_end_and_without_a_runtime_there_is_none() {
        let none = || vec![driver(Vendor::Hip, Some("libamdhip64.so"), 0)];
        let began = Instant::now();
        assert!(!wait_for(
            &[gpu(Vendor::Hip)],
            &none,
            Duration::from_millis(300)
        ));
        assert!(began.elapsed() >= Duration::from_millis(300));
        // That of another vendor's GPU is none.
        let asked = Cell::new(0);
        let other = || {
            asked.set(asked.get() + 1);
            vec![
                driver(Vendor::Hip, None, 0),
                driver(Vendor::Cuda, Some("libcuda.so"), 1),
            ]
        };
        assert!(!wait_for(&[gpu(Vendor::Hip)], &other, WAIT_MAX));
        assert_eq!(asked.get(), 1);
        let mut hung = driver(Vendor::Hip, None, 0);
        hung.tried.clear();
        hung.errors.push("the driver hangs".to_owned());
        assert!(
            matches!(look(&[gpu(Vendor::Hip)], &[hung]), Found::None(why) if why.contains("hangs"))
        );
    }
}
