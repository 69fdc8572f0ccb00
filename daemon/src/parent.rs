//! Ends the daemon with the process that started it, for `rocmforgectl run`, which starts one for a
//! command.
//!
//! The parent holds the other end of the pipe that is the daemon's standard input, and never writes
//! to it. The kernel closes that end however the parent ends, also when it is killed. A signal at
//! the parent's death (`PR_SET_PDEATHSIG`) would come with the end of the thread that started the
//! daemon, and not at all where the parent died before it was asked for.
//!
//! *Invariant:* the process ends within [`END_WAIT_MAX`] of its parent's end, whatever a driver
//! does (test `a_daemon_of_a_run_that_is_killed_ends`).

use std::ffi::OsString;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Hidden last argument of a daemon that ends with its standard input.
pub const ARGUMENT: &str = "--ends-with-input";
/// Maximum time for an orderly end; then the process is killed.
const END_WAIT_MAX: Duration = Duration::from_secs(10);

/// Removes [`ARGUMENT`] from the command line. Returns whether it was there.
pub fn take_argument(arguments: &mut Vec<OsString>) -> bool {
    let is_there = arguments.len() > 1 && arguments.last().is_some_and(|a| a == ARGUMENT);
    if is_there {
        arguments.pop();
    }
    is_there
}

/// Makes the end of standard input stop the process, like SIGTERM. The files that the parent
/// created around `socket` are removed then, since the parent cannot.
///
/// # Errors
/// No thread can be started.
pub fn follow(socket: &Path) -> io::Result<()> {
    let socket = socket.to_owned();
    let thread = std::thread::Builder::new().name("parent".to_owned());
    thread.spawn(move || {
        let mut input = io::stdin();
        let mut bytes = [0; 64];
        // What comes is nothing to the daemon; an error is an end, too.
        while matches!(input.read(&mut bytes), Ok(1..)) {}
        tracing::info!("the process that started the daemon has ended: so does the daemon");
        remove_place(&socket);
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            // There is no more to be done where even that fails.
            let _ = kill(Pid::this(), signal);
            std::thread::sleep(END_WAIT_MAX);
        }
    })?;
    Ok(())
}

/// Removes the parent's files: the log, those of the socket, and their directory if it is empty.
fn remove_place(socket: &Path) {
    let Some(dir) = socket.parent() else { return };
    let mut lock = socket.as_os_str().to_owned();
    lock.push(".lock");
    // What is not there need not be removed; who looks at what stays finds it in the temporary
    // files.
    for file in [socket, Path::new(&lock), &dir.join("log")] {
        let _ = std::fs::remove_file(file);
    }
    let _ = std::fs::remove_dir(dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_is_taken_where_it_is_the_last() {
        let of = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let mut there = of(&["rocmforged", "--socket", "s", ARGUMENT]);
        assert!(take_argument(&mut there));
        assert_eq!(there, of(&["rocmforged", "--socket", "s"]));
        for words in [
            &[ARGUMENT][..],
            &["rocmforged"],
            &["rocmforged", ARGUMENT, "--x"],
        ] {
            let mut other = of(words);
            assert!(!take_argument(&mut other), "{words:?}");
            assert_eq!(other, of(words));
        }
    }

    #[test]
    fn a_place_is_removed_with_nothing_that_is_not_the_parents() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("place");
        let socket = place.join("rocmforged.sock");
        std::fs::create_dir(&place).unwrap();
        for name in ["rocmforged.sock", "rocmforged.sock.lock", "log", "mine"] {
            std::fs::write(place.join(name), "").unwrap();
        }
        remove_place(&socket);
        let left: Vec<_> = std::fs::read_dir(&place).unwrap().flatten().collect();
        assert_eq!(left.len(), 1);
        std::fs::remove_file(place.join("mine")).unwrap();
        remove_place(&socket);
        assert!(!place.exists());
    }
}
