// The weight types: their layout on the device, and how 32 weights of a row become signed bytes.
//
// A matrix of R rows and K columns (K contiguous in the file, NB = K / 32 blocks a row) is a few
// planes, each [R][bytes of a row], each beginning at a multiple of 256 bytes, no padding between
// rows. Together they have the bytes of the file. A lane takes one block of 32 weights;
// neighbouring lanes take neighbouring blocks, so every plane is read in order, 16 bytes a lane
// where the type has that many.
//
//   type   planes (bytes a block of 32; "a 256" where one entry serves 8 blocks)      bytes a 32
//   Q4_0   q 16                               d f16 2                                   18
//   Q4_1   q 16                               d, m f16 4                                20
//   Q5_0   q 16   fifth bits 4                d f16 2                                   22
//   Q5_1   q 16   fifth bits 4                d, m f16 4                                24
//   Q8_0   q 32 (a row: all first halves, then all second halves)  d f16 2               34
//   MXFP4  q 16                               e 1                                       17
//   IQ4_NL q 16                               d f16 2                                   18
//   IQ4_XS q 16                               head 8 a 256                              17
//   Q2_K   q 8                                scale|min nibbles 2   d, dmin f16 4 a 256 10.5
//   Q3_K   q 8    third bits 4                scales 12 a 256       d f16 2 a 256       13.75
//   Q4_K   q 16                               head 16 a 256                             18
//   Q5_K   q 16   fifth bits 4                head 16 a 256                             22
//   Q6_K   q 16   upper bits 8                scales i8 2           d f16 2 a 256       26.25
//   F32, F16, BF16: as in the file
//   IQ1, IQ2, IQ3, TQ, Q1_0, Q2_0, NVFP4: in formats_low_bits.h
//
// q, 16 bytes: byte b has weight b in the low nibble and weight b + 16 in the high one. With
// weight 4 w + b as byte b of word w (0 to 7): bit planes hold bit w of byte b; planes of two bits
// hold, in word w / 4, bits 2 (w % 4) of byte b. Types without a minimum are stored with their top
// bit inverted: shifted to the top of a byte, the code minus its offset is then a signed byte
// times a power of two, which the scale makes up for. So they need no sums of the activations.
// head: d, dmin f16; byte 4 + j: scale j | (min j & 3) << 6; nibble j of the last word: min
// j >> 2. Q3_K's scales: byte j: scale 2j | (scale 2j+1 & 3) << 6, nibble j of the last word:
// scale 2j+1 >> 2. IQ4_XS's head, as in the file: d f16, 16 bits (two a scale, its upper ones), a
// word (nibble j: scale j's lower bits).
#pragma once
#include "compat.h"

FORCE u64 align256(u64 bytes) {
    u64 mask = ~(u64)255;
#if defined(__GFX11__)
    // Where the compiler sees that few bits count, it makes the mask by s_brev_b32 and puts that
    // between an addition and its carry. Cards leave the carry alone there; AMD's simulator of
    // gfx11 does not, and reads 4 GiB behind the weights.
    asm("" : "+s"(mask));
#endif
    return (bytes + 255) & mask;
}

// 32 activations: bytes 0 to 15 and 16 to 31, scale, and the scale times the sum of the bytes.
struct XChunk {
    U32x4 low, high;
    float d, sum;
};

// 32 weights as bytes: weight k of half h is scale[h] * code - min[h].
struct Codes {
    u32 v[8];
    float scale[2], min[2];
};

// Where one row begins in each plane.
struct RowAt {
    const u8* q;
    const u8* h;
    const u8* s;
    const u8* d;
};

// Bytes of the planes a row: q, h and s a block of 32, d a block of 32 or
// (D_BLOCKS = 8) of 256; S_BLOCKS alike.
template <u32 Q, u32 H, u32 S, u32 S_BLOCKS, u32 D, u32 D_BLOCKS>
struct Planes {
    static constexpr u32 Q_BYTES = Q, H_BYTES = H, S_BYTES = S, S_EVERY = S_BLOCKS, D_BYTES = D, D_EVERY = D_BLOCKS;

    static FORCE RowAt row(const u8* base, u32 rows, u32 nb, u32 r) {
        u64 h = align256((u64)rows * nb * Q);
        u64 s = h + align256((u64)rows * nb * H);
        u64 d = s + align256((u64)rows * (nb / S_BLOCKS) * S);
        RowAt at;
        at.q = base + (u64)r * nb * Q;
        at.h = base + h + (u64)r * nb * H;
        at.s = base + s + (u64)r * (nb / S_BLOCKS) * S;
        at.d = base + d + (u64)r * (nb / D_BLOCKS) * D;
        return at;
    }
};

FORCE u32 word(const U32x4& v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Word w of 4-bit codes as unsigned bytes.
FORCE u32 nibbles(const U32x4& q, u32 w) { return (w < 4 ? word(q, w) : word(q, w - 4) >> 4) & 0x0f0f0f0fu; }
// The same, times 2^shift, 1 to 4.
FORCE u32 nibbles_shifted(const U32x4& q, u32 w, u32 shift) {
    u32 mask = 0x01010101u * ((0x0fu << shift) & 0xff);
    return (w < 4 ? word(q, w) << shift : word(q, w - 4) >> (4 - shift)) & mask;
}
// Bit w of every byte of `bits`, moved to bit `to`.
FORCE u32 bit_plane(u32 bits, u32 w, u32 to) {
    return (to >= w ? bits << (to - w) : bits >> (w - to)) & (0x01010101u << to);
}

// Each byte of n, which is below 16, replaced by that byte of the table t0:t1:t2:t3.
FORCE u32 pick16(u32 t0, u32 t1, u32 t2, u32 t3, u32 n) {
    u32 sel = n & 0x07070707u, mask = ((n >> 3) & 0x01010101u) * 0xffu;
    return (pick_bytes(t0, t1, sel) & ~mask) | (pick_bytes(t2, t3, sel) & mask);
}
// FP4's values doubled: 0 1 2 3 4 6 8 12, then the same negative.
FORCE u32 fp4_doubled(u32 n) { return pick16(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, n); }
// -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
FORCE u32 iq4_values(u32 n) { return pick16(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, n); }

FORCE float e8m0_half(u32 e) { return e == 255 ? QUIET_NAN : f32_of_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

struct Q4_0 : Planes<16, 0, 0, 1, 2, 1> {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        U32x4 q;
        u32 d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream16(at.q + c * 16), stream2(at.d + c * 2)}; }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = nibbles_shifted(k.q, w, 4);
        o.scale[0] = f32_of_f16(k.d) * 0.0625f;
    }
};

struct Q4_1 : Planes<16, 0, 0, 1, 4, 1> {
    static constexpr bool HALVES = false, MIN = true;
    struct Chunk {
        U32x4 q;
        u32 dm;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream16(at.q + c * 16), stream4(at.d + c * 4)}; }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = nibbles(k.q, w);
        o.scale[0] = f32_of_f16(k.dm);
        o.min[0] = -f32_of_f16(k.dm >> 16);
    }
};

struct Q5_0 : Planes<16, 4, 0, 1, 2, 1> {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        U32x4 q;
        u32 h, d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream16(at.q + c * 16), stream4(at.h + c * 4), stream2(at.d + c * 2)};
    }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = nibbles_shifted(k.q, w, 3) | bit_plane(k.h, w, 7);
        o.scale[0] = f32_of_f16(k.d) * 0.125f;
    }
};

struct Q5_1 : Planes<16, 4, 0, 1, 4, 1> {
    static constexpr bool HALVES = false, MIN = true;
    struct Chunk {
        U32x4 q;
        u32 h, dm;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream16(at.q + c * 16), stream4(at.h + c * 4), stream4(at.d + c * 4)};
    }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = nibbles(k.q, w) | bit_plane(k.h, w, 4);
        o.scale[0] = f32_of_f16(k.dm);
        o.min[0] = -f32_of_f16(k.dm >> 16);
    }
};

struct Q8_0 : Planes<32, 0, 0, 1, 2, 1> {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        U32x4 low, high;
        u32 d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32 nb) {
        return Chunk{stream16(at.q + c * 16), stream16(at.q + (nb + c) * 16), stream2(at.d + c * 2)};
    }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {
            o.v[w] = word(k.low, w);
            o.v[4 + w] = word(k.high, w);
        }
        o.scale[0] = f32_of_f16(k.d);
    }
};

struct MXFP4 : Planes<16, 0, 0, 1, 1, 1> {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        U32x4 q;
        u32 e;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream16(at.q + c * 16), stream1(at.d + c)}; }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = fp4_doubled(nibbles(k.q, w));
        o.scale[0] = e8m0_half(k.e);
    }
};

struct IQ4_NL : Planes<16, 0, 0, 1, 2, 1> {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        U32x4 q;
        u32 d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream16(at.q + c * 16), stream2(at.d + c * 2)}; }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = iq4_values(nibbles(k.q, w));
        o.scale[0] = f32_of_f16(k.d);
    }
};

struct IQ4_XS : Planes<16, 0, 0, 1, 8, 8> {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        U32x4 q;
        U32x2 head;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream16(at.q + c * 16), shared8(at.d + c / 8 * 8)}; }
    static FORCE void unpack(const Chunk& k, u32 c, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = iq4_values(nibbles(k.q, w));
        u32 j = c % 8;
        u32 scale = ((k.head.y >> (4 * j)) & 15) | ((k.head.x >> (16 + 2 * j)) & 3) << 4;
        o.scale[0] = f32_of_f16(k.head.x) * (float)((i32)scale - 32);
    }
};

struct Q2_K : Planes<8, 0, 2, 1, 4, 8> {
    static constexpr bool HALVES = true, MIN = true;
    struct Chunk {
        U32x2 q;
        u32 s, dm;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream8(at.q + c * 8), stream2(at.s + c * 2), stream4(at.d + c / 8 * 4)};
    }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = ((w < 4 ? k.q.x : k.q.y) >> (2 * (w % 4))) & 0x03030303u;
        float d = f32_of_f16(k.dm), dmin = f32_of_f16(k.dm >> 16);
        for (u32 i = 0; i < 2; ++i) {
            o.scale[i] = d * (float)((k.s >> (8 * i)) & 15);
            o.min[i] = dmin * (float)((k.s >> (8 * i + 4)) & 15);
        }
    }
};

struct Q3_K : Planes<8, 4, 12, 8, 2, 8> {
    static constexpr bool HALVES = true, MIN = false;
    struct Chunk {
        U32x2 q;
        u32 h, s, s_high, d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        const u8* s = at.s + c / 8 * 12;
        return Chunk{stream8(at.q + c * 8), stream4(at.h + c * 4), stream1(s + c % 8), stream4(s + 8), stream2(at.d + c / 8 * 2)};
    }
    static FORCE void unpack(const Chunk& k, u32 c, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) {
            u32 q = w < 4 ? k.q.x : k.q.y, i = w % 4;
            o.v[w] = ((i < 3 ? q << (5 - 2 * i) : q >> 1) & 0x60606060u) | bit_plane(k.h, w, 7);
        }
        float d = f32_of_f16(k.d) * 0.03125f;
        o.scale[0] = d * (float)((i32)(k.s & 63) - 32);
        o.scale[1] = d * (float)((i32)((k.s >> 6) | (((k.s_high >> (4 * (c % 8))) & 15) << 2)) - 32);
    }
};

FORCE void head_scales(const U32x4& head, u32 c, Codes& o) {
    u32 j = c % 8;
    // Of values, not of fields: a choice between places in memory keeps the struct
    // in scratch memory on AMD.
    u32 low = head.y, high = head.z;
    u32 s = (j < 4 ? low : high) >> (8 * (j % 4));
    u32 m = ((head.w >> (4 * j)) & 15) << 2 | ((s >> 6) & 3);
    o.scale[0] = f32_of_f16(head.x) * (float)(s & 63);
    o.min[0] = f32_of_f16(head.x >> 16) * (float)m;
}

struct Q4_K : Planes<16, 0, 0, 1, 16, 8> {
    static constexpr bool HALVES = false, MIN = true;
    struct Chunk {
        U32x4 q, head;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream16(at.q + c * 16), shared16(at.d + c / 8 * 16)};
    }
    static FORCE void unpack(const Chunk& k, u32 c, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = nibbles(k.q, w);
        head_scales(k.head, c, o);
    }
};

struct Q5_K : Planes<16, 4, 0, 1, 16, 8> {
    static constexpr bool HALVES = false, MIN = true;
    struct Chunk {
        U32x4 q, head;
        u32 h;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream16(at.q + c * 16), shared16(at.d + c / 8 * 16), stream4(at.h + c * 4)};
    }
    static FORCE void unpack(const Chunk& k, u32 c, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = nibbles(k.q, w) | bit_plane(k.h, w, 4);
        head_scales(k.head, c, o);
    }
};

struct Q6_K : Planes<16, 8, 2, 1, 2, 8> {
    static constexpr bool HALVES = true, MIN = false;
    struct Chunk {
        U32x4 q;
        U32x2 h;
        u32 s, d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream16(at.q + c * 16), stream8(at.h + c * 8), stream2(at.s + c * 2), stream2(at.d + c / 8 * 2)};
    }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) {
            u32 h = w < 4 ? k.h.x : k.h.y;
            o.v[w] = nibbles_shifted(k.q, w, 2) | ((h << (6 - 2 * (w % 4))) & 0xc0c0c0c0u);
        }
        float d = f32_of_f16(k.d) * 0.25f;
        o.scale[0] = d * (float)(i32)(i8)(k.s & 255);
        o.scale[1] = d * (float)(i32)(i8)(k.s >> 8);
    }
};

#include "formats_low_bits.h"

// The sum over 32 weights times activations.
template <class T>
FORCE float dot_chunk(const Codes& k, const XChunk& x) {
    i32 first = 0, second = 0;
#pragma unroll
    for (u32 w = 0; w < 4; ++w) first = dot4(k.v[w], word(x.low, w), first);
#pragma unroll
    for (u32 w = 0; w < 4; ++w) second = dot4(k.v[4 + w], word(x.high, w), second);
    if (!T::HALVES) {
        float p = k.scale[0] * (float)(first + second) * x.d;
        return T::MIN ? p - k.min[0] * x.sum : p;
    }
    float p = k.scale[0] * (float)first + k.scale[1] * (float)second;
    if (T::MIN) {
        i32 sum_first = 0, sum_second = 0;
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {
            sum_first = dot4(0x01010101u, word(x.low, w), sum_first);
            sum_second = dot4(0x01010101u, word(x.high, w), sum_second);
        }
        p -= k.min[0] * (float)sum_first + k.min[1] * (float)sum_second;
    }
    return p * x.d;
}

// Weight 4 w + b as a number.
template <class T>
FORCE float weight_of(const Codes& k, u32 w, u32 b) {
    u32 half = T::HALVES ? w / 4 : 0;
    float v = k.scale[half] * (float)(i32)(i8)((k.v[w] >> (8 * b)) & 255);
    return T::MIN ? v - k.min[half] : v;
}
