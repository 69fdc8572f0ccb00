//! What a store keeps, deletes and refuses.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rocmforge_kv_disk::{Key, Kind, ModelTag, NOTE_MAX, Next, OpenError, Options, Store};

use crate::files::{Contents, MODEL, get, key, over, payload, put, ready};

fn fast(budget: u64) -> Options {
    Options {
        write_bytes_per_s: u64::MAX,
        ..Options::new(budget)
    }
}

fn bytes_below(path: &Path) -> u64 {
    let files = path.read_dir().unwrap().flatten();
    files.map(|file| file.metadata().unwrap().len()).sum()
}

#[test]
fn entries_are_there_after_the_store_is_opened_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    for from in [0, 50] {
        let store = ready(Store::open(&path, fast(1 << 20)).unwrap());
        assert_eq!(store.status().entries, from);
        (from..from + 50).for_each(|n| assert!(put(&store, n)));
        // What waits to be written is there, too.
        assert_eq!(get(&store, from + 49), Some(payload(from + 49)));
    }
    let store = ready(Store::open(&path, fast(1 << 20)).unwrap());
    let mut fetch = store.fetch((0..100).map(key).collect()).unwrap();
    for n in 0..100 {
        loop {
            match fetch.poll() {
                Next::Pending => std::thread::yield_now(),
                found => break assert_eq!(found, Next::Entry(payload(n))),
            }
        }
    }
    assert_eq!(fetch.poll(), Next::Done);
    assert_eq!(store.status().segments, 1, "segments go on");
    assert_eq!(store.status().read, 100);
}

#[test]
fn a_note_is_there_for_the_next_owner_and_is_no_foreign_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kv");
    let store = Store::open(&path, fast(1 << 20)).unwrap();
    assert_eq!(store.note(), None);
    store.set_note(b"first".to_vec());
    store.set_note(b"second".to_vec());
    // One that is too long leaves the one before.
    store.set_note(vec![b'x'; NOTE_MAX + 1]);
    store.flush();
    assert_eq!(store.note().unwrap(), b"second");
    drop(store);
    // What an owner that was killed left half written is in nobody's way.
    fs::write(path.join("note.new"), b"half").unwrap();
    let store = Store::open(&path, fast(1 << 20)).unwrap();
    assert_eq!(store.note().unwrap(), b"second");
    store.set_note(b"third".to_vec());
    store.flush();
    assert_eq!(store.status().skipped.all(), 0);
    assert_eq!(store.note().unwrap(), b"third");
    drop(store);
    let note = path.join("note");
    let mode = fs::metadata(&note).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // Neither a link nor one that somebody made long is read.
    fs::write(&note, vec![b'x'; NOTE_MAX + 1]).unwrap();
    let store = Store::open(&path, fast(1 << 20)).unwrap();
    assert_eq!(store.note(), None);
    fs::rename(&note, path.join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("elsewhere", &note).unwrap();
    assert_eq!(store.note(), None);
}

#[test]
fn a_key_of_another_scope_has_no_entry() {
    let store = over(&Contents::default(), fast(1 << 20));
    assert!(put(&store, 1));
    store.flush();
    let other = Key {
        scope: [8; 16],
        ..key(1)
    };
    assert!(!store.touch(&other));
    assert_eq!(store.bytes_of(&other), None);
    assert_eq!(
        store.fetch(vec![other]).map(|mut f| loop {
            match f.poll() {
                Next::Pending => std::thread::yield_now(),
                next => break next,
            }
        }),
        Some(Next::Failed)
    );
}

#[test]
fn files_stay_within_the_budget() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    let budget = 300 << 10;
    let store = ready(Store::open(&path, fast(budget)).unwrap());
    for n in 0..5000 {
        assert!(put(&store, n));
        if n % 100 == 0 {
            store.flush();
            assert!(bytes_below(&path) <= budget);
            // What is used stays.
            assert!(get(&store, 0) == Some(payload(0)));
        }
    }
    store.flush();
    let status = store.status();
    assert!(bytes_below(&path) <= budget && status.bytes <= budget);
    assert!(status.dropped_segments > 10 && status.bytes > budget / 2);
    assert_eq!(get(&store, 4999), Some(payload(4999)));
    assert_eq!(get(&store, 1000), None);
    drop(store);
    // A smaller budget.
    let store = ready(Store::open(&path, fast(100 << 10)).unwrap());
    assert!(bytes_below(&path) <= 100 << 10);
    assert_eq!(get(&store, 4999), Some(payload(4999)));
}

#[test]
fn a_cleared_models_entries_are_gone_from_the_files() {
    let contents = Contents::default();
    let other = ModelTag([2; 16]);
    let store = over(&contents, fast(1 << 20));
    for n in 0..40 {
        let model = if n % 2 == 0 { MODEL } else { other };
        assert!(store.put(key(n), Kind::State, model, payload(n)));
    }
    store.flush();
    assert_eq!(store.status().entries, 40);
    store.clear(Some(other));
    store.flush();
    let has = |n: u64| {
        let all = contents.lock().unwrap();
        let content = |c: &Vec<u8>| c.windows(32).any(|part| part == &payload(n)[..32]);
        all.values().any(content)
    };
    for n in 0..40 {
        assert_eq!(has(n), n % 2 == 0);
        assert_eq!(get(&store, n), (n % 2 == 0).then(|| payload(n)));
    }
    drop(store);
    let store = over(&contents, fast(1 << 20));
    assert_eq!(store.status().entries, 20);
    store.clear(None);
    store.flush();
    let status = store.status();
    assert_eq!((status.entries, status.bytes), (0, 0));
    assert!(contents.lock().unwrap().is_empty());
}

#[test]
fn a_full_queue_refuses() {
    let contents = Contents::default();
    let options = Options {
        queue_bytes: 1000,
        write_bytes_per_s: 1,
        ..Options::new(1 << 20)
    };
    let store = over(&contents, options);
    let taken = (0..100).filter(|&n| put(&store, n)).count();
    assert!((1..20).contains(&taken), "{taken}");
    assert_eq!(store.status().refused, 100 - taken as u64);
    assert!(!store.has_room(1000));
    // An entry that is there takes no room.
    assert!(put(&store, 0));
    // Too large for the store.
    assert!(!store.put(key(200), Kind::Page, MODEL, vec![0; 1 << 20]));
}

#[test]
fn nobody_else_may_read_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new/kv");
    let store = ready(Store::open(&path, fast(1 << 20)).unwrap());
    assert!(put(&store, 1));
    store.flush();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&path), 0o700);
    let files: Vec<_> = path.read_dir().unwrap().flatten().collect();
    assert_eq!(files.len(), 2, "the lock and a segment");
    assert!(files.iter().all(|file| mode(&file.path()) == 0o600));
    assert!(matches!(
        Store::open(&path, fast(1 << 20)),
        Err(OpenError::InUse(_))
    ));
    drop(store);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o750)).unwrap();
    let refused = Store::open(&path, fast(1 << 20)).unwrap_err();
    assert!(matches!(refused, OpenError::Readable { mode: 0o750, .. }));
    assert!(refused.to_string().contains("run chmod 700"), "{refused}");
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(matches!(
        Store::open(&file, fast(1 << 20)),
        Err(OpenError::Io { .. })
    ));
}
