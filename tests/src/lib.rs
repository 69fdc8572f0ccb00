//! What the workspace's tests share: the fixtures, a real daemon process to talk to, and Python and
//! Node where a test needs them.
//!
//! *Invariant:* a daemon that a test started ends with it, also where the test panics (`Drop for
//! Daemon`).

#![forbid(unsafe_code)]

use std::io::Write;

pub mod binaries;
pub mod daemon;
pub mod far_files;
pub mod fixtures;
pub mod forge;
pub mod node;
pub mod python;
pub mod session;

/// Says on the terminal, past the test runner's capture, that a test or a part of it
/// does not run here and why.
pub fn skip(what: &str, reason: &str) {
    // A closed terminal is no reason to fail.
    let _ = writeln!(std::io::stderr(), "SKIPPED {what}: {reason}");
}

/// Prints a figure that a person wants to see from a test that passes.
pub fn report(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
