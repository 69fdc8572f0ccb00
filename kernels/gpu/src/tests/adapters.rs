//! Launches of adapters: entries, geometry, constants, and what is refused.

use super::super::ops::adapters::{
    Low, MATRICES_MAX, PARTS_MAX, Rows, Scales, Second, down, parts, up,
};
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
            let half = half_inputs(&target, 4096, n_tokens);
            let by_row = HalfInputs {
                layout: HalfLayout::Rows,
                ..half
            };
            for rows in [ROWS, Rows::Halves(half), Rows::Halves(by_row)] {
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
        assert_eq!(
            parts(WeightType::F16, cols, ROWS),
            cols.div_ceil(of("SLICE"))
        );
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

/// Rows in Hopper's order: adapters of f16 by matrix instructions, 16 ranks a block and 1,024
/// columns a part; those of f32 as other rows.
#[test]
fn rows_in_the_order_of_tensor_cores_are_taken_as_they_are() {
    let target = GpuTarget {
        shared_bytes_asked: 227 << 10,
        ..GpuTarget::nvidia(9, 0, 132)
    };
    let source = units::file("adapters_mma.h").unwrap();
    let tile = defined(source, "TILE")[0];
    assert!(source.contains("first = block_z() * WAVES + wave()"));
    for (n_tokens, cols) in [(17, 256), (64, 4096), (128, 14_336)] {
        let half = half_inputs(&target, cols, n_tokens);
        assert_eq!(half.layout, HalfLayout::Columns);
        let rows = Rows::Halves(half);
        let scales = Scales { n_tokens, ..SCALES };
        let of = |ty| {
            let most = parts(ty, cols, rows);
            let launch = down(ty, rows, cols, &[1, 2], scales, low(2, most)).unwrap();
            assert!(down(ty, rows, cols, &[1, 2], scales, low(2, most + 1)).is_err());
            (launch.entry(), launch.grid)
        };
        let (entry, grid) = of(WeightType::F16);
        assert_eq!(entry, "adapters_down_columns_f16");
        // Eight waves of 128 columns each.
        let n_parts = cols.div_ceil(8 * 128).min(PARTS_MAX) as u32;
        let width = SCALES.width as u32;
        let n_blocks = (n_tokens as u32).div_ceil(32);
        assert_eq!(grid, [2 * width / tile, n_blocks, n_parts]);
        let (entry, grid) = of(WeightType::F32);
        assert_eq!(entry, "adapters_down_columns_f32");
        let n_parts = cols.div_ceil(4096) as u32;
        assert_eq!(grid, [2 * width / 4, n_blocks, n_parts]);
    }
    let half = HalfInputs {
        cols: 200,
        ..half_inputs(&target, 256, 64)
    };
    let scales = Scales {
        n_tokens: 64,
        ..SCALES
    };
    let refused = down(
        WeightType::F16,
        Rows::Halves(half),
        200,
        &[1],
        scales,
        low(1, 1),
    );
    assert!(matches!(refused, Err(Error::NoKernel { .. })));
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
