//! Stores with damaged, torn, foreign and future files.

use std::sync::{Arc, Mutex};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_kv_disk::{FORMAT_VERSION, Options};

use crate::files::{Contents, get, over, payload, put};

const ENTRIES: u64 = 12;

fn options() -> Options {
    Options {
        write_bytes_per_s: u64::MAX,
        ..Options::new(4 << 20)
    }
}

/// A store with entries `0..ENTRIES`, in two segments.
fn sound() -> Contents {
    let contents = Contents::default();
    for half in 0..2 {
        let store = over(&contents, options());
        for n in half * ENTRIES / 2..(half + 1) * ENTRIES / 2 {
            assert!(put(&store, n));
        }
        store.flush();
        drop(store);
        if half == 0 {
            // What follows goes to a segment of its own.
            let name = "kv-0000000000000002.seg".to_owned();
            contents.lock().unwrap().insert(name, Vec::new());
        }
    }
    contents
}

/// Damages a store in one of many ways.
fn damage(contents: &mut std::collections::BTreeMap<String, Vec<u8>>, rng: &mut StdRng) {
    let names: Vec<String> = contents.keys().cloned().collect();
    let name = names[rng.random_range(0..names.len())].clone();
    let other = contents[&names[rng.random_range(0..names.len())]].clone();
    let content = contents.get_mut(&name).unwrap();
    if content.is_empty() {
        return;
    }
    let at = rng.random_range(0..content.len());
    match rng.random_range(0..8) {
        0 | 1 => content[at] ^= 1 << rng.random_range(0..8),
        2 => content.truncate(at),
        3 => {
            // A block of zeros, as after a power failure.
            let end = (at + rng.random_range(1..600)).min(content.len());
            content[at..end].fill(0);
        }
        4 => {
            // A stretch of another place.
            let n = rng
                .random_range(1..600)
                .min(content.len() - at)
                .min(other.len());
            let from = rng.random_range(0..=other.len() - n);
            content[at..at + n].copy_from_slice(&other[from..from + n]);
        }
        5 => *content = other,
        6 => {
            content.drain(at..(at + rng.random_range(1..200)).min(content.len()));
        }
        _ => {
            let bytes: Vec<u8> = (0..rng.random_range(1..64)).map(|_| rng.random()).collect();
            content.splice(at..at, bytes);
        }
    }
}

#[test]
fn damaged_stores_never_return_wrong_bytes() {
    let sound = sound();
    let whole = over(&sound, options());
    assert!((0..ENTRIES).all(|n| get(&whole, n) == Some(payload(n))));
    drop(whole);
    let sound = sound.lock().unwrap().clone();
    let mut rng = StdRng::seed_from_u64(39);
    let (mut right, mut missing, mut skipped) = (0, 0, 0);
    for round in 0..10_000 {
        let mut copy = sound.clone();
        for _ in 0..rng.random_range(1..4) {
            damage(&mut copy, &mut rng);
        }
        let store = over(&Arc::new(Mutex::new(copy)), options());
        for n in 0..ENTRIES {
            match get(&store, n) {
                None => missing += 1,
                Some(found) => {
                    assert_eq!(found, payload(n), "entry {n} of store {round}");
                    right += 1;
                }
            }
        }
        skipped += store.status().skipped.all();
        // It is used like any other.
        assert!(put(&store, 1000));
        store.flush();
        assert_eq!(get(&store, 1000), Some(payload(1000)));
    }
    println!("{right} right, {missing} missing, {skipped} skipped");
    assert!(right > 10_000 && missing > 10_000 && skipped > 5_000);
}

#[test]
fn a_torn_tail_loses_its_record_alone_and_is_written_over() {
    let contents = Contents::default();
    let store = over(&contents, options());
    (0..5).for_each(|n| assert!(put(&store, n)));
    drop(store);
    let name = contents.lock().unwrap().keys().next().cloned().unwrap();
    contents.lock().unwrap().get_mut(&name).unwrap().pop();
    let store = over(&contents, options());
    assert_eq!(store.status().skipped.torn, 1);
    assert!((0..4).all(|n| get(&store, n) == Some(payload(n))));
    assert_eq!(get(&store, 4), None);
    assert!(put(&store, 4));
    drop(store);
    assert_eq!(contents.lock().unwrap().len(), 1);
    let store = over(&contents, options());
    assert_eq!(store.status().skipped.all(), 0);
    assert!((0..5).all(|n| get(&store, n) == Some(payload(n))));
}

#[test]
fn foreign_files_and_other_versions_are_counted_and_stay() {
    let contents = Contents::default();
    let store = over(&contents, options());
    assert!(put(&store, 1));
    drop(store);
    let mut all = contents.lock().unwrap();
    let (_, own) = all
        .iter()
        .next()
        .map(|(n, c)| (n.clone(), c.clone()))
        .unwrap();
    let mut future = own.clone();
    future[8..12].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
    all.insert("kv-0000000000000007.seg".to_owned(), future);
    // A copy under another number is no segment: its records name their place.
    all.insert("kv-0000000000000008.seg".to_owned(), own);
    all.insert(
        "kv-0000000000000009.seg".to_owned(),
        b"something else, 32 bytes or more".to_vec(),
    );
    all.insert("notes.txt".to_owned(), b"mine".to_vec());
    drop(all);
    let store = over(&contents, options());
    let skipped = store.status().skipped;
    assert_eq!((skipped.other_version, skipped.foreign), (1, 3));
    assert_eq!((skipped.damaged, skipped.torn), (0, 0));
    assert_eq!(get(&store, 1), Some(payload(1)));
    assert!(put(&store, 2));
    drop(store);
    let all = contents.lock().unwrap();
    assert_eq!(all["notes.txt"], b"mine");
    assert!(
        all.contains_key("kv-000000000000000a.seg"),
        "{:?}",
        all.keys()
    );
}
