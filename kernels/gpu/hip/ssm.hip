// Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): row by row, all heads and elements at once.
//
//   d = softplus(dt[t][h] + dt_bias[h]);  S = S exp(d a[h]) + d x B[g]^T;
//   out = S C[g] + skip[h] x,  g = h / (n_head / n_group)
//
// xbc [rows][n_head dim + 2 n_group n_state], state [n_head][dim][n_state] f32. A row of S
// needs no other one: 8 lanes have one, shared out among them in fours, in registers from the
// first row to the last. B and C go through shared memory; those of the next row are loaded
// before the present one is computed.
// Geometry: grid (n_head * ceil(dim / (THREADS / 8)), sequences), THREADS threads. Bound by latency
// over many rows; for one row by memory: the state once in, once out.
// Entries: ssm_<DIM> (most elements of a state's row).
#include "compat.h"
#include "act.h"
#include "recurrent.h"

#define THREADS 128
#define LANES 8u
#define EACH (DIM / LANES)
#define BROUGHT (2 * DIM / THREADS)

struct SsmArgs {
    const float* xbc;
    const float* dt;
    const float* a;
    const float* skip;
    const float* dt_bias;
    float* out;
    const SequencePlace* sequences;
    u64 state;  // of this layer in a sequence's, in elements
    u32 n_head, dim;
    u32 n_group, n_state;
};

// The element that a lane's i-th is: four neighbours each.
FORCE u32 element(u32 part, u32 i) { return (i / 4 * LANES + part) * 4 + i % 4; }

// What a thread brings of a row: some of B and C, as one list, and its own x.
struct Row {
    float bc[BROUGHT];
    float x, dt;

    FORCE void load(const SsmArgs& a, u64 row, u32 head, u32 group, u32 d) {
        const u32 width = a.n_head * a.dim;
        const float* at = a.xbc + row * (width + 2 * a.n_group * a.n_state);
#pragma unroll
        for (u32 i = 0; i < BROUGHT; ++i) {
            const u32 j = i * THREADS + thread_x(), n = j % DIM, g = j < DIM ? group : a.n_group + group;
            bc[i] = n < a.n_state ? at[width + g * a.n_state + n] : 0.0f;
        }
        x = at[head * a.dim + d];
        dt = a.dt[row * a.n_head + head];
    }
    FORCE void store(float* to) const {
#pragma unroll
        for (u32 i = 0; i < BROUGHT; ++i) to[i * THREADS + thread_x()] = bc[i];
    }
};

ENTRY(THREADS, 1) UNIT(SsmArgs a) {
    __shared__ alignas(16) float rows[2][2 * DIM];
    let_next_start();
    wait_for_inputs();
    const SequencePlace place = a.sequences[block_y()];
    const u32 rows_block = THREADS / LANES, parts = (a.dim + rows_block - 1) / rows_block, head = block_x() / parts;
    const u32 wanted = block_x() % parts * rows_block + thread_x() / LANES, part = thread_x() % LANES;
    // Rows past the last are computed as the last one is, and not stored.
    const u32 d = least(wanted, a.dim - 1), group = head / (a.n_head / a.n_group);
    const bool stores = wanted < a.dim;
    const u64 at = a.state + ((u64)head * a.dim + d) * a.n_state;
    const float* state = (const float*)place.state + at;
    if (place.n_rows == 0) return;
    const u32 n_rows = place.n_rows + place.drafts;
    Row now;
    now.load(a, place.first_row, head, group, d);
    float s[EACH];
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 n = element(part, i);
        s[i] = place.first_position > 0 && n < a.n_state ? state[n] : 0.0f;
    }
    const float rate = a.a[head], skip = a.skip[head], dt_bias = a.dt_bias[head];
#pragma unroll 1
    for (u32 t = 0; t < n_rows; ++t) {
        float* row = rows[t % 2];
        now.store(row);
        const float x = now.x, step = softplus_of(now.dt + dt_bias), decay = exp_of(step * rate), input = step * x;
        // The one before is read by nobody any more when all have stored this one.
        block_sync();
        now.load(a, place.first_row + least(t + 1, n_rows - 1), head, group, d);
        const F32x4* b = (const F32x4*)row + part;
        const F32x4* c = (const F32x4*)(row + DIM) + part;
        float out = 0.0f;
#pragma unroll
        for (u32 i = 0; i < EACH; i += 4) {
            const F32x4 y = b[i / 4 * LANES], z = c[i / 4 * LANES];
            s[i] = s[i] * decay + input * y.x;
            s[i + 1] = s[i + 1] * decay + input * y.y;
            s[i + 2] = s[i + 2] * decay + input * y.z;
            s[i + 3] = s[i + 3] * decay + input * y.w;
            out += s[i] * z.x + s[i + 1] * z.y + s[i + 2] * z.z + s[i + 3] * z.w;
        }
        out = lanes_sum(out, LANES) + skip * x;
        if (part == 0 && stores) a.out[((u64)(place.first_row + t) * a.n_head + head) * a.dim + d] = out;
        if (t + 1 < place.n_rows) continue;
        float* behind = (float*)a.sequences[block_y() + t + 1 - place.n_rows].state_out + at;
        const u32 first = made_anew(part);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const u32 n = element(first, i);
            if (stores && n < a.n_state) behind[n] = s[i];
        }
    }
}
