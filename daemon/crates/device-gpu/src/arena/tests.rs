//! Arenas of chunks and of one allocation, over the fake runtime: contents, what is held at any
//! moment, and every failure.

use std::sync::Arc;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use rocmforge_device::{Error, LossKind};
use rocmforge_fake_hip::{Fake, Live, unit_image};
use rocmforge_gpu_driver::{
    Context, DevicePtr, Libraries, PinnedBuffer, Priority, Stream, Vendor, open,
};

use super::super::kernels::{Images, Kernels};
use super::{Arena, Memory};

const OUT_OF_MEMORY: u32 = 2;
const INVALID_VALUE: u32 = 1;
const LAUNCH_FAILURE: u32 = 719;

/// The fake's.
const GRANULE: u64 = 64 << 10;
const CHUNK: u64 = 4 * GRANULE;
const CARD: u64 = 64 * GRANULE;

pub(super) struct Setup {
    // In the order in which they go.
    pub(super) arena: Arena,
    pub(super) stream: Stream,
    pinned: PinnedBuffer,
    pub(super) context: Context,
    fake: Arc<Fake>,
}

pub(super) fn setup(fake: &Arc<Fake>) -> Setup {
    setup_with(fake, CARD, CHUNK, GRANULE)
}

/// On a card of so many bytes, in such chunks.
pub(super) fn setup_with(fake: &Arc<Fake>, card: u64, chunk: u64, granularity_min: u64) -> Setup {
    fake.set_memory(card, 0);
    let libraries = Libraries {
        hip: Some(fake.path().to_owned()),
        cuda: None,
    };
    let context = Context::open(open(Vendor::Hip, &libraries).unwrap(), 0).unwrap();
    setup_on(fake, context, chunk, granularity_min)
}

/// On a card that is open.
pub(super) fn setup_on(
    fake: &Arc<Fake>,
    context: Context,
    chunk: u64,
    granularity_min: u64,
) -> Setup {
    let stream = Stream::new(&context, Priority::Normal).unwrap();
    // No whole number of pieces in a chunk.
    let pinned = PinnedBuffer::new(&context, 40_000).unwrap();
    let kernels = kernels(&context);
    Setup {
        arena: Arena::with_chunks(&context, chunk, granularity_min, &kernels, &stream),
        pinned,
        stream,
        context,
        fake: Arc::clone(fake),
    }
}

/// Kernels of the fake's own.
struct FakeImages;

impl Images for FakeImages {
    fn image(&self, _arch: &str, unit: &str) -> Result<Vec<u8>, Error> {
        unit_image(unit).ok_or_else(|| Error::Config(format!("no unit '{unit}'")))
    }
}

pub(super) fn kernels(context: &Context) -> Kernels {
    Kernels::new(context, Arc::new(FakeImages))
}

impl Setup {
    pub(super) fn set(&mut self, bytes: u64) -> Result<(), Error> {
        self.arena
            .set_capacity(bytes, &self.stream, &mut self.pinned)
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) {
        let to = DevicePtr(self.arena.at(offset, bytes.len() as u64));
        let driver = self.context.driver().unwrap();
        // SAFETY: inside the arena; the source is waited for.
        unsafe {
            driver.copy_h2d_async(to, bytes.as_ptr(), bytes.len() as u64, self.stream.handle())
        }
        .unwrap();
        self.stream.synchronize().unwrap();
    }

    pub(super) fn read(&self, offset: u64, bytes: u64) -> Vec<u8> {
        let from = DevicePtr(self.arena.at(offset, bytes));
        let mut out = vec![0; bytes as usize];
        let driver = self.context.driver().unwrap();
        // SAFETY: inside the arena; the destination is waited for.
        unsafe { driver.copy_d2h_async(out.as_mut_ptr(), from, bytes, self.stream.handle()) }
            .unwrap();
        self.stream.synchronize().unwrap();
        out
    }

    pub(super) fn held(&self) -> u64 {
        self.context.usage().device_bytes
    }

    /// Ends it; nothing is left, nothing was noted.
    #[track_caller]
    pub(super) fn end(self) {
        let fake = Arc::clone(&self.fake);
        drop(self);
        assert_eq!(fake.live(), Live::default());
        assert_eq!(fake.violations(), Vec::<String>::new());
    }
}

fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(GRANULE)
}

fn random(rng: &mut StdRng, bytes: u64) -> Vec<u8> {
    let mut out = vec![0; bytes as usize];
    rng.fill(out.as_mut_slice());
    out
}

/// A capacity, now and then at a border.
fn some_capacity(rng: &mut StdRng, most: u64) -> u64 {
    match rng.random_range(0..6) {
        0 => rng.random_range(1..=most / CHUNK) * CHUNK,
        1 => rng.random_range(1..=most / GRANULE) * GRANULE,
        2 => rng.random_range(1..=GRANULE),
        _ => rng.random_range(1..=most),
    }
}

#[test]
fn an_arena_of_chunks_keeps_contents_addresses_and_the_bound() {
    let fake = Arc::new(Fake::new());
    for seed in 0..40 {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut s = setup(&fake);
        let base = s.arena.base();
        assert_eq!(s.held(), 0, "what the look at the driver took is back");
        let mut contents = Vec::new();
        for _ in 0..60 {
            let (before, held) = (s.arena.capacity(), s.held());
            let generation = s.arena.generation();
            let bytes = some_capacity(&mut rng, CARD);
            fake.peak_bytes();
            s.set(bytes).unwrap();
            assert!(
                fake.peak_bytes() <= held.max(rounded(bytes)),
                "{before} -> {bytes}"
            );
            assert_eq!((s.held(), s.arena.capacity()), (rounded(bytes), bytes));
            assert_eq!(fake.live().bytes, s.held());
            assert_eq!(s.arena.base(), base);
            let taken_away = rounded(bytes) < held;
            assert_eq!(s.arena.generation() != generation, taken_away);
            let kept = before.min(bytes);
            contents.truncate(kept as usize);
            assert!(s.read(0, kept) == contents, "{before} -> {bytes}");
            // All of what is new, so that everything is known.
            let more = random(&mut rng, bytes - kept);
            s.write(kept, &more);
            contents.extend(more);
        }
        s.end();
    }
    assert!(
        fake.calls("run:d2d") > 100,
        "some are replaced on the device"
    );
}

#[test]
fn an_arena_of_one_allocation_keeps_contents() {
    let fake = Arc::new(Fake::new());
    fake.set_virtual_memory(false);
    let mut rng = StdRng::seed_from_u64(77);
    let mut s = setup(&fake);
    assert!(matches!(s.arena.memory, Memory::Whole(_)));
    assert_eq!(s.arena.granularity(), 0);
    let mut contents = Vec::new();
    for _ in 0..60 {
        let before = s.arena.capacity();
        let bytes = some_capacity(&mut rng, CARD / 2);
        s.set(bytes).unwrap();
        assert_eq!((s.held(), s.arena.capacity()), (bytes, bytes));
        let kept = before.min(bytes);
        contents.truncate(kept as usize);
        assert!(s.read(0, kept) == contents, "{before} -> {bytes}");
        let more = random(&mut rng, bytes - kept);
        s.write(kept, &more);
        contents.extend(more);
    }
    assert_eq!(s.arena.renew(&[2 * CARD, CARD]).unwrap(), CARD);
    assert_eq!(fake.calls("hipMemCreate"), 0);
    s.end();
}

#[test]
fn growth_that_is_refused_leaves_the_arena_as_it_was() {
    let fake = Arc::new(Fake::new());
    let mut s = setup(&fake);
    // More than the device has is no reason to give the addresses up.
    assert!(matches!(s.set(2 * CARD), Err(Error::Memory { .. })));
    assert!(matches!(s.arena.memory, Memory::Chunks(_)));
    s.set(3 * CHUNK + 5).unwrap();
    let sent = random(&mut StdRng::seed_from_u64(3), 3 * CHUNK + 5);
    s.write(0, &sent);
    // Another process takes all but some chunks.
    fake.set_memory(CARD, CARD - 7 * CHUNK);
    let error = s.set(10 * CHUNK).unwrap_err();
    let Error::Memory { bytes, message, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(*bytes, 10 * CHUNK);
    assert!(message.contains("are free and"), "{message}");
    assert_eq!(s.arena.capacity(), 3 * CHUNK + 5);
    assert_eq!(s.held(), 3 * CHUNK + GRANULE);
    assert!(s.read(0, 3 * CHUNK + 5) == sent);
    // More than there are addresses for.
    assert!(matches!(s.set(2 * CARD), Err(Error::Memory { .. })));
    // Giving back first helps, without an address of it changing.
    let base = s.arena.base();
    fake.peak_bytes();
    let sizes = [10 * CHUNK, 8 * CHUNK, 7 * CHUNK, CHUNK];
    assert_eq!(s.arena.renew(&sizes).unwrap(), 7 * CHUNK);
    assert!(fake.peak_bytes() <= 7 * CHUNK);
    assert_eq!((s.arena.base(), s.arena.capacity()), (base, 7 * CHUNK));
    s.end();
}

/// Unmapping does not wait, and a driver that is asked to while a stream is at work may
/// take memory from under it.
#[test]
fn memory_goes_when_no_stream_is_at_work() {
    let fake = Arc::new(Fake::new());
    let mut s = setup(&fake);
    let other = Stream::new(&s.context, Priority::Normal).unwrap();
    s.set(6 * CHUNK).unwrap();
    let queue = |s: &Setup| {
        let bytes = s.arena.capacity();
        s.arena.zero(0, bytes, &other).unwrap();
        assert!(fake.queued() > 0);
    };
    // A whole chunk, a part of one on the device and through the host, all.
    for bytes in [5 * CHUNK, 3 * CHUNK + GRANULE, 3 * CHUNK - GRANULE] {
        queue(&s);
        s.set(bytes).unwrap();
        assert_eq!(s.held(), bytes);
    }
    queue(&s);
    s.arena.renew(&[CHUNK]).unwrap();
    queue(&s);
    drop(s);
    assert_eq!(fake.violations(), Vec::<String>::new());
    drop(other);
    assert_eq!(fake.live(), Live::default());
}

/// The driver keeps a chunk that is to go: it stays where it is and is counted, and
/// goes when the driver lets it.
#[test]
fn a_chunk_that_the_driver_keeps_is_not_forgotten() {
    let fake = Arc::new(Fake::new());
    let mut s = setup(&fake);
    s.set(6 * CHUNK).unwrap();
    for nth in 3..=5 {
        fake.fail("hipMemUnmap", nth, INVALID_VALUE);
    }
    let error = s.arena.renew(&[CHUNK]).unwrap_err().to_string();
    assert!(error.contains("hipMemUnmap"), "{error}");
    assert_eq!((s.arena.capacity(), s.held()), (0, 4 * CHUNK));
    fake.peak_bytes();
    assert_eq!(s.arena.renew(&[5 * CHUNK + 1]).unwrap(), 5 * CHUNK + 1);
    assert_eq!(s.held(), 5 * CHUNK + GRANULE);
    assert_eq!(fake.peak_bytes(), 5 * CHUNK + GRANULE);
    let sent = random(&mut StdRng::seed_from_u64(4), 5 * CHUNK + 1);
    s.write(0, &sent);
    assert!(s.read(0, 5 * CHUNK + 1) == sent);
    s.end();
}

#[test]
fn many_small_steps_end_at_a_bound() {
    let fake = Arc::new(Fake::new());
    let mut s = setup(&fake);
    let counted = s.context.usage().allocations;
    for granules in 1..=CARD / GRANULE {
        s.set(granules * GRANULE).unwrap();
    }
    let counted = s.context.usage().allocations - counted;
    assert_eq!(counted, CARD / GRANULE, "chunks count as allocations");
    assert_eq!(fake.live().allocations, CARD / GRANULE);
    assert_eq!(s.arena.renew(&[CARD]).unwrap(), CARD);
    assert_eq!(fake.live().allocations, CARD / CHUNK);
    s.end();
}

/// Capacities of a short life in which everything happens: growth, a whole chunk less, a part
/// replaced on the device, one replaced through the host, growth behind a short chunk.
const LIFE: [u64; 7] = [
    6 * CHUNK,
    5 * CHUNK,
    3 * CHUNK + 3 * GRANULE,
    2 * CHUNK + GRANULE + 9,
    2 * CHUNK + 100,
    5 * CHUNK + 1,
    GRANULE,
];

/// Calls that are made to fail.
const CALLS: [&str; 10] = [
    "hipDeviceSynchronize",
    "hipMemGetAllocationGranularity",
    "hipMemAddressReserve",
    "hipMemCreate",
    "hipMemMap",
    "hipMemSetAccess",
    "hipMemUnmap",
    "hipMemcpyAsync",
    "hipMemsetAsync",
    "hipStreamSynchronize",
];

/// A life in which a step (0 is the beginning, the others are changes of capacity) meets a failing
/// call. Gives whether the step came to that call, and the device's loss.
fn life(
    fake: &Arc<Fake>,
    step: usize,
    (call, nth, code): (&str, u64, u32),
) -> (bool, Option<Error>) {
    let place = format!("{call} {nth} of step {step} with {code}");
    let mut met = false;
    let mut during = |now: usize, run: &mut dyn FnMut()| {
        if now != step {
            return run();
        }
        let before = fake.calls(call);
        fake.fail(call, nth, code);
        run();
        met = fake.calls(call) - before >= nth;
    };
    let mut made = None;
    during(0, &mut || made = Some(setup(fake)));
    fake.recover();
    let mut s = made.unwrap();
    let mut rng = StdRng::seed_from_u64(nth);
    let mut contents: Vec<u8> = Vec::new();
    for (now, bytes) in (1..).zip(LIFE) {
        let (before, held) = (s.arena.capacity(), s.held());
        fake.peak_bytes();
        let mut set = Ok(());
        during(now, &mut || set = s.set(bytes));
        if matches!(s.arena.memory, Memory::Chunks(_)) {
            let most = held.max(rounded(bytes));
            assert!(fake.peak_bytes() <= most, "{place}: {before} -> {bytes}");
            assert_eq!(fake.live().bytes, s.held(), "{place}");
        }
        match set {
            Ok(()) => assert_eq!(s.arena.capacity(), bytes, "{place}"),
            Err(error @ Error::Lost(_)) => {
                drop(s);
                fake.recover();
                assert_eq!(fake.live(), Live::default(), "{place}");
                assert_eq!(fake.violations(), Vec::<String>::new(), "{place}");
                return (met, Some(error));
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(call), "{place}: {text}");
                assert_eq!(s.arena.capacity(), before, "{place}: {text}");
            }
        }
        fake.recover();
        let kept = contents.len().min(s.arena.capacity() as usize);
        contents.truncate(kept);
        assert!(
            s.read(0, kept as u64) == contents,
            "{place}: {before} -> {bytes}"
        );
        let more = random(&mut rng, s.arena.capacity() - kept as u64);
        s.write(kept as u64, &more);
        contents.extend(more);
    }
    s.end();
    (met, None)
}

#[test]
fn every_call_that_fails_once_leaves_contents_and_no_leak() {
    let fake = Arc::new(Fake::new());
    let mut places = 0;
    for call in CALLS {
        for code in [OUT_OF_MEMORY, INVALID_VALUE] {
            for step in 0..=LIFE.len() {
                for nth in 1.. {
                    let (met, lost) = life(&fake, step, (call, nth, code));
                    assert!(lost.is_none(), "{call} {nth} of step {step}: {lost:?}");
                    if !met {
                        break;
                    }
                    places += 1;
                }
            }
        }
    }
    println!("{places} places");
    assert!(places > 150, "{places}");
}

#[test]
fn a_device_that_is_lost_is_told_and_leaves_nothing() {
    let fake = Arc::new(Fake::new());
    let mut losses = 0;
    // An unmapping that loses the device itself leaves what it was to unmap.
    let calls = CALLS.into_iter().filter(|call| *call != "hipMemUnmap");
    for call in calls.chain(["run:h2d", "run:d2h", "run:d2d"]) {
        for step in 1..=LIFE.len() {
            for nth in 1.. {
                let (met, lost) = life(&fake, step, (call, nth, LAUNCH_FAILURE));
                if !met {
                    break;
                }
                losses += u32::from(lost.is_some());
            }
        }
    }
    println!("{losses} losses");
    assert!(losses > 50, "{losses}");
}

#[test]
fn memory_that_does_not_come_back_is_a_loss_with_a_reason() {
    let fake = Arc::new(Fake::new());
    let mut s = setup(&fake);
    s.set(2 * CHUNK).unwrap();
    s.write(0, &[5; 2 * CHUNK as usize]);
    for nth in 1..=3 {
        fake.fail("hipMemCreate", nth, OUT_OF_MEMORY);
    }
    let error = s.set(2 * CHUNK - GRANULE).unwrap_err();
    assert!(
        matches!(&error, Error::Lost(l) if l.kind == LossKind::NoMemory && l.reason.contains("OutOfMemory")),
        "{error:?}"
    );
    assert_eq!(s.arena.capacity(), CHUNK);
    assert_eq!(s.read(0, CHUNK), [5; CHUNK as usize]);
    s.end();
}

#[test]
fn a_short_chunk_that_is_refused_is_tried_again_later() {
    let fake = Arc::new(Fake::new());
    let mut s = setup(&fake);
    s.set(4 * CHUNK).unwrap();
    s.write(0, &[6; 4 * CHUNK as usize]);
    fake.fail("hipMemCreate", 1, OUT_OF_MEMORY);
    s.set(2 * CHUNK + 1).unwrap();
    assert_eq!((s.arena.capacity(), s.held()), (2 * CHUNK + 1, 3 * CHUNK));
    assert_eq!(s.read(0, 2 * CHUNK + 1), [6; 2 * CHUNK as usize + 1]);
    s.set(2 * CHUNK + 1).unwrap();
    assert_eq!(s.held(), 2 * CHUNK + GRANULE);
    assert_eq!(s.read(0, 2 * CHUNK + 1), [6; 2 * CHUNK as usize + 1]);
    s.end();
}

#[test]
fn a_driver_that_does_not_map_as_it_says_is_given_one_allocation() {
    let fake = Arc::new(Fake::new());
    for (call, nth) in [
        ("hipMemSetAccess", 2),
        ("hipMemcpyAsync", 1),
        ("hipMemAddressReserve", 1),
        ("hipMemGetAllocationGranularity", 1),
    ] {
        fake.fail(call, nth, INVALID_VALUE);
        let mut s = setup(&fake);
        assert!(matches!(s.arena.memory, Memory::Whole(_)), "{call}");
        s.set(CHUNK + 1).unwrap();
        assert_eq!(s.held(), CHUNK + 1);
        s.end();
    }
    // The look went well, the first memory is refused for another reason than its want.
    let mut s = setup(&fake);
    fake.fail("hipMemSetAccess", 2, INVALID_VALUE);
    s.set(3 * CHUNK).unwrap();
    assert!(matches!(s.arena.memory, Memory::Whole(_)));
    assert_eq!((s.held(), fake.live().reservations), (3 * CHUNK, 0));
    s.end();
}
