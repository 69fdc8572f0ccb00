// The weight types that are floats, as they are in the file: one weight at a place,
// and weight i of 16 bytes.
#pragma once
#include "compat.h"

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
