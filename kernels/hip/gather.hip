// out[i] = x[rows[i]]: rows of f32, their numbers read from device memory.
//
// Geometry: grid (ceil(cols / (4 THREADS)), n). cols need be no multiple of anything. Bound
// by memory. Entry: gather.
#include "compat.h"

#define THREADS 256

struct GatherArgs {
    const float* x;
    float* out;
    const u32* rows;
    u32 cols;
    u32 reserved;
};

ENTRY(THREADS, 1) gather(GatherArgs a) {
    let_next_start();
    wait_for_inputs();
    const float* from = a.x + (u64)a.rows[block_y()] * a.cols;
    float* to = a.out + (u64)block_y() * a.cols;
    u32 base = block_x() * THREADS * 4 + thread_x();
    for (u32 j = 0; j < 4; ++j) {
        u32 i = base + j * THREADS;
        if (i < a.cols) to[i] = from[i];
    }
}
