//! A daemon that ends with the process that started it, as `rocmforgectl run` starts one for a
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

/// The hidden last argument of a daemon that ends with its standard input.
pub const ARGUMENT: &str = "--ends-with-input";
/// How long the daemon may take to end in order; then it is killed.
const END_WAIT_MAX: Duration = Duration::from_secs(10);

/// Takes [`ARGUMENT`] off the command line. Whether it was there.
pub fn take_argument(arguments: &mut Vec<OsString>) -> bool {
    let is_there = arguments.len() > 1 && arguments.last().is_some_and(|a| a == ARGUMENT);
    if is_there {
        arguments.pop();
    }
    is_there
}

/// From now on the end of standard input stops the process as SIGTERM does. What the parent made
/// around `socket`, its log and its directory, is removed then, since the parent cannot.
///
/// # Errors
/// When the system has no thread left.
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

/// Removes what the parent would have: the log, the files of the socket, and their directory if
/// there is nothing else in it.
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
