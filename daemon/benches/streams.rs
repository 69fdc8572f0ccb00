//! What a streamed token costs the daemon beside computing it: CPU time, and how often threads
//! wake, over HTTP and over gRPC, one stream at a time and several at once.
//!
//! ```text
//! cargo bench -p rocmforged --bench streams
//! ```
//!
//! The client is this process and the daemon another, whose threads' times the kernel counts: of
//! all threads but `engine` and `host-N`, which compute. So what the engine's thread spends to hand
//! a token over and to wake who takes it is not in the figure; what a request costs beside its
//! tokens is. Beside it stands what the machine takes for the least that a token can cost, a thread
//! that is woken, writes to a socket and sleeps again. The model is the smallest of the fixtures,
//! so that tokens come as fast as they ever will. Both ways are measured in turn, round by round,
//! so that what else the machine does meets both. Bounds of the design: 40 us over HTTP, 20 over
//! gRPC. Figures are printed and never asserted.

#![expect(clippy::unwrap_used, reason = "a measurement that fails says where")]

use std::collections::HashMap;
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
/// What names of threads that compute begin with.
const COMPUTING: [&str; 2] = ["engine", "host-"];

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

    /// What each of its threads that do not compute has used.
    fn threads(&self) -> HashMap<PathBuf, Used> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let of_thread = |task: PathBuf| Some((task.clone(), Used::of_thread(&task)?));
        tasks
            .filter_map(|task| of_thread(task.unwrap().path()))
            .collect()
    }
}

/// What a thread has used since it began.
#[derive(Default, Clone, Copy)]
struct Used {
    ns: u64,
    /// How often it went to sleep.
    sleeps: u64,
}

impl Used {
    /// Nothing for a thread that computes, or that ends just now.
    fn of_thread(task: &Path) -> Option<Used> {
        let comm = fs::read_to_string(task.join("comm")).ok()?;
        if COMPUTING.iter().any(|name| comm.starts_with(name)) {
            return None;
        }
        let stat = fs::read_to_string(task.join("schedstat")).ok()?;
        let status = fs::read_to_string(task.join("status")).ok()?;
        let (_, sleeps) = status.split_once("\nvoluntary_ctxt_switches:")?;
        Some(Used {
            ns: stat.split_whitespace().next()?.parse().ok()?,
            sleeps: sleeps.lines().next()?.trim().parse().ok()?,
        })
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

/// Microseconds of CPU of a thread that is woken and writes a token's bytes to a sleeping reader,
/// as often a second as tokens come.
fn least() -> f64 {
    const TIMES: usize = 500;
    const PAUSE: Duration = Duration::from_micros(600);
    let (mut waker, mut woken) = UnixStream::pair().unwrap();
    let (mut writer, mut reader) = UnixStream::pair().unwrap();
    let own_ns = || {
        let stat = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        stat.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    std::thread::scope(|scope| {
        let measured = scope.spawn(move || {
            let before = own_ns();
            for _ in 0..TIMES {
                woken.read_exact(&mut [0]).unwrap();
                writer.write_all(&[0; 48]).unwrap();
            }
            (own_ns() - before) as f64 / 1e3 / TIMES as f64
        });
        scope.spawn(move || while reader.read(&mut [0; 64]).unwrap() > 0 {});
        for _ in 0..TIMES {
            let begun = Instant::now();
            // As the engine, which computes meanwhile.
            while begun.elapsed() < PAUSE {
                std::hint::spin_loop();
            }
            waker.write_all(&[0]).unwrap();
        }
        measured.join().unwrap()
    })
}

/// A round: what a token cost, and how fast tokens came.
struct Round {
    us: f64,
    sleeps: f64,
    speed: f64,
}

fn round(daemon: &Daemon, run: &mut dyn FnMut() -> u64) -> Round {
    let (before, begun) = (daemon.threads(), Instant::now());
    let tokens = run() as f64;
    let took = begun.elapsed().as_secs_f64();
    let (mut ns, mut sleeps) = (0, 0);
    for (task, after) in daemon.threads() {
        let before = before.get(&task).copied().unwrap_or_default();
        ns += after.ns - before.ns;
        sleeps += after.sleeps - before.sleeps;
    }
    Round {
        us: ns as f64 / 1e3 / tokens,
        sleeps: sleeps as f64 / tokens,
        speed: tokens / took,
    }
}

fn print(what: &str, mut rounds: Vec<Round>) {
    rounds.sort_by(|a, b| a.us.total_cmp(&b.us));
    let (least, most) = (rounds[0].us, rounds[ROUNDS - 1].us);
    let Round { us, sleeps, speed } = rounds[ROUNDS / 2];
    println!(
        "{what:20} {us:6.1} us of CPU a streamed token ({least:.1} to {most:.1}), {sleeps:.2} sleeps, {speed:.0} tokens/s"
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
        let mut http = || {
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
        };
        let mut grpc = || {
            runtime.block_on(async {
                let mut tokens = 0;
                for first in (0..REQUESTS).step_by(at_once) {
                    let batch = (first..first + at_once).map(|i| over_grpc(channel.clone(), i));
                    let all = futures_util::future::join_all(batch).await;
                    tokens += all.iter().sum::<u64>();
                }
                tokens
            })
        };
        let (mut of_http, mut of_grpc) = (Vec::new(), Vec::new());
        let mut floor = Vec::new();
        for _ in 0..ROUNDS {
            floor.push(least());
            of_http.push(round(&daemon, &mut http));
            of_grpc.push(round(&daemon, &mut grpc));
        }
        floor.sort_by(f64::total_cmp);
        println!(
            "a wake and a write   {:6.1} us of CPU ({:.1} to {:.1})",
            floor[ROUNDS / 2],
            floor[0],
            floor[ROUNDS - 1]
        );
        print(&format!("HTTP, {at_once} at a time"), of_http);
        print(&format!("gRPC, {at_once} at a time"), of_grpc);
    }
}
