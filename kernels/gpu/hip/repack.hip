// Weights as they are in the file -> the device's layout (formats.h), as they arrive: a thread 32
// weights, any bytes to any.
//
// `from` has `rows` whole rows of the matrix, beginning with row `first_row`; `to` is the whole
// matrix on the device. A scale or float that is NaN or infinite sets bit 0 of *flag (bits are only
// ever set; the host clears it). Geometry: THREADS threads, a thread a block of 32 weights (F32,
// F16, BF16: 32 weights or what is left of the row). Moves the bytes twice; far above the link's
// speed, which is all that is asked of it. No shared memory. Entries: repack_<type>.
#include "compat.h"
#include "formats.h"

#define THREADS 256

struct RepackArgs {
    const u8* from;
    u8* to;
    u32* flag;
    u32 first_row;
    u32 rows;        // in `from`
    u32 total_rows;  // of the matrix
    u32 cols;
};

FORCE void raise(u32* flag) {
#ifdef RF_CUDA
    atomicOr(flag, 1u);
#else
    __hip_atomic_fetch_or(flag, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#endif
}
FORCE u32 half_at(const u8* at) { return (u32)at[0] | (u32)at[1] << 8; }
FORCE bool bad_half(u32 bits) { return (bits & 0x7c00u) == 0x7c00u; }

// Scale and minimum j of the 12 bytes of Q4_K and Q5_K.
FORCE void k_scale_min(const u8* s, u32 j, u32& scale, u32& min) {
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        min = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}
FORCE u32 q3_scale(const u8* s, u32 j) { return ((s[j % 8] >> (4 * (j / 8))) & 15) | ((s[8 + j % 4] >> (2 * (j / 4))) & 3) << 4; }

// The unsigned code of weight k (0 to 31) of block c of 32 in the file; `block` is where
// the type's own block begins.
struct FromQ4_0 {
    typedef Q4_0 Layout;
    static constexpr u32 SIZE = 32, BYTES = 18, LOW_BITS = 4, HIGH_BITS = 0;
    static constexpr bool INVERTED = true;
    static FORCE u32 code(const u8* b, u32, u32 k) { return (b[2 + k % 16] >> (4 * (k / 16))) & 15; }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool) {
        *(u16*)d = half_at(b);
        return !bad_half(half_at(b));
    }
};
struct FromQ4_1 {
    typedef Q4_1 Layout;
    static constexpr u32 SIZE = 32, BYTES = 20, LOW_BITS = 4, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32, u32 k) { return (b[4 + k % 16] >> (4 * (k / 16))) & 15; }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool) {
        *(u32*)d = half_at(b) | half_at(b + 2) << 16;
        return !bad_half(half_at(b)) && !bad_half(half_at(b + 2));
    }
};
struct FromQ5_0 {
    typedef Q5_0 Layout;
    static constexpr u32 SIZE = 32, BYTES = 22, LOW_BITS = 4, HIGH_BITS = 1;
    static constexpr bool INVERTED = true;
    static FORCE u32 code(const u8* b, u32, u32 k) {
        return ((b[6 + k % 16] >> (4 * (k / 16))) & 15) | ((b[2 + k / 8] >> (k % 8)) & 1) << 4;
    }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool) {
        *(u16*)d = half_at(b);
        return !bad_half(half_at(b));
    }
};
struct FromQ5_1 {
    typedef Q5_1 Layout;
    static constexpr u32 SIZE = 32, BYTES = 24, LOW_BITS = 4, HIGH_BITS = 1;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32, u32 k) {
        return ((b[8 + k % 16] >> (4 * (k / 16))) & 15) | ((b[4 + k / 8] >> (k % 8)) & 1) << 4;
    }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool) {
        *(u32*)d = half_at(b) | half_at(b + 2) << 16;
        return !bad_half(half_at(b)) && !bad_half(half_at(b + 2));
    }
};
struct FromQ8_0 {
    typedef Q8_0 Layout;
    static constexpr u32 SIZE = 32, BYTES = 34, LOW_BITS = 8, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32, u32 k) { return b[2 + k]; }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool) {
        *(u16*)d = half_at(b);
        return !bad_half(half_at(b));
    }
};
struct FromMXFP4 {
    typedef MXFP4 Layout;
    static constexpr u32 SIZE = 32, BYTES = 17, LOW_BITS = 4, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32, u32 k) { return (b[1 + k % 16] >> (4 * (k / 16))) & 15; }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool) {
        *d = b[0];
        return b[0] != 255;
    }
};
struct FromIQ4_NL {
    typedef IQ4_NL Layout;
    static constexpr u32 SIZE = 32, BYTES = 18, LOW_BITS = 4, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32, u32 k) { return (b[2 + k % 16] >> (4 * (k / 16))) & 15; }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool) {
        *(u16*)d = half_at(b);
        return !bad_half(half_at(b));
    }
};
// d, upper bits of scales[2], lower bits[4], codes[8][16]
struct FromIQ4_XS {
    typedef IQ4_XS Layout;
    static constexpr u32 SIZE = 256, BYTES = 136, LOW_BITS = 4, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32 j, u32 k) { return (b[8 + 16 * j + k % 16] >> (4 * (k / 16))) & 15; }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool first) {
        if (first) {
            *(u32*)d = half_at(b) | half_at(b + 2) << 16;
            *(u32*)(d + 4) = half_at(b + 4) | half_at(b + 6) << 16;
        }
        return !bad_half(half_at(b));
    }
};
// qs[64], d
struct FromTQ2_0 {
    typedef TQ2_0 Layout;
    static constexpr u32 SIZE = 256, BYTES = 66, LOW_BITS = 2, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32 j, u32 k) { return (b[32 * (j / 4) + k] >> (2 * (j % 4))) & 3; }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool first) {
        if (first) *(u16*)d = (u16)half_at(b + 64);
        return !bad_half(half_at(b + 64));
    }
};
// scales[4], for each 16: codes[8], of weights k and k + 8
struct FromNVFP4 {
    typedef NVFP4 Layout;
    static constexpr u32 SIZE = 64, BYTES = 36, LOW_BITS = 4, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32 j, u32 k) { return (b[4 + 16 * j + 8 * (k / 16) + k % 8] >> (4 * (k / 8 % 2))) & 15; }
    // 0x7f is E4M3's NaN, which ggml takes for zero; no scale has a sign.
    static FORCE u32 scale(u32 e) { return e == 0x7f ? 0 : e; }
    static FORCE bool scales(const u8* b, u32 j, u8*, u8* s, bool) {
        *(u16*)s = (u16)(scale(b[2 * j]) | scale(b[2 * j + 1]) << 8);
        return ((b[2 * j] | b[2 * j + 1]) & 0x80) == 0;
    }
};
struct FromQ1_0 {
    typedef Q1_0 Layout;
    static constexpr u32 SIZE = 128, BYTES = 18, LOW_BITS = 1, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32 j, u32 k) { return (b[2 + 4 * j + k / 8] >> (k % 8)) & 1; }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool first) {
        if (first) *(u16*)d = (u16)half_at(b);
        return !bad_half(half_at(b));
    }
};
struct FromQ2_0 {
    typedef Q2_0 Layout;
    static constexpr u32 SIZE = 64, BYTES = 18, LOW_BITS = 2, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32 j, u32 k) { return (b[2 + 8 * j + k / 4] >> (2 * (k % 4))) & 3; }
    static FORCE bool scales(const u8* b, u32, u8* d, u8*, bool first) {
        if (first) *(u16*)d = (u16)half_at(b);
        return !bad_half(half_at(b));
    }
};
// scales[16], qs[64], d, dmin
struct FromQ2_K {
    typedef Q2_K Layout;
    static constexpr u32 SIZE = 256, BYTES = 84, LOW_BITS = 2, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32 j, u32 k) { return (b[16 + 32 * (j / 4) + k] >> (2 * (j % 4))) & 3; }
    static FORCE bool scales(const u8* b, u32 j, u8* d, u8* s, bool first) {
        *(u16*)s = (u16)(b[2 * j] | b[2 * j + 1] << 8);
        if (first) *(u32*)d = half_at(b + 80) | half_at(b + 82) << 16;
        return !bad_half(half_at(b + 80)) && !bad_half(half_at(b + 82));
    }
};
// hmask[32], qs[64], scales[12], d
struct FromQ3_K {
    typedef Q3_K Layout;
    static constexpr u32 SIZE = 256, BYTES = 110, LOW_BITS = 2, HIGH_BITS = 1;
    static constexpr bool INVERTED = true;
    static FORCE u32 code(const u8* b, u32 j, u32 k) {
        return ((b[32 + 32 * (j / 4) + k] >> (2 * (j % 4))) & 3) | ((b[k] >> j) & 1) << 2;
    }
    static FORCE bool scales(const u8* b, u32 j, u8* d, u8* s, bool first) {
        const u8* packed = b + 96;
        s[j] = (u8)(q3_scale(packed, 2 * j) | (q3_scale(packed, 2 * j + 1) & 3) << 6);
        if (j % 2 == 0) s[8 + j / 2] = (u8)(q3_scale(packed, 2 * j + 1) >> 2 | (q3_scale(packed, 2 * j + 3) >> 2) << 4);
        if (first) *(u16*)d = (u16)half_at(b + 108);
        return !bad_half(half_at(b + 108));
    }
};
// d, dmin, scales[12], then codes
FORCE bool k_head(const u8* b, u32 j, u8* head) {
    u32 scale, min, next_scale, next_min;
    k_scale_min(b + 4, j, scale, min);
    head[4 + j] = (u8)(scale | (min & 3) << 6);
    if (j % 2 == 0) {
        k_scale_min(b + 4, j + 1, next_scale, next_min);
        head[12 + j / 2] = (u8)(min >> 2 | (next_min >> 2) << 4);
    }
    if (j == 0) *(u32*)head = half_at(b) | half_at(b + 2) << 16;
    return !bad_half(half_at(b)) && !bad_half(half_at(b + 2));
}
struct FromQ4_K {
    typedef Q4_K Layout;
    static constexpr u32 SIZE = 256, BYTES = 144, LOW_BITS = 4, HIGH_BITS = 0;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32 j, u32 k) { return (b[16 + 32 * (j / 2) + k] >> (4 * (j % 2))) & 15; }
    static FORCE bool scales(const u8* b, u32 j, u8* d, u8*, bool) { return k_head(b, j, d); }
};
struct FromQ5_K {
    typedef Q5_K Layout;
    static constexpr u32 SIZE = 256, BYTES = 176, LOW_BITS = 4, HIGH_BITS = 1;
    static constexpr bool INVERTED = false;
    static FORCE u32 code(const u8* b, u32 j, u32 k) {
        return ((b[48 + 32 * (j / 2) + k] >> (4 * (j % 2))) & 15) | ((b[16 + k] >> j) & 1) << 4;
    }
    static FORCE bool scales(const u8* b, u32 j, u8* d, u8*, bool) { return k_head(b, j, d); }
};
// ql[128], qh[64], scales[16], d
struct FromQ6_K {
    typedef Q6_K Layout;
    static constexpr u32 SIZE = 256, BYTES = 210, LOW_BITS = 4, HIGH_BITS = 2;
    static constexpr bool INVERTED = true;
    static FORCE u32 code(const u8* b, u32 j, u32 k) {
        u32 half = j / 4, quarter = j % 4;
        return ((b[64 * half + 32 * (quarter % 2) + k] >> (4 * (quarter / 2))) & 15) |
               ((b[128 + 32 * half + k] >> (2 * quarter)) & 3) << 4;
    }
    static FORCE bool scales(const u8* b, u32 j, u8* d, u8* s, bool first) {
        *(u16*)s = (u16)(b[192 + 2 * j] | b[193 + 2 * j] << 8);
        if (first) *(u16*)d = (u16)half_at(b + 208);
        return !bad_half(half_at(b + 208));
    }
};

template <class F>
FORCE void repack(const RepackArgs& a) {
    u32 nb = a.cols / 32, block32 = F::SIZE / 32;
    u64 index = (u64)block_x() * THREADS + thread_x();
    if (index >= (u64)a.rows * nb) return;
    u32 row = (u32)(index / nb), c = (u32)(index % nb), j = c % block32;
    const u8* b = a.from + ((u64)row * (nb / block32) + c / block32) * F::BYTES;
    u32 total_rows = a.total_rows;
#if defined(__gfx942__)
    // Addresses in vector registers: in scalar ones the compiler has s_brev_b32, which makes a mask
    // of the bits below, between an addition and its carry. Cards leave the carry alone there;
    // AMD's simulator does not, and writes 4 GiB behind the matrix.
    asm("" : "+v"(total_rows));
#endif
    RowAt at = F::Layout::row(a.to, total_rows, nb, a.first_row + row);
    u8* q = (u8*)at.q;
    u8* h = (u8*)at.h;
    // The inverted bit is the code's highest.
    u32 invert = F::INVERTED ? 1u << (F::LOW_BITS + F::HIGH_BITS - 1) : 0;
    u32 low[8] = {0, 0, 0, 0, 0, 0, 0, 0}, high[2] = {0, 0};
    for (u32 w = 0; w < 8; ++w) {
        for (u32 i = 0; i < 4; ++i) {
            u32 n = F::code(b, j, 4 * w + i) ^ invert;
            u32 rest = n >> F::LOW_BITS;
            n &= (1u << F::LOW_BITS) - 1;
            if (F::LOW_BITS == 8) low[w] |= n << (8 * i);
            if (F::LOW_BITS == 4) low[w % 4] |= n << (8 * i + 4 * (w / 4));
            if (F::LOW_BITS == 1) low[0] |= n << (8 * i + w);
            if (F::LOW_BITS == 2) low[w / 4] |= n << (8 * i + 2 * (w % 4));
            if (F::HIGH_BITS == 1) high[0] |= rest << (8 * i + w);
            if (F::HIGH_BITS == 2) high[w / 4] |= rest << (8 * i + 2 * (w % 4));
        }
    }
    if (F::LOW_BITS == 8) {
        *(U32x4*)(q + c * 16) = U32x4{low[0], low[1], low[2], low[3]};
        *(U32x4*)(q + (nb + c) * 16) = U32x4{low[4], low[5], low[6], low[7]};
    }
    if (F::LOW_BITS == 4) *(U32x4*)(q + c * 16) = U32x4{low[0], low[1], low[2], low[3]};
    if (F::LOW_BITS == 1) *(u32*)(q + c * 4) = low[0];
    if (F::LOW_BITS == 2) *(U32x2*)(q + c * 8) = U32x2{low[0], low[1]};
    if (F::HIGH_BITS == 1) *(u32*)(h + c * 4) = high[0];
    if (F::HIGH_BITS == 2) *(U32x2*)(h + c * 8) = U32x2{high[0], high[1]};
    u8* d = (u8*)at.d + c / F::Layout::D_EVERY * F::Layout::D_BYTES;
    u8* s = (u8*)at.s + c / F::Layout::S_EVERY * F::Layout::S_BYTES;
    if (!F::scales(b, j, d, s, j == 0)) raise(a.flag);
}

#include "repack_low_bits.h"

// Floats are copied; EXPONENT is what NaN and infinity have all of.
template <class U>
FORCE void copy(const RepackArgs& a, U exponent) {
    u64 index = ((u64)block_x() * THREADS + thread_x()) * 32;
    u64 n = (u64)a.rows * a.cols;
    const U* from = (const U*)a.from;
    U* to = (U*)a.to + (u64)a.first_row * a.cols;
    bool good = true;
    for (u32 i = 0; i < 32; ++i) {
        if (index + i < n) {
            U v = from[index + i];
            to[index + i] = v;
            good &= (v & exponent) != exponent;
        }
    }
    if (!good) raise(a.flag);
}

#define REPACK(name, F) \
    ENTRY(THREADS, 1) repack_##name(RepackArgs a) { repack<F>(a); }
REPACK(q4_0, FromQ4_0)
REPACK(q4_1, FromQ4_1)
REPACK(q5_0, FromQ5_0)
REPACK(q5_1, FromQ5_1)
REPACK(q8_0, FromQ8_0)
REPACK(mxfp4, FromMXFP4)
REPACK(iq4_nl, FromIQ4_NL)
REPACK(iq4_xs, FromIQ4_XS)
REPACK(tq2_0, FromTQ2_0)
REPACK(nvfp4, FromNVFP4)
REPACK(q1_0, FromQ1_0)
REPACK(q2_0, FromQ2_0)
REPACK(q2_k, FromQ2_K)
REPACK(q3_k, FromQ3_K)
REPACK(q4_k, FromQ4_K)
REPACK(q5_k, FromQ5_K)
REPACK(q6_k, FromQ6_K)
#define REPACK_256(name, F) \
    ENTRY(THREADS, 1) repack_##name(RepackArgs a) { repack_256<F>(a); }
REPACK_256(iq3_s, MoveIQ3_S)
REPACK_256(iq3_xxs, MoveIQ3_XXS)
REPACK_256(iq2_s, MoveIQ2_S)
REPACK_256(iq2_xs, MoveIQ2_XS)
REPACK_256(iq2_xxs, MoveIQ2_XXS)
REPACK_256(iq1_s, MoveIQ1_S)
REPACK_256(iq1_m, MoveIQ1_M)
REPACK_256(tq1_0, MoveTQ1_0)
ENTRY(THREADS, 1) repack_f32(RepackArgs a) { copy<u32>(a, 0x7f800000u); }
ENTRY(THREADS, 1) repack_f16(RepackArgs a) { copy<u16>(a, (u16)0x7c00u); }
ENTRY(THREADS, 1) repack_bf16(RepackArgs a) { copy<u16>(a, (u16)0x7f80u); }
