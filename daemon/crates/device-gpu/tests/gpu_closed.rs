//! A GPU that is closed and opened again, on the fake runtime.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rocmforge_device::{
    ClosedDevice, Closing, Device, Error, LossKind, MemoryUse, Monitoring, Steps, Upload,
};
use rocmforge_device_gpu::{GpuConfig, GpuDevice};
use rocmforge_fake_hip::{Fake, HANG, Live};
use rocmforge_gguf::MappedFile;

use crate::fake_device;
use crate::gpu_aside::{CHUNK, RANGE, bytes, fill};
use crate::gpu_uploads::matrix;

const CAPACITY: u64 = 8 << 20;
const FIXED: u64 = 2 << 20;
const OUT_OF_MEMORY: u32 = 2;

fn device(fake: &Fake, config: GpuConfig) -> Box<GpuDevice> {
    Box::new(fake_device::open_as(config, fake, CAPACITY, FIXED))
}

fn usual(fake: &Fake) -> Box<GpuDevice> {
    device(fake, fake_device::config(fake, false))
}

/// Closes a device, of which nothing is left.
fn close(mut device: Box<dyn Device>, fake: &Fake, aside: u64) -> Box<dyn ClosedDevice> {
    assert!(fake.is_open());
    let closing = device.closing().expect("a GPU can be closed");
    let mut closed = closing.close(aside).unwrap();
    drop(device);
    closed.finish().unwrap();
    assert_eq!(fake.live(), Live::default());
    assert!(!fake.is_open());
    closed
}

/// Opens it again as it was.
fn open(closed: &mut dyn ClosedDevice) -> Result<Box<dyn Device>, Error> {
    let mut device = closed.open(&Steps::default())?;
    device.set_capacity(CAPACITY)?;
    let fixed = device.reserve_bytes(CAPACITY);
    device.set_reserve(0, fixed)?;
    Ok(device)
}

/// Uploads a segment whose file is registered then.
fn upload(device: &mut dyn Device, file: &Arc<MappedFile>, desc: &rocmforge_device::TensorDesc) {
    let layout = Arc::new(device.layout(std::slice::from_ref(desc)).unwrap());
    for _ in 0..2 {
        let upload = Upload {
            file: Arc::clone(file),
            layout: Arc::clone(&layout),
            slab: FIXED,
        };
        let ticket = device.begin_upload(upload).unwrap();
        device.wait_upload(ticket).unwrap();
        device.read_slab(FIXED, &mut [0; 16]).unwrap();
        let ended = device.finished_uploads();
        assert!(ended.iter().all(|(_, result)| result.is_ok()), "{ended:?}");
    }
}

/// Without what a pool has as it was needed, and what threads load ahead of need.
fn comparable(live: Live) -> Live {
    Live {
        events: 0,
        modules: 0,
        ..live
    }
}

#[test]
fn nothing_of_a_closed_device_is_left_and_it_opens_again() {
    let fake = Fake::new();
    let (file, desc) = matrix();
    let file = Arc::new(MappedFile::open(file.path()).unwrap());
    let mut device: Box<dyn Device> = usual(&fake);
    assert_eq!(device.set_aside(3 * CHUNK).unwrap(), 3 * CHUNK);
    upload(&mut *device, &file, &desc);
    let expected = comparable(fake.live());
    let info = device.info();
    let (mut pages, mut allocations) = (Vec::new(), info.allocations);
    for round in 0..20 {
        // Over the border of two chunks; the memory of one time is there the next time.
        fill(&mut *device, FIXED, 1 + round);
        pages.push(bytes(&mut *device, FIXED));
        let place = |n: usize| 2 * CHUNK - 4 * RANGE - RANGE / 2 + n as u64 % 5 * RANGE;
        assert!(
            device
                .save(FIXED, place(pages.len() - 1), RANGE, true)
                .unwrap()
        );
        let mut closed = close(device, &fake, 2 * CHUNK + RANGE);
        let held = closed.monitoring().map(|device| device.memory_use());
        assert_eq!(held, Some(MemoryUse::default()));
        device = open(&mut *closed).unwrap();
        drop(closed);
        for (n, page) in pages.iter().enumerate().rev().take(5) {
            device.restore(place(n), FIXED + RANGE, RANGE).unwrap();
            assert_eq!(&bytes(&mut *device, FIXED + RANGE), page, "round {round}");
        }
        upload(&mut *device, &file, &desc);
        assert_eq!(comparable(fake.live()), expected, "round {round}");
        assert!(device.info().allocations > allocations);
        allocations = device.info().allocations;
        assert_eq!(device.info().findings, info.findings);
    }
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
}

#[test]
fn a_closed_device_says_what_it_is_and_refuses_the_rest() {
    let fake = Fake::new();
    let device = usual(&fake);
    let (_file, desc) = matrix();
    let expected = device.layout(std::slice::from_ref(&desc)).unwrap();
    let (info, entries) = (device.info(), device.page_table_entries());
    let mut closed = close(device, &fake, 0);
    assert_eq!(closed.layout(&[desc]).unwrap(), expected);
    assert_eq!(
        (closed.info(), closed.page_table_entries()),
        (info, entries)
    );
    let monitoring = closed.monitoring().expect("it is watched still");
    assert_eq!(monitoring.free_bytes(), None);
    assert!(closed.selection().is_none() && closed.queued_reads().is_none());
    assert!(closed.recording().is_none() && closed.timing().is_none());
    assert!(closed.volatile_memory().is_none() && closed.closing().is_none());
    assert_eq!(
        closed.set_capacity(CAPACITY).unwrap_err().to_string(),
        "taking memory: the GPU is closed until the next request"
    );
    let saved = closed.host_copies().unwrap().save(0, 0, RANGE, true);
    let refused = [
        closed.reserve().unwrap().set_reserve(0, FIXED),
        closed.move_slab(0, FIXED, RANGE),
        closed.read_slab(0, &mut [0]),
        closed.write_slab(0, &[0]),
        closed.host_copies().unwrap().restore(0, 0, RANGE),
        saved.map(|_| ()),
    ];
    assert!(refused.iter().all(Result::is_err), "{refused:?}");
    // Nothing of that reached the driver.
    assert!(!fake.is_open());
    assert_eq!(fake.violations(), Vec::<String>::new());
}

#[test]
fn a_device_that_does_not_open_again_is_as_it_was_and_opens_the_next_time() {
    let fake = Fake::new();
    let mut device: Box<dyn Device> = usual(&fake);
    device.set_aside(CHUNK).unwrap();
    fill(&mut *device, FIXED, 3);
    let page = bytes(&mut *device, FIXED);
    assert!(device.save(FIXED, 0, RANGE, true).unwrap());
    let mut closed = close(device, &fake, RANGE);
    // The context, a stream, pinned memory.
    for (call, nth) in [
        ("hipSetDevice", 1),
        ("hipStreamCreateWithPriority", 2),
        ("hipHostMalloc", 1),
        ("hipHostMalloc", 4),
    ] {
        fake.fail(call, nth, OUT_OF_MEMORY);
        let refused = open(&mut *closed).map(|_| ()).unwrap_err();
        assert!(
            matches!(refused, Error::Memory { .. }),
            "{call}: {refused:?}"
        );
        assert_eq!(fake.live(), Live::default(), "{call}");
        assert!(!fake.is_open(), "{call}");
        fake.recover();
    }
    let mut device = open(&mut *closed).unwrap();
    device.restore(0, FIXED + RANGE, RANGE).unwrap();
    assert_eq!(bytes(&mut *device, FIXED + RANGE), page);
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
}

#[test]
fn a_device_that_something_uses_is_not_given_back() {
    let fake = Fake::new();
    let mut device = usual(&fake);
    let mut closed = device.close(0).unwrap();
    let refused = closed.finish().unwrap_err().to_string();
    assert_eq!(refused, "closing the GPU: something still uses its context");
    assert!(fake.is_open());
    drop(device);
    closed.finish().unwrap();
    assert_eq!(fake.violations(), Vec::<String>::new());
}

/// Who watches the first context sees the calls of the next.
#[test]
fn a_driver_that_hangs_while_the_device_opens_again_is_seen() {
    let fake = Fake::new();
    let config = GpuConfig {
        watchdog: Duration::from_millis(100),
        ..fake_device::config(&fake, false)
    };
    let device = device(&fake, config);
    let watch = device.watch();
    let mut closed = close(device, &fake, 0);
    fake.fail("hipSetDevice", 1, HANG);
    // It never ends, and holds what it has.
    std::thread::spawn(move || open(&mut *closed).map(|_| ()));
    let give_up = Instant::now() + Duration::from_secs(30);
    let seen = loop {
        assert!(Instant::now() < give_up, "nobody sees it");
        if let Some(seen) = watch() {
            break seen;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(seen.kind, LossKind::Hang);
}
