// Products of routed rows with matrices of the experts that they go to: decode and a few rows.
//
//   out[i] = act(W1[e] x[i / share] + b1[e]) * (W2[e] x[i / share] + b2[e]) * scale[e],
//       e = ids[i]; parts that are not there left out
//
// ids [n_routed] are whole numbers in f32. Rows of experts that are not here (table entry 0) are
// left alone. Quantized weights: every block quantizes its row of x to 8 bits for itself, as
// matvec.hip does. Geometry: grid (n_blocks, n_routed), THREADS threads. LANES neighbouring lanes
// take two rows of weights at once (a row of each matrix, or neighbours), so a wave takes WAVE /
// LANES items, round robin over the waves of its row of blocks: rows of experts are short, and with
// a wave a row most lanes had nothing to load. Of floats a wave takes an item. Bound by memory: the
// matrices' bytes once a routed row, shared through the second-level cache where rows go to the
// same expert. Shared memory: 40 bytes per 32 columns (dynamic); none for floats.
// Entries: experts_<type> (WEIGHT; FLOATS for F32, F16 and BF16).
#include "compat.h"
#include "formats.h"
#include "floats.h"
#include "activations.h"
#include "experts.h"

#define THREADS 256
// As measured on an H100. Two blocks of a multiprocessor: what one waits for, the other has.
#define BLOCKS 2
#define UNROLL 3
#ifdef FLOATS
#define LANES WAVE
#else
#define LANES 8
#endif

struct ExpertsArgs {
    const float* x;
    const float* ids;
    float* out;
    ExpertTensors tensors;
    u32 share;  // routed rows that have the same row of x
    u32 n_blocks;
};

#ifdef FLOATS
// A row's product with x; lanes have parts of it.
FORCE float dot_part(const u8* weights, u32 row, u32 cols, const float* x) {
    const u8* at = weights + (u64)row * cols * WEIGHT::BYTES;
    float sum = 0.0f;
    for (u32 k = lane(); k < cols; k += WAVE) sum += WEIGHT::at(at + (u64)k * WEIGHT::BYTES) * x[k];
    return sum;
}
#else
struct Tile {
    WEIGHT::Chunk chunk[UNROLL];

    FORCE void load(const RowAt& at, u32 first, u32 nb) {
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            const u32 c = first + lane() % LANES + i * LANES;
            if (c < nb) chunk[i] = WEIGHT::load(at, c, nb);
        }
    }
    FORCE float dot(u32 first, u32 nb, const XShared& x) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            const u32 c = first + lane() % LANES + i * LANES;
            if (c < nb) {
                Codes codes;
                WEIGHT::unpack(chunk[i], c, codes);
                sum += dot_chunk<WEIGHT>(codes, x.chunk(c));
            }
        }
        return sum;
    }
};
#endif

ENTRY(THREADS, BLOCKS) UNIT(ExpertsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 routed = block_y();
    const ExpertTensors& e = a.tensors;
    const u8* expert = expert_at(e, a.ids[routed]);
    if (!expert) return;
    const float* x_row = a.x + (u64)(routed / a.share) * e.cols;
    float* out = a.out + (u64)routed * e.rows;
    const bool two = e.second != NO_TENSOR;
    const u8* first = expert + e.first;
    const u8* second = two ? expert + e.second : first;
    const u32 items = two ? e.rows : (e.rows + 1) / 2, groups = (items + WAVE / LANES - 1) / (WAVE / LANES);
    const u32 waves = THREADS / WAVE * a.n_blocks;
    // The rows of weights of an item.
    auto row0 = [&](u32 item) { return two ? item : 2 * item; };
    auto row1 = [&](u32 item) { return two ? item : least(2 * item + 1, e.rows - 1); };
    // A lane's item of a wave's; those past the last are computed as the last one is, and not
    // stored.
    auto item_of = [&](u32 group) { return group * (WAVE / LANES) + lane() / LANES; };
    auto store = [&](u32 item, float v0, float v1) {
        v0 = lanes_sum(v0, LANES);
        v1 = lanes_sum(v1, LANES);
        if (lane() % LANES == 0 && item < items) {
            out[row0(item)] = finish_expert(e, expert, row0(item), v0, v1);
            if (!two && 2 * item + 1 < e.rows) out[row1(item)] = finish_expert(e, expert, row1(item), v1, 0.0f);
        }
    };
    u32 group = wave() * a.n_blocks + block_x();
#ifdef FLOATS
    for (; group < groups; group += waves) {
        const u32 item = item_of(group);
        store(item, dot_part(first, row0(item), e.cols, x_row), dot_part(second, row1(item), e.cols, x_row));
    }
#else
    extern __shared__ U32x4 shared_x[];
    const u32 nb = e.cols / 32;
    Tile tile0, tile1;
    auto load = [&](u32 group, u32 c) {
        const u32 item = least(item_of(group), items - 1);
        tile0.load(WEIGHT::row(first, e.rows, nb, row0(item)), c, nb);
        tile1.load(WEIGHT::row(second, e.rows, nb, row1(item)), c, nb);
    };
    // Weights are on their way while x becomes bytes.
    if (group < groups) load(group, 0);
    XShared x(shared_x, nb);
    Quantizer<THREADS, 1> part;
    for (u32 base = 0; base < e.cols; base += part.SPAN) {
        part.load(x_row, e.cols, base);
        part.store(x, e.cols, base);
    }
    block_sync();
    for (; group < groups; group += waves) {
        float v0 = 0.0f, v1 = 0.0f;
        for (u32 c = 0; c < nb; c += UNROLL * LANES) {
            v0 += tile0.dot(c, nb, x);
            v1 += tile1.dot(c, nb, x);
            if (c + UNROLL * LANES < nb) load(group, c + UNROLL * LANES);
            else if (group + waves < groups) load(group + waves, 0);
        }
        store(item_of(group), v0, v1);
    }
#endif
}
