// Products of f16 rows with quantized weights by matrix instructions: what is the same on NVIDIA
// (matmat_mma.h) and AMD (matmat_wmma.h). Included by matmat.hip and experts_many.hip.
//
// out[t][r] = factor * sum_k W[r][k] * x[t][k] (+ bias[r]) with x [tokens][cols] f16
// (activations.hip), W as f16 made in registers, f32 sums; up to MATRICES matrices of one type
// that share x in one launch.
//
// Geometry: grid (tiles of rows of all matrices, tokens / those of a tile rounded up, parts of the
// columns), THREADS threads. Parts: a matrix of few rows would leave multiprocessors idle. Each
// part's sums go to `partials`, [tile][part] and then as the block has them; the block that ends
// last adds them in the order of the parts, so the result does not depend on who that is.
// `counters` [tiles] are zero before and after.
#pragma once
#include "mma_f16.h"
#include "tokens.h"
#include "wmma.h"

#define MATRICES 4
// Columns of a step: four blocks of weights.
#define STEP 128u

struct MmaMatrix {
    const u8* weights;
    float* out;         // [n_tokens][rows]
    const float* bias;  // or null
    u32 rows;
    u32 reserved;
};

struct MatmatMmaArgs {
    const u16* x;
    F32x4* partials;  // of more than one part
    u32* counters;
    u32 cols;
    u32 n_tokens;
    u32 epilogue;  // 0 store, 1 add to out
    u32 n_matrices;
    float factor;
    u32 parts;
    MmaMatrix matrices[MATRICES];
};

// What a block computes: rows of one matrix.
struct MmaTile {
    const u8* weights;
    const u16* x;
    float* out;         // [tokens][rows]
    const float* bias;  // or null
    u32 rows, cols;
    u32 row0;  // the block's first
    u32 epilogue;
    float factor;
    u32 part, parts;
    F32x4* partials;  // of the tile, if there are parts
    u32* counter;
};

// What this block computes of a launch with tiles of so many rows and tokens.
FORCE MmaTile mma_tile(const MatmatMmaArgs& a, u32 tile_rows, u32 tile_tokens) {
    u32 m = 0, tile = block_x(), all = 0;
#pragma unroll
    for (u32 i = 0; i < MATRICES; ++i) {
        const u32 tiles = i < a.n_matrices ? (a.matrices[i].rows + tile_rows - 1) / tile_rows : 0;
        all += tiles;
        if (m == i && i + 1 < a.n_matrices && tile >= tiles) {
            tile -= tiles;
            m = i + 1;
        }
    }
    const MmaMatrix matrix = a.matrices[m];
    const u32 place = block_y() * all + block_x();
    F32x4* partials = a.partials + (u64)place * a.parts * (tile_rows * tile_tokens / 4);
    return MmaTile{matrix.weights, a.x,      matrix.out, matrix.bias, matrix.rows, a.cols,           tile * tile_rows,
                   a.epilogue,     a.factor, block_z(),  a.parts,     partials,    a.counters + place};
}

#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
#include "matmat_mma.h"
#elif defined(RF_WMMA)
#include "matmat_wmma.h"
#endif
