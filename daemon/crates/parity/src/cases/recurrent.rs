//! Operations with a state, in the shapes of models that have them: sequences that begin and
//! sequences that go on, one row and many, and drafts, each of which leaves a state.

use super::*;

/// Name, and of each sequence rows, position of the first, drafts.
type Pass = (&'static str, &'static [(u32, u32, u32)]);

/// Tokens of one sequence or of several that are decoded, prompts, both, and drafts.
const PASSES: [Pass; 6] = [
    ("a token", &[(1, 9, 0)]),
    ("tokens", &[(1, 0, 0), (1, 30, 0), (1, 7, 0)]),
    ("a prompt", &[(70, 0, 0)]),
    (
        "a prompt's rest and tokens",
        &[(1, 12, 0), (1, 0, 0), (33, 16, 0), (18, 0, 0)],
    ),
    ("drafts", &[(1, 12, 3), (1, 5, 0), (1, 20, 1)]),
    ("first drafts", &[(1, 0, 2)]),
];

/// What the result of sums of `terms` products may differ by where `rows` results are made of each
/// other: each sum is off by some 2 * sqrt(terms) roundings, in either direction, and a card's
/// exponentials by as much as 40.
fn tolerance(terms: u32, rows: u32) -> f64 {
    let rounding = f64::from(f32::EPSILON);
    rounding * (40.0 + 2.0 * f64::from(terms).sqrt()) * f64::from(rows).sqrt()
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for pass in PASSES {
        cases.extend(conv(pass));
        cases.extend(delta_net(pass));
        cases.extend(ssm(pass));
    }
    cases
}

/// A case of one operation, `out` being its last buffer.
fn case(
    shape: &str,
    (pass, spans): Pass,
    (op, state): (Op, u64),
    tensors: Vec<Tensor>,
    bufs: Vec<BufSpec>,
    terms: u32,
) -> Case {
    let sequences: Vec<Sequence> = spans
        .iter()
        .map(|&(rows, first, drafts)| Sequence {
            rows,
            first,
            drafts,
        })
        .collect();
    let rows = |s: &Sequence| s.rows + s.drafts;
    let tokens: u32 = sequences.iter().map(rows).sum();
    let taken_in = |s: &Sequence| s.first + rows(s) + 1;
    let longest = sequences.iter().map(taken_in).max().unwrap_or(1);
    let operation = match sequences.iter().any(|s| s.drafts > 0) {
        true => format!("{}, drafts", op.name()),
        false => op.name().to_owned(),
    };
    let out = Buf(bufs.len() as u8 - 1);
    let mut case = plain(
        operation,
        format!("{shape}, {pass}"),
        tensors,
        bufs,
        Vec::new(),
    );
    case.tokens = u64::from(tokens);
    case.compared = vec![out];
    case.tolerance = tolerance(terms, longest);
    // As a pass of tokens is, whose states then are taken in three times.
    case.recorded = sequences.iter().all(|s| s.rows == 1);
    case.work = Work::State(op, state, sequences);
    case
}

fn negative(cols: u64) -> Tensor {
    Tensor {
        negative: true,
        ..vector(cols)
    }
}

fn conv(pass: Pass) -> Vec<Case> {
    let shapes = [
        ("qwen3next 8192", 8192, 4, None, Act::Silu),
        ("qwen35 6144", 6144, 4, None, Act::Silu),
        ("nemotron_h 10240", 10_240, 4, Some(1), Act::Silu),
        ("granitehybrid 3328", 3328, 4, Some(1), Act::Silu),
        ("lfm2 2048", 2048, 3, None, Act::Identity),
        ("2 taps, 100", 100, 2, Some(1), Act::Identity),
        ("8 taps, 1000", 1000, 8, None, Act::Silu),
    ];
    shapes
        .into_iter()
        .map(|(shape, channels, kernel, bias, act)| {
            let weight = Tensor {
                rows: channels,
                ..vector(u64::from(kernel))
            };
            let op = Op::Conv {
                x: X,
                weight: 0,
                bias,
                kernel,
                act,
                state: 0,
                out: N,
            };
            let bufs = vec![token_buf("x", channels), token_buf("out", channels)];
            let state = u64::from(kernel - 1) * channels;
            // No result is made of another one.
            let mut case = case(
                shape,
                pass,
                (op, state),
                vec![weight, vector(channels)],
                bufs,
                kernel,
            );
            case.tolerance = tolerance(kernel, 1);
            case
        })
        .collect()
}

/// Heads of keys, of values, elements of both, whether heads are interleaved.
type NetShape = (&'static str, u32, u32, u32, u32, bool);

fn delta_net(pass: Pass) -> Vec<Case> {
    // Of the models a share of the heads, with their proportion.
    let shapes: [NetShape; 5] = [
        ("qwen3next 4/8 heads of 128", 4, 8, 128, 128, false),
        ("qwen35 4/4 heads of 128", 4, 4, 128, 128, true),
        ("qwen35 4/12 heads of 128", 4, 12, 128, 128, true),
        ("2/4 heads of 256 and 96", 2, 4, 256, 96, false),
        ("1/3 heads of 40 and 24", 1, 3, 40, 24, true),
    ];
    shapes
        .into_iter()
        .map(|(shape, n_head_k, n_head_v, dim_k, dim_v, interleaved)| {
            let wide = |n: u32| u64::from(n);
            let op = Op::DeltaNet {
                qkv: Buf(0),
                alpha: Buf(1),
                beta: Buf(2),
                a: 0,
                dt_bias: 1,
                n_head_k,
                n_head_v,
                dim_k,
                dim_v,
                interleaved,
                eps: 1e-6,
                // Behind what another operation of the layer keeps.
                state: 64,
                out: Buf(3),
            };
            let bufs = vec![
                token_buf("qkv", wide(2 * n_head_k * dim_k + n_head_v * dim_v)),
                token_buf("alpha", wide(n_head_v)),
                token_buf("beta", wide(n_head_v)),
                token_buf("out", wide(n_head_v * dim_v)),
            ];
            let state = 64 + wide(n_head_v * dim_k * dim_v);
            let tensors = vec![negative(wide(n_head_v)), vector(wide(n_head_v))];
            case(shape, pass, (op, state), tensors, bufs, dim_k)
        })
        .collect()
}

fn ssm(pass: Pass) -> Vec<Case> {
    // Heads, their elements, groups, elements of B and C; of the models a share of the heads.
    let shapes = [
        ("nemotron_h 16 heads of 64", 16, 64, 8, 128),
        ("nemotron_h 16 heads of 80", 16, 80, 8, 128),
        ("granitehybrid 12 heads of 64", 12, 64, 1, 128),
        ("8 heads of 64, states of 256", 8, 64, 1, 256),
        ("6 heads of 20, states of 16", 6, 20, 2, 16),
    ];
    shapes
        .into_iter()
        .map(|(shape, n_head, dim, n_group, n_state)| {
            let wide = |n: u32| u64::from(n);
            let op = Op::Ssm {
                xbc: Buf(0),
                dt: Buf(1),
                a: 0,
                skip: 1,
                dt_bias: 2,
                n_head,
                dim,
                n_group,
                n_state,
                state: 64,
                out: Buf(2),
            };
            let bufs = vec![
                token_buf("xbc", wide(n_head * dim + 2 * n_group * n_state)),
                token_buf("dt", wide(n_head)),
                token_buf("out", wide(n_head * dim)),
            ];
            let state = 64 + wide(n_head * dim * n_state);
            let heads = wide(n_head);
            let tensors = vec![negative(heads), vector(heads), vector(heads)];
            case(shape, pass, (op, state), tensors, bufs, n_state)
        })
        .collect()
}
