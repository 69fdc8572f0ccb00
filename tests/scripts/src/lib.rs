//! What tests of several crates share: executable scripts that take a program's place, and how much
//! of a long sweep is done.
//!
//! A file that any process holds open for writing cannot be executed ("text file busy"). Were a
//! script written by the test itself, a child that another test's thread forks at that moment would
//! hold it open until it executes its own program. So a process of its own writes it, and has ended
//! before anyone starts the script.

#![forbid(unsafe_code)]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Whether a test does all of its sweep: with ROCMFORGE_TEST_ALL, which `.ci/run --all` sets.
/// Without it, prints what is left out.
pub fn is_whole_sweep(left_out: &str) -> bool {
    let is_whole = std::env::var_os("ROCMFORGE_TEST_ALL").is_some();
    if !is_whole {
        // Past the test runner, which keeps what a passing test prints.
        let note = format!("left out without ROCMFORGE_TEST_ALL: {left_out}\n");
        std::io::stderr().write_all(note.as_bytes()).ok();
    }
    is_whole
}

/// Writes `text` as a script for `/bin/sh` to `path`, executable for everyone.
///
/// # Panics
/// When it cannot be written.
pub fn write(path: &Path, text: &str) {
    let mut writer = Command::new("sh")
        .args(["-c", r#"cat > "$1" && chmod 755 "$1""#, "sh"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("a shell starts");
    let mut pipe = writer.stdin.take().expect("it was asked for");
    write!(pipe, "#!/bin/sh\n{text}\n").expect("the shell reads");
    drop(pipe);
    let status = writer.wait().expect("it was not waited for before");
    assert!(
        status.success(),
        "{} was not written: {status}",
        path.display()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_start_while_other_threads_start_processes() {
        let dir = std::env::temp_dir().join(format!("scripts-{}", std::process::id()));
        std::fs::create_dir(&dir).expect("it is new");
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let dir = &dir;
                scope.spawn(move || {
                    for round in 0..50 {
                        let path = dir.join(format!("{thread}-{round}"));
                        write(&path, &format!("echo {round}"));
                        let output = Command::new(&path).output().expect("it starts");
                        assert_eq!(output.stdout, format!("{round}\n").as_bytes());
                    }
                });
            }
        });
        std::fs::remove_dir_all(dir).expect("it is ours");
    }
}
