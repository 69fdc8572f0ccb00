// Sorts routed rows by their experts: rows by expert one after another, and
// tiles of up to `tile` of them.
//
// ids [n_routed] are whole numbers in f32; rows of experts that are not here (table entry 0) are
// left out. list [n_routed]: the rows, those of an expert together, in any order; tiles: how many
// there are, three unused words, then {expert, first in the list, rows, unused} each.
// Geometry: one block. Bound by latency.
// Entry: experts_group.
#include "compat.h"

#define THREADS 512
#define EXPERTS_MAX 512u

struct ExpertsGroupArgs {
    const float* ids;
    const u64* table;
    u32* list;
    u32* tiles;
    u32 n_routed;
    u32 n_expert;
    u32 tile;
    u32 reserved;
};

ENTRY(THREADS, 1) experts_group(ExpertsGroupArgs a) {
    __shared__ u32 count[EXPERTS_MAX];
    __shared__ u32 sums[2][EXPERTS_MAX];
    let_next_start();
    wait_for_inputs();
    const u32 t = thread_x();
    count[t] = 0;
    block_sync();
    auto expert_of = [&](u32 i) {
        const float id = i < a.n_routed ? a.ids[i] : -1.0f;
        const bool is = id >= 0.0f && id < (float)a.n_expert;
        return is && a.table[(u32)id] != 0 ? (u32)id : EXPERTS_MAX;
    };
    auto count_one = [&](u32 e) {
        u32 before = counter_add(&count[e], 1);
#ifndef RF_CUDA
        // Taken though nobody wants it: the instruction that returns nothing has no register for
        // the value before, and AMD's simulator writes it to one all the same (v0).
        asm volatile("" : "+v"(before));
#endif
        (void)before;
    };
    // A thread's first row is looked up once.
    const u32 expert = expert_of(t);
    if (expert < EXPERTS_MAX) count_one(expert);
    for (u32 i = t + THREADS; i < a.n_routed; i += THREADS) {
        const u32 e = expert_of(i);
        if (e < EXPERTS_MAX) count_one(e);
    }
    block_sync();
    // Inclusive sums of rows and of tiles, a thread an expert.
    const u32 mine = count[t], my_tiles = (mine + a.tile - 1) / a.tile;
    sums[0][t] = mine;
    sums[1][t] = my_tiles;
    for (u32 step = 1; step < a.n_expert; step *= 2) {
        block_sync();
        const u32 before = t >= step ? sums[0][t - step] : 0, tiles = t >= step ? sums[1][t - step] : 0;
        block_sync();
        sums[0][t] += before;
        sums[1][t] += tiles;
    }
    block_sync();
    const u32 first = sums[0][t] - mine, first_tile = sums[1][t] - my_tiles;
    for (u32 i = 0; i < my_tiles; ++i) {
        u32* tile = a.tiles + 4 * (1 + first_tile + i);
        tile[0] = t;
        tile[1] = first + i * a.tile;
        tile[2] = least(mine - i * a.tile, a.tile);
        tile[3] = 0;
    }
    if (t == a.n_expert - 1) a.tiles[0] = sums[1][t];
    // From here on where an expert's next row goes.
    count[t] = first;
    block_sync();
    if (expert < EXPERTS_MAX) a.list[counter_add(&count[expert], 1)] = t;
    for (u32 i = t + THREADS; i < a.n_routed; i += THREADS) {
        const u32 e = expert_of(i);
        if (e < EXPERTS_MAX) a.list[counter_add(&count[e], 1)] = i;
    }
}
