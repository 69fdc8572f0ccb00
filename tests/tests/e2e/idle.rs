//! A daemon that has nothing to do: it makes no call of its driver, and its threads sleep, so that
//! card and processor reach their idle clocks.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rocmforge_client::Client;
use rocmforge_fake_hip::Fake;
use rocmforge_tests::daemon::{Daemon, Options, PATIENCE};
use rocmforge_tests::fixtures::TINY_LLAMA;
use rocmforge_tests::session::{connect, continuation, generate, greedy, load, noise};

/// How long a daemon is watched.
const WATCHED: Duration = Duration::from_secs(4);

/// Times that a thread gave its core away by itself while the daemon is watched: a few looks of the
/// watchdogs a second, and room. A thread that looks every 20 ms makes 200.
const SWITCHES_MAX: u64 = 80;

/// Ticks of processor time meanwhile, of 10 ms: a thread that spins takes 400.
const TICKS_MAX: u64 = 20;

/// What a process has done.
#[derive(Debug, Clone, Copy)]
struct Done {
    /// Times that its threads went to sleep.
    switches: u64,
    /// Processor time in ticks of 10 ms.
    ticks: u64,
    /// Calls of the driver.
    calls: u64,
}

/// What a daemon has done so far; a thread that has ended takes its switches along.
fn done(daemon: &Daemon, calls: &Path) -> Done {
    let process = Path::new("/proc").join(daemon.pid().to_string());
    let tasks = fs::read_dir(process.join("task")).expect("the daemon runs");
    let switches = tasks.map(|task| {
        let status = task.expect("a thread").path().join("status");
        // It may have ended since.
        let status = fs::read_to_string(status).unwrap_or_default();
        let mut lines = status.lines();
        let count = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        count.map_or(0, |count| count.trim().parse().expect("a count"))
    });
    let switches = switches.sum();
    let stat = fs::read_to_string(process.join("stat")).expect("the daemon runs");
    // Behind the name, which may have spaces: state, then fields 4 and on.
    let (_, fields) = stat.rsplit_once(") ").expect("a name in brackets");
    let fields: Vec<&str> = fields.split(' ').collect();
    let ticks = |field: usize| -> u64 { fields[field - 3].parse().expect("ticks") };
    Done {
        switches,
        ticks: ticks(14) + ticks(15),
        calls: count_of_calls(calls).0,
    }
}

/// Calls so far, and the last one.
fn count_of_calls(file: &Path) -> (u64, String) {
    let text = fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    let (count, call) = line.split_once(' ').unwrap_or(("0", "none"));
    (count.parse().expect("a count"), call.to_owned())
}

/// What a daemon does while it is watched.
fn watched(daemon: &Daemon, calls: &Path) -> Done {
    let before = done(daemon, calls);
    std::thread::sleep(WATCHED);
    let after = done(daemon, calls);
    Done {
        switches: after.switches.saturating_sub(before.switches),
        ticks: after.ticks - before.ticks,
        calls: after.calls - before.calls,
    }
}

/// A daemon that has answered, with what is registered and compiled ahead behind it.
async fn has_answered(options: &Options) -> (Daemon, Client) {
    let daemon = Daemon::start(options);
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let request = continuation(TINY_LLAMA, "Once upon a time", greedy(16));
    generate(&client, request).await.expect("a text");
    (daemon, client)
}

/// Watches until the daemon rests: what it does ahead of the next request may take a moment.
fn rests(daemon: &Daemon, calls: &Path) {
    let begun = Instant::now();
    loop {
        let did = watched(daemon, calls);
        if did.switches <= SWITCHES_MAX && did.ticks <= TICKS_MAX && did.calls == 0 {
            println!("at rest in {WATCHED:?}: {did:?}");
            return;
        }
        assert!(
            begun.elapsed() < PATIENCE / 2,
            "it never rests: {did:?} in {WATCHED:?}, the last call is {}",
            count_of_calls(calls).1
        );
    }
}

/// A daemon on a fake card that writes its calls to `calls`.
fn on_card(fake: &Fake, calls: &Path) -> Options {
    Options::on_device("hip")
        .env("ROCMFORGE_HIP_LIBRARY", fake.path())
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("FAKE_HIP_CALLS_FILE", calls)
        .vram_budget(64 << 20)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_daemon_sleeps_and_makes_no_call_of_the_driver() {
    let (fake, dir) = (Fake::new(), tempfile::tempdir().expect("a folder"));
    let calls = dir.path().join("calls");
    let (daemon, client) = has_answered(&on_card(&fake, &calls)).await;
    rests(&daemon, &calls);
    // What is counted is seen: a request of the same daemon is no rest.
    let before = done(&daemon, &calls);
    let request = continuation(TINY_LLAMA, "Once upon a time", noise(400, 7));
    generate(&client, request).await.expect("a text");
    let after = done(&daemon, &calls);
    assert!(after.switches > before.switches + SWITCHES_MAX, "{after:?}");
    assert!(after.calls > before.calls + 400, "{after:?}");
    // And it rests again with the streams of that request gone.
    rests(&daemon, &calls);
    drop(client);
    daemon.stop();
}

/// The one look at a card that there is while nothing is done, and only if it is asked for: what is
/// free of its memory, once a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeping_memory_free_is_all_that_asks_an_idle_card() {
    let (fake, dir) = (Fake::new(), tempfile::tempdir().expect("a folder"));
    let calls = dir.path().join("calls");
    let options = on_card(&fake, &calls).arg("--keep-free").arg("1MiB");
    let (daemon, client) = has_answered(&options).await;
    let begun = Instant::now();
    let did = loop {
        let did = watched(&daemon, &calls);
        if did.calls <= 20 || begun.elapsed() > PATIENCE / 2 {
            break did;
        }
    };
    assert!((1..=20).contains(&did.calls), "{did:?}");
    assert_eq!(count_of_calls(&calls).1, "hipMemGetInfo");
    drop(client);
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_daemon_on_the_host_sleeps() {
    let (daemon, client) = has_answered(&Options::default()).await;
    rests(&daemon, Path::new("/nonexistent"));
    drop(client);
    daemon.stop();
}
