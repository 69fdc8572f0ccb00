// Products with weights that are floats: the body of matvec_float.hip, for tokens and weights that
// lie as `Tokens` says (tokens.h).
#pragma once
#include "floats.h"
#include "tokens.h"

#define COLUMNS 8

struct MatvecFloatArgs {
    const u8* weights;
    const float* x;  // [n_tokens][cols]
    float* out;      // [n_tokens][rows]
    const float* bias;
    u32 rows, cols;
    u32 n_tokens;
    u32 epilogue;  // 0 store, 1 add to out
    u32 n_blocks;
    u32 columns;  // tokens of a block, COLUMNS at most
};

// Weights of a row that are under way at once, 16 bytes a lane each. Those of a wave's first row
// are asked for before its inputs are there.
#define DEEP 8

template <class T, class Tokens>
FORCE void matvec(const MatvecFloatArgs& a, const Tokens& tokens) {
    constexpr u32 PER = 16 / T::BYTES, SPAN = DEEP * WAVE * PER;
    let_next_start();
    bool waits = true;
    const u32 waves = THREADS / WAVE * a.n_blocks, token0 = tokens.first(a.columns);
    const u32 n = least(a.columns, tokens.n - token0);
    const bool whole = a.cols % PER == 0;
    for (u32 row = wave() * a.n_blocks + block_x(); row < a.rows; row += waves) {
        const u8* w = a.weights + (u64)tokens.weight_row(row) * a.cols * T::BYTES;
        float acc[COLUMNS];
#pragma unroll
        for (u32 t = 0; t < COLUMNS; ++t) acc[t] = 0.0f;
        if (whole) {
            for (u32 base = lane() * PER; base < a.cols; base += SPAN) {
                U32x4 v[DEEP];
#pragma unroll
                for (u32 d = 0; d < DEEP; ++d) {
                    const u32 k = base + d * WAVE * PER;
                    if (k < a.cols) v[d] = stream16(w + (u64)k * T::BYTES);
                }
                if (waits) wait_for_inputs();
                waits = false;
#pragma unroll
                for (u32 t = 0; t < COLUMNS; ++t) {
                    if (t >= n) continue;
                    const float* x = a.x + (u64)tokens.x_row(token0 + t) * a.cols;
#pragma unroll
                    for (u32 d = 0; d < DEEP; ++d) {
                        const u32 k = base + d * WAVE * PER;
                        if (k >= a.cols) continue;
#pragma unroll
                        for (u32 i = 0; i < PER; i += 4) {
                            const F32x4 y = *(const F32x4*)(x + k + i);
                            acc[t] += T::of(v[d], i) * y.x + T::of(v[d], i + 1) * y.y + T::of(v[d], i + 2) * y.z + T::of(v[d], i + 3) * y.w;
                        }
                    }
                }
            }
        } else {
            if (waits) wait_for_inputs();
            waits = false;
            for (u32 k = lane(); k < a.cols; k += WAVE) {
                float v = T::at(w + (u64)k * T::BYTES);
                for (u32 t = 0; t < COLUMNS; ++t) {
                    if (t < n) acc[t] += v * a.x[(u64)tokens.x_row(token0 + t) * a.cols + k];
                }
            }
        }
#pragma unroll
        for (u32 t = 0; t < COLUMNS; ++t) {
            if (t >= n) continue;
            float v = wave_sum(acc[t]);
            if (lane() == 0) {
                float* out = a.out + (u64)tokens.out_row(token0 + t) * a.rows + row;
                v = tokens.finish(v, a.bias, row);
                *out = a.epilogue == 1 ? *out + v : v;
            }
        }
    }
    // A launch ends behind the one before it, also where it has nothing to do.
    if (waits) wait_for_inputs();
}
