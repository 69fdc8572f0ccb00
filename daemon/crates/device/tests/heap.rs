//! Pages of freed pieces go back to the system. By itself, since it looks at the memory of the
//! whole process.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]
#![cfg(target_env = "gnu")]

use std::time::{Duration, Instant};

use rocmforge_device::give_back_heap_soon;

const BYTES: u64 = 64 << 20;

/// Anonymous memory that this process has.
fn anonymous_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    let kib: u64 = line
        .unwrap()
        .trim()
        .strip_suffix(" kB")
        .unwrap()
        .parse()
        .unwrap();
    kib << 10
}

#[test]
fn pages_of_freed_pieces_go_back() {
    let pieces: Vec<Box<[u8; 256]>> = (0..BYTES / 256).map(|_| Box::new([1; 256])).collect();
    let full = anonymous_bytes();
    // The one at the end keeps the allocator from seeing that all before it are free.
    let last = pieces.into_iter().next_back();
    assert!(
        anonymous_bytes() + BYTES / 2 > full,
        "the allocator keeps them"
    );
    // Many ask at once: it is done for all of them.
    (0..100).for_each(|_| give_back_heap_soon());
    let begin = Instant::now();
    while anonymous_bytes() + BYTES * 3 / 4 > full {
        assert!(begin.elapsed() < Duration::from_secs(60), "they stay");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(last);
}
