//! Why a configuration cannot be used.

use std::fmt;
use std::path::PathBuf;

use super::bounds::{CONFIG_FILE_MAX_BYTES, DROP_INS_MAX};
use super::origin::{Origin, variable};

/// Why the settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {} (--config); check that it is there and that the daemon's user may read it", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why the file cannot be read.
        source: std::io::Error,
    },
    /// The file is larger than a configuration is.
    #[error("the configuration file {} (--config) has more than {CONFIG_FILE_MAX_BYTES} bytes; is it the right file?", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The path is a directory, a FIFO or a device.
    #[error("the configuration file {} (--config) is not a regular file; give the path of a TOML file", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// The file is not TOML, or has an unknown key, or a value of a wrong type.
    #[error("the configuration file {} (--config) is not valid", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and cause.
        source: Box<toml::de::Error>,
    },
    /// Somebody else could write settings.
    #[error("{} belongs to user {owner}, neither root nor the daemon's user nor the owner of the configuration file; give it to root, or remove it", dir.display())]
    ForeignDropIns {
        /// The directory.
        dir: PathBuf,
        /// The directory's owner.
        owner: u32,
    },
    /// The directory has too many files.
    #[error("{} has more than {} files; put several settings into one", dir.display(), DROP_INS_MAX)]
    TooManyDropIns {
        /// The directory.
        dir: PathBuf,
    },
    /// A declared model is refused.
    #[error("{key} of [[model]] {number} ('{name}') in {}: {message}", file.display())]
    Model {
        /// The file.
        file: PathBuf,
        /// Number of the model in the file, from 1.
        number: usize,
        /// The model's name.
        name: String,
        /// The key.
        key: String,
        /// What is wrong with the value, and what is allowed.
        message: String,
    },
    /// A limit is refused.
    #[error("{key} of [[limit]] {number} in {}: {message}", file.display())]
    Limit {
        /// The file.
        file: PathBuf,
        /// Number of the limit in the file, from 1.
        number: usize,
        /// The key.
        key: &'static str,
        /// What is wrong with the value, and what is allowed.
        message: String,
    },
    /// A value is refused.
    #[error("{}: {message}", Place { key, origin })]
    Value {
        /// The setting's key in the file.
        key: &'static str,
        /// Where the value came from.
        origin: Origin,
        /// What is wrong with the value, and what is allowed.
        message: String,
    },
}

struct Place<'a> {
    key: &'a &'static str,
    origin: &'a Origin,
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flag = self.key.replace('_', "-");
        match self.origin {
            Origin::Flag => write!(f, "--{flag}"),
            Origin::Environment => write!(f, "{} (flag --{flag})", variable(self.key)),
            Origin::File { path, line } => write!(
                f,
                "{} in {}, line {line} (flag --{flag})",
                self.key,
                path.display()
            ),
        }
    }
}
