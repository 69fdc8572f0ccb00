// Attention of single rows over their sequences' pages, split over the context, with rotation, append and combination in the
// same launch: decode.
//
//   out[row][h] = sum_p softmax_p(scale * q[row][h] . k[p][h / G]) v[p][h / G],  p from 0 to the row's position
//
// q [rows][n_head][dim], k and v [rows][n_head_kv][dim] are f32 as the products left them. With `append`, each block norms and
// rotates the G query heads of its key/value head for itself, and the block whose part of the context has the row's own
// position writes k and v to the page and takes them from shared memory; rows must then belong to different sequences.
// Without, q is taken as it is and the pages are complete. What changes from token to token (positions, tables) is read from
// device memory, so a graph can be replayed; a block finds its part of the context from the position alone and leaves if
// there is none.
//
// Geometry: grid (n_head_kv, n_split, rows), THREADS threads. A part is a multiple of STEP positions. In a step a thread takes
// a quarter of a key (LANES_K = 4 a position), then 8 elements of some positions' values. What bounds it in short contexts
// is latency, so loads come as early as they can: keys and values of the first step before the launch before has ended (with
// `append` they are of earlier passes), those of a later step before the arithmetic of the one before. Softmax is the online
// one (arXiv 1805.02867), in base 2. The last block of a row and head to finish adds up the parts: `partials`
// [rows][n_head_kv][n_split][G][DIM + 2] f32 (max, sum, weighted values), `counters` [rows][n_head_kv], zero before the
// first launch and again after each.
// Moves the row's K and V once, q and partials. Shared memory: static.
// Entries: attention_decode_<dim>_<group> as built with DIM and GROUP (most query heads a key/value head).
#include "compat.h"
#include "kv.h"

#define THREADS 256
#define STEP 64u
#define LANES_K 4u
#define SPLIT_MAX 64u
#define WAVES (THREADS / WAVE)
#define PIECES (DIM / 8)                      // 16-byte pieces of a head
#define PIECES_LANE ((PIECES + LANES_K - 1) / LANES_K)
#define TEAMS (THREADS / PIECES)              // positions whose values are read at a time
#define VALUES_TEAM ((STEP + TEAMS - 1) / TEAMS)

struct AttentionDecodeArgs {
    const float* q;
    const float* k;  // null without append
    const float* v;
    float* out;
    float* partials;
    u32* counters;
    KvPlace kv;
    RopePlace rope;
    float scale;
    u32 n_head;
    u32 n_split;
    u32 append;
};

FORCE F32x2 halves(u32 pair) { return F32x2{f32_of_f16(pair & 0xffffu), f32_of_f16(pair >> 16)}; }

// A choice by fields: one between structs may be made between their places, which keeps them in scratch memory.
FORCE U32x4 either(bool first, U32x4 a, U32x4 b) {
    return U32x4{first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}

// A thread's keys and values of a step.
struct Step {
    U32x4 keys[PIECES_LANE], values[VALUES_TEAM];

    // `stop`: positions from there on are not read.
    FORCE void load(const AttentionDecodeArgs& a, u32 sequence, u32 head_kv, u32 base, u32 stop) {
        const u32 t = thread_x(), team = t / PIECES, piece = t % PIECES;
        const u32 p = base + t / LANES_K, part = t % LANES_K;
        if (p < stop) {
            const U32x4* from = (const U32x4*)(page_of(a.kv, sequence, p / PAGE) + k_offset(a.kv, head_kv)) + p % PAGE * PIECES;
#pragma unroll
            for (u32 i = 0; i < PIECES_LANE; ++i) {
                if (part + i * LANES_K < PIECES) keys[i] = from[part + i * LANES_K];
            }
        }
#pragma unroll
        for (u32 j = 0; j < VALUES_TEAM; ++j) {
            u32 at = base + team + j * TEAMS;
            if (team < TEAMS && team + j * TEAMS < STEP && at < stop) {
                values[j] = ((const U32x4*)(page_of(a.kv, sequence, at / PAGE) + v_offset(a.kv, head_kv)))[at % PAGE * PIECES + piece];
            }
        }
    }
};

ENTRY(THREADS, 1) UNIT(AttentionDecodeArgs a) {
    __shared__ alignas(16) float q[GROUP][DIM];
    __shared__ alignas(16) u16 own_k[DIM], own_v[DIM];
    __shared__ float scores[GROUP][STEP];
    __shared__ float largest[GROUP], total[GROUP], rescale[GROUP];
    __shared__ alignas(16) float sums[WAVES][GROUP][DIM];
    __shared__ float part_max[SPLIT_MAX][GROUP], part_weight[SPLIT_MAX][GROUP];
    __shared__ u32 is_last;
    let_next_start();
    const u32 t = thread_x(), head_kv = block_x(), split = block_y(), row = block_z();
    const u32 group = a.n_head / a.kv.n_head_kv;
    const u32 position = a.kv.positions[row], sequence = sequence_of(a.kv, row);
    const u32 steps = position / STEP + 1, steps_part = (steps + a.n_split - 1) / a.n_split;
    const u32 n_parts = (steps + steps_part - 1) / steps_part;
    if (split >= n_parts) {
        // Not to end before the launch before has: a later launch may wait for this one only.
        wait_for_inputs();
        return;
    }
    const u32 begin = split * steps_part * STEP, end = least(begin + steps_part * STEP, position + 1);
    const u32 stop = a.append ? least(end, position) : end;  // positions that are read from pages
    Step now;
    if (!a.append) wait_for_inputs();
    now.load(a, sequence, head_kv, begin, stop);
    if (a.append) wait_for_inputs();

    const u32 entry = a.rope.by_position ? position : row;
    const float* q_row = a.q + ((u64)row * a.n_head + head_kv * group) * DIM;
    const float q_factor = a.scale * 1.44269504088896341f;
    for (u32 g = wave(); g < GROUP; g += WAVES) {
        if (g >= group) {
            for (u32 i = lane(); i < DIM; i += WAVE) q[g][i] = 0.0f;
        } else if (a.append) {
            float* to = q[g];
            rotate_head<DIM>(q_row + g * DIM, a.rope.q_norm, a.rope, entry, [=](u32 i, float x) { to[i] = x * q_factor; });
        } else {
            for (u32 i = lane(); i < DIM; i += WAVE) q[g][i] = q_row[g * DIM + i] * q_factor;
        }
        if (lane() == 0) {
            largest[g] = NEG_INF;
            total[g] = 0.0f;
        }
    }
    if (a.append && position < end) {
        u8* page = page_of(a.kv, sequence, position / PAGE);
        u32 slot = position % PAGE;
        u64 at = ((u64)row * a.kv.n_head_kv + head_kv) * DIM;
        if (wave() == WAVES - 1) {
            u16* to = (u16*)(page + k_offset(a.kv, head_kv)) + slot * DIM;
            u16* own = own_k;
            rotate_head<DIM>(a.k + at, a.rope.k_norm, a.rope, entry, [=](u32 i, float x) { to[i] = own[i] = f16_of_f32(x); });
        } else if (wave() == WAVES - 2) {
            u16* to = (u16*)(page + v_offset(a.kv, head_kv)) + slot * DIM;
            for (u32 i = lane(); i < DIM; i += WAVE) to[i] = own_v[i] = f16_of_f32(a.v[at + i]);
        }
    }
    block_sync();

    float acc[GROUP][8];
#pragma unroll
    for (u32 g = 0; g < GROUP; ++g) {
        for (u32 i = 0; i < 8; ++i) acc[g][i] = 0.0f;
    }
    const u32 team = t / PIECES, piece = t % PIECES;
    const u32 slot_k = t / LANES_K, part = t % LANES_K;
    for (u32 base = begin; base < end; base += STEP) {
        Step next = now;
        if (base + STEP < end) next.load(a, sequence, head_kv, base + STEP, stop);
        const u32 p = base + slot_k;
        float dot[GROUP];
#pragma unroll
        for (u32 g = 0; g < GROUP; ++g) dot[g] = 0.0f;
        if (p < end) {
#pragma unroll
            for (u32 i = 0; i < PIECES_LANE; ++i) {
                u32 at = part + i * LANES_K;
                if (at < PIECES) {
                    U32x4 key = either(p >= stop, ((const U32x4*)own_k)[at], now.keys[i]);
                    F32x2 k0 = halves(key.x), k1 = halves(key.y), k2 = halves(key.z), k3 = halves(key.w);
#pragma unroll
                    for (u32 g = 0; g < GROUP; ++g) {
                        const F32x4* w = (const F32x4*)&q[g][at * 8];
                        F32x4 w0 = w[0], w1 = w[1];
                        dot[g] += k0.x * w0.x + k0.y * w0.y + k1.x * w0.z + k1.y * w0.w;
                        dot[g] += k2.x * w1.x + k2.y * w1.y + k3.x * w1.z + k3.y * w1.w;
                    }
                }
            }
        }
#pragma unroll
        for (u32 g = 0; g < GROUP; ++g) {
            float s = lanes_sum(dot[g], LANES_K);
            if (part == 0) scores[g][slot_k] = p < end ? s : NEG_INF;
        }
        block_sync();
        // A wave a head: the step's largest score, the weights, their sum.
        for (u32 g = wave(); g < GROUP; g += WAVES) {
            float m = NEG_INF;
            for (u32 i = lane(); i < STEP; i += WAVE) m = max_of(m, scores[g][i]);
            float before = largest[g];
            m = max_of(wave_max(m), before);
            float sum = 0.0f;
            for (u32 i = lane(); i < STEP; i += WAVE) {
                float w = exp2_of(scores[g][i] - m);
                scores[g][i] = w;
                sum += w;
            }
            sum = wave_sum(sum);
            if (lane() == 0) {
                float r = exp2_of(before - m);
                rescale[g] = r;
                largest[g] = m;
                total[g] = total[g] * r + sum;
            }
        }
        block_sync();
#pragma unroll
        for (u32 g = 0; g < GROUP; ++g) {
            float r = rescale[g];
            for (u32 i = 0; i < 8; ++i) acc[g][i] *= r;
        }
#pragma unroll
        for (u32 j = 0; j < VALUES_TEAM; ++j) {
            u32 slot = team + j * TEAMS;
            if (team < TEAMS && slot < STEP && base + slot < end) {
                U32x4 value = either(base + slot >= stop, ((const U32x4*)own_v)[piece], now.values[j]);
                F32x2 v0 = halves(value.x), v1 = halves(value.y), v2 = halves(value.z), v3 = halves(value.w);
#pragma unroll
                for (u32 g = 0; g < GROUP; ++g) {
                    float w = scores[g][slot];
                    acc[g][0] += w * v0.x;
                    acc[g][1] += w * v0.y;
                    acc[g][2] += w * v1.x;
                    acc[g][3] += w * v1.y;
                    acc[g][4] += w * v2.x;
                    acc[g][5] += w * v2.y;
                    acc[g][6] += w * v3.x;
                    acc[g][7] += w * v3.y;
                }
            }
        }
        // The scores are read until here.
        if (base + STEP < end) block_sync();
        now = next;
    }

    // Add up the teams, WAVES of them at a time, in rounds.
    for (u32 first = 0; first < TEAMS; first += WAVES) {
        if (team < TEAMS && team >= first && team < first + WAVES) {
#pragma unroll
            for (u32 g = 0; g < GROUP; ++g) {
                float* to = &sums[team - first][g][piece * 8];
                for (u32 i = 0; i < 8; ++i) to[i] = first == 0 ? acc[g][i] : to[i] + acc[g][i];
            }
        }
        block_sync();
    }
    constexpr u32 N_ROOMS = TEAMS < WAVES ? TEAMS : WAVES;
    const u64 place = (u64)row * a.kv.n_head_kv + head_kv;
    float* out = a.out + ((u64)row * a.n_head + head_kv * group) * DIM;
    float* mine = a.partials + (place * a.n_split + split) * group * (DIM + 2);
    for (u32 i = t; i < group * DIM; i += THREADS) {
        u32 g = i / DIM, d = i % DIM;
        float v = 0.0f;
        for (u32 r = 0; r < N_ROOMS; ++r) v += sums[r][g][d];
        if (n_parts == 1) {
            out[i] = v / total[g];
        } else {
            mine[g * (DIM + 2) + 2 + d] = v;
            if (d == 0) {
                mine[g * (DIM + 2)] = largest[g];
                mine[g * (DIM + 2) + 1] = total[g];
            }
        }
    }
    if (n_parts == 1) return;

    device_fence();
    block_sync();
    if (t == 0) {
        u32 before = counter_add(a.counters + place, 1);
        is_last = before == n_parts - 1;
        if (before == n_parts - 1) a.counters[place] = 0;
    }
    block_sync();
    if (!is_last) return;
    device_fence();
    const u32 stride = group * (DIM + 2);
    const float* parts = a.partials + place * a.n_split * stride;
    // Every part's weight, then the sum over the parts.
    for (u32 i = t; i < n_parts * group; i += THREADS) {
        u32 s = i / group, g = i % group;
        part_max[s][g] = parts[s * stride + g * (DIM + 2)];
        part_weight[s][g] = parts[s * stride + g * (DIM + 2) + 1];
    }
    block_sync();
    for (u32 g = wave(); g < group; g += WAVES) {
        float m = NEG_INF, sum = 0.0f;
        for (u32 s = lane(); s < n_parts; s += WAVE) m = max_of(m, part_max[s][g]);
        m = wave_max(m);
        for (u32 s = lane(); s < n_parts; s += WAVE) sum += exp2_of(part_max[s][g] - m) * part_weight[s][g];
        float factor = 1.0f / wave_sum(sum);
        for (u32 s = lane(); s < n_parts; s += WAVE) part_weight[s][g] = exp2_of(part_max[s][g] - m) * factor;
    }
    block_sync();
    // Two elements a thread and BATCH parts at once, so that a dozen parts cost one round trip to memory.
    constexpr u32 BATCH = 12;
    for (u32 i = t * 2; i < group * DIM; i += THREADS * 2) {
        u32 g = i / DIM;
        const float* from = parts + g * (DIM + 2) + 2 + i % DIM;
        float first = 0.0f, second = 0.0f;
        for (u32 base = 0; base < n_parts; base += BATCH) {
            F32x2 v[BATCH];
#pragma unroll
            for (u32 j = 0; j < BATCH; ++j) v[j] = *(const F32x2*)(from + least(base + j, n_parts - 1) * stride);
#pragma unroll
            for (u32 j = 0; j < BATCH; ++j) {
                float w = base + j < n_parts ? part_weight[least(base + j, n_parts - 1)][g] : 0.0f;
                first += w * v[j].x;
                second += w * v[j].y;
            }
        }
        out[i] = first;
        out[i + 1] = second;
    }
}
