//! What signals do.

use std::os::unix::net::UnixStream;
use std::process::Command;

use nix::sys::signal::Signal;

use crate::program::{host, said, start};

#[test]
fn signals_that_are_no_stop_do_not_end_it() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (mut daemon, _notify) = start(dir.path(), &mut host(dir.path(), &socket));
    for signal in [
        Signal::SIGHUP,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGALRM,
        Signal::SIGVTALRM,
        Signal::SIGPROF,
        Signal::SIGIO,
        Signal::SIGPWR,
        Signal::SIGXFSZ,
    ] {
        daemon.signal(signal);
    }
    // Signals are delivered before the process goes on; whoever takes this connection has met them.
    assert!(UnixStream::connect(&socket).is_ok());
    assert!(daemon.0.try_wait().unwrap().is_none());
    daemon.signal(Signal::SIGTERM);
    let (code, log) = daemon.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(!socket.exists(), "the socket is removed");
}

#[test]
fn a_stop_that_is_sent_twice_at_once_is_one() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (daemon, notify) = start(dir.path(), &mut host(dir.path(), &socket));
    daemon.signal(Signal::SIGTERM);
    assert!(said(&notify).contains("STOPPING=1"));
    daemon.signal(Signal::SIGTERM);
    let (code, log) = daemon.ended();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn the_end_that_timeout_makes_is_a_drain() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let inner = host(dir.path(), &socket);
    let mut command = Command::new("timeout");
    command.args(["3"]).arg(inner.get_program());
    command.args(inner.get_args());
    let (daemon, _notify) = start(dir.path(), &mut command);
    let (code, log) = daemon.ended();
    assert_eq!(code, Some(124), "timeout's own code: {log}");
    assert!(log.contains("draining") && log.contains("ended"), "{log}");
    assert!(!log.contains("ended before"), "{log}");
    assert!(!socket.exists(), "the socket is removed");
}
