//! What is done to each element or row alone, and products of heads.

use rocmforge_ops::ColumnPart;

use super::*;

/// Sums in f32 of at most some thousand terms, and functions of one element.
const TOLERANCE: f64 = 1e-5;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (width, tokens) in [(256, 1), (768, 5), (4096, 130), (100, 3)] {
        cases.extend(changes(width, tokens));
        cases.extend(acts().map(|act| activated(act, width, tokens)));
        cases.extend(gates().map(|act| gated(act, width, tokens)));
        cases.push(columns(width, tokens));
        cases.push(layer_normed(width, tokens, width));
        cases.push(combined(width.min(1024), tokens));
        cases.push(rows_merged(width, 4 * tokens));
        cases.push(product_transposed(width, tokens));
    }
    let sizes = [(256, 1), (768, 5), (4096, 130)];
    cases.extend(sizes.map(|(width, tokens)| grouped(width, tokens)));
    cases.extend(sizes.map(|(width, tokens)| layer_normed(width, tokens, width / 4)));
    let gated_heads = |act| sizes.map(|(width, tokens)| heads_gated(act, width, tokens));
    cases.extend(acts().flat_map(gated_heads));
    for ty in [
        WeightType::F32,
        WeightType::F16,
        WeightType::Q8_0,
        WeightType::Q4K,
    ] {
        let spans = [1, 5, 65];
        cases.extend(spans.map(|tokens| heads_product(ty, tokens)));
    }
    for router in super::experts::routers() {
        cases.extend([1, 7, 130].map(|tokens| super::experts::routed(router, tokens)));
    }
    cases
}

/// Functions that stand alone.
fn acts() -> impl Iterator<Item = Act> {
    gates().filter(|act| !matches!(act, Act::SwigluClamped { .. }))
}

/// Functions of gates: all.
fn gates() -> impl Iterator<Item = Act> {
    [
        Act::Identity,
        Act::Silu,
        Act::GeluTanh,
        Act::GeluErf,
        Act::ReluSquared,
        Act::Sigmoid,
        Act::Softplus,
        Act::SwigluClamped {
            alpha: 1.702,
            limit: 7.0,
        },
    ]
    .into_iter()
}

/// One operation on `x`, of buffers `x`, `n`, `a` and one of an element a row.
fn of_rows(operation: &str, (width, tokens): (u64, u64), op: Op, compared: Buf) -> Case {
    let mut case = plain(
        operation.to_owned(),
        format!("width {width} * {tokens}"),
        vec![vector(width), vector(1)],
        vec![
            token_buf("x", width),
            token_buf("n", width),
            token_buf("a", width),
            token_buf("b", 1),
        ],
        vec![op],
    );
    case.tokens = tokens;
    case.tolerance = TOLERANCE;
    case.compared = vec![compared];
    case
}

/// The mean of the rows of the last of several texts.
pub(super) fn gathered_means() -> Vec<Case> {
    const TEXTS: [&[u32]; 3] = [&[1], &[5, 3], &[2, 1, 200]];
    let sizes = [100, 768, 4096].into_iter();
    let cases = sizes.flat_map(|width| TEXTS.map(|texts| (width, texts)));
    let gathered = |(width, texts): (u64, &'static [u32])| {
        let mut case = plain(
            "gather_outputs".to_owned(),
            format!("width {width}, the mean of the last of {texts:?}"),
            vec![vector(width)],
            vec![
                token_buf("x", width),
                BufSpec {
                    rows: Rows::Outputs,
                    ..token_buf("o", width)
                },
            ],
            vec![Op::GatherOutputs { x: X, out: N }],
        );
        (case.tokens, case.texts) = (u64::from(texts.iter().sum::<u32>()), texts);
        (case.mean, case.compared) = (true, vec![N]);
        case.tolerance = TOLERANCE;
        case
    };
    cases.map(gathered).collect()
}

/// Four rows taken for one.
fn rows_merged(width: u64, tokens: u64) -> Case {
    let mut case = plain(
        "merge_rows".to_owned(),
        format!("width {width} * {tokens}"),
        vec![vector(width)],
        vec![
            token_buf("x", width),
            BufSpec {
                rows: Rows::Merged(4),
                ..token_buf("m", 4 * width)
            },
        ],
        vec![Op::MergeRows { x: X, out: N }],
    );
    (case.tokens, case.compared) = (tokens, vec![N]);
    case.tolerance = 0.0;
    case
}

/// A row of a table added to each: that of its position, or the first.
fn table_added(by_position: bool, width: u64, tokens: u64) -> Case {
    const FIRST: u32 = 30;
    let op = Op::AddTable {
        x: X,
        table: 0,
        by_position,
    };
    let mut case = of_rows(op.name(), (width, tokens), op, X);
    case.name = format!("{}, by position {by_position}", case.name);
    case.tensors[0] = vector(width * (u64::from(FIRST) + tokens));
    case.first_position = FIRST;
    case
}

fn changes(width: u64, tokens: u64) -> Vec<Case> {
    let mut scaled_by_position = of_rows(
        "position_scale",
        (width, tokens),
        Op::PositionScale {
            x: X,
            beta: 0.1,
            span: 50,
        },
        X,
    );
    scaled_by_position.first_position = 30;
    let ops = [
        Op::Add {
            x: X,
            y: A,
            scale: 0.22,
        },
        Op::AddWeighted {
            x: X,
            y: A,
            weight: 0,
        },
        Op::Scale { x: X, factor: -1.7 },
        Op::ScaleBy { x: X, weight: 1 },
        Op::SoftCap { x: X, cap: 5.0 },
        Op::AddGated {
            x: X,
            y: A,
            gate: B,
        },
    ];
    let mut cases = vec![scaled_by_position];
    cases.extend([false, true].map(|by_position| table_added(by_position, width, tokens)));
    cases.extend(ops.map(|op| of_rows(op.name(), (width, tokens), op, X)));
    cases.push(clamped(width, tokens));
    cases
}

fn activated(act: Act, width: u64, tokens: u64) -> Case {
    let mut case = of_rows("activate", (width, tokens), Op::Activate { x: X, act }, X);
    case.name = format!("{act:?}, {}", case.name);
    case
}

fn gated(act: Act, width: u64, tokens: u64) -> Case {
    let op = Op::Gate {
        gate: X,
        up: A,
        act,
    };
    let mut case = of_rows("gate", (width, tokens), op, X);
    case.name = format!("{act:?}, {}", case.name);
    case
}

/// Between two bounds, in place and not.
fn clamped(width: u64, tokens: u64) -> Case {
    let out = if tokens == 1 { X } else { N };
    let op = Op::Clamp {
        x: X,
        low: 0,
        high: 1,
        out,
    };
    let mut case = of_rows(op.name(), (width, tokens), op, out);
    case.tensors = vec![
        Tensor {
            negative: true,
            ..vector(1)
        },
        vector(1),
    ];
    case.tolerance = 0.0;
    case
}

/// Groups of a row normed apart, by one weight for all of them or by none.
fn grouped(width: u64, tokens: u64) -> Case {
    let group = width as u32 / 4;
    let op = Op::RmsNorm {
        x: X,
        weight: (tokens != 5).then_some(0),
        eps: 1e-6,
        group,
        out: X,
    };
    let mut case = of_rows("rms_norm", (width, tokens), op, X);
    if tokens == 1 {
        case.tensors[0] = vector(u64::from(group));
    }
    case.name = format!("4 groups, {}", case.name);
    case
}

/// Rows, or groups of a row, with means far from 0 beside their spread.
fn layer_normed(width: u64, tokens: u64, group: u64) -> Case {
    let op = Op::LayerNorm {
        x: X,
        weight: 0,
        bias: (tokens != 5).then_some(1),
        eps: 1e-5,
        group: group as u32,
        out: if tokens == 1 { X } else { N },
    };
    let compared = if tokens == 1 { X } else { N };
    let mut case = of_rows("layer_norm", (width, tokens), op, compared);
    // One weight for all groups, or one a column.
    let weights = if tokens == 1 { group } else { width };
    case.tensors = vec![vector(weights), vector(weights)];
    case.name = format!("{} groups, {}", width / group, case.name);
    case
}

/// A factor for each of 4 heads.
fn heads_gated(act: Act, width: u64, tokens: u64) -> Case {
    let op = Op::GateHeads { x: X, gate: B, act };
    let mut case = of_rows("gate_heads", (width, tokens), op, X);
    case.bufs[usize::from(B.0)].width = 4;
    case.name = format!("{act:?}, {}", case.name);
    case
}

/// Parts of two buffers, of one for all groups alike.
fn columns(width: u64, tokens: u64) -> Case {
    let groups = 4;
    let each = width as u32 / groups;
    let part = |x, first, stride, width| ColumnPart {
        x,
        first,
        stride,
        width,
    };
    let op = Op::Columns {
        n_group: groups,
        parts: vec![part(X, 1, each, each - 5), part(N, 3, 0, 5)],
        out: A,
    };
    of_rows("columns", (width, tokens), op, A)
}

fn combined(width: u64, tokens: u64) -> Case {
    const USED: u32 = 6;
    let (y, weights, out) = (Buf(0), Buf(1), Buf(2));
    let mut case = plain(
        "combine".to_owned(),
        format!("{USED} of width {width} * {tokens}"),
        vec![vector(32)],
        vec![
            BufSpec {
                rows: Rows::Routed(USED),
                ..token_buf("y", width)
            },
            token_buf("weights", u64::from(USED)),
            token_buf("out", width),
        ],
        vec![Op::Combine { y, weights, out }],
    );
    case.tokens = tokens;
    case.tolerance = TOLERANCE;
    case.compared = vec![out];
    case
}

/// A matrix of which the file has the rows of the inputs.
fn product_transposed(width: u64, tokens: u64) -> Case {
    const INPUTS: u64 = 72;
    let mut case = plain(
        "mat_mul_transposed".to_owned(),
        format!("{INPUTS}x{width} * {tokens}"),
        vec![vector(INPUTS * width)],
        vec![token_buf("x", INPUTS), token_buf("n", width)],
        vec![Op::MatMulTransposed {
            x: X,
            weight: 0,
            out: N,
        }],
    );
    (case.tokens, case.compared) = (tokens, vec![N]);
    case.tolerance = TOLERANCE;
    case
}

fn heads_product(ty: WeightType, tokens: u64) -> Case {
    let (n_head, rows, cols) = (4, 512, 256);
    let mut case = plain(
        "mat_mul_heads".to_owned(),
        format!("{ty}, {n_head} of {rows}x{cols} * {tokens}"),
        vec![matrix(ty, rows * u64::from(n_head), cols)],
        vec![
            token_buf("x", cols * u64::from(n_head)),
            token_buf("n", rows * u64::from(n_head)),
        ],
        vec![Op::MatMulHeads {
            x: X,
            n_head,
            weight: 0,
            out: N,
        }],
    );
    case.tokens = tokens;
    case.compared = vec![N];
    case
}

/// silu(gate) * up may be far beyond f16, which the products of many rows get their input in.
pub(super) fn gated_units() -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in [WeightType::Q8_0, WeightType::Q4K] {
        for tokens in [1, 9, 100] {
            let (embd, ff) = (512, 1024);
            let (p, g, u) = (Buf(1), Buf(2), Buf(3));
            let mut case = plain(
                "large gated values".to_owned(),
                format!("{ty} * {tokens}"),
                vec![
                    matrix(ty, ff, embd),
                    matrix(ty, ff, embd),
                    matrix(WeightType::Q8_0, embd, ff),
                ],
                vec![
                    token_buf("x", embd),
                    token_buf("p", embd),
                    token_buf("g", ff),
                    token_buf("u", ff),
                ],
                vec![
                    Op::MatMul {
                        x: X,
                        products: vec![product(0, None, g), product(1, None, u)],
                    },
                    Op::Gate {
                        gate: g,
                        up: u,
                        act: Act::Silu,
                    },
                    Op::MatMul {
                        x: g,
                        products: vec![product(2, None, p)],
                    },
                ],
            );
            case.tokens = tokens;
            case.compared = vec![p];
            // The gated values' tails are heavy, and 8 bits a block are coarse there:
            // that is the host's own error.
            case.tolerance = 6e-2;
            case.size = if ty == WeightType::Q8_0 { 0.4 } else { 0.05 };
            cases.push(case.clone());
            // As plans have it: the product that reads them is another segment's.
            case.operation += ", cut";
            case.cut = Some(2);
            cases.push(case);
        }
    }
    cases
}
