// out[t][r] = sum_k W[r][k] * x[t][k] for a few tokens (2 to 64, correct for any number), quantized weights.
//
// x is quantized already (activations.hip): bytes [tokens][2][NB][16] and {d, d * sum} [tokens][NB]. A wave takes ROWS rows and
// COLUMNS tokens: a block of 32 weights is unpacked once for all its tokens, 32 activations are read once for all its rows.
// Tokens beyond the last are computed on the last one's activations and not stored.
// Geometry: grid (blocks, tokens / COLUMNS rounded up), THREADS threads; waves go through the groups of rows round robin.
// Moves the weights once a COLUMNS tokens (mostly from the second-level cache after the first), 40 bytes of x a block of 32,
// token and ROWS rows. No shared memory.
// Entries: matmat_<type> (WEIGHT), and for NVIDIA matmat_f16_<type> (TYPE), see matmat_f16.h.
#define WEIGHTS_SHARED
#include "compat.h"
#include "formats.h"

#define THREADS 256
#include "matmat_f16.h"
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

template <class T>
FORCE void matmat(const MatmatArgs& a) {
    let_next_start();
    wait_for_inputs();
    u32 nb = a.cols / 32, token0 = block_y() * COLUMNS;
    u32 groups = (a.rows + ROWS - 1) / ROWS;
    const U32x4* low[COLUMNS];
    const F32x2* scale[COLUMNS];
#pragma unroll
    for (u32 t = 0; t < COLUMNS; ++t) {
        u32 token = least(token0 + t, a.n_tokens - 1);
        low[t] = (const U32x4*)a.x_bytes + (u64)token * nb * 2;
        scale[t] = a.x_scales + (u64)token * nb;
    }
    for (u32 g = wave() * a.n_blocks + block_x(); g < groups; g += THREADS / WAVE * a.n_blocks) {
        RowAt at[ROWS];
        float acc[ROWS][COLUMNS];
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) {
            at[r] = T::row(a.weights, a.rows, nb, least(g * ROWS + r, a.rows - 1));
#pragma unroll
            for (u32 t = 0; t < COLUMNS; ++t) acc[r][t] = 0.0f;
        }
        for (u32 c = lane(); c < nb; c += WAVE) {
            Codes codes[ROWS];
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) T::unpack(T::load(at[r], c, nb), c, codes[r]);
#pragma unroll
            for (u32 t = 0; t < COLUMNS; ++t) {
                F32x2 s = scale[t][c];
                XChunk x = XChunk{low[t][c], low[t][nb + c], s.x, s.y};
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
                if (lane() == 0 && row < a.rows && token < a.n_tokens) {
                    float* out = a.out + (u64)token * a.stride + row;
                    if (a.bias) v += a.bias[row];
                    *out = a.epilogue == 1 ? *out + v : v;
                }
            }
        }
    }
}

ENTRY(THREADS, 1) UNIT(MatmatArgs a) { matmat<WEIGHT>(a); }
#ifdef RF_CUDA
#define NAME2(a, b) a##b
#define NAME(a, b) NAME2(a, b)
ENTRY(THREADS, 1) NAME(matmat_f16_, TYPE)(MatmatF16Args a) {
#if __CUDA_ARCH__ >= 800
    matmat_f16<WEIGHT>(a);
#endif
}
#endif
