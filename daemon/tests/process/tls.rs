//! HTTP with TLS: for clients that trust the certificate, and what becomes of others.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::certificates::Made;
use crate::program::{Daemon, PATIENCE, again, host, start_logging_to};
use crate::reload::{free_address, logged, reload, write_token};

const TOKEN: &str = "a-token-0123456789";
/// More than the daemon has handshakes under way.
const MANY: usize = 160;

/// A daemon that serves TLS with a certificate that lies in its directory.
struct Served {
    dir: tempfile::TempDir,
    address: String,
    log: PathBuf,
    daemon: Daemon,
    notify: UnixDatagram,
}

impl Served {
    fn start(made: &Made) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let address = free_address();
        let (certificate, key) = made.write(dir.path());
        let token = dir.path().join("token");
        write_token(&token, TOKEN);
        let mut command = host(dir.path(), &dir.path().join("s"));
        command.args(["--log", "debug", "--http-listen"]);
        command.arg(&address).arg("--http-token-file").arg(&token);
        command.arg("--http-tls-cert").arg(&certificate);
        command.arg("--http-tls-key").arg(&key);
        let log = dir.path().join("log");
        let (daemon, notify) =
            start_logging_to(dir.path(), &mut command, File::create(&log).unwrap());
        Self {
            dir,
            address,
            log,
            daemon,
            notify,
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A connection of a client that trusts `made` alone; its handshake comes with the first bytes.
    fn tls(&self, made: &Made) -> StreamOwned<ClientConnection, TcpStream> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from(made.certificate.clone()))
            .unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("localhost").unwrap();
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        StreamOwned::new(connection, self.connect())
    }

    fn stop(mut self) {
        self.daemon.signal(Signal::SIGTERM);
        assert_eq!(self.daemon.wait(), Some(0));
    }
}

/// The status of a request on a connection that stays open.
fn get(stream: &mut (impl Read + Write), path: &str, token: &str) -> std::io::Result<u16> {
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
    )?;
    let mut text = String::new();
    let mut bytes = [0; 4096];
    loop {
        let n = again(|| stream.read(&mut bytes))?;
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        text.push_str(&String::from_utf8_lossy(&bytes[..n]));
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let head = head.to_lowercase();
            let (_, length) = head.split_once("content-length: ").unwrap();
            let length: usize = length.lines().next().unwrap().parse().unwrap();
            if body.len() >= length {
                return Ok(head.split(' ').nth(1).unwrap().parse().unwrap());
            }
        }
    }
}

/// Whether the other end closes, with or without a last word.
fn is_closed(stream: &mut TcpStream) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match again(|| stream.read(&mut bytes)) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn a_client_that_trusts_the_certificate_is_served_and_others_are_not() {
    let (made, foreign) = (Made::new(), Made::new());
    let served = Served::start(&made);
    let mut stream = served.tls(&made);
    assert_eq!(get(&mut stream, "/health", "").unwrap(), 200);
    assert_eq!(get(&mut stream, "/v1/models", TOKEN).unwrap(), 200);
    assert_eq!(get(&mut stream, "/v1/models", "no-token").unwrap(), 401);

    let error = get(&mut served.tls(&foreign), "/health", "").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    logged(&served.log, &["no TLS handshake", "alert"]);

    // In the clear nothing is said but that.
    let mut clear = served.connect();
    let request =
        format!("GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n\r\n");
    clear.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    clear.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.ends_with("use https:// here\n"), "{answer}");

    // Neither HTTP nor TLS.
    let mut odd = served.connect();
    odd.write_all(&[0; 64]).unwrap();
    assert!(is_closed(&mut odd));
    assert_eq!(get(&mut served.tls(&made), "/health", "").unwrap(), 200);
    served.stop();
}

#[test]
fn pythons_own_client_is_served() {
    let made = Made::new();
    let served = Served::start(&made);
    let script = "import ssl, sys, urllib.request as u\n\
        context = ssl.create_default_context(cafile=sys.argv[1])\n\
        request = u.Request(sys.argv[2], headers={'authorization': 'Bearer ' + sys.argv[3]})\n\
        answer = u.urlopen(request, context=context)\n\
        print(answer.status, answer.read().decode())";
    let url = format!("https://{}/v1/models", served.address);
    let ran = Command::new("python3")
        .args(["-c", script])
        .arg(served.dir.path().join("cert.pem"))
        .args([&url, TOKEN])
        .output();
    match ran {
        Ok(ran) => {
            let error = String::from_utf8_lossy(&ran.stderr);
            assert!(ran.stdout.starts_with(b"200 {"), "{error}");
        }
        Err(error) => println!("skipped: python3: {error}"),
    }
    served.stop();
}

#[test]
fn a_handshake_that_does_not_end_is_closed_and_keeps_nobody_out() {
    let made = Made::new();
    let served = Served::start(&made);
    // One says nothing, one begins and goes no further.
    let (mut silent, mut begun) = (served.connect(), served.connect());
    begun.write_all(&[22, 3, 1, 1, 0, 1, 0, 0]).unwrap();
    assert!(is_closed(&mut silent));
    assert!(is_closed(&mut begun));
    logged(&served.log, &["no TLS handshake", "timed out"]);

    // More of them than there are places: the oldest go, and who shakes hands is served.
    let mut all: Vec<_> = (0..MANY).map(|_| served.connect()).collect();
    assert_eq!(get(&mut served.tls(&made), "/health", "").unwrap(), 200);
    logged(&served.log, &["no TLS handshake", "aborted"]);
    assert!(is_closed(&mut all[0]));
    served.stop();
}

#[test]
fn a_reload_takes_a_new_certificate_and_leaves_open_connections() {
    let (first, second) = (Made::new(), Made::new());
    let served = Served::start(&first);
    let mut open = served.tls(&first);
    assert_eq!(get(&mut open, "/health", "").unwrap(), 200);

    second.write(served.dir.path());
    reload(&served.daemon, &served.notify);
    logged(&served.log, &["reloaded", "setting=\"http_tls_cert\""]);
    assert_eq!(get(&mut served.tls(&second), "/health", "").unwrap(), 200);
    assert!(get(&mut served.tls(&first), "/health", "").is_err());
    assert_eq!(get(&mut open, "/health", "").unwrap(), 200);

    // Half of a change: the certificate of one and the key of another.
    let certificate = served.dir.path().join("cert.pem");
    let whole = std::fs::read(&certificate).unwrap();
    swap(served.dir.path(), &first);
    reload(&served.daemon, &served.notify);
    let line = logged(&served.log, &["nothing was reloaded"]);
    assert!(line.contains("is not the key of"), "{line}");
    assert_eq!(get(&mut served.tls(&second), "/health", "").unwrap(), 200);
    std::fs::write(certificate, whole).unwrap();
    served.stop();
}

/// Replaces the certificate in `dir` by another's, and leaves the key.
fn swap(dir: &Path, other: &Made) {
    let elsewhere = tempfile::tempdir().unwrap();
    let (certificate, _) = other.write(elsewhere.path());
    std::fs::copy(certificate, dir.join("cert.pem")).unwrap();
}

/// It was served without a word, and clients refuse it.
#[test]
fn a_certificate_that_is_not_valid_now_is_told_at_the_start_by_a_check_and_by_a_reload() {
    for (from, to, words) in [
        (
            "200101000000Z",
            "240229120000Z",
            "expired on 2024-02-29T12:00:00Z",
        ),
        (
            "480101000000Z",
            "491231235959Z",
            "valid only from 2048-01-01T00:00:00Z on",
        ),
    ] {
        let served = Served::start(&Made::valid(from, to));
        let told = |log: &str| log.matches(words).count();
        assert_eq!(told(&logged(&served.log, &[words])), 1);
        reload(&served.daemon, &served.notify);
        // The log has a thread of its own, which may be behind.
        let give_up = Instant::now() + PATIENCE;
        loop {
            let log = std::fs::read_to_string(&served.log).unwrap();
            if told(&log) == 2 {
                break;
            }
            assert!(Instant::now() < give_up, "{log}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut check = host(served.dir.path(), &served.dir.path().join("other"));
        check
            .arg("--check-config")
            .args(["--http-listen", "127.0.0.1:0"]);
        for (flag, file) in [
            ("--http-token-file", "token"),
            ("--http-tls-cert", "cert.pem"),
            ("--http-tls-key", "key.pem"),
        ] {
            check.arg(flag).arg(served.dir.path().join(file));
        }
        let output = check.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && told(&said) == 1, "{said}");
        served.stop();
    }
}
