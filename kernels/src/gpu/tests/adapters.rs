//! Launches of adapters: entries, geometry, constants, and what is refused.

use super::super::ops::adapters::{AdaptersDownArgs, Low};
use super::super::ops::adapters::{MATRICES_MAX, PARTS_MAX, Rows, Scales, Second, down, parts, up};
use super::*;

const SCALES: Scales = Scales {
    at: 16,
    width: 96,
    n_tokens: 1,
    early: true,
};

const ROWS: Rows = Rows::Floats { x: 1, norm: None };

fn low(n: u64, parts: u64) -> Low {
    Low { at: 32, n, parts }
}

fn second(rows: u64, low: u64) -> Second {
    Second {
        weights: Some(1),
        out: 2,
        rows,
        low,
    }
}

pub(super) fn one_of_each() -> Vec<Launch> {
    let mut all = Vec::new();
    for ty in [WeightType::F32, WeightType::F16] {
        for n_tokens in [1, 16, 17, 200] {
            let scales = Scales { n_tokens, ..SCALES };
            let target = GpuTarget::nvidia(9, 0, 132);
            let halves = Rows::Halves(HalfInputs {
                layout: HalfLayout::Rows,
                ..half_inputs(&target, 4096, n_tokens)
            });
            for rows in [ROWS, halves] {
                all.push(down(ty, rows, 4096, &[1, 2, 3], scales, low(3, 1)).unwrap());
            }
            let products = [second(100, 0), second(300, 1)];
            all.push(up(ty, scales, low(2, 3), &products, None).unwrap());
        }
        let unit = [second(100, 0), second(100, 1)];
        all.push(up(ty, SCALES, low(2, 1), &unit, Some(Act::Silu)).unwrap());
    }
    all
}

#[test]
fn blocks_of_adapters_cover_ranks_rows_and_tokens() {
    let source = units::file("adapters.hip").unwrap();
    assert_eq!(defined(source, "PARTS"), [PARTS_MAX as u32]);
    let of = |name| u64::from(defined(source, name)[0]);
    for n_tokens in [1, 16, 17, 65] {
        let scales = Scales { n_tokens, ..SCALES };
        let cols = 14_336;
        assert_eq!(parts(cols, ROWS), cols.div_ceil(of("SLICE")));
        let launch = down(WeightType::F16, ROWS, cols, &[1; 4], scales, low(4, 3)).unwrap();
        let [ranks, tokens, parts] = launch.grid.map(u64::from);
        assert_eq!(ranks * of("RANKS"), 4 * SCALES.width);
        assert!(tokens * of("TOKENS") >= n_tokens && (tokens - 1) * of("TOKENS") < n_tokens);
        assert_eq!(parts, 3);
        let products = [second(1, 0), second(129, 0), second(128, 3)];
        let launch = up(WeightType::F16, scales, low(4, 3), &products, None).unwrap();
        assert_eq!(launch.grid[0], 1 + 2 + 1);
        let alone = launch.entry().starts_with("adapters_up_1_");
        let tokens = if alone { 1 } else { of("TOKENS") };
        assert_eq!(u64::from(launch.grid[1]), n_tokens.div_ceil(tokens));
        assert_eq!(alone, n_tokens <= 16);
    }
}

/// Rows as f16 are taken where a row lies in one piece.
#[test]
fn rows_in_the_order_of_tensor_cores_are_refused() {
    let target = GpuTarget::nvidia(9, 0, 132);
    let of = |n_tokens| {
        let rows = Rows::Halves(half_inputs(&target, 4096, n_tokens));
        let scales = Scales { n_tokens, ..SCALES };
        down(WeightType::F16, rows, 4096, &[1], scales, low(1, 1))
    };
    let args = AdaptersDownArgs::from_bytes(&of(9).unwrap().args.to_bytes()).unwrap();
    assert_eq!(
        (args.group_stride, args.token_stride, args.factor),
        (1, 512, 1.0)
    );
    assert!(matches!(of(33), Err(Error::NoKernel { .. })));
}

#[test]
fn adapters_that_no_kernel_adds_are_refused() {
    let f16 = WeightType::F16;
    let refused = |r: Result<Launch, Error>| matches!(r, Err(Error::NoKernel { .. }));
    let narrow = Scales {
        width: 48,
        ..SCALES
    };
    let many = [1; MATRICES_MAX + 1];
    assert!(refused(down(f16, ROWS, 64, &[1], narrow, low(1, 1))));
    assert!(refused(down(f16, ROWS, 64, &[], SCALES, low(0, 1))));
    assert!(refused(down(f16, ROWS, 64, &many, SCALES, low(5, 1))));
    assert!(refused(down(f16, ROWS, 64, &[1], SCALES, low(2, 1))));
    assert!(refused(down(f16, ROWS, 64, &[1], SCALES, low(1, 2))));
    assert!(refused(down(
        WeightType::Q8_0,
        ROWS,
        64,
        &[1],
        SCALES,
        low(1, 1)
    )));
    let normed = Rows::Floats {
        x: 1,
        norm: Some((2, 1e-5)),
    };
    assert!(refused(down(f16, normed, 8192, &[1], SCALES, low(1, 2))));
    let half = |cols| {
        Rows::Halves(HalfInputs {
            cols,
            ..half_inputs(&GpuTarget::nvidia(9, 0, 132), 256, 1)
        })
    };
    assert!(refused(down(f16, half(100), 100, &[1], SCALES, low(1, 1))));
    let nothing = Second {
        weights: None,
        ..second(64, 0)
    };
    let gate = Some(Act::Silu);
    let pair = [second(64, 0), nothing];
    assert!(up(f16, SCALES, low(1, 1), &pair, gate).is_ok());
    assert!(refused(up(f16, SCALES, low(1, 1), &pair, None)));
    assert!(refused(up(f16, SCALES, low(1, 1), &pair[..1], gate)));
    assert!(refused(up(f16, SCALES, low(1, 1), &[second(64, 1)], None)));
    let two = Scales {
        n_tokens: 2,
        ..SCALES
    };
    assert!(refused(up(f16, two, low(1, 1), &pair, gate)));
    let other = [second(64, 0), second(65, 0)];
    assert!(refused(up(f16, SCALES, low(1, 1), &other, gate)));
}
