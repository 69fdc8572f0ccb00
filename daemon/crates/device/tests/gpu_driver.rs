//! The HIP table and the owners above it, over the fake runtime: every function, every failure.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use rocmforge_device::gpu::{
    Buffer, Class, Context, DevicePtr, Error, Event, Kernel, LaunchConfig, Libraries, Module,
    PinnedBuffer, Priority, Registration, Stream, Vendor, open, probe,
};
use rocmforge_fake_hip::{Fake, Live, marker_image, when_run};

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
fn a_probe_lists_the_card_and_takes_no_memory() {
    let fake = Fake::new();
    let reports = probe(&libraries(&fake));
    let hip = &reports[0];
    assert_eq!(hip.errors, []);
    assert_eq!(hip.devices.len(), 1);
    let device = &hip.devices[0];
    assert_eq!(
        (device.name.as_str(), device.arch.as_str()),
        ("Fake GPU", "gfx1100")
    );
    assert_eq!((device.wave, device.compute_units), (32, 8));
    assert_eq!(device.shared_per_block, 64 << 10);
    assert_eq!(device.pci_bus_id, "0000:01:00.0");
    assert_eq!(hip.versions.as_ref().unwrap().runtime, "6.4.0");
    assert!(
        hip.to_string()
            .contains("hip:0 Fake GPU (gfx1100, 8 units, wave 32, 1024 MiB)")
    );
    assert_eq!((fake.live(), fake.calls("hipMalloc")), (Live::default(), 0));
}

#[test]
fn bytes_come_back_from_every_kind_of_copy() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let sent = random_bytes(1, 10_000);
    let mut buffer = Buffer::new(&card, 20_000).unwrap();
    // From pageable memory and back, waited for.
    buffer.write(16, &sent, &stream).unwrap();
    let mut back = vec![0; sent.len()];
    buffer.read(16, &mut back, &stream).unwrap();
    assert_eq!(back, sent);
    // Through pinned memory, inside the device, and a fill, in stream order.
    let mut from = PinnedBuffer::new(&card, 4096).unwrap();
    let into = PinnedBuffer::new(&card, 4096).unwrap();
    // SAFETY: no copy of it is queued yet.
    unsafe { from.as_mut_slice() }.copy_from_slice(&sent[..4096]);
    // SAFETY: both pinned buffers live on and are left alone until the stream was waited for.
    unsafe {
        buffer
            .copy_from_host(0, from.as_ptr(), 4096, &stream)
            .unwrap();
        buffer.copy_within(0, 8192, 4096, &stream).unwrap();
        buffer.fill(8192, 7, 100, &stream).unwrap();
        buffer
            .copy_to_host(8192, into.as_ptr(), 4096, &stream)
            .unwrap();
    }
    assert_eq!(fake.queued(), 4);
    stream.synchronize().unwrap();
    // SAFETY: the stream has passed all copies.
    let got = unsafe { into.as_slice() };
    assert_eq!(&got[..100], [7; 100]);
    assert_eq!(&got[100..], &sent[100..4096]);
    assert_eq!(card.usage().allocations, 3);
    assert_eq!(card.usage().device_bytes, 20_000);
    assert_eq!(card.memory().unwrap().free, (1 << 30) - 20_000);
    drop((buffer, from, into, stream));
    assert_eq!(card.usage().device_bytes + card.usage().pinned_bytes, 0);
    all_given_back(&fake);
}

#[test]
fn ranges_beyond_a_buffer_never_reach_the_driver() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let mut buffer = Buffer::new(&card, 100).unwrap();
    let mut bytes = [0; 10];
    for offset in [91, 100, u64::MAX] {
        let write = buffer.write(offset, &bytes, &stream);
        assert!(matches!(write, Err(Error::Range { .. })), "{write:?}");
        assert!(matches!(
            buffer.read(offset, &mut bytes, &stream),
            Err(Error::Range { .. })
        ));
        // SAFETY: nothing else is queued.
        let fill = unsafe { buffer.fill(offset, 0, 10, &stream) };
        assert!(matches!(fill, Err(Error::Range { .. })));
    }
    // SAFETY: nothing else is queued.
    let overlap = unsafe { buffer.copy_within(0, 9, 10, &stream) };
    assert!(matches!(overlap, Err(Error::Range { .. })));
    assert_eq!(
        fake.calls("hipMemcpyAsync") + fake.calls("hipMemsetAsync"),
        0
    );
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
fn a_registered_mapping_is_read_when_the_copy_happens() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let mapping = mapping(2, 3 * 4096);
    let ptr = mapping.as_ptr();
    // SAFETY: the Arc keeps the bytes; registered once.
    let registration = unsafe { Registration::new(&card, ptr, 8192, mapping.clone()) }.unwrap();
    assert_eq!(
        (fake.live().registrations, card.usage().registered_bytes),
        (1, 8192)
    );
    // SAFETY: refused, so nothing depends on it.
    let again = unsafe { Registration::new(&card, ptr, 4096, mapping.clone()) }.unwrap_err();
    assert_eq!(again.class(), Class::Other);
    let buffer = Buffer::new(&card, 8192).unwrap();
    // SAFETY: the registration outlives the wait.
    unsafe { buffer.copy_from_host(0, ptr, 8192, &stream).unwrap() };
    assert_eq!(fake.queued(), 1);
    let mut back = vec![0; 8192];
    buffer.read(0, &mut back, &stream).unwrap();
    assert_eq!(back, mapping[..8192]);
    // Half inside, half outside: refused by the call.
    // SAFETY: refused, so nothing is queued.
    let partly = unsafe { buffer.copy_from_host(0, ptr.wrapping_add(4096), 8192, &stream) };
    assert!(partly.is_err());
    assert_eq!(fake.violations().len(), 1);
    // Given back too early.
    // SAFETY: breaks the promise on purpose; the fake finishes the copy before it lets go.
    unsafe { buffer.copy_from_host(0, ptr, 8192, &stream).unwrap() };
    drop(registration);
    let noted = fake.violations();
    assert!(noted[0].contains("hipHostUnregister"), "{noted:?}");
    assert_eq!(Arc::strong_count(&mapping), 1);
    fake.set_register(false);
    // SAFETY: refused, so nothing depends on it.
    let refused = unsafe { Registration::new(&card, ptr, 4096, mapping.clone()) }.unwrap_err();
    assert_eq!(refused.class(), Class::NotSupported);
    assert_eq!(card.usage().registered_bytes, 0);
}

/// The bytes of gather's argument struct.
fn gather_args(x: DevicePtr, out: DevicePtr, rows: DevicePtr, cols: u32) -> Vec<u8> {
    let mut args = Vec::new();
    for address in [x, out, rows] {
        args.extend(address.0.to_le_bytes());
    }
    args.extend(cols.to_le_bytes());
    args.extend(0u32.to_le_bytes());
    args
}

const COLS: u32 = 8;
const TAKEN: [u32; 3] = [4, 0, 4];
const CONFIG: LaunchConfig = LaunchConfig {
    grid: [1, TAKEN.len() as u32, 1],
    block: [256, 1, 1],
    shared_bytes: 0,
    overlaps: false,
};

/// Five rows of floats on the card, three of them to be gathered.
struct Gather {
    kernel: Kernel,
    x: Buffer,
    rows: Buffer,
    out: Buffer,
    values: Vec<f32>,
}

impl Gather {
    fn new(card: &Context, stream: &Stream, seed: u64) -> Gather {
        let module = Module::load(card, &marker_image(&["gather"])).unwrap();
        let kernel = module.kernel("gather").unwrap();
        let values: Vec<f32> = random_bytes(seed, 5 * COLS as usize)
            .into_iter()
            .map(f32::from)
            .collect();
        let mut x = Buffer::new(card, 4 * values.len() as u64).unwrap();
        let mut rows = Buffer::new(card, 4 * TAKEN.len() as u64).unwrap();
        let out = Buffer::new(card, u64::from(4 * COLS) * TAKEN.len() as u64).unwrap();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        x.write(0, &bytes, stream).unwrap();
        let bytes: Vec<u8> = TAKEN.iter().flat_map(|v| v.to_le_bytes()).collect();
        rows.write(0, &bytes, stream).unwrap();
        Gather {
            kernel,
            x,
            rows,
            out,
            values,
        }
    }

    fn args(&self) -> Vec<u8> {
        gather_args(self.x.ptr(), self.out.ptr(), self.rows.ptr(), COLS)
    }

    fn check(&self, stream: &Stream, taken: [u32; 3]) {
        let mut bytes = vec![0; self.out.bytes() as usize];
        self.out.read(0, &mut bytes, stream).unwrap();
        let (words, _) = bytes.as_chunks::<4>();
        let got: Vec<f32> = words.iter().map(|w| f32::from_le_bytes(*w)).collect();
        let cols = COLS as usize;
        let expected: Vec<f32> = taken
            .iter()
            .flat_map(|&row| &self.values[row as usize * cols..][..cols])
            .copied()
            .collect();
        assert_eq!(got, expected);
    }
}

#[test]
fn a_kernel_runs_and_its_module_lives_as_long_as_it() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let gather = Gather::new(&card, &stream, 3);
    assert_eq!(fake.live().modules, 1, "the kernel holds it");
    assert_eq!(gather.kernel.attributes().unwrap().threads_per_block, 1024);
    assert_eq!(gather.kernel.blocks_per_unit(256, 0).unwrap(), 8);
    gather.kernel.reserve_shared(65536).unwrap();
    // SAFETY: the struct is gather's, over buffers that outlive the read below.
    unsafe {
        gather
            .kernel
            .launch(CONFIG, &gather.args(), &stream)
            .unwrap()
    };
    gather.check(&stream, TAKEN);
    // A struct of another size is refused.
    // SAFETY: refused, so nothing is queued.
    let short = unsafe { gather.kernel.launch(CONFIG, &gather.args()[..24], &stream) };
    assert!(short.is_err());
    assert!(fake.violations()[0].contains("24 bytes of arguments for 32"));
    drop((gather, stream));
    all_given_back(&fake);
}

#[test]
fn a_module_names_the_kernel_that_it_lacks() {
    let fake = Fake::new();
    let card = card(&fake);
    let module = Module::load(&card, &marker_image(&["gather"])).unwrap();
    let error = module.kernel("add_bias").unwrap_err();
    assert_eq!(error.to_string(), "the module has no kernel 'add_bias'");
    assert!(module.kernel("a\0b").is_err());
    let error = Module::load(&card, b"neither marker nor ELF").unwrap_err();
    assert!(
        error.to_string().contains("hipErrorNoBinaryForGpu (209)"),
        "{error}"
    );
}

#[test]
fn a_captured_graph_replays_with_what_memory_holds_then() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let mut gather = Gather::new(&card, &stream, 4);
    let graph = stream
        .capture(|| -> Result<(), Error> {
            // SAFETY: the struct is gather's; its buffers outlive the graph.
            unsafe { gather.kernel.launch(CONFIG, &gather.args(), &stream) }
        })
        .unwrap();
    assert_eq!((graph.nodes(), fake.queued()), (1, 0));
    // SAFETY: as above.
    unsafe { graph.launch(&stream).unwrap() };
    gather.check(&stream, TAKEN);
    let rows: Vec<u8> = [1u32, 2, 3].iter().flat_map(|v| v.to_le_bytes()).collect();
    gather.rows.write(0, &rows, &stream).unwrap();
    // SAFETY: as above.
    unsafe { graph.launch(&stream).unwrap() };
    gather.check(&stream, [1, 2, 3]);
    assert_eq!(
        fake.live().graphs,
        1,
        "the source of an instantiated graph is gone"
    );
    drop((graph, gather, stream));
    all_given_back(&fake);
}

#[test]
fn a_capture_that_fails_ends_and_the_stream_goes_on() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let gather = Gather::new(&card, &stream, 5);
    // The closure's own error comes back.
    let refused = stream.capture(|| {
        Err(Error::Kernel {
            kernel: "own".to_owned(),
        })
    });
    assert!(matches!(refused, Err(Error::Kernel { .. })));
    // An allocation inside breaks the capture, whatever the closure makes of it.
    let broken = stream.capture(|| -> Result<(), Error> {
        assert!(Buffer::new(&card, 1).is_err());
        Ok(())
    });
    assert!(
        broken
            .unwrap_err()
            .to_string()
            .contains("hipErrorStreamCaptureInvalidated")
    );
    for call in [
        "hipStreamBeginCapture",
        "hipStreamEndCapture",
        "hipGraphGetNodes",
        "hipGraphInstantiate",
    ] {
        fake.fail(call, 1, OUT_OF_MEMORY);
        let failed = stream.capture(|| -> Result<(), Error> { Ok(()) });
        assert!(failed.unwrap_err().is_out_of_memory(), "{call}");
        fake.recover();
        assert_eq!(fake.live().graphs, 0, "{call}");
    }
    // SAFETY: the struct is gather's, over buffers that outlive the read below.
    unsafe {
        gather
            .kernel
            .launch(CONFIG, &gather.args(), &stream)
            .unwrap()
    };
    gather.check(&stream, TAKEN);
}

/// A little of everything that allocates, as a device does it at its start.
fn build(card: &Context) -> Result<(), Error> {
    let stream = Stream::new(card, Priority::Normal)?;
    let event = Event::new(card, false)?;
    let arena = Buffer::new(card, 1 << 20)?;
    let ring = PinnedBuffer::new(card, 4096)?;
    let second = PinnedBuffer::new(card, 4096)?;
    let mapping = mapping(7, 8192);
    // SAFETY: the Arc keeps the bytes; registered once.
    let registration = unsafe { Registration::new(card, mapping.as_ptr(), 4096, mapping.clone())? };
    let module = Module::load(card, &marker_image(&["*"]))?;
    let _kernel = module.kernel("gather")?;
    // SAFETY: all outlive the wait; the ring was zeroed.
    unsafe {
        arena.copy_from_host(0, ring.as_ptr(), 4096, &stream)?;
        arena.copy_from_host(4096, mapping.as_ptr(), 4096, &stream)?;
    }
    event.record(&stream)?;
    // Whatever happens between, what is queued is waited for before its memory goes.
    let result = event.synchronize();
    let _waited = stream.synchronize();
    drop((registration, second));
    result
}

#[test]
fn a_refusal_at_any_call_gives_everything_back() {
    let fake = Fake::new();
    let card = card(&fake);
    build(&card).unwrap();
    let calls = [
        "hipStreamCreateWithPriority",
        "hipDeviceGetStreamPriorityRange",
        "hipEventCreateWithFlags",
        "hipMalloc",
        "hipHostMalloc",
        "hipHostRegister",
        "hipModuleLoadData",
        "hipModuleGetFunction",
        "hipMemcpyAsync",
        "hipEventRecord",
        "hipEventSynchronize",
    ];
    let mut refused = 0;
    for call in calls {
        let before = fake.calls(call);
        build(&card).unwrap();
        for nth in 1..=fake.calls(call) - before {
            fake.fail(call, nth, OUT_OF_MEMORY);
            let error = build(&card).unwrap_err();
            assert!(error.is_out_of_memory(), "{call} {nth}: {error}");
            assert!(error.to_string().starts_with(call), "{error}");
            refused += 1;
            // A copy that was queued before the refusal may be noted as late; nothing stays alive.
            assert_eq!(fake.live(), Live::default(), "{call} {nth}");
        }
    }
    assert!(refused >= calls.len() + 2, "{refused}");
    // It goes on as before.
    let usage = card.usage();
    assert_eq!(
        (
            usage.device_bytes,
            usage.pinned_bytes,
            usage.registered_bytes
        ),
        (0, 0, 0)
    );
    let _late = fake.violations();
    build(&card).unwrap();
    all_given_back(&fake);
}

#[test]
fn memory_that_others_took_is_refused_and_told() {
    let fake = Fake::new();
    let card = card(&fake);
    fake.set_memory(1 << 20, 1 << 19);
    let error = Buffer::new(&card, (1 << 19) + 1).unwrap_err();
    assert_eq!(error.class(), Class::OutOfMemory);
    assert!(
        error
            .to_string()
            .contains("hipMalloc: hipErrorOutOfMemory (2)"),
        "{error}"
    );
    assert!(
        card.driver()
            .unwrap()
            .last_error()
            .unwrap()
            .contains("hipErrorOutOfMemory")
    );
    assert_eq!(card.driver().unwrap().last_error(), None);
    let held = Buffer::new(&card, 1 << 19).unwrap();
    assert_eq!(card.memory().unwrap().free, 0);
    drop(held);
    assert_eq!(card.memory().unwrap().free, 1 << 19);
    all_given_back(&fake);
}

#[test]
fn a_failed_copy_shows_at_the_wait_and_the_device_stays_lost() {
    for (nth, work) in [
        when_run::H2D,
        when_run::D2D,
        when_run::MEMSET,
        when_run::D2H,
    ]
    .into_iter()
    .enumerate()
    {
        let fake = Fake::new();
        let card = card(&fake);
        let stream = stream(&card);
        let buffer = Buffer::new(&card, 8192).unwrap();
        let pinned = PinnedBuffer::new(&card, 4096).unwrap();
        fake.fail(work, 1, LAUNCH_FAILURE);
        // SAFETY: the pinned buffer outlives the wait.
        unsafe {
            buffer
                .copy_from_host(0, pinned.as_ptr(), 4096, &stream)
                .unwrap();
            buffer.copy_within(0, 4096, 4096, &stream).unwrap();
            buffer.fill(0, 0, 4096, &stream).unwrap();
            buffer
                .copy_to_host(0, pinned.as_ptr(), 4096, &stream)
                .unwrap();
        }
        let error = stream.synchronize().unwrap_err();
        assert!(error.is_lost(), "{nth}: {error}");
        // Every later call says the same, and no drop panics.
        assert!(Buffer::new(&card, 1).unwrap_err().is_lost());
        assert!(card.memory().unwrap_err().is_lost());
        assert!(stream.is_idle().unwrap_err().is_lost());
        drop((buffer, pinned, stream, card));
    }
}

#[test]
fn a_kernel_outside_its_memory_loses_the_device() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let gather = Gather::new(&card, &stream, 6);
    let end = gather.out.ptr().offset(gather.out.bytes() - 4);
    let args = gather_args(gather.x.ptr(), end, gather.rows.ptr(), COLS);
    // SAFETY: the fake checks the addresses, which is what is tested.
    unsafe { gather.kernel.launch(CONFIG, &args, &stream).unwrap() };
    let error = stream.synchronize().unwrap_err();
    assert!(error.is_lost(), "{error}");
    let noted = fake.violations();
    assert!(
        noted
            .iter()
            .any(|line| line.starts_with("gather: no allocation holds")),
        "{noted:?}"
    );
}

#[test]
fn memory_that_nobody_wrote_is_poison_and_its_readers_are_noted() {
    let fake = Fake::new();
    let card = card(&fake);
    let stream = stream(&card);
    let mut buffer = Buffer::new(&card, 64).unwrap();
    buffer.write(0, &[1; 16], &stream).unwrap();
    let mut bytes = [0; 32];
    buffer.read(0, &mut bytes[..16], &stream).unwrap();
    assert_eq!(fake.violations(), Vec::<String>::new());
    buffer.read(0, &mut bytes, &stream).unwrap();
    assert_eq!(bytes[16..], [rocmforge_fake_hip::POISON; 16]);
    assert!(fake.violations()[0].contains("never written"));
    // A copy inside the device carries it along, and is not noted by itself.
    // SAFETY: nothing else is queued.
    unsafe { buffer.copy_within(0, 32, 32, &stream).unwrap() };
    stream.synchronize().unwrap();
    assert_eq!(fake.violations(), Vec::<String>::new());
    buffer.read(32, &mut bytes, &stream).unwrap();
    assert_eq!((bytes[15], bytes[16]), (1, rocmforge_fake_hip::POISON));
    assert_eq!(fake.violations().len(), 1);
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

#[test]
fn an_error_while_giving_back_is_not_a_panic() {
    let fake = Fake::new();
    let card = card(&fake);
    for call in [
        "hipFree",
        "hipHostFree",
        "hipHostUnregister",
        "hipModuleUnload",
        "hipStreamDestroy",
        "hipEventDestroy",
    ] {
        fake.fail(call, 1, 1);
    }
    build(&card).unwrap();
    let live = fake.live();
    assert_eq!(
        (live.allocations, live.pinned, live.streams, live.events),
        (1, 1, 1, 1),
        "{live:?}"
    );
}
