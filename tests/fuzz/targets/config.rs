//! Configuration files. An input is one.
//!
//! It gives settings, each of which has an origin, or a refusal.
#![no_main]

use std::error::Error as _;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;
use nix::sys::memfd::{MFdFlags, memfd_create};
use rocmforged::config::{Config, Flags};

fuzz_target!(|data: &[u8]| {
    let file = memfd_create("config", MFdFlags::MFD_CLOEXEC).expect("memory for a file");
    let mut file = std::fs::File::from(file);
    file.write_all(data).expect("room for it");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let flags = Flags {
        config: Some(path.clone()),
        ..Flags::default()
    };
    match Config::new(flags, PathBuf::from("/run/s")) {
        Ok(config) => {
            assert_eq!(config.files, [path]);
            assert!(!config.describe().is_empty());
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            let _ = error.source().map(ToString::to_string);
        }
    }
});
