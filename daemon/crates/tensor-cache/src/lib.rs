//! Decides which weight segments are resident. Pure: no clock, thread, file or device.
