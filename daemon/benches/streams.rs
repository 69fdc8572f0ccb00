//! What a streamed token costs the daemon beside computing it: CPU time of the threads that speak to
//! clients, over HTTP and over gRPC, one stream at a time and several at once.
//!
//! ```text
//! cargo bench -p rocmforged --bench streams
//! ```
//!
//! The client is this process and the daemon another, whose threads' times the kernel counts. The
//! model is the smallest of the fixtures, so that tokens come as fast as they ever will. Bounds of
//! the design: 40 us over HTTP, 20 over gRPC. Figures are printed and never asserted.

#![expect(clippy::unwrap_used, reason = "a measurement that fails says where")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use rocmforge_proto::v1;
use rocmforge_proto::v1::generate_event::Event;
use rocmforge_proto::v1::inference_client::InferenceClient;
use tonic::transport::{Channel, Endpoint};

const MODEL: &str = "tiny-llama-Q4_K_M";
/// Requests of each measurement, in turn or at once.
const REQUESTS: usize = 16;
/// Repetitions, of which the median is printed.
const ROUNDS: usize = 5;
/// Threads that speak to clients; the others compute.
const THREADS: &str = "rpc";

struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Daemon {
    fn start() -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let child = Command::new(env!("CARGO_BIN_EXE_rocmforged"))
            .args([
                "--device",
                "host",
                "--threads",
                "1",
                "--vram-budget",
                "64MiB",
            ])
            .args(["--log", "warn", "--speculate", "off"])
            .arg("--model-dir")
            .arg(fixtures)
            .arg("--socket")
            .arg(dir.path().join("s"))
            .arg("--http-socket")
            .arg(dir.path().join("h"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let daemon = Daemon { child, dir };
        let give_up = Instant::now() + Duration::from_secs(60);
        while UnixStream::connect(daemon.http()).is_err() {
            assert!(Instant::now() < give_up, "it does not serve");
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon
    }

    fn http(&self) -> PathBuf {
        self.dir.path().join("h")
    }

    /// Nanoseconds that its threads of this name have run.
    fn cpu_ns(&self) -> u64 {
        let tasks = format!("/proc/{}/task", self.child.id());
        let of_thread = |task: fs::DirEntry| {
            let comm = fs::read_to_string(task.path().join("comm")).ok()?;
            let stat = fs::read_to_string(task.path().join("schedstat")).ok()?;
            let ns: u64 = stat.split_whitespace().next()?.parse().ok()?;
            Some(if comm.trim() == THREADS { ns } else { 0 })
        };
        fs::read_dir(tasks)
            .unwrap()
            .filter_map(|task| of_thread(task.ok()?))
            .sum()
    }
}

/// A chat over HTTP to its end; the tokens of its answer.
fn over_http(socket: &Path, seed: usize) -> u64 {
    let body = format!(
        r#"{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Once"}}], "temperature": 1000, "top_k": 0,
            "top_p": 1, "min_p": 0, "seed": {seed}, "stream": true, "stream_options": {{"include_usage": true}}}}"#
    );
    let mut stream = UnixStream::connect(socket).unwrap();
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut tokens = 0;
    let mut lines = BufReader::with_capacity(64 << 10, stream);
    let mut line = String::new();
    while lines.read_line(&mut line).unwrap() > 0 {
        if let Some((_, rest)) = line.split_once("\"completion_tokens\":") {
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap();
            tokens = digits.parse().unwrap();
        }
        line.clear();
    }
    let mut rest = Vec::new();
    lines.read_to_end(&mut rest).unwrap();
    assert!(tokens > 0, "no answer");
    tokens
}

/// The same over gRPC.
async fn over_grpc(channel: Channel, seed: usize) -> u64 {
    let request = v1::ChatRequest {
        model: MODEL.to_owned(),
        messages: vec![v1::ChatMessage {
            role: "user".to_owned(),
            content: "Once".to_owned(),
            ..Default::default()
        }],
        sampling: Some(v1::SamplingParams {
            temperature: Some(1000.0),
            top_k: Some(0),
            top_p: Some(1.0),
            min_p: Some(0.0),
            seed: Some(seed as u64),
            ..Default::default()
        }),
        ..Default::default()
    };
    let answer = InferenceClient::new(channel).chat(request).await;
    let mut events = answer.unwrap().into_inner();
    let mut tokens = 0;
    while let Some(event) = events.message().await.unwrap() {
        if let Some(Event::Done(done)) = event.event {
            tokens = u64::from(done.generated_tokens);
        }
    }
    tokens
}

fn measure(daemon: &Daemon, what: &str, mut run: impl FnMut() -> u64) {
    run();
    let mut rounds: Vec<(f64, f64)> = (0..ROUNDS)
        .map(|_| {
            let (before, begun) = (daemon.cpu_ns(), Instant::now());
            let tokens = run() as f64;
            let took = begun.elapsed().as_secs_f64();
            let us = (daemon.cpu_ns() - before) as f64 / 1e3;
            (us / tokens, tokens / took)
        })
        .collect();
    rounds.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (least, most) = (rounds[0].0, rounds[ROUNDS - 1].0);
    let (us, speed) = rounds[ROUNDS / 2];
    println!(
        "{what:32} {us:6.1} us of CPU a streamed token ({least:.1} to {most:.1}), {speed:.0} tokens/s"
    );
}

fn main() {
    let daemon = Daemon::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let socket = daemon.dir.path().join("s");
    let channel = runtime.block_on(async {
        let connector = tower::service_fn(move |_| {
            let path = socket.clone();
            async move {
                tokio::net::UnixStream::connect(path)
                    .await
                    .map(TokioIo::new)
            }
        });
        let endpoint = Endpoint::from_static("http://rocmforged");
        endpoint.connect_with_connector(connector).await.unwrap()
    });
    let http = daemon.http();
    // Loads the model.
    over_http(&http, 0);
    for at_once in [1, REQUESTS] {
        measure(&daemon, &format!("HTTP, {at_once} at a time"), || {
            let seeds: Vec<usize> = (0..REQUESTS).collect();
            let batch = |seeds: &[usize]| -> u64 {
                std::thread::scope(|scope| {
                    let one = |&seed: &usize| {
                        let http = &http;
                        scope.spawn(move || over_http(http, seed))
                    };
                    let all: Vec<_> = seeds.iter().map(one).collect();
                    all.into_iter().map(|one| one.join().unwrap()).sum()
                })
            };
            seeds.chunks(at_once).map(batch).sum()
        });
        measure(&daemon, &format!("gRPC, {at_once} at a time"), || {
            runtime.block_on(async {
                let mut tokens = 0;
                for first in (0..REQUESTS).step_by(at_once) {
                    let batch = (first..first + at_once).map(|i| over_grpc(channel.clone(), i));
                    let all = futures_util::future::join_all(batch).await;
                    tokens += all.iter().sum::<u64>();
                }
                tokens
            })
        });
    }
}
