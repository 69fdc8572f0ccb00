// Attention of single rows over their sequences' pages, split over the context, with rotation,
// append and combination in the same launch: decode.
//
//   out[row][h] = sum_p softmax_p(cap(scale * q[row][h] . k[p][h / G])) v[p][h / G],
//       p up to the row's position, or with `ahead` up to so many behind it and its sequence's last
//
// from 0 or, with a window, from position + 1 - window on. cap(s) = softcap * tanh(s / softcap),
// or s for softcap 0. A sink is one more score of a head, with no value: it takes part in the
// softmax from the first part on.
//
// q [rows][n_head][dim_k], k and v [rows][n_head_kv][dim_k, dim_v] are f32 as the products left
// them. With `append`, each block norms and rotates its query heads for itself, and the (first)
// block whose part of the context has the row's own position writes k and v to the page and takes
// them from shared memory; rows must then belong to different sequences. Without, q is taken as it
// is and the pages are complete. What changes from token to token (positions, tables) is read from
// device memory, so a graph can be replayed; a block finds its part of the context from the
// position alone and leaves if there is none.
//
// Geometry: grid (n_head / heads, n_split, rows), THREADS threads; a block has `heads` of the query
// heads of one key/value head, a divisor of their number of at most GROUP. A part is a multiple of
// STEP positions. In a step a thread takes a part of a key (LANES_K threads a position), then 8
// elements of some positions' values. What bounds it in short contexts is latency, so loads come as
// early as they can: keys and values of the first step before the launch before has ended (with
// `append` they are of earlier passes), those of a later step before the arithmetic of the one
// before or, in half the registers, where those of the step before have been used (BOTH_STEPS).
// Softmax is the online one (arXiv 1805.02867), in base 2. The last block of a row and head to
// finish adds up the parts: `partials` [rows][blocks][n_split][heads][dim_v + 2] f32 (max, sum,
// weighted values), `counters` [rows][blocks], zero before the first launch and again after each.
// Moves the row's K and V once, q and partials. Shared memory: static.
// Entries: attention_decode_<dim>_<group> as built with DIM and GROUP (most query heads of a
// block), or DIM_K and DIM_V; attention_decode_any has heads of any multiple of 8 up to DIM. With
// KV_Q8, names end in _q8 and pages have 8 bits and scales (kv.h): codes become f32 in registers.
// The row's own key and value are taken from shared memory as they are stored, so that a token is
// what it will be to those after it. With KV_F32, names end in _f32 and pages are f32, of which a
// thread takes half as many at a time (LANES_K): they fill as many registers, and static shared
// memory is 48,948 bytes of NVIDIA's 49,152 in attention_decode_any_f32.
// Several and many rows on NVIDIA have a form of their own, attention_many.h; ALiBi: alibi.h.
#include "compat.h"
#include "act.h"
#include "kv.h"
#include "recurrent.h"
#include "alibi.h"
#define THREADS 256
#ifndef LANES_K
#define LANES_K 4u
#endif
#define STEP (THREADS / LANES_K)
#define SPLIT_MAX 64u
#define WAVES (THREADS / WAVE)
#ifdef DIM
#define DIM_K DIM
#define DIM_V DIM
#endif
#define PIECES_LANE ((DIM_K / 8 + LANES_K - 1) / LANES_K)
#define TEAMS_LEAST (THREADS / (DIM_V / 8))
#define VALUES_TEAM ((STEP + TEAMS_LEAST - 1) / TEAMS_LEAST)
// Elements of the teams' sums of a head: a room a team, WAVES of them at most.
#ifdef ANY
#define ROOM 2048u
#else
#define ROOM ((TEAMS_LEAST < WAVES ? TEAMS_LEAST : WAVES) * DIM_V)
#endif

struct AttentionDecodeArgs {
    const float* q;
    const float* k;  // null without append
    const float* v;
    float* out;
    float* partials;
    u32* counters;
    KvPlace kv;
    RopePlace rope;
    const float* sinks;  // [n_head], or null
    const SequencePlace* places;  // [sequences]; read with `ahead`
    float scale;
    float softcap;  // 0 for none; the bias in units with ALIBI
    u32 window;     // 0 for none
    u32 n_head;
    u32 heads;  // of a block
    u32 n_split, append;
    u32 ahead;  // positions behind its own that a row attends to; never with append
};
// Sizes of the heads, their 16-byte pieces, and how many positions' values are read at a time.
#ifdef ANY
FORCE u32 dim_k(const AttentionDecodeArgs& a) { return a.kv.dim_k; }
FORCE u32 dim_v(const AttentionDecodeArgs& a) { return a.kv.dim_v; }
#else
FORCE u32 dim_k(const AttentionDecodeArgs&) { return DIM_K; }
FORCE u32 dim_v(const AttentionDecodeArgs&) { return DIM_V; }
#endif
FORCE u32 pieces_k(const AttentionDecodeArgs& a) { return dim_k(a) / 8; }
FORCE u32 pieces_v(const AttentionDecodeArgs& a) { return dim_v(a) / 8; }
FORCE u32 teams_of(const AttentionDecodeArgs& a) { return THREADS / pieces_v(a); }

// Eight elements as they are stored. A choice is by fields: one between structs may be
// made between their places, which keeps them in scratch memory. A slot of a head of
// its own is in shared memory.
#ifdef KV_Q8
FORCE Piece either(bool first, Piece a, Piece b) {
    return Piece{first ? a.low : b.low, first ? a.high : b.high, first ? a.scale : b.scale};
}
#define OWN(name, dim) __shared__ alignas(16) u8 name[dim]; __shared__ u16 name##_scales[dim / 32]
#define OWN_PIECE(name, at) Piece{((const u32*)name)[2 * (at)], ((const u32*)name)[2 * (at) + 1], name##_scales[(at) / 4]}
#elif defined(KV_F32)
struct Piece {
    F32x4 low, high;
};
FORCE Piece piece_of(const u8* head, u32 dim, u32 slot, u32 at) {
    const F32x4* from = (const F32x4*)head + (slot * (dim / 8) + at) * 2;
    return Piece{from[0], from[1]};
}
FORCE F32x4 either(bool first, F32x4 a, F32x4 b) {
    return F32x4{first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}
FORCE Piece either(bool first, Piece a, Piece b) { return Piece{either(first, a.low, b.low), either(first, a.high, b.high)}; }
typedef float Kept;
FORCE Kept kept_of(float x) { return x; }
#define OWN(name, dim) __shared__ alignas(16) float name[dim]
#define OWN_PIECE(name, at) Piece{((const F32x4*)name)[2 * (at)], ((const F32x4*)name)[2 * (at) + 1]}
#else
typedef U32x4 Piece;
FORCE Piece piece_of(const u8* head, u32 dim, u32 slot, u32 at) { return ((const U32x4*)head)[slot * (dim / 8) + at]; }
FORCE F32x2 halves(u32 pair) { return F32x2{f32_of_f16(pair & 0xffffu), f32_of_f16(pair >> 16)}; }
FORCE Piece either(bool first, Piece a, Piece b) {
    return U32x4{first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}
typedef u16 Kept;
FORCE Kept kept_of(float x) { return f16_of_f32(x); }
#define OWN(name, dim) __shared__ alignas(16) u16 name[dim]
#define OWN_PIECE(name, at) ((const U32x4*)name)[at]
#endif

// An element of the row's own key or value: to shared memory, and to its slot where
// this block is who writes it.
#ifdef KV_Q8
FORCE void keep_element(u8* own, u16* own_scales, bool writes, u8* head, u32 dim, u32 slot, u32 i, bool in, float x) {
    const Code c = code_of(x);
    const bool first = in && i % 32 == 0;
    if (in) own[i] = c.code;
    if (first) own_scales[i / 32] = c.scale;
    if (in && writes) head[slot * dim + i] = c.code;
    if (first && writes) scales_of(head, dim)[(slot * dim + i) / 32] = c.scale;
}
#else
FORCE void keep_element(Kept* own, bool writes, u8* head, u32 dim, u32 slot, u32 i, bool in, float x) {
    if (!in) return;
    own[i] = kept_of(x);
    if (writes) ((Kept*)head)[slot * dim + i] = own[i];
}
#endif

// The last of a row's and its heads' n_parts blocks of N threads to come here adds up what all
// of them left in `partials`.
template <u32 N>
FORCE void join_parts(const AttentionDecodeArgs& a, u64 place, u32 n_parts, u32 group, u32 size, float* out) {
    __shared__ float part_max[SPLIT_MAX][GROUP], part_weight[SPLIT_MAX][GROUP];
    __shared__ u32 is_last;
    const u32 t = thread_x();
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
    const u32 stride = group * (size + 2);
    const float* parts = a.partials + place * a.n_split * stride;
    // Every part's weight, then the sum over the parts.
    for (u32 i = t; i < n_parts * group; i += N) {
        u32 s = i / group, g = i % group;
        part_max[s][g] = parts[s * stride + g * (size + 2)];
        part_weight[s][g] = parts[s * stride + g * (size + 2) + 1];
    }
    block_sync();
    for (u32 g = wave(); g < group; g += N / WAVE) {
        float m = NEG_INF, sum = 0.0f;
        for (u32 s = lane(); s < n_parts; s += WAVE) m = max_of(m, part_max[s][g]);
        m = wave_max(m);
        for (u32 s = lane(); s < n_parts; s += WAVE) sum += exp2_of(part_max[s][g] - m) * part_weight[s][g];
        float factor = 1.0f / wave_sum(sum);
        for (u32 s = lane(); s < n_parts; s += WAVE) part_weight[s][g] = exp2_of(part_max[s][g] - m) * factor;
    }
    block_sync();
    // Two elements a thread and BATCH parts at once, so that a dozen parts cost
    // one round trip to memory.
    constexpr u32 BATCH = 12;
    for (u32 i = t * 2; i < group * size; i += N * 2) {
        u32 g = i / size;
        const float* from = parts + g * (size + 2) + 2 + i % size;
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

// Whether a step's keys and values and those of the next are in registers at a time: where a lane
// has enough of them. Of gfx90a and gfx942 it has 512; of narrower heads more waves fit instead.
#if defined(RF_CUDA) || ((defined(__gfx90a__) || defined(__gfx942__)) && DIM_K > 256)
#define BOTH_STEPS
#endif
#ifdef BOTH_STEPS
// A thread's keys and values of a step.
struct Step {
    Piece keys[PIECES_LANE], values[VALUES_TEAM];

    // Positions before `start`, and from `stop` on, are not read.
    FORCE void load(const AttentionDecodeArgs& a, u32 sequence, u32 head_kv, u32 base, u32 start, u32 stop) {
        const u32 t = thread_x(), team = t / pieces_v(a), piece = t % pieces_v(a), teams = teams_of(a);
        const u32 p = base + t / LANES_K, part = t % LANES_K;
        if (p >= start && p < stop) {
            const u8* from = page_of(a.kv, sequence, p / PAGE) + k_offset(a.kv, head_kv);
#pragma unroll
            for (u32 i = 0; i < PIECES_LANE; ++i) {
                if (part + i * LANES_K < pieces_k(a)) keys[i] = piece_of(from, dim_k(a), p % PAGE, part + i * LANES_K);
            }
        }
#pragma unroll
        for (u32 j = 0; j < VALUES_TEAM; ++j) {
            u32 at = base + team + j * teams;
            if (team < teams && team + j * teams < STEP && at >= start && at < stop) {
                values[j] = piece_of(page_of(a.kv, sequence, at / PAGE) + v_offset(a.kv, head_kv), dim_v(a), at % PAGE, piece);
            }
        }
    }
};
#else
// AMD counts loads, and waits for one by how many came behind it. Where a branch may have left
// some out, it has to wait for all: so each thread reads always, at a place beside where there is
// none of its own. Of heads of any size that would be many more loads.
#ifdef ANY
#define READS_ALWAYS 0
#else
#define READS_ALWAYS 1
#endif

// What a step reads: of a sequence and a key/value head, the positions from base on that are
// neither before `start` nor at `stop` or behind. It has one page or two, the same for all threads.
struct Span {
    u32 head_kv, base, start, stop, last;
    const u8 *low, *high;
    static_assert(STEP <= 2 * PAGE, "a step of more than two pages");

    // `last`, the row's position, is the last that has a page.
    FORCE Span(const KvPlace& kv, u32 sequence, u32 head_kv_, u32 base_, u32 start_, u32 stop_, u32 last_)
        : head_kv(head_kv_), base(base_), start(start_), stop(stop_), last(last_) {
        low = high = page_of_all(kv, sequence, least(base / PAGE, last / PAGE));
        if (STEP > PAGE) high = page_of_all(kv, sequence, least(base / PAGE + 1, last / PAGE));
    }
    // A position that may be read.
    FORCE u32 place(u32 p) const { return READS_ALWAYS ? least(p < start ? start : p, last) : p; }
    FORCE const u8* page(u32 p) const { return STEP <= PAGE || p / PAGE == base / PAGE ? low : high; }
};

#ifdef KV_Q8
// A piece on its way, as a vector, which stays whole. Of scales by themselves gfx11's compiler puts
// two into a register, and an instruction emulator errs in loads of half a register.
typedef u32 Held __attribute__((ext_vector_type(4)));
FORCE Held held(Piece p) { return Held{p.low, p.high, p.scale, 0}; }
FORCE Piece either(bool first, Piece a, Held b) {
    return Piece{first ? a.low : b.x, first ? a.high : b.y, made_anew(first ? a.scale : b.z)};
}
#else
typedef Piece Held;
FORCE Held held(Piece p) { return p; }
#endif

// A thread's keys and values of a step.
struct Step {
    Held keys[PIECES_LANE], values[VALUES_TEAM];

    FORCE void load_keys(const AttentionDecodeArgs& a, const Span& of) {
        const u32 p = of.place(of.base + thread_x() / LANES_K), part = thread_x() % LANES_K;
        if (READS_ALWAYS || (p >= of.start && p < of.stop)) {
            const u8* from = of.page(p) + k_offset(a.kv, of.head_kv);
#pragma unroll
            for (u32 i = 0; i < PIECES_LANE; ++i) {
                const u32 at = part + i * LANES_K;
                if (READS_ALWAYS || at < pieces_k(a)) {
                    keys[i] = held(piece_of(from, dim_k(a), p % PAGE, READS_ALWAYS ? least(at, pieces_k(a) - 1) : at));
                }
            }
        }
    }
    FORCE void load_values(const AttentionDecodeArgs& a, const Span& of) {
        u32 team = thread_x() / pieces_v(a);
        const u32 piece = thread_x() % pieces_v(a), teams = teams_of(a);
#ifdef ANY
        // The places of all that a thread may read would fill too many registers from step to step.
        team = made_anew(team);
#endif
#pragma unroll
        for (u32 j = 0; j < VALUES_TEAM; ++j) {
#ifdef ANY
            leave_vcc_hi();
#endif
            const u32 slot = team + j * teams;
            const u32 p = of.place(of.base + (READS_ALWAYS ? least(slot, STEP - 1) : slot));
            if (READS_ALWAYS || (team < teams && slot < STEP && p >= of.start && p < of.stop)) {
                values[j] = held(piece_of(of.page(p) + v_offset(a.kv, of.head_kv), dim_v(a), p % PAGE, piece));
            }
        }
    }
};
#endif

ENTRY(THREADS, 1) UNIT(AttentionDecodeArgs a) {
    __shared__ alignas(16) float q[GROUP][DIM_K];
    OWN(own_k, DIM_K);
    OWN(own_v, DIM_V);
    __shared__ float scores[GROUP][STEP];
    __shared__ float largest[GROUP], total[GROUP], rescale[GROUP], slopes[FALLS ? GROUP : 1];
    __shared__ alignas(16) float sums[GROUP * ROOM];
    let_next_start();
    const u32 t = thread_x(), split = block_y(), row = block_z();
    // Heads here; blocks of a key/value head.
    const u32 group = a.heads, blocks_kv = a.n_head / a.kv.n_head_kv / group;
    const u32 head_kv = block_x() / blocks_kv, first_head = block_x() * group;
    const u32 position = a.kv.positions[row], sequence = sequence_of(a.kv, row);
    const u32 start = a.window && position >= a.window ? position + 1 - a.window : 0;
    const u32 ahead = a.ahead ? least(position + a.ahead, a.places[sequence].last) : 0, last = ahead > position ? ahead : position;
    const u32 steps = last / STEP + 1 - start / STEP, steps_part = (steps + a.n_split - 1) / a.n_split;
    const u32 n_parts = (steps + steps_part - 1) / steps_part;
    if (split >= n_parts) {
        // Not to end before the launch before has: a later launch may wait for this one only.
        wait_for_inputs();
        return;
    }
    const u32 begin = (start / STEP + split * steps_part) * STEP, end = least(begin + steps_part * STEP, last + 1);
    const u32 stop = a.append ? least(end, position) : end;  // positions that are read from pages
    Step now;
    if (!a.append) wait_for_inputs();
#ifdef BOTH_STEPS
    now.load(a, sequence, head_kv, begin, start, stop);
#else
    const Span first_step(a.kv, sequence, head_kv, begin, start, stop, last);
    now.load_keys(a, first_step);
    now.load_values(a, first_step);
#endif
    if (a.append) wait_for_inputs();

    const u32 entry = a.rope.by_position ? position : row;
    const float* q_row = a.q + ((u64)row * a.n_head + first_head) * dim_k(a);
    const float q_factor = a.scale * 1.44269504088896341f, cap = cap_of(a.softcap);
    for (u32 g = wave(); g < GROUP; g += WAVES) {
        if (g >= group) {
            for (u32 i = lane(); i < dim_k(a); i += WAVE) q[g][i] = 0.0f;
        } else if (a.append) {
            float* to = q[g];
            rotate_head<DIM_K>(dim_k(a), q_row + g * dim_k(a), a.rope.q_norm, a.rope, entry, [=](u32 i, bool in, float x) {
                if (in) to[i] = x * q_factor;
            });
        } else {
            for (u32 i = lane(); i < dim_k(a); i += WAVE) q[g][i] = q_row[g * dim_k(a) + i] * q_factor;
        }
        if (lane() == 0) {
            const bool sink = a.sinks && split == 0 && g < group;
            largest[g] = sink ? a.sinks[first_head + g] * 1.44269504088896341f : NEG_INF;
            total[g] = sink ? 1.0f : 0.0f;
            if (FALLS) slopes[g] = alibi_slope(a.softcap, a.n_head, first_head + g);
        }
    }
    if (a.append && position < end) {
        u8* page = page_of(a.kv, sequence, position / PAGE);
        u32 slot = position % PAGE;
        const u64 at = (u64)row * a.kv.n_head_kv + head_kv;
        const bool writes = block_x() % blocks_kv == 0;
        if (wave() == WAVES - 1) {
            u8* to = page + k_offset(a.kv, head_kv);
            const u32 dim = dim_k(a);
#ifdef KV_Q8
            u8* own = own_k;
            u16* own_scales = own_k_scales;
            rotate_head<DIM_K>(dim, a.k + at * dim, a.rope.k_norm, a.rope, entry, [=](u32 i, bool in, float x) {
                keep_element(own, own_scales, writes, to, dim, slot, i, in, x);
            });
#else
            Kept* own = own_k;
            rotate_head<DIM_K>(dim, a.k + at * dim, a.rope.k_norm, a.rope, entry, [=](u32 i, bool in, float x) {
                keep_element(own, writes, to, dim, slot, i, in, x);
            });
#endif
        } else if (wave() == WAVES - 2) {
            u8* to = page + v_offset(a.kv, head_kv);
            const u32 dim = dim_v(a);
#ifdef KV_Q8
            for (u32 first = 0; first < dim; first += WAVE) {
                const u32 i = first + lane();
                const float x = i < dim ? a.v[at * dim + i] : 0.0f;
                keep_element(own_v, own_v_scales, writes, to, dim, slot, i, i < dim, x);
            }
#else
            for (u32 i = lane(); i < dim; i += WAVE) keep_element(own_v, writes, to, dim, slot, i, true, a.v[at * dim + i]);
#endif
        }
    }
    block_sync_shared();
    float acc[GROUP][8];
#pragma unroll
    for (u32 g = 0; g < GROUP; ++g) {
        for (u32 i = 0; i < 8; ++i) acc[g][i] = 0.0f;
    }
    const u32 teams = teams_of(a), team = t / pieces_v(a), piece = t % pieces_v(a);
    const u32 slot_k = t / LANES_K, part = t % LANES_K;
    for (u32 base = begin; base < end; base += STEP) {
        const bool more = base + STEP < end;
#ifdef BOTH_STEPS
        Step next = now;
        if (more) next.load(a, sequence, head_kv, base + STEP, start, stop);
#else
        const Span next_step(a.kv, sequence, head_kv, base + STEP, start, stop, last);
#endif
        const u32 p = base + slot_k;
        float dot[GROUP];
#pragma unroll
        for (u32 g = 0; g < GROUP; ++g) dot[g] = 0.0f;
        const bool seen = p >= start && p < end;
        if (seen) {
#pragma unroll
            for (u32 i = 0; i < PIECES_LANE; ++i) {
                u32 at = part + i * LANES_K;
                if (at < pieces_k(a)) {
                    const Piece key = either(p >= stop, OWN_PIECE(own_k, at), now.keys[i]);
#ifdef KV_Q8
                    float k[8];
#if DIM_K > 256
                    // The widest heads leave too few registers for scaled
                    // elements: there sums are scaled.
                    const float size = f32_of_f16(key.scale);
                    codes_of(key, k);
#else
                    elements_of(key, k);
#endif
#elif defined(KV_F32)
                    F32x2 k0{key.low.x, key.low.y}, k1{key.low.z, key.low.w};
                    F32x2 k2{key.high.x, key.high.y}, k3{key.high.z, key.high.w};
#else
                    F32x2 k0 = halves(key.x), k1 = halves(key.y), k2 = halves(key.z), k3 = halves(key.w);
#endif
#pragma unroll
                    for (u32 g = 0; g < GROUP; ++g) {
                        const F32x4* w = (const F32x4*)&q[g][at * 8];
                        F32x4 w0 = w[0], w1 = w[1];
#if defined(KV_Q8) && DIM_K > 256
                        float sum = k[0] * w0.x + k[1] * w0.y + k[2] * w0.z + k[3] * w0.w;
                        sum += k[4] * w1.x + k[5] * w1.y + k[6] * w1.z + k[7] * w1.w;
                        dot[g] += size * sum;
#elif defined(KV_Q8)
                        dot[g] += k[0] * w0.x + k[1] * w0.y + k[2] * w0.z + k[3] * w0.w;
                        dot[g] += k[4] * w1.x + k[5] * w1.y + k[6] * w1.z + k[7] * w1.w;
#else
                        dot[g] += k0.x * w0.x + k0.y * w0.y + k1.x * w0.z + k1.y * w0.w;
                        dot[g] += k2.x * w1.x + k2.y * w1.y + k3.x * w1.z + k3.y * w1.w;
#endif
                    }
                }
            }
        }
#pragma unroll
        for (u32 g = 0; g < GROUP; ++g) {
            float s = lanes_sum(dot[g], LANES_K);
            if (FALLS) s -= slopes[g] * apart(p, position);
            else if (cap > 0.0f) s = cap * tanh_of(s / cap);
            if (part == 0) scores[g][slot_k] = seen ? s : NEG_INF;
        }
#ifndef BOTH_STEPS
        // In place of those that have been used: half the registers of a step ahead.
        if (READS_ALWAYS || more) now.load_keys(a, next_step);
#endif
        block_sync_shared();
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
        block_sync_shared();
#pragma unroll
        for (u32 g = 0; g < GROUP; ++g) {
            float r = rescale[g];
            for (u32 i = 0; i < 8; ++i) acc[g][i] *= r;
        }
#pragma unroll
        for (u32 j = 0; j < VALUES_TEAM; ++j) {
            u32 slot = team + j * teams;
            if (team < teams && slot < STEP && base + slot >= start && base + slot < end) {
                const Piece value = either(base + slot >= stop, OWN_PIECE(own_v, piece), now.values[j]);
#ifdef KV_Q8
                float v[8];
                elements_of(value, v);
#pragma unroll
                for (u32 g = 0; g < GROUP; ++g) {
                    const float w = scores[g][slot];
                    for (u32 i = 0; i < 8; ++i) acc[g][i] += w * v[i];
                }
#else
#ifdef KV_F32
                F32x2 v0{value.low.x, value.low.y}, v1{value.low.z, value.low.w};
                F32x2 v2{value.high.x, value.high.y}, v3{value.high.z, value.high.w};
#else
                F32x2 v0 = halves(value.x), v1 = halves(value.y), v2 = halves(value.z), v3 = halves(value.w);
#endif
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
#endif
            }
        }
        // The scores are read until here.
        if (more) block_sync_shared();
#ifdef BOTH_STEPS
        now = next;
#else
        if (READS_ALWAYS || more) now.load_values(a, next_step);
#endif
    }
    // Add up the teams, WAVES of them at a time, in rounds.
    for (u32 first = 0; first < teams; first += WAVES) {
        if (team < teams && team >= first && team < first + WAVES) {
#pragma unroll
            for (u32 g = 0; g < GROUP; ++g) {
                float* to = &sums[((team - first) * GROUP + g) * dim_v(a) + piece * 8];
                for (u32 i = 0; i < 8; ++i) to[i] = first == 0 ? acc[g][i] : to[i] + acc[g][i];
            }
        }
        block_sync();
    }
    const u32 n_rooms = least(teams, WAVES), size = dim_v(a);
    const u64 place = (u64)row * (a.n_head / group) + block_x();
    float* out = a.out + ((u64)row * a.n_head + first_head) * size;
    float* mine = a.partials + (place * a.n_split + split) * group * (size + 2);
    for (u32 i = t; i < group * size; i += THREADS) {
        u32 g = i / size, d = i % size;
        float v = 0.0f;
        for (u32 r = 0; r < n_rooms; ++r) v += sums[(r * GROUP + g) * size + d];
        if (n_parts == 1) {
            out[i] = v / total[g];
        } else {
            mine[g * (size + 2) + 2 + d] = v;
            if (d == 0) {
                mine[g * (size + 2)] = largest[g];
                mine[g * (size + 2) + 1] = total[g];
            }
        }
    }
    if (n_parts == 1) return;

    join_parts<THREADS>(a, place, n_parts, group, size, out);
}

// Of eight heads a block: attention_many_<dim> of rows that fill the device,
// attention_several_<dim> of fewer.
#if defined(RF_CUDA) && defined(DIM) && GROUP == 8 && !defined(KV_Q8) && !defined(KV_F32)
#define NAME2(a, b) a##b
#define NAME(a, b) NAME2(a, b)
#if __CUDA_ARCH__ >= 800
#include "attention_many.h"
#define BY_WARPS(waves, splits, a) attention_by_warps<waves, splits>(a)
#else
#define BY_WARPS(waves, splits, a)
#endif
ENTRY(128, 3) NAME(attention_many_, DIM)(AttentionDecodeArgs a) { BY_WARPS(4, false, a); }
ENTRY(256, 1) NAME(attention_several_, DIM)(AttentionDecodeArgs a) { BY_WARPS(8, true, a); }
#endif
