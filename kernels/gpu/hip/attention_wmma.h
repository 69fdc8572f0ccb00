// Prefill attention by AMD's matrix instructions: WMMA on gfx11 and gfx12, MFMA on gfx908 and later
// gfx9. Included by attention_prefill.hip.
//
// 64 entries a block, 16 queries (gfx9: 32) a wave; a step is a page. Scores are computed
// transposed, S^T = K Q^T, and so are the outputs, O^T = V^T P^T: then a lane has one query (its
// column, lane % 16) in both, rescaling is by a number of its own, and weights are, converted to
// f16, the second operand of the next product as they lie. Shared memory: a page of K as it is and
// one of V transposed, rows padded by 16 bytes; the next page travels in registers meanwhile where
// there are enough of them. Fragments are those of wmma.h.
//
// A lane of gfx11 and gfx12 has 256 registers. Of heads of 256, outputs are 128 of them, queries 64
// (on gfx11, which takes operands twice, those of a lane's half of the wave), so values travel
// after the keys, through the same 32.
#pragma once
#include "wmma.h"

#define M_BLOCK 64u

// Blocks of 16 queries a wave.
#define BLOCKS (M_BLOCK / 16 / (THREADS / WAVE))

// An operand at a place in shared memory or of f32 values.
FORCE Operand operand(const u16* at) {
    OperandWords o;
#pragma unroll
    for (u32 i = 0; i < OPERAND_WORDS / 2; ++i) {
        const rf_u32x2 two = ((const rf_u32x2*)at)[i];
        o.w[2 * i] = two.x;
        o.w[2 * i + 1] = two.y;
    }
    return o.v;
}
// An operand's words that no other lane has: elements 8 (lane / 16) + 0..7 on gfx11, where
// lane ^ 16 has the others, and all elsewhere.
#if defined(__GFX11__)
#define SHARE_WORDS 4u
FORCE u32 share_at() { return lane() / 16 * 8; }
#else
#define SHARE_WORDS OPERAND_WORDS
FORCE u32 share_at() { return operand_at(); }
#endif
struct Share {
    u32 w[SHARE_WORDS];
};
FORCE Operand operand(const Share& share) {
    OperandWords o;
#pragma unroll
    for (u32 i = 0; i < SHARE_WORDS; ++i) {
#if defined(__GFX11__)
        const bool upper = lane() >= 16;
        const u32 mine = share.w[i], other = row_swap(mine);
        o.w[i] = upper ? other : mine;
        o.w[4 + i] = upper ? mine : other;
#else
        o.w[i] = share.w[i];
#endif
    }
    return o.v;
}
// The weights of 16 keys, as the product of K left them, as an operand.
FORCE Operand operand(const Result& p) {
    Share share;
#pragma unroll
    for (u32 i = 0; i < SHARE_WORDS; ++i) share.w[i] = pack_f16(p[2 * i], p[2 * i + 1]);
    return operand(share);
}
// Over the lanes of one query.
FORCE float query_max(float v) {
#pragma unroll
    for (u32 x = 16; x < WAVE; x *= 2) v = max_of(v, shuffle_xor(v, x));
    return v;
}
FORCE float query_sum(float v) {
#pragma unroll
    for (u32 x = 16; x < WAVE; x *= 2) v += shuffle_xor(v, x);
    return v;
}

#define CHUNKS (WIDE / 8)
// Chunks of a row as it is stored; behind them are zeros.
#define STORED (DIM / 8)
// 16-byte chunks of K that a thread brings, and pairs of rows' chunks of V.
#define K_EACH ((PAGE * CHUNKS + THREADS - 1) / THREADS)
#define V_EACH ((PAGE / 2 * CHUNKS + THREADS - 1) / THREADS)
#define AHEAD (DIM <= 128)
// Whether a lane has 256 registers and no more (of gfx9 it has 512, accumulators among them), and
// whether values travel after the keys for that.
#if defined(__GFX11__) || defined(__GFX12__)
#define FEW_REGISTERS 1
#else
#define FEW_REGISTERS 0
#endif
#define NARROW (FEW_REGISTERS && DIM > 128)
// Whether queries are kept without what another lane has too: gfx11's operands take twice the
// registers.
#if defined(__GFX11__) && DIM >= 128
typedef Share Query;
FORCE Query query_of(const Share& share) { return share; }
#else
typedef Operand Query;
FORCE Query query_of(const Share& share) { return operand(share); }
FORCE Operand operand(const Query& query) { return query; }
#endif

// A chunk of 8 elements as it travels.
#ifdef KV_Q8
typedef Piece Chunk;
FORCE Chunk chunk_of(const u8* head, u32 slot, u32 at) { return piece_of(head, DIM, slot, at); }
FORCE rf_u32x4 words_of(Chunk c) {
    const U32x4 x = halves_of(c);
    return rf_u32x4{x.x, x.y, x.z, x.w};
}
#else
typedef rf_u32x4 Chunk;
FORCE Chunk chunk_of(const u8* head, u32 slot, u32 at) {
    if (WIDE != DIM && at >= STORED) return Chunk{0, 0, 0, 0};
    return ((const rf_u32x4*)head)[slot * STORED + at];
}
FORCE rf_u32x4 words_of(Chunk c) { return c; }
#endif

// Where the chunks of a thread lie in a page.
struct Chunks {
    u32 t;

    // Two neighbouring slots.
    FORCE u32 value_pair() const { return t % (PAGE / 2); }
#if FEW_REGISTERS
    // A thread's number is taken anew for each page of wide heads: what follows from it would be
    // kept in registers. That it is less than THREADS the compiler cannot know; where each thread
    // has a chunk there must be no branch, so that loads stay together.
    FORCE Chunks() : t(NARROW ? made_anew(thread_x()) % THREADS : thread_x()) {}
    // As a sum with a constant of each i where that can be, which then is part of an instruction.
    FORCE u32 key_slot(u32 i) const {
        return THREADS % CHUNKS == 0 ? t / CHUNKS + i * (THREADS / CHUNKS) : (i * THREADS + t) / CHUNKS;
    }
    FORCE u32 key_chunk(u32 i) const { return THREADS % CHUNKS == 0 ? t % CHUNKS : (i * THREADS + t) % CHUNKS; }
    FORCE bool has_key(u32 i) const { return (i + 1) * THREADS <= PAGE * CHUNKS || i * THREADS + t < PAGE * CHUNKS; }
    FORCE u32 value_chunk(u32 i) const { return t / (PAGE / 2) + i * (THREADS / (PAGE / 2)); }
    FORCE bool has_value(u32 i) const { return (i + 1) * THREADS <= PAGE / 2 * CHUNKS || value_chunk(i) < CHUNKS; }
#else
    FORCE Chunks() : t(thread_x()) {}
    FORCE u32 key_slot(u32 i) const { return (i * THREADS + t) / CHUNKS; }
    FORCE u32 key_chunk(u32 i) const { return (i * THREADS + t) % CHUNKS; }
    FORCE bool has_key(u32 i) const { return i * THREADS + t < PAGE * CHUNKS; }
    FORCE u32 value_chunk(u32 i) const { return (i * THREADS + t) / (PAGE / 2); }
    FORCE bool has_value(u32 i) const { return value_chunk(i) < CHUNKS; }
#endif
};

// A page on its way to shared memory.
struct Travelling {
    Chunk k[K_EACH], v[V_EACH][2];

    FORCE void load_keys(const PrefillBlock& block, u32 page) {
        const u8* keys = block.page(page) + k_offset(block.a.kv, block.head_kv);
        const Chunks own;
#pragma unroll
        for (u32 i = 0; i < K_EACH; ++i) {
            if (own.has_key(i)) k[i] = chunk_of(keys, own.key_slot(i), own.key_chunk(i));
        }
    }
    FORCE void load_values(const PrefillBlock& block, u32 page) {
        const u8* values = block.page(page) + v_offset(block.a.kv, block.head_kv);
        const Chunks own;
#pragma unroll
        for (u32 i = 0; i < V_EACH; ++i) {
            if (own.has_value(i)) {
                v[i][0] = chunk_of(values, 2 * own.value_pair(), own.value_chunk(i));
                v[i][1] = chunk_of(values, 2 * own.value_pair() + 1, own.value_chunk(i));
            }
        }
    }
    FORCE void load(const PrefillBlock& block, u32 page) {
        load_keys(block, page);
        load_values(block, page);
    }
    FORCE void store_keys(u16 (*keys)[WIDE + 8]) const {
        const Chunks own;
#pragma unroll
        for (u32 i = 0; i < K_EACH; ++i) {
            if (own.has_key(i)) *(rf_u32x4*)&keys[own.key_slot(i)][own.key_chunk(i) * 8] = words_of(k[i]);
        }
    }
    // Slots from `n_slots` on may hold anything, NaN too: their values become
    // zeros, as their weights do.
    FORCE void store_values(u16 (*values)[PAGE + 8], u32 n_slots) const {
        const Chunks own;
        const u32 pair = own.value_pair();
        const u32 mask = (2 * pair < n_slots ? 0xffffu : 0) | (2 * pair + 1 < n_slots ? 0xffff0000u : 0);
#pragma unroll
        for (u32 i = 0; i < V_EACH; ++i) {
            const u32 chunk = own.value_chunk(i);
            if (own.has_value(i)) {
                const rf_u32x4 even = words_of(v[i][0]), odd = words_of(v[i][1]);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    const u32 x = even[j], y = odd[j];
                    *(u32*)&values[chunk * 8 + 2 * j][2 * pair] = ((x & 0xffffu) | (y << 16)) & mask;
                    *(u32*)&values[chunk * 8 + 2 * j + 1][2 * pair] = ((x >> 16) | (y & 0xffff0000u)) & mask;
                }
            }
        }
    }
};

FORCE void attention_prefill(const AttentionPrefillArgs& a) {
    __shared__ alignas(16) u16 keys[PAGE][WIDE + 8];
    __shared__ alignas(16) u16 values[WIDE][PAGE + 8];
    const PrefillBlock block(a, M_BLOCK);
    if (block.m0 >= block.entries) return;
    const u32 query = lane() % 16, group = lane() / 16, m = block.m0 + wave() * 16 * BLOCKS;
    const u32 n_visible = block.behind(block.position(block.m0 + M_BLOCK - 1));
    const u32 n_pages = (n_visible + PAGE - 1) / PAGE;
    const float factor = a.scale * 1.44269504088896341f, cap = cap_of(a.softcap);
    Travelling next;
    const u32 first_page = block.start(block.position(block.m0)) / PAGE;
    if (AHEAD) next.load(block, first_page);
    Query q[BLOCKS][WIDE / 16];
    Result out[BLOCKS][WIDE / 16];
    float largest[BLOCKS], total[BLOCKS];
    u32 behind[BLOCKS], start[BLOCKS];
#ifdef ALIBI
    float slope[BLOCKS];
    u32 own[BLOCKS];
#endif
#pragma unroll
    for (u32 b = 0; b < BLOCKS; ++b) {
        const float* from = a.q + block.element(m + 16 * b + query) + share_at();
        const u32 position = block.position(m + 16 * b + query);
        behind[b] = block.behind(position);
        largest[b] = block.first_largest(m + 16 * b + query);
        total[b] = group == 0 ? block.first_total() : 0.0f;
        start[b] = block.start(position);
#ifdef ALIBI
        slope[b] = block.slope(m + 16 * b + query);
        own[b] = position;
#endif
#pragma unroll
        for (u32 d = 0; d < WIDE / 16; ++d) {
            Share share;
#pragma unroll
            for (u32 i = 0; i < SHARE_WORDS; ++i) {
                const bool stored = WIDE == DIM || d * 16 + share_at() + 2 * i < DIM;
                share.w[i] = stored ? pack_f16(from[d * 16 + 2 * i] * factor, from[d * 16 + 2 * i + 1] * factor) : 0;
            }
            q[b][d] = query_of(share);
            // Not all of it at a time, as f32.
            if (NARROW && d % 4 == 3) __builtin_amdgcn_sched_barrier(0);
            out[b][d] = Result(0.0f);
        }
    }
    for (u32 page = first_page; page < n_pages; ++page) {
        if (!AHEAD) next.load_keys(block, page);
        if (!AHEAD && !NARROW) next.load_values(block, page);
        block_sync();
        next.store_keys(keys);
        if (NARROW) next.load_values(block, page);
        next.store_values(values, n_visible - page * PAGE);
        block_sync();
        if (AHEAD) next.load(block, least(page + 1, n_pages - 1));
        const Result zeros = no_sum();
        Result s[BLOCKS][PAGE / 16];
#pragma unroll
        for (u32 n = 0; n < PAGE / 16; ++n) {
#pragma unroll
            for (u32 b = 0; b < BLOCKS; ++b) s[b][n] = zeros;
        }
#if FEW_REGISTERS
        // All keys by one part of the queries, which gfx11 has to make for it.
#pragma unroll
        for (u32 d = 0; d < WIDE / 16; ++d) {
            Operand x[BLOCKS];
#pragma unroll
            for (u32 b = 0; b < BLOCKS; ++b) x[b] = operand(q[b][d]);
#pragma unroll
            for (u32 n = 0; n < PAGE / 16; ++n) {
                const Operand k = operand(&keys[n * 16 + operand_row()][d * 16 + operand_at()]);
#pragma unroll
                for (u32 b = 0; b < BLOCKS; ++b) s[b][n] = multiply(k, x[b], s[b][n]);
            }
        }
#else
#pragma unroll
        for (u32 n = 0; n < PAGE / 16; ++n) {
#pragma unroll
            for (u32 d = 0; d < WIDE / 16; ++d) {
                const Operand k = operand(&keys[n * 16 + operand_row()][d * 16 + operand_at()]);
#pragma unroll
                for (u32 b = 0; b < BLOCKS; ++b) s[b][n] = multiply(k, q[b][d], s[b][n]);
            }
        }
#endif
        Operand w[BLOCKS][PAGE / 16];
#pragma unroll
        for (u32 b = 0; b < BLOCKS; ++b) {
            float x = largest[b];
#pragma unroll
            for (u32 n = 0; n < PAGE / 16; ++n) {
#pragma unroll
                for (u32 i = 0; i < RESULTS; ++i) {
                    const u32 p = page * PAGE + n * 16 + group * RESULTS + i;
                    if (cap > 0.0f) s[b][n][i] = capped(s[b][n][i], cap);
#ifdef ALIBI
                    s[b][n][i] -= slope[b] * apart(p, own[b]);
#endif
                    s[b][n][i] = p >= behind[b] || p < start[b] ? NEG_INF : s[b][n][i];
                    x = max_of(x, s[b][n][i]);
                }
            }
            x = query_max(x);
            if (x > largest[b] + LAG) {
                const float rescale = exp2_of(largest[b] - x);
                largest[b] = x;
                total[b] *= rescale;
#pragma unroll
                for (u32 d = 0; d < WIDE / 16; ++d) out[b][d] *= rescale;
            }
            const float base = base_of(largest[b]);
#pragma unroll
            for (u32 n = 0; n < PAGE / 16; ++n) {
#pragma unroll
                for (u32 i = 0; i < RESULTS; ++i) {
                    s[b][n][i] = exp2_of(s[b][n][i] - base);
                    total[b] += s[b][n][i];
                }
                w[b][n] = operand(s[b][n]);
            }
        }
#pragma unroll
        for (u32 d = 0; d < WIDE / 16; ++d) {
#pragma unroll
            for (u32 n = 0; n < PAGE / 16; ++n) {
                const Operand v = operand(&values[d * 16 + operand_row()][n * 16 + operand_at()]);
#pragma unroll
                for (u32 b = 0; b < BLOCKS; ++b) out[b][d] = multiply(v, w[b][n], out[b][d]);
            }
        }
    }
#pragma unroll
    for (u32 b = 0; b < BLOCKS; ++b) {
        const float share = 1.0f / query_sum(total[b]);
        const u32 e = m + 16 * b + query;
        if (e < block.entries) {
            float* to = a.out + block.element(e) + group * RESULTS;
#pragma unroll
            for (u32 d = 0; d < WIDE / 16; ++d) {
#pragma unroll
                for (u32 i = 0; i < RESULTS; i += 4) {
                    if (WIDE != DIM && d * 16 + group * RESULTS + i >= DIM) continue;
                    *(F32x4*)(to + d * 16 + i) =
                        F32x4{out[b][d][i] * share, out[b][d][i + 1] * share, out[b][d][i + 2] * share, out[b][d][i + 3] * share};
                }
            }
        }
    }
}
