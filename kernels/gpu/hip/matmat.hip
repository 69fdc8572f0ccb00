// out[t][r] = sum_k W[r][k] * x[t][k] for a few tokens (2 to 64, correct for any
// number), quantized weights.
//
// x is quantized already (activations.hip): bytes [tokens][2][NB][16] and {d, d * sum}
// [tokens][NB]. A wave takes ROWS rows and COLUMNS tokens: a block of 32 weights is unpacked once
// for all its tokens, 32 activations are read once for all its rows. Tokens beyond the last are
// computed on the last one's activations and not stored. Geometry: grid (blocks, tokens / COLUMNS
// rounded up), THREADS threads; waves go through the groups of rows round robin. Moves the weights
// once a COLUMNS tokens (mostly from the second-level cache after the first), 40 bytes of x a block
// of 32, token and ROWS rows. No shared memory.
// Entries: matmat_<type> (WEIGHT), and with matrix instructions (matmat_f16.h) for NVIDIA
// matmat_few_<tokens>_<type> (TYPE), matmat_mma_<tokens>x<rows>_<type> and (sm_90)
// matmat_wgmma_<tokens>_<type>, for AMD
// matmat_wmma_<tokens>_<type>.
#define WEIGHTS_SHARED
#include "compat.h"
#include "formats.h"

#define THREADS 256
#include "matmat_f16.h"
#ifdef RF_CUDA
#include "matmat_few.h"
#include "matmat_wgmma.h"
#endif
#include "matmat_q8.h"

ENTRY(THREADS, 1) UNIT(MatmatArgs a) { matmat<WEIGHT>(a, EveryToken{a.n_tokens, a.rows}); }
#define NAME2(a, b) a##b
#define NAME(a, b) NAME2(a, b)
#ifdef RF_CUDA
#if __CUDA_ARCH__ >= 800
#define FEW(tokens) matmat_few<WEIGHT, tokens / 8>(a)
#define MMA(tokens, rows) matmat_mma<WEIGHT, tokens / 8, rows / 32>(a)
#else
#define FEW(tokens)
#define MMA(tokens, rows)
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA(tokens) matmat_wgmma<WEIGHT, tokens>(a)
#else
#define WGMMA(tokens)
#endif
ENTRY(FEW_THREADS, 1) NAME(matmat_few_8_, TYPE)(MatmatFewArgs a) { FEW(8); }
ENTRY(FEW_THREADS, 1) NAME(matmat_few_16_, TYPE)(MatmatFewArgs a) { FEW(16); }
// Of few tokens two blocks a multiprocessor are better than more registers.
ENTRY(THREADS, 2) NAME(matmat_mma_8x128_, TYPE)(MatmatMmaArgs a) { MMA(8, 128); }
ENTRY(THREADS, 2) NAME(matmat_mma_16x128_, TYPE)(MatmatMmaArgs a) { MMA(16, 128); }
ENTRY(THREADS, 1) NAME(matmat_mma_32x128_, TYPE)(MatmatMmaArgs a) { MMA(32, 128); }
ENTRY(THREADS, 1) NAME(matmat_mma_32x256_, TYPE)(MatmatMmaArgs a) { MMA(32, 256); }
ENTRY(THREADS, 1) NAME(matmat_mma_64x128_, TYPE)(MatmatMmaArgs a) { MMA(64, 128); }
ENTRY(THREADS, 1) NAME(matmat_mma_64x256_, TYPE)(MatmatMmaArgs a) { MMA(64, 256); }
// Of 128 tokens the sums alone are 64 registers.
ENTRY(THREADS, 2) NAME(matmat_wgmma_32_, TYPE)(MatmatMmaArgs a) { WGMMA(32); }
ENTRY(THREADS, 2) NAME(matmat_wgmma_64_, TYPE)(MatmatMmaArgs a) { WGMMA(64); }
ENTRY(THREADS, 1) NAME(matmat_wgmma_128_, TYPE)(MatmatMmaArgs a) { WGMMA(128); }
#endif
#ifdef RF_WMMA
ENTRY(THREADS, 1) NAME(matmat_wmma_16_, TYPE)(MatmatMmaArgs a) { matmat_wmma<WEIGHT, 16>(a); }
ENTRY(THREADS, 1) NAME(matmat_wmma_32_, TYPE)(MatmatMmaArgs a) { matmat_wmma<WEIGHT, 32>(a); }
ENTRY(THREADS, 1) NAME(matmat_wmma_64_, TYPE)(MatmatMmaArgs a) { matmat_wmma<WEIGHT, 64>(a); }
#endif
