// Products of a few tokens with f16 weights by mma.sync (NVIDIA, sm_80 and later). Included by
// matvec_float.hip.
//
// out_m[t][r] = sum_k W_m[r][k] x[t][k] for up to MATRICES matrices of one input, which is f32. An
// instruction takes 16 tokens and 8 rows. x becomes a sum of two f16 (f16_pair.h) in registers, so
// no bits beyond 22 are lost, and both are multiplied with the same weights in registers: these are
// read once for 16 tokens, and what they are read for overlaps with the launch before.
// The order of k is free as long as both operands have the same: of 32 columns lane 4 g + q has
// columns 8 q to 8 q + 7, of row g of each tile and of tokens g and g + 8. Of a block's waves each
// takes every WAVES-th 64 columns; their sums are added in the order of the waves.
// Geometry: grid (blocks of 8 TILES rows of each matrix, tokens / 16 rounded up), THREADS threads.
// Columns are a multiple of 64.
// Bytes: weights once per 16 tokens, x (4 bytes an element) once a block, from caches.
#pragma once
#include "f16_pair.h"
#include "mma_f16.h"

#define FLOAT_MATRICES 4
#define FLOAT_TOKENS 16
#define FLOAT_STEP 64

struct FloatMatrix {
    const u8* weights;
    float* out;
    const float* bias;  // or null
    u32 rows;
    u32 reserved;
};

struct MatmatFloatsArgs {
    const float* x;  // [n_tokens][cols]
    u32 cols;
    u32 n_tokens;
    u32 epilogue;  // 0 store, 1 add to out
    u32 n_matrices;
    float scale;  // of x as f16
    u32 reserved;
    FloatMatrix matrices[FLOAT_MATRICES];
};

#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
// Eight elements of a row, as f16 and what that leaves.
struct EightHalves {
    u32 high[4], low[4];

    FORCE void take(const float* from, float scale) {
        const F32x4 a = *(const F32x4*)from, b = *(const F32x4*)(from + 4);
        const float v[8] = {a.x * scale, a.y * scale, a.z * scale, a.w * scale, b.x * scale, b.y * scale, b.z * scale, b.w * scale};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            high[i] = pack_f16(in_f16(v[2 * i]), in_f16(v[2 * i + 1]));
            low[i] = pack_f16(in_f16(low_part(v[2 * i])), in_f16(low_part(v[2 * i + 1])));
        }
    }
};

template <u32 TILES>
FORCE void matmat_floats(const MatmatFloatsArgs& a) {
    constexpr u32 ROWS = 8 * TILES;
    __shared__ float sums[WAVES][FLOAT_TOKENS][ROWS + 1];
    let_next_start();
    const u32 g = lane() / 4, q = lane() % 4, token0 = block_y() * FLOAT_TOKENS;
    u32 tile = block_x(), m = 0;
#pragma unroll
    for (u32 i = 0; i + 1 < FLOAT_MATRICES; ++i) {
        const u32 tiles = (a.matrices[i].rows + ROWS - 1) / ROWS;
        if (m == i && i + 1 < a.n_matrices && tile >= tiles) {
            tile -= tiles;
            m = i + 1;
        }
    }
    const FloatMatrix matrix = a.matrices[m];
    const u32 row0 = tile * ROWS, steps = a.cols / FLOAT_STEP;
    // A row past the last one is computed as that and not stored, and so is a token.
    const u8* rows[TILES];
#pragma unroll
    for (u32 i = 0; i < TILES; ++i) rows[i] = matrix.weights + ((u64)least(row0 + i * 8 + g, matrix.rows - 1) * a.cols + q * 8) * 2;
    const float* x[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) x[i] = a.x + (u64)least(token0 + i * 8 + g, a.n_tokens - 1) * a.cols + q * 8;
    auto load = [&](U32x4 (&w)[TILES][2], u32 step) {
#pragma unroll
        for (u32 i = 0; i < TILES * 2; ++i) w[i / 2][i % 2] = stream16(rows[i / 2] + (u64)(step * FLOAT_STEP + i % 2 * 32) * 2);
    };
    U32x4 w[TILES][2], next[TILES][2];
    F32x4 high[TILES], low[TILES];
#pragma unroll
    for (u32 i = 0; i < TILES; ++i) high[i] = low[i] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
    if (wave() < steps) load(w, wave());
    if (wave() + WAVES < steps) load(next, wave() + WAVES);
    wait_for_inputs();
#pragma unroll 1
    for (u32 step = wave(); step < steps; step += WAVES) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            EightHalves v[2];
#pragma unroll
            for (u32 i = 0; i < 2; ++i) v[i].take(x[i] + step * FLOAT_STEP + h * 32, a.scale);
#pragma unroll
            for (u32 i = 0; i < TILES; ++i) {
                const U32x4 of = w[i][h];
                multiply(high[i], v[0].high[0], v[1].high[0], v[0].high[1], v[1].high[1], of.x, of.y);
                multiply(low[i], v[0].low[0], v[1].low[0], v[0].low[1], v[1].low[1], of.x, of.y);
                multiply(high[i], v[0].high[2], v[1].high[2], v[0].high[3], v[1].high[3], of.z, of.w);
                multiply(low[i], v[0].low[2], v[1].low[2], v[0].low[3], v[1].low[3], of.z, of.w);
            }
        }
#pragma unroll
        for (u32 i = 0; i < TILES * 2; ++i) w[i / 2][i % 2] = next[i / 2][i % 2];
        if (step + 2 * WAVES < steps) load(next, step + 2 * WAVES);
    }
#pragma unroll
    for (u32 i = 0; i < TILES; ++i) {
        // Tokens g and g + 8, rows 2 q and the next.
        const F32x4 h = high[i], l = low[i];
        const u32 row = i * 8 + q * 2;
        sums[wave()][g][row] = h.x + l.x * (1.0f / LOW_SCALE);
        sums[wave()][g][row + 1] = h.y + l.y * (1.0f / LOW_SCALE);
        sums[wave()][g + 8][row] = h.z + l.z * (1.0f / LOW_SCALE);
        sums[wave()][g + 8][row + 1] = h.w + l.w * (1.0f / LOW_SCALE);
    }
    block_sync();
    const float factor = 1.0f / a.scale;
    for (u32 i = thread_x(); i < FLOAT_TOKENS * ROWS; i += THREADS) {
        const u32 t = i / ROWS, r = i % ROWS, token = token0 + t, row = row0 + r;
        if (token >= a.n_tokens || row >= matrix.rows) continue;
        float sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < WAVES; ++j) sum += sums[j][t][r];
        float* out = matrix.out + (u64)token * matrix.rows + row;
        float v = sum * factor;
        if (matrix.bias) v += matrix.bias[row];
        *out = a.epilogue == 1 ? *out + v : v;
    }
}
#endif
