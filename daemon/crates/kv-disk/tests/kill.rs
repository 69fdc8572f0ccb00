//! Processes that are killed while they write.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_kv_disk::{OpenError, Options, Store};

use crate::files::{get, key, payload, put, ready};

/// Has the directory where the process is to write until it is killed.
const DIRECTORY: &str = "KV_DISK_TEST_DIRECTORY";

const BUDGET: u64 = 1 << 20;

/// Entries that a process may have written.
const ENTRIES: u64 = 20_000;

fn open(path: &Path) -> Store {
    let options = Options {
        write_bytes_per_s: u64::MAX,
        ..Options::new(BUDGET)
    };
    ready(Store::open(path, options).unwrap())
}

/// Not a test: what the killed process does.
#[test]
fn writes_until_it_is_killed() {
    let Some(path) = std::env::var_os(DIRECTORY) else {
        return;
    };
    let store = open(&PathBuf::from(path));
    println!("\nopen");
    let from = store.status().bytes % 1000;
    for n in (from..ENTRIES).cycle() {
        put(&store, n);
    }
}

#[test]
fn after_kill_9_nothing_wrong_is_returned_and_the_budget_holds() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    let mut rng = StdRng::seed_from_u64(9);
    let mut right = 0;
    for round in 0..30 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["kill::writes_until_it_is_killed", "--exact", "--nocapture"])
            .env(DIRECTORY, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let opened = lines.map_while(Result::ok).any(|line| line == "open");
        assert!(opened, "round {round}: the store does not open");
        let other = Store::open(&path, Options::new(BUDGET));
        assert!(matches!(other, Err(OpenError::InUse(_))));
        std::thread::sleep(Duration::from_micros(rng.random_range(0..40_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let store = open(&path);
        let status = store.status();
        assert!(status.bytes <= BUDGET, "{status:?}");
        assert_eq!(status.skipped.damaged + status.skipped.foreign, 0);
        let there = (0..ENTRIES).filter(|&n| store.touch(&key(n)));
        for n in there.collect::<Vec<_>>() {
            assert_eq!(get(&store, n), Some(payload(n)), "round {round}");
            right += 1;
        }
    }
    assert!(right > 1000, "{right} entries were there");
}
