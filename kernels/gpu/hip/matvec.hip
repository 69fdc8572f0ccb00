// out[r] = sum_k W[r][k] * x[k] for one token, up to four matrices that share
// x, in one launch: decode.
//
// Before: x is f32 [cols]; with a norm weight it becomes x / sqrt(mean(x^2) + eps) * norm.
// Every block quantizes x to 8 bits in blocks of 32 for itself into shared memory (d = max |x|
// / 127): reading 16 KiB from the second-level cache costs less than one more launch. After:
// out = v + bias, or out += v + bias (the residual), or, with a gate and an up matrix,
// out[r] = act(gate[r]) * up[r].
//
// Geometry: grid blocks of THREADS; a wave takes whole rows, round robin over all waves of the
// grid, and a lane one block of 32 weights of every WAVE. A wave loads the next UNROLL blocks of
// each lane before it computes with the present ones, and the first before x is ready. Bound by
// memory: moves the matrices' bytes once; x from caches. Shared memory: 40 bytes per 32 columns
// (dynamic), 128 bytes static.
// Entries: matvec_<type> (WEIGHT), and for two types in one launch matvec_<a>_<b> (WEIGHT, SECOND).
#include "compat.h"
#include "formats.h"
#include "act.h"
#include "activations.h"

// As measured on an H200: the input is ready sooner with 1024 threads; two types need
// too many registers for them.
#if defined(RF_CUDA) && !defined(SECOND)
#define THREADS 1024
#define UNROLL 2
#else
#define THREADS 512
#define UNROLL 4
#endif

struct MatvecMatrix {
    const u8* weights;
    float* out;
    const float* bias;  // or null
    u32 rows;
    u32 second;  // 1: of type SECOND; those come last
};

struct MatvecArgs {
    const float* x;
    const float* norm;  // or null
    float eps;
    u32 cols;
    u32 n_matrices;
    u32 epilogue;  // 0 store, 1 add to out, 2 act(matrix 0) * matrix 1 to out of matrix 0
    u32 n_blocks;
    u32 reserved;
    ActSpec act;
    MatvecMatrix matrices[4];
};

template <class T>
struct Tile {
    typename T::Chunk chunk[UNROLL];

    FORCE void load(const RowAt& at, u32 first, u32 nb) {
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            u32 c = first + lane() + i * WAVE;
            if (c < nb) chunk[i] = T::load(at, c, nb);
        }
    }
    FORCE float dot(u32 first, u32 nb, const XShared& x) const {
        float acc = 0.0f;
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            u32 c = first + lane() + i * WAVE;
            if (c < nb) {
                Codes codes;
                T::unpack(chunk[i], c, codes);
                acc += dot_chunk<T>(codes, x.chunk(c));
            }
        }
        return acc;
    }
};

// The rows of the matrices [from, to), as one list from `base` on; a wave takes every `waves`-th.
struct RowList {
    u32 from, to, pairs;
};

// Matrix m. On AMD a by-value argument that is indexed at run time is copied to
// scratch memory; a choice is not.
FORCE MatvecMatrix matrix_of(const MatvecArgs& a, u32 m) {
#ifdef RF_CUDA
    return a.matrices[m];
#else
    return m == 0 ? a.matrices[0] : m == 1 ? a.matrices[1] : m == 2 ? a.matrices[2] : a.matrices[3];
#endif
}

// Which matrix and row item `item` of the list is.
FORCE void find_row(const MatvecArgs& a, const RowList& list, u32 item, u32& m, u32& row) {
    m = list.from;
    row = item;
    for (u32 i = 0; i < 3; ++i) {
        if (m == i && i + 1 < list.to && i >= list.from && row >= a.matrices[i].rows) {
            row -= a.matrices[i].rows;
            m = i + 1;
        }
    }
}

FORCE void finish(const MatvecArgs& a, u32 m, u32 row, float v) {
    MatvecMatrix matrix = matrix_of(a, m);
    if (matrix.bias) v += matrix.bias[row];
    if (a.epilogue == 1) v += matrix.out[row];
    matrix.out[row] = v;
}

// All rows of one type. The first tile is loaded by `begin`, before x is ready.
template <class T>
struct Rows {
    RowList list;
    u32 n_items, item, part, part_row, m, row, first;
    Tile<T> tile;
    RowAt at;

    FORCE void place(const MatvecArgs& a, u32 nb) {
        if (list.pairs) {
            m = part_row;
            row = item;
        } else {
            find_row(a, list, item, m, row);
        }
        MatvecMatrix matrix = matrix_of(a, m);
        at = T::row(matrix.weights, matrix.rows, nb, row);
    }
    FORCE void begin(const MatvecArgs& a, RowList rows, u32 first_item, u32 nb) {
        list = rows;
        n_items = 0;
        if (list.pairs) {
            n_items = a.matrices[0].rows;
        } else {
            for (u32 i = 0; i < 4; ++i) n_items += i >= list.from && i < list.to ? a.matrices[i].rows : 0;
        }
        item = first_item;
        part_row = 0;
        first = 0;
        if (item < n_items) {
            place(a, nb);
            tile.load(at, 0, nb);
        }
    }
    FORCE void run(const MatvecArgs& a, u32 stride, u32 nb, const XShared& x) {
        float acc = 0.0f, gate = 0.0f;
        while (item < n_items) {
            Tile<T> now = tile;
            u32 now_first = first, now_m = m, now_row = row;
            // The next tile: of this row, of its partner, or of the next item.
            first += UNROLL * WAVE;
            bool row_ends = first >= nb;
            if (row_ends) {
                first = 0;
                if (list.pairs && part_row == 0) {
                    part_row = 1;
                } else {
                    part_row = 0;
                    item += stride;
                }
                if (item < n_items) place(a, nb);
            }
            if (item < n_items) tile.load(at, first, nb);
            acc += now.dot(now_first, nb, x);
            if (row_ends) {
                float v = wave_sum(acc) * x.factor;
                acc = 0.0f;
                if (list.pairs && now_m == 0) {
                    gate = v;
                } else if (lane() == 0) {
                    if (list.pairs) {
                        float up = v;
                        if (a.matrices[0].bias) gate += a.matrices[0].bias[now_row];
                        if (a.matrices[1].bias) up += a.matrices[1].bias[now_row];
                        a.matrices[0].out[now_row] = gate_of(a.act, gate, up);
                    } else {
                        finish(a, now_m, now_row, v);
                    }
                }
            }
        }
    }
};

// x -> shared memory, after the launch before has ended. A norm's factor does not change the bytes,
// so it is applied to the sums of the rows: quantizing does not wait for it.
FORCE void take_input(const MatvecArgs& a, XShared& x, float* room) {
    constexpr u32 VECTORS = 1024 / THREADS;
    if (a.norm) {
        Quantizer<THREADS, VECTORS> weights, part;
        weights.load(a.norm, a.cols, 0);
        wait_for_inputs();
        float squares = 0.0f;
        for (u32 base = 0; base < a.cols; base += part.SPAN) {
            part.load(a.x, a.cols, base);
            if (base > 0) weights.load(a.norm, a.cols, base);
            squares += part.squares();
            part.multiply(weights);
            part.store(x, a.cols, base);
        }
        x.factor = 1.0f / sqrt_of(block_sum(squares, THREADS, room) / (float)a.cols + a.eps);
    } else {
        wait_for_inputs();
        Quantizer<THREADS, 2 * VECTORS> part;
        for (u32 base = 0; base < a.cols; base += part.SPAN) {
            part.load(a.x, a.cols, base);
            part.store(x, a.cols, base);
        }
        block_sync();
    }
}

template <class A, class B>
FORCE void matvec(const MatvecArgs& a, bool two) {
    extern __shared__ U32x4 shared_x[];
    __shared__ float room[1024 / WAVE + 1];
    let_next_start();
    u32 nb = a.cols / 32;
    XShared x(shared_x, nb);
    u32 waves = THREADS / WAVE * a.n_blocks;
    // Neighbouring rows go to different multiprocessors.
    u32 id = wave() * a.n_blocks + block_x();
    u32 n_first = a.n_matrices;
    if (two) {
        n_first = 0;
        for (u32 i = 0; i < 4; ++i) n_first += i < a.n_matrices && a.matrices[i].second == 0;
    }
    Rows<A> rows;
    rows.begin(a, RowList{0, n_first, a.epilogue == 2}, id, nb);
    take_input(a, x, room);
    rows.run(a, waves, nb, x);
    if (two && n_first < a.n_matrices) {
        // Go on where the first type ended, so that no wave gets two more rows than another.
        Rows<B> others;
        u32 past = rows.n_items % waves;
        others.begin(a, RowList{n_first, a.n_matrices, 0}, id >= past ? id - past : id + waves - past, nb);
        others.run(a, waves, nb, x);
    }
}

#ifdef SECOND
ENTRY(THREADS, 1) UNIT(MatvecArgs a) { matvec<WEIGHT, SECOND>(a, true); }
#else
ENTRY(THREADS, 1) UNIT(MatvecArgs a) { matvec<WEIGHT, WEIGHT>(a, false); }
#endif
