// The types of at most 3.5 bits a weight beside the K-quants, and NVFP4: as formats.h
// describes, included by it.
//
//   type     planes (bytes a block of 32; "a N" where one entry serves N weights)        bytes a 32
//   IQ3_S    indices 8     signs 4     ninth bits 1              d f16, scales 6 a 256    13.75
//   IQ3_XXS  indices 8     signs, scale 4                        d f16 2 a 256            12.25
//   IQ2_S    indices, signs 8          upper bits, scales 2      d f16 2 a 256            10.25
//   IQ2_XS   indices, signs 8          scales 1                  d f16 2 a 256            9.25
//   IQ2_XXS  indices, signs, scale 8                             d f16 2 a 256            8.25
//   IQ1_S    indices 4     upper bits, scale, shift 2            d f16 2 a 256            6.25
//   IQ1_M    indices 4     upper bits, shifts 2                  scales and d 8 a 256     7
//   TQ1_0    30 digits of base 3 6     two digits 4 a 256        d f16 2 a 256            6.75
//   TQ2_0    q 8                                                 d f16 2 a 256            8.25
//   NVFP4    q 16          scales 2                                                       18
//   Q1_0     bits 4                                              d f16 2 a 128            4.5
//   Q2_0     q 8                                                 d f16 2 a 64             9
//
// Signs are bit planes (bit w of byte b: weight 4 w + b; 1: negative). Where the file has seven
// of eight, the eighth making the number of negative ones even, bits 1, 3, 5 and 7 of byte 3 are
// the bits of a number: the block's scale, or the ninth bits of IQ2_XS's indices. Indices, upper
// bits, scales and IQ1_M's d are bytes of the file. TQ1_0's digit n of byte i (0 to 3) is weight
// 4 n + i; those of bytes 4 and 5 are weights 20 + 2 n and 21 + 2 n; the two digits left are a
// nibble: first + 4 * second.
#pragma once

typedef Planes<8, 4, 1, 1, 6, 8> IQ3_S_Planes;
typedef Planes<8, 4, 0, 1, 2, 8> IQ3_XXS_Planes;
typedef Planes<8, 0, 2, 1, 2, 8> IQ2_S_Planes;
typedef Planes<8, 0, 1, 1, 2, 8> IQ2_XS_Planes;
typedef Planes<8, 0, 0, 1, 2, 8> IQ2_XXS_Planes;
typedef Planes<4, 0, 2, 1, 2, 8> IQ1_S_Planes;
typedef Planes<4, 0, 2, 1, 8, 8> IQ1_M_Planes;

#ifdef CODEBOOKS
// Entries as words of four bytes: one a word in IQ3, two in the others.
template <u32 N>
struct Codebook {
    u32 word[N];
};
template <u32 WORDS, u32 N, u32 VALUES>
__device__ constexpr Codebook<WORDS> codebook(const u16 (&codes)[N], u32 bits, const u8 (&values)[VALUES]) {
    Codebook<WORDS> book = {};
    for (u32 i = 0; i < WORDS; ++i)
        for (u32 b = 0; b < 4; ++b) {
            u32 code = ((u32)codes[i / (WORDS / N)] >> (bits * (4 * (i % (WORDS / N)) + b))) & ((1u << bits) - 1);
            book.word[i] |= (u32)values[code] << (8 * b);
        }
    return book;
}
static constexpr __device__ u8 IQ2_VALUES[3] = {8, 25, 43};
static constexpr __device__ u8 IQ3_XXS_VALUES[8] = {4, 12, 20, 28, 36, 44, 52, 62};
static constexpr __device__ u8 IQ3_S_VALUES[8] = {1, 3, 5, 7, 9, 11, 13, 15};
// Eight times the value, plus 128 and the shift's 1.
static constexpr __device__ u8 IQ1_VALUES[3] = {121, 129, 137};
static constexpr __device__ u16 IQ2_XXS_CODES[256] = {
#include "codebook_iq2_xxs.h"
};
static constexpr __device__ u16 IQ2_XS_CODES[512] = {
#include "codebook_iq2_xs.h"
};
static constexpr __device__ u16 IQ2_S_CODES[1024] = {
#include "codebook_iq2_s.h"
};
static constexpr __device__ u16 IQ3_XXS_CODES[256] = {
#include "codebook_iq3_xxs.h"
};
static constexpr __device__ u16 IQ3_S_CODES[512] = {
#include "codebook_iq3_s.h"
};
static constexpr __device__ u16 IQ1_CODES[2048] = {
#include "codebook_iq1.h"
};
alignas(8) static constexpr __device__ Codebook<512> IQ2_XXS_BOOK = codebook<512>(IQ2_XXS_CODES, 2, IQ2_VALUES);
alignas(8) static constexpr __device__ Codebook<1024> IQ2_XS_BOOK = codebook<1024>(IQ2_XS_CODES, 2, IQ2_VALUES);
alignas(8) static constexpr __device__ Codebook<2048> IQ2_S_BOOK = codebook<2048>(IQ2_S_CODES, 2, IQ2_VALUES);
static constexpr __device__ Codebook<256> IQ3_XXS_BOOK = codebook<256>(IQ3_XXS_CODES, 4, IQ3_XXS_VALUES);
static constexpr __device__ Codebook<512> IQ3_S_BOOK = codebook<512>(IQ3_S_CODES, 4, IQ3_S_VALUES);
alignas(8) static constexpr __device__ Codebook<4096> IQ1_BOOK = codebook<4096>(IQ1_CODES, 2, IQ1_VALUES);

#if defined(__gfx942__) || defined(__gfx950__) || defined(__GFX12__)
// A word's address by way of two scalar registers other than VCC, which AMD's simulator does not
// find as the base of a load.
template <class V, u32 N>
FORCE V entry(const Codebook<N>& book, u32 index) {
    const __attribute__((address_space(1))) V* at = (const __attribute__((address_space(1))) V*)book.word;
    asm("" : "+s"(at));
    return at[index];
}
#else
template <class V, u32 N>
FORCE V entry(const Codebook<N>& book, u32 index) { return ((const V*)book.word)[index]; }
#endif

// The values of word w with their signs. None is zero, so no byte overflows.
FORCE u32 signed_values(u32 v, u32 signs, u32 w) {
    u32 one = (signs >> w) & 0x01010101u;
    return (v ^ (one * 0xffu)) + one;
}
// Signs with the eighth of every eight, which makes the number of negative ones even.
FORCE u32 with_eighths(u32 signs) {
    u32 seven = signs & 0x55ffffffu;
    u32 pairs = seven ^ (seven >> 16);
    u32 bytes = pairs ^ (pairs >> 8);
    return seven | ((bytes ^ (bytes >> 1)) & 0x55u) << 25;
}
// The number in the place of the eighths.
FORCE u32 number_in_eighths(u32 signs) {
    return ((signs >> 25) & 1) | ((signs >> 26) & 2) | ((signs >> 27) & 4) | ((signs >> 28) & 8);
}
FORCE float odd_scale(u32 d, u32 n, float factor) { return f32_of_f16(d) * ((float)(2 * n + 1) * factor); }

struct IQ3_S : IQ3_S_Planes {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        U32x2 q;
        u32 signs, ninths, d, scales;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        const u8* d = at.d + c / 8 * 6;
        return Chunk{stream8(at.q + c * 8), stream4(at.h + c * 4), stream1(at.s + c), stream2(d), stream1(d + 2 + c % 8 / 2)};
    }
    static FORCE void unpack(const Chunk& k, u32 c, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) {
            u32 index = (((w < 4 ? k.q.x : k.q.y) >> (8 * (w % 4))) & 255) | ((k.ninths >> w) & 1) << 8;
            o.v[w] = signed_values(entry<u32>(IQ3_S_BOOK, index), k.signs, w);
        }
        o.scale[0] = odd_scale(k.d, (k.scales >> (4 * (c % 2))) & 15, 1.0f);
    }
};

struct IQ3_XXS : IQ3_XXS_Planes {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        U32x2 q;
        u32 signs, d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream8(at.q + c * 8), stream4(at.h + c * 4), stream2(at.d + c / 8 * 2)};
    }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
        u32 signs = with_eighths(k.signs);
#pragma unroll
        for (u32 w = 0; w < 8; ++w)
            o.v[w] = signed_values(entry<u32>(IQ3_XXS_BOOK, ((w < 4 ? k.q.x : k.q.y) >> (8 * (w % 4))) & 255), signs, w);
        o.scale[0] = odd_scale(k.d, number_in_eighths(k.signs), 0.25f);
    }
};

struct IQ2_S : IQ2_S_Planes {
    static constexpr bool HALVES = true, MIN = false;
    struct Chunk {
        U32x2 q;
        u32 s, d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream8(at.q + c * 8), stream2(at.s + c * 2), stream2(at.d + c / 8 * 2)};
    }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 g = 0; g < 4; ++g) {
            U32x2 e = entry<U32x2>(IQ2_S_BOOK, ((k.q.x >> (8 * g)) & 255) | ((k.s >> (2 * g)) & 3) << 8);
            o.v[2 * g] = signed_values(e.x, k.q.y, 2 * g);
            o.v[2 * g + 1] = signed_values(e.y, k.q.y, 2 * g + 1);
        }
        o.scale[0] = odd_scale(k.d, (k.s >> 8) & 15, 0.125f);
        o.scale[1] = odd_scale(k.d, k.s >> 12, 0.125f);
    }
};

struct IQ2_XS : IQ2_XS_Planes {
    static constexpr bool HALVES = true, MIN = false;
    struct Chunk {
        U32x2 q;
        u32 s, d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream8(at.q + c * 8), stream1(at.s + c), stream2(at.d + c / 8 * 2)};
    }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
        u32 signs = with_eighths(k.q.y);
#pragma unroll
        for (u32 g = 0; g < 4; ++g) {
            U32x2 e = entry<U32x2>(IQ2_XS_BOOK, ((k.q.x >> (8 * g)) & 255) | ((k.q.y >> (25 + 2 * g)) & 1) << 8);
            o.v[2 * g] = signed_values(e.x, signs, 2 * g);
            o.v[2 * g + 1] = signed_values(e.y, signs, 2 * g + 1);
        }
        o.scale[0] = odd_scale(k.d, k.s & 15, 0.125f);
        o.scale[1] = odd_scale(k.d, k.s >> 4, 0.125f);
    }
};

struct IQ2_XXS : IQ2_XXS_Planes {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        U32x2 q;
        u32 d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream8(at.q + c * 8), stream2(at.d + c / 8 * 2)}; }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
        u32 signs = with_eighths(k.q.y);
#pragma unroll
        for (u32 g = 0; g < 4; ++g) {
            U32x2 e = entry<U32x2>(IQ2_XXS_BOOK, (k.q.x >> (8 * g)) & 255);
            o.v[2 * g] = signed_values(e.x, signs, 2 * g);
            o.v[2 * g + 1] = signed_values(e.y, signs, 2 * g + 1);
        }
        o.scale[0] = odd_scale(k.d, number_in_eighths(k.q.y), 0.125f);
    }
};

// Eight times the eight values of an entry, plus 1 or, `down`, less 1.
FORCE U32x2 iq1_entry(u32 index, bool down) {
    U32x2 e = entry<U32x2>(IQ1_BOOK, index);
    u32 less = down ? 0x02020202u : 0;
    return U32x2{(e.x - less) ^ 0x80808080u, (e.y - less) ^ 0x80808080u};
}

struct IQ1_S : IQ1_S_Planes {
    static constexpr bool HALVES = false, MIN = false;
    struct Chunk {
        u32 q, s, d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream4(at.q + c * 4), stream2(at.s + c * 2), stream2(at.d + c / 8 * 2)};
    }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 g = 0; g < 4; ++g) {
            U32x2 e = iq1_entry(((k.q >> (8 * g)) & 255) | ((k.s >> (3 * g)) & 7) << 8, (k.s & 0x8000u) != 0);
            o.v[2 * g] = e.x;
            o.v[2 * g + 1] = e.y;
        }
        o.scale[0] = odd_scale(k.d, (k.s >> 12) & 7, 0.125f);
    }
};

struct IQ1_M : IQ1_M_Planes {
    static constexpr bool HALVES = true, MIN = false;
    struct Chunk {
        u32 q, s;
        U32x2 head;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        return Chunk{stream4(at.q + c * 4), stream2(at.s + c * 2), shared8(at.d + c / 8 * 8)};
    }
    static FORCE void unpack(const Chunk& k, u32 c, Codes& o) {
#pragma unroll
        for (u32 g = 0; g < 4; ++g) {
            U32x2 e = iq1_entry(((k.q >> (8 * g)) & 255) | ((k.s >> (4 * g)) & 7) << 8, ((k.s >> (4 * g)) & 8) != 0);
            o.v[2 * g] = e.x;
            o.v[2 * g + 1] = e.y;
        }
        u32 x = k.head.x, y = k.head.y, j = c % 8;
        u32 d = ((x >> 12) & 0xf) | ((x >> 24) & 0xf0) | ((y >> 4) & 0xf00) | ((y >> 16) & 0xf000);
        // Two of 3 bits; four to 16 bits.
        u32 both = (j < 4 ? x : y) >> (16 * (j / 2 % 2) + 6 * (j % 2));
        o.scale[0] = odd_scale(d, both & 7, 0.125f);
        o.scale[1] = odd_scale(d, (both >> 3) & 7, 0.125f);
    }
};
#endif

// Digit n of base 3 of byte b: what the fraction b / 256 times 3^n carries, times 3.
FORCE u32 digit3(u32 byte, u32 n) {
    const u32 power = n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
    return (((byte * power) & 255) * 3) >> 8;
}
// The same of four bytes.
FORCE u32 digits3(u32 bytes, u32 n) {
    const u32 power = n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
    u32 even = (((bytes & 0x00ff00ffu) * power) & 0x00ff00ffu) * 3, odd = ((((bytes >> 8) & 0x00ff00ffu) * power) & 0x00ff00ffu) * 3;
    return ((even >> 8) & 0x00ff00ffu) | (odd & 0xff00ff00u);
}

struct TQ1_0 : Planes<6, 0, 4, 8, 2, 8> {
    static constexpr bool HALVES = false, MIN = true;
    struct Chunk {
        u32 four, two, rest, d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) {
        const u8* q = at.q + c * 6;
        return Chunk{stream2(q) | stream2(q + 2) << 16, stream2(q + 4), stream1(at.s + c / 2), stream2(at.d + c / 8 * 2)};
    }
    static FORCE void unpack(const Chunk& k, u32 c, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 5; ++w) o.v[w] = digits3(k.four, w);
        o.v[5] = digits3(k.two, 0) | digits3(k.two, 1) << 16;
        o.v[6] = digits3(k.two, 2) | digits3(k.two, 3) << 16;
        u32 rest = k.rest >> (4 * (c % 2));
        o.v[7] = digits3(k.two, 4) | (rest & 3) << 16 | ((rest >> 2) & 3) << 24;
        o.scale[0] = o.min[0] = f32_of_f16(k.d);
    }
};

// Codes of 2 bits, less 1.
FORCE void unpack_less_one(const U32x2& q, u32 d, Codes& o) {
#pragma unroll
    for (u32 w = 0; w < 8; ++w) o.v[w] = ((w < 4 ? q.x : q.y) >> (2 * (w % 4))) & 0x03030303u;
    o.scale[0] = o.min[0] = f32_of_f16(d);
}

struct TQ2_0 : Planes<8, 0, 0, 1, 2, 8> {
    static constexpr bool HALVES = false, MIN = true;
    struct Chunk {
        U32x2 q;
        u32 d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream8(at.q + c * 8), stream2(at.d + c / 8 * 2)}; }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) { unpack_less_one(k.q, k.d, o); }
};

struct Q2_0 : Planes<8, 0, 0, 1, 2, 2> {
    static constexpr bool HALVES = false, MIN = true;
    struct Chunk {
        U32x2 q;
        u32 d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream8(at.q + c * 8), stream2(at.d + c / 2 * 2)}; }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) { unpack_less_one(k.q, k.d, o); }
};

struct Q1_0 : Planes<4, 0, 0, 1, 2, 4> {
    static constexpr bool HALVES = false, MIN = true;
    struct Chunk {
        u32 q, d;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream4(at.q + c * 4), stream2(at.d + c / 4 * 2)}; }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
        // Twice the bit, less 1.
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = ((k.q >> w) & 0x01010101u) << 1;
        o.scale[0] = o.min[0] = f32_of_f16(k.d);
    }
};

// Half of an E4M3 without sign: FP4's values are doubled.
FORCE float e4m3_half(u32 e) {
    u32 exponent = e >> 3, mantissa = e & 7;
    return exponent == 0 ? (float)mantissa * 0.0009765625f : f32_of_bits((exponent + 119) << 23 | mantissa << 20);
}

struct NVFP4 : Planes<16, 0, 2, 1, 0, 1> {
    static constexpr bool HALVES = true, MIN = false;
    struct Chunk {
        U32x4 q;
        u32 s;
    };
    static FORCE Chunk load(const RowAt& at, u32 c, u32) { return Chunk{stream16(at.q + c * 16), stream2(at.s + c * 2)}; }
    static FORCE void unpack(const Chunk& k, u32, Codes& o) {
#pragma unroll
        for (u32 w = 0; w < 8; ++w) o.v[w] = fp4_doubled(nibbles(k.q, w));
        o.scale[0] = e4m3_half(k.s & 0x7f);
        o.scale[1] = e4m3_half((k.s >> 8) & 0x7f);
    }
};
