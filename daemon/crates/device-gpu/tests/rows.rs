//! Rows of a buffer that are handed over, on the host and through the HIP path on a fake card.

use crate::fake_device;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_device::ops::PlacedBuf;
use rocmforge_device::{Buf, Device, Rows, Scratch, ScratchLayout};
use rocmforge_device_cpu::{HostConfig, HostDevice};
use rocmforge_fake_hip::{Fake, Live};

/// Where the scratch block lies.
const BASE: u64 = 16 << 20;

/// Rows and their width: together three groups of a card's, the last of them not full.
const MANY: (usize, u64) = (21, 500_000);

/// A row that is larger than a group.
const WIDE: (usize, u64) = (2, 5_000_000);

/// Hands rows over that were written before, some of them left out.
fn hands_over(device: &mut dyn Device, (n, width): (usize, u64)) {
    let layout = ScratchLayout {
        bufs: vec![
            PlacedBuf {
                at: 0,
                width,
                rows: Rows::Outputs,
            },
            PlacedBuf {
                at: 4096,
                width,
                rows: Rows::Outputs,
            },
        ],
        bytes: 4096 + n as u64 * width * 4,
        tokens: n as u64,
        outputs: n as u64,
        tables: 0,
        experts: 0,
        float_weights: false,
        both_ways: false,
        parts: false,
    };
    let scratch = Scratch {
        layout: &layout,
        base: BASE,
    };
    let mut rng = StdRng::seed_from_u64(width);
    let values: Vec<f32> = (0..n as u64 * width).map(|_| rng.random()).collect();
    device.write(scratch, Buf(1), &values).unwrap();
    let wanted: Vec<u32> = (0..n as u32).filter(|row| n < 3 || row % 7 != 3).collect();
    let mut next = 0;
    let mut groups = 0;
    let mut take = |first: usize, rows: &mut [f32]| {
        assert_eq!(first, next);
        for (row, found) in wanted[first..]
            .iter()
            .zip(rows.chunks_exact_mut(width as usize))
        {
            let from = *row as usize * width as usize;
            assert!(found == &values[from..][..width as usize], "row {row}");
            // Whoever gets a row may change it.
            found.fill(f32::NAN);
            next += 1;
        }
        groups += 1;
    };
    device
        .take_rows(scratch, Buf(1), &wanted, &mut take)
        .unwrap();
    assert_eq!(next, wanted.len());
    assert!(groups > 1);
    let mut none = |_: usize, _: &mut [f32]| panic!("no row was asked for");
    device.take_rows(scratch, Buf(1), &[], &mut none).unwrap();
}

#[test]
fn rows_are_handed_over_in_groups_and_in_order() {
    let mut host = HostDevice::new(HostConfig::default()).unwrap();
    host.set_capacity(80 << 20).unwrap();
    hands_over(&mut host, MANY);
    let fake = Fake::new();
    let config = fake_device::config(&fake, false);
    let mut device = fake_device::open_as(config, &fake, 80 << 20, BASE);
    hands_over(&mut device, MANY);
    hands_over(&mut device, WIDE);
    drop(device);
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.live(), Live::default());
}
