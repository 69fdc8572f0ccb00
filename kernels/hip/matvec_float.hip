// out[r] = sum_k W[r][k] * x[k] for F32, F16 and BF16 weights and one to eight tokens; x and out are f32.
//
// A wave takes whole rows, round robin over the grid; a lane 16 bytes of weights at a time. x is read through the caches.
// Columns need be no multiple of anything: what is left after the whole 16 bytes goes one weight a lane, and rows whose
// bytes are no multiple of 16 go so altogether. Bound by memory: the matrix's bytes once.
// Geometry: grid (blocks, tokens / 8 rounded up), THREADS threads.
// Entry: matvec_<type> (WEIGHT one of F32, F16, BF16).
#include "compat.h"

#define THREADS 256
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

struct F32 {
    static constexpr u32 BYTES = 4;
    static FORCE float at(const u8* w) { return *(const float*)w; }
    static FORCE float of(const U32x4& v, u32 i) { return f32_of_bits(i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w); }
};
struct F16 {
    static constexpr u32 BYTES = 2;
    static FORCE float at(const u8* w) { return f32_of_f16(*(const u16*)w); }
    static FORCE float of(const U32x4& v, u32 i) {
        u32 pair = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
        return f32_of_f16(pair >> (16 * (i % 2)));
    }
};
struct BF16 {
    static constexpr u32 BYTES = 2;
    static FORCE float at(const u8* w) { return f32_of_bf16(*(const u16*)w); }
    static FORCE float of(const U32x4& v, u32 i) {
        u32 pair = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
        return f32_of_bf16((pair >> (16 * (i % 2))) & 0xffffu);
    }
};

template <class T>
FORCE void matvec(const MatvecFloatArgs& a) {
    constexpr u32 PER = 16 / T::BYTES;
    let_next_start();
    wait_for_inputs();
    u32 waves = THREADS / WAVE * a.n_blocks, token0 = block_y() * COLUMNS;
    u32 n = least(COLUMNS, a.n_tokens - token0);
    const float* x = a.x + (u64)token0 * a.cols;
    bool whole = a.cols % PER == 0;
    for (u32 row = wave() * a.n_blocks + block_x(); row < a.rows; row += waves) {
        const u8* w = a.weights + (u64)row * a.cols * T::BYTES;
        float acc[COLUMNS];
        for (u32 t = 0; t < COLUMNS; ++t) acc[t] = 0.0f;
        if (whole) {
            for (u32 k = lane() * PER; k < a.cols; k += WAVE * PER) {
                U32x4 v = stream16(w + (u64)k * T::BYTES);
                for (u32 t = 0; t < COLUMNS; ++t) {
                    if (t < n) {
                        for (u32 i = 0; i < PER; i += 4) {
                            F32x4 y = *(const F32x4*)(x + (u64)t * a.cols + k + i);
                            acc[t] += T::of(v, i) * y.x + T::of(v, i + 1) * y.y + T::of(v, i + 2) * y.z + T::of(v, i + 3) * y.w;
                        }
                    }
                }
            }
        } else {
            for (u32 k = lane(); k < a.cols; k += WAVE) {
                float v = T::at(w + (u64)k * T::BYTES);
                for (u32 t = 0; t < COLUMNS; ++t) {
                    if (t < n) acc[t] += v * x[(u64)t * a.cols + k];
                }
            }
        }
        for (u32 t = 0; t < COLUMNS; ++t) {
            float v = wave_sum(acc[t]);
            if (t < n && lane() == 0) {
                float* out = a.out + (u64)(token0 + t) * a.rows + row;
                if (a.bias) v += a.bias[row];
                *out = a.epilogue == 1 ? *out + v : v;
            }
        }
    }
}

ENTRY(THREADS, 1) UNIT(MatvecFloatArgs a) { matvec<WEIGHT>(a); }
