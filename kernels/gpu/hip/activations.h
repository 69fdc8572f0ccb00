// Activations in 8 bits, in blocks of 32: d = max |x| / 127, byte = x / d rounded to nearest. A
// block that holds NaN or infinity gets d = NaN, so that every product with it is NaN.
//
// In shared or device memory a row of K = 32 NB is: the bytes 0 to 15 of all blocks, [NB][16];
// their bytes 16 to 31, [NB][16]; and apart from these {d, d * sum of the bytes}, [NB] pairs of
// f32. So neighbouring lanes read neighbouring 16 bytes.
#pragma once
#include "compat.h"
#include "formats.h"

// One row in shared memory: 40 NB bytes.
struct XShared {
    U32x4* low;
    U32x4* high;
    F32x2* scale;
    float factor;  // what every product is to be multiplied by

    FORCE XShared(U32x4* at, u32 nb) : low(at), high(at + nb), scale((F32x2*)(at + 2 * nb)), factor(1.0f) {}
    FORCE XChunk chunk(u32 c) const {
        F32x2 s = scale[c];
        return XChunk{low[c], high[c], s.x, s.y};
    }
};

// Bits of the largest magnitude of `n` values: of NaN and infinity they are larger than of
// any number, so none is lost.
FORCE u32 magnitude(const F32x4& v) {
    u32 a = bits_of_f32(v.x) & 0x7fffffffu, b = bits_of_f32(v.y) & 0x7fffffffu;
    u32 c = bits_of_f32(v.z) & 0x7fffffffu, d = bits_of_f32(v.w) & 0x7fffffffu;
    a = a > b ? a : b;
    c = c > d ? c : d;
    return a > c ? a : c;
}
// v * inverse, at most 127 in magnitude, rounded to nearest even: 1.5 * 2^23 leaves no bit after
// the point, and the low byte of the sum is the integer.
FORCE u32 rounded(float v, float inverse) { return bits_of_f32(multiply_add(v, inverse, 12582912.0f)); }
FORCE u32 bytes_of(const F32x4& v, float inverse) {
    return low_bytes(rounded(v.x, inverse), rounded(v.y, inverse), rounded(v.z, inverse), rounded(v.w, inverse));
}

// Quantizes eight values of a block whose others are with the 3 neighbouring lanes of the same
// aligned 4. d and sum are the block's.
FORCE U32x2 quantize8(const F32x4& v, const F32x4& w, float& d, float& sum) {
    u32 bits = magnitude(v), other = magnitude(w);
    bits = bits > other ? bits : other;
#pragma unroll
    for (u32 m = 2; m > 0; m /= 2) {
        other = shuffle_xor(bits, m);
        bits = bits > other ? bits : other;
    }
    float amax = f32_of_bits(bits);
    float inverse = bits > 0 ? 127.0f / amax : 0.0f;
    U32x2 bytes = U32x2{bytes_of(v, inverse), bytes_of(w, inverse)};
    i32 total = dot4(bytes.y, 0x01010101u, dot4(bytes.x, 0x01010101u, 0));
#pragma unroll
    for (u32 m = 2; m > 0; m /= 2) total += shuffle_xor(total, m);
    d = bits < 0x7f800000u ? amax * (1.0f / 127.0f) : QUIET_NAN;
    sum = d * (float)total;
    return bytes;
}

// Quantizes x [cols], normed where wanted, by the THREADS_ threads of a block: VECTORS times 8
// values a thread are loaded at once, so that a row of up to 8 VECTORS THREADS_ values costs one
// round trip to memory. Ends without block_sync.
template <u32 THREADS_, u32 VECTORS>
struct Quantizer {
    static constexpr u32 SPAN = 8 * VECTORS * THREADS_;
    F32x4 v[VECTORS], w[VECTORS];

    static FORCE F32x4 zero() { return F32x4{0.0f, 0.0f, 0.0f, 0.0f}; }
    static FORCE float squares_of(const F32x4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
    static FORCE F32x4 product(const F32x4& v, const F32x4& w) { return F32x4{v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w}; }

    FORCE void load(const float* x, u32 cols, u32 base) {
#pragma unroll
        for (u32 j = 0; j < VECTORS; ++j) {
            u32 i = base + (j * THREADS_ + thread_x()) * 8;
            v[j] = w[j] = zero();
            if (i < cols) {
                v[j] = *(const F32x4*)(x + i);
                w[j] = *(const F32x4*)(x + i + 4);
            }
        }
    }
    FORCE float squares() const {
        float sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < VECTORS; ++j) sum += squares_of(v[j]) + squares_of(w[j]);
        return sum;
    }
    FORCE void multiply(const Quantizer& by) {
#pragma unroll
        for (u32 j = 0; j < VECTORS; ++j) {
            v[j] = product(v[j], by.v[j]);
            w[j] = product(w[j], by.w[j]);
        }
    }
    // All lanes of a wave stay together for the shuffles; those past the end work on zeros.
    FORCE void store(XShared& to, u32 cols, u32 base) const {
#pragma unroll
        for (u32 j = 0; j < VECTORS; ++j) {
            if (base + j * THREADS_ * 8 >= cols) break;
            u32 i = base + (j * THREADS_ + thread_x()) * 8;
            float d, sum;
            U32x2 bytes = quantize8(v[j], w[j], d, sum);
            if (i < cols) {
                u32 c = i / 32, quarter = i / 8 % 4;
                U32x2* half = (U32x2*)(quarter < 2 ? to.low : to.high);
                half[c * 2 + quarter % 2] = bytes;
                if (quarter == 0) to.scale[c] = F32x2{d, sum};
            }
        }
    }
};
