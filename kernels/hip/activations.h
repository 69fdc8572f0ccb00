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

// Quantizes x [cols], normed where `norm` is given, by the THREADS_ threads of a block: VECTORS times 4 values a thread are loaded at
// once, so that a row of up to 4 VECTORS THREADS_ values costs one round trip to memory. `begin` loads the norm's weights, which
// do not depend on the launch before. Ends without block_sync.
template <u32 THREADS_, u32 VECTORS>
struct Quantizer {
    F32x4 v[VECTORS];

    static FORCE F32x4 zero() { return F32x4{0.0f, 0.0f, 0.0f, 0.0f}; }

    FORCE void load(const float* x, u32 cols, u32 base) {
#pragma unroll
        for (u32 j = 0; j < VECTORS; ++j) {
            u32 i = base + (j * THREADS_ + thread_x()) * 4;
            v[j] = i < cols ? *(const F32x4*)(x + i) : zero();
        }
    }
    FORCE float squares() const {
        float sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < VECTORS; ++j) sum += v[j].x * v[j].x + v[j].y * v[j].y + v[j].z * v[j].z + v[j].w * v[j].w;
        return sum;
    }
    FORCE void scale(const Quantizer& weights, float factor) {
#pragma unroll
        for (u32 j = 0; j < VECTORS; ++j) {
            const F32x4& w = weights.v[j];
            v[j] = F32x4{v[j].x * factor * w.x, v[j].y * factor * w.y, v[j].z * factor * w.z, v[j].w * factor * w.w};
        }
    }
    // All lanes of a wave stay together for the shuffles; those past the end work on zeros.
    FORCE void store(XShared& to, u32 cols, u32 base) const {
#pragma unroll
        for (u32 j = 0; j < VECTORS; ++j) {
            u32 i = base + (j * THREADS_ + thread_x()) * 4;
            if (base + j * THREADS_ * 4 >= cols) break;
            float d, sum;
            u32 bytes = quantize4(v[j], d, sum);
            if (i < cols) {
                u32 c = i / 32, w = i / 4 % 8;
                u32* half = (u32*)(w < 4 ? to.low : to.high);
                half[c * 4 + w % 4] = bytes;
                if (w == 0) to.scale[c] = F32x2{d, sum};
            }
        }
    }
};
