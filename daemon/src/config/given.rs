//! Values of settings as they are written.

use std::ffi::OsString;

use super::origin::Origin;

/// How a value is written, in files and as a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// A string or a number. Such settings can be set in the environment, too.
    Text,
    /// The path of a file.
    Path,
    /// A path, or a list of them.
    Paths,
    /// A list of names.
    Names,
    /// A text, or a list of them; texts are separated by commas, too. Such settings can be set in
    /// the environment.
    Texts,
}

/// Values that were written for one setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Given {
    /// One text, or those of a list.
    pub(super) texts: Vec<OsString>,
    /// Where; `None` for the default.
    pub(super) origin: Option<Origin>,
}
