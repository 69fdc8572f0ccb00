// Causal convolution of each channel over its sequence, with the last inputs kept as state.
//
//   out[t][c] = act(bias[c] + sum_j weight[c][j] in[t - (kernel - 1) + j][c])
//
// x and out [rows][channels] f32, out not x; state [kernel - 1][channels], oldest first; up to
// TAPS_MAX taps. Geometry: grid (ceil(channels / THREADS), chunks of CHUNK rows, sequences), a
// thread a channel of a chunk. The first chunk's threads read the state, and write the new
// one, so that nobody reads what another writes. Bound by memory: x and out once, and kernel -
// 1 rows more of x a chunk.
// Entry: conv.
#include "compat.h"
#include "act.h"
#include "recurrent.h"

#define THREADS 256
#define CHUNK 16u
#define TAPS_MAX 8u

struct ConvArgs {
    const float* x;
    const float* weight;  // [channels][kernel]
    const float* bias;    // or null
    float* out;
    const SequencePlace* sequences;
    u64 state;  // of this layer in a sequence's, in elements
    u32 channels;
    u32 kernel;
    ActSpec act;
};

ENTRY(THREADS, 1) conv(ConvArgs a) {
    let_next_start();
    wait_for_inputs();
    const SequencePlace place = a.sequences[block_z()];
    const u32 c = block_x() * THREADS + thread_x(), first = block_y() * CHUNK;
    const u32 n_rows = place.n_rows == 0 ? 0 : place.n_rows + place.drafts, end = least(first + CHUNK, n_rows);
    if (c >= a.channels || first >= n_rows) return;
    const u32 before = a.kernel - 1;  // inputs before a row's own
    const float* state = (const float*)place.state + a.state;
    const float* x = a.x + (u64)place.first_row * a.channels + c;
    // The input `back` rows before row t, 0 for the row's own.
    auto input = [&](u32 t, u32 back) {
        if (t >= back) return x[(u64)(t - back) * a.channels];
        if (place.first_position == 0) return 0.0f;
        return state[(u64)(before + t - back) * a.channels + c];
    };
    // Tap j of the newest; those past the kernel are 0 and multiply 0.
    float taps[TAPS_MAX], window[TAPS_MAX];
#pragma unroll
    for (u32 j = 0; j < TAPS_MAX; ++j) {
        taps[j] = j < a.kernel ? a.weight[(u64)c * a.kernel + before - j] : 0.0f;
        window[j] = j > 0 && j < a.kernel ? input(first, j) : 0.0f;
    }
    const float bias = a.bias ? a.bias[c] : 0.0f;
    for (u32 t = first; t < end; ++t) {
        window[0] = x[(u64)t * a.channels];
        float sum = bias;
#pragma unroll
        for (u32 j = TAPS_MAX; j-- > 0;) sum += taps[j] * window[j];
        a.out[(u64)(place.first_row + t) * a.channels + c] = act_of(a.act, sum);
#pragma unroll
        for (u32 j = TAPS_MAX - 1; j > 0; --j) window[j] = j < a.kernel ? window[j - 1] : 0.0f;
    }
    if (first > 0) return;
    // The drafts' first: the last one written lies where the first state is read.
    for (u32 draft = place.drafts + 1; draft-- > 0;) {
        float kept[TAPS_MAX];
#pragma unroll
        for (u32 j = 0; j < TAPS_MAX; ++j) kept[j] = j < before ? input(place.n_rows - 1 + draft, j) : 0.0f;
        float* behind = (float*)a.sequences[block_z() + draft].state_out + a.state;
#pragma unroll
        for (u32 j = 0; j < TAPS_MAX; ++j) {
            if (j < before) behind[(u64)(before - 1 - j) * a.channels + c] = kept[j];
        }
    }
}
