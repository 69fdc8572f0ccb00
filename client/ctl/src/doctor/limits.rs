//! Locked memory and the size of pages.

use super::Finding;
use super::machine::Machine;
use super::system::System;

/// Locked memory that suffices without a card's registered files: staging buffers.
const LOCKED_MIN_BYTES: u64 = 64 << 20;

/// `daemon` is the process that runs, whose limit counts then.
pub(super) fn findings(system: &System, machine: &Machine, daemon: Option<u32>) -> Vec<Finding> {
    vec![locked(system, machine, daemon), pages(system)]
}

fn locked(system: &System, machine: &Machine, daemon: Option<u32>) -> Finding {
    const SUBJECT: &str = "locked memory";
    const LIMIT: &str = "Max locked memory";
    let of = |process: &str| system.line(&format!("/proc/{process}/limits"), LIMIT);
    let own = || of("self").map(|line| (line, "this shell's"));
    let theirs = daemon.and_then(|pid| of(&pid.to_string()));
    let Some((line, whose)) = theirs.map(|line| (line, "the daemon's")).or_else(own) else {
        return Finding::warn(SUBJECT, "/proc/self/limits cannot be read", "mount /proc");
    };
    // The soft limit, the hard one, and the unit.
    let soft = line.split_whitespace().next().unwrap_or_default();
    if soft == "unlimited" {
        return Finding::ok(SUBJECT, format!("unlimited ({whose})"));
    }
    let Ok(bytes) = soft.parse::<u64>() else {
        return Finding::warn(
            SUBJECT,
            format!("{soft:?} is no limit"),
            "look at `ulimit -l`",
        );
    };
    let shown = format!("{} KiB ({whose})", bytes >> 10);
    let todo = "set LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`: files are registered with the GPU, \
                which locks their pages";
    if machine.cards.is_empty() {
        return Finding::ok(SUBJECT, format!("{shown}; the CPU needs none"));
    }
    if bytes < LOCKED_MIN_BYTES {
        return Finding::fail(SUBJECT, shown, todo);
    }
    Finding::warn(SUBJECT, shown, todo)
}

fn pages(system: &System) -> Finding {
    const SUBJECT: &str = "page size";
    let line = system.line("/proc/self/smaps", "KernelPageSize:");
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    match kib {
        Some(4) => Finding::ok(SUBJECT, "4 KiB"),
        Some(kib) => Finding::warn(
            SUBJECT,
            format!("{kib} KiB"),
            "the daemon is tested with pages of 4 KiB; report what you see with others",
        ),
        None => Finding::warn(SUBJECT, "/proc/self/smaps cannot be read", "mount /proc"),
    }
}
