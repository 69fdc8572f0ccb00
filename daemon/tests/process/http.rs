//! HTTP as the program serves it: what its log says of clients that go away, and where it listens.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::program::{Daemon, PATIENCE, again, host, refused, start_logging_to};

/// Times that each is tried: on a busy machine a generation may end before its client went.
const TRIES: usize = 5;

/// Nearly evenly drawn tokens up to the end of the context.
fn endless(stream: bool) -> String {
    let body = format!(
        r#"{{"model": "tiny-llama-Q4_K_M", "prompt": "Once upon a time", "temperature": 1000, "top_k": 0, "top_p": 1,
            "min_p": 0, "seed": 7, "stream": {stream}}}"#
    );
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length:";
    format!("{head} {}\r\n\r\n{body}", body.len())
}

/// A daemon with the models of the tests, with an HTTP socket and a log in a file.
fn serving(dir: &Path, socket: &Path, log: &Path) -> (Daemon, UnixDatagram) {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let mut command = host(dir, &dir.join("s"));
    command.arg("--model-dir").arg(fixtures);
    command.arg("--http-socket").arg(socket);
    start_logging_to(dir, &mut command, File::create(log).unwrap())
}

fn send(socket: &Path, request: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

/// Reads until `mark` was seen.
fn read_until(stream: &mut UnixStream, mark: &str) -> String {
    let (mut text, mut bytes) = (String::new(), [0; 4096]);
    while !text.contains(mark) {
        let n = again(|| stream.read(&mut bytes)).unwrap();
        assert!(n > 0, "it ended without '{mark}': {text}");
        text.push_str(&String::from_utf8_lossy(&bytes[..n]));
    }
    text
}

/// How many requests ended so, once `all` have ended.
fn ended(log: &Path, code: &str, all: usize) -> usize {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let text = std::fs::read_to_string(log).unwrap();
        let lines = text.lines().filter(|line| line.contains("/v1/completions"));
        let lines: Vec<_> = lines.collect();
        if lines.len() >= all {
            let code = format!("code={code} ");
            return lines.iter().filter(|line| line.contains(&code)).count();
        }
        assert!(
            Instant::now() < give_up,
            "{all} requests do not end: {text}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_client_that_goes_ends_its_generation() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, log) = (dir.path().join("h"), dir.path().join("log"));
    let (mut daemon, _notify) = serving(dir.path(), &socket, &log);

    let mut whole = send(&socket, &endless(true));
    let text = read_until(&mut whole, "[DONE]");
    let pieces = text.matches("finish_reason").count();
    assert!(pieces > 100, "{pieces} pieces up to the end of the context");
    assert_eq!(ended(&log, "Ok", 1), 1);
    for _ in 0..TRIES {
        let mut stream = send(&socket, &endless(true));
        read_until(&mut stream, "data: ");
    }
    let cut = ended(&log, "Cancelled", 1 + TRIES);
    assert!(cut > 0, "no stream ended with its client");
    // Likewise where the answer was to come whole, before there is a byte of it.
    for _ in 0..TRIES {
        let stream = send(&socket, &endless(false));
        std::thread::sleep(Duration::from_millis(20));
        drop(stream);
    }
    let both = ended(&log, "Cancelled", 1 + 2 * TRIES);
    assert!(both > cut, "no whole answer ended with its client");

    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
    assert!(!socket.exists(), "the socket is removed");
}

#[test]
fn a_chat_that_is_shortened_leaves_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, log) = (dir.path().join("h"), dir.path().join("log"));
    let (mut daemon, _notify) = serving(dir.path(), &socket, &log);
    let message = r#"{"role": "user", "content": "Tell me of the whale."}"#;
    let messages = vec![message; 40].join(", ");
    let body = format!(
        r#"{{"model": "tiny-llama-Q4_K_M", "messages": [{messages}], "stream": false,
            "options": {{"num_ctx": 64, "num_predict": 2}}}}"#
    );
    let head = "POST /api/chat HTTP/1.1\r\nhost: localhost\r\ncontent-length:";
    let request = format!("{head} {}\r\n\r\n{body}", body.len());
    let answer = read_until(&mut send(&socket, &request), "done_reason");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(log.contains("left_out="), "{log}");
    let lines = log.lines().filter(|line| line.contains("POST /api/chat"));
    let lines: Vec<_> = lines.collect();
    let [line] = &lines[..] else {
        panic!("{lines:?}")
    };
    assert!(line.contains("code=Ok "), "{line}");
}

/// A request that asks whether the daemon is well, by a name of the machine.
fn is_well(address: &str, host: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = format!("GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn http_is_served_on_each_address_that_a_list_or_a_name_leads_to() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let mut command = host(dir.path(), &dir.path().join("s"));
    command.env("ROCMFORGED_HTTP_LISTEN", "localhost:0,127.0.0.2:0");
    let (mut daemon, _notify) =
        start_logging_to(dir.path(), &mut command, File::create(&log).unwrap());
    // The log is written by a thread of its own.
    let until = Instant::now() + PATIENCE;
    let text = loop {
        let text = std::fs::read_to_string(&log).unwrap();
        if text.contains("http_listen=\"") {
            break text;
        }
        assert!(Instant::now() < until, "{text}");
        std::thread::sleep(Duration::from_millis(20));
    };
    let addresses = text.split_once("http_listen=\"").unwrap().1;
    let addresses: Vec<_> = addresses.split_once('"').unwrap().0.split(',').collect();
    assert!(addresses.len() >= 2, "{text}");
    assert!(
        addresses.last().unwrap().starts_with("127.0.0.2:"),
        "{text}"
    );
    for address in &addresses {
        let answer = is_well(address, "localhost");
        assert!(answer.starts_with("HTTP/1.1 200"), "{address}: {answer}");
    }
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

#[test]
fn an_address_that_cannot_be_had_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let listen = |entries: &str| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = host(dir.path(), &dir.path().join("s"));
        command.args(["--http-listen", "127.0.0.1:0", "--http-listen", entries]);
        let output = command.env_remove("NOTIFY_SOCKET").output().unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (code, said) = listen(&address.to_string());
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains(&format!("cannot serve HTTP on {address} (--http-listen)")),
        "{said}"
    );
    assert!(said.contains("choose another port"), "{said}");
    let name = format!("localhost:{}", address.port());
    let (code, said) = listen(&name);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains(&format!("{address}, to which {name} leads")),
        "{said}"
    );
    let (code, said) = listen("nobody.invalid:80");
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("cannot find the address of nobody.invalid:80"),
        "{said}"
    );
}

#[test]
fn an_address_that_others_reach_needs_a_token_and_tls() {
    let output = refused(&["--device", "host", "--http-listen", "0.0.0.0:0"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    for flag in ["--http-token-file", "--http-tls-cert", "--http-tls-key"] {
        assert!(said.contains(flag), "{said}");
    }
}
