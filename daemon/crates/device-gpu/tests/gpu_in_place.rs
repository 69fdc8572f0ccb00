//! Uploads to a card that shares the machine's memory, on the fake runtime: read where the host has
//! them or copied first, the weights are the file's.

use crate::fake_device;
use std::io::Write;
use std::sync::Arc;

use crate::uploaded::upload;
use rocmforge_device::{Device, Preparation, Role, TensorDesc};
use rocmforge_device_gpu::{GpuConfig, GpuDevice, UploadWay};
use rocmforge_fake_hip::{Fake, Live, Misbehaviour};
use rocmforge_gguf::{MappedFile, TensorType};

/// Slots have 1.25 MiB then, and rows that are tried at least 1 MiB.
const CAPACITY: u64 = 160 << 20;
const SLAB: u64 = 16 << 20;
const COLS: u64 = 1024;

/// The host's memory that a case reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum From {
    Pinned,
    Files,
}

const BOTH: [From; 2] = [From::Pinned, From::Files];

/// A matrix of Q8_0 with scales of 1.0 and codes that tell their place, which begins `at` bytes
/// behind its file's begin.
fn matrix(rows: u64, at: u64) -> (tempfile::NamedTempFile, TensorDesc) {
    let blocks = rows * COLS / 32;
    let noise = (0..blocks).flat_map(|block| {
        let codes = (0..32).map(move |i| (block * 31 + block / 251 + i * 7) as u8);
        [0x00, 0x3c].into_iter().chain(codes)
    });
    let noise: Vec<u8> = noise.collect();
    let bytes = TensorType::Q8_0.row_bytes(COLS).unwrap() * rows;
    assert_eq!(noise.len() as u64, bytes);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&vec![0; at as usize]).unwrap();
    file.write_all(&noise).unwrap();
    file.flush().unwrap();
    let desc = TensorDesc {
        name: "w".to_owned(),
        ty: rocmforge_ops::WeightType::Q8_0,
        rows,
        cols: COLS,
        offset: at,
        bytes,
        role: Role::Matrix,
    };
    (file, desc)
}

/// A card, a part of the processor or not, that reads files from one memory alone. It has no
/// threads: whoever waits for an upload makes it.
fn open(fake: &Fake, integrated: bool, from: From) -> GpuDevice {
    fake.set_integrated(integrated);
    let config = GpuConfig {
        staging_threads: 0,
        ring_pieces: 3,
        ring_piece_bytes: 2 << 20,
        warm_up: false,
        ..fake_device::config(fake, false)
    };
    let config = config.with_uploads(UploadWay {
        ring_only: from == From::Pinned,
        ..UploadWay::default()
    });
    fake_device::open_as(config, fake, CAPACITY, SLAB)
}

/// What came of uploads of a matrix.
struct Came {
    /// What was found of reading in place.
    notes: Vec<String>,
    /// Copies of the last upload, that of its flag among them.
    copies: u64,
    slab: Vec<u8>,
}

/// Uploads a matrix of so many rows three times; what is read again is registered where anything
/// is.
fn brought(fake: &Fake, device: GpuDevice, rows: u64) -> Came {
    brought_from(fake, device, matrix(rows, 0))
}

fn brought_from(
    fake: &Fake,
    mut device: GpuDevice,
    (file, desc): (tempfile::NamedTempFile, TensorDesc),
) -> Came {
    let mapped = Arc::new(MappedFile::open(file.path()).unwrap());
    let layout = Arc::new(device.layout(std::slice::from_ref(&desc)).unwrap());
    let mut copies = 0;
    for _ in 0..3 {
        let before = fake.calls("hipMemcpyAsync");
        upload(&mut device, &mapped, &layout, SLAB);
        copies = fake.calls("hipMemcpyAsync") - before;
    }
    let mut slab = vec![0; desc.bytes as usize];
    device.read_slab(SLAB, &mut slab).unwrap();
    let findings = device.info().findings.into_iter();
    let notes = findings.filter(|f| f.starts_with("weights in ")).collect();
    device.forget_file(&mapped);
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
    Came {
        notes,
        copies,
        slab,
    }
}

const ROWS: u64 = 6000;

/// What a card with its own memory has of the matrix.
fn expected() -> Vec<u8> {
    let fake = Fake::new();
    let device = open(&fake, false, From::Pinned);
    let came = brought(&fake, device, ROWS);
    assert_eq!(came.notes, Vec::<String>::new(), "nothing is tried");
    assert!(came.copies > 4, "a copy for each piece: {}", came.copies);
    assert_eq!(fake.calls("hipHostGetDevicePointer"), 0);
    came.slab
}

#[test]
fn what_is_read_in_place_or_copied_is_the_file() {
    let expected = expected();
    let slow_copies = |from| match from {
        From::Pinned => Misbehaviour::SlowPinnedCopies,
        From::Files => Misbehaviour::SlowRegisteredCopies,
    };
    for from in BOTH {
        let memory = match from {
            From::Pinned => "pinned memory",
            From::Files => "registered files",
        };
        let cases = [
            (slow_copies(from), 20, "read in place: ", true),
            (Misbehaviour::SlowHostReads, 20, "copied first: ", false),
            (
                Misbehaviour::FalseHostReads,
                1 << 15,
                "copied first: kernels read other bytes there",
                false,
            ),
        ];
        for (misbehaviour, number, found, in_place) in cases {
            let fake = Fake::new();
            let device = open(&fake, true, from);
            fake.misbehave(misbehaviour, number);
            let came = brought(&fake, device, ROWS);
            let told = format!("weights in {memory} are {found}");
            let tells = came.notes.iter().any(|note| note.starts_with(&told));
            assert!(tells, "{told:?}: {:?}", came.notes);
            assert!(came.slab == expected, "{from:?}, {misbehaviour:?}");
            // Rows over the border of two windows are copied.
            let copied = came.copies > 3;
            assert_eq!(copied, !in_place, "{from:?}, {} copies", came.copies);
        }
    }
}

/// A card that cannot do it is one with slots, and the upload is none the worse.
#[test]
fn what_fails_while_it_is_tried_is_copied() {
    const INVALID_VALUE: u32 = 1;
    let expected = expected();
    // The first launch repacks by way of a slot, the second looks, the third repacks in place.
    for launch in [2, 3, 5] {
        let fake = Fake::new();
        let device = open(&fake, true, From::Pinned);
        fake.fail("hipModuleLaunchKernel", launch, INVALID_VALUE);
        let came = brought(&fake, device, ROWS);
        let [note] = &came.notes[..] else {
            panic!("{:?}", came.notes);
        };
        assert!(note.contains("copied first: "), "{note}");
        assert!(note.contains("hipModuleLaunchKernel"), "{note}");
        assert!(came.slab == expected, "{launch}");
    }
    let fake = Fake::new();
    let device = open(&fake, true, From::Files);
    // The driver does not say where kernels find what is registered.
    fake.fail("hipHostGetDevicePointer", 1, INVALID_VALUE);
    let came = brought(&fake, device, ROWS);
    assert!(
        came.notes.iter().all(|n| n.contains("pinned")),
        "{:?}",
        came.notes
    );
    assert!(came.copies > 4 && came.slab == expected, "{}", came.copies);
}

/// Times of small rows say nothing.
#[test]
fn small_rows_are_not_tried() {
    for from in BOTH {
        let fake = Fake::new();
        let device = open(&fake, true, from);
        let came = brought(&fake, device, 100);
        assert_eq!(came.notes, Vec::<String>::new());
    }
}

/// A file may have weights at any byte; kernels read words.
#[test]
fn rows_at_odd_addresses_are_copied() {
    let expected = expected();
    let fake = Fake::new();
    let device = open(&fake, true, From::Files);
    fake.misbehave(Misbehaviour::SlowRegisteredCopies, 20);
    let came = brought_from(&fake, device, matrix(ROWS, 1));
    let tried = came.notes.iter().any(|note| note.contains("files"));
    assert!(!tried, "{:?}", came.notes);
    assert!(came.copies > 4 && came.slab == expected, "{}", came.copies);
}
