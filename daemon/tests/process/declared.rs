//! Many declared models: what a start with them takes, and a stop meanwhile.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::program::{Daemon, PATIENCE, host};

const N_MODELS: usize = 100;
/// What the program has anonymously and in descriptors for a model, at most, and without any. A
/// model that shares its vocabulary takes some 120 KB.
const ANONYMOUS_BYTES: usize = 512 << 10;
const ANONYMOUS_BASE_BYTES: usize = 64 << 20;
const DESCRIPTORS: usize = 1;
const DESCRIPTORS_BASE: usize = 64;

fn name(n: usize) -> String {
    format!("m{n:03}")
}

/// Starts a daemon with copies of one file declared, and waits until its HTTP socket is there.
fn start(dir: &Path) -> (Daemon, PathBuf) {
    let files = dir.join("files");
    std::fs::create_dir(&files).unwrap();
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let mut declared = String::new();
    for n in 0..N_MODELS {
        let file = files.join(format!("{n}.gguf"));
        std::fs::copy(fixtures.join("arch/granitehybrid-bias.gguf"), &file).unwrap();
        let name = name(n);
        writeln!(declared, "[[model]]\nname = \"{name}\"\npath = {file:?}").unwrap();
    }
    let config = dir.join("config.toml");
    std::fs::write(&config, declared).unwrap();
    let http = dir.join("http");
    let mut command = host(&files, &dir.join("s"));
    command.arg("--config").arg(&config);
    command.arg("--http-socket").arg(&http);
    let log = std::fs::File::create(dir.join("log")).unwrap();
    let child = command.env_remove("NOTIFY_SOCKET").stdout(Stdio::null());
    let daemon = Daemon(child.stderr(log).spawn().unwrap());
    let give_up = Instant::now() + PATIENCE;
    while UnixStream::connect(&http).is_err() {
        assert!(Instant::now() < give_up, "the daemon does not start");
        std::thread::sleep(Duration::from_millis(2));
    }
    (daemon, http)
}

/// The status line of the answer to a completion of one token.
pub(crate) fn complete(http: &Path, model: &str) -> String {
    let mut stream = UnixStream::connect(http).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let body = format!("{{\"model\": \"{model}\", \"prompt\": \"a\", \"max_tokens\": 1}}");
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    let kind = "content-type: application/json\r\n";
    let n = body.len();
    write!(stream, "{head}{kind}content-length: {n}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

/// Where the log says that a model was loaded.
fn loads(log: &str, model: &str) -> Vec<usize> {
    let line = format!("rpc=\"Load\" model=\"{model}\"");
    log.match_indices(&line).map(|(at, _)| at).collect()
}

/// It was ready after 7.3 s: what is declared was opened before the first request was served.
#[test]
fn a_hundred_declared_models_are_opened_once_while_the_daemon_serves() {
    let dir = tempfile::tempdir().unwrap();
    let (daemon, http) = start(dir.path());
    let asked = [0, N_MODELS / 2, N_MODELS - 1];
    std::thread::scope(|scope| {
        for n in asked {
            let http = &http;
            scope.spawn(move || assert_eq!(complete(http, &name(n)), "HTTP/1.1 200 OK"));
        }
    });
    let log = || std::fs::read_to_string(dir.path().join("log")).unwrap();
    let give_up = Instant::now() + PATIENCE;
    while (0..N_MODELS).any(|n| loads(&log(), &name(n)).is_empty()) {
        assert!(Instant::now() < give_up, "not all are loaded:\n{}", log());
        std::thread::sleep(Duration::from_millis(10));
    }
    for n in asked {
        assert_eq!(complete(&http, &name(n)), "HTTP/1.1 200 OK");
    }
    let log = log();
    let serves = log.find(" serving ").expect("it says so");
    for n in 0..N_MODELS {
        let loads = loads(&log, &name(n));
        assert!(loads.len() == 1 && loads[0] > serves, "{n}: {log}");
    }
    let process = PathBuf::from(format!("/proc/{}", daemon.0.id()));
    let status = std::fs::read_to_string(process.join("status")).unwrap();
    let anonymous = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = anonymous.and_then(|line| line.trim().strip_suffix(" kB"));
    let anonymous = kib.unwrap().trim().parse::<usize>().unwrap() << 10;
    let most = ANONYMOUS_BASE_BYTES + N_MODELS * ANONYMOUS_BYTES;
    assert!(anonymous < most, "{anonymous} bytes");
    let descriptors = process.join("fd").read_dir().unwrap().count();
    let most = DESCRIPTORS_BASE + N_MODELS * DESCRIPTORS;
    assert!(descriptors <= most, "{descriptors} descriptors");
}

/// Once every model was opened before the daemon ended.
#[test]
fn a_stop_while_a_hundred_declared_models_are_opened_is_clean() {
    let dir = tempfile::tempdir().unwrap();
    let (daemon, _http) = start(dir.path());
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().0, Some(0));
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    for n in 0..N_MODELS {
        assert!(loads(&log, &name(n)).len() <= 1, "{n}: {log}");
    }
    assert!(!log.contains(" ERROR "), "{log}");
}
