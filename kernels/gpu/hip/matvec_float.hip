// out[r] = sum_k W[r][k] * x[k] for F32, F16 and BF16 weights and one to eight
// tokens; x and out are f32.
//
// A wave takes whole rows, round robin over the grid; a lane 16 bytes of weights at a time. x
// is read through the caches. Columns need be no multiple of anything: what is left after the
// whole 16 bytes goes one weight a lane, and rows whose bytes are no multiple of 16 go so
// altogether. Bound by memory: the matrix's bytes once. Geometry: grid (blocks, tokens /
// columns rounded up), THREADS threads.
// Entry: matvec_<type> (WEIGHT one of F32, F16, BF16); with MMA for NVIDIA also
// matmat_floats_<tiles>_f16 (matmat_floats.h).
#include "compat.h"
#include "floats.h"

#define THREADS 256
#include "matvec_float.h"

ENTRY(THREADS, 1) UNIT(MatvecFloatArgs a) { matvec<WEIGHT>(a, EveryToken{a.n_tokens, a.rows}); }
#if defined(RF_CUDA) && defined(MMA)
#include "matmat_floats.h"
#if __CUDA_ARCH__ >= 800
#define FLOATS(tiles) matmat_floats<tiles>(a)
#else
#define FLOATS(tiles)
#endif
ENTRY(THREADS, 2) matmat_floats_1_f16(MatmatFloatsArgs a) { FLOATS(1); }
ENTRY(THREADS, 2) matmat_floats_2_f16(MatmatFloatsArgs a) { FLOATS(2); }
ENTRY(THREADS, 1) matmat_floats_4_f16(MatmatFloatsArgs a) { FLOATS(4); }
#endif
