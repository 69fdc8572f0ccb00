//! Texts as TOML has them.

use std::path::Path;

/// A path as TOML has it.
pub(super) fn quoted_path(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

/// A text as TOML has it.
pub(super) fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}
