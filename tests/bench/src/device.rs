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
