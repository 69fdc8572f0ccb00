// out[i] = x[rows[i]]: rows of f32, their numbers read from device memory. gather_outputs takes of
// a number with the bit MEAN_OF_SPAN the mean of the rows of the span that has it.
//
// Geometry: grid (ceil(cols / (4 THREADS)), n). cols need be no multiple of anything. Bound
// by memory. Entries: gather,
// gather_outputs.
#include "compat.h"
#include "recurrent.h"

#define THREADS 256
#define MEAN_OF_SPAN 0x80000000u

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

struct GatherOutputsArgs {
    const float* x;
    float* out;
    const u32* rows;
    const u32* sequences;         // [rows of x]: of which span a row is
    const SequencePlace* places;  // [spans]
    u32 cols;
    u32 reserved;
};

ENTRY(THREADS, 1) gather_outputs(GatherOutputsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 row = a.rows[block_y()];
    u32 first = row, n = 1;
    if (row & MEAN_OF_SPAN) {
        const SequencePlace place = a.places[a.sequences[row & ~MEAN_OF_SPAN]];
        first = place.first_row;
        n = place.n_rows;
    }
    const float* from = a.x + (u64)first * a.cols;
    float* to = a.out + (u64)block_y() * a.cols;
    const u32 base = block_x() * THREADS * 4 + thread_x();
    for (u32 j = 0; j < 4; ++j) {
        const u32 i = base + j * THREADS;
        if (i >= a.cols) continue;
        float sum = from[i];
        for (u32 r = 1; r < n; ++r) sum += from[(u64)r * a.cols + i];
        to[i] = n > 1 ? sum / (float)n : sum;
    }
}
