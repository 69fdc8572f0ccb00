//! What adapters add to products: alone, and in a layer, where products, norms, sums and gated
//! units are fused with it.

use rocmforge_ops::Adapted;

use super::*;

/// A case's rows of scales: for some ranges of ranks, and none for every fourth row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales {
    pub(crate) buf: Buf,
    /// Most that a scale is. In a layer such that what is added is about as large as the products.
    pub(crate) size: f32,
}

pub(super) fn cases() -> Vec<Case> {
    let shapes = [
        // Columns, width, rows of the products.
        (64, 32, vec![100]),
        (100, 96, vec![33, 257]),
        (512, 128, vec![512, 128, 128]),
        (4096, 160, vec![40, 300, 129, 64]),
        (9000, 64, vec![128, 200]),
        (352, 512, vec![70]),
        (256, 32, vec![20, 30, 40, 50, 60]),
        (1000, 1024, vec![2100]),
    ];
    let mut cases = Vec::new();
    for ty in [WeightType::F16, WeightType::F32] {
        for (i, (cols, width, rows)) in shapes.iter().enumerate() {
            for tokens in [1, 5, 16, 17, 40, 65, 200] {
                // All numbers of rows with one shape or another.
                if (tokens + i as u64).is_multiple_of(2) || tokens == 1 || *width >= 512 {
                    cases.push(alone(ty, (*cols, *width, rows), tokens));
                }
            }
        }
    }
    cases
}

/// The operation by itself. The last two of five products have one first matrix.
fn alone(ty: WeightType, (cols, width, rows): (u64, u64, &[u64]), tokens: u64) -> Case {
    const LOW: Buf = Buf(2);
    let n = rows.len().min(4);
    let firsts = (0..n).map(|_| matrix(ty, width, cols));
    let seconds = rows.iter().map(|rows| matrix(ty, *rows, width));
    let outs = rows.iter().map(|rows| token_buf("out", *rows));
    let products = (0..rows.len()).map(|i| Adapted {
        a: i.min(n - 1),
        b: n + i,
        out: Buf(3 + i as u8),
    });
    let bufs = [
        token_buf("x", cols),
        token_buf("scales", width),
        token_buf("low", n as u64 * width),
    ];
    let mut case = plain(
        "add_adapters".to_owned(),
        format!("{ty} {rows:?}x{cols} by {width} * {tokens}"),
        firsts.chain(seconds).collect(),
        bufs.into_iter().chain(outs).collect(),
        vec![Op::AddAdapters {
            x: X,
            scales: N,
            low: LOW,
            products: products.collect(),
        }],
    );
    case.tokens = tokens;
    case.compared = (0..rows.len()).map(|i| Buf(3 + i as u8)).collect();
    case.scales = Some(Scales { buf: N, size: 1.0 });
    case.recorded = tokens == 1;
    // By the vendor's library rows are sums of two f16.
    case.tolerance = if width >= 512 { 5e-5 } else { 1e-5 };
    case
}

/// Behind products of quantized weights, whose rows GPUs make f16 of: Hopper in an order of its
/// own. What is added is much larger than the products, so that it is compared closely.
pub(super) fn behind_products() -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in [WeightType::F16, WeightType::F32] {
        for (cols, width, rows) in [
            (256, 32, [200, 129]),
            (1280, 160, [128, 40]),
            (4352, 96, [70, 300]),
            (14_336, 64, [128, 33]),
        ] {
            for tokens in [9, 17, 64, 128] {
                cases.push(behind(ty, (cols, width, rows), tokens));
            }
        }
    }
    cases
}

fn behind(ty: WeightType, (cols, width, rows): (u64, u64, [u64; 2]), tokens: u64) -> Case {
    const LOW: Buf = Buf(2);
    let outs = [Buf(3), Buf(4)];
    let of = |ty, cols| rows.map(|rows| matrix(ty, rows, cols));
    let mut tensors = of(WeightType::Q8_0, cols).to_vec();
    tensors.extend([matrix(ty, width, cols), matrix(ty, width, cols)]);
    tensors.extend(of(ty, width));
    let bufs = [
        ("x", cols),
        ("scales", width),
        ("low", 2 * width),
        ("first", rows[0]),
        ("second", rows[1]),
    ];
    let adapted = |i: usize| Adapted {
        a: 2 + i,
        b: 4 + i,
        out: outs[i],
    };
    let mut case = plain(
        "add_adapters behind products".to_owned(),
        format!("{ty} {rows:?}x{cols} by {width} * {tokens}"),
        tensors,
        bufs.map(|(name, width)| token_buf(name, width)).to_vec(),
        vec![
            Op::MatMul {
                x: X,
                products: vec![product(0, None, outs[0]), product(1, None, outs[1])],
            },
            Op::AddAdapters {
                x: X,
                scales: N,
                low: LOW,
                products: vec![adapted(0), adapted(1)],
            },
        ],
    );
    case.tokens = tokens;
    case.compared = outs.to_vec();
    case.scales = Some(Scales {
        buf: N,
        size: 1000.0,
    });
    case.tolerance = 1e-3;
    case
}

/// A layer whose products have adapters, but for every `without`-th.
pub(super) fn layers() -> Vec<Case> {
    let with = |pair, span, without| adapted(layer(pair, span), pair.0, without);
    let q4 = (WeightType::Q4K, WeightType::Q6K);
    let q8 = (WeightType::Q8_0, WeightType::Q8_0);
    let floats = (WeightType::F32, WeightType::F32);
    let mut cases = Vec::new();
    for pair in [q4, q8, (WeightType::F16, WeightType::Q8_0), floats] {
        for span in [
            (1, 0),
            (9, 0),
            (17, 0),
            (20, 3),
            (64, 0),
            (100, 0),
            (128, 0),
        ] {
            cases.push(with(pair, span, usize::MAX));
        }
        // The gate of the feed-forward without, and its other matrix.
        cases.push(with(pair, (1, 77), 5));
        cases.push(with(pair, (1, 0), 3));
        cases.push(with(pair, (9, 5), 2));
        // Gate and up in one segment, down in the next.
        let mut cut = with(pair, (1, 2), usize::MAX);
        cut.cut = Some(12);
        cases.push(cut.clone());
        (cut.tokens, cut.recorded) = (9, false);
        cases.push(cut);
    }
    cases
}

fn adapted(mut case: Case, ty: WeightType, without: usize) -> Case {
    const WIDTH: u64 = 64;
    let Work::Ops(ops) = &case.work else {
        unreachable!("a layer is a list of operations");
    };
    let scales = Buf(case.bufs.len() as u8);
    let low = Buf(scales.0 + 1);
    case.bufs.push(token_buf("scales", WIDTH));
    case.bufs.push(token_buf("low", 3 * WIDTH));
    let width = |buf: Buf| case.bufs[usize::from(buf.0)].width;
    let (mut with, mut seen) = (Vec::new(), 0);
    for op in ops {
        with.push(op.clone());
        let Op::MatMul { x, products } = op else {
            continue;
        };
        let mut adapted = Vec::new();
        for product in products {
            seen += 1;
            if seen % without == 0 {
                continue;
            }
            let a = case.tensors.len();
            case.tensors.push(matrix(WeightType::F16, WIDTH, width(*x)));
            case.tensors
                .push(matrix(WeightType::F16, width(product.out), WIDTH));
            adapted.push(Adapted {
                a,
                b: a + 1,
                out: product.out,
            });
        }
        if !adapted.is_empty() {
            with.push(Op::AddAdapters {
                x: *x,
                scales,
                low,
                products: adapted,
            });
        }
    }
    case.operation = "layer with adapters".to_owned();
    if without < usize::MAX {
        case.name = format!("{}, each {without}th product without", case.name);
    }
    case.work = Work::Ops(with);
    let size = match ty {
        WeightType::F16 | WeightType::F32 => 20.0,
        WeightType::Q8_0 => 20.0,
        _ => 300.0,
    };
    case.scales = Some(Scales { buf: scales, size });
    case
}
