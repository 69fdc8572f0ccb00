//! A device on the fake runtime, for tests of its uploads and copies.

use rocmforge_device::{Device, Reserve};
use rocmforge_device_gpu::{GpuConfig, GpuDevice, ImageFolder};
use rocmforge_fake_hip::Fake;
use rocmforge_gpu_driver::{Libraries, Vendor};

/// The usual settings with a small ring. `registration_trial`: whether it tries to register files,
/// or takes it for granted.
pub(crate) fn config(fake: &Fake, registration_trial: bool) -> GpuConfig {
    GpuConfig {
        libraries: Libraries {
            hip: Some(fake.path().to_owned()),
            cuda: None,
        },
        vendor_products: false,
        ring_pieces: 2,
        ring_piece_bytes: 64 << 10,
        registration_trial,
        trials_dir: None,
        ..GpuConfig::new(Vendor::Hip, 0)
    }
}

/// One with an arena of `capacity` bytes, and its own block below `free`.
pub(crate) fn open_as(config: GpuConfig, fake: &Fake, capacity: u64, free: u64) -> GpuDevice {
    let mut device = GpuDevice::open(config, Box::new(ImageFolder(fake.images()))).unwrap();
    device.set_capacity(capacity).unwrap();
    let fixed = device.reserve_bytes(capacity);
    assert!(fixed <= free);
    device.set_reserve(0, fixed).unwrap();
    device
}
