//! One daemon after another on sockets that the service manager holds.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::Signal;

use crate::program::{Daemon, PATIENCE, PROGRAM, host, said, start};

const ENDS_WITH_INPUT: &str = "--ends-with-input";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// A daemon that is passed both sockets, under the numbers that follow each other.
fn passing(dir: &Path, grpc: &UnixListener, http: &UnixListener) -> Command {
    static NEXT: AtomicI32 = AtomicI32::new(300);
    // Where nothing else is that tests beside this one open.
    let from = NEXT.fetch_add(8, Ordering::Relaxed);
    let lend =
        |socket: &UnixListener, from| fcntl(socket.as_fd(), FcntlArg::F_DUPFD(from)).unwrap();
    let first = lend(grpc, from);
    assert_eq!(lend(http, first + 1), first + 1);
    let mut command = Command::new(PROGRAM);
    command
        .env("LISTEN_FDS", "2")
        .env("LISTEN_FDS_FIRST_FD", first.to_string())
        .env_remove("LISTEN_PID")
        .args(["--device", "host", "--threads", "1", "--drain-grace", "3"])
        .args(["--vram-budget", "64MiB", "--socket"])
        .arg(dir.join("unused"))
        .arg("--http-socket")
        .arg(dir.join("http"))
        .arg("--model-dir")
        .arg(fixtures());
    command
}

fn ask(socket: &Path, request: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

fn answer(mut stream: &UnixStream, within: Duration) -> Result<String, ErrorKind> {
    stream.set_read_timeout(Some(within)).unwrap();
    let mut bytes = [0; 4096];
    match stream.read(&mut bytes) {
        Ok(n) => Ok(String::from_utf8_lossy(&bytes[..n]).into_owned()),
        Err(error) => Err(error.kind()),
    }
}

/// Waits for what the daemon says among other things.
fn says(notify: &UnixDatagram, word: &str) {
    while !said(notify).contains(word) {}
}

/// Once a daemon that drained accepted those who came, and refused them.
#[test]
fn clients_of_a_kept_socket_wait_for_the_next_daemon() {
    const STORY: &str = r#"{"model":"tiny-llama-Q4_K_M","prompt":"Once","max_tokens":3900,"ignore_eos":true,"stream":true}"#;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let [grpc, http] = ["grpc", "http"].map(|name| UnixListener::bind(dir.join(name)).unwrap());
    let (old, notify) = start(dir, &mut passing(dir, &grpc, &http));
    let story = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{STORY}",
        STORY.len()
    );
    let running = ask(&dir.join("http"), &story);
    assert!(answer(&running, PATIENCE).unwrap().contains("200 OK"));
    old.signal(Signal::SIGTERM);
    says(&notify, "STOPPING=1");

    let late = ask(&dir.join("http"), "GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
    let late_grpc = ask(
        &dir.join("grpc"),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
    );
    let while_draining = Duration::from_millis(700);
    assert_eq!(answer(&late, while_draining), Err(ErrorKind::WouldBlock));
    assert_eq!(
        answer(&late_grpc, while_draining),
        Err(ErrorKind::WouldBlock)
    );
    assert!(
        answer(&running, PATIENCE).unwrap().contains("data:"),
        "it goes on meanwhile"
    );
    let (code, log) = old.ended();
    assert_eq!(code, Some(0), "{log}");

    std::fs::remove_file(dir.join("notify")).unwrap();
    let (new, _notify) = start(dir, &mut passing(dir, &grpc, &http));
    assert!(answer(&late, PATIENCE).unwrap().contains("200 OK"));
    assert!(!answer(&late_grpc, PATIENCE).unwrap().is_empty());
    new.signal(Signal::SIGTERM);
    assert_eq!(new.ended().0, Some(0));
    assert!(!dir.join("unused").exists() && dir.join("http").exists());
}

/// HTTP's sockets go to the service manager's store where there is one.
#[test]
fn sockets_of_http_are_given_to_the_service_manager_to_keep() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let notify = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = host(dir.path(), &socket);
    command
        .arg("--http-socket")
        .arg(dir.path().join("http"))
        .env("FDSTORE", "4")
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .stderr(Stdio::piped());
    let daemon = Daemon(command.spawn().unwrap());
    assert!(said(&notify).contains("FDSTOREREMOVE=1\nFDNAME=rocmforged-http"));
    assert!(said(&notify).contains("FDSTORE=1\nFDNAME=rocmforged-http"));
    says(&notify, "READY=1");
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().0, Some(0));
    assert!(
        dir.path().join("http").exists(),
        "whoever keeps the socket needs its file"
    );
}

/// Once those who waited made the service manager start a daemon again at once, until it gave up
/// service and socket.
#[test]
fn who_waits_for_a_daemon_with_unusable_settings_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [grpc, http] = ["grpc", "http"].map(|n| UnixListener::bind(dir.path().join(n)).unwrap());
    let waiting = UnixStream::connect(dir.path().join("grpc")).unwrap();
    let mut command = passing(dir.path(), &grpc, &http);
    let output = command.args(["--watchdog", "never"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(answer(&waiting, PATIENCE), Ok(String::new()), "the end");
}

/// Once the daemon of a `rocmforgectl run` that was killed stayed for ever.
#[test]
fn a_daemon_of_a_run_that_is_killed_ends() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let socket = place.join("rocmforged.sock");
    let mut command = host(dir.path(), &socket);
    command.arg(ENDS_WITH_INPUT).stdin(Stdio::piped());
    let (mut daemon, _notify) = start(dir.path(), &mut command);
    assert!(socket.exists());
    drop(daemon.0.stdin.take());
    let (code, log) = daemon.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(
        log.contains("the process that started the daemon has ended"),
        "{log}"
    );
    assert!(!place.exists(), "its directory goes, too");
}
