//! Ranges of the arena set aside in the host's memory, on the fake runtime:
//! they come back as they were.

use crate::fake_device;
use std::time::{Duration, Instant};

use rocmforge_device::ops::PlacedBuf;
use rocmforge_device::{
    Buf, CopyStart, CopyTicket, Device, Error, HostCopies, Rows, Scratch, ScratchLayout,
};
use rocmforge_device_gpu::GpuDevice;
use rocmforge_fake_hip::{Fake, Live};

const CAPACITY: u64 = 8 << 20;
const FIXED: u64 = 2 << 20;
const OUT_OF_MEMORY: u32 = 2;

/// Pinned memory is taken in chunks of so many bytes.
pub(crate) const CHUNK: u64 = 4 << 20;

/// Bytes of a range: more than one copy's pieces.
pub(crate) const RANGE: u64 = 1 << 20;

fn device(fake: &Fake) -> GpuDevice {
    fake_device::open_as(fake_device::config(fake, false), fake, CAPACITY, FIXED)
}

/// Writes a range of numbers that begin with `first`.
pub(crate) fn fill(device: &mut dyn Device, at: u64, first: u32) {
    let elements = RANGE / 4;
    let layout = ScratchLayout {
        bufs: vec![PlacedBuf {
            at: 0,
            width: elements,
            rows: Rows::Tokens,
        }],
        bytes: RANGE,
        tokens: 1,
        outputs: 1,
        tables: 0,
        experts: 0,
        float_weights: false,
        both_ways: false,
        parts: false,
    };
    let rows: Vec<f32> = (0..elements as u32).map(|i| (first + i) as f32).collect();
    let scratch = Scratch {
        layout: &layout,
        base: at,
    };
    device.write(scratch, Buf(0), &rows).unwrap();
}

pub(crate) fn bytes(device: &mut dyn Device, at: u64) -> Vec<u8> {
    let mut out = vec![0; RANGE as usize];
    device.read_slab(at, &mut out).unwrap();
    out
}

fn ends_with_nothing_held(device: GpuDevice, fake: &Fake) {
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
}

#[test]
fn a_range_comes_back_as_it_was_over_the_border_of_two_chunks() {
    let fake = Fake::new();
    let mut device = device(&fake);
    let pinned = fake.live().pinned;
    assert_eq!(device.set_aside(2 * CHUNK).unwrap(), 2 * CHUNK);
    assert_eq!(fake.live().pinned, pinned, "taken when it is needed");
    let (first, second, third) = (FIXED, FIXED + RANGE, FIXED + 2 * RANGE);
    fill(&mut device, first, 1);
    fill(&mut device, second, 1_000_000);
    let (one, other) = (bytes(&mut device, first), bytes(&mut device, second));
    assert_ne!(one, other);
    let (low, border) = (0, CHUNK - RANGE / 2);
    assert!(device.save(first, border, RANGE, true).unwrap());
    assert!(device.save(second, low, RANGE, true).unwrap());
    // Whoever gets their room comes behind the copies.
    fill(&mut device, first, 7);
    fill(&mut device, second, 8);
    device.restore(border, third, RANGE).unwrap();
    device.restore(low, first, RANGE).unwrap();
    assert_eq!(bytes(&mut device, third), one);
    assert_eq!(bytes(&mut device, first), other);
    assert_eq!(fake.live().pinned, pinned + 2);
    // What is beyond a smaller end goes back, the rest stays.
    assert_eq!(device.set_aside(CHUNK / 2).unwrap(), CHUNK / 2);
    assert_eq!(fake.live().pinned, pinned + 1);
    device.restore(low, second, RANGE).unwrap();
    assert_eq!(bytes(&mut device, second), other);
    ends_with_nothing_held(device, &fake);
}

#[test]
fn memory_that_the_system_refuses_is_an_error_and_costs_nothing() {
    let fake = Fake::new();
    let mut device = device(&fake);
    device.set_aside(CHUNK).unwrap();
    fill(&mut device, FIXED, 1);
    let before = bytes(&mut device, FIXED);
    fake.fail("hipHostMalloc", 1, OUT_OF_MEMORY);
    let refused = device.save(FIXED, 0, RANGE, false);
    assert!(matches!(refused, Err(Error::Memory { .. })), "{refused:?}");
    fake.recover();
    assert!(device.save(FIXED, 0, RANGE, false).unwrap());
    device.restore(0, FIXED + RANGE, RANGE).unwrap();
    assert_eq!(bytes(&mut device, FIXED + RANGE), before);
    ends_with_nothing_held(device, &fake);
}

#[test]
fn memory_behind_what_is_used_comes_ahead_of_need() {
    let fake = Fake::new();
    let mut device = device(&fake);
    let pinned = fake.live().pinned;
    device.set_aside(8 * CHUNK).unwrap();
    fill(&mut device, FIXED, 5);
    let before = bytes(&mut device, FIXED);
    assert!(device.save(FIXED, 0, RANGE, false).unwrap());
    // Nobody waits for the next chunk, which is on its way.
    let give_up = Instant::now() + Duration::from_secs(60);
    while !device.save(FIXED, CHUNK, RANGE, false).unwrap() {
        assert!(Instant::now() < give_up, "it does not come");
        std::thread::yield_now();
    }
    device.restore(CHUNK, FIXED + RANGE, RANGE).unwrap();
    assert_eq!(bytes(&mut device, FIXED + RANGE), before);
    // Who waits gets it: the last of those that were asked for, and no more of them come than a
    // few.
    assert!(device.save(FIXED, 5 * CHUNK, RANGE, true).unwrap());
    assert!(fake.live().pinned - pinned <= 8);
    // Beyond a smaller end nothing stays, also of what was on its way.
    assert_eq!(device.set_aside(CHUNK).unwrap(), CHUNK);
    assert_eq!(fake.live().pinned, pinned + 1);
    assert!(device.save(FIXED, 0, RANGE, true).unwrap());
    ends_with_nothing_held(device, &fake);
}

#[test]
fn memory_that_the_system_refuses_ahead_of_need_is_asked_for_again() {
    let fake = Fake::new();
    let mut device = device(&fake);
    device.set_aside(3 * CHUNK).unwrap();
    fake.fail("hipHostMalloc", 2, OUT_OF_MEMORY);
    assert!(device.save(FIXED, 0, RANGE, true).unwrap());
    // The second call is the thread's; the third is this one's.
    assert!(device.save(FIXED, CHUNK, RANGE, true).unwrap());
    ends_with_nothing_held(device, &fake);
}

#[test]
fn copies_that_are_ended_later_have_what_was_there_when_they_began() {
    let fake = Fake::new();
    let mut device = device(&fake);
    let begun = |device: &mut GpuDevice, at| match device.begin_copy(at, RANGE).unwrap() {
        CopyStart::Begun(ticket) => ticket,
        other => panic!("{other:?}"),
    };
    let mut copies: Vec<(CopyTicket, Vec<u8>)> = Vec::new();
    for first in [1, 20, 300, 4000] {
        fill(&mut device, FIXED, first);
        let now = bytes(&mut device, FIXED);
        copies.push((begun(&mut device, FIXED), now));
    }
    fill(&mut device, FIXED, 50_000);
    // There are places for as many at once, and for no copy that is larger than a place.
    let more = device.begin_copy(FIXED, RANGE).unwrap();
    assert_eq!(more, CopyStart::Busy);
    let large = device.begin_copy(FIXED, 5 << 20).unwrap();
    assert_eq!(large, CopyStart::Unsupported);
    // They end in any order; a place is free again then.
    for at in [2, 0, 1, 0] {
        let (ticket, expected) = copies.remove(at);
        assert_eq!(device.end_copy(ticket, true).unwrap(), Some(expected));
        assert!(device.end_copy(ticket, true).is_err(), "once");
        let again = begun(&mut device, FIXED);
        let mut came = device.end_copy(again, false).unwrap();
        let give_up = Instant::now() + Duration::from_secs(60);
        while came.is_none() {
            assert!(Instant::now() < give_up, "it does not come");
            std::thread::yield_now();
            came = device.end_copy(again, false).unwrap();
        }
        assert_eq!(came, Some(bytes(&mut device, FIXED)));
    }
    ends_with_nothing_held(device, &fake);
}

#[test]
fn without_pinned_memory_no_copy_is_begun() {
    let fake = Fake::new();
    let mut device = device(&fake);
    fake.fail("hipHostMalloc", 1, OUT_OF_MEMORY);
    for _ in 0..2 {
        let start = device.begin_copy(FIXED, RANGE).unwrap();
        assert_eq!(start, CopyStart::Unsupported);
    }
    ends_with_nothing_held(device, &fake);
}
