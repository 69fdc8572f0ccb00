// Which rows a product is of: what a body of matmat takes as `Tokens`.
//
//   n                        tokens of the block's list
//   first(count)             the block's first token, where a block takes `count` of them
//   x_row(t), out_row(t)     the rows of the input and of the output that are a token's
//   weights(base)            where the matrix is
//   weight_rows, weight_row  rows of the matrix, and which one makes output r
//   finish(v, bias, r)       what output r becomes at last
#pragma once
#include "compat.h"

// Token t is row t.
struct EveryToken {
    u32 n, weight_rows;

    FORCE u32 first(u32 count) const { return block_y() * count; }
    FORCE u32 x_row(u32 t) const { return t; }
    FORCE u32 out_row(u32 t) const { return t; }
    FORCE const u8* weights(const u8* base) const { return base; }
    FORCE u32 weight_row(u32 r) const { return r; }
    FORCE float finish(float v, const float* bias, u32 r) const { return bias ? v + bias[r] : v; }
};
