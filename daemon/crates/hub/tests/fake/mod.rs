//! A hub and a registry on a socket of this machine, which can be made to fail in many ways.
//!
//! It is a thread for each connection and knows as much of HTTP as a download needs.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "only tests run this, and not every one all of it"
)]

mod faults;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest, Sha256};

pub(crate) use faults::{Fault, ListFault};

/// The commit of every repository.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) target: String,
    pub(crate) headers: BTreeMap<String, String>,
}

#[derive(Debug)]
struct Served {
    bytes: Vec<u8>,
    version: u32,
}

struct State {
    address: SocketAddr,
    files: Mutex<BTreeMap<String, Served>>,
    fault: Mutex<Option<(Fault, u32)>>,
    /// Of files, once a list was asked for.
    listed_fault: Mutex<Option<Fault>>,
    list_fault: Mutex<Option<(ListFault, u32)>>,
    seen: Mutex<Vec<Seen>>,
    /// Where files lie; the hub leads there.
    cdn: Mutex<Option<SocketAddr>>,
    counter: AtomicU64,
    ending: AtomicBool,
}

/// A hub that listens.
pub(crate) struct FakeHub(Arc<State>);

/// Bytes that look like nothing else.
pub(crate) fn bytes(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..n).map(|_| next()).collect()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

impl FakeHub {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let state = Arc::new(State {
            address: listener.local_addr().expect("its address"),
            files: Mutex::default(),
            fault: Mutex::default(),
            listed_fault: Mutex::default(),
            list_fault: Mutex::default(),
            seen: Mutex::default(),
            cdn: Mutex::default(),
            counter: AtomicU64::new(0),
            ending: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.ending.load(Ordering::Relaxed) {
                    return;
                }
                let state = Arc::clone(&shared);
                std::thread::spawn(move || serve(&state, stream));
            }
        });
        FakeHub(state)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.0.address)
    }

    /// Puts a file into a repository.
    pub(crate) fn put(&self, path: &str, bytes: Vec<u8>) {
        let mut files = self.0.files.lock().unwrap();
        let version = files.get(path).map_or(1, |file| file.version + 1);
        files.insert(path.to_owned(), Served { bytes, version });
    }

    /// The next requests for files fail so.
    pub(crate) fn fail(&self, fault: Fault, times: u32) {
        *self.0.fault.lock().unwrap() = Some((fault, times));
    }

    /// The next requests for lists fail so.
    pub(crate) fn fail_lists(&self, fault: ListFault, times: u32) {
        *self.0.list_fault.lock().unwrap() = Some((fault, times));
    }

    /// The first request for a file behind the next request for a list fails so: requests that an
    /// earlier download has left may still come before.
    pub(crate) fn fail_once_listed(&self, fault: Fault) {
        *self.0.fault.lock().unwrap() = None;
        *self.0.listed_fault.lock().unwrap() = Some(fault);
    }

    pub(crate) fn heal(&self) {
        *self.0.listed_fault.lock().unwrap() = None;
        *self.0.fault.lock().unwrap() = None;
        *self.0.list_fault.lock().unwrap() = None;
    }

    /// Leads requests for files to another hub.
    pub(crate) fn lead_to(&self, cdn: &FakeHub) {
        *self.0.cdn.lock().unwrap() = Some(cdn.0.address);
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.0.seen.lock().unwrap().clone()
    }

    pub(crate) fn forget(&self) {
        self.0.seen.lock().unwrap().clear();
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        self.0.ending.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.0.address);
    }
}

fn serve(state: &State, stream: TcpStream) {
    let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
    let mut writer = stream;
    while let Some(seen) = read(&mut reader) {
        state.seen.lock().unwrap().push(seen.clone());
        let answered = match seen.target.split('?').next().unwrap_or_default() {
            target
                if target.contains("/resolve/")
                    || target.contains("/blobs/")
                    || target.starts_with("/plain/") =>
            {
                file(state, &seen, &mut writer)
            }
            target => list(state, target, &seen, &mut writer),
        };
        if answered.is_none() {
            let _ = writer.shutdown(std::net::Shutdown::Both);
            return;
        }
    }
}

fn read(reader: &mut impl BufRead) -> Option<Seen> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
    let target = line.split(' ').nth(1)?.to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers
        .get("content-length")
        .and_then(|n| n.parse::<usize>().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    Some(Seen { target, headers })
}

fn take<F: Clone>(place: &Mutex<Option<(F, u32)>>) -> Option<F> {
    let mut place = place.lock().unwrap();
    let (fault, times) = place.as_mut()?;
    if *times == 0 {
        return None;
    }
    *times -= 1;
    Some(fault.clone())
}

fn send(writer: &mut impl Write, head: &str, body: &[u8]) -> Option<()> {
    writer
        .write_all(format!("{head}\r\n\r\n").as_bytes())
        .ok()?;
    writer.write_all(body).ok()?;
    writer.flush().ok()
}

fn answer(writer: &mut impl Write, status: u16, headers: &str, body: &[u8]) -> Option<()> {
    let length = body.len();
    send(
        writer,
        &format!("HTTP/1.1 {status} X\r\nContent-Length: {length}{headers}"),
        body,
    )
}

fn decoded(target: &str) -> String {
    let mut out = Vec::new();
    let mut rest = target.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first == b'%' {
            let digits = std::str::from_utf8(&after[..2]).unwrap();
            out.push(u8::from_str_radix(digits, 16).unwrap());
            rest = &after[2..];
        } else {
            out.push(*first);
        }
    }
    String::from_utf8(out).unwrap()
}

fn file(state: &State, seen: &Seen, writer: &mut TcpStream) -> Option<()> {
    let path = decoded(seen.target.split('?').next().unwrap_or_default());
    if let Some(cdn) = *state.cdn.lock().unwrap() {
        let to = format!("\r\nLocation: http://{cdn}{}?signature=1", seen.target);
        return answer(writer, 302, &to, b"led");
    }
    let fault = take(&state.fault);
    if let Some(change @ (Fault::Change | Fault::ChangeSilently | Fault::Shrink)) = &fault {
        for served in state.files.lock().unwrap().values_mut() {
            served.bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
            if *change != Fault::ChangeSilently {
                served.version += 1;
            }
            if *change == Fault::Shrink {
                served.bytes.truncate(served.bytes.len() / 2);
            }
        }
    }
    let (bytes, version) = {
        let files = state.files.lock().unwrap();
        let key = match path.split_once("/resolve/") {
            Some((repo, rest)) => {
                let file = rest.split_once('/')?.1;
                format!("{}/{file}", repo.trim_start_matches('/'))
            }
            None if path.starts_with("/plain/") => path["/plain/".len()..].to_owned(),
            None => {
                let digest = path.rsplit("sha256:").next()?;
                let found = files.iter().find(|(_, file)| sha256(&file.bytes) == digest);
                found.map_or(String::new(), |(path, _)| path.clone())
            }
        };
        match files.get(&key) {
            Some(served) => (served.bytes.clone(), served.version),
            None => return answer(writer, 404, "", b"no such file"),
        }
    };
    give(state, seen, writer, fault, bytes, version)
}

#[expect(clippy::too_many_lines, reason = "one arm a fault")]
fn give(
    state: &State,
    seen: &Seen,
    writer: &mut TcpStream,
    fault: Option<Fault>,
    mut bytes: Vec<u8>,
    version: u32,
) -> Option<()> {
    let total = bytes.len() as u64;
    let each = state.counter.fetch_add(1, Ordering::Relaxed);
    let etag = match &fault {
        Some(Fault::NoEtag) => String::new(),
        Some(Fault::EtagEachTime) => format!("\"v{version}-{each}\""),
        Some(Fault::WeakEtag) => format!("W/\"v{version}\""),
        _ => format!("\"v{version}\""),
    };
    let etag_line = if etag.is_empty() {
        String::new()
    } else {
        format!("\r\nETag: {etag}")
    };
    match &fault {
        Some(Fault::CutHead) => return None,
        Some(Fault::Status(status, headers)) => return answer(writer, *status, headers, b"failed"),
        Some(Fault::Lead(to)) => return answer(writer, 302, &format!("\r\nLocation: {to}"), b""),
        Some(Fault::LeadForEver) => {
            return answer(writer, 302, &format!("\r\nLocation: {}", seen.target), b"");
        }
        Some(Fault::StallHead) => {
            std::thread::sleep(Duration::from_secs(3));
            return None;
        }
        Some(Fault::Garbage) => {
            let _ = writer.write_all(b"\x16\x03\x01 this is no HTTP\r\n\r\n");
            return None;
        }
        Some(Fault::EndlessHead) => {
            let _ = writer.write_all(b"HTTP/1.1 200 OK\r\nX: ");
            while writer.write_all(&[b'x'; 4096]).is_ok() {}
            return None;
        }
        Some(Fault::Html) => {
            let page = b"<html>Please log in</html>";
            return answer(writer, 200, "\r\nContent-Type: text/html", page);
        }
        Some(Fault::Empty) => return answer(writer, 200, &etag_line, b""),
        Some(Fault::WrongBit) => {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }
        _ => {}
    }
    let is_fresh = seen
        .headers
        .get("if-range")
        .is_none_or(|known| *known == etag);
    let range = seen.headers.get("range").filter(|_| is_fresh);
    let range = range.and_then(|range| {
        let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?))
    });
    let ignores = matches!(
        fault,
        Some(Fault::IgnoreRange | Fault::IgnoreRangeAndCut(_))
    );
    let (status, mut first, mut end) = match range.filter(|_| !ignores) {
        Some((first, _)) if first >= total => return answer(writer, 416, "", b""),
        Some((first, last)) => (206, first, (last + 1).min(total)),
        None => (200, 0, total),
    };
    let mut said_total = total;
    match &fault {
        Some(Fault::OtherRange(by)) if status == 206 => {
            (first, end) = (
                (first + by) % total,
                ((first + by) % total + end - first).min(total),
            );
        }
        Some(Fault::Longer(by)) => end = (end + *by as u64).min(total),
        Some(Fault::Shorter(by)) => end = end.saturating_sub(*by).max(first + 1),
        Some(Fault::TotalIs(n)) => said_total = *n,
        _ => {}
    }
    let body = &bytes[first as usize..end as usize];
    let mut headers = etag_line;
    if status == 206 {
        match &fault {
            Some(Fault::NoContentRange) => {}
            Some(Fault::OddContentRange(text)) => headers += &format!("\r\nContent-Range: {text}"),
            _ => headers += &format!("\r\nContent-Range: bytes {first}-{}/{said_total}", end - 1),
        }
    }
    match &fault {
        Some(Fault::LinkedEtag(etag)) => headers += &format!("\r\nX-Linked-ETag: \"{etag}\""),
        Some(Fault::Coding(coding)) => headers += &format!("\r\nContent-Encoding: {coding}"),
        _ => {}
    }
    let with_length =
        |length: usize| format!("HTTP/1.1 {status} X\r\nContent-Length: {length}{headers}");
    match fault {
        Some(Fault::CutAfter(n) | Fault::IgnoreRangeAndCut(n)) => {
            send(writer, &with_length(body.len()), &body[..n.min(body.len())])?;
            (n >= body.len()).then_some(())
        }
        Some(Fault::Announces(more)) => {
            send(writer, &with_length(body.len() + more), body)?;
            None
        }
        Some(Fault::AnnouncesLess(less)) => {
            send(writer, &with_length(body.len().saturating_sub(less)), body)?;
            None
        }
        Some(Fault::Chunked | Fault::ChunkedCut) => {
            send(
                writer,
                &format!("HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked{headers}"),
                b"",
            )?;
            let half = body.len() / 2;
            for part in [&body[..half], &body[half..]] {
                writer
                    .write_all(format!("{:x}\r\n", part.len()).as_bytes())
                    .ok()?;
                writer.write_all(part).ok()?;
                writer.write_all(b"\r\n").ok()?;
                if fault == Some(Fault::ChunkedCut) {
                    return None;
                }
            }
            writer.write_all(b"0\r\n\r\n").ok()
        }
        Some(Fault::StallBody) => {
            send(writer, &with_length(body.len()), b"")?;
            std::thread::sleep(Duration::from_secs(3));
            None
        }
        Some(Fault::Drip(n, every)) => {
            send(writer, &with_length(body.len()), b"")?;
            for piece in body.chunks(n) {
                writer.write_all(piece).ok()?;
                std::thread::sleep(Duration::from_millis(every));
            }
            Some(())
        }
        _ => send(writer, &with_length(body.len()), body),
    }
}

fn list(state: &State, target: &str, seen: &Seen, writer: &mut TcpStream) -> Option<()> {
    let fault = take(&state.list_fault);
    match &fault {
        Some(ListFault::Status(status, headers)) => {
            return answer(writer, *status, headers, b"failed");
        }
        Some(ListFault::Text(text)) => return answer(writer, 200, "", text.as_bytes()),
        Some(ListFault::Cut) => {
            send(writer, "HTTP/1.1 200 OK\r\nContent-Length: 1000", b"[{")?;
            return None;
        }
        Some(ListFault::Stall) => {
            std::thread::sleep(Duration::from_secs(3));
            return None;
        }
        Some(ListFault::Lead(to)) => {
            return answer(writer, 302, &format!("\r\nLocation: {to}"), b"");
        }
        _ => {}
    }
    let files = state.files.lock().unwrap();
    if let Some(fault) = state.listed_fault.lock().unwrap().take() {
        *state.fault.lock().unwrap() = Some((fault, 1));
    }
    if let Some(rest) = target.strip_prefix("/api/models/") {
        let repo: Vec<&str> = rest.splitn(3, '/').collect();
        let [owner, name, what] = repo[..] else {
            return answer(writer, 404, "", b"");
        };
        let prefix = format!("{owner}/{name}/");
        let below: Vec<_> = files
            .iter()
            .filter_map(|(path, file)| Some((path.strip_prefix(&prefix)?, file)))
            .collect();
        if below.is_empty() {
            return answer(writer, 404, "", b"{\"error\":\"Repository not found\"}");
        }
        if what.starts_with("revision/") {
            return answer(
                writer,
                200,
                "",
                format!("{{\"sha\":\"{COMMIT}\",\"id\":\"{owner}/{name}\"}}").as_bytes(),
            );
        }
        let (body, next) = tree(&below, fault.as_ref());
        let next = if next {
            format!(
                "\r\nLink: <{}&n={}>; rel=\"next\"",
                seen.target,
                seen.target.len()
            )
        } else {
            String::new()
        };
        return answer(writer, 200, &next, body.as_bytes());
    }
    if let Some(rest) = target.strip_prefix("/v2/") {
        // A registry's model NAMESPACE/MODEL:TAG is the file of that path.
        let (name, tag) = rest.split_once("/manifests/")?;
        let Some(file) = files.get(&format!("{name}:{tag}")) else {
            return answer(
                writer,
                404,
                "",
                b"{\"errors\":[{\"code\":\"MANIFEST_UNKNOWN\"}]}",
            );
        };
        let (digest, size) = (sha256(&file.bytes), file.bytes.len());
        let digest = if fault == Some(ListFault::WrongSha) {
            "0".repeat(64)
        } else {
            digest
        };
        let body = format!(
            "{{\"schemaVersion\":2,\"layers\":[\
             {{\"mediaType\":\"application/vnd.ollama.image.model\",\"digest\":\"sha256:{digest}\",\"size\":{size}}},\
             {{\"mediaType\":\"application/vnd.ollama.image.license\",\"digest\":\"sha256:{digest}\",\"size\":7}}]}}"
        );
        return answer(writer, 200, "", body.as_bytes());
    }
    answer(writer, 404, "", b"no such page")
}

fn tree(files: &[(&str, &Served)], fault: Option<&ListFault>) -> (String, bool) {
    let mut entries = Vec::new();
    for (path, file) in files.iter().filter(|_| fault != Some(&ListFault::Empty)) {
        let mut size = file.bytes.len() as i64;
        let mut sha = sha256(&file.bytes);
        match fault {
            Some(ListFault::SizeOff(by)) => size += by,
            Some(ListFault::WrongSha) => sha = "0".repeat(64),
            Some(ListFault::NoBytes) => size = 0,
            Some(ListFault::Huge) => size = i64::MAX,
            _ => {}
        }
        let lfs = match fault {
            Some(ListFault::NoSha) => String::new(),
            _ => format!(",\"lfs\":{{\"oid\":\"{sha}\",\"size\":{size},\"pointerSize\":134}}"),
        };
        entries.push(format!(
            "{{\"type\":\"file\",\"path\":\"{path}\",\"size\":{size},\"oid\":\"x\"{lfs}}}"
        ));
    }
    if fault == Some(&ListFault::Hostile) {
        for path in [
            "../../evil.gguf",
            "/etc/evil.gguf",
            "a/../evil.gguf",
            ".evil.gguf",
            "a\\u001b[2J.gguf",
        ] {
            entries.push(format!(
                "{{\"type\":\"file\",\"path\":\"{path}\",\"size\":5,\"oid\":\"x\"}}"
            ));
        }
    }
    (
        format!("[{}]", entries.join(",")),
        fault == Some(&ListFault::Endless),
    )
}
