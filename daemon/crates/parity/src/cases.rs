//! The table: operations, weight types, shapes and numbers of rows.

use rocmforge_device::ops::{HeadShape, Product};
use rocmforge_device::{Buf, BufSpec, Op, Role, Rows};
use rocmforge_ops::{Act, ExpertFfn, KvLayer, KvType, Mask, RopeOrder, RopeUse, WeightType};

mod adapters;
mod attention;
mod elements;
mod experts;
mod recurrent;

pub(crate) use adapters::Scales;

/// The part of the table of cases that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All cases.
    Full,
    /// Some cases of every operation and type.
    Quick,
}

/// A tensor of a case's file.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) ty: WeightType,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    pub(crate) role: Role,
    /// Whether all its elements are below zero; it is F32 then.
    pub(crate) negative: bool,
}

/// Rows of one sequence in a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    /// Rows that its state takes in, at least one.
    pub(crate) rows: u32,
    /// Position of the first of them.
    pub(crate) first: u32,
    /// Drafts behind them: a row each, which leaves the state elsewhere.
    pub(crate) drafts: u32,
}

/// What a case does.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    /// Operations over tensors and buffers.
    Ops(Vec<Op>),
    /// An operation with a state of so many f32 elements, over sequences with states of their own.
    State(Op, u64, Vec<Sequence>),
    /// The choice of experts, and what they compute of it, with the first of their
    /// tensors and their number.
    Experts {
        route: Op,
        ffn: ExpertFfn,
        first_tensor: usize,
        n_expert: u32,
    },
    /// Rows of an embedding of a type, written into buffer 0.
    EmbeddingRows(WeightType),
    /// The largest of each row of buffer 0.
    Argmax,
    /// The given number of largest elements of each row of buffer 0.
    TopK(usize),
}

/// How much longer than the one before each sequence of a case of many is.
pub(crate) const APART: u32 = 5;

/// A case: tensors, buffers, operations, which buffers are compared.
#[derive(Debug, Clone)]
pub struct Case {
    pub(crate) operation: String,
    pub(crate) name: String,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) bufs: Vec<BufSpec>,
    pub(crate) work: Work,
    pub(crate) tokens: u64,
    pub(crate) first_position: u32,
    pub(crate) compared: Vec<Buf>,
    pub(crate) tolerance: f64,
    pub(crate) heads: HeadShape,
    pub(crate) order: RopeOrder,
    /// Elements of a head that are rotated.
    pub(crate) n_rot: u32,
    /// What keys and values are stored as.
    pub(crate) kv: KvType,
    /// Whether the whole is given to `run_all`, three times, so that a recording is replayed.
    pub(crate) recorded: bool,
    /// Whether its rows are those of one token and of drafts behind it.
    pub(crate) drafts: bool,
    /// Whether its rows are tokens of as many sequences, each [`APART`] positions
    /// longer than the one before.
    pub(crate) apart: bool,
    /// Rows of each of several whole texts, all from their first position; none for one sequence.
    pub(crate) texts: &'static [u32],
    /// Whether rows of every second text attend to all of theirs, whatever the mask says.
    pub(crate) images: bool,
    /// The texts are the parts of one sequence, whose rows attend within theirs.
    pub(crate) parts: bool,
    /// Whether the one output is the mean of the last row's span, not that row.
    pub(crate) mean: bool,
    /// Where the operations are cut into two runs, as between two segments of a plan.
    pub(crate) cut: Option<usize>,
    /// Most that a scale is. Where results feed products again, about what keeps their size.
    pub(crate) size: f32,
    /// Whether some elements of its rows are far larger than the others.
    pub(crate) outliers: bool,
    /// The buffer of adapters' scales.
    pub(crate) scales: Option<Scales>,
}

impl Case {
    /// What is compared, as a report calls it.
    #[must_use]
    pub fn operation(&self) -> &str {
        &self.operation
    }
}

impl Case {
    /// Whether its operations are given as a whole pass, often enough that a
    /// recording of it is replayed.
    pub fn is_recorded(&self) -> bool {
        self.recorded
    }
}

const X: Buf = Buf(0);
const N: Buf = Buf(1);
const A: Buf = Buf(2);
const B: Buf = Buf(3);

/// `Extent::Quick` runs one of this many cases of each operation.
const QUICK_STEP: usize = 5;

/// The table.
pub fn cases(extent: Extent) -> Vec<Case> {
    let all = [
        products(),
        embeddings(),
        rows(),
        argmax(),
        attention::cases(),
        elements::gated_units(),
        elements::gathered_means(),
        layers(),
        adapters::cases(),
        adapters::behind_products(),
        adapters::layers(),
        elements::cases(),
        attention::variants(),
        attention::drafts(),
        attention::many(),
        attention::both_ways(),
        attention::images(),
        attention::parts(),
        attention::alibi(),
        experts::cases(),
        recurrent::cases(),
        largest(),
    ]
    .concat();
    if extent == Extent::Full {
        return all;
    }
    let mut seen: Vec<(String, usize)> = Vec::new();
    let mut some = Vec::new();
    for case in all {
        let at = seen.iter().position(|(name, _)| *name == case.operation);
        let at = at.unwrap_or_else(|| {
            seen.push((case.operation.clone(), 0));
            seen.len() - 1
        });
        if seen[at].1.is_multiple_of(QUICK_STEP) {
            some.push(case);
        }
        seen[at].1 += 1;
    }
    some
}

fn matrix(ty: WeightType, rows: u64, cols: u64) -> Tensor {
    Tensor {
        ty,
        rows,
        cols,
        role: Role::Matrix,
        negative: false,
    }
}

fn vector(cols: u64) -> Tensor {
    Tensor {
        ty: WeightType::F32,
        rows: 1,
        cols,
        role: Role::Vector,
        negative: false,
    }
}

fn heads(n_head: u32, n_head_kv: u32, dim: u32) -> HeadShape {
    HeadShape {
        n_head,
        n_head_kv,
        head_dim: dim,
        head_dim_v: dim,
    }
}

fn token_buf(name: &'static str, width: u64) -> BufSpec {
    BufSpec {
        name,
        width,
        rows: Rows::Tokens,
    }
}

/// The rotation that every case has.
const ROPE: Option<RopeUse> = Some(RopeUse { table: 0, first: 0 });

fn kv_layer(index: u32) -> KvLayer {
    KvLayer { group: 0, index }
}

fn product(weight: usize, bias: Option<usize>, out: Buf) -> Product {
    Product { weight, bias, out }
}

fn plain(
    operation: String,
    name: String,
    tensors: Vec<Tensor>,
    bufs: Vec<BufSpec>,
    ops: Vec<Op>,
) -> Case {
    Case {
        operation,
        name,
        tensors,
        bufs,
        work: Work::Ops(ops),
        tokens: 1,
        first_position: 0,
        compared: Vec::new(),
        tolerance: 2e-2,
        heads: heads(4, 2, 64),
        order: RopeOrder::Norm,
        n_rot: 64,
        kv: KvType::F16,
        recorded: false,
        drafts: false,
        apart: false,
        texts: &[],
        images: false,
        parts: false,
        mean: false,
        cut: None,
        size: 0.02,
        outliers: true,
        scales: None,
    }
}

/// Products of every type and number of rows.
fn products() -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in WeightType::ALL {
        // Also so many columns that blocks share a row's, and a number that is no whole slice.
        let wide = match ty.block_size() > 32 {
            true => (40, 8448),
            false => (40, 8480),
        };
        for (rows, cols) in [(64, 256), (100, 512), (1000, 1024), (257, 4096), wide] {
            for tokens in [1, 2, 7, 13, 20, 33, 64, 65, 200] {
                if tokens > 7 && ![100, 1000].contains(&rows) && (tokens, rows) != (13, 40) {
                    continue;
                }
                let mut case = plain(
                    format!("mul_mat {ty}"),
                    format!("{ty} {rows}x{cols} * {tokens}"),
                    vec![matrix(ty, rows, cols), matrix(ty, 32, cols), vector(rows)],
                    vec![
                        token_buf("x", cols),
                        token_buf("n", cols),
                        token_buf("a", rows),
                        token_buf("b", 32),
                    ],
                    vec![Op::MatMul {
                        x: X,
                        products: vec![product(0, Some(2), A), product(1, None, B)],
                    }],
                );
                case.tokens = tokens;
                case.compared = vec![A, B];
                if !ty.is_quantized() {
                    // Rows in f16 alone make it 2.8e-4.
                    case.tolerance = 5e-5;
                }
                cases.push(case);
            }
        }
    }
    cases
}

/// Rows of an embedding: few, which the host may dequantize, and many, which the device does.
fn embeddings() -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in WeightType::ALL {
        for (width, tokens) in [(256, 1), (768, 5), (4096, 32), (768, 130)] {
            let mut case = plain(
                format!("embedding rows {ty}"),
                format!("{ty} width {width} * {tokens}"),
                Vec::new(),
                vec![token_buf("x", width)],
                Vec::new(),
            );
            case.work = Work::EmbeddingRows(ty);
            case.tokens = tokens;
            case.compared = vec![X];
            case.tolerance = 1e-6;
            cases.push(case);
        }
    }
    cases
}

/// The largest of each row, among ties too.
fn argmax() -> Vec<Case> {
    let mut cases = Vec::new();
    for (width, tokens) in [(1000, 1), (32_000, 3), (128_256, 1), (151_936, 2)] {
        let mut case = plain(
            "argmax".to_owned(),
            format!("width {width} * {tokens}"),
            Vec::new(),
            vec![token_buf("x", width)],
            Vec::new(),
        );
        case.work = Work::Argmax;
        case.tokens = tokens;
        case.compared = vec![X];
        case.tolerance = 0.0;
        cases.push(case);
    }
    cases
}

/// Cases of `top_k`: the largest elements of each row in order, with ties.
fn largest() -> Vec<Case> {
    let mut cases = Vec::new();
    for (width, tokens, k) in [(1000, 1, 1), (32_000, 3, 40), (151_936, 2, 256)] {
        let mut case = plain(
            "top_k".to_owned(),
            format!("{k} of width {width} * {tokens}"),
            Vec::new(),
            vec![token_buf("x", width)],
            Vec::new(),
        );
        case.work = Work::TopK(k);
        case.tokens = tokens;
        case.compared = vec![X];
        case.tolerance = 0.0;
        cases.push(case);
    }
    cases
}

/// Rows normed, added, gated and gathered.
fn rows() -> Vec<Case> {
    let mut cases = Vec::new();
    for width in [256, 768, 4096] {
        for tokens in [1, 5, 130] {
            let bufs = || {
                vec![
                    token_buf("x", width),
                    token_buf("n", width),
                    token_buf("a", width),
                    BufSpec {
                        rows: Rows::Outputs,
                        ..token_buf("o", width)
                    },
                ]
            };
            let eps = 1e-5;
            let norm = Op::RmsNorm {
                x: X,
                weight: Some(0),
                eps,
                group: width as u32,
                out: N,
            };
            let ops = [
                ("rms_norm", norm, vec![N]),
                (
                    "add",
                    Op::Add {
                        x: X,
                        y: A,
                        scale: 1.0,
                    },
                    vec![X],
                ),
                (
                    "silu_mul",
                    Op::Gate {
                        gate: X,
                        up: A,
                        act: Act::Silu,
                    },
                    vec![X],
                ),
                (
                    "gather_outputs",
                    Op::GatherOutputs { x: X, out: B },
                    vec![B],
                ),
            ];
            for (operation, op, compared) in ops {
                let mut case = plain(
                    operation.to_owned(),
                    format!("width {width} * {tokens}"),
                    vec![vector(width)],
                    bufs(),
                    vec![op],
                );
                case.tokens = tokens;
                case.tolerance = 1e-5;
                case.compared = compared;
                cases.push(case);
            }
        }
    }
    cases
}

/// A layer's operations together, so that they are fused, and recorded where the rows are few.
fn layers() -> Vec<Case> {
    let pairs = [
        (WeightType::Q4K, WeightType::Q6K),
        (WeightType::Q4_0, WeightType::Q4_0),
        (WeightType::Q8_0, WeightType::Q8_0),
        (WeightType::Q5K, WeightType::Q6K),
        (WeightType::Q3K, WeightType::Q5K),
        (WeightType::F16, WeightType::Q8_0),
        (WeightType::F32, WeightType::F32),
    ];
    let spans = [(1, 0), (1, 77), (9, 0), (100, 0)];
    let both = |pair| spans.map(|span| layer(pair, span));
    pairs.into_iter().flat_map(both).collect()
}

#[expect(clippy::too_many_lines, reason = "one list of cases")]
fn layer((ty, other): (WeightType, WeightType), (tokens, first): (u64, u32)) -> Case {
    let shape = heads(8, 2, 64);
    let (embd, ff, kv) = (512, 1024, 128);
    let [q, k, v, attended, p, g, u] = [2, 3, 4, 5, 6, 7, 8].map(Buf);
    let eps = 1e-5;
    let mut case = plain(
        "layer, fused and recorded".to_owned(),
        format!("{ty}/{other} * {tokens} at {first}"),
        vec![
            vector(embd),
            matrix(ty, embd, embd),
            matrix(ty, kv, embd),
            matrix(other, kv, embd),
            matrix(ty, embd, embd),
            vector(embd),
            matrix(ty, ff, embd),
            matrix(ty, ff, embd),
            matrix(other, embd, ff),
        ],
        vec![
            token_buf("x", embd),
            token_buf("n", embd),
            token_buf("q", embd),
            token_buf("k", kv),
            token_buf("v", kv),
            token_buf("a", embd),
            token_buf("p", embd),
            token_buf("g", ff),
            token_buf("u", ff),
        ],
        vec![
            Op::RmsNorm {
                x: X,
                weight: Some(0),
                eps,
                group: embd as u32,
                out: N,
            },
            Op::MatMul {
                x: N,
                products: vec![
                    product(1, None, q),
                    product(2, None, k),
                    product(3, None, v),
                ],
            },
            Op::RopeKv {
                q,
                k,
                v,
                heads: shape,
                q_norm: None,
                k_norm: None,
                rope: ROPE,
                layer: kv_layer(0),
            },
            Op::Attention {
                q,
                out: attended,
                heads: shape,
                layer: kv_layer(0),
                scale: 0.125,
                mask: Mask::Causal,
                softcap: 0.0,
                sinks: None,
                alibi: 0.0,
            },
            Op::MatMul {
                x: attended,
                products: vec![product(4, None, p)],
            },
            Op::Add {
                x: X,
                y: p,
                scale: 1.0,
            },
            Op::RmsNorm {
                x: X,
                weight: Some(5),
                eps,
                group: embd as u32,
                out: N,
            },
            Op::MatMul {
                x: N,
                products: vec![product(6, None, g), product(7, None, u)],
            },
            Op::Gate {
                gate: g,
                up: u,
                act: Act::Silu,
            },
            Op::MatMul {
                x: g,
                products: vec![product(8, None, p)],
            },
            Op::Add {
                x: X,
                y: p,
                scale: 1.0,
            },
        ],
    );
    case.tokens = tokens;
    case.first_position = first;
    case.compared = vec![X];
    case.heads = shape;
    case.recorded = tokens == 1;
    case.tolerance = 3e-2;
    case.size = match ty {
        WeightType::F16 | WeightType::F32 => 1.5e-3,
        WeightType::Q4_0 => 1.5e-2,
        WeightType::Q8_0 => 1e-3,
        _ => 2e-4,
    };
    case
}
