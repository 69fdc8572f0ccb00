//! Launches of adapters: entries, geometry, constants, and what is refused.

use super::super::ops::adapters::{
    AdaptersFewArgs, Low, MATRICES_MAX, PARTS_MAX, Pair, Rows, Scales, Second, down, few, parts, up,
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

fn pair(rows: u64) -> Pair {
    Pair {
        weights: Some((3, 4)),
        out: 2,
        rows,
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
        let hopper = GpuTarget::nvidia(9, 0, 132);
        let by_row = Rows::Halves(half_inputs(&hopper, 4096, 2));
        for (rows, gate) in [(ROWS, None), (by_row, None), (ROWS, Some(Act::Silu))] {
            let pairs = [pair(100), pair(100)];
            let launch = few(&hopper, ty, (rows, 4096), SCALES, &pairs, gate).unwrap();
            all.push(launch.unwrap());
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

/// Blocks cover all rows of all products, eight to a cluster; where they would not all run at once,
/// and on GPUs without clusters, there are two launches.
#[test]
fn few_rows_take_one_launch_where_all_blocks_run_at_once() {
    let hopper = GpuTarget::nvidia(9, 0, 132);
    let source = units::file("adapters_few.h").unwrap();
    let of = |name| u64::from(defined(source, name)[0]);
    let of_rows = |target: &GpuTarget, n_tokens, rows: &[u64], gate| {
        let pairs: Vec<Pair> = rows.iter().map(|&rows| pair(rows)).collect();
        let scales = Scales { n_tokens, ..SCALES };
        let launch = few(target, WeightType::F16, (ROWS, 4096), scales, &pairs, gate);
        launch.unwrap()
    };
    // Llama-8B's: q, k and v, o and down, gate and up.
    let (qkv, one, unit) = ([4096, 1024, 1024], [4096], [14_336, 14_336]);
    let silu = Some(Act::Silu);
    for (n_tokens, rows, gate, expected) in [
        (1, &qkv[..], None, Some((4, 256))),
        (1, &one[..], None, Some((2, 256))),
        (1, &unit[..], silu, Some((7, 256))),
        (1, &[1, 2049][..], None, Some((3, 256))),
        (8, &qkv[..], None, Some((3, 512))),
        (8, &one[..], None, Some((2, 256))),
        (16, &one[..], None, Some((1, 512))),
        (16, &qkv[..], None, None),
        (8, &unit[..], None, None),
        (17, &[64][..], None, None),
    ] {
        let launch = of_rows(&hopper, n_tokens, rows, gate);
        let Some((clusters, rows_per_block)) = expected else {
            assert_eq!(launch, None, "{rows:?} * {n_tokens}");
            continue;
        };
        let launch = launch.unwrap();
        let args = AdaptersFewArgs::from_bytes(&launch.args.to_bytes()).unwrap();
        let cluster = of("CLUSTER");
        assert_eq!(
            launch.grid.map(u64::from),
            [clusters * cluster, n_tokens, 1]
        );
        assert_eq!(u64::from(args.rows_per_block), rows_per_block);
        assert!(rows_per_block <= of("FEW_ROWS"));
    }
    for target in [
        GpuTarget::nvidia(8, 9, 128),
        GpuTarget::nvidia(12, 0, 170),
        GpuTarget::amd("gfx942", 304),
    ] {
        assert_eq!(of_rows(&target, 1, &one, None), None, "{}", target.arch);
    }
    let most = of("FEW_WIDTH");
    for (width, is) in [(most, true), (most + 32, false)] {
        let scales = Scales { width, ..SCALES };
        let launch = few(
            &hopper,
            WeightType::F16,
            (ROWS, 64),
            scales,
            &[pair(1)],
            None,
        );
        assert_eq!(launch.unwrap().is_some(), is);
    }
}

#[test]
fn adapters_of_few_rows_that_no_kernel_adds_are_refused() {
    let hopper = GpuTarget::nvidia(9, 0, 132);
    let of = |ty, cols, pairs: &[Pair], gate| few(&hopper, ty, (ROWS, cols), SCALES, pairs, gate);
    let refused = |r| matches!(r, Err(Error::NoKernel { .. }));
    let (f16, gate) = (WeightType::F16, Some(Act::Silu));
    let nothing = Pair {
        weights: None,
        ..pair(64)
    };
    assert!(refused(of(WeightType::Q8_0, 64, &[pair(64)], None)));
    assert!(refused(of(f16, 64, &[], None)));
    assert!(refused(of(f16, 64, &[pair(64), nothing], None)));
    assert!(refused(of(f16, 64, &[pair(64), pair(65)], gate)));
    assert!(of(f16, 64, &[pair(64), nothing], gate).unwrap().is_some());
    // Left to the kernels that take them.
    assert_eq!(of(f16, 100, &[pair(64)], None).unwrap(), None);
    assert_eq!(
        of(f16, 64, &[pair(64); MATRICES_MAX + 1], None).unwrap(),
        None
    );
}
