// Products with weights that are floats: the body of matvec_float.hip, for tokens and weights that lie as `Tokens` says (tokens.h).
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
    u32 reserved;
};

template <class T, class Tokens>
FORCE void matvec(const MatvecFloatArgs& a, const Tokens& tokens) {
    constexpr u32 PER = 16 / T::BYTES;
    let_next_start();
    wait_for_inputs();
    u32 waves = THREADS / WAVE * a.n_blocks, token0 = tokens.first(COLUMNS);
    u32 n = least(COLUMNS, tokens.n - token0);
    bool whole = a.cols % PER == 0;
    for (u32 row = wave() * a.n_blocks + block_x(); row < a.rows; row += waves) {
        const u8* w = a.weights + (u64)tokens.weight_row(row) * a.cols * T::BYTES;
        float acc[COLUMNS];
        for (u32 t = 0; t < COLUMNS; ++t) acc[t] = 0.0f;
        if (whole) {
            for (u32 k = lane() * PER; k < a.cols; k += WAVE * PER) {
                U32x4 v = stream16(w + (u64)k * T::BYTES);
                for (u32 t = 0; t < COLUMNS; ++t) {
                    if (t < n) {
                        for (u32 i = 0; i < PER; i += 4) {
                            F32x4 y = *(const F32x4*)(a.x + (u64)tokens.x_row(token0 + t) * a.cols + k + i);
                            acc[t] += T::of(v, i) * y.x + T::of(v, i + 1) * y.y + T::of(v, i + 2) * y.z + T::of(v, i + 3) * y.w;
                        }
                    }
                }
            }
        } else {
            for (u32 k = lane(); k < a.cols; k += WAVE) {
                float v = T::at(w + (u64)k * T::BYTES);
                for (u32 t = 0; t < COLUMNS; ++t) {
                    if (t < n) acc[t] += v * a.x[(u64)tokens.x_row(token0 + t) * a.cols + k];
                }
            }
        }
        for (u32 t = 0; t < COLUMNS; ++t) {
            float v = wave_sum(acc[t]);
            if (t < n && lane() == 0) {
                float* out = a.out + (u64)tokens.out_row(token0 + t) * a.rows + row;
                v = tokens.finish(v, a.bias, row);
                *out = a.epilogue == 1 ? *out + v : v;
            }
        }
    }
}
