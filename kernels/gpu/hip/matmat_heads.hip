// out[t][h][r] = sum_k W[h][r][k] * x[t][h][k]: a product for each head, with
// weights [n_head * rows][cols].
//
// x is [tokens][n_head][cols]: for quantized weights in 8 bits as matmat.hip has them, for floats
// (FLOATS) in f32. Geometry: grid (n_blocks, tokens / COLUMNS rounded up, n_head), THREADS threads;
// otherwise as matmat.hip and matvec_float.hip. Entries: matmat_heads_<type> (WEIGHT; FLOATS).
#define WEIGHTS_SHARED
#include "compat.h"
#include "tokens.h"

#define THREADS 256

// Row t of head block_z.
struct HeadTokens {
    u32 n, weight_rows, n_head, rows;

    FORCE u32 first(u32 count) const { return block_y() * count; }
    FORCE u32 x_row(u32 t) const { return t * n_head + block_z(); }
    FORCE u32 out_row(u32 t) const { return t * n_head + block_z(); }
    FORCE const u8* weights(const u8* base) const { return base; }
    FORCE u32 weight_row(u32 r) const { return block_z() * rows + r; }
    FORCE float finish(float v, const float*, u32) const { return v; }
};

#ifdef FLOATS
#include "matvec_float.h"
struct MatmatHeadsFloatArgs {
    MatvecFloatArgs product;  // rows of one head
    u32 n_head;
    u32 reserved;
};
ENTRY(THREADS, 1) UNIT(MatmatHeadsFloatArgs a) {
    const u32 rows = a.product.rows;
    matvec<WEIGHT>(a.product, HeadTokens{a.product.n_tokens, rows * a.n_head, a.n_head, rows});
}
#else
#include "formats.h"
#include "matmat_q8.h"
struct MatmatHeadsArgs {
    MatmatArgs product;  // rows of one head
    u32 n_head;
    u32 reserved;
};
ENTRY(THREADS, 1) UNIT(MatmatHeadsArgs a) {
    const u32 rows = a.product.rows;
    matmat<WEIGHT>(a.product, HeadTokens{a.product.n_tokens, rows * a.n_head, a.n_head, rows});
}
#endif
