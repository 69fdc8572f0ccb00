// out[t][r] += bias[r]: after a product by the vendor's library; our own
// products add it themselves.
//
// Geometry: grid (ceil(rows / THREADS), tokens). Bound by memory.
// Entry: add_bias.
#include "compat.h"

#define THREADS 256

struct AddBiasArgs {
    float* out;
    const float* bias;
    u32 rows;
    u32 reserved;
};

ENTRY(THREADS, 1) add_bias(AddBiasArgs a) {
    let_next_start();
    wait_for_inputs();
    u32 r = block_x() * THREADS + thread_x();
    if (r < a.rows) a.out[(u64)block_y() * a.rows + r] += a.bias[r];
}
