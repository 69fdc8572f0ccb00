//! The program as a child, and what it tells its service manager.

use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_rocmforged");
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Kills the daemon when a test ends early.
pub(crate) struct Daemon(pub(crate) Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Daemon {
    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    /// The exit code and the log.
    pub(crate) fn ended(mut self) -> (Option<i32>, String) {
        let code = self.wait();
        let mut log = String::new();
        if let Some(mut stderr) = self.0.stderr.take() {
            stderr.read_to_string(&mut log).unwrap();
        }
        (code, log)
    }

    /// The exit code, whatever became of the log.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        let give_up = Instant::now() + PATIENCE;
        while self.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < give_up, "the daemon does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        self.0.wait().unwrap().code()
    }
}

/// Reads once more where a signal came in between: a read with a timeout is not begun again by
/// itself.
pub(crate) fn again<T>(mut read: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match read() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

pub(crate) fn refused(arguments: &[&str]) -> Output {
    Command::new(PROGRAM)
        .args(arguments)
        .env_remove("NOTIFY_SOCKET")
        .output()
        .unwrap()
}

/// Starts with a notify socket in `dir` and waits for READY=1. The log goes into a pipe.
pub(crate) fn start(dir: &Path, command: &mut Command) -> (Daemon, UnixDatagram) {
    start_logging_to(dir, command, Stdio::piped())
}

/// The same, with the log elsewhere.
pub(crate) fn start_logging_to(
    dir: &Path,
    command: &mut Command,
    log: impl Into<Stdio>,
) -> (Daemon, UnixDatagram) {
    let notify = UnixDatagram::bind(dir.join("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let child = command
        .env("NOTIFY_SOCKET", dir.join("notify"))
        .stderr(log)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let daemon = Daemon(child);
    assert!(said(&notify).contains("READY=1"));
    (daemon, notify)
}

pub(crate) fn said(notify: &UnixDatagram) -> String {
    let mut bytes = [0; 4096];
    let n = again(|| notify.recv(&mut bytes)).expect("the daemon notifies");
    String::from_utf8_lossy(&bytes[..n]).into_owned()
}

pub(crate) fn host(dir: &Path, socket: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args([
        "--device",
        "host",
        "--threads",
        "1",
        "--vram-budget",
        "64MiB",
        "--drain-grace",
        "1",
    ]);
    command
        .arg("--model-dir")
        .arg(dir)
        .arg("--socket")
        .arg(socket);
    command
}
