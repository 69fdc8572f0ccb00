//! Finds the workspace's programs beside the running test, and has cargo build them where
//! they are absent or stale.
//!
//! Cargo names a binary only to the tests of its own package. Programs lie two directories above
//! a test's own executable, in the same profile's directory; `cargo test --workspace` has built
//! them by the time a test runs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

use crate::fixtures::workspace;

/// The daemon's executable.
///
/// # Panics
/// When it is not there and cannot be built.
pub fn rocmforged() -> PathBuf {
    program("rocmforged")
}

/// The command line client's executable.
///
/// # Panics
/// When it is not there and cannot be built.
pub fn rocmforgectl() -> PathBuf {
    program("rocmforgectl")
}

/// The executable of the benchmarks.
///
/// # Panics
/// When it is not there and cannot be built.
pub fn rocmforge_bench() -> PathBuf {
    program("rocmforge-bench")
}

fn program(name: &str) -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    let dir = profile_dir();
    BUILT.get_or_init(|| {
        if ["rocmforged", "rocmforgectl", "rocmforge-bench"]
            .iter()
            .any(|name| is_stale(&dir.join(name)))
        {
            build(&dir);
        }
    });
    let path = dir.join(name);
    assert!(
        path.is_file(),
        "{} is not there after cargo build",
        path.display()
    );
    path
}

/// `target/release` for `target/release/deps/some_test-0123456789abcdef`.
fn profile_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a process knows its executable");
    let deps = test.parent().expect("an executable has a directory");
    deps.parent()
        .expect("tests run from a profile's deps directory")
        .to_path_buf()
}

/// Whether a program is absent, or a file that it was made of has changed since. Cargo writes their
/// names beside it; a newer file that is no part of it, such as a test, makes no program stale.
fn is_stale(program: &Path) -> bool {
    let built = program.metadata().and_then(|m| m.modified());
    let names = std::fs::read_to_string(program.with_extension("d"));
    let (Ok(built), Ok(names)) = (built, names) else {
        return true;
    };
    // "PROGRAM: FILE FILE", a space in a name behind a backslash.
    let names = names.replace("\\ ", "\0");
    let files = names.split_once(": ").map_or("", |(_, files)| files);
    let files = files.split_whitespace().map(|name| name.replace('\0', " "));
    let lock = workspace().join("Cargo.lock");
    files
        .map(PathBuf::from)
        .chain([lock])
        .any(|file| is_newer(&file, built))
}

/// Whether a file, or one below a directory, has changed since. One that is gone counts as changed.
fn is_newer(path: &Path, than: SystemTime) -> bool {
    if let Ok(entries) = path.read_dir() {
        return entries.flatten().any(|e| is_newer(&e.path(), than));
    }
    let changed = path.metadata().and_then(|m| m.modified());
    changed.map_or(true, |changed| changed > than)
}

/// Builds all programs at once: a build of one package alone would resolve features,
/// and so compile, differently.
fn build(profile_dir: &Path) {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(workspace())
        .args(["build", "--workspace", "--bins"]);
    match profile_dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") => {}
        Some(profile) => {
            cargo.args(["--profile", profile]);
        }
        None => panic!("{} has no profile's name", profile_dir.display()),
    }
    cargo.arg("--target-dir").arg(
        profile_dir
            .parent()
            .expect("a profile's directory lies in the target directory"),
    );
    let output = cargo.output().expect("cargo runs");
    assert!(
        output.status.success(),
        "{cargo:?} failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
