//! Settings out of flags and of a file's lines.

use std::path::PathBuf;

use clap::Parser;
use rocmforged::config::{Config, ConfigError, Flags};

fn flags(arguments: &[&str]) -> Flags {
    Flags::try_parse_from([&["rocmforged"], arguments].concat()).expect("the flags parse")
}

pub(crate) fn config(arguments: &[&str]) -> Result<Config, ConfigError> {
    Config::new(flags(arguments), PathBuf::from("/run/default.sock"))
}

/// The settings of a file with these lines, under these flags.
pub(crate) fn file(text: &str, arguments: &[&str]) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rocmforged.toml");
    std::fs::write(&path, text).unwrap();
    let named = ["--config", path.to_str().unwrap()];
    config(&[&named, arguments].concat())
}
