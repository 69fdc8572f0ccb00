//! Telling a card that is gone from a call that was refused.
//!
//! The runtime has codes for both, and uses hipErrorUnknown, hipErrorNoDevice, the codes of ROCr
//! and others for either: after a reset, or when the card has left the bus, each call fails with
//! one of these, one by one. So after such a code of what works on the card it is asked again.

use super::abi::class;
use super::{Class, HipDriver};
use crate::LossKind;

/// Calls that work on the card, or wait for it.
const WORK: [&str; 11] = [
    "hipDeviceSynchronize",
    "hipEventQuery",
    "hipEventRecord",
    "hipEventSynchronize",
    "hipGraphLaunch",
    "hipMemcpyAsync",
    "hipMemsetAsync",
    "hipModuleLaunchKernel",
    "hipStreamQuery",
    "hipStreamSynchronize",
    "hipStreamWaitEvent",
];

/// Codes of a stream that is recorded: the answer is about the recording.
const OF_CAPTURE: std::ops::RangeInclusive<u32> = 900..=908;

impl HipDriver {
    /// What a call's error code means. If the code alone is ambiguous, two calls probe the GPU; the
    /// text is the one that failed.
    pub(super) fn meaning(&self, call: &'static str, code: u32) -> (Class, Option<String>) {
        let class = class(code);
        let is_open = class == Class::Other && !OF_CAPTURE.contains(&code);
        if !is_open || !WORK.contains(&call) {
            return (class, None);
        }
        match self.says_of_itself() {
            Some((kind, words)) => (Class::Lost(kind), Some(words)),
            None => (class, None),
        }
    }

    /// What fails of two calls that have nothing to refuse, and how by its code; `None` if the card
    /// is sound.
    fn says_of_itself(&self) -> Option<(LossKind, String)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: no arguments; the calling thread has a device, since it worked on it.
        let waited = unsafe { (self.hip.hipDeviceSynchronize)() };
        // SAFETY: the out-pointers are to live locals.
        let counted = unsafe { (self.hip.hipMemGetInfo)(&raw mut free, &raw mut total) };
        let asked = [("hipDeviceSynchronize", waited), ("hipMemGetInfo", counted)];
        asked.into_iter().find_map(|(call, code)| {
            let kind = match class(code) {
                _ if code == 0 || OF_CAPTURE.contains(&code) => return None,
                Class::Lost(kind) => kind,
                Class::Other => LossKind::Unknown,
                Class::OutOfMemory | Class::NotReady | Class::NotSupported => return None,
            };
            let (name, _) = self.words(code);
            let words = format!("after it {call} fails, too: {name} ({code})");
            Some((kind, words))
        })
    }
}
