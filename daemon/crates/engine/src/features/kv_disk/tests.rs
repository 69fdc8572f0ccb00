//! Notes and decisions, without a device.

use super::*;
use crate::clock::Clock;
use crate::features::prefix_cache::Realm;
use crate::model::adapters::AdapterKey;

fn disk(directory: &std::path::Path) -> KvDisk {
    let store = Store::open(directory, Options::new(1 << 20)).unwrap();
    KvDisk::new(store, "host".to_owned(), (false, false), Clock.now())
}

/// Once the first request after each restart was read from a slow disk, since nothing was known.
#[test]
fn what_an_earlier_process_measured_decides_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kv");
    let model = ModelId(0);
    let known = |disk: &mut KvDisk| {
        let added = DiskModel {
            identity: Identity::known([7; 32]),
            layout: [0; 32],
            state_slot: None,
            since: Clock.now(),
            may_have_entries: false,
        };
        disk.models.insert(model, added);
    };
    let mut before = disk(&path);
    known(&mut before);
    let now = Clock.now();
    before.recall_rate(now);
    assert!(before.pays(1 << 20, 32, None), "it is tried");
    // 100 MB a second; a row of a prompt takes 0.1 ms.
    before.note_rate(100_000_000, Duration::from_secs(1), now);
    let mut host_kv = HostKv::new(0, false);
    host_kv.note_prompt(model, 10_000, Duration::from_secs(1));
    before.note_rates(&host_kv, now, true);
    drop(before);

    let mut after = disk(&path);
    known(&mut after);
    let mut host_kv = HostKv::new(0, false);
    let row = after.recalled_row(model).unwrap();
    host_kv.recall_row(model, row);
    let row = host_kv.row_seconds(model);
    assert!(
        after.pays(1 << 20, 32, row),
        "the rate of the disk is not known yet"
    );
    after.recall_rate(now);
    assert!(!after.pays(1 << 20, 32, row), "10 ms for what takes 3.2 ms");
    assert!(after.pays(100 << 10, 32, row), "1 ms");
    // As what this process measured, that is believed for a while and not taken over again.
    after.forget_old_rate(now + RATE_LASTS);
    after.recall_rate(now + RATE_LASTS);
    assert!(after.pays(1 << 20, 32, row));
    // What this process measures counts from then on.
    host_kv.note_prompt(model, 100, Duration::from_secs(100));
    assert!(host_kv.row_seconds(model) > row);
    // Another device's prompts say nothing.
    let mut other = after;
    other.device = "hip gfx1100".to_owned();
    assert_eq!(other.recalled_row(model), None);
}

fn realm(asker: u64, long: bool) -> Realm {
    Realm {
        model: ModelId(0),
        asker,
        long,
        adapters: AdapterKey::default(),
    }
}

#[test]
fn names_differ_in_all_that_determines_pages() {
    let of = |realm, is_shared, model: u8, layout: u8, device: &str| {
        Chain::root(realm, is_shared, ([model; 32], [layout; 32]), device)
    };
    let adapted = |key: u8| Realm {
        adapters: AdapterKey([key; 32]),
        ..realm(1, false)
    };
    let roots = [
        of(realm(1, false), false, 1, 1, "host avx2"),
        of(realm(2, false), false, 1, 1, "host avx2"),
        of(realm(1, true), false, 1, 1, "host avx2"),
        of(realm(1, false), true, 1, 1, "host avx2"),
        of(realm(1, false), false, 2, 1, "host avx2"),
        of(realm(1, false), false, 1, 2, "host avx2"),
        of(realm(1, false), false, 1, 1, "hip gfx1100"),
        of(adapted(1), false, 1, 1, "host avx2"),
        of(adapted(2), false, 1, 1, "host avx2"),
    ];
    for (i, root) in roots.iter().enumerate() {
        assert!(roots[..i].iter().all(|other| other != root), "{i}");
        assert!(
            roots[..i]
                .iter()
                .all(|other| other.next(&[1]) != root.next(&[1]))
        );
    }
    // Clients that share have one name, whoever asks.
    assert_eq!(of(realm(5, false), true, 1, 1, "host avx2"), roots[3]);
    let after = |tokens: &[&[u32]]| {
        let mut chain = Some(roots[0]);
        for page in tokens {
            chain = chain.and_then(|chain| chain.next(page));
        }
        chain
    };
    let a = after(&[&[1, 2], &[3]]).unwrap();
    assert_eq!(after(&[&[1, 2], &[3]]), Some(a));
    assert_ne!(after(&[&[1], &[2, 3]]), Some(a));
    // Numbers of images are another process's.
    assert_eq!(after(&[&[1, 2], &[3, 1 << 31]]), None);
    assert_eq!(after(&[&[1, 2], &[u32::MAX]]), None);
    assert_ne!(a.key(0), a.key(1));
}

#[test]
fn reading_pays_where_it_is_faster_than_computing_and_is_tried_first() {
    let directory = tempfile::tempdir().unwrap();
    let mut disk = disk(&directory.path().join("kv"));
    assert!(disk.pays(u64::MAX, 1, Some(1e-9)), "nothing was measured");
    let now = disk.since;
    disk.note_rate(2_000_000_000, Duration::from_secs(1), now);
    // 4 MiB in 2.1 ms; 32 rows at 5000 a second take 6.4 ms, at 50,000 a second 0.64 ms.
    assert!(disk.pays(4 << 20, 32, Some(1.0 / 5000.0)));
    assert!(!disk.pays(4 << 20, 32, Some(1.0 / 50_000.0)));
    assert!(disk.pays(4 << 20, 32, None));
    disk.note_rate(0, Duration::from_secs(1), now);
    disk.forget_old_rate(now + RATE_LASTS / 2);
    assert!(!disk.pays(4 << 20, 32, Some(1.0 / 50_000.0)));
    disk.forget_old_rate(now + RATE_LASTS);
    assert!(
        disk.pays(4 << 20, 32, Some(1.0 / 50_000.0)),
        "it is measured again"
    );
    disk.note_rate(2_000_000_000, Duration::from_secs(1), now);
    disk.always = true;
    assert!(disk.pays(4 << 20, 32, Some(1.0 / 50_000.0)));
}

#[test]
fn a_model_that_is_gone_has_no_notes() {
    let mut prefixes = crate::features::prefix_cache::Prefixes::default();
    let mut freed = Vec::new();
    let directory = tempfile::tempdir().unwrap();
    let mut disk = disk(&directory.path().join("kv"));
    let chain = Chain::root(realm(1, false), false, ([1; 32], [1; 32]), "host");
    let mut parent = None;
    let mut nodes = Vec::new();
    for i in 0..4 {
        let node = prefixes.add(realm(1, false), parent, &[i; 32], 1, &mut freed);
        nodes.extend(node);
        parent = node;
        let note = Note {
            model: ModelId(i % 2),
            chain,
            with_state: false,
        };
        disk.notes.add(nodes[i as usize], note);
    }
    // A note that comes again is one note, with all that is wanted.
    let again = Note {
        model: ModelId(0),
        chain,
        with_state: true,
    };
    disk.notes.add(nodes[2], again);
    disk.forget(ModelId(1));
    assert!(disk.notes.take(nodes[0]).is_some());
    let (node, note) = disk.notes.pop().unwrap();
    assert_eq!((node, note.with_state), (nodes[2], true));
    disk.notes.put_back(node, note);
    assert!(disk.has_notes());
    assert_eq!(disk.notes.pop().map(|(node, _)| node), Some(nodes[2]));
    assert!(disk.notes.pop().is_none() && !disk.has_notes());
}

#[test]
fn requests_wait_for_an_identity_a_bounded_time() {
    let directory = tempfile::tempdir().unwrap();
    let mut disk = disk(&directory.path().join("kv"));
    disk.store.flush();
    let (now, model) = (Clock.now(), ModelId(0));
    assert!(!disk.is_to_wait(model, now), "an unknown model");
    let identity = identity::Identity::pending();
    disk.models.insert(
        model,
        DiskModel {
            may_have_entries: true,
            identity,
            layout: [0; 32],
            state_slot: None,
            since: now,
        },
    );
    assert!(disk.is_to_wait(model, now + READY_TIMEOUT / 2));
    assert!(!disk.is_to_wait(model, now + READY_TIMEOUT));
    let known = identity::Identity::known([3; 32]);
    disk.models.get_mut(&model).unwrap().identity = known;
    assert!(!disk.is_to_wait(model, now));
    assert!(disk.root(realm(1, false)).is_some());
}

#[test]
fn a_budget_is_in_bytes_or_a_share_of_the_file_system_and_not_tiny() {
    let directory = tempfile::tempdir().unwrap();
    let of = |budget| {
        bytes_of(&KvDiskConfig {
            directory: directory.path().join("not/yet"),
            budget,
            always: false,
            queue_bytes: None,
            write_bytes_per_s: None,
        })
    };
    assert_eq!(of(Budget::Bytes(64 << 20)), Ok(64 << 20));
    let all = of(Budget::Percent(100.0)).unwrap();
    let half = of(Budget::Percent(50.0)).unwrap();
    assert!(all > 1 << 30 && half.abs_diff(all / 2) <= 1);
    let error = of(Budget::Bytes(1 << 20)).unwrap_err();
    assert_eq!(
        error,
        "kv_disk_budget is 1048576 bytes: give at least 67108864"
    );
}
