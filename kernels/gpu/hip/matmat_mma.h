// Products of some 2 to 64 tokens a block by mma.sync (NVIDIA, sm_80 and later), x on its way
// through shared memory. Included by matmat_f16.h.
//
// The order of k in a product is free as long as both operands have the same. A lane (4 g + q)
// takes of rows g, g + 8, g + 16 and g + 24 of its wave's 32 whole blocks of 32 weights: block 4
// i + q in step i. So it reads each weight's bytes once, unpacks a block's scale once, and four
// lanes read 64 neighbouring bytes. A step is STEP weights deep. A block has ROW_WAVES waves beside
// each other, 32 rows each, that share x, and WAVES / ROW_WAVES groups of them that take the steps
// in turn. Many rows a block read x less often: a block of 32 rows reads more of x than of the
// weights from 18 tokens on. Blocks begin at different steps, since all would read the same lines
// of x at once otherwise, and go round. Geometry: tiles of 32 * ROW_WAVES rows and 8 * GROUPS
// tokens. Partial sums: [row wave][fragment][lane] of 16 bytes. Shared memory, dynamic: for each
// group of waves STAGES places of x, [tokens][STEP] f16, of which STAGES - 1 are under way; and
// behind the loop the fragments of all waves. Of a token, the 16 bytes that are words 2 s and 2 s +
// 1 of block q are at place 4 s + q, where of every second token places 0 to 3 and 4 to 7 of each 8
// change: the 8 lanes that are served at once meet all banks. Places of tokens that are not there
// hold anything: a column of the product depends on its own token alone. Weights are asked for
// AHEAD steps before they are loaded, into the second-level cache, the first ones before x is
// ready. Bytes: the weights once per 8 * GROUPS tokens, x (2 bytes an element) once per 32 *
// ROW_WAVES rows, from the second-level cache.
#pragma once

#define STAGES 3u
#define AHEAD 2u

FORCE void copy16_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
FORCE void copies_of_a_step_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
FORCE void wait_for_the_oldest_step() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
FORCE void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// All waves that share a place of x.
template <u32 ROW_WAVES>
FORCE void group_sync(u32 group) {
    if (ROW_WAVES == 1) {
        __syncwarp();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(ROW_WAVES * WAVE) : "memory");
    }
}

// `Tokens` as tokens.h says; token0 is the first of the block.
template <class T, u32 GROUPS, u32 ROW_WAVES, class Tokens>
FORCE void matmat_mma(const MmaTile& a, const Tokens& tokens, u32 token0) {
    constexpr u32 TOKENS = GROUPS * 8, STAGE_BYTES = TOKENS * STEP * 2, K_WAVES = WAVES / ROW_WAVES;
    constexpr u32 FRAGMENTS = 2 * GROUPS, LANES = ROW_WAVES * WAVE, COPIES = TOKENS * (STEP / 8) / LANES;
    extern __shared__ U32x4 shared_mma[];
    const u32 nb = a.cols / 32, g = lane() / 4, q = lane() % 4;
    const u32 row_wave = wave() % ROW_WAVES, group = wave() / ROW_WAVES, row0 = a.row0 + row_wave * 32;
    const u32 n_tokens = least(TOKENS, tokens.n - token0), steps = (nb + 3) / 4;
    const u32 begin = steps * a.part / a.parts, n_steps = steps * (a.part + 1) / a.parts - begin;
    const u32 turn = a.row0 / (32 * ROW_WAVES) * 5 % n_steps;
    auto step_of = [&](u32 i) { return begin + (i + turn >= n_steps ? i + turn - n_steps : i + turn); };
    const RowAt mine = T::row(a.weights, a.rows, nb, least(row0 + lane(), a.rows - 1));
    auto ask_for = [&](u32 i) {
        if (i < n_steps) prefetch_blocks<T>(mine, step_of(i) * 4, nb);
    };
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) ask_for(group + i * K_WAVES);
    RowAt at[4];
#pragma unroll
    for (u32 r = 0; r < 4; ++r) at[r] = T::row(a.weights, a.rows, nb, least(row0 + r * 8 + g, a.rows - 1));
    F32x4 acc[2][GROUPS];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
#pragma unroll
        for (u32 n = 0; n < GROUPS; ++n) acc[i][n] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    u8* room = (u8*)shared_mma + group * (STAGES * STAGE_BYTES);
    const u32 room_at = (u32)__cvta_generic_to_shared(room), member = row_wave * WAVE + lane();
    u32 x_row[COPIES];
    auto find_rows = [&]() {
#pragma unroll
        for (u32 i = 0; i < COPIES; ++i) {
            const u32 token = (i * LANES + member) / (STEP / 8);
            x_row[i] = token < n_tokens ? tokens.x_row(token0 + token) : 0;
        }
    };
    // Columns past the last are those before it: their weights count as zero.
    auto copy_x = [&](u32 stage, u32 step) {
#pragma unroll
        for (u32 i = 0; i < COPIES; ++i) {
            const u32 unit = i * LANES + member, token = unit / (STEP / 8), k = unit % (STEP / 8);
            if (token < n_tokens) {
                const u16* from = a.x + (u64)x_row[i] * a.cols + least(step * STEP + k * 8, a.cols - 8);
                const u32 place = ((k % 4) * 4 + k / 4) ^ ((token & 1) << 2);
                copy16_async(room_at + stage * STAGE_BYTES + token * (STEP * 2) + place * 16, from);
            }
        }
    };
    u32 at_step = group;
    typename T::Chunk next[4];
    if (at_step < n_steps) {
#pragma unroll
        for (u32 r = 0; r < 4; ++r) next[r] = T::load(at[r], least(step_of(at_step) * 4 + q, nb - 1), nb);
    }
    wait_for_inputs();
    find_rows();
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; ++s) {
        if (at_step + s * K_WAVES < n_steps) copy_x(s, step_of(at_step + s * K_WAVES));
        copies_of_a_step_end();
    }
    const u8* from = room + g * (STEP * 2);
    const u32 swapped = (g & 1) << 2;
    u32 stage = 0;
    for (; at_step < n_steps; at_step += K_WAVES) {
        const u32 step = step_of(at_step);
        ask_for(at_step + AHEAD * K_WAVES);
        const u32 c = least(step * 4 + q, nb - 1);
        const bool is = step * 4 + q < nb;
        HalfBlock<T> w[4];
#pragma unroll
        for (u32 r = 0; r < 4; ++r) w[r].begin(next[r], c, is);
        if (at_step + K_WAVES < n_steps) {
#pragma unroll
            for (u32 r = 0; r < 4; ++r) next[r] = T::load(at[r], least(step_of(at_step + K_WAVES) * 4 + q, nb - 1), nb);
        }
        wait_for_the_oldest_step();
        // All copies of this step are there, and all waves are done with the
        // place that is filled next.
        group_sync<ROW_WAVES>(group);
        const u32 ahead = at_step + (STAGES - 1) * K_WAVES, free_stage = stage == 0 ? STAGES - 1 : stage - 1;
        if (ahead < n_steps) copy_x(free_stage, step_of(ahead));
        copies_of_a_step_end();
        const u8* x = from + stage * STAGE_BYTES;
#pragma unroll
        for (u32 s = 0; s < 4; ++s) {
            u32 f[4][2][2];
#pragma unroll
            for (u32 r = 0; r < 4; ++r) {
#pragma unroll
                for (u32 j = 0; j < 2; ++j) w[r].four(2 * s + j, f[r][j]);
            }
            const u8* xs = x + ((s * 4 + q) ^ swapped) * 16;
            // Two products in a row of one sum would wait for each other.
            constexpr u32 PAIR = GROUPS == 1 ? 1 : 2;
#pragma unroll
            for (u32 n0 = 0; n0 < GROUPS; n0 += PAIR) {
                U32x4 y[PAIR];
#pragma unroll
                for (u32 p = 0; p < PAIR; ++p) y[p] = *(const U32x4*)(xs + (n0 + p) * (8 * STEP * 2));
#pragma unroll
                for (u32 j = 0; j < 2; ++j) {
#pragma unroll
                    for (u32 p = 0; p < PAIR; ++p) {
#pragma unroll
                        for (u32 i = 0; i < 2; ++i)
                            multiply(acc[i][n0 + p], f[2 * i][j][0], f[2 * i + 1][j][0], f[2 * i][j][1], f[2 * i + 1][j][1],
                                     j ? y[p].z : y[p].x, j ? y[p].w : y[p].y);
                    }
                }
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_for_all_copies();
    block_sync();
    // [waves][FRAGMENTS][lanes]
    F32x4* sums = (F32x4*)shared_mma;
    if (K_WAVES > 1) {
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS; ++i) sums[(wave() * FRAGMENTS + i) * WAVE + lane()] = acc[i / GROUPS][i % GROUPS];
        block_sync();
    }
    // A fragment's lane: rows 16 i + g and + 8, tokens 8 n + 2 q and the next.
    struct Place {
        float* out;
        u32 row;
        bool is;
    };
    auto place_of = [&](u32 i, u32 j) {
        const u32 row = row0 + i / GROUPS * 16 + j / 2 * 8 + g, token = i % GROUPS * 8 + q * 2 + j % 2;
        const bool is = row < a.rows && token < n_tokens;
        return Place{is ? a.out + (u64)tokens.out_row(token0 + token) * a.rows + row : a.out, row, is};
    };
    // What is added, of all fragments before one is stored: a load behind a store that may be to
    // the same place would wait for it, one round trip to memory after the other.
    auto ask = [&](u32 i) {
        float before[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const Place place = place_of(i, j);
            before[j] = a.epilogue == 1 && place.is ? *place.out : 0.0f;
        }
        return F32x4{before[0], before[1], before[2], before[3]};
    };
    auto store = [&](u32 i, const F32x4& sum, const F32x4& added) {
        const float v[4] = {sum.x, sum.y, sum.z, sum.w}, before[4] = {added.x, added.y, added.z, added.w};
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const Place place = place_of(i, j);
            if (place.is) *place.out = tokens.finish(v[j] * (a.factor / SCALE), a.bias, place.row) + before[j];
        }
    };
    auto partial = [&](u32 of, u32 i) { return a.partials + ((of * ROW_WAVES + row_wave) * FRAGMENTS + i) * WAVE + lane(); };
    const u32 n_groups = (n_tokens + 7) / 8;
    // Fragments of this wave.
    constexpr u32 MINE = (FRAGMENTS + K_WAVES - 1) / K_WAVES;
    auto fragment = [&](u32 k) { return group + k * K_WAVES; };
    auto is_there = [&](u32 k) { return fragment(k) < FRAGMENTS && fragment(k) % GROUPS < n_groups; };
    F32x4 added[MINE];
    auto ask_for_all = [&]() {
#pragma unroll
        for (u32 k = 0; k < MINE; ++k) {
            if (is_there(k)) added[k] = ask(fragment(k));
        }
    };
    if (a.parts == 1) ask_for_all();
#pragma unroll
    for (u32 k = 0; k < MINE; ++k) {
        if (!is_there(k)) continue;
        const u32 i = fragment(k);
        F32x4 sum = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
        if (K_WAVES > 1) {
#pragma unroll
            for (u32 of = 0; of < K_WAVES; ++of) sum = plus(sum, sums[((of * ROW_WAVES + row_wave) * FRAGMENTS + i) * WAVE + lane()]);
        } else {
            sum = acc[k / GROUPS][k % GROUPS];
        }
        if (a.parts == 1) {
            store(i, sum, added[k]);
        } else {
            *partial(a.part, i) = sum;
        }
    }
    if (a.parts == 1) return;
    // Nothing else is in shared memory any more. More of it than the dynamic part
    // would have to be asked for.
    u32* before = (u32*)shared_mma;
    device_fence();
    block_sync();
    if (thread_x() == 0) *before = counter_add(a.counter, 1);
    block_sync();
    if (*before != a.parts - 1) return;
    device_fence();
    ask_for_all();
    // A part of all fragments at once: one after the other each would take a round trip to memory.
    F32x4 sum[MINE];
#pragma unroll
    for (u32 k = 0; k < MINE; ++k) sum[k] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 of = 0; of < a.parts; ++of) {
        F32x4 one[MINE];
#pragma unroll
        for (u32 k = 0; k < MINE; ++k) {
            if (is_there(k)) one[k] = *partial(of, fragment(k));
        }
#pragma unroll
        for (u32 k = 0; k < MINE; ++k) sum[k] = plus(sum[k], one[k]);
    }
#pragma unroll
    for (u32 k = 0; k < MINE; ++k) {
        if (is_there(k)) store(fragment(k), sum[k], added[k]);
    }
    if (thread_x() == 0) *a.counter = 0;
}

// A block of the launch that MatmatMmaArgs describes.
template <class T, u32 GROUPS, u32 ROW_WAVES>
FORCE void matmat_mma(const MatmatMmaArgs& a) {
    let_next_start();
    const MmaTile tile = mma_tile(a, 32 * ROW_WAVES, 8 * GROUPS);
    matmat_mma<T, GROUPS, ROW_WAVES>(tile, EveryToken{a.n_tokens, tile.rows}, block_y() * (8 * GROUPS));
}
