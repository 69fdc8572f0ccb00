//! Others want the card: what a daemon gives back, and takes again when they have left.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rocmforge_client::Client;
use rocmforge_client::proto::v1::StatusResponse;
use rocmforge_fake_hip::Fake;
use rocmforge_tests::binaries;
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::session::{assert_works, connect};

const MIB: u64 = 1 << 20;
const CARD: u64 = 128 * MIB;
const BUDGET: u64 = 64 * MIB;
const KEPT: u64 = 32 * MIB;
/// An eighth of the budget is less than a chunk of the arena.
const FLOOR: u64 = 16 * MIB;
/// Far longer than it takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for a state that passes the test.
async fn until(
    client: &Client,
    what: &str,
    passes: impl Fn(&StatusResponse) -> bool,
) -> StatusResponse {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let status = client.status().await.expect("it serves");
        if passes(&status) {
            return status;
        }
        assert!(Instant::now() < give_up, "never {what}: {status:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Writes at once what other processes hold.
fn others_hold(file: &Path, bytes: u64) {
    let new = file.with_extension("new");
    fs::write(&new, bytes.to_string()).expect("written");
    fs::rename(new, file).expect("put in its place");
}

fn free(status: &StatusResponse) -> u64 {
    let device = status.device.as_ref().and_then(|d| d.memory);
    device.expect("a card has memory").free_bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_goes_back_while_others_want_it_and_is_taken_again_later() {
    let fake = Fake::new();
    let dir = tempfile::tempdir().expect("a directory");
    let others = dir.path().join("others");
    others_hold(&others, 0);
    let options = Options::on_device("hip")
        .env("ROCMFORGE_HIP_LIBRARY", fake.path())
        .env("ROCMFORGE_CUDA_LIBRARY", "/nonexistent/libgpu.so")
        .env("ROCMFORGE_KERNELS", fake.images())
        .env("FAKE_HIP_MEMORY", CARD.to_string())
        .env("FAKE_HIP_OTHERS_FILE", &others)
        .env("ROCMFORGED_KEEP_FREE", "32MiB")
        .vram_budget(BUDGET);
    let daemon = Daemon::start(&options);
    let client = connect(&daemon).await;
    assert_works(&client).await;
    let kept = client.status().await.expect("it serves").keep_free;
    let kept = kept.expect("it is on");
    assert_eq!(
        (kept.bytes, kept.given_up_bytes, kept.shrinks),
        (KEPT, 0, 0)
    );

    // An idle daemon notices within seconds, gives back what is missing, and works in the rest.
    others_hold(&others, 48 * MIB);
    let is_given_up = |s: &StatusResponse| s.keep_free.is_some_and(|k| k.given_up_bytes > 0);
    let status = until(&client, "given back", is_given_up).await;
    assert_eq!(status.budget_bytes, BUDGET - 16 * MIB);
    assert!(free(&status) >= KEPT, "{status:?}");
    assert_works(&client).await;

    // Who takes all that is free gets more, and in the end not all of it.
    others_hold(&others, CARD - (BUDGET - 16 * MIB));
    let at_floor = |s: &StatusResponse| s.budget_bytes == FLOOR;
    until(&client, "at the floor", at_floor).await;
    others_hold(&others, CARD - FLOOR);
    assert_works(&client).await;
    let counted = |s: &StatusResponse| free(s) == 0;
    let status = until(&client, "counted", counted).await;
    assert_eq!(status.budget_bytes, FLOOR);
    assert_works(&client).await;

    // It comes back when they have left, all of it and no more.
    others_hold(&others, 0);
    let is_whole = |s: &StatusResponse| s.budget_bytes == BUDGET;
    let status = until(&client, "taken again", is_whole).await;
    let kept = status.keep_free.expect("it is on");
    assert_eq!(kept.given_up_bytes, 0);
    assert!(kept.shrinks >= 2 && kept.grows >= 1, "{kept:?}");
    assert_works(&client).await;
    let ended = daemon.stop();
    for words in [
        "other processes use the GPU",
        "other processes have left the GPU",
    ] {
        assert!(ended.log.contains(words), "no '{words}' in {}", ended.log);
    }
}

/// Once the budget stayed what was left in the second of the start, and nothing said so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_budget_that_is_cut_at_the_start_grows_to_what_is_configured() {
    let fake = Fake::new();
    let dir = tempfile::tempdir().expect("a directory");
    let others = dir.path().join("others");
    for keep_free in ["0", "8MiB"] {
        others_hold(&others, 96 * MIB);
        let options = Options::on_device("hip")
            .env("ROCMFORGE_HIP_LIBRARY", fake.path())
            .env("ROCMFORGE_CUDA_LIBRARY", "/nonexistent/libgpu.so")
            .env("ROCMFORGE_KERNELS", fake.images())
            .env("FAKE_HIP_MEMORY", CARD.to_string())
            .env("FAKE_HIP_OTHERS_FILE", &others)
            .env("ROCMFORGED_KEEP_FREE", keep_free)
            .vram_budget(BUDGET);
        let daemon = Daemon::start(&options);
        let client = connect(&daemon).await;
        let status = client.status().await.expect("it serves");
        assert!(status.budget_bytes < BUDGET / 2, "{status:?}");
        let kept = status.keep_free.expect("it is told");
        assert!(kept.given_up_bytes >= BUDGET / 2, "{kept:?}");
        let shown = Command::new(binaries::rocmforgectl())
            .arg("--socket")
            .arg(daemon.socket())
            .arg("status")
            .output()
            .expect("it starts");
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(
            shown.contains("memory reduced") && shown.contains("of the 64.0 MiB"),
            "{shown}"
        );

        // A half of it first, then the rest.
        others_hold(&others, 80 * MIB);
        let grows = |s: &StatusResponse| s.budget_bytes > status.budget_bytes;
        until(&client, "grown", grows).await;
        others_hold(&others, 0);
        let is_whole = |s: &StatusResponse| s.budget_bytes == BUDGET;
        until(&client, "whole", is_whole).await;
        assert_works(&client).await;
        let ended = daemon.stop();
        let told = ended.log.matches("no room for a budget").count();
        assert_eq!(told, 1, "{}", ended.log);
    }
}
