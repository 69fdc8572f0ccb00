//! The devices that can be measured: what `--device` takes, and what the engine makes of it.

use clap::ValueEnum;
use rocmforge_device_gpu::UploadWay;
use rocmforge_engine::DeviceChoice;
use rocmforge_engine::api::DeviceKind;

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

    /// The device of a kind.
    pub(crate) fn of_kind(kind: DeviceKind) -> Self {
        match kind {
            DeviceKind::Host => DeviceArg::Host,
            DeviceKind::Hip => DeviceArg::Hip,
            DeviceKind::Cuda => DeviceArg::Cuda,
        }
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

/// Values of `--uploads`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum UploadsArg {
    /// As the device finds best.
    Auto,
    /// Through pinned memory alone: no file mapping is registered.
    Ring,
}

/// How uploads to a GPU go.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct UploadArgs {
    /// How files reach a GPU.
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) uploads: UploadsArg,
    /// Streams that uploads are copied on [default: 2 on AMD, 1 on NVIDIA].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) copy_streams: Option<u8>,
}

impl UploadArgs {
    /// The engine's word for it.
    pub(crate) fn way(self) -> UploadWay {
        UploadWay {
            ring_only: self.uploads == UploadsArg::Ring,
            copy_streams: self.copy_streams.map(usize::from),
        }
    }

    /// The same on a command line.
    pub(crate) fn arguments(self) -> Vec<String> {
        let value = self.uploads.to_possible_value();
        let name = value.expect("no value is hidden").get_name().to_owned();
        let streams = self.copy_streams.map(|n| format!("--copy-streams={n}"));
        [format!("--uploads={name}")]
            .into_iter()
            .chain(streams)
            .collect()
    }
}
