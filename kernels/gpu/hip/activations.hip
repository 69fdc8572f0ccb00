// Rows of f32 made ready for a product: norm, sum with the residual or a gated unit on the way in;
// f32, f16, two f16 or 8 bits on the way out.
//
//   norm:      y = x / sqrt(mean(x^2) + eps) * weight                     (Zhang & Sennrich 2019)
//   add_norm:  x += factor * other, stored; then as norm
//   gate:      y = act(x) * other; without other, act(x)
//   plain:     y = x
//   add:       x += factor * other, stored, y = x; with no output this is the residual sum alone
//
// Norms of groups of a row are those of as many shorter rows: `weight` has weight_rows rows, row i
// uses row i % weight_rows. Layout: x and other [rows][cols] f32; out [rows][cols] f32 or f16, or 8
// bits as activations.h says: bytes [rows][2][NB][16] (cols a multiple of 32) and scales
// [rows][NB]; two f16 (f16_pair.h): the first [rows][cols], the second [rows][cols] at scales; f16
// by columns (cols a multiple of 128, rows that are normed as a whole): as matmat_wgmma.h says.
// f16: finite values beyond its range become its largest, since one infinity would make a whole row
// of products NaN. A gated unit is what gets that large in sound models (a product of two, 1e4 and
// more), made here or, as plain rows, by what a plan did before: as f16 both are GATED_SCALE times
// what they are, which the product's factor takes back, so values up to 4e6 are exact to f16's 11
// bits, and those below 0.004 to 2e-6.
// Geometry: a block of THREADS a row, or, without a norm, each SPAN elements of it. Bound by
// latency in decode, by memory in prefill: each row is read twice at most (the second time from the
// first-level cache or, its first KEPT * SPAN elements, from registers) and written once.
// Entries: activations_<plain|norm|add_norm|gate|add>_<f32|f16|q8>,
// activations_<plain|norm|gate>_f16_pair,
// activations_<plain|norm|gate>_f16_columns, activations_add_none.
#include "compat.h"
#include "act.h"
#include "activations.h"
#include "f16_pair.h"

#define THREADS 256

struct ActivationsArgs {
    float* x;
    const float* other;   // or null
    const float* weight;  // or null: 1
    void* out;
    void* scales;  // of 8 bits, or the second of two f16
    float eps;
    u32 cols;
    float factor;
    u32 weight_rows;
    ActSpec act;
    u32 rows;
    u32 reserved;
};

enum In { PLAIN, NORM, ADD_NORM, GATE, ADD };
enum Out { TO_F32, TO_F16, TO_F16_PAIR, TO_F16_COLUMNS, TO_Q8, TO_NONE };

// Elements that the threads of a block take at once: 8 neighbours each.
#define SPAN (THREADS * 8)
#define KEPT 2
#define GATED_SCALE 0.015625f

struct Eight {
    float v[8];
};

// Elements i to i + 7 of a row (i a multiple of 8), zeros past its end. Rows of a multiple of 8
// are read 16 bytes at a time.
FORCE Eight load8(const float* row, u32 i, u32 cols) {
    Eight e;
    if (cols % 8 == 0) {
        F32x4 x = F32x4{0.0f, 0.0f, 0.0f, 0.0f}, y = x;
        if (i < cols) {
            x = *(const F32x4*)(row + i);
            y = *(const F32x4*)(row + i + 4);
        }
        return Eight{{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}};
    }
#pragma unroll
    for (u32 j = 0; j < 8; ++j) e.v[j] = i + j < cols ? row[i + j] : 0.0f;
    return e;
}
FORCE void store8(float* row, u32 i, u32 cols, const Eight& e) {
    if (cols % 8 == 0) {
        if (i < cols) {
            *(F32x4*)(row + i) = F32x4{e.v[0], e.v[1], e.v[2], e.v[3]};
            *(F32x4*)(row + i + 4) = F32x4{e.v[4], e.v[5], e.v[6], e.v[7]};
        }
        return;
    }
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        if (i + j < cols) row[i + j] = e.v[j];
    }
}
FORCE void store8(u16* row, u32 i, u32 cols, const Eight& e) {
    u32 two[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) two[j] = pack_f16(in_f16(e.v[2 * j]), in_f16(e.v[2 * j + 1]));
    if (cols % 8 == 0) {
        if (i < cols) *(U32x4*)(row + i) = U32x4{two[0], two[1], two[2], two[3]};
        return;
    }
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        if (i + j < cols) row[i + j] = (u16)(two[j / 2] >> (16 * (j % 2)));
    }
}

// By columns: four pairs of numbers, each of which has its place beside those of three other
// blocks.
FORCE void store8_columns(const ActivationsArgs& a, u32 i, const Eight& e) {
    const u32 tokens = (a.rows + 7) / 8 * 8;
    u32* to = (u32*)a.out + ((u64)(i / 128 * 16 + i % 32 / 2) * tokens + block_x()) * 4 + i / 32 % 4;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
        const u32 first = j / 2 * 4 + j % 2;
        to[j * tokens * 4] = pack_f16(in_f16(e.v[first]), in_f16(e.v[first + 2]));
    }
}

// What is made of 8 elements; a sum is stored on the way.
template <In IN>
FORCE Eight read8(const ActivationsArgs& a, u64 row, u32 i) {
    Eight e = load8(a.x + row, i, a.cols);
    if (IN == ADD_NORM || IN == ADD) {
        const Eight other = load8(a.other + row, i, a.cols);
        float factor = a.factor;
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__) || defined(__gfx9_4_generic__)
        // In a vector register: of a scalar pair AMD's simulator takes the lower half for both
        // products of a packed one.
        asm("" : "+v"(factor));
#endif
#pragma unroll
        for (u32 j = 0; j < 8; ++j) e.v[j] = multiply_add(factor, other.v[j], e.v[j]);
    }
    if (IN == GATE && a.other) {
        const Eight other = load8(a.other + row, i, a.cols);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) e.v[j] = gate_of(a.act, e.v[j], other.v[j]);
    } else if (IN == GATE) {
#pragma unroll
        for (u32 j = 0; j < 8; ++j) e.v[j] = act_of(a.act, e.v[j]);
    }
    if (IN == ADD_NORM || IN == ADD) store8(a.x + row, i, a.cols, e);
    return e;
}
FORCE float squares_of(const Eight& e) {
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < 8; ++j) sum += e.v[j] * e.v[j];
    return sum;
}

// Every lane of a wave gets here, also with i past the end.
template <In IN, Out OUT>
FORCE void write8(const ActivationsArgs& a, u64 row, u32 i, const Eight& e) {
    if (OUT == TO_F32) store8((float*)a.out + row, i, a.cols, e);
    if (OUT == TO_F16 || OUT == TO_F16_PAIR || OUT == TO_F16_COLUMNS) {
        Eight scaled = e;
        if (IN == GATE || IN == PLAIN) {
#pragma unroll
            for (u32 j = 0; j < 8; ++j) scaled.v[j] *= GATED_SCALE;
        }
        if (OUT == TO_F16_COLUMNS) {
            if (i < a.cols) store8_columns(a, i, scaled);
        } else {
            store8((u16*)a.out + row, i, a.cols, scaled);
        }
        if (OUT == TO_F16_PAIR) {
#pragma unroll
            for (u32 j = 0; j < 8; ++j) scaled.v[j] = low_part(scaled.v[j]);
            store8((u16*)a.scales + row, i, a.cols, scaled);
        }
    }
    if (OUT == TO_Q8) {
        const u32 nb = a.cols / 32;
        float d, sum;
        U32x2 bytes = quantize8(F32x4{e.v[0], e.v[1], e.v[2], e.v[3]}, F32x4{e.v[4], e.v[5], e.v[6], e.v[7]}, d, sum);
        if (i < a.cols) {
            u32 c = i / 32, quarter = i / 8 % 4;
            U32x2* words = (U32x2*)a.out + row / 8;
            words[(quarter < 2 ? c : nb + c) * 2 + quarter % 2] = bytes;
            if (quarter == 0) ((F32x2*)a.scales + (u64)block_x() * nb)[c] = F32x2{d, sum};
        }
    }
}

template <In IN, Out OUT>
FORCE void activations(const ActivationsArgs& a) {
    let_next_start();
    wait_for_inputs();
    const u64 row = (u64)block_x() * a.cols;
    if (IN != NORM && IN != ADD_NORM) {
        const u32 i = block_y() * SPAN + thread_x() * 8;
        write8<IN, OUT>(a, row, i, read8<IN>(a, row, i));
        return;
    }
    __shared__ float room[1024 / WAVE + 1];
    Eight kept[KEPT];
    float squares = 0.0f;
#pragma unroll
    for (u32 k = 0; k < KEPT; ++k) {
        kept[k] = read8<IN>(a, row, k * SPAN + thread_x() * 8);
        squares += squares_of(kept[k]);
    }
    for (u32 base = KEPT * SPAN; base < a.cols; base += SPAN) squares += squares_of(read8<IN>(a, row, base + thread_x() * 8));
    const float factor = 1.0f / sqrt_of(block_sum(squares, THREADS, room) / (float)a.cols + a.eps);
    const float* weights = a.weight ? a.weight + (u64)(block_x() % a.weight_rows) * a.cols : nullptr;
    auto write = [&](u32 i, const Eight& e) {
        Eight weight = Eight{{1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}};
        if (weights) weight = load8(weights, i, a.cols);
        Eight y;
#pragma unroll
        for (u32 j = 0; j < 8; ++j) y.v[j] = e.v[j] * (factor * weight.v[j]);
        write8<IN, OUT>(a, row, i, y);
    };
#pragma unroll
    for (u32 k = 0; k < KEPT; ++k) {
        if (k * SPAN < a.cols) write(k * SPAN + thread_x() * 8, kept[k]);
    }
    // From here on x holds a sum already; a thread reads what it has written itself.
    for (u32 base = KEPT * SPAN; base < a.cols; base += SPAN) {
        const u32 i = base + thread_x() * 8;
        write(i, load8(a.x + row, i, a.cols));
    }
}

#define OUTS(name, in)                                                                                     \
    ENTRY(THREADS, 1) activations_##name##_f32(ActivationsArgs a) { activations<in, TO_F32>(a); }          \
    ENTRY(THREADS, 1) activations_##name##_f16(ActivationsArgs a) { activations<in, TO_F16>(a); }          \
    ENTRY(THREADS, 1) activations_##name##_q8(ActivationsArgs a) { activations<in, TO_Q8>(a); }
#define PAIR(name, in) \
    ENTRY(THREADS, 1) activations_##name##_f16_pair(ActivationsArgs a) { activations<in, TO_F16_PAIR>(a); }
OUTS(plain, PLAIN)
OUTS(norm, NORM)
OUTS(add_norm, ADD_NORM)
OUTS(gate, GATE)
OUTS(add, ADD)
PAIR(plain, PLAIN)
PAIR(norm, NORM)
PAIR(gate, GATE)
#define COLUMNS(name, in) \
    ENTRY(THREADS, 1) activations_##name##_f16_columns(ActivationsArgs a) { activations<in, TO_F16_COLUMNS>(a); }
COLUMNS(plain, PLAIN)
COLUMNS(norm, NORM)
COLUMNS(gate, GATE)
ENTRY(THREADS, 1) activations_add_none(ActivationsArgs a) { activations<ADD, TO_NONE>(a); }
