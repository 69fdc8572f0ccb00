//! The store's device, open or closed. `closing.rs` decides when it is closed and opened.

use std::ops::{Deref, DerefMut};

use rocmforge_device::{ClosedDevice, Device, Steps};

type DeviceError = rocmforge_device::Error;

/// The device, open or closed: both states implement [`Device`], and a closed one rejects what
/// needs a context.
pub(crate) struct DeviceSlot(State);

enum State {
    Open(Box<dyn Device>),
    /// A closed device, and whether all of its memory was returned.
    Closed(Box<dyn ClosedDevice>, bool),
}

impl Deref for DeviceSlot {
    type Target = dyn Device;

    fn deref(&self) -> &Self::Target {
        match &self.0 {
            State::Open(device) => &**device,
            State::Closed(device, _) => &**device,
        }
    }
}

impl DerefMut for DeviceSlot {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match &mut self.0 {
            State::Open(device) => &mut **device,
            State::Closed(device, _) => &mut **device,
        }
    }
}

impl DeviceSlot {
    pub(super) fn new(device: Box<dyn Device>) -> Self {
        Self(State::Open(device))
    }

    /// Whether the device's context is closed.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.0, State::Closed(..))
    }

    /// The power state of a closed GPU, as the kernel reports it.
    pub(crate) fn power_state(&self) -> Option<String> {
        match &self.0 {
            State::Open(_) => None,
            State::Closed(device, _) => device.power_state(),
        }
    }

    /// Closes the device, and keeps the first `aside` bytes of pages set aside in host memory.
    /// Returns whether it is closed; a device without a context is not.
    pub(super) fn close(&mut self, aside: u64) -> Result<bool, DeviceError> {
        if let State::Open(device) = &mut self.0 {
            let Some(device) = device.closing() else {
                return Ok(false);
            };
            let closed = device.close(aside)?;
            // The open one goes here.
            self.0 = State::Closed(closed, false);
        }
        if let State::Closed(closed, is_whole @ false) = &mut self.0 {
            closed.finish()?;
            *is_whole = true;
        }
        Ok(true)
    }

    pub(super) fn open(&mut self) -> Result<(), DeviceError> {
        if let State::Closed(closed, _) = &mut self.0 {
            let device = closed.open(&Steps::default())?;
            self.0 = State::Open(device);
        }
        Ok(())
    }
}
