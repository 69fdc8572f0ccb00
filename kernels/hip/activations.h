// Activations in 8 bits, in blocks of 32: d = max |x| / 127, byte = x / d rounded to nearest. A block that holds NaN or
// infinity gets d = NaN, so that every product with it is NaN.
//
// In shared or device memory a row of K = 32 NB is: the bytes 0 to 15 of all blocks, [NB][16]; their bytes 16 to 31, [NB][16];
// and apart from these {d, d * sum of the bytes}, [NB] pairs of f32. So neighbouring lanes read neighbouring 16 bytes.
#pragma once
#include "compat.h"
#include "formats.h"

// One row in shared memory: 40 NB bytes.
struct XShared {
    U32x4* low;
    U32x4* high;
    F32x2* scale;

    FORCE XShared(U32x4* at, u32 nb) : low(at), high(at + nb), scale((F32x2*)(at + 2 * nb)) {}
    FORCE XChunk chunk(u32 c) const {
        F32x2 s = scale[c];
        return XChunk{low[c], high[c], s.x, s.y};
    }
};

// Quantizes four values of a block whose other values are with the 7 neighbouring lanes of the same aligned 8. Returns the
// bytes; d and sum are the block's.
FORCE u32 quantize4(const F32x4& v, float& d, float& sum) {
    float amax = max_of(max_of(abs_of(v.x), abs_of(v.y)), max_of(abs_of(v.z), abs_of(v.w)));
    // Comparisons lose NaN; the product with zero keeps it and infinity.
    float poison = (v.x + v.y + v.z + v.w) * 0.0f;
    for (u32 m = 4; m > 0; m /= 2) {
        amax = max_of(amax, shuffle_xor(amax, m));
        poison += shuffle_xor(poison, m);
    }
    float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    i32 q0 = round_even(v.x * inverse), q1 = round_even(v.y * inverse);
    i32 q2 = round_even(v.z * inverse), q3 = round_even(v.w * inverse);
    u32 bytes = (q0 & 255) | (q1 & 255) << 8 | (q2 & 255) << 16 | (u32)(q3 & 255) << 24;
    i32 total = lanes_sum(q0 + q1 + q2 + q3, 8);
    d = is_finite(poison) && is_finite(amax) ? amax * (1.0f / 127.0f) : QUIET_NAN;
    sum = d * (float)total;
    return bytes;
}

// Quantizes x [cols], normed where `norm` is given, by all threads of a block. Ends without block_sync.
FORCE void quantize_to_shared(const float* x, const float* norm, float eps, u32 cols, u32 threads, XShared& to, float* room) {
    float factor = 1.0f;
    if (norm) {
        float squares = 0.0f;
        for (u32 i = thread_x() * 4; i < cols; i += threads * 4) {
            F32x4 v = *(const F32x4*)(x + i);
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        factor = 1.0f / sqrt_of(block_sum(squares, threads, room) / (float)cols + eps);
    }
    // All lanes of a wave stay together for the shuffles; those past the end work on zeros.
    for (u32 base = 0; base < cols; base += threads * 4) {
        u32 i = base + thread_x() * 4;
        F32x4 v = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
        if (i < cols) {
            v = *(const F32x4*)(x + i);
            if (norm) {
                F32x4 w = *(const F32x4*)(norm + i);
                v = F32x4{v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
            }
        }
        float d, sum;
        u32 bytes = quantize4(v, d, sum);
        if (i < cols) {
            u32 c = i / 32, w = i / 4 % 8;
            u32* half = (u32*)(w < 4 ? to.low : to.high);
            half[c * 4 + w % 4] = bytes;
            if (w == 0) to.scale[c] = F32x2{d, sum};
        }
    }
}
