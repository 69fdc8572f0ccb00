//! The HIP table and the owners above it, over the fake runtime: every function, every failure.
//!
//! Here: streams, events and threads, and what all tests use.

mod kernels;
mod memory;
mod refusals;

use std::sync::Arc;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use rocmforge_fake_hip::{Fake, Live};
use rocmforge_gpu_driver::{
    Buffer, Class, Context, Event, Libraries, PinnedBuffer, Priority, Stream, Vendor, open,
};

const OUT_OF_MEMORY: u32 = 2;
const LAUNCH_FAILURE: u32 = 719;

fn libraries(fake: &Fake) -> Libraries {
    Libraries {
        hip: Some(fake.path().to_owned()),
        cuda: None,
    }
}

fn card(fake: &Fake) -> Context {
    let driver = open(Vendor::Hip, &libraries(fake)).unwrap();
    Context::open(driver, 0).unwrap()
}

fn stream(card: &Context) -> Stream {
    Stream::new(card, Priority::Normal).unwrap()
}

/// Random bytes; the seed is printed, as a failing test shows its output.
fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random()).collect()
}

/// Pages of random bytes.
fn mapping(seed: u64, len: usize) -> Arc<memmap2::Mmap> {
    let mut map = memmap2::MmapMut::map_anon(len).unwrap();
    map.copy_from_slice(&random_bytes(seed, len));
    Arc::new(map.make_read_only().unwrap())
}

/// Nothing is alive, nothing was noted.
#[track_caller]
fn all_given_back(fake: &Fake) {
    assert_eq!(fake.live(), Live::default());
    assert_eq!(fake.violations(), Vec::<String>::new());
}

#[test]
fn work_waits_for_synchronization_and_streams_for_events() {
    let fake = Fake::new();
    let card = card(&fake);
    let (upload, compute) = (stream(&card), Stream::new(&card, Priority::High).unwrap());
    let buffer = Buffer::new(&card, 64).unwrap();
    let mut from = PinnedBuffer::new(&card, 64).unwrap();
    let into = PinnedBuffer::new(&card, 64).unwrap();
    // SAFETY: no copy of it is queued yet.
    unsafe { from.as_mut_slice() }.fill(1);
    let (start, uploaded) = (
        Event::new(&card, true).unwrap(),
        Event::new(&card, true).unwrap(),
    );
    assert!(uploaded.is_passed().unwrap(), "never recorded");
    start.record(&upload).unwrap();
    // SAFETY: the pinned buffers outlive the waits below.
    unsafe {
        buffer
            .copy_from_host(0, from.as_ptr(), 64, &upload)
            .unwrap()
    };
    uploaded.record(&upload).unwrap();
    compute.wait(&uploaded).unwrap();
    // SAFETY: as above; ordered behind the upload by the event.
    unsafe { buffer.copy_to_host(0, into.as_ptr(), 64, &compute).unwrap() };
    assert!(!uploaded.is_passed().unwrap());
    assert!(!compute.is_idle().unwrap());
    let early = uploaded.elapsed_ms_since(&start).unwrap_err();
    assert_eq!(early.class(), Class::NotReady);
    // Waiting for the second stream does the first one's work before.
    compute.synchronize().unwrap();
    assert!(uploaded.is_passed().unwrap() && upload.is_idle().unwrap());
    // SAFETY: the stream has passed the copy.
    assert_eq!(unsafe { into.as_slice() }, [1; 64]);
    assert!(uploaded.elapsed_ms_since(&start).unwrap() > 0.0);
    // Polling alone ends too.
    // SAFETY: as above.
    unsafe { buffer.copy_to_host(0, into.as_ptr(), 64, &compute).unwrap() };
    let polls = (0..10).take_while(|_| !compute.is_idle().unwrap()).count();
    assert!((1..10).contains(&polls), "{polls}");
    drop((from, into, buffer, start, uploaded, upload, compute));
    all_given_back(&fake);
}

#[test]
fn owners_may_go_on_any_thread_and_in_any_order() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let event = Event::new(&card, false).unwrap();
    let buffer = Buffer::new(&card, 100).unwrap();
    drop(card);
    std::thread::spawn(move || {
        event.record(&stream).unwrap();
        drop(stream);
        assert!(event.is_passed().unwrap());
        drop((buffer, event));
    })
    .join()
    .unwrap();
    all_given_back(&fake);
}
