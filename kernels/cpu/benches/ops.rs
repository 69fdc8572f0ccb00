//! Times of the operations at the shapes of Llama-3.2-1B: 32 query heads and 8 key/value heads of
//! 64, n_embd 2048, n_ff 8192, 128,256 tokens; attention also at those of Qwen3-0.6B, 16 query
//! heads and 8 key/value heads of 128. Prints the median, and bytes that must move over it.
//!
//! `cargo bench -p rocmforge-kernels-cpu --bench ops -- [threads] [filter]` (default:
//! all cores, all operations).

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rocmforge_kernels_cpu::Pool;
use rocmforge_kernels_cpu::ops::{
    self, AttentionShape, AttentionSpan, RopeAngles, RopeParams, RopeTable, Simd,
};
use rocmforge_ops::{KV_PAGE_TOKENS, KvLayout, KvType, RopeOrder, RopeScaling};

const N_EMBD: usize = 2048;
const N_FF: usize = 8192;
const N_HEAD: usize = 32;
const N_HEAD_KV: usize = 8;
const HEAD_DIM: usize = 64;
const N_VOCAB: usize = 128_256;

/// How long one figure is measured.
const BUDGET: Duration = Duration::from_millis(250);

struct Bench {
    filter: String,
    simd: Simd,
    rng: StdRng,
}

impl Bench {
    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| self.rng.random::<f32>() * 4.0 - 2.0)
            .collect()
    }

    /// The median of many runs of `f`, which moves `bytes`.
    fn measure(&self, name: &str, bytes: usize, mut f: impl FnMut()) {
        if !name.contains(&self.filter) {
            return;
        }
        for _ in 0..3 {
            f();
        }
        let start = Instant::now();
        let mut times = Vec::new();
        while start.elapsed() < BUDGET && times.len() < 100_000 {
            let before = Instant::now();
            f();
            times.push(before.elapsed());
        }
        times.sort_unstable();
        let ns = times[times.len() / 2].as_nanos().max(1);
        println!(
            "{:8} {name:58} {ns:>12} ns {:>8.2} GB/s",
            format!("{:?}", self.simd),
            bytes as f64 / ns as f64
        );
    }
}

fn main() {
    let mut arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .collect();
    let threads = arguments.first().and_then(|a| a.parse().ok());
    if threads.is_some() {
        arguments.remove(0);
    }
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let threads = threads.unwrap_or(cores);
    let pool = match Pool::new(threads) {
        Ok(pool) => pool,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(2);
        }
    };
    println!(
        "{threads} threads for attention, 1 for the rest; {cores} cores, widest {:?}",
        Simd::detect()
    );
    let filter = arguments.first().cloned().unwrap_or_default();
    let mut bench = Bench {
        filter,
        simd: Simd::detect(),
        rng: StdRng::seed_from_u64(1),
    };
    dispatch(&bench, &pool);
    for simd in Simd::available() {
        bench.simd = simd;
        rows(&mut bench);
        selection(&mut bench);
        for ty in KvType::ALL {
            attention(&mut bench, &pool, ty);
        }
    }
}

/// What it costs to start and finish an operation that does nothing.
fn dispatch(bench: &Bench, pool: &Pool) {
    bench.measure("pool run, warm", 0, || {
        pool.run(pool.threads() * 4, 1, |range| {
            black_box(range);
        })
    });
    bench.measure("pool broadcast, warm (all threads answer)", 0, || {
        pool.broadcast(|worker| {
            black_box(worker);
        });
    });
    let mut times: Vec<Duration> = (0..100)
        .map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            let before = Instant::now();
            pool.broadcast(|worker| {
                black_box(worker);
            });
            before.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!(
        "{:8} {:58} {:>12} ns",
        "",
        "pool broadcast, parked",
        times[50].as_nanos()
    );
}

fn rows(bench: &mut Bench) {
    let simd = bench.simd;
    for n_rows in [1, 128] {
        let n = n_rows * N_EMBD;
        let (mut x, y, weight) = (bench.values(n), bench.values(n), bench.values(N_EMBD));
        let mut out = vec![0f32; n];
        let name = |op: &str| format!("{op} {n_rows} x {N_EMBD}");
        bench.measure(&name("rms_norm"), n * 8, || {
            ops::rms_norm(simd, black_box(&x), &weight, 1e-5, &mut out)
        });
        let mut sum = x.clone();
        bench.measure(&name("add_rms_norm"), n * 16, || {
            ops::add_rms_norm(simd, black_box(&mut sum), &y, &weight, 1e-5, &mut out);
        });
        let head_weight = bench.values(HEAD_DIM);
        bench.measure(&name("rms_norm_in_place, by heads"), n * 8, || {
            ops::rms_norm_in_place(simd, black_box(&mut x), &head_weight, 1e-5);
        });
        bench.measure(&name("add"), n * 12, || {
            ops::add(simd, black_box(&mut sum), &y)
        });
        bench.measure(&name("add_bias"), n * 8, || {
            ops::add_bias(simd, black_box(&mut sum), &weight)
        });

        let params = RopeParams {
            n_rot: HEAD_DIM,
            freq_base: 5e5,
            scaling: RopeScaling::None,
            freq_factors: None,
            magnitude: 1.0,
        };
        let Ok(table) = RopeTable::new(&params) else {
            unreachable!("the parameters are constants")
        };
        for order in [RopeOrder::Norm, RopeOrder::Neox] {
            let mut angles = RopeAngles::new(order);
            bench.measure(
                &format!("rope angles {order:?}, {n_rows} positions"),
                n_rows * HEAD_DIM * 8,
                || {
                    angles.set(&table, black_box(0..n_rows as u32));
                },
            );
            angles.set(&table, 0..n_rows as u32);
            bench.measure(&name(&format!("rope {order:?}")), n * 8, || {
                ops::rope(simd, &angles, 0, black_box(&mut x), N_HEAD, HEAD_DIM);
            });
        }

        let n = n_rows * N_FF;
        let (gate, up) = (bench.values(n), bench.values(n));
        let mut inout = gate.clone();
        bench.measure(
            &format!("silu_mul {n_rows} x {N_FF}, with a copy"),
            n * 12,
            || {
                inout.copy_from_slice(black_box(&gate));
                ops::silu_mul(simd, &mut inout, &up);
            },
        );
    }
    for ty in KvType::ALL {
        append(bench, ty);
    }
}

/// Keys and values into pages: one token, as decoding does, and 512, as a prompt does.
fn append(bench: &mut Bench, ty: KvType) {
    let (simd, layout) = (bench.simd, layout(ty));
    let row = N_HEAD_KV * HEAD_DIM;
    for n_tokens in [1, 512] {
        let n_pages = layout.pages_for(n_tokens);
        // The allocator aligns to more than the bytes that are asked for.
        let mut pages = vec![vec![0u8; layout.layer_bytes()]; n_pages];
        let (k, v) = (bench.values(n_tokens * row), bench.values(n_tokens * row));
        bench.measure(
            &format!("kv_append {}, {n_tokens} tokens of a layer", ty.name()),
            n_tokens * (row * 8 + layout.layer_bytes() / KV_PAGE_TOKENS),
            || {
                let rows = k
                    .chunks(KV_PAGE_TOKENS * row)
                    .zip(v.chunks(KV_PAGE_TOKENS * row));
                for (page, (k, v)) in pages.iter_mut().zip(rows) {
                    ops::kv_append(simd, &layout, black_box(page), 0..k.len() / row, k, v);
                }
            },
        );
    }
}

fn selection(bench: &mut Bench) {
    let simd = bench.simd;
    let logits = bench.values(N_VOCAB);
    let mut x = logits.clone();
    bench.measure("softmax 1 x 128256, with a copy", N_VOCAB * 8, || {
        x.copy_from_slice(black_box(&logits));
        ops::softmax(simd, &mut x, N_VOCAB);
    });
    bench.measure("log_softmax 1 x 128256, with a copy", N_VOCAB * 8, || {
        x.copy_from_slice(black_box(&logits));
        ops::log_softmax(simd, &mut x, N_VOCAB);
    });
    bench.measure("argmax 128256", N_VOCAB * 4, || {
        black_box(ops::argmax(simd, black_box(&logits)));
    });
    let mut best = Vec::new();
    for k in [1, 40, 1000] {
        bench.measure(&format!("top_k 128256, k {k}"), N_VOCAB * 4, || {
            ops::top_k(simd, black_box(&logits), k, &mut best);
        });
    }
}

fn layout(ty: KvType) -> KvLayout {
    KvLayout {
        n_layer: 1,
        n_head_kv: N_HEAD_KV,
        head_dim_k: HEAD_DIM,
        head_dim_v: HEAD_DIM,
        ty,
    }
}

/// Heads of attention, and what is computed with them.
struct AttentionCases {
    model: &'static str,
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    /// (positions before, rows, copies of the cache to go round, so that the keys come from memory)
    cases: &'static [(usize, usize, usize)],
}

const ATTENTION: [AttentionCases; 2] = [
    AttentionCases {
        model: "llama-1b",
        n_head: N_HEAD,
        n_head_kv: N_HEAD_KV,
        head_dim: HEAD_DIM,
        cases: &[
            (0, 128, 1),
            (0, 512, 1),
            (2047, 1, 1),
            (2047, 1, 24),
            (8191, 1, 8),
        ],
    },
    AttentionCases {
        model: "qwen3-0.6b",
        n_head: 16,
        n_head_kv: 8,
        head_dim: 128,
        cases: &[
            (0, 128, 1),
            (0, 512, 1),
            (299, 1, 1),
            (299, 1, 28),
            (299, 4, 28),
            (299, 8, 28),
            (2047, 1, 28),
        ],
    },
];

fn attention(bench: &mut Bench, pool: &Pool, ty: KvType) {
    for heads in &ATTENTION {
        attention_of(bench, pool, ty, heads);
    }
}

fn attention_of(bench: &mut Bench, pool: &Pool, ty: KvType, heads: &AttentionCases) {
    let kv = KvLayout {
        n_layer: 1,
        n_head_kv: heads.n_head_kv,
        head_dim_k: heads.head_dim,
        head_dim_v: heads.head_dim,
        ty,
    };
    let shape = AttentionShape {
        kv,
        n_head: heads.n_head,
        scale: 0.125,
        window: None,
        ahead: 0,
        softcap: 0.0,
        sinks: None,
        alibi: 0.0,
    };
    for &(before, n_rows, copies) in heads.cases {
        if bench.simd == Simd::Scalar && n_rows == 512 {
            continue;
        }
        let n_tokens = before + n_rows;
        let q = bench.values(n_rows * heads.n_head * heads.head_dim);
        // As f32, as f16, and as codes with scales, these are all small numbers.
        let content: Vec<u8> = vec![0x2c; kv.layer_bytes()];
        let pages: Vec<Vec<u8>> = (0..copies * kv.pages_for(n_tokens))
            .map(|_| content.clone())
            .collect();
        let layers: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
        let mut out = vec![0f32; q.len()];
        let bytes = kv.pages_for(n_tokens) * kv.layer_bytes();
        let cold = if copies > 1 { ", from memory" } else { "" };
        let (ty, model) = (ty.name(), heads.model);
        let mut turn = 0;
        bench.measure(
            &format!("attention {model} {ty}, {n_rows} rows after {before}{cold}"),
            bytes,
            || {
                turn = (turn + 1) % copies;
                let pages = &layers[turn * kv.pages_for(n_tokens)..][..kv.pages_for(n_tokens)];
                let span = AttentionSpan {
                    n_rows,
                    pos0: before,
                    pages,
                    later: 0,
                    whole: false,
                };
                ops::attention(pool, bench.simd, &shape, &[span], black_box(&q), &mut out);
            },
        );
    }
}
