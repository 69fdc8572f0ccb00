// Products of routed rows with matrices of the experts that they go to: decode and a few rows.
//
//   out[i] = act(W1[e] x[i / share] + b1[e]) * (W2[e] x[i / share] + b2[e]) * scale[e],  e = ids[i]; parts that are not there left out
//
// ids [n_routed] are whole numbers in f32. Rows of experts that are not here (table entry 0) are left alone. Quantized weights: every
// block quantizes its row of x to 8 bits for itself, as matvec.hip does.
// Geometry: grid (n_blocks, n_routed), THREADS threads; a wave takes two rows of weights at once (a row of each matrix, or neighbours),
// round robin over the waves of its row of blocks. Bound by memory: the matrices' bytes once a routed row, shared through the
// second-level cache where rows go to the same expert.
// Shared memory: 40 bytes per 32 columns (dynamic); none for floats.
// Entries: experts_<type> (WEIGHT; FLOATS for F32, F16 and BF16).
#include "compat.h"
#include "formats.h"
#include "floats.h"
#include "activations.h"
#include "experts.h"

#define THREADS 256
#define UNROLL 2

struct ExpertsArgs {
    const float* x;
    const float* ids;
    float* out;
    ExpertTensors tensors;
    u32 share;  // routed rows that have the same row of x
    u32 n_blocks;
};

#ifdef FLOATS
// A row's product with x; lanes have parts of it.
FORCE float dot_part(const u8* weights, u32 row, u32 cols, const float* x) {
    const u8* at = weights + (u64)row * cols * WEIGHT::BYTES;
    float sum = 0.0f;
    for (u32 k = lane(); k < cols; k += WAVE) sum += WEIGHT::at(at + (u64)k * WEIGHT::BYTES) * x[k];
    return sum;
}
#else
struct Tile {
    WEIGHT::Chunk chunk[UNROLL];

    FORCE void load(const RowAt& at, u32 first, u32 nb) {
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            const u32 c = first + lane() + i * WAVE;
            if (c < nb) chunk[i] = WEIGHT::load(at, c, nb);
        }
    }
    FORCE float dot(u32 first, u32 nb, const XShared& x) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            const u32 c = first + lane() + i * WAVE;
            if (c < nb) {
                Codes codes;
                WEIGHT::unpack(chunk[i], c, codes);
                sum += dot_chunk<WEIGHT>(codes, x.chunk(c));
            }
        }
        return sum;
    }
};
#endif

ENTRY(THREADS, 1) UNIT(ExpertsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 routed = block_y();
    const ExpertTensors& e = a.tensors;
    const u8* expert = expert_at(e, a.ids[routed]);
    if (!expert) return;
    const float* x_row = a.x + (u64)(routed / a.share) * e.cols;
    float* out = a.out + (u64)routed * e.rows;
    const bool two = e.second != NO_TENSOR;
    const u8* first = expert + e.first;
    const u8* second = two ? expert + e.second : first;
    const u32 items = two ? e.rows : (e.rows + 1) / 2, waves = THREADS / WAVE * a.n_blocks;
    // The rows of weights of an item.
    auto row0 = [&](u32 item) { return two ? item : 2 * item; };
    auto row1 = [&](u32 item) { return two ? item : least(2 * item + 1, e.rows - 1); };
    auto store = [&](u32 item, float v0, float v1) {
        v0 = wave_sum(v0);
        v1 = wave_sum(v1);
        if (lane() == 0) {
            out[row0(item)] = finish_expert(e, expert, row0(item), v0, v1);
            if (!two && 2 * item + 1 < e.rows) out[row1(item)] = finish_expert(e, expert, row1(item), v1, 0.0f);
        }
    };
    u32 item = wave() * a.n_blocks + block_x();
#ifdef FLOATS
    for (; item < items; item += waves)
        store(item, dot_part(first, row0(item), e.cols, x_row), dot_part(second, row1(item), e.cols, x_row));
#else
    extern __shared__ U32x4 shared_x[];
    const u32 nb = e.cols / 32;
    Tile tile0, tile1;
    auto load = [&](u32 item, u32 c) {
        tile0.load(WEIGHT::row(first, e.rows, nb, row0(item)), c, nb);
        tile1.load(WEIGHT::row(second, e.rows, nb, row1(item)), c, nb);
    };
    // Weights are on their way while x becomes bytes.
    if (item < items) load(item, 0);
    XShared x(shared_x, nb);
    Quantizer<THREADS, 2> part;
    for (u32 base = 0; base < e.cols; base += part.SPAN) {
        part.load(x_row, e.cols, base);
        part.store(x, e.cols, base);
    }
    block_sync();
    for (; item < items; item += waves) {
        float v0 = 0.0f, v1 = 0.0f;
        for (u32 c = 0; c < nb; c += UNROLL * WAVE) {
            v0 += tile0.dot(c, nb, x);
            v1 += tile1.dot(c, nb, x);
            if (c + UNROLL * WAVE < nb) load(item, c + UNROLL * WAVE);
            else if (item + waves < items) load(item + waves, 0);
        }
        store(item, v0, v1);
    }
#endif
}
