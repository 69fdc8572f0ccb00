// Gated delta rule (Yang et al. 2024, arXiv 2412.06464): row by row, all heads and
// columns of the state at once.
//
//   q, k = l2norm(q) / sqrt(dim_k), l2norm(k);  S *= exp(a[h] softplus(alpha[t][h] + dt_bias[h]))
//   S += k (sigmoid(beta[t][h]) (v - S^T k))^T;  out = S^T q
//
// qkv [rows][2 n_head_k dim_k + n_head_v dim_v], state [n_head_v][dim_k][dim_v] f32. A column of S
// needs no other one: a group of WAVE / 8 lanes of a wave has one, shared out among them in fours,
// in registers from the first row to the last; 8 neighbouring columns of a wave are read and
// written together. Queries and keys go through shared memory; those of the next row are loaded
// before the present one is computed.
// Geometry: grid (n_head_v * ceil(dim_v / COLUMNS), sequences), THREADS threads. Bound by latency
// over many rows; for one row by memory: the state once in, once out.
// Entries: delta_net_<DIM> (most elements of a key).
#include "compat.h"
#include "act.h"
#include "recurrent.h"

#define THREADS 128
#define LANES (WAVE / 8)
#define COLUMNS (8 * THREADS / WAVE)
#define EACH (DIM / LANES)
#define BROUGHT (2 * DIM / THREADS)

struct DeltaNetArgs {
    const float* qkv;
    const float* alpha;
    const float* beta;
    const float* a;
    const float* dt_bias;
    float* out;
    const SequencePlace* sequences;
    u64 state;  // of this layer in a sequence's, in elements
    u32 n_head_k, n_head_v;
    u32 dim_k, dim_v;
    u32 interleaved;
    float eps;
};

// Over the lanes of one column.
FORCE float column_sum(float v) {
#pragma unroll
    for (u32 m = 8; m < WAVE; m *= 2) v += shuffle_xor(v, m);
    return v;
}

// The element that a lane's i-th is: four neighbours each.
FORCE u32 element(u32 part, u32 i) { return (i / 4 * LANES + part) * 4 + i % 4; }

// What a thread brings of a row: some of its queries and keys, as one list, and its column's value.
struct Row {
    float qk[BROUGHT];
    float v, alpha, beta;

    FORCE void load(const DeltaNetArgs& a, u64 row, u32 head_k, u32 head_v, u32 column) {
        const u32 keys = a.n_head_k * a.dim_k;
        const float* at = a.qkv + row * (2 * keys + a.n_head_v * a.dim_v);
#pragma unroll
        for (u32 i = 0; i < BROUGHT; ++i) {
            const u32 j = i * THREADS + thread_x(), e = j % DIM;
            qk[i] = e < a.dim_k ? at[(j < DIM ? 0 : keys) + head_k * a.dim_k + e] : 0.0f;
        }
        v = at[2 * keys + head_v * a.dim_v + column];
        alpha = a.alpha[row * a.n_head_v + head_v];
        beta = a.beta[row * a.n_head_v + head_v];
    }
    FORCE void store(float* to) const {
#pragma unroll
        for (u32 i = 0; i < BROUGHT; ++i) to[i * THREADS + thread_x()] = qk[i];
    }
};

ENTRY(THREADS, 1) UNIT(DeltaNetArgs a) {
    __shared__ alignas(16) float rows[2][2 * DIM];
    let_next_start();
    wait_for_inputs();
    const SequencePlace place = a.sequences[block_y()];
    const u32 parts = (a.dim_v + COLUMNS - 1) / COLUMNS, head = block_x() / parts;
    const u32 wanted = block_x() % parts * COLUMNS + wave() * 8 + lane() % 8, part = lane() / 8;
    // Columns past the last are computed as the last one is, and not stored.
    const u32 column = least(wanted, a.dim_v - 1);
    const bool stores = wanted < a.dim_v;
    const u32 head_k = a.interleaved ? head % a.n_head_k : head / (a.n_head_v / a.n_head_k);
    const u64 at = a.state + (u64)head * a.dim_k * a.dim_v + column;
    const float* state = (const float*)place.state + at;
    if (place.n_rows == 0) return;
    const u32 n_rows = place.n_rows + place.drafts;
    Row now;
    now.load(a, place.first_row, head_k, head, column);
    float s[EACH];
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 e = element(part, i);
        s[i] = place.first_position > 0 && e < a.dim_k ? state[(u64)e * a.dim_v] : 0.0f;
    }
    const float rate = a.a[head], dt_bias = a.dt_bias[head], q_scale = 1.0f / sqrt_of((float)a.dim_k);
#pragma unroll 1
    for (u32 t = 0; t < n_rows; ++t) {
        float* row = rows[t % 2];
        now.store(row);
        const float v = now.v, decay = exp_of(rate * softplus_of(now.alpha + dt_bias)), beta = sigmoid_of(now.beta);
        // The one before is read by nobody any more when all have stored this one.
        block_sync();
        now.load(a, place.first_row + least(t + 1, n_rows - 1), head_k, head, column);
        const F32x4* q = (const F32x4*)row + part;
        const F32x4* k = (const F32x4*)(row + DIM) + part;
        float q_squares = 0.0f, k_squares = 0.0f, seen = 0.0f;
#pragma unroll
        for (u32 i = 0; i < EACH; i += 4) {
            const F32x4 x = q[i / 4 * LANES], y = k[i / 4 * LANES];
            q_squares += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
            k_squares += y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w;
            s[i] *= decay;
            s[i + 1] *= decay;
            s[i + 2] *= decay;
            s[i + 3] *= decay;
            seen += s[i] * y.x + s[i + 1] * y.y + s[i + 2] * y.z + s[i + 3] * y.w;
        }
        const float q_factor = q_scale / sqrt_of(column_sum(q_squares) + a.eps);
        const float k_factor = 1.0f / sqrt_of(column_sum(k_squares) + a.eps);
        const float change = beta * (v - column_sum(seen) * k_factor) * k_factor;
        float out = 0.0f;
#pragma unroll
        for (u32 i = 0; i < EACH; i += 4) {
            const F32x4 x = q[i / 4 * LANES], y = k[i / 4 * LANES];
            s[i] += y.x * change;
            s[i + 1] += y.y * change;
            s[i + 2] += y.z * change;
            s[i + 3] += y.w * change;
            out += s[i] * x.x + s[i + 1] * x.y + s[i + 2] * x.z + s[i + 3] * x.w;
        }
        out = column_sum(out) * q_factor;
        if (part == 0 && stores) a.out[((u64)(place.first_row + t) * a.n_head_v + head) * a.dim_v + column] = out;
        if (t + 1 < place.n_rows) continue;
        float* behind = (float*)a.sequences[block_y() + t + 1 - place.n_rows].state_out + at;
        const u32 first = made_anew(part);
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            const u32 e = element(first, i);
            if (stores && e < a.dim_k) behind[(u64)e * a.dim_v] = s[i];
        }
    }
}
