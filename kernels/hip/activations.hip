// Rows of f32 made ready for a product: norm, sum with the residual or SwiGLU on the way in; f32, f16 or 8 bits on the way out.
//
//   norm:      y = x / sqrt(mean(x^2) + eps) * weight                     (Zhang & Sennrich 2019)
//   add_norm:  x += other, stored; then as norm
//   silu:      y = silu(x) * other
//   plain:     y = x
//   add:       x += other, stored, y = x; with no output this is the residual sum alone
//
// Layout: x and other [rows][cols] f32; out [rows][cols] f32 or f16, or 8 bits as activations.h says: bytes [rows][2][NB][16]
// (cols a multiple of 32) and scales [rows][NB].
// Geometry: a block of THREADS a row. Bound by latency in decode, by memory in prefill: each row is read twice at most
// (the second time from the first-level cache) and written once.
// Entries: activations_<plain|norm|add_norm|silu|add>_<f32|f16|q8>, activations_add_none.
#include "compat.h"
#include "activations.h"

#define THREADS 256

struct ActivationsArgs {
    float* x;
    const float* other;  // or null
    const float* weight;
    void* out;
    F32x2* scales;
    float eps;
    u32 cols;
};

enum In { PLAIN, NORM, ADD_NORM, SILU, ADD };
enum Out { TO_F32, TO_F16, TO_Q8, TO_NONE };

template <In IN>
FORCE float read(const ActivationsArgs& a, u64 row, u32 i) {
    float v = a.x[row + i];
    if (IN == ADD_NORM || IN == ADD) v += a.other[row + i];
    if (IN == SILU) v = silu(v) * a.other[row + i];
    return v;
}

template <In IN, Out OUT>
FORCE void activations(const ActivationsArgs& a) {
    __shared__ float room[1024 / WAVE + 1];
    let_next_start();
    wait_for_inputs();
    u64 row = (u64)block_x() * a.cols;
    float factor = 1.0f;
    const bool norm = IN == NORM || IN == ADD_NORM;
    if (IN == ADD || IN == ADD_NORM) {
        float squares = 0.0f;
        for (u32 i = thread_x(); i < a.cols; i += THREADS) {
            float v = read<IN>(a, row, i);
            a.x[row + i] = v;
            squares += v * v;
        }
        // From here on x holds the sum; each thread reads what other threads wrote.
        float sum = block_sum(squares, THREADS, room);
        block_sync();
        if (norm) factor = 1.0f / sqrt_of(sum / (float)a.cols + a.eps);
    } else if (norm) {
        float squares = 0.0f;
        for (u32 i = thread_x(); i < a.cols; i += THREADS) {
            float v = a.x[row + i];
            squares += v * v;
        }
        factor = 1.0f / sqrt_of(block_sum(squares, THREADS, room) / (float)a.cols + a.eps);
    }
    constexpr In AGAIN = IN == SILU ? SILU : PLAIN;
    if (OUT == TO_F32 || OUT == TO_F16) {
        for (u32 i = thread_x(); i < a.cols; i += THREADS) {
            float v = read<AGAIN>(a, row, i);
            if (norm) v *= factor * a.weight[i];
            if (OUT == TO_F32) ((float*)a.out)[row + i] = v;
            else ((u16*)a.out)[row + i] = f16_of_f32(v);
        }
    }
    if (OUT == TO_Q8) {
        u32 nb = a.cols / 32;
        U32x2* words = (U32x2*)a.out + row / 8;
        F32x2* scales = a.scales + (u64)block_x() * nb;
        for (u32 base = 0; base < a.cols; base += THREADS * 8) {
            u32 i = base + thread_x() * 8;
            float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (i < a.cols) {
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    v[j] = read<AGAIN>(a, row, i + j);
                    if (norm) v[j] *= factor * a.weight[i + j];
                }
            }
            float d, sum;
            U32x2 bytes = quantize8(F32x4{v[0], v[1], v[2], v[3]}, F32x4{v[4], v[5], v[6], v[7]}, d, sum);
            if (i < a.cols) {
                u32 c = i / 32, quarter = i / 8 % 4;
                words[(quarter < 2 ? c : nb + c) * 2 + quarter % 2] = bytes;
                if (quarter == 0) scales[c] = F32x2{d, sum};
            }
        }
    }
}

#define OUTS(name, in)                                                                                     \
    ENTRY(THREADS, 1) activations_##name##_f32(ActivationsArgs a) { activations<in, TO_F32>(a); }          \
    ENTRY(THREADS, 1) activations_##name##_f16(ActivationsArgs a) { activations<in, TO_F16>(a); }          \
    ENTRY(THREADS, 1) activations_##name##_q8(ActivationsArgs a) { activations<in, TO_Q8>(a); }
OUTS(plain, PLAIN)
OUTS(norm, NORM)
OUTS(add_norm, ADD_NORM)
OUTS(silu, SILU)
OUTS(add, ADD)
ENTRY(THREADS, 1) activations_add_none(ActivationsArgs a) { activations<ADD, TO_NONE>(a); }
