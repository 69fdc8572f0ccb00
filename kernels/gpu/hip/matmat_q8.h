// Products of rows in 8 bits: the body of matmat.hip, for tokens and weights that lie as
// `Tokens` says (tokens.h).
#pragma once
#include "tokens.h"

#define ROWS 2
#define COLUMNS 8

struct MatmatArgs {
    const u8* weights;
    const u8* x_bytes;
    const F32x2* x_scales;
    float* out;         // [n_tokens][stride]
    const float* bias;  // or null
    u32 rows, cols;
    u32 n_tokens;
    u32 stride;
    u32 epilogue;  // 0 store, 1 add to out
    u32 n_blocks;
};

template <class T, class Tokens>
FORCE void matmat(const MatmatArgs& a, const Tokens& tokens) {
    let_next_start();
    wait_for_inputs();
    const u32 nb = a.cols / 32, token0 = tokens.first(COLUMNS);
    if (token0 >= tokens.n) return;
    const u32 groups = (a.rows + ROWS - 1) / ROWS;
    // Where each token's activations begin, in blocks: one number a token, since a wave has few
    // registers for addresses.
    u32 first[COLUMNS];
#pragma unroll
    for (u32 t = 0; t < COLUMNS; ++t) first[t] = tokens.x_row(least(token0 + t, tokens.n - 1)) * nb;
    const U32x4* low = (const U32x4*)a.x_bytes;
    for (u32 g = wave() * a.n_blocks + block_x(); g < groups; g += THREADS / WAVE * a.n_blocks) {
        leave_vcc_hi();
        RowAt at[ROWS];
        float acc[ROWS][COLUMNS];
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            at[r] = T::row(tokens.weights(a.weights), tokens.weight_rows, nb, tokens.weight_row(least(g * ROWS + r, a.rows - 1)));
#pragma unroll
            for (u32 t = 0; t < COLUMNS; ++t) acc[r][t] = 0.0f;
        }
        for (u32 c = lane(); c < nb; c += WAVE) {
            leave_vcc_hi();
            Codes codes[ROWS];
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) T::unpack(T::load(at[r], c, nb), c, codes[r]);
#pragma unroll
            for (u32 t = 0; t < COLUMNS; ++t) {
                F32x2 s = a.x_scales[first[t] + c];
                XChunk x = XChunk{low[2 * first[t] + c], low[2 * first[t] + nb + c], s.x, s.y};
#pragma unroll
                for (u32 r = 0; r < ROWS; ++r) acc[r][t] += dot_chunk<T>(codes[r], x);
            }
        }
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
#pragma unroll
            for (u32 t = 0; t < COLUMNS; ++t) {
                float v = wave_sum(acc[r][t]);
                u32 row = g * ROWS + r, token = token0 + t;
                if (lane() == 0 && row < a.rows && token < tokens.n) {
                    float* out = a.out + (u64)tokens.out_row(token) * a.stride + row;
                    v = tokens.finish(v, a.bias, row);
                    *out = a.epilogue == 1 ? *out + v : v;
                }
            }
        }
    }
}
