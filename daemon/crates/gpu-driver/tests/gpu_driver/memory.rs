//! What the card has and what its memory holds: probes, copies of every kind, registered mappings.

use std::sync::Arc;

use rocmforge_fake_hip::{Fake, Live};
use rocmforge_gpu_driver::{Buffer, Class, Error, PinnedBuffer, Registration, probe};

use super::{all_given_back, card, libraries, mapping, random_bytes, stream};

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
        ("Fake GPU", "gfx1030")
    );
    assert_eq!((device.wave, device.compute_units), (32, 8));
    assert_eq!(device.shared_per_block, 64 << 10);
    assert_eq!(device.pci_bus_id, "0000:01:00.0");
    assert_eq!(hip.versions.as_ref().unwrap().runtime, "6.4.0");
    assert!(
        hip.to_string()
            .contains("hip:0 Fake GPU (gfx1030, 8 units, wave 32, 1024 MiB)")
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
    let held = Buffer::new(&card, 1 << 19).unwrap();
    assert_eq!(card.memory().unwrap().free, 0);
    drop(held);
    assert_eq!(card.memory().unwrap().free, 1 << 19);
    all_given_back(&fake);
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
