//! Every operation and weight type on every GPU that can be opened, against the host device.
//!
//! Tolerances: both devices round a product's input to 8 bits a block of 32 (the GPU to f16 instead where the vendor's
//! library multiplies), each with its own scale, so two right results differ by a small share of the result's size.
//! Norms, rotations and sums are f32 on both and differ by their order of summation; attention has keys and values in
//! f16 on both. Errors are measured as the root of the mean square of the difference over that of the host's result.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::Write;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_device::gpu::device::usual_images;
use rocmforge_device::gpu::{GpuConfig, GpuDevice, Vendor};
use rocmforge_device::host::{HostConfig, HostDevice};
use rocmforge_device::ops::{HeadShape, Product};
use rocmforge_device::{
    Batch, Bound, Buf, BufSpec, Device, Op, Role, Rows, Scratch, ScratchLayout, SegmentLayout,
    Span, TensorDesc, Upload,
};
use rocmforge_gguf::{MappedFile, TensorType};
use rocmforge_kernels::host::WeightType;
use rocmforge_kernels::host::ops::{
    KV_PAGE_TOKENS, KvLayout, RopeAngles, RopeOrder, RopeParams, RopeScaling, RopeTable,
};

/// Arena of each device.
const ARENA: u64 = 512 << 20;
const SLAB: u64 = 128 << 20;
const SCRATCH: u64 = 256 << 20;
const KV: u64 = 480 << 20;

fn gpus() -> Vec<Box<dyn Device>> {
    let open = |vendor: Vendor| {
        let opened = GpuDevice::open(GpuConfig::new(vendor, 0), usual_images(vendor));
        match opened {
            Ok(device) => Some(Box::new(device) as Box<dyn Device>),
            Err(error) => {
                println!("skipped: {vendor}: {error}");
                None
            }
        }
    };
    [Vendor::Hip, Vendor::Cuda]
        .into_iter()
        .filter_map(open)
        .map(ready)
        .collect()
}

fn ready(mut device: Box<dyn Device>) -> Box<dyn Device> {
    device.set_capacity(ARENA).unwrap();
    let fixed = device.fixed_bytes(ARENA);
    assert!(fixed < SLAB);
    device.set_fixed(0, fixed);
    device
}

fn half_floats(ty: WeightType) -> &'static [usize] {
    match ty {
        WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => &[0],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => &[0, 2],
        WeightType::Q2K => &[80, 82],
        WeightType::Q3K => &[108],
        WeightType::Q6K => &[208],
        WeightType::MXFP4 | WeightType::F32 | WeightType::F16 | WeightType::BF16 => &[],
    }
}

/// Random blocks; scales are up to `size`.
fn random_matrix(rng: &mut StdRng, ty: WeightType, rows: u64, cols: u64, size: f32) -> Vec<u8> {
    let n = (rows * cols) as usize / ty.block_size() * ty.block_bytes();
    let mut bytes = vec![0u8; n];
    rng.fill(bytes.as_mut_slice());
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        let value = rng.random_range(-1.0f32..1.0) * size * 50.0;
        for &at in half_floats(ty) {
            let scale = half::f16::from_f32(rng.random_range(-size..size));
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
        match ty {
            WeightType::F32 => block.copy_from_slice(&value.to_le_bytes()),
            WeightType::F16 => block.copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
            WeightType::BF16 => block.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
            WeightType::MXFP4 => block[0] = rng.random_range(118..126),
            _ => {}
        }
    }
    bytes
}

/// A tensor of a test's file.
struct Tensor {
    ty: WeightType,
    rows: u64,
    cols: u64,
    role: Role,
}

fn matrix(ty: WeightType, rows: u64, cols: u64) -> Tensor {
    Tensor {
        ty,
        rows,
        cols,
        role: Role::Matrix,
    }
}

fn vector(cols: u64) -> Tensor {
    Tensor {
        ty: WeightType::F32,
        rows: 1,
        cols,
        role: Role::Vector,
    }
}

/// A case: tensors, buffers, operations, which buffers are compared.
struct Case {
    name: String,
    tensors: Vec<Tensor>,
    bufs: Vec<BufSpec>,
    ops: Vec<Op>,
    tokens: u64,
    first_position: u32,
    compared: Vec<Buf>,
    tolerance: f64,
    heads: HeadShape,
    order: RopeOrder,
    /// Whether the whole is given to `run_all`, three times, so that a recording is replayed.
    recorded: bool,
    /// Most that a scale is. Where results feed products again, about what keeps their size.
    size: f32,
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
        overlay: 0,
    }
}

struct Outcome {
    bufs: Vec<Vec<f32>>,
}

fn weight_type_of(ty: WeightType) -> TensorType {
    (0..64)
        .filter_map(TensorType::from_u32)
        .find(|t| t.name() == ty.name())
        .unwrap()
}

fn run(device: &mut dyn Device, case: &Case, seed: u64) -> Outcome {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let mut at = 0;
    let mut descs = Vec::new();
    for (i, t) in case.tensors.iter().enumerate() {
        let bytes = random_matrix(
            &mut rng,
            t.ty,
            t.rows,
            t.cols,
            if t.role == Role::Matrix {
                case.size
            } else {
                0.02
            },
        );
        let padding = (32 - at % 32) % 32;
        file.write_all(&vec![0; padding as usize]).unwrap();
        at += padding;
        file.write_all(&bytes).unwrap();
        descs.push(TensorDesc {
            name: format!("t{i}"),
            ty: weight_type_of(t.ty),
            rows: t.rows,
            cols: t.cols,
            offset: at,
            bytes: bytes.len() as u64,
            role: t.role,
        });
        at += bytes.len() as u64;
    }
    file.flush().unwrap();
    let layout: Arc<SegmentLayout> = Arc::new(device.layout(&descs).unwrap());
    assert!(layout.bytes <= SCRATCH - SLAB);
    let mapped = Arc::new(MappedFile::open(file.path()).unwrap());
    if !descs.is_empty() {
        let ticket = device
            .begin_upload(Upload {
                file: Arc::clone(&mapped),
                layout: Arc::clone(&layout),
                slab: SLAB,
            })
            .unwrap();
        device.wait_upload(ticket).unwrap();
    }
    let outputs: Vec<u32> = vec![case.tokens as u32 - 1];
    let scratch_layout = ScratchLayout::new(&case.bufs, case.tokens, 1);
    let workspace = device.workspace_bytes(&scratch_layout);
    assert!(
        SCRATCH + scratch_layout.bytes + workspace <= KV,
        "{} bytes of workspace",
        workspace
    );
    let kv = KvLayout {
        n_layer: 2,
        n_head_kv: case.heads.n_head_kv as usize,
        head_dim_k: case.heads.head_dim as usize,
        head_dim_v: case.heads.head_dim_v as usize,
    };
    let scratch = Scratch {
        layout: &scratch_layout,
        base: SCRATCH,
    };
    let positions = case.first_position as usize + case.tokens as usize;
    // Not in the order of their addresses.
    let n_pages = positions.div_ceil(KV_PAGE_TOKENS) as u64;
    let stride = (kv.page_bytes() as u64).next_multiple_of(256);
    assert!(KV + n_pages * stride <= ARENA);
    let pages: Vec<u64> = (0..n_pages)
        .map(|i| KV + (i ^ u64::from(n_pages > 1 && i < n_pages - n_pages % 2)) * stride)
        .collect();
    let table = RopeTable::new(&RopeParams {
        n_rot: case.heads.head_dim as usize,
        freq_base: 10_000.0,
        scaling: RopeScaling::None,
        freq_factors: None,
    })
    .unwrap();
    let mut angles = RopeAngles::new(case.order);
    // The context before the rows that are compared: its keys and values are appended first, in chunks of up to 64.
    let bound = Bound {
        layout: &layout,
        slab: SLAB,
    };
    let append: Vec<&Op> = case
        .ops
        .iter()
        .filter(|op| matches!(op, Op::RopeKv { .. }))
        .collect();
    let mut first = 0;
    while first < case.first_position && !append.is_empty() {
        let n = (case.first_position - first)
            .min(64)
            .min(case.tokens as u32);
        angles.set(&table, first..first + n);
        fill(device, case, scratch, n as usize, &mut rng);
        let spans = [Span {
            first_row: 0,
            n_rows: n as usize,
            first_position: first,
            kv_pages: &pages,
        }];
        let batch = Batch {
            n_tokens: n as usize,
            spans: &spans,
            kv: &kv,
            rope: &angles,
            outputs: &[],
        };
        for op in &append {
            device
                .run(std::slice::from_ref(*op), bound, scratch, &batch)
                .unwrap();
        }
        first += n;
    }
    let n = case.tokens as usize;
    angles.set(&table, case.first_position..case.first_position + n as u32);
    let spans = [Span {
        first_row: 0,
        n_rows: n,
        first_position: case.first_position,
        kv_pages: &pages,
    }];
    let batch = Batch {
        n_tokens: n,
        spans: &spans,
        kv: &kv,
        rope: &angles,
        outputs: &outputs,
    };
    if case.recorded {
        let again: u64 = rng.random();
        for _ in 0..3 {
            let mut rng = StdRng::seed_from_u64(again);
            fill(device, case, scratch, n, &mut rng);
            device
                .run_all(&[(&case.ops, bound)], scratch, &batch)
                .unwrap();
        }
    } else {
        fill(device, case, scratch, n, &mut rng);
        device.run(&case.ops, bound, scratch, &batch).unwrap();
    }
    let bufs = case
        .compared
        .iter()
        .map(|&buf| {
            let spec = case.bufs[buf.0 as usize];
            let rows = if spec.rows == Rows::Tokens { n } else { 1 };
            let mut out = vec![0.0; rows * spec.width as usize];
            device.read(scratch, buf, &mut out).unwrap();
            out
        })
        .collect();
    device.finished_uploads();
    device.forget_file(&mapped);
    Outcome { bufs }
}

/// Random rows in every token buffer.
fn fill(device: &mut dyn Device, case: &Case, scratch: Scratch<'_>, n: usize, rng: &mut StdRng) {
    for (i, spec) in case.bufs.iter().enumerate() {
        if spec.rows == Rows::Tokens {
            let rows: Vec<f32> = (0..n * spec.width as usize)
                .map(|_| {
                    let outlier = rng.random_range(0..200) == 0;
                    rng.random_range(-1.0f32..1.0) * if outlier { 20.0 } else { 1.0 }
                })
                .collect();
            device.write(scratch, Buf(i as u8), &rows).unwrap();
        }
    }
}

/// Root of the mean square of the difference, over that of the expected values.
fn difference(got: &[f32], expected: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let wrong: f64 = got
        .iter()
        .zip(expected)
        .map(|(&a, &b)| square(f64::from(a) - f64::from(b)))
        .sum();
    let size: f64 = expected.iter().map(|&b| square(f64::from(b))).sum();
    (wrong / size.max(1e-30)).sqrt()
}

fn compare(cases: &[Case]) {
    let mut host = ready(Box::new(HostDevice::new(HostConfig::default()).unwrap()));
    for mut gpu in gpus() {
        println!("{:?}", gpu.info());
        let mut wrong = Vec::new();
        for (i, case) in cases.iter().enumerate() {
            let seed = 1000 + i as u64;
            let expected = run(host.as_mut(), case, seed);
            let got = run(gpu.as_mut(), case, seed);
            for ((buf, got), expected) in case.compared.iter().zip(&got.bufs).zip(&expected.bufs) {
                let name = case.bufs[buf.0 as usize].name;
                let d = difference(got, expected);
                let right = d <= case.tolerance && got.iter().all(|x| x.is_finite());
                let mark = if right { "ok" } else { "WRONG" };
                println!(
                    "{mark:5} {:60} {name:6} {d:.2e} (<= {:.0e})",
                    case.name, case.tolerance
                );
                if !right {
                    wrong.push(format!("{} {name}: {d:.3e}, seed {seed}", case.name));
                }
            }
        }
        assert!(
            wrong.is_empty(),
            "{}:\n{}",
            gpu.info().name,
            wrong.join("\n")
        );
    }
}

fn plain(name: String, tensors: Vec<Tensor>, bufs: Vec<BufSpec>, ops: Vec<Op>) -> Case {
    Case {
        name,
        tensors,
        bufs,
        ops,
        tokens: 1,
        first_position: 0,
        compared: Vec::new(),
        tolerance: 2e-2,
        heads: heads(4, 2, 64),
        order: RopeOrder::Norm,
        recorded: false,
        size: 0.02,
    }
}

fn product(weight: usize, bias: Option<usize>, out: Buf) -> Product {
    Product { weight, bias, out }
}

const X: Buf = Buf(0);
const N: Buf = Buf(1);
const A: Buf = Buf(2);
const B: Buf = Buf(3);

#[test]
fn products_of_every_type_and_number_of_rows() {
    let mut cases = Vec::new();
    for ty in WeightType::ALL {
        for (rows, cols) in [(64, 256), (100, 512), (1000, 1024), (257, 4096)] {
            for tokens in [1, 2, 7, 33, 64, 65, 200] {
                if tokens > 7 && rows != 100 && rows != 1000 {
                    continue;
                }
                let mut case = plain(
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
                cases.push(case);
            }
        }
    }
    compare(&cases);
}

#[test]
fn rows_normed_added_gated_and_gathered() {
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
            let ops = [
                Op::RmsNorm {
                    x: X,
                    weight: 0,
                    eps,
                    out: N,
                },
                Op::AddRmsNorm {
                    x: X,
                    y: A,
                    weight: 0,
                    eps,
                    out: N,
                },
                Op::Add { x: X, y: A },
                Op::SiluMul { gate: X, up: A },
                Op::GatherOutputs { x: X, out: B },
            ];
            for op in ops {
                let mut case = plain(
                    format!("{:.20} width {width} * {tokens}", format!("{op:?}")),
                    vec![vector(width)],
                    bufs(),
                    vec![op.clone()],
                );
                case.tokens = tokens;
                case.tolerance = 1e-5;
                case.compared = match op {
                    Op::RmsNorm { .. } => vec![N],
                    Op::AddRmsNorm { .. } => vec![X, N],
                    Op::GatherOutputs { .. } => vec![B],
                    _ => vec![X],
                };
                cases.push(case);
            }
        }
    }
    compare(&cases);
}

#[test]
fn attention_over_pages() {
    let mut cases = Vec::new();
    let shapes = [
        heads(4, 4, 64),
        heads(8, 2, 64),
        heads(32, 8, 128),
        heads(16, 2, 128),
        heads(4, 1, 80),
        heads(4, 2, 96),
    ];
    for shape in shapes {
        for (tokens, first) in [(1, 0), (1, 31), (1, 300), (5, 0), (64, 20), (130, 70)] {
            for (order, norms) in [(RopeOrder::Norm, false), (RopeOrder::Neox, true)] {
                let (q, kv) = (
                    u64::from(shape.n_head * shape.head_dim),
                    u64::from(shape.n_head_kv * shape.head_dim),
                );
                let norm = |t| norms.then_some((t, 1e-6));
                let mut case = plain(
                    format!("attention {shape:?} {order:?} * {tokens} at {first}")
                        .replace("HeadShape ", ""),
                    vec![
                        vector(u64::from(shape.head_dim)),
                        vector(u64::from(shape.head_dim)),
                    ],
                    vec![
                        token_buf("q", q),
                        token_buf("k", kv),
                        token_buf("v", kv),
                        token_buf("out", q),
                    ],
                    vec![
                        Op::RopeKv {
                            q: X,
                            k: N,
                            v: A,
                            heads: shape,
                            q_norm: norm(0),
                            k_norm: norm(1),
                            layer: 1,
                        },
                        Op::Attention {
                            q: X,
                            out: B,
                            heads: shape,
                            layer: 1,
                            scale: 1.0 / (shape.head_dim as f32).sqrt(),
                        },
                    ],
                );
                case.tokens = tokens;
                case.first_position = first;
                case.compared = vec![B];
                case.heads = shape;
                case.order = order;
                case.tolerance = 5e-3;
                cases.push(case);
            }
        }
    }
    compare(&cases);
}

/// silu(gate) * up may be far beyond f16, which the products of many rows get their input in.
#[test]
fn gated_values_beyond_f16() {
    let mut cases = Vec::new();
    for ty in [WeightType::Q8_0, WeightType::Q4K] {
        for tokens in [1, 9, 100] {
            let (embd, ff) = (512, 1024);
            let (p, g, u) = (Buf(1), Buf(2), Buf(3));
            let mut case = plain(
                format!("large gated values {ty} * {tokens}"),
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
                    Op::SiluMul { gate: g, up: u },
                    Op::MatMul {
                        x: g,
                        products: vec![product(2, None, p)],
                    },
                ],
            );
            case.tokens = tokens;
            case.compared = vec![p];
            // The gated values' tails are heavy, and 8 bits a block are coarse there: that is the host's own error.
            case.tolerance = 6e-2;
            case.size = if ty == WeightType::Q8_0 { 0.4 } else { 0.05 };
            cases.push(case);
        }
    }
    compare(&cases);
}

/// A layer's operations together, so that they are fused, and recorded where the rows are few.
#[test]
fn a_whole_layer_fused_and_recorded() {
    let mut cases = Vec::new();
    let pairs = [
        (WeightType::Q4K, WeightType::Q6K),
        (WeightType::Q4_0, WeightType::Q4_0),
        (WeightType::Q8_0, WeightType::Q8_0),
        (WeightType::Q5K, WeightType::Q6K),
        (WeightType::Q3K, WeightType::Q5K),
        (WeightType::F16, WeightType::Q8_0),
        (WeightType::F32, WeightType::F32),
    ];
    for (ty, other) in pairs {
        for (tokens, first) in [(1, 0), (1, 77), (9, 0), (100, 0)] {
            let shape = heads(8, 2, 64);
            let (embd, ff, kv) = (512, 1024, 128);
            let [q, k, v, attended, p, g, u] = [2, 3, 4, 5, 6, 7, 8].map(Buf);
            let eps = 1e-5;
            let mut case = plain(
                format!("layer {ty}/{other} * {tokens} at {first}"),
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
                        weight: 0,
                        eps,
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
                        layer: 0,
                    },
                    Op::Attention {
                        q,
                        out: attended,
                        heads: shape,
                        layer: 0,
                        scale: 0.125,
                    },
                    Op::MatMul {
                        x: attended,
                        products: vec![product(4, None, p)],
                    },
                    Op::AddRmsNorm {
                        x: X,
                        y: p,
                        weight: 5,
                        eps,
                        out: N,
                    },
                    Op::MatMul {
                        x: N,
                        products: vec![product(6, None, g), product(7, None, u)],
                    },
                    Op::SiluMul { gate: g, up: u },
                    Op::MatMul {
                        x: g,
                        products: vec![product(8, None, p)],
                    },
                    Op::Add { x: X, y: p },
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
            cases.push(case);
        }
    }
    compare(&cases);
}
