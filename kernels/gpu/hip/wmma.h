// AMD's matrix instructions: WMMA on gfx11 and gfx12, MFMA on gfx908 and later gfx9 (RF_WMMA).
//
// Fragments of a 16 x 16 x 16 product, G = lane / 16: the operands' lane has row (column) lane % 16
// and the elements k of gfx11: all 16; gfx12: 8 G + 0..7; gfx9: 4 G + 0..3. The result's lane has
// column lane % 16 and rows of gfx11: 2 i + G; gfx12: 8 G + i; gfx9: 4 G + i. On gfx11 the rows of
// the first operand are taken in another order (operand_row), so that 8 G + i holds there too.
#pragma once
#include "compat.h"

#ifdef RF_WMMA
typedef float F4 __attribute__((ext_vector_type(4)));
typedef float F8 __attribute__((ext_vector_type(8)));
typedef _Float16 H4 __attribute__((ext_vector_type(4)));
typedef _Float16 H8 __attribute__((ext_vector_type(8)));
typedef _Float16 H16 __attribute__((ext_vector_type(16)));

#if defined(__GFX11__)
typedef H16 Operand;
typedef F8 Result;
FORCE Result multiply(Operand a, Operand b, Result c) { return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c); }
FORCE u32 operand_row() { return lane() % 2 * 8 + lane() % 16 / 2; }
// What lane ^ 16 has: shuffle_xor, but not by way of shared memory.
FORCE u32 row_swap(u32 v) {
    // In scalar registers: an instruction has room for one literal, not for both.
    u32 low = 0x76543210u, high = 0xfedcba98u;
    asm("" : "+s"(low), "+s"(high));
    return __builtin_amdgcn_permlanex16(v, v, low, high, false, false);
}
FORCE u32 operand_at() { return 0; }
#elif defined(__GFX12__)
typedef H8 Operand;
typedef F8 Result;
FORCE Result multiply(Operand a, Operand b, Result c) { return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c); }
FORCE u32 operand_row() { return lane() % 16; }
FORCE u32 operand_at() { return lane() / 16 * 8; }
#else
typedef H4 Operand;
typedef F4 Result;
FORCE Result multiply(Operand a, Operand b, Result c) { return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0); }
FORCE u32 operand_row() { return lane() % 16; }
FORCE u32 operand_at() { return lane() / 16 * 4; }
#endif
// What a sum of products begins with. Of WMMA, a zero that the compiler does not know: an
// instruction emulator takes the constant 0, as WMMA's third operand, for a register.
#if defined(__GFX11__) || defined(__GFX12__)
FORCE Result no_sum() { return Result(f32_of_bits(made_anew(0))); }
#else
FORCE Result no_sum() { return Result(0.0f); }
#endif
#define OPERAND_WORDS (sizeof(Operand) / 4)
#define RESULTS (sizeof(Result) / 4)

union OperandWords {
    Operand v;
    u32 w[OPERAND_WORDS];
};
#endif
