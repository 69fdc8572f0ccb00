//! A daemon that is killed at any moment under load, on a disk that is nearly full, that fails now
//! and then, or that is full: each one starts, no text is another one, and the store keeps to its
//! budget.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rocmforge_client::Client;
use rocmforge_test_scripts::is_whole_sweep;
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::{self, TINY_LLAMA};
use rocmforge_tests::session::{connect, continuation, generate, greedy, load};

const BUDGET: u64 = 64 << 20;
const MODELS: [&str; 2] = [TINY_LLAMA, "tiny-qwen3-Q8_0.gguf"];
const ROUNDS: u64 = 12;
const ROUNDS_ALL: u64 = 200;
/// What is free on a disk that is nearly full.
const NEARLY: u64 = 100 << 10;

/// Numbers that are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, most: u64) -> u64 {
        let Self(state) = self;
        *state = state
            .wrapping_mul(0x5851_F42D_4C95_7F2D)
            .wrapping_add(0x1405_7B7E_F767_814F);
        (*state >> 33) % most
    }
}

/// Builds the library that stands in for the disk.
fn bad_disk(dir: &Path) -> PathBuf {
    let library = dir.join("bad_disk.so");
    let source = fixtures::workspace().join("tests/tests/e2e/bad_disk.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .output()
        .expect("a C compiler: it also links what is tested here");
    let told = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{told}");
    library
}

fn bytes_below(store: &Path) -> u64 {
    let files = fs::read_dir(store).into_iter().flatten().flatten();
    let sizes = files.filter_map(|file| file.metadata().ok().map(|m| m.len()));
    sizes.sum()
}

/// Prompts of both models, of which many begin alike, and their texts without any cache.
#[derive(Debug)]
struct Asked {
    model: &'static str,
    prompt: String,
    expected: Vec<u32>,
}

async fn ids(client: &Client, model: &str, prompt: &str) -> Result<(Vec<u32>, u32), String> {
    let request = continuation(model, prompt, greedy(12));
    let answer = generate(client, request).await;
    let answer = answer.map_err(|error| error.to_string())?;
    Ok((answer.ids, answer.done.reused_tokens))
}

async fn expected() -> Vec<Asked> {
    let daemon = Daemon::start(&Options::default().arg("--prefix-cache").arg("off"));
    let client = connect(&daemon).await;
    let stories = fixtures::stories().join("\n");
    let mut asked = Vec::new();
    for model in MODELS {
        load(&client, model).await;
        for (story, length) in (0..5).flat_map(|story| [300, 700, 1200, 1500].map(|n| (story, n))) {
            let prompt: String = stories.chars().skip(story * 900).take(length).collect();
            let (expected, _) = ids(&client, model, &prompt).await.expect("a text");
            asked.push(Asked {
                model,
                prompt,
                expected,
            });
        }
    }
    daemon.stop();
    asked
}

/// What came of all requests.
#[derive(Debug, Default)]
struct Came {
    texts: AtomicU64,
    /// Tokens of their prompts that were there.
    reused: AtomicU64,
}

/// Asks for one after another until the daemon is killed: no request fails before.
async fn ask_on(
    (client, killed): (Arc<Client>, Arc<AtomicBool>),
    asked: Arc<Vec<Asked>>,
    mut at: usize,
    came: Arc<Came>,
) {
    loop {
        let this = &asked[at % asked.len()];
        let (found, cached) = match ids(&client, this.model, &this.prompt).await {
            Ok(found) => found,
            Err(_) if killed.load(Ordering::Acquire) => return,
            Err(error) => panic!("{error}: {:?}", this.prompt),
        };
        assert_eq!(found, this.expected, "{:?}", this.prompt);
        came.texts.fetch_add(1, Ordering::Relaxed);
        came.reused.fetch_add(u64::from(cached), Ordering::Relaxed);
        at += 7;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_is_killed_on_a_bad_disk_starts_again_and_serves_nothing_wrong() {
    let rounds = match is_whole_sweep("most of 200 kills on bad disks") {
        true => ROUNDS_ALL,
        false => ROUNDS,
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let library = bad_disk(dir.path());
    // As the kernel writes it in the links that the library reads.
    let store = dir.path().canonicalize().expect("it is there").join("kv");
    let asked = Arc::new(expected().await);
    let mut numbers = Numbers(39);
    let came = Arc::new(Came::default());
    let mut failures = 0;
    for round in 0..rounds {
        let plain = |path: &Path| path.to_str().expect("plain characters").to_owned();
        if round % 4 == 0 {
            // There is something to write again.
            let _ = fs::remove_dir_all(&store);
        }
        let (most, every) = match round % 4 {
            0 => (0, 50),
            1 => (bytes_below(&store) + NEARLY, 0),
            2 => (1, 0),
            _ => (0, 0),
        };
        let options = Options::default()
            .arg("--kv-disk")
            .arg(&plain(&store))
            .arg("--kv-disk-budget")
            .arg(&BUDGET.to_string())
            .env("LD_PRELOAD", &library)
            .env("BAD_DISK_DIR", &store)
            .env("BAD_DISK_BYTES", most.to_string())
            .env("BAD_DISK_EIO_EVERY", every.to_string());
        if round % 5 == 4 {
            // Also while it starts.
            let daemon = Daemon::begin(&options);
            tokio::time::sleep(Duration::from_millis(numbers.below(300))).await;
            drop(daemon);
        }
        let daemon = Daemon::start(&options);
        let client = Arc::new(connect(&daemon).await);
        let killed = Arc::new(AtomicBool::new(false));
        for model in MODELS {
            load(&client, model).await;
        }
        let askers = (0..4).map(|n| {
            let at = numbers.below(40) as usize + n;
            let daemon = (Arc::clone(&client), Arc::clone(&killed));
            tokio::spawn(ask_on(daemon, Arc::clone(&asked), at, Arc::clone(&came)))
        });
        let askers: Vec<_> = askers.collect();
        tokio::time::sleep(Duration::from_millis(numbers.below(900))).await;
        let stats = client.cache_stats().await.expect("it serves");
        let disk = stats.kv_disk.expect("there is a KV cache on disk");
        failures += disk.write_errors;
        killed.store(true, Ordering::Release);
        // SIGKILL.
        drop(daemon);
        for asker in askers {
            // Whoever waits for a connection is not waited for.
            asker.abort();
            match asker.await {
                Err(error) if error.is_panic() => panic!("round {round}: {error}"),
                _ => {}
            }
        }
        let after = bytes_below(&store);
        assert!(after <= BUDGET, "round {round}: {after} bytes");
        if most > 1 {
            assert!(after <= most, "round {round}: {after} bytes of {most}");
        }
    }
    let (texts, reused) = (&came.texts, &came.reused);
    let (texts, reused) = (
        texts.load(Ordering::Relaxed),
        reused.load(Ordering::Relaxed),
    );
    println!("{rounds} kills: {texts} texts, {reused} tokens reused, {failures} writes failed");
    assert!(texts > rounds && reused > 0 && failures > 0);
}
