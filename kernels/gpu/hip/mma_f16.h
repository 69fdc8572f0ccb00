// Weights as f16 in registers, for matrix instructions: mma.sync (NVIDIA, sm_80 and later),
// WMMA and MFMA (AMD, wmma.h).
#pragma once
#include "compat.h"
#include "formats.h"

#define WAVES (THREADS / WAVE)

#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
// c += a [16][16] b [16][8]
FORCE void multiply(F32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FORCE F32x4 plus(const F32x4& a, const F32x4& b) { return F32x4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Asks for a line without waiting for it.
FORCE void prefetch_line(const u8* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// Asks for what BYTES bytes from `at` on of a row begin a line with: a row is gone through in
// order.
template <u32 BYTES>
FORCE void prefetch_plane(const u8* row, u32 at) {
    if (BYTES > 0 && (at % 128 < BYTES || BYTES >= 128)) prefetch_line(row + at);
}
// Asks for four blocks from c on of a row.
template <class T>
FORCE void prefetch_blocks(const RowAt& row, u32 c, u32 nb) {
    if (T::Q_BYTES > 16) {
        prefetch_plane<64>(row.q, c * 16);
        prefetch_plane<64>(row.q, (nb + c) * 16);
    } else {
        prefetch_plane<4 * T::Q_BYTES>(row.q, c * T::Q_BYTES);
    }
    prefetch_plane<4 * T::H_BYTES>(row.h, c * T::H_BYTES);
    if (T::S_EVERY == 1) prefetch_plane<4 * T::S_BYTES>(row.s, c * T::S_BYTES);
    if (T::S_EVERY == 8) prefetch_plane<T::S_BYTES>(row.s, c / 8 * T::S_BYTES);
    if (T::D_EVERY == 1) prefetch_plane<4 * T::D_BYTES>(row.d, c * T::D_BYTES);
    if (T::D_EVERY == 8) prefetch_plane<T::D_BYTES>(row.d, c / 8 * T::D_BYTES);
}

FORCE u32 difference(u32 a, u32 b) {
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
FORCE u32 product(u32 a, u32 b) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
FORCE u32 product_sum(u32 a, u32 b, u32 c) {
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
    return a;
}
// Bytes 2 pair and 2 pair + 1, each under a byte 0x64.
FORCE u32 under_0x64(u32 bytes, u32 pair) { return __byte_perm(bytes, 0x64646464u, pair ? 0x4342 : 0x4140); }
// Bytes `first` and `first` + 2, likewise.
FORCE u32 crossed_under_0x64(u32 bytes, u32 first) { return __byte_perm(bytes, 0x64646464u, first ? 0x4341 : 0x4240); }
#elif defined(RF_WMMA)
typedef _Float16 H2 __attribute__((ext_vector_type(2)));
union TwoHalves {
    u32 bits;
    H2 v;
};
FORCE H2 halves(u32 bits) {
    TwoHalves two;
    two.bits = bits;
    return two.v;
}
FORCE u32 bits_of(H2 v) {
    TwoHalves two;
    two.v = v;
    return two.bits;
}
FORCE u32 difference(u32 a, u32 b) { return bits_of(halves(a) - halves(b)); }
FORCE u32 product(u32 a, u32 b) { return bits_of(halves(a) * halves(b)); }
FORCE u32 product_sum(u32 a, u32 b, u32 c) { return bits_of(__builtin_elementwise_fma(halves(a), halves(b), halves(c))); }
FORCE u32 under_0x64(u32 bytes, u32 pair) { return __builtin_amdgcn_perm(0x64646464u, bytes, pair ? 0x04030402u : 0x04010400u); }
FORCE u32 crossed_under_0x64(u32 bytes, u32 first) { return __builtin_amdgcn_perm(0x64646464u, bytes, first ? 0x04030401u : 0x04020400u); }
#endif

#if defined(RF_WMMA) || (defined(RF_CUDA) && __CUDA_ARCH__ >= 800)
// Weights in registers are SCALE times what they are, so that scales of small weights keep f16's
// bits; the sums are divided by it.
#define SCALE 64.0f

// A block of 32 weights. A byte under 0x64 is the f16 1024 + byte; signed bytes are brought to 0
// to 255.
template <class T>
struct HalfBlock {
    static constexpr u32 N = T::HALVES ? 2 : 1;
    Codes codes;
    u32 scales[N], least_ones[N];

    // One that is not there has weights of zero.
    FORCE void begin(const typename T::Chunk& chunk, u32 c, bool is) {
        T::unpack(chunk, c, codes);
#pragma unroll
        for (u32 s = 0; s < N; ++s) {
            const float scale = is ? codes.scale[s] * SCALE : 0.0f;
            scales[s] = pack_f16(scale, scale);
            if (T::MIN) {
                const float low = is ? codes.min[s] * -SCALE : 0.0f;
                least_ones[s] = pack_f16(low, low);
            }
        }
    }
    // Weights 4 w to 4 w + 3; CROSSED: 4 w and 4 w + 2, 4 w + 1 and 4 w + 3.
    template <bool CROSSED = false>
    FORCE void four(u32 w, u32 (&to)[2]) const {
        const u32 s = T::HALVES ? w / 4 : 0, bytes = T::MIN ? codes.v[w] : codes.v[w] ^ 0x80808080u;
        const u32 zero = T::MIN ? 0x64006400u : 0x64806480u;
#pragma unroll
        for (u32 pair = 0; pair < 2; ++pair) {
            const u32 v = difference(CROSSED ? crossed_under_0x64(bytes, pair) : under_0x64(bytes, pair), zero);
            to[pair] = T::MIN ? product_sum(v, scales[s], least_ones[s]) : product(v, scales[s]);
        }
    }
};
#endif
