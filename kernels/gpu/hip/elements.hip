// Rows of f32 changed element by element, gathered by columns, and routed rows summed.
//
//   scale:           x *= factor, times by[0] where there is one
//   soft_cap:        x = factor * tanh(x / factor)
//   add_gated:       x[t] += sigmoid(by[t]) * y[t]
//   add_weighted:    x[t][i] += by[i] * y[t][i]
//   gate_heads:      x[t][i] *= act(by[t][i / span]), a factor for each head of span elements
//   position_scale:  x[t] *= 1 + factor * ln(1 + floor(positions[t] / span))
//   add_table:       x[t] += y[positions[t]], or y[0] where there are no positions
//   columns:         row t of out has for each group h its parts one after another,
//                    part.x[t][part.first + h part.stride ..][.. width]
//   product_transposed: out[t][r] = sum_k x[t][k] weight[k][r]
//   combine:         out[t] = sum_s weights[t][s] y[t n_used + s], or out[t] += that
//
// Geometry: grid (ceil(cols / THREADS), rows), a thread an element; of product_transposed a thread
// PRODUCT_ROWS elements of a column. Bound by memory.
// Entries: scale, soft_cap, add_gated, add_weighted, gate_heads, position_scale, add_table,
// columns, combine, product_transposed.
#include "compat.h"
#include "act.h"

#define THREADS 256

struct ElementsArgs {
    float* x;
    const float* y;
    const float* by;
    const u32* positions;
    float factor;
    u32 span;
    u32 cols;
    u32 act;  // ACT_*
};

struct ColumnPlace {
    const float* x;
    u32 cols;  // elements of a row of x
    u32 first, stride, width;
};

struct ColumnsArgs {
    float* out;
    u32 n_group;
    u32 group_width;  // the sum of the parts' widths
    ColumnPlace parts[4];
};

struct CombineArgs {
    const float* y;
    const float* weights;
    float* out;
    u32 cols;
    u32 n_used;
    u32 add;  // 0 store, 1 add to out
    u32 reserved;
};

#define PRODUCT_ROWS 8

struct ProductTransposedArgs {
    const float* x;       // [rows][n_in]
    const float* weight;  // [n_in][cols]
    float* out;           // [rows][cols]
    u32 n_in;
    u32 cols;
    u32 rows;
    u32 reserved;
};

FORCE u32 element() { return block_x() * THREADS + thread_x(); }

ENTRY(THREADS, 1) scale(ElementsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element();
    const float factor = a.by ? a.factor * a.by[0] : a.factor;
    if (i < a.cols) a.x[(u64)block_y() * a.cols + i] *= factor;
}
ENTRY(THREADS, 1) soft_cap(ElementsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element();
    if (i >= a.cols) return;
    float* x = a.x + (u64)block_y() * a.cols + i;
    *x = a.factor * tanh_of(*x / a.factor);
}
ENTRY(THREADS, 1) add_gated(ElementsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element();
    const u64 at = (u64)block_y() * a.cols + i;
    if (i < a.cols) a.x[at] += sigmoid_of(a.by[block_y()]) * a.y[at];
}
ENTRY(THREADS, 1) add_weighted(ElementsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element();
    const u64 at = (u64)block_y() * a.cols + i;
    if (i < a.cols) a.x[at] += a.by[i] * a.y[at];
}
ENTRY(THREADS, 1) gate_heads(ElementsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element();
    if (i >= a.cols) return;
    const float gate = a.by[(u64)block_y() * (a.cols / a.span) + i / a.span];
    a.x[(u64)block_y() * a.cols + i] *= act_of(ActSpec{a.act, 0.0f, 0.0f, 0}, gate);
}
ENTRY(THREADS, 1) position_scale(ElementsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element();
    const float factor = 1.0f + a.factor * log_of((float)(1 + a.positions[block_y()] / a.span));
    if (i < a.cols) a.x[(u64)block_y() * a.cols + i] *= factor;
}

ENTRY(THREADS, 1) add_table(ElementsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element(), row = a.positions ? a.positions[block_y()] : 0;
    if (i < a.cols) a.x[(u64)block_y() * a.cols + i] += a.y[(u64)row * a.cols + i];
}

// Part p. On AMD a by-value argument that is indexed at run time is copied to
// scratch memory; a choice is not.
FORCE ColumnPlace part_of(const ColumnsArgs& a, u32 p) {
    return p == 0 ? a.parts[0] : p == 1 ? a.parts[1] : p == 2 ? a.parts[2] : a.parts[3];
}
ENTRY(THREADS, 1) columns(ColumnsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element(), cols = a.n_group * a.group_width;
    if (i >= cols) return;
    const u32 group = i / a.group_width;
    u32 in_group = i % a.group_width, p = 0;
#pragma unroll
    for (u32 j = 0; j < 3; ++j) {
        if (p == j && in_group >= a.parts[j].width) {
            in_group -= a.parts[j].width;
            p = j + 1;
        }
    }
    const ColumnPlace part = part_of(a, p);
    a.out[(u64)block_y() * cols + i] = part.x[(u64)block_y() * part.cols + part.first + group * part.stride + in_group];
}
ENTRY(THREADS, 1) combine(CombineArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element();
    if (i >= a.cols) return;
    const float* weights = a.weights + (u64)block_y() * a.n_used;
    const float* y = a.y + (u64)block_y() * a.n_used * a.cols + i;
    float sum = 0.0f;
    for (u32 s = 0; s < a.n_used; ++s) sum += weights[s] * y[(u64)s * a.cols];
    float* out = a.out + (u64)block_y() * a.cols + i;
    *out = a.add ? *out + sum : sum;
}
// Threads that are neighbours read neighbours of the matrix, and all of a block the same inputs.
ENTRY(THREADS, 1) product_transposed(ProductTransposedArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = element(), first = block_y() * PRODUCT_ROWS;
    if (i >= a.cols) return;
    const u32 n = least(PRODUCT_ROWS, a.rows - first);
    const float* x = a.x + (u64)first * a.n_in;
    float sums[PRODUCT_ROWS];
#pragma unroll
    for (u32 r = 0; r < PRODUCT_ROWS; ++r) sums[r] = 0.0f;
    for (u32 k = 0; k < a.n_in; ++k) {
        const float weight = a.weight[(u64)k * a.cols + i];
#pragma unroll
        for (u32 r = 0; r < PRODUCT_ROWS; ++r) {
            if (r < n) sums[r] += x[(u64)r * a.n_in + k] * weight;
        }
    }
#pragma unroll
    for (u32 r = 0; r < PRODUCT_ROWS; ++r) {
        if (r < n) a.out[(u64)(first + r) * a.cols + i] = sums[r];
    }
}
