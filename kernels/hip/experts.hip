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
#ifndef FLOATS
    extern __shared__ U32x4 shared_x[];
    const u32 nb = e.cols / 32;
    XShared x(shared_x, nb);
    Quantizer<THREADS, 2> part;
    for (u32 base = 0; base < e.cols; base += part.SPAN) {
        part.load(x_row, e.cols, base);
        part.store(x, e.cols, base);
    }
    block_sync();
#endif
    const u32 items = two ? e.rows : (e.rows + 1) / 2;
    for (u32 item = wave() * a.n_blocks + block_x(); item < items; item += THREADS / WAVE * a.n_blocks) {
        const u32 r0 = two ? item : 2 * item, r1 = two ? item : least(2 * item + 1, e.rows - 1);
#ifdef FLOATS
        float v0 = dot_part(first, r0, e.cols, x_row), v1 = dot_part(second, r1, e.cols, x_row);
#else
        const RowAt at0 = WEIGHT::row(first, e.rows, nb, r0), at1 = WEIGHT::row(second, e.rows, nb, r1);
        float v0 = 0.0f, v1 = 0.0f;
        for (u32 c = 0; c < nb; c += UNROLL * WAVE) {
            Tile tile0, tile1;
            tile0.load(at0, c, nb);
            tile1.load(at1, c, nb);
            v0 += tile0.dot(c, nb, x);
            v1 += tile1.dot(c, nb, x);
        }
#endif
        v0 = wave_sum(v0);
        v1 = wave_sum(v1);
        if (lane() == 0) {
            out[r0] = finish_expert(e, expert, r0, v0, v1);
            if (!two && 2 * item + 1 < e.rows) out[r1] = finish_expert(e, expert, r1, v1, 0.0f);
        }
    }
}
