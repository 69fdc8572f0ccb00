//! What a device is: the processor, or a GPU behind one vendor's runtime.

use std::fmt;

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The processor.
    Host,
    /// An AMD GPU.
    Hip,
    /// An NVIDIA GPU.
    Cuda,
}

impl DeviceKind {
    /// `host`, `hip` or `cuda`: for people, labels and names of files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Hip => "hip",
            Self::Cuda => "cuda",
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
