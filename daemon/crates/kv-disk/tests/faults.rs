//! Disks that are full or return errors.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rocmforge_kv_disk::{DirectoryFiles, Options, Store};

use crate::files::{Faults, FaultyFiles, get, payload, put, ready};

fn options(pause: Duration) -> Options {
    Options {
        pause,
        write_bytes_per_s: u64::MAX,
        ..Options::new(1 << 20)
    }
}

fn open(directory: &std::path::Path, faults: &Arc<Faults>, pause: Duration) -> Store {
    let files = FaultyFiles {
        below: DirectoryFiles::open(directory).unwrap(),
        faults: Arc::clone(faults),
    };
    ready(Store::on(Box::new(files), options(pause)).unwrap())
}

#[test]
fn a_full_disk_pauses_writing_and_reading_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    let faults = Arc::new(Faults::default());
    faults.space.store(8000, Ordering::Relaxed);
    let store = open(&path, &faults, Duration::from_secs(3600));
    let mut taken = 0;
    for n in 0..100 {
        taken += u64::from(put(&store, n));
        store.flush();
    }
    let status = store.status();
    assert_eq!(status.write_errors, 1, "nothing more is tried");
    assert!(status.is_paused && status.written > 5 && status.written < 50);
    assert_eq!((taken, status.refused), (status.written + 1, 100 - taken));
    for n in 0..status.written {
        assert_eq!(get(&store, n), Some(payload(n)));
    }
    assert_eq!(get(&store, status.written), None);
    drop(store);
    // What was written half is no record.
    faults.space.store(0, Ordering::Relaxed);
    let store = open(&path, &faults, Duration::ZERO);
    assert_eq!(store.status().entries, status.written);
    assert_eq!(store.status().skipped.all(), 0);
    assert!(put(&store, 200));
    store.flush();
    assert_eq!(get(&store, 200), Some(payload(200)));
}

#[test]
fn bad_writes_lose_their_entries_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    let faults = Arc::new(Faults::default());
    faults.bad_write.store(50, Ordering::Relaxed);
    let store = open(&path, &faults, Duration::ZERO);
    for n in 0..500 {
        assert!(put(&store, n));
    }
    store.flush();
    let status = store.status();
    assert!(status.write_errors >= 15, "{status:?}");
    let check = |store: &Store| {
        let found = (0..500).filter_map(|n| get(store, n).map(|found| (n, found)));
        let right = found
            .map(|(n, found)| assert_eq!(found, payload(n)))
            .count();
        assert_eq!(right as u64, status.written);
        assert_eq!(right as u64 + status.write_errors, 500);
    };
    check(&store);
    drop(store);
    faults.bad_write.store(0, Ordering::Relaxed);
    let store = open(&path, &faults, Duration::ZERO);
    check(&store);
}

#[test]
fn a_bad_read_loses_its_entry_and_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let faults = Arc::new(Faults::default());
    let store = open(&directory.path().join("kv"), &faults, Duration::ZERO);
    (0..20).for_each(|n| assert!(put(&store, n)));
    store.flush();
    faults.bad_read.store(7, Ordering::Relaxed);
    let missing: Vec<u64> = (0..20).filter(|&n| get(&store, n).is_none()).collect();
    assert!(!missing.is_empty());
    assert_eq!(store.status().read_errors, missing.len() as u64);
    faults.bad_read.store(0, Ordering::Relaxed);
    for n in 0..20 {
        let expected = (!missing.contains(&n)).then(|| payload(n));
        assert_eq!(get(&store, n), expected);
    }
}
