// What repack.hip does for the types of formats_low_bits.h whose codes it does not take one by one:
// a thread moves what 32 weights have. `b`: the type's own block in the file; j: which 32 of its
// 256; c: which 32 of the row; at: the row's planes.
#pragma once

FORCE u32 word_at(const u8* at) { return half_at(at) | half_at(at + 2) << 16; }

// Bit 4 i + b of `bits` to bit i of byte b.
FORCE u32 by_column(u32 bits) {
    u32 to = 0;
    for (u32 b = 0; b < 4; ++b) {
        u32 every_fourth = (bits >> b) & 0x11111111u;
        u32 pairs = (every_fourth | every_fourth >> 3) & 0x03030303u;
        u32 fours = (pairs | pairs >> 6) & 0x000f000fu;
        to |= ((fours | fours >> 12) & 255) << (8 * b);
    }
    return to;
}
// Four times seven signs, and a number of four bits in the place of the eighths.
FORCE u32 signs_and_number(u32 sevens, u32 number) {
    u32 eights = (sevens & 127) | (sevens & (127u << 7)) << 1 | (sevens & (127u << 14)) << 2 | (sevens & (127u << 21)) << 3;
    return by_column(eights) | (number & 1) << 25 | (number & 2) << 26 | (number & 4) << 27 | (number & 8) << 28;
}
FORCE bool put_d(const u8* b, u32 j, u8* d) {
    if (j == 0) *(u16*)d = (u16)half_at(b);
    return !bad_half(half_at(b));
}

// d, indices[64], upper bits[8], signs[32], scales[4]
struct MoveIQ3_S {
    typedef IQ3_S_Planes Layout;
    static constexpr u32 BYTES = 110;
    static FORCE bool put(const u8* b, u32 j, u32 c, const RowAt& at) {
        *(U32x2*)(at.q + c * 8) = U32x2{word_at(b + 2 + 8 * j), word_at(b + 6 + 8 * j)};
        *(u32*)(at.h + c * 4) = by_column(word_at(b + 74 + 4 * j));
        *(u8*)(at.s + c) = b[66 + j];
        u8* d = (u8*)at.d + c / 8 * 6;
        if (j < 4) d[2 + j] = b[106 + j];
        return put_d(b, j, d);
    }
};
// d, indices[64], 8 x signs and scale[4]
struct MoveIQ3_XXS {
    typedef IQ3_XXS_Planes Layout;
    static constexpr u32 BYTES = 98;
    static FORCE bool put(const u8* b, u32 j, u32 c, const RowAt& at) {
        u32 signs = word_at(b + 66 + 4 * j);
        *(U32x2*)(at.q + c * 8) = U32x2{word_at(b + 2 + 8 * j), word_at(b + 6 + 8 * j)};
        *(u32*)(at.h + c * 4) = signs_and_number(signs, signs >> 28);
        return put_d(b, j, (u8*)at.d + c / 8 * 2);
    }
};
// d, indices[32], signs[32], upper bits[8], scales[8]
struct MoveIQ2_S {
    typedef IQ2_S_Planes Layout;
    static constexpr u32 BYTES = 82;
    static FORCE bool put(const u8* b, u32 j, u32 c, const RowAt& at) {
        *(U32x2*)(at.q + c * 8) = U32x2{word_at(b + 2 + 4 * j), by_column(word_at(b + 34 + 4 * j))};
        *(u16*)(at.s + c * 2) = (u16)(b[66 + j] | b[74 + j] << 8);
        return put_d(b, j, (u8*)at.d + c / 8 * 2);
    }
};
// d, 32 x (9 bits of index, 7 signs), scales[8]
struct MoveIQ2_XS {
    typedef IQ2_XS_Planes Layout;
    static constexpr u32 BYTES = 74;
    static FORCE bool put(const u8* b, u32 j, u32 c, const RowAt& at) {
        u32 indices = 0, signs = 0, ninths = 0;
        for (u32 g = 0; g < 4; ++g) {
            u32 packed = half_at(b + 2 + 8 * j + 2 * g);
            indices |= (packed & 255) << (8 * g);
            ninths |= ((packed >> 8) & 1) << g;
            signs |= (packed >> 9) << (7 * g);
        }
        *(U32x2*)(at.q + c * 8) = U32x2{indices, signs_and_number(signs, ninths)};
        *(u8*)(at.s + c) = b[66 + j];
        return put_d(b, j, (u8*)at.d + c / 8 * 2);
    }
};
// d, 8 x (indices[4], signs and scale[4])
struct MoveIQ2_XXS {
    typedef IQ2_XXS_Planes Layout;
    static constexpr u32 BYTES = 66;
    static FORCE bool put(const u8* b, u32 j, u32 c, const RowAt& at) {
        u32 signs = word_at(b + 6 + 8 * j);
        *(U32x2*)(at.q + c * 8) = U32x2{word_at(b + 2 + 8 * j), signs_and_number(signs, signs >> 28)};
        return put_d(b, j, (u8*)at.d + c / 8 * 2);
    }
};
// d, indices[32], upper bits, scales and shifts[16]
struct MoveIQ1_S {
    typedef IQ1_S_Planes Layout;
    static constexpr u32 BYTES = 50;
    static FORCE bool put(const u8* b, u32 j, u32 c, const RowAt& at) {
        *(u32*)(at.q + c * 4) = word_at(b + 2 + 4 * j);
        *(u16*)(at.s + c * 2) = (u16)half_at(b + 34 + 2 * j);
        return put_d(b, j, (u8*)at.d + c / 8 * 2);
    }
};
// indices[32], upper bits and shifts[16], scales[8], whose upper nibbles are d
struct MoveIQ1_M {
    typedef IQ1_M_Planes Layout;
    static constexpr u32 BYTES = 56;
    static FORCE bool put(const u8* b, u32 j, u32 c, const RowAt& at) {
        *(u32*)(at.q + c * 4) = word_at(b + 4 * j);
        *(u16*)(at.s + c * 2) = (u16)half_at(b + 32 + 2 * j);
        if (j == 0) *(U32x2*)(at.d + c / 8 * 8) = U32x2{word_at(b + 48), word_at(b + 52)};
        // The exponent of d: three bits of its upper nibble, two of the next.
        return !bad_half((u32)(b[55] >> 4) << 12 | (u32)(b[53] >> 4) << 8);
    }
};
// 5 x 32 digits in 32 bytes, 5 x 16 in 16, 4 x 4 in 4, d
struct MoveTQ1_0 {
    typedef TQ1_0 Layout;
    static constexpr u32 BYTES = 54;
    static FORCE u32 digit(const u8* b, u32 k) {
        if (k < 160) return digit3(b[k % 32], k / 32);
        if (k < 240) return digit3(b[32 + k % 16], (k - 160) / 16);
        return digit3(b[48 + k % 4], (k - 240) / 4);
    }
    // Five digits, `step` weights apart.
    static FORCE u32 five(const u8* b, u32 k, u32 step) {
        u32 v = 0;
        for (u32 n = 0; n < 5; ++n) v = v * 3 + digit(b, k + n * step);
        return (v * 256 + 242) / 243;
    }
    static FORCE u32 two(const u8* b, u32 k) { return digit(b, k) | digit(b, k + 1) << 2; }
    static FORCE bool put(const u8* b, u32 j, u32 c, const RowAt& at) {
        u32 k = 32 * j;
        u16* q = (u16*)(at.q + c * 6);
        q[0] = (u16)(five(b, k, 4) | five(b, k + 1, 4) << 8);
        q[1] = (u16)(five(b, k + 2, 4) | five(b, k + 3, 4) << 8);
        q[2] = (u16)(five(b, k + 20, 2) | five(b, k + 21, 2) << 8);
        if (j % 2 == 0) *(u8*)(at.s + c / 2) = (u8)(two(b, k + 30) | two(b, k + 62) << 4);
        if (j == 0) *(u16*)(at.d + c / 8 * 2) = (u16)half_at(b + 52);
        return !bad_half(half_at(b + 52));
    }
};

template <class F>
FORCE void repack_256(const RepackArgs& a) {
    u32 nb = a.cols / 32;
    u64 index = (u64)block_x() * THREADS + thread_x();
    if (index >= (u64)a.rows * nb) return;
    u32 row = (u32)(index / nb), c = (u32)(index % nb);
    const u8* b = a.from + ((u64)row * (nb / 8) + c / 8) * F::BYTES;
    if (!F::put(b, c % 8, c, F::Layout::row(a.to, a.total_rows, nb, a.first_row + row))) raise(a.flag);
}
