//! The program as systemd and a shell see it: exit codes, readiness, a passed socket, signals.

#![expect(
    clippy::unwrap_used,
    reason = "a test may panic, and so may its helpers"
)]

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PROGRAM: &str = env!("CARGO_BIN_EXE_rocmforged");
const PATIENCE: Duration = Duration::from_secs(60);

/// Kills the daemon when a test ends early.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Daemon {
    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    /// The exit code and the log.
    fn ended(mut self) -> (Option<i32>, String) {
        let give_up = Instant::now() + PATIENCE;
        while self.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < give_up, "the daemon does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut log = String::new();
        self.0
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut log)
            .unwrap();
        (self.0.wait().unwrap().code(), log)
    }
}

fn refused(arguments: &[&str]) -> Output {
    Command::new(PROGRAM)
        .args(arguments)
        .env_remove("NOTIFY_SOCKET")
        .output()
        .unwrap()
}

/// Starts with a notify socket in `dir` and waits for READY=1.
fn start(dir: &Path, command: &mut Command) -> (Daemon, UnixDatagram) {
    let notify = UnixDatagram::bind(dir.join("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let child = command
        .env("NOTIFY_SOCKET", dir.join("notify"))
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let daemon = Daemon(child);
    assert!(said(&notify).contains("READY=1"));
    (daemon, notify)
}

fn said(notify: &UnixDatagram) -> String {
    let mut bytes = [0; 4096];
    let n = notify.recv(&mut bytes).expect("the daemon notifies");
    String::from_utf8_lossy(&bytes[..n]).into_owned()
}

fn host(dir: &Path, socket: &Path) -> Command {
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

#[test]
fn settings_that_cannot_be_used_end_with_2_and_name_the_flag() {
    let rows: [&[&str]; 5] = [
        &["--threads", "0"],
        &["--config", "/nonexistent.toml"],
        &["--model-dir", "/nonexistent"],
        &["--vram-budget", "lots"],
        &["--no-such-flag"],
    ];
    for arguments in rows {
        let output = refused(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(
            text.contains(arguments[0]),
            "'{text}' lacks {}",
            arguments[0]
        );
        assert!(output.stdout.is_empty(), "messages belong on stderr");
    }
}

#[test]
fn a_socket_that_cannot_be_had_ends_with_1_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let output = refused(&["--device", "host", "--socket", file.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("not a socket") && text.contains("--socket"),
        "{text}"
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn it_says_ready_when_it_serves_and_drains_on_each_signal() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let (daemon, notify) = start(dir.path(), &mut host(dir.path(), &socket));
        assert!(UnixStream::connect(&socket).is_ok());
        daemon.signal(signal);
        assert!(said(&notify).contains("STOPPING=1"));
        let (code, log) = daemon.ended();
        assert_eq!(code, Some(0), "{signal}: {log}");
        assert!(!socket.exists(), "the socket is removed");
    }
}

#[test]
fn a_second_daemon_is_refused_and_the_first_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (daemon, _notify) = start(dir.path(), &mut host(dir.path(), &socket));
    let output = host(dir.path(), &socket).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains(&format!("process {}", daemon.0.id())),
        "{text}"
    );
    assert!(UnixStream::connect(&socket).is_ok());
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().0, Some(0));
}

#[test]
fn a_daemon_that_was_killed_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (daemon, _notify) = start(dir.path(), &mut host(dir.path(), &socket));
    drop(daemon);
    assert!(socket.exists());
    std::fs::remove_file(dir.path().join("notify")).unwrap();
    let (daemon, _notify) = start(dir.path(), &mut host(dir.path(), &socket));
    assert!(UnixStream::connect(&socket).is_ok());
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().0, Some(0));
}

#[test]
fn a_socket_passed_by_systemd_is_served_and_left_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let passed = dir.path().join("passed");
    let listener = UnixListener::bind(&passed).unwrap();
    // The first passed descriptor is 3; a shell moves it there and names its own process, which exec keeps.
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg("exec 3<&0 0</dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" \"$@\"");
    command.arg(PROGRAM).args([
        "--device",
        "host",
        "--threads",
        "1",
        "--vram-budget",
        "64MiB",
    ]);
    command
        .arg("--socket")
        .arg(dir.path().join("unused"))
        .stdin(Stdio::from(OwnedFd::from(listener)));
    let (daemon, _notify) = start(dir.path(), &mut command);
    assert!(UnixStream::connect(&passed).is_ok());
    assert!(!dir.path().join("unused").exists());
    daemon.signal(Signal::SIGTERM);
    let (code, log) = daemon.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(passed.exists(), "systemd owns its file");
}
