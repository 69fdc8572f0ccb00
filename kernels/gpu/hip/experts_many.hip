// Products of many routed rows with one matrix of their experts, by tiles of rows of one expert
// (experts_group.hip): prompts.
//
//   out[i] = (W[e] x[i / share] + b[e]) * scale[e],  e = ids[i]
//
// Rows of x are in 8 bits as matmat.hip has them, or for matrix instructions in f16
// (matmat_f16.h). Geometry: grid (n_blocks, most tiles there can be, TILE / COLUMNS), or for f16
// (rows / those of a tile rounded up, most tiles); blocks of tiles that are not there end at
// once. Otherwise as matmat.hip.
// Entries: experts_many_<type> (WEIGHT), for NVIDIA and with AMD's matrix instructions
// experts_many_f16_<type> (TYPE), and for NVIDIA experts_few_<type> (experts_few.h).
#define WEIGHTS_SHARED
#include "compat.h"
#include "formats.h"
#include "experts.h"

#define THREADS 256
#include "matmat_f16.h"
#ifdef RF_CUDA
#include "experts_few.h"
#endif
#include "matmat_q8.h"

// Tokens a tile has at most (experts_group.hip).
#define TILE_TOKENS 32u

struct ExpertsManyArgs {
    const void* x;          // bytes in 8 bits, or f16
    const F32x2* x_scales;  // of 8 bits
    float* out;
    const u32* list;
    const u32* tiles;
    ExpertTensors tensors;
    u32 share;
    u32 n_blocks;
    float factor;  // of f16
    u32 reserved;
};

// The rows of a tile.
struct TileTokens {
    u32 n, weight_rows, share;
    const u32* list;
    const u8* expert;
    const ExpertTensors& tensors;

    FORCE u32 first(u32 count) const { return block_z() * count; }
    FORCE u32 x_row(u32 t) const { return list[t] / share; }
    FORCE u32 out_row(u32 t) const { return list[t]; }
    FORCE const u8* weights(const u8*) const { return expert + tensors.first; }
    FORCE u32 weight_row(u32 r) const { return r; }
    FORCE float finish(float v, const float*, u32 r) const {
        v += tensor_value(expert, tensors.first_bias, r, 0.0f);
        return v * tensor_value(expert, tensors.scale, 0, 1.0f);
    }
};
FORCE TileTokens tile_of(const ExpertsManyArgs& a) {
    wait_for_inputs();
    const u32* tile = a.tiles + 4 * (1 + block_y());
    const bool is = block_y() < a.tiles[0];
    const u8* expert = device_memory(is ? a.tensors.table[tile[0]] : 0);
    return TileTokens{is ? tile[2] : 0, a.tensors.rows, a.share, a.list + (is ? tile[1] : 0), expert, a.tensors};
}

ENTRY(THREADS, 1) UNIT(ExpertsManyArgs a) {
    const TileTokens tokens = tile_of(a);
    if (tokens.n == 0) return;
    const MatmatArgs product = {nullptr,          (const u8*)a.x, a.x_scales, a.out,         nullptr, a.tensors.rows,
                                a.tensors.cols,   tokens.n,       a.tensors.rows, 0,         a.n_blocks};
    matmat<WEIGHT>(product, tokens);
}
#if defined(RF_CUDA) || defined(RF_WMMA)
#define NAME2(a, b) a##b
#define NAME(a, b) NAME2(a, b)
ENTRY(THREADS, 1) NAME(experts_many_f16_, TYPE)(ExpertsManyArgs a) {
#if defined(RF_WMMA) || __CUDA_ARCH__ >= 800
    const TileTokens tokens = tile_of(a);
    if (tokens.n == 0) return;
    MmaTile tile = {tokens.weights(nullptr), (const u16*)a.x, a.out, nullptr, a.tensors.rows, a.tensors.cols, 0, 0, a.factor, 0, 1,
                    nullptr, nullptr};
#ifdef RF_WMMA
    tile.row0 = block_x() * TILE_ROWS;
    matmat_wmma<WEIGHT, TILE_TOKENS>(tile, tokens, 0);
#else
    tile.row0 = block_x() * 128;
    matmat_mma<WEIGHT, TILE_TOKENS / 8, 4>(tile, tokens, 0);
#endif
#endif
}
#endif
#ifdef RF_CUDA
ENTRY(FEW_THREADS, 1) NAME(experts_few_, TYPE)(ExpertsFewArgs a) {
#if __CUDA_ARCH__ >= 800
    experts_few<WEIGHT>(a);
#endif
}
#endif
