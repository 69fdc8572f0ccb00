//! Where values of settings come from.

use std::path::PathBuf;

/// What variables of the environment begin with that are settings: `ROCMFORGED_VRAM_BUDGET`.
pub(super) const ENVIRONMENT: &str = "ROCMFORGED_";

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// A variable of the environment: `ROCMFORGED_` and the key in capitals.
    Environment,
    /// A file.
    File {
        /// The file.
        path: PathBuf,
        /// The line where the value begins, from 1.
        line: usize,
    },
}

/// The variable of the environment that has a setting of one value.
pub(super) fn variable(key: &str) -> String {
    format!("{ENVIRONMENT}{}", key.to_uppercase())
}
