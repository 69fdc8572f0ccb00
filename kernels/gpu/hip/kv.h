// Pages of the key/value store, and rotary embedding.
//
// A page holds PAGE = 32 positions of one sequence for all layers: [layer]{ K [n_head_kv], V
// [n_head_kv] }, and of a head f16 [PAGE][dim], or in units with KV_F32 f32 [PAGE][dim], or in
// units with KV_Q8 i8 [PAGE][dim] and behind them scales, f16 [PAGE][dim / 32]. Position p of a
// sequence is slot p % PAGE of its page p / PAGE. A page table is u64 byte offsets from `kv_base`
// (0 for absolute addresses), `table_stride` a sequence.
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
    // [entries][n_rot]: what an element is multiplied by, and what its partner is
    // multiplied by (sign folded in).
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
#ifdef RF_AMD
// The same of a sequence and a page that all lanes have in common, of a table that the launch does
// not change: a scalar load. One by lanes comes after all loads that are under way, and what is
// read at its address waits for them too. The compiler must not know where the page came from: it
// makes a load by lanes of a choice between two.
FORCE const u8* page_of_all(const KvPlace& kv, u32 sequence, u32 page) {
    typedef const __attribute__((address_space(4))) u64* Entry;
    u64 offset = *(Entry)(u64)(kv.table + (u64)sequence * kv.table_stride + page);
    asm("" : "+s"(offset));
    return kv.kv_base + offset + kv.layer_offset;
}
#endif
// Bytes of a head of a page.
#ifdef KV_Q8
FORCE u32 head_bytes(u32 dim) { return PAGE * dim + PAGE * dim / 16; }
#elif defined(KV_F32)
FORCE u32 head_bytes(u32 dim) { return PAGE * dim * 4; }
#else
FORCE u32 head_bytes(u32 dim) { return PAGE * dim * 2; }
#endif
// Where, in a layer of a page, the keys and values of a head begin, in bytes.
FORCE u32 k_offset(const KvPlace& kv, u32 head) { return head * head_bytes(kv.dim_k); }
FORCE u32 v_offset(const KvPlace& kv, u32 head) { return kv.n_head_kv * head_bytes(kv.dim_k) + head * head_bytes(kv.dim_v); }

#ifdef KV_Q8
// One element as it is stored, and the scale of its block.
struct Code {
    u8 code;
    u16 scale;
};
// Of element i of a head, i a multiple of 32 more than the lane: neighbours have a block together.
// As kv_append of the host has it: as whole numbers absolute values are in their own order,
// infinity behind all and NaN behind that; a scale that is not finite is read as NaN.
FORCE Code code_of(float x) {
    u32 most = bits_of_f32(x) & 0x7fffffffu;
#pragma unroll
    for (u32 m = 16; m > 0; m /= 2) {
        const u32 other = shuffle_xor(most, m);
        most = most > other ? most : other;
    }
    const u16 scale = f16_of_f32(f32_of_bits(most) / 127.0f);
    const float size = f32_of_f16(scale), y = x * (size > 0.0f ? 1.0f / size : 0.0f);
    const float inside = y > -127.0f ? (y < 127.0f ? y : 127.0f) : -127.0f;
    // 1.5 * 2^23 leaves no bit after the point: to nearest even.
    return Code{(u8)bits_of_f32(inside + 12582912.0f), scale};
}
FORCE u16* scales_of(u8* head, u32 dim) { return (u16*)(head + PAGE * dim); }

// Eight elements as they are stored, the at-th of a slot, with their scale.
struct Piece {
    u32 low, high;
    u32 scale;
};
FORCE Piece piece_of(const u8* head, u32 dim, u32 slot, u32 at) {
    const U32x2 codes = ((const U32x2*)head)[slot * (dim / 8) + at];
    return Piece{codes.x, codes.y, ((const u16*)(head + PAGE * dim))[slot * (dim / 32) + at / 4]};
}
FORCE void codes_of(Piece piece, float (&x)[8]) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        x[i] = (float)(i8)(piece.low >> (8 * i));
        x[4 + i] = (float)(i8)(piece.high >> (8 * i));
    }
}
FORCE void elements_of(Piece piece, float (&x)[8]) {
    const float size = f32_of_f16(piece.scale);
    codes_of(piece, x);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) x[i] *= size;
}
// Rounded to f16.
FORCE U32x4 halves_of(Piece piece) {
    float x[8];
    elements_of(piece, x);
    return U32x4{pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]), pack_f16(x[6], x[7])};
}
#endif

// Writes element i = lane + a multiple of WAVE of a slot of a head; all lanes come here, those past
// the head with `in` false.
FORCE void store_element(u8* head, u32 dim, u32 slot, u32 i, bool in, float x) {
#ifdef KV_Q8
    const Code c = code_of(x);
    if (in) head[slot * dim + i] = c.code;
    if (in && i % 32 == 0) scales_of(head, dim)[(slot * dim + i) / 32] = c.scale;
#elif defined(KV_F32)
    if (in) ((float*)head)[slot * dim + i] = x;
#else
    if (in) ((u16*)head)[slot * dim + i] = f16_of_f32(x);
#endif
}

// The element that one turns with, both counted from the first that turns.
FORCE u32 partner_of(const RopePlace& rope, u32 turn) {
    const u32 half = rope.n_rot / 2;
#ifdef ANY
    leave_vcc_hi();
#endif
    return rope.neox ? (turn < half ? turn + half : turn - half) : turn ^ 1;
}

// One head [dim] at `from`, normed where a weight is given and rotated, by one wave; element i =
// lane + WAVE j is handed to `store(i, i < dim, x)` by all lanes, which may write over the head:
// all loads of all lanes come first. An element's partner is read again: from the first-level
// cache. dim is at most DIM_.
template <u32 DIM_, class Store>
FORCE void rotate_head(u32 dim, const float* from, const float* norm, const RopePlace& rope, u32 entry, Store store) {
    constexpr u32 N = (DIM_ + WAVE - 1) / WAVE;
    const float* cos = rope.cos + (u64)entry * rope.n_rot;
    const float* sin = rope.sin + (u64)entry * rope.n_rot;
    float x[N], y[N], c[N], s[N];
#pragma unroll
    for (u32 j = 0; j < N; ++j) {
        u32 i = lane() + WAVE * j;
        u32 turn = i - rope.first;  // past n_rot for elements before the first
        bool in = i < dim, turns = in && turn < rope.n_rot;
        u32 partner = turns ? rope.first + partner_of(rope, turn) : 0;
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
        store(i, i < dim, x[j] * c[j] + y[j] * s[j]);
    }
}
