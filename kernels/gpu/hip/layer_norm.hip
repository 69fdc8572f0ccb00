// Layer norm of each row: y = (x - mean) / sqrt(var + eps) * weight + bias     (Ba et al. 2016)
//
// Norms of groups of a row are those of as many shorter rows: weight and bias have
// weight_rows rows, row i uses row i % weight_rows. The variance is that of the differences
// from the mean: a difference of two large sums would lose its digits. Layout: x and out
// [rows][cols] f32; out may be x.
// Geometry: a block of THREADS a row. Bound by latency in decode, by memory in prefill: a row is
// read three times, twice from the first-level cache.
// Entry: layer_norm.
#include "compat.h"

#define THREADS 256

struct LayerNormArgs {
    const float* x;
    const float* weight;
    const float* bias;  // or null
    float* out;
    float eps;
    u32 cols;
    u32 weight_rows;
    u32 reserved;
};

ENTRY(THREADS, 1) layer_norm(LayerNormArgs a) {
    let_next_start();
    wait_for_inputs();
    __shared__ float room[2][1024 / WAVE + 1];
    const float* x = a.x + (u64)block_x() * a.cols;
    float* out = a.out + (u64)block_x() * a.cols;
    float sum = 0.0f;
    for (u32 i = thread_x(); i < a.cols; i += THREADS) sum += x[i];
    const float mean = block_sum(sum, THREADS, room[0]) / (float)a.cols;
    float squares = 0.0f;
    for (u32 i = thread_x(); i < a.cols; i += THREADS) {
        const float d = x[i] - mean;
        squares += d * d;
    }
    const float factor = 1.0f / sqrt_of(block_sum(squares, THREADS, room[1]) / (float)a.cols + a.eps);
    const u64 place = (u64)(block_x() % a.weight_rows) * a.cols;
    // A thread writes the elements that it has read itself.
    for (u32 i = thread_x(); i < a.cols; i += THREADS) {
        const float y = (x[i] - mean) * factor * a.weight[place + i];
        out[i] = a.bias ? y + a.bias[place + i] : y;
    }
}
