//! What a card says of its power: for the log, when its memory is released and taken again.

use std::fs;
use std::path::Path;

use super::nvml::Nvml;
use super::{Card, Places};
use crate::Vendor;
use crate::bus;

/// Maximum number of sensors of a card that are examined.
const SENSORS_MAX: usize = 16;

/// What a card says of its power, as far as it can be read.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Power {
    /// Power state by the driver (`P0` is the fastest) or by the kernel (`D0` is on).
    pub state: Option<String>,
    /// What the card takes.
    pub watts: Option<f64>,
}

impl Card {
    /// Reads the GPU's power state and watts. Opens the vendor's library and closes it again: one
    /// that stays open keeps a card awake.
    #[must_use]
    pub fn power(&self, places: &Places) -> Power {
        let state = bus::power_state(&places.root, &self.address);
        let power = Power { state, watts: None };
        // A card that sleeps is not woken for it.
        if power.state.as_deref().is_some_and(|state| state != "D0") {
            return power;
        }
        match self.vendor {
            Vendor::Cuda => {
                let Ok(nvml) = Nvml::open(&self.address, places) else {
                    return power;
                };
                let state = nvml.performance_state().map(|state| format!("P{state}"));
                Power {
                    state: state.or(power.state),
                    watts: nvml.milliwatts().map(|milli| f64::from(milli) / 1e3),
                }
            }
            Vendor::Hip => Power {
                watts: sensor_watts(&places.root, &self.address),
                ..power
            },
        }
    }
}

/// The watts by the sensors that the kernel has of a card.
fn sensor_watts(root: &Path, address: &str) -> Option<f64> {
    let card = bus::folder(root, address)?;
    let sensors = fs::read_dir(card.join("hwmon")).ok()?;
    let mut sensors = sensors.flatten().take(SENSORS_MAX);
    let micro: f64 = sensors.find_map(|sensor| {
        // The average where there is one.
        let read = |name: &str| fs::read_to_string(sensor.path().join(name)).ok();
        let text = read("power1_average").or_else(|| read("power1_input"))?;
        text.trim().parse().ok()
    })?;
    (micro.is_finite() && micro >= 0.0).then_some(micro / 1e6)
}
