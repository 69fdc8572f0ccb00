//! The devices that can be measured: what `--device` takes, and what the engine makes of it.

use clap::ValueEnum;
use rocmforge_engine::DeviceChoice;

/// Values of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArg {
    /// The best there is.
    Auto,
    /// The CPU.
    Host,
    /// The first AMD GPU.
    Hip,
    /// The first NVIDIA GPU.
    Cuda,
}

impl DeviceArg {
    /// Its value on the command line.
    pub(crate) fn name(self) -> String {
        let value = self.to_possible_value().expect("no value is hidden");
        value.get_name().to_owned()
    }

    /// The device of the engine's name for its kind.
    pub(crate) fn of_kind(kind: &str) -> Self {
        let mut all = [DeviceArg::Hip, DeviceArg::Cuda].into_iter();
        let gpu = all.find(|device| device.name() == kind);
        gpu.unwrap_or(DeviceArg::Host)
    }

    /// The engine's word for it.
    pub(crate) fn choice(self) -> DeviceChoice {
        match self {
            DeviceArg::Auto => DeviceChoice::Auto,
            DeviceArg::Host => DeviceChoice::Host,
            DeviceArg::Hip => DeviceChoice::Hip(0),
            DeviceArg::Cuda => DeviceChoice::Cuda(0),
        }
    }
}
