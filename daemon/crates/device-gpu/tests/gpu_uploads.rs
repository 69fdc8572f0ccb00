//! Uploads on the fake runtime: when they count as ended.

use crate::fake_device;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::uploaded::upload;
use rocmforge_device::ops::PlacedBuf;
use rocmforge_device::{
    Buf, Device, Error, Preparation, Role, Rows, Scratch, ScratchLayout, SegmentLayout, TensorDesc,
    Upload, UploadTicket,
};
use rocmforge_device_gpu::{GpuConfig, GpuDevice, UploadWay};
use rocmforge_fake_hip::{Fake, Live, Misbehaviour};
use rocmforge_gguf::{MappedFile, TensorType};

const INVALID_VALUE: u32 = 1;
const CAPACITY: u64 = 4 << 20;
const SLAB: u64 = 2 << 20;
const ROWS: u64 = 1000;
const COLS: u64 = 256;

fn device(fake: &Fake) -> GpuDevice {
    fake_device::open_as(fake_device::config(fake, false), fake, CAPACITY, SLAB)
}

/// Whoever waits for an upload makes it.
fn without_threads(config: GpuConfig) -> GpuConfig {
    GpuConfig {
        staging_threads: 0,
        ..config
    }
}

/// A matrix of zeros, in several pieces of a slot.
pub(crate) fn matrix() -> (tempfile::NamedTempFile, TensorDesc) {
    let bytes = TensorType::Q8_0.row_bytes(COLS).unwrap() * ROWS;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&vec![0; bytes as usize]).unwrap();
    file.flush().unwrap();
    let desc = TensorDesc {
        name: "w".to_owned(),
        ty: rocmforge_ops::WeightType::Q8_0,
        rows: ROWS,
        cols: COLS,
        offset: 0,
        bytes,
        role: Role::Matrix,
    };
    (file, desc)
}

/// Uploads the segment a first time, through the ring, so that the next time registers its windows.
fn upload_before(device: &mut GpuDevice, file: &Arc<MappedFile>, layout: &Arc<SegmentLayout>) {
    upload(device, file, layout, SLAB);
    ended(device)[0].1.as_ref().unwrap();
}

/// The next uploads that have ended.
fn ended(device: &mut GpuDevice) -> Vec<(UploadTicket, Result<(), Error>)> {
    let begin = Instant::now();
    loop {
        let ended = device.finished_uploads();
        if !ended.is_empty() {
            return ended;
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "no end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Once an upload's event could not be asked for, and it was told as ended while its
/// copies were still queued.
#[test]
fn an_upload_whose_event_cannot_be_asked_for_is_waited_for() {
    let fake = Fake::new();
    let mut device = device(&fake);
    let (file, desc) = matrix();
    let mapped = Arc::new(MappedFile::open(file.path()).unwrap());
    let layout = Arc::new(device.layout(&[desc]).unwrap());
    upload_before(&mut device, &mapped, &layout);
    // Registered memory, so that nobody but who asks for the upload's end asks for an event.
    fake.fail("hipEventQuery", 1, INVALID_VALUE);
    let asked = fake.calls("hipEventQuery");
    let ticket = device
        .begin_upload(Upload {
            file: Arc::clone(&mapped),
            layout,
            slab: SLAB,
        })
        .unwrap();
    let ended = ended(&mut device);
    assert!(
        fake.calls("hipEventQuery") > asked,
        "the call that fails was made"
    );
    assert_eq!(ended[0].0, ticket);
    // Whatever it came to, nothing of it is under way.
    assert!(ended[0].1.is_ok(), "{ended:?}");
    assert_eq!(fake.queued(), 0);
    device.forget_file(&mapped);
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
}

/// Once the windows of an upload were given to others before it was known to have ended: the driver
/// was told to forget memory that copies were still queued from.
#[test]
fn the_windows_of_an_upload_stay_until_its_copies_have_ended() {
    let fake = Fake::new();
    let mut device = device(&fake);
    let (file, desc) = matrix();
    let mapped = Arc::new(MappedFile::open(file.path()).unwrap());
    let layout = Arc::new(device.layout(&[desc]).unwrap());
    upload_before(&mut device, &mapped, &layout);
    let ticket = device
        .begin_upload(Upload {
            file: Arc::clone(&mapped),
            layout,
            slab: SLAB,
        })
        .unwrap();
    device.wait_upload(ticket).unwrap();
    assert!(fake.queued() > 0 && fake.live().registrations > 0);
    // The driver does not tell whether it has ended, asked twice.
    fake.fail("hipEventQuery", 1, INVALID_VALUE);
    fake.fail("hipEventQuery", 2, INVALID_VALUE);
    let ended = device.finished_uploads();
    assert!(ended[0].1.is_err(), "{ended:?}");
    assert!(
        fake.queued() <= 2,
        "all but the compute stream's wait and the clearing of the flag"
    );
    device.forget_file(&mapped);
    assert_eq!(fake.live().registrations, 0);
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
}

/// Once the compute stream could not be told to wait for an upload, and the upload was
/// forgotten while its copies were still queued: they ran into a slab, and an arena,
/// that were somebody else's.
#[test]
fn an_upload_that_no_stream_can_wait_for_is_waited_for_by_the_host() {
    const CALL: &str = "hipStreamWaitEvent";
    let fake = Fake::new();
    // Where copies go to several streams, those that are timed wait for others besides.
    let config = fake_device::config(&fake, false).with_uploads(UploadWay {
        copy_streams: Some(1),
        ..UploadWay::default()
    });
    let mut device = fake_device::open_as(config, &fake, CAPACITY, SLAB);
    let (file, desc) = matrix();
    let mapped = Arc::new(MappedFile::open(file.path()).unwrap());
    let layout = Arc::new(device.layout(&[desc]).unwrap());
    let mut upload = |n: u64| {
        // The streams wait for one another piece by piece, and at last for the whole.
        if n > 0 {
            fake.fail(CALL, n, INVALID_VALUE);
        }
        let calls = fake.calls(CALL);
        let begun = device.begin_upload(Upload {
            file: Arc::clone(&mapped),
            layout: Arc::clone(&layout),
            slab: SLAB,
        });
        let waited = device.wait_upload(begun.unwrap());
        let queued = fake.queued();
        (fake.calls(CALL) - calls, waited, queued)
    };
    // The first one finds slots that nobody has used.
    upload(0).1.unwrap();
    let (calls, waited, queued) = upload(0);
    waited.unwrap();
    assert!(calls > 1 && queued > 0, "{calls}, {queued}");
    let (_, waited, queued) = upload(calls);
    let error = waited.unwrap_err().to_string();
    assert!(error.contains(CALL), "{error}");
    assert_eq!(queued, 0);
    assert_eq!(fake.calls("hipMemUnmap"), 2, "those of the look");
    device.set_capacity(CAPACITY / 2).unwrap();
    device.forget_file(&mapped);
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
}

/// Uploads a matrix twice, which is to be registered or not: what is read again is, what is read
/// first goes through pinned memory. The device has no threads, which would register it afterwards.
#[track_caller]
fn uploads(fake: &Fake, mut device: GpuDevice, registers: bool) {
    let (file, desc) = matrix();
    let mapped = Arc::new(MappedFile::open(file.path()).unwrap());
    let layout = Arc::new(device.layout(&[desc]).unwrap());
    let registered = fake.calls("hipHostRegister");
    for again in [false, true] {
        upload(&mut device, &mapped, &layout, SLAB);
        assert_eq!(
            fake.calls("hipHostRegister") > registered,
            registers && again,
            "{again}, {:?}",
            device.info().findings
        );
    }
    device.forget_file(&mapped);
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
}

/// Once registrations were made wherever the driver did not refuse them: at 2 MB/s on some cards.
/// Once, too, nothing held which of the two ways is taken where both work.
#[test]
fn files_are_registered_only_where_a_trial_finds_that_faster() {
    use Misbehaviour::*;
    // 64 KiB so slow are not yet a crawl, and 4 MiB are slower than any copy.
    let registering_is_slow = (CrawlingRegistration, 60);
    let pinned_is_slow = (SlowPinnedCopies, 60);
    let cases: [(&str, (Misbehaviour, u64), bool); 5] = [
        ("registered, they came at", (SlowRegistration, 300), false),
        ("hipHostRegister", (SlowRegistration, 0), false),
        ("GB/s registered", registering_is_slow, false),
        ("GB/s through pinned memory", pinned_is_slow, true),
        (
            "registered, other bytes came",
            (FalseRegisteredBytes, 1 << 20),
            false,
        ),
    ];
    for (found, (misbehaviour, number), registers) in cases {
        let fake = Fake::new();
        fake.misbehave(misbehaviour, number);
        fake.set_register(found != "hipHostRegister");
        let config = fake_device::config(&fake, true);
        let device = fake_device::open_as(without_threads(config), &fake, CAPACITY, SLAB);
        let findings = device.info().findings.join("\n");
        assert!(findings.contains(found), "{findings}");
        let way = match registers {
            true => "files are registered",
            false => "files go through pinned memory",
        };
        assert!(findings.contains(way), "{findings}");
        fake.misbehave(misbehaviour, 0);
        uploads(&fake, device, registers);
    }
}

/// Uploads by pinned memory alone could not be measured on a card whose mappings are registered.
#[test]
fn uploads_through_pinned_memory_alone_register_nothing() {
    for ring_only in [false, true] {
        let fake = Fake::new();
        let way = UploadWay {
            ring_only,
            ..UploadWay::default()
        };
        let config = fake_device::config(&fake, false).with_uploads(way);
        let device = fake_device::open_as(without_threads(config), &fake, CAPACITY, SLAB);
        let findings = device.info().findings.join("\n");
        let told = findings.contains("no mapping is to be registered");
        assert_eq!(told, ring_only, "{findings}");
        uploads(&fake, device, !ring_only);
    }
}

/// Slots are filled by one stream or by some in turn: what is read back is the file's either way.
#[test]
fn an_upload_is_the_same_on_any_number_of_copy_streams() {
    let (file, desc) = matrix();
    let noise: Vec<u8> = (0..ROWS * COLS / 32)
        .flat_map(|block| {
            // A scale of 1.0 as f16, and 32 codes.
            let codes = (0..32).map(move |i| (block * 31 + i * 7) as u8);
            [0x00, 0x3c].into_iter().chain(codes)
        })
        .collect();
    assert_eq!(noise.len() as u64, desc.bytes);
    std::fs::write(file.path(), &noise).unwrap();
    let brought = |copy_streams: usize, ring_only: bool| {
        let fake = Fake::new();
        let way = UploadWay {
            ring_only,
            copy_streams: Some(copy_streams),
        };
        let config = fake_device::config(&fake, false).with_uploads(way);
        let mut device = fake_device::open_as(config, &fake, CAPACITY, SLAB);
        let streams = fake.live().streams;
        let mapped = Arc::new(MappedFile::open(file.path()).unwrap());
        let layout = Arc::new(device.layout(std::slice::from_ref(&desc)).unwrap());
        // Twice, so that slots are used again and some copies are timed.
        for _ in 0..2 {
            upload(&mut device, &mapped, &layout, SLAB);
        }
        // Codes and scales, as many bytes as in the file.
        let mut out = vec![0; desc.bytes as usize];
        device.read_slab(SLAB, &mut out).unwrap();
        device.forget_file(&mapped);
        drop(device);
        assert_eq!(fake.violations(), Vec::<String>::new());
        assert_eq!(fake.live(), Live::default());
        (streams, out)
    };
    let (streams, expected) = brought(1, true);
    assert!(expected.iter().any(|&byte| byte != 0));
    for copy_streams in 1..=2 {
        for ring_only in [false, true] {
            let (more, out) = brought(copy_streams, ring_only);
            assert_eq!(more - streams, copy_streams as u64 - 1);
            assert!(out == expected, "{copy_streams} streams, {ring_only}");
        }
    }
}

/// Copies of a few rows once waited in the copy engine until the uploads that lay there were done.
#[test]
fn rows_pass_an_upload_by_a_kernel() {
    const WIDTH: u64 = 1001;
    let fake = Fake::new();
    let mut device = device(&fake);
    let (file, desc) = matrix();
    let layout = Arc::new(device.layout(&[desc]).unwrap());
    let scratch_at = SLAB + layout.bytes.next_multiple_of(4096);
    let scratch = ScratchLayout {
        bufs: vec![PlacedBuf {
            at: 0,
            width: WIDTH,
            rows: Rows::Tokens,
        }],
        bytes: WIDTH * 4,
        tokens: 1,
        outputs: 1,
        tables: 0,
        experts: 0,
        float_weights: false,
        both_ways: false,
        parts: false,
    };
    let scratch = Scratch {
        layout: &scratch,
        base: scratch_at,
    };
    let rows = |first: u32| -> Vec<f32> { (0..WIDTH as u32).map(|i| (first + i) as f32).collect() };
    let there = |device: &mut GpuDevice| {
        let mut out = vec![0.0; WIDTH as usize];
        device.read(scratch, Buf(0), &mut out).unwrap();
        out
    };
    // The look at mapped memory is made by the same kernel.
    let at_opening = fake.calls("gather");
    let kernels = || fake.calls("gather") - at_opening;
    device.write(scratch, Buf(0), &rows(7)).unwrap();
    assert_eq!(there(&mut device), rows(7));
    assert_eq!(kernels(), 0, "the copy engine has nothing else to do");
    let ticket = device
        .begin_upload(Upload {
            file: Arc::new(MappedFile::open(file.path()).unwrap()),
            layout,
            slab: SLAB,
        })
        .unwrap();
    device.write(scratch, Buf(0), &rows(70)).unwrap();
    assert_eq!(there(&mut device), rows(70));
    assert_eq!(kernels(), 1);
    device.wait_upload(ticket).unwrap();
    assert_eq!(there(&mut device), rows(70));
    device.write(scratch, Buf(0), &rows(700)).unwrap();
    assert_eq!(there(&mut device), rows(700));
    assert_eq!(kernels(), 1, "it has ended");
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
}
