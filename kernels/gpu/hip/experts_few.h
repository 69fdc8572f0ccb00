// Products of routed rows with one matrix or two of their experts, where an expert has a few rows
// (NVIDIA, sm_80 and later): by tiles of up to 8 rows of one expert (experts_group.hip), so that an
// expert's weights are read once for a tile, where experts.hip reads them once a routed row.
// Included by experts_many.hip.
//
//   out[i] = act(W1[e] x[i / share] + b1[e]) * (W2[e] x[i / share] + b2[e]) * scale[e],
//       e = ids[i];
//   parts that are not there left out
//
// x is f32; what a wave keeps of it is f16, times x_scale, at most the largest f16. Otherwise a
// wave goes through its slice of the columns as matmat_few.h has it. A strip is what a wave takes
// at once: 8 rows of each of two matrices, which so meet in one lane, or 16 of one. Geometry: a
// block has `slices` waves beside each other for all columns, and `groups` of such. The strips of
// all tiles, one tile's after another's, are dealt out evenly to the blocks there are, since how
// many tiles there are is only known on the device.
// Shared memory, dynamic: sums [2][2][waves][lanes], x [waves][8][lanes], each 16 bytes.
// Bytes: the weights once a tile; x (4 bytes an element) once a block and tile.
#pragma once
#include "experts.h"
#include "matmat_few.h"

#define FEW_TILE 8u

struct ExpertsFewArgs {
    const float* x;
    float* out;
    const u32* list;
    const u32* tiles;
    ExpertTensors tensors;
    u32 share;
    u32 slices, groups;
    float x_scale;
};

#if __CUDA_ARCH__ >= 800
// Two elements as f16; those that f16 has not are its largest, and NaN stays what it is.
FORCE u32 within_f16(float low, float high) {
    low = low > 65504.0f ? 65504.0f : (low < -65504.0f ? -65504.0f : low);
    high = high > 65504.0f ? 65504.0f : (high < -65504.0f ? -65504.0f : high);
    return pack_f16(low, high);
}

// As take_input, of a tile's rows.
FORCE void take_rows(const ExpertsFewArgs& a, const u32* list, u32 n, u32 first_block, U32x4* to) {
    const u32 cols = a.tensors.cols, i = lane() / 16 * 4 + lane() % 4;
    const float* from = a.x + first_block * 32 + lane() * 8;
    const bool is = first_block + lane() / 4 < cols / 32;
    // All lanes have multiplied what was there.
    wave_sync();
#pragma unroll
    for (u32 t = 0; t < FEW_TILE; ++t) {
        F32x4 v = F32x4{0.0f, 0.0f, 0.0f, 0.0f}, w = v;
        if (is && t < n) {
            const F32x4* row = (const F32x4*)(from + (u64)(list[t] / a.share) * cols);
            v = row[0];
            w = row[1];
        }
        const float s = a.x_scale;
        to[few_place(0, i, t * 4 + lane() / 4 % 4)] = U32x4{within_f16(v.x * s, v.z * s), within_f16(v.y * s, v.w * s),
                                                            within_f16(w.x * s, w.z * s), within_f16(w.y * s, w.w * s)};
    }
    wave_sync();
}

template <class T>
FORCE void experts_few(const ExpertsFewArgs& a) {
    extern __shared__ F32x4 shared_few[];
    let_next_start();
    wait_for_inputs();
    const ExpertTensors& e = a.tensors;
    const bool two = e.second != NO_TENSOR;
    const u32 nb = e.cols / 32, n_waves = a.slices * a.groups;
    const u32 slice = wave() % a.slices, group = wave() / a.slices, first_block = slice * 8;
    // A slice past the last column has zeros of x, and the first one's weights.
    const u32 c = first_block + lane() % 4, c_read = c < nb ? c : lane() % 4;
    const u32 strip_rows = two ? 8 : 16, strips = (e.rows + strip_rows - 1) / strip_rows;
    const u64 all = (u64)a.tiles[0] * strips;
    const u32 end = (u32)(all * (block_x() + 1) / gridDim.x);
    const float factor = 1.0f / (a.x_scale * SCALE);
    U32x4* x = (U32x4*)shared_few + (4 * n_waves + wave() * 8) * WAVE;
    u32 room_in_use = 0;
    for (u32 at = (u32)(all * block_x() / gridDim.x), n = 0; at < end; at += n) {
        const u32* tile = a.tiles + 4 * (1 + at / strips);
        const u32 strip0 = at % strips, n_rows = tile[2];
        n = least(end - at, strips - strip0);
        const u8* expert = device_memory(e.table[tile[0]]);
        const u32* list = a.list + tile[1];
        // One past the last strip is computed as that and not stored.
        RowAt rows[2];
        auto go_to = [&](u32 turn) {
            const u32 row = (strip0 + least(turn * a.groups + group, n - 1)) * strip_rows + lane() / 4;
            rows[0] = T::row(expert + e.first, e.rows, nb, least(row, e.rows - 1));
            rows[1] = T::row(expert + (two ? e.second : e.first), e.rows, nb, least(two ? row : row + 8, e.rows - 1));
        };
        LaneRow<T> next[2];
        go_to(0);
#pragma unroll
        for (u32 r = 0; r < 2; ++r) next[r].load(rows[r], c_read, nb);
        take_rows(a, list, n_rows, first_block, x);
        // The routed rows whose sums this lane has, if they are there.
        const u32 t = lane() % 4 * 2;
        float* to[2];
#pragma unroll
        for (u32 j = 0; j < 2; ++j) to[j] = a.out + (u64)list[least(t + j, n_rows - 1)] * e.rows;
        const u32 turns = (n + a.groups - 1) / a.groups;
#pragma unroll 1
        for (u32 turn = 0; turn < turns; ++turn) {
            LaneHalves<T> w[2];
#pragma unroll
            for (u32 r = 0; r < 2; ++r) w[r].begin(next[r], c);
            if (turn + 1 < turns) {
                go_to(turn + 1);
#pragma unroll
                for (u32 r = 0; r < 2; ++r) next[r].load(rows[r], c_read, nb);
            }
            F32x4 acc[2];
#pragma unroll
            for (u32 h = 0; h < 2; ++h) acc[h] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (u32 k = 0; k < 4; ++k) {
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    const U32x4 y = x[few_place(0, h * 4 + k, lane())];
#pragma unroll
                    for (u32 j = 0; j < 2; ++j) {
                        u32 f[2][2];
#pragma unroll
                        for (u32 r = 0; r < 2; ++r) w[r].four(h, 2 * k + j, f[r]);
                        multiply(acc[h], f[0][0], f[1][0], f[0][1], f[1][1], j ? y.z : y.x, j ? y.w : y.y);
                    }
                }
            }
            F32x4* room = shared_few + room_in_use * (2 * n_waves * WAVE);
            room[(turn % 2 * n_waves + wave()) * WAVE + lane()] = plus(acc[0], acc[1]);
            if (turn % 2 == 0 && turn + 1 < turns) continue;
            // What is in the other room, which is written next, has been added up.
            block_sync();
            room_in_use = 1 - room_in_use;
            const u32 begun = turn / 2 * 2 * a.groups, here = least((turn % 2 + 1) * a.groups, n - begun);
            for (u32 of = wave(); of < here; of += n_waves) {
                const F32x4* from = room + (of / a.groups * n_waves + of % a.groups * a.slices) * WAVE + lane();
                F32x4 sum = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
                for (u32 s = 0; s < a.slices; ++s) sum = plus(sum, from[s * WAVE]);
                const u32 row = (strip0 + begun + of) * strip_rows + lane() / 4;
                const float first[2] = {sum.x * factor, sum.y * factor}, other[2] = {sum.z * factor, sum.w * factor};
#pragma unroll
                for (u32 j = 0; j < 2; ++j) {
                    if (t + j >= n_rows) continue;
                    if (row < e.rows) to[j][row] = finish_expert(e, expert, row, first[j], other[j]);
                    if (!two && row + 8 < e.rows) to[j][row + 8] = finish_expert(e, expert, row + 8, other[j], 0.0f);
                }
            }
        }
    }
}
#endif
