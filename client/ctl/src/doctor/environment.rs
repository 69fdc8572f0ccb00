//! Variables that change which cards a runtime shows, and as what.

use super::Finding;
use super::machine::Machine;
use super::system::System;

/// What HIP, ROCr and CUDA read.
const VARIABLES: [&str; 5] = [
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION",
];

/// `daemon` is the process that runs, whose variables count then.
pub(super) fn findings(system: &System, machine: &Machine, daemon: Option<u32>) -> Vec<Finding> {
    const SUBJECT: &str = "environment";
    let of = |process: &str| system.read(&format!("/proc/{process}/environ"));
    let theirs = daemon.and_then(|pid| of(&pid.to_string()));
    let own = || of("self").map(|text| (text, "this shell's"));
    let found = theirs.map(|text| (text, "the daemon's")).or_else(own);
    let Some((text, whose)) = found.filter(|_| !machine.cards.is_empty()) else {
        return Vec::new();
    };
    let set = text.split('\0').filter(|variable| {
        let name = variable.split_once('=').map(|(name, _)| name);
        name.is_some_and(|name| VARIABLES.contains(&name))
    });
    let set: Vec<_> = set.collect();
    if set.is_empty() {
        return Vec::new();
    }
    vec![Finding::warn(
        SUBJECT,
        format!("{} ({whose})", set.join(", ")),
        "unset what is not meant: it changes which GPUs the runtime lists, and their numbers or architectures",
    )]
}
