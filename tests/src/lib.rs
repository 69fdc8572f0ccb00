//! Workspace-level tests: end to end, parity, faults.
