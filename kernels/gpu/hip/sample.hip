// The k largest logits of each row and their indices, largest first (equal ones: the lower index
// first); k = 1 is argmax. NaN counts as plus infinity and is given as that: whoever reads the
// values sees that the row is not to be sampled.
//
// Two launches. top_k_part: grid (n_parts, rows), each block finds the k largest of its part of the
// row, by k rounds of a block maximum over registers (k up to K_MAX) -> candidates
// [rows][n_parts][k] {value, index}. top_k_join: grid (rows), the k largest of those -> out_values
// [rows][k], out_ids [rows][k]; the first id also goes to *next where given (the next step's
// input). A part's candidates are sorted, so a thread that has one part holds no more than its
// first two. Moves the logits once. Bound by latency.
// Entries: top_k_part, top_k_join.
#include "compat.h"

#define THREADS 256
#define HELD 8  // candidates of a thread in a part: a part has at most THREADS * HELD logits

struct TopKArgs {
    const float* logits;   // [rows][n]
    u32* candidates;       // [rows][n_parts][k][2]: value bits, index
    float* out_values;     // [rows][k] or null
    u32* out_ids;          // [rows][k]
    u32* next;             // [rows] or null
    u32 n;
    u32 n_parts;
    u32 k;
    u32 reserved;
};

// Larger value first, then lower index.
FORCE bool better(float a, u32 ia, float b, u32 ib) { return a > b || (a == b && ia < ib); }

FORCE void best_of_wave(float& v, u32& i) {
    for (u32 m = WAVE / 2; m > 0; m /= 2) {
        float w = shuffle_xor(v, m);
        u32 j = shuffle_xor(i, m);
        if (better(w, j, v, i)) {
            v = w;
            i = j;
        }
    }
}

// The best of a block; every thread gets it. Ends with block_sync.
FORCE void best_of_block(float& v, u32& i, float* values, u32* ids) {
    best_of_wave(v, i);
    if (lane() == 0) {
        values[wave()] = v;
        ids[wave()] = i;
    }
    block_sync();
    v = values[0];
    i = ids[0];
    for (u32 w = 1; w < THREADS / WAVE; ++w) {
        if (better(values[w], ids[w], v, i)) {
            v = values[w];
            i = ids[w];
        }
    }
    block_sync();
}

ENTRY(THREADS, 1) top_k_part(TopKArgs a) {
    __shared__ float values[THREADS / WAVE];
    __shared__ u32 ids[THREADS / WAVE];
    let_next_start();
    wait_for_inputs();
    const u32 part = block_x(), row = block_y();
    const u32 size = (a.n + a.n_parts - 1) / a.n_parts, begin = part * size, end = least(begin + size, a.n);
    const float* logits = a.logits + (u64)row * a.n;
    float held[HELD];
    for (u32 j = 0; j < HELD; ++j) {
        u32 i = begin + thread_x() + j * THREADS;
        float v = i < end ? logits[i] : NEG_INF;
        held[j] = v == v ? v : -NEG_INF;
    }
    u32* out = a.candidates + ((u64)row * a.n_parts + part) * a.k * 2;
    // What was taken before: only what comes after it is still a candidate.
    float bound = 0.0f;
    u32 bound_id = 0;
    for (u32 n = 0; n < a.k; ++n) {
        float v = NEG_INF;
        u32 id = 0xffffffffu;
        for (u32 j = 0; j < HELD; ++j) {
            u32 i = begin + thread_x() + j * THREADS;
            if (i < end && (n == 0 || better(bound, bound_id, held[j], i)) && better(held[j], i, v, id)) {
                v = held[j];
                id = i;
            }
        }
        best_of_block(v, id, values, ids);
        bound = v;
        bound_id = id;
        if (thread_x() == 0) {
            out[2 * n] = bits_of_f32(v);
            out[2 * n + 1] = id;
        }
    }
}

ENTRY(THREADS, 1) top_k_join(TopKArgs a) {
    __shared__ float values[THREADS / WAVE];
    __shared__ u32 ids[THREADS / WAVE];
    let_next_start();
    wait_for_inputs();
    const u32 row = block_x(), n = a.n_parts * a.k;
    const u32* from = a.candidates + (u64)row * n * 2;
    float bound = 0.0f;
    u32 bound_id = 0;
    // A part of its own for each thread: its best candidate that is left, and the one behind it.
    const bool merges = a.n_parts <= THREADS, has = merges && thread_x() < a.n_parts;
    const u32* own = from + (u64)thread_x() * a.k * 2;
    float first = NEG_INF, second = NEG_INF;
    u32 first_id = 0xffffffffu, second_id = 0xffffffffu, at = 2;
    if (has) {
        first = f32_of_bits(own[0]);
        first_id = own[1];
        if (a.k > 1) {
            second = f32_of_bits(own[2]);
            second_id = own[3];
        }
    }
    for (u32 taken = 0; taken < a.k; ++taken) {
        float v = first;
        u32 id = first_id;
        for (u32 i = thread_x(); !merges && i < n; i += THREADS) {
            float w = f32_of_bits(from[2 * i]);
            u32 j = from[2 * i + 1];
            if ((taken == 0 || better(bound, bound_id, w, j)) && better(w, j, v, id)) {
                v = w;
                id = j;
            }
        }
        best_of_block(v, id, values, ids);
        bound = v;
        bound_id = id;
        if (has && id == first_id) {
            first = second;
            first_id = second_id;
            const bool more = at < a.k;
            second = more ? f32_of_bits(own[2 * at]) : NEG_INF;
            second_id = more ? own[2 * at + 1] : 0xffffffffu;
            ++at;
        }
        if (thread_x() == 0) {
            if (a.out_values) a.out_values[(u64)row * a.k + taken] = v;
            a.out_ids[(u64)row * a.k + taken] = id == 0xffffffffu ? 0 : id;
            if (taken == 0 && a.next) a.next[row] = id == 0xffffffffu ? 0 : id;
        }
    }
}
