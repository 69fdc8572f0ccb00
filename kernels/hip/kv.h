// Pages of the key/value store, and rotary embedding.
//
// A page holds PAGE = 32 positions of one sequence for all layers, as f16: [layer]{ K [n_head_kv][PAGE][dim_k], V
// [n_head_kv][PAGE][dim_v] }. Position p of a sequence is slot p % PAGE of its page p / PAGE. A page table is u64 byte offsets
// from `kv_base` (0 for absolute addresses), `table_stride` a sequence.
#pragma once
#include "compat.h"

#define PAGE 32u

struct KvPlace {
    const u8* kv_base;
    const u64* table;       // [sequences][table_stride]
    const u32* positions;   // [rows]: position of each row's token
    const u32* sequences;   // [rows]: its row of the table; null: row i is sequence i
    u32 table_stride;
    u32 n_head_kv;
    u32 dim_k, dim_v;
    u64 layer_offset;       // bytes from a page's start to the layer
};

struct RopePlace {
    // [entries][n_rot]: what an element is multiplied by, and what its partner is multiplied by (sign folded in).
    const float* cos;
    const float* sin;
    const float* q_norm;    // or null: weight [dim_k] of an RMSNorm over each query head
    const float* k_norm;
    float eps;
    u32 n_rot;              // 0: nothing is rotated
    u32 neox;               // 0: pairs (2i, 2i + 1); 1: pairs (i, i + n_rot / 2)
    u32 by_position;        // 0: entry of row i is i; 1: it is the row's position
    u32 first;              // the element of a head that is the first of the n_rot
    u32 reserved;
};

FORCE u32 sequence_of(const KvPlace& kv, u32 row) { return kv.sequences ? kv.sequences[row] : row; }
FORCE u8* page_of(const KvPlace& kv, u32 sequence, u32 page) {
    return (u8*)kv.kv_base + kv.table[(u64)sequence * kv.table_stride + page] + kv.layer_offset;
}
// Where, in a layer of a page, the keys and values of a head begin, in bytes.
FORCE u32 k_offset(const KvPlace& kv, u32 head) { return head * PAGE * kv.dim_k * 2; }
FORCE u32 v_offset(const KvPlace& kv, u32 head) { return PAGE * (kv.n_head_kv * kv.dim_k + head * kv.dim_v) * 2; }

// One head [dim] at `from`, normed where a weight is given and rotated, by one wave; element i = lane + WAVE j is handed to
// `store`, which may write over the head: all loads of all lanes come first. An element's partner is read again: from the
// first-level cache. dim is at most DIM_.
template <u32 DIM_, class Store>
FORCE void rotate_head(u32 dim, const float* from, const float* norm, const RopePlace& rope, u32 entry, Store store) {
    constexpr u32 N = (DIM_ + WAVE - 1) / WAVE;
    const float* cos = rope.cos + (u64)entry * rope.n_rot;
    const float* sin = rope.sin + (u64)entry * rope.n_rot;
    const u32 half = rope.n_rot / 2;
    float x[N], y[N], c[N], s[N];
#pragma unroll
    for (u32 j = 0; j < N; ++j) {
        u32 i = lane() + WAVE * j;
        u32 turn = i - rope.first;  // past n_rot for elements before the first
        bool in = i < dim, turns = in && turn < rope.n_rot;
        u32 partner = turns ? rope.first + (rope.neox ? (turn < half ? turn + half : turn - half) : turn ^ 1) : 0;
        x[j] = in ? from[i] : 0.0f;
        y[j] = from[partner];
        c[j] = turns ? cos[turn] : 1.0f;
        s[j] = turns ? sin[turn] : 0.0f;
        if (norm) y[j] *= norm[partner];
    }
    float factor = 1.0f;
    if (norm) {
        float squares = 0.0f;
#pragma unroll
        for (u32 j = 0; j < N; ++j) squares += x[j] * x[j];
        factor = 1.0f / sqrt_of(wave_sum(squares) / (float)dim + rope.eps);
#pragma unroll
        for (u32 j = 0; j < N; ++j) {
            u32 i = lane() + WAVE * j;
            x[j] *= factor * (i < dim ? norm[i] : 0.0f);
            y[j] *= factor;
        }
    }
    wave_sync();
#pragma unroll
    for (u32 j = 0; j < N; ++j) {
        u32 i = lane() + WAVE * j;
        if (i < dim) store(i, x[j] * c[j] + y[j] * s[j]);
    }
}
