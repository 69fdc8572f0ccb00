//! The largest elements of rows, read behind the work or begun and ended apart, on a fake card.

use crate::fake_device;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_device::ops::PlacedBuf;
use rocmforge_device::{
    Buf, Device, QueuedReads, ReadTicket, Rows, Scratch, ScratchLayout, Selection,
};
use rocmforge_fake_hip::{Fake, Live};

/// Where the scratch blocks lie, one behind the other.
const BASE: u64 = 16 << 20;

const ROWS: usize = 3;
const WIDTH: u64 = 1000;
const K: usize = 7;

/// Reads that a card has places for (`device-gpu/src/reads.rs`).
const PLACES: usize = 8;

fn layout() -> ScratchLayout {
    ScratchLayout {
        bufs: vec![PlacedBuf {
            at: 0,
            width: WIDTH,
            rows: Rows::Outputs,
        }],
        bytes: ROWS as u64 * WIDTH * 4,
        tokens: ROWS as u64,
        outputs: ROWS as u64,
        tables: 0,
        experts: 0,
        float_weights: false,
        both_ways: false,
        parts: false,
    }
}

#[test]
fn reads_that_are_begun_and_ended_apart_find_what_reads_find() {
    let fake = Fake::new();
    let config = fake_device::config(&fake, false);
    let mut device = fake_device::open_as(config, &fake, 80 << 20, BASE);
    let layout = layout();
    let scratch = |n: usize| Scratch {
        layout: &layout,
        base: BASE + n as u64 * (1 << 16),
    };
    let mut rng = StdRng::seed_from_u64(11);
    let mut expected = Vec::new();
    let mut begun: Vec<ReadTicket> = Vec::new();
    for n in 0..PLACES {
        let mut values: Vec<f32> = (0..ROWS as u64 * WIDTH).map(|_| rng.random()).collect();
        if n == 2 {
            values[WIDTH as usize + 5] = f32::INFINITY;
        }
        device.write(scratch(n), Buf(0), &values).unwrap();
        expected.push(device.top_k(scratch(n), Buf(0), ROWS, K).unwrap().unwrap());
        let ticket = device.begin_top_k(scratch(n), Buf(0), ROWS, K).unwrap();
        begun.push(ticket.expect("there is a place"));
    }
    assert!(expected[2][1].is_none(), "a row that is not finite");
    let more = device.begin_top_k(scratch(0), Buf(0), ROWS, K).unwrap();
    assert_eq!(more, None, "all places are taken");
    // In another order than they were begun in, with their memory written again.
    let values: Vec<f32> = (0..ROWS as u64 * WIDTH).map(|_| rng.random()).collect();
    device.write(scratch(5), Buf(0), &values).unwrap();
    for n in [5, 0, 7, 1, 6, 2, 4, 3] {
        let (found, took) = device.end_top_k(begun[n]).unwrap();
        assert_eq!(found, expected[n], "read {n}");
        assert_eq!(took, None, "nothing was timed");
        assert!(device.end_top_k(begun[n]).is_err(), "it is ended once");
        assert!(device.has_come(begun[n]), "nobody waits for what is over");
    }
    // All places are free again, and what is timed tells so.
    for _ in 0..2 * PLACES {
        device.time_from_here().unwrap();
        let ticket = device.begin_top_k(scratch(5), Buf(0), ROWS, 1).unwrap();
        let (found, took) = device.end_top_k(ticket.unwrap()).unwrap();
        assert_eq!(found.len(), ROWS);
        assert!(took.is_some());
    }
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
}
