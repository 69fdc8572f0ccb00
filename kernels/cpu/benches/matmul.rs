//! Matrix products at the shapes of Llama-3.2-1B: `cargo bench -p rocmforge-kernels-cpu
//! --bench matmul [-- FILTER]`.
//!
//! For each weight type, with 1 and 2 threads: a whole model's weights multiplied with one token
//! (decode: GB/s of packed weights, beside the machine's own read bandwidth from the same arena),
//! its layers with 512 tokens (prefill: GOP/s, two operations a multiply-add) and with a few tokens
//! (a batch of sequences: GOP/s of two threads). Attention, norms and the pool are not in it: these
//! are upper bounds of tokens a second.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rocmforge_kernels_cpu::{
    ActivationForm, Activations, Isa, PackedMatrix, RowsOut, WeightType, mat_mul, reference,
};

const LAYERS: usize = 16;
const ARENA_BYTES: usize = 5 << 30;
const HUGE_PAGE: usize = 2 << 20;
const PREFILL_TOKENS: usize = 512;
const BATCHES: [usize; 7] = [2, 4, 6, 8, 12, 16, 32];

/// Memory in huge pages, as the device's arena has it.
struct Arena {
    memory: Vec<u8>,
    start: usize,
}

impl Arena {
    fn new(bytes: usize) -> Arena {
        let mut memory: Vec<u8> = Vec::with_capacity(bytes + HUGE_PAGE);
        let start = memory.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: the range lies inside the allocation; the advice changes no contents.
        unsafe {
            libc::madvise(
                memory.as_mut_ptr().add(start).cast(),
                bytes,
                libc::MADV_HUGEPAGE,
            )
        };
        memory.resize(bytes + start, 1);
        Arena { memory, start }
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..]
    }
}

/// One matrix of the model and where its packed form is.
struct Weights {
    matrix: PackedMatrix,
    at: Range<usize>,
}

/// Type of the linear layers, and a name; `Q4_K_M` mixes as llama.cpp does.
fn layer_types(mix: &str, ty: WeightType, layer: usize) -> [WeightType; 7] {
    let more = mix == "Q4_K_M" && (!(2..14).contains(&layer) || layer % 3 == 1);
    let wide = if more { WeightType::Q6K } else { ty };
    [ty, ty, wide, ty, ty, ty, wide]
}

fn output_type(ty: WeightType) -> WeightType {
    match ty {
        WeightType::F32 | WeightType::F16 | WeightType::BF16 | WeightType::Q8_0 => ty,
        _ => WeightType::Q6K,
    }
}

/// `[rows, cols]` of q, k, v, o, gate, up, down.
const SHAPES: [[usize; 2]; 7] = [
    [2048, 2048],
    [512, 2048],
    [512, 2048],
    [2048, 2048],
    [8192, 2048],
    [8192, 2048],
    [2048, 8192],
];

fn random_rows(w: &PackedMatrix, rows: usize) -> Vec<u8> {
    let (ty, mut state) = (w.ty(), 0x9e37_79b9_7f4a_7c15u64);
    let mut bytes = vec![0u8; rows * w.file_row_bytes()];
    for byte in &mut bytes {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        *byte = (state >> 56) as u8;
    }
    // Any exponent field short of all ones: clear a bit of it wherever a half
    // float (or a weight) may be.
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        let upper_bytes: &[usize] = match ty {
            WeightType::F32 => &[3],
            WeightType::BF16 => &[1],
            WeightType::MXFP4 => &[0],
            WeightType::NVFP4 => &[0, 1, 2, 3],
            WeightType::IQ1M => &[55],
            _ => &[],
        };
        let halves = reference::half_floats(ty).iter().map(|at| at + 1);
        for at in halves.chain(upper_bytes.iter().copied()) {
            block[at] = (block[at] & 0x0f) | 0x20;
        }
    }
    bytes
}

/// Packs random weights into the arena from `at` on; yields the seconds that packing took.
fn place(arena: &mut Arena, at: usize, matrix: PackedMatrix) -> (Weights, f64) {
    let at = at..at + matrix.packed_bytes();
    let dst = &mut arena.bytes_mut()[at.clone()];
    let groups = matrix.row_groups();
    let some = 32.min(groups);
    let file = random_rows(&matrix, some * 16);
    let start = Instant::now();
    for first in (0..groups).step_by(some) {
        let range = first..(first + some).min(groups);
        let rows = matrix.file_range(range.clone()).len();
        matrix
            .pack(
                &file[..rows],
                range.clone(),
                &mut dst[matrix.packed_range(range)],
            )
            .expect("finite scales");
    }
    (Weights { matrix, at }, start.elapsed().as_secs_f64())
}

/// Waits until all threads have come as often.
fn meet(count: &AtomicUsize, round: &mut usize, threads: usize) {
    *round += threads;
    count.fetch_add(1, Ordering::AcqRel);
    while count.load(Ordering::Acquire) < *round {
        std::hint::spin_loop();
    }
}

/// Seconds for every matrix once, rows split evenly among the threads, which meet after each
/// matrix. The best of `times`.
fn pass(arena: &Arena, model: &[Weights], threads: usize, tokens: usize, times: usize) -> f64 {
    let isa = Isa::detect().expect("a usable ROCMFORGE_ISA");
    let widths = [2048, 8192];
    let inputs = widths.map(|cols| {
        let x: Vec<f32> = (0..tokens * cols)
            .map(|i| ((i * 37) as f32).sin())
            .collect();
        let mut activations = Activations::new();
        activations.fill(isa, ActivationForm::Both, &x, tokens, cols);
        activations
    });
    let most_rows = model.iter().map(|w| w.matrix.rows()).max().unwrap_or(0);
    let mut out = vec![0.0f32; tokens * most_rows];
    let out_at = SendPtr(out.as_mut_ptr(), out.len());
    let mut best = f64::MAX;
    for _ in 0..times {
        let count = AtomicUsize::new(0);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (inputs, count) = (&inputs, &count);
                scope.spawn(move || {
                    let mut round = 0;
                    for w in model {
                        let m = &w.matrix;
                        let x = &inputs[usize::from(m.cols() != widths[0])];
                        let groups = m.row_groups() * thread / threads
                            ..m.row_groups() * (thread + 1) / threads;
                        // SAFETY: the buffer outlives the scope; the threads' groups do not
                        // overlap.
                        let out = unsafe { out_at.view(tokens, m.rows()) };
                        mat_mul(m, &arena.bytes()[w.at.clone()], x, groups, out);
                        meet(count, &mut round, threads);
                    }
                });
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// The output buffer, for several threads.
#[derive(Clone, Copy)]
struct SendPtr(*mut f32, usize);

// SAFETY: used for disjoint columns only, see `pass`.
unsafe impl Send for SendPtr {}

impl SendPtr {
    /// # Safety
    /// As `RowsOut::new`, and the buffer must outlive the view.
    unsafe fn view<'a>(self, tokens: usize, rows: usize) -> RowsOut<'a> {
        // SAFETY: the caller keeps the buffer alive.
        let out = unsafe { std::slice::from_raw_parts_mut(self.0, self.1) };
        // SAFETY: the caller gives each thread its own groups.
        unsafe { RowsOut::new(out, tokens, rows, rows) }
    }
}

/// GB/s of summing the arena's words.
fn read_bandwidth(arena: &Arena, threads: usize) -> f64 {
    let bytes = &arena.bytes()[..1 << 30];
    let mut best = 0.0f64;
    for _ in 0..5 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in bytes.chunks(bytes.len() / threads) {
                scope.spawn(move || {
                    let mut sums = [0u64; 32];
                    for words in part.as_chunks::<256>().0 {
                        for (sum, word) in sums.iter_mut().zip(words.as_chunks::<8>().0) {
                            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
                        }
                    }
                    std::hint::black_box(sums)
                });
            }
        });
        best = best.max(bytes.len() as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}

/// Prints what quantizing activations and looking up embeddings costs.
fn print_small_costs(isa: Isa) {
    for (tokens, cols) in [(1, 2048), (PREFILL_TOKENS, 2048), (PREFILL_TOKENS, 8192)] {
        let x: Vec<f32> = (0..tokens * cols)
            .map(|i| ((i * 37) as f32).sin())
            .collect();
        let mut activations = Activations::new();
        let us = best_us(|| activations.fill(isa, ActivationForm::Quantized, &x, tokens, cols));
        println!("quantizing {tokens} x {cols} activations, 1 thread: {us:.2} us");
    }
    let matrix = PackedMatrix::new(WeightType::Q6K, 64, 2048, isa).expect("a valid shape");
    let mut packed = vec![0; matrix.packed_bytes()];
    matrix
        .pack(&random_rows(&matrix, 64), 0..4, &mut packed)
        .expect("finite scales");
    let mut row = vec![0.0; 2048];
    let us = best_us(|| matrix.unpack_row(&packed, 33, &mut row));
    println!("unpacking a row of 2048 in Q6_K: {us:.2} us");
}

/// Microseconds of the fastest of 50 runs.
fn best_us(mut run: impl FnMut()) -> f64 {
    let times = (0..50).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64() * 1e6
    });
    times.fold(f64::MAX, f64::min)
}

fn main() {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let isa = Isa::detect().expect("a usable ROCMFORGE_ISA");
    let mut arena = Arena::new(ARENA_BYTES);
    let bandwidth = [1, 2].map(|threads| read_bandwidth(&arena, threads));
    println!(
        "{}; reading memory: {:.1} GB/s with 1 thread, {:.1} with 2",
        isa.name(),
        bandwidth[0],
        bandwidth[1]
    );
    print_small_costs(isa);
    println!(
        "mix      GiB  pack GB/s | decode 1t GB/s  2t GB/s  of peak  tok/s | prefill 1t GOP/s  2t GOP/s  tok/s | GOP/s of {BATCHES:?} tokens"
    );
    let mixes = WeightType::ALL
        .map(|ty| (ty.name(), ty))
        .into_iter()
        .chain([("Q4_K_M", WeightType::Q4K)]);
    for (name, ty) in
        mixes.filter(|(name, _)| args.is_empty() || args.iter().any(|arg| arg == name))
    {
        let mut model = Vec::new();
        let (mut at, mut seconds) = (0, 0.0);
        let mut matrices = Vec::new();
        for layer in 0..LAYERS {
            matrices.extend(layer_types(name, ty, layer).into_iter().zip(SHAPES));
        }
        let linear = matrices.len();
        matrices.push((output_type(ty), [128_256, 2048]));
        for (ty, [rows, cols]) in matrices {
            let matrix = PackedMatrix::new(ty, rows, cols, isa).expect("a shape of the model");
            let (weights, took) = place(&mut arena, at, matrix);
            at = weights.at.end.next_multiple_of(4096);
            seconds += took;
            model.push(weights);
        }
        let bytes: usize = model.iter().map(|w| w.at.len()).sum();
        let operations: usize = model[..linear]
            .iter()
            .map(|w| 2 * w.matrix.rows() * w.matrix.cols())
            .sum();
        let decode = [1, 2].map(|threads| pass(&arena, &model, threads, 1, 8));
        let layers = &model[..linear];
        let prefill = [1, 2].map(|threads| pass(&arena, layers, threads, PREFILL_TOKENS, 2));
        let gigabytes = decode.map(|seconds| bytes as f64 / seconds / 1e9);
        let rate = prefill.map(|seconds| (operations * PREFILL_TOKENS) as f64 / seconds / 1e9);
        let batches = BATCHES.map(|tokens| {
            let seconds = pass(&arena, layers, 2, tokens, 4);
            ((operations * tokens) as f64 / seconds / 1e9).round()
        });
        println!(
            "{name:7} {:.2}  {:9.2} | {:14.1}  {:7.1}  {:6.0}%  {:5.1} | {:16.0}  {:8.0}  {:5.0} | {batches:?}",
            bytes as f64 / f64::from(1 << 30),
            bytes as f64 / seconds / 1e9,
            gigabytes[0],
            gigabytes[1],
            100.0 * gigabytes[1] / bandwidth[1],
            1.0 / decode[1],
            rate[0],
            rate[1],
            PREFILL_TOKENS as f64 / prefill[1],
        );
    }
}
