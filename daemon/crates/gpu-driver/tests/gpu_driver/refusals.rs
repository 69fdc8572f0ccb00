//! A refusal or a fault at any call: what is given back, and what is said afterwards.

use rocmforge_fake_hip::{Fake, Live, marker_image, when_run};
use rocmforge_gpu_driver::{
    Buffer, Context, Error, Event, Module, PinnedBuffer, Priority, Registration, Stream,
};

use super::{LAUNCH_FAILURE, OUT_OF_MEMORY, all_given_back, card, mapping, stream};

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

/// hipErrorUnknown, hipErrorNoDevice and a code of ROCr: each is what a call gives that was
/// refused, and what each call gives once the card is gone.
#[test]
fn a_code_that_says_little_is_a_loss_where_the_card_fails_a_second_look() {
    for code in [999, 100, 101, 1053] {
        let fake = Fake::new();
        let card = card(&fake);
        let stream = stream(&card);
        let event = Event::new(&card, false).unwrap();
        fake.fail("hipEventRecord", 1, code);
        let refused = event.record(&stream).unwrap_err();
        assert!(!refused.is_lost(), "{refused}");
        event.record(&stream).unwrap();
        // What has no work on the card is not asked again.
        let looks = fake.calls("hipDeviceSynchronize");
        fake.fail("hipHostMalloc", 1, code);
        PinnedBuffer::new(&card, 4096).unwrap_err();
        assert_eq!(fake.calls("hipDeviceSynchronize"), looks);
        for look in ["hipDeviceSynchronize", "hipMemGetInfo"] {
            fake.fail("hipEventQuery", 1, code);
            fake.fail(look, 1, code);
            let lost = event.is_passed().unwrap_err();
            assert!(lost.is_lost(), "{lost}");
            let text = lost.to_string();
            assert!(text.contains(&format!("after it {look} fails")), "{text}");
        }
    }
}
