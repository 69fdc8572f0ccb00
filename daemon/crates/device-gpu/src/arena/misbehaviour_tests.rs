//! Arenas over drivers that misbehave as real ones were seen to: each ends in what works, with the
//! reason.

use rocmforge_fake_hip::{Fake, Misbehaviour};
use rocmforge_gpu_driver::trial::Trials;
use rocmforge_gpu_driver::{Libraries, Vendor, open};

use super::super::kernels::{Images, Kernels};
use super::tests::*;
use super::*;
use std::sync::Arc;

/// What the daemon maps at least.
const GRANULE_MIN: u64 = 2 << 20;

/// An arena of its own on the card of a setup.
fn opened(s: &Setup, kernels: &Kernels, trials: &Trials) -> Arena {
    let steps = Steps::default();
    Arena::new(&s.context, GRANULE_MIN, kernels, trials, &s.stream, &steps)
}

/// A short life with contents that are looked at after every step.
#[track_caller]
fn lives(s: &mut Setup) {
    let unit = 2 * GRANULE_MIN;
    let mut contents: Vec<u8> = Vec::new();
    for (i, units) in [3, 5, 2, 4, 1].into_iter().enumerate() {
        let bytes = units * unit + i as u64 * 1000;
        s.set(bytes).unwrap();
        assert_eq!(s.arena.capacity(), bytes);
        contents.truncate(bytes as usize);
        assert!(s.read(0, contents.len() as u64) == contents, "step {i}");
        let more: Vec<u8> = (contents.len() as u64..bytes)
            .map(|at| (at / 977) as u8 ^ i as u8)
            .collect();
        s.write(contents.len() as u64, &more);
        contents.extend(more);
    }
}

/// Once a granularity of 4 KB was believed, and what was mapped in such parts could not be used.
#[test]
fn a_granularity_of_4_kib_is_not_believed() {
    let fake = Arc::new(Fake::new());
    fake.misbehave(Misbehaviour::FalseGranularity, 4096);
    let mut s = setup_with(&fake, 64 << 20, 8 << 20, GRANULE_MIN);
    assert!(
        matches!(s.arena.memory, Memory::Chunks(_)),
        "{:?}",
        s.arena.note()
    );
    assert_eq!(s.arena.granularity(), GRANULE_MIN);
    lives(&mut s);
    s.end();
}

#[test]
fn refused_access_ends_in_one_allocation_with_the_reason() {
    let fake = Arc::new(Fake::new());
    fake.misbehave(Misbehaviour::RefusesAccess, 1);
    let mut s = setup_with(&fake, 64 << 20, 8 << 20, GRANULE_MIN);
    let note = s.arena.note().unwrap().to_owned();
    assert!(note.contains("hipMemSetAccess"), "{note}");
    lives(&mut s);
    s.end();
}

/// Once copies alone were sent over the border of two mappings: what a kernel writes there, or
/// reads, goes through other page tables.
#[test]
fn mappings_that_a_kernel_does_not_get_over_end_in_one_allocation_with_the_reason() {
    for (which, told) in [
        (Misbehaviour::LosesKernelWrites, "writing over the border"),
        (Misbehaviour::LosesKernelReads, "reading over the border"),
    ] {
        let fake = Arc::new(Fake::new());
        fake.misbehave(which, 1);
        let mut s = setup_with(&fake, 64 << 20, 8 << 20, GRANULE_MIN);
        assert!(matches!(s.arena.memory, Memory::Whole(_)), "{which:?}");
        let note = s.arena.note().unwrap().to_owned();
        assert!(
            note.contains(told) && note.contains("by a kernel"),
            "{note}"
        );
        assert_eq!(fake.live().bytes, 0, "what was mapped is back");
        lives(&mut s);
        s.end();
    }
}

/// The least chunks of the look, and others: on a sound card the kernel finds nothing.
#[test]
fn a_kernel_writes_and_reads_over_the_border_of_every_arena_of_chunks() {
    let fake = Arc::new(Fake::new());
    for chunk in [GRANULE_MIN, 8 << 20, 32 << 20] {
        let before = fake.calls("gather");
        let mut s = setup_with(&fake, 128 << 20, chunk, GRANULE_MIN);
        assert!(s.arena.note().is_none(), "{:?}", s.arena.note());
        assert_eq!(fake.calls("gather") - before, 2, "once written, once read");
        lives(&mut s);
        s.end();
    }
}

/// What is not looked at is not mapped.
#[test]
fn without_the_kernel_the_arena_is_one_allocation() {
    struct NoImages;
    impl Images for NoImages {
        fn image(&self, _arch: &str, _unit: &str) -> Result<Vec<u8>, Error> {
            Err(Error::Config("no compiler".to_owned()))
        }
    }
    let fake = Arc::new(Fake::new());
    let s = setup(&fake);
    let trials = Trials::of(&s.context, None);
    let kernels = Kernels::new(&s.context, Arc::new(NoImages));
    let maps = fake.calls("hipMemMap");
    let arena = opened(&s, &kernels, &trials);
    let note = arena.note().unwrap();
    assert!(note.contains("cannot be had: no compiler"), "{note}");
    assert_eq!(fake.calls("hipMemMap"), maps);
    drop((arena, kernels));
    s.end();
}

/// Seen at once: memory that was mapped stays taken while its addresses are reserved.
#[test]
fn memory_that_stays_with_its_addresses_is_not_mapped() {
    let fake = Arc::new(Fake::new());
    fake.misbehave(Misbehaviour::KeepsMemory, 1);
    let mut s = setup_with(&fake, 64 << 20, 8 << 20, GRANULE_MIN);
    let note = s.arena.note().unwrap().to_owned();
    assert!(note.contains("stay taken"), "{note}");
    assert_eq!(
        fake.live().bytes,
        0,
        "the addresses have gone, and the memory"
    );
    lives(&mut s);
    assert_eq!(fake.live().bytes, s.held());
    s.end();
}

/// Seen only when the arena shrinks: contents stay, and what the driver kept comes back with the
/// addresses.
#[test]
fn memory_that_a_shrink_does_not_bring_back_ends_the_mapping() {
    let fake = Arc::new(Fake::new());
    let mut s = setup_with(&fake, 64 << 20, 8 << 20, GRANULE_MIN);
    s.set(40 << 20).unwrap();
    let sent: Vec<u8> = (0..40u32 << 20).map(|at| (at / 4099) as u8).collect();
    s.write(0, &sent);
    let generation = s.arena.generation();
    fake.misbehave(Misbehaviour::KeepsMemory, 1);
    s.set((16 << 20) + 5).unwrap();
    assert!(matches!(s.arena.memory, Memory::Whole(_)));
    assert!(s.arena.note().unwrap().contains("stay taken"));
    assert_ne!(s.arena.generation(), generation, "addresses have changed");
    assert_eq!(s.arena.capacity(), (16 << 20) + 5);
    assert!(s.read(0, (16 << 20) + 5) == sent[..(16 << 20) + 5]);
    assert_eq!((fake.live().bytes, fake.live().reservations), (s.held(), 0));
    lives(&mut s);
    s.end();
}

/// Others take memory while the arena shrinks: that is no reason to leave the mapping.
#[test]
fn memory_that_others_take_is_not_held_against_the_driver() {
    let fake = Arc::new(Fake::new());
    let mut s = setup_with(&fake, 64 << 20, 8 << 20, GRANULE_MIN);
    s.set(40 << 20).unwrap();
    let Memory::Chunks(chunks) = &mut s.arena.memory else {
        panic!("{:?}", s.arena.note());
    };
    let before = (chunks.free_before(), chunks.mapped());
    assert_eq!(before.0, Some(24 << 20));
    fake.set_memory(64 << 20, 16 << 20);
    s.set(24 << 20).unwrap();
    let Memory::Chunks(chunks) = &mut s.arena.memory else {
        panic!("{:?}", s.arena.note());
    };
    assert!(chunks.has_come_back(before.0, before.1));
    assert_eq!(chunks.mapped(), 24 << 20, "what was tried is given back");
    lives(&mut s);
    s.end();
}

#[test]
fn a_false_count_of_free_bytes_is_not_believed() {
    let fake = Arc::new(Fake::new());
    for free in [1, 64 << 20, u64::MAX >> 1] {
        fake.misbehave(Misbehaviour::FalseFreeBytes, free);
        let mut s = setup_with(&fake, 64 << 20, 8 << 20, GRANULE_MIN);
        assert!(
            matches!(s.arena.memory, Memory::Chunks(_)),
            "{:?}",
            s.arena.note()
        );
        lives(&mut s);
        s.end();
    }
}

/// What is available of the machine's memory changes by more than what is looked for, or stands for
/// a while: once a driver that gives memory back was taken for one that keeps it, or for one
/// without a count.
#[test]
fn on_an_apu_the_drivers_own_count_tells_whether_memory_comes_back() {
    const CARD: u64 = 64 << 20;
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: String| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let card = "sys/bus/pci/devices/0000:01:00.0";
    write(&format!("{card}/mem_info_vram_total"), "1048576".to_owned());
    write(&format!("{card}/mem_info_gtt_total"), CARD.to_string());
    let kib = CARD >> 11;
    write(
        "proc/meminfo",
        format!("MemTotal: {} kB\nMemAvailable: {kib} kB\n", CARD >> 10),
    );
    let fake = Arc::new(Fake::new());
    fake.set_memory(CARD, 0);
    fake.set_integrated(true);
    let libraries = Libraries {
        hip: Some(fake.path().to_owned()),
        cuda: None,
    };
    let driver = open(Vendor::Hip, &libraries).unwrap();
    let context = Context::open_below(driver, 0, root.path()).unwrap();
    assert_eq!(
        context.memory().unwrap().free,
        CARD / 2,
        "what is available"
    );
    let mut s = setup_on(&fake, context, 8 << 20, GRANULE_MIN);
    let Memory::Chunks(chunks) = &s.arena.memory else {
        panic!("{:?}", s.arena.note());
    };
    assert!(chunks.free_before().is_some(), "the count is followed");
    lives(&mut s);
    s.end();
}

#[test]
fn a_look_that_passed_is_made_once_and_again_where_its_note_is_damaged() {
    let fake = Arc::new(Fake::new());
    let s = setup(&fake);
    let dir = tempfile::tempdir().unwrap();
    let trials = Trials::of(&s.context, Some(dir.path()));
    // Whether the driver was tried, and whether that is told.
    let looked = || {
        let before = fake.calls("hipMemMap");
        let arena = opened(&s, &kernels(&s.context), &trials);
        assert_eq!(arena.note(), None);
        let is_told = arena.notes().any(|note| note.contains("remembered from"));
        (fake.calls("hipMemMap") > before, is_told)
    };
    assert_eq!(looked(), (true, false));
    assert_eq!(looked(), (false, true));
    let notes = std::fs::read_dir(dir.path()).unwrap();
    let notes: Vec<_> = notes.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(notes.len(), 1, "{notes:?}");
    std::fs::write(&notes[0], "mapping passed\n").unwrap();
    assert_eq!(looked(), (true, false));
    assert_eq!(looked(), (false, true));
    s.end();
}

/// A driver whose card faults on the look ends the process: the third start goes without.
#[test]
fn a_look_that_ended_the_process_is_not_repeated_for_ever() {
    let fake = Arc::new(Fake::new());
    let s = setup(&fake);
    let dir = tempfile::tempdir().unwrap();
    let trials = Trials::of(&s.context, Some(dir.path()));
    for _ in 0..2 {
        let died = || -> Option<()> { panic!("a fault of the card") };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| trials.run("mapping", died)))
            .unwrap_err();
    }
    let arena = opened(&s, &kernels(&s.context), &trials);
    assert!(
        arena.note().unwrap().contains("did not end 2 times"),
        "{:?}",
        arena.note()
    );
    drop(arena);
    s.end();
}

/// An arena of one allocation with contents, on a card that has no room for two such.
fn large_whole(fake: &Arc<Fake>) -> (Setup, Vec<u8>) {
    fake.set_virtual_memory(false);
    let mut s = setup_with(fake, 64 << 20, 8 << 20, GRANULE_MIN);
    s.set(40 << 20).unwrap();
    let sent: Vec<u8> = (0..40u32 << 20).map(|at| (at / 4099) as u8).collect();
    s.write(0, &sent);
    (s, sent)
}

/// Once a smaller arena was taken beside the old one or not at all: on a card that the arena mostly
/// filled nothing came back, and a larger one was refused though there was room for it alone.
#[test]
fn one_allocation_changes_its_size_without_room_for_two() {
    let fake = Arc::new(Fake::new());
    let (mut s, sent) = large_whole(&fake);
    fake.peak_bytes();
    for bytes in [30 << 20, (50 << 20) + 7, 1 << 20] {
        let (generation, kept) = (s.arena.generation(), s.arena.capacity().min(bytes));
        s.set(bytes).unwrap();
        assert_eq!((s.held(), s.arena.capacity()), (bytes, bytes));
        assert_ne!(s.arena.generation(), generation, "addresses have changed");
        let kept = kept.min(30 << 20);
        assert!(s.read(0, kept) == sent[..kept as usize], "{bytes}");
        if bytes > 40 << 20 {
            // What was never written before.
            s.write(kept, &vec![3; (bytes - kept) as usize]);
        }
    }
    assert!(fake.peak_bytes() <= 64 << 20);
    assert_eq!(s.arena.notes().count(), 1, "that it is one allocation");
    lives(&mut s);
    s.end();
}

#[test]
fn one_allocation_stays_where_a_larger_one_is_refused() {
    let fake = Arc::new(Fake::new());
    let (mut s, sent) = large_whole(&fake);
    fake.set_memory(64 << 20, 20 << 20);
    // By the driver's count, and where that is not true by a try.
    for free in [0, 1 << 40] {
        fake.misbehave(Misbehaviour::FalseFreeBytes, free);
        let frees = fake.calls("hipFree");
        let error = s.set(50 << 20).unwrap_err();
        assert!(matches!(error, Error::Memory { .. }), "{error:?}");
        assert_eq!(fake.calls("hipFree") > frees, free > 0, "{free}");
        let notes: Vec<_> = s.arena.notes().collect();
        let told = notes.iter().any(|note| note.contains("stays at 41943040"));
        assert!(told, "{notes:?}");
        assert_eq!((s.held(), s.arena.capacity()), (40 << 20, 40 << 20));
        assert!(s.read(0, 40 << 20) == sent);
    }
    fake.misbehave(Misbehaviour::FalseFreeBytes, 0);
    s.set(20 << 20).unwrap();
    assert_eq!(s.arena.notes().count(), 1, "what is past is not told");
    s.end();
}

/// Its place may have gone to others just then.
#[test]
fn one_allocation_that_cannot_be_taken_again_is_a_loss() {
    let fake = Arc::new(Fake::new());
    let (mut s, _) = large_whole(&fake);
    fake.fail("hipMalloc", 2, 2);
    let error = s.set(30 << 20).unwrap_err();
    assert!(
        matches!(&error, Error::Lost(l) if l.kind == LossKind::NoMemory && l.reason.contains("allocated again")),
        "{error:?}"
    );
    assert_eq!(s.held(), 0);
    s.end();
}

/// Once the log alone said that the driver holds more than the budget.
#[test]
fn memory_that_a_shrink_leaves_with_the_driver_is_told() {
    let fake = Arc::new(Fake::new());
    let mut s = setup_with(&fake, 64 << 20, 8 << 20, GRANULE_MIN);
    s.set(40 << 20).unwrap();
    s.write(0, &vec![1; 40 << 20]);
    fake.misbehave(Misbehaviour::KeepsMemory, 1);
    // No way through the host, and no room on the card.
    fake.fail("hipMemcpyAsync", 1, 1);
    s.set(32 << 20).unwrap();
    let notes: Vec<_> = s.arena.notes().collect();
    assert!(
        notes.iter().any(|n| n.contains("more than the budget")),
        "{notes:?}"
    );
    assert!(s.read(0, 32 << 20) == vec![1; 32 << 20]);
    s.end();
}
