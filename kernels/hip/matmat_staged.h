// Products of some 2 to 64 tokens a block by mma.sync (NVIDIA, sm_80 and later), x on its way through shared memory. Included by
// matmat.hip after matmat_f16.h, which has the fragments of weights.
//
// out[t][r] = factor * sum_k W[r][k] * x[t][k] with x [tokens][cols] f16 (activations.hip), W as f16 made in registers, f32 sums.
// Geometry: grid (rows / 32 rounded up, tokens / (8 * GROUPS_MOST) rounded up), THREADS threads: a block has 32 rows and its tokens, and its
// waves share the blocks of 32 weights round robin, so that they read neighbours at once; their sums meet in shared memory.
// Each weight is unpacked once for all tokens of its block, which bounds it; so many tokens a block take more registers than
// let two blocks run at a time, and copies without registers keep STAGES - 1 steps of x under way instead.
// Shared memory, dynamic: a wave has STAGES places of x, [8 * GROUPS_MOST tokens][32] f16. Of a token the two halves of a block change
// places where bit 1 of the token is set, so that the lanes of a load meet all banks.
// Bytes: the weights once per block of tokens, x (64 bytes a token and block of 32) once per 32 rows, from the caches.
#pragma once
#include "matmat_f16.h"

#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
#define STAGES 3u

FORCE void copy16_async(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
FORCE void copies_of_a_step_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
FORCE void wait_for_the_oldest_step() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
FORCE void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <class T, u32 GROUPS_MOST>
FORCE void matmat_staged(const MatmatF16Args& a) {
    constexpr u32 TOKENS = GROUPS_MOST * 8, STAGE_BYTES = TOKENS * 64, SUMS = 2 * GROUPS_MOST;
    extern __shared__ U32x4 shared_staged[];
    let_next_start();
    const u32 nb = a.cols / 32, g = lane() / 4, q = lane() % 4;
    const u32 row0 = block_x() * TILE_ROWS, token0 = block_y() * TOKENS;
    const u32 n_tokens = least(TOKENS, a.n_tokens - token0), n_groups = (n_tokens + 7) / 8;
    {
        const u32 rows = least(TILE_ROWS, a.rows - row0);
        const RowAt first = T::row(a.weights, a.rows, nb, row0);
        prefetch(first.q, rows * nb * T::Q_BYTES);
        prefetch(first.h, rows * nb * T::H_BYTES);
        prefetch(first.s, rows * (nb / T::S_EVERY) * T::S_BYTES);
        prefetch(first.d, rows * (nb / T::D_EVERY) * T::D_BYTES);
    }
    RowAt at[4];
#pragma unroll
    for (u32 r = 0; r < 4; ++r) at[r] = T::row(a.weights, a.rows, nb, least(row0 + r * 8 + g, a.rows - 1));
    F32x4 acc[2][GROUPS_MOST];
#pragma unroll
    for (u32 m = 0; m < 2; ++m) {
#pragma unroll
        for (u32 n = 0; n < GROUPS_MOST; ++n) acc[m][n] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    u8* room = (u8*)shared_staged + wave() * (STAGES * STAGE_BYTES);
    const u32 room_at = (u32)__cvta_generic_to_shared(room);
    // A lane copies 16 bytes of every eighth token.
    const u32 swapped = (g >> 1) & 1;
    const u32 copy_to = room_at + g * 64 + (((q / 2) ^ swapped) * 2 + q % 2) * 16;
    auto copy_x = [&](u32 stage, u32 c) {
#pragma unroll
        for (u32 n = 0; n < GROUPS_MOST; ++n) {
            if (n < n_groups) {
                const u64 token = token0 + least(n * 8 + g, n_tokens - 1);
                copy16_async(copy_to + stage * STAGE_BYTES + n * 512, a.x + token * a.cols + c * 32 + q * 8);
            }
        }
    };
    u32 c = wave();
    typename T::Chunk next[4];
    if (c < nb) {
#pragma unroll
        for (u32 r = 0; r < 4; ++r) next[r] = T::load(at[r], c, nb);
    }
    wait_for_inputs();
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; ++s) {
        if (c + s * WAVES < nb) copy_x(s, c + s * WAVES);
        copies_of_a_step_end();
    }
    const u8* from = room + g * 64 + q * 8;
    u32 stage = 0;
    for (; c < nb; c += WAVES) {
        u32 w[4][2][2];
#pragma unroll
        for (u32 r = 0; r < 4; ++r) fragment<T>(next[r], c, q, w[r]);
        if (c + WAVES < nb) {
#pragma unroll
            for (u32 r = 0; r < 4; ++r) next[r] = T::load(at[r], c + WAVES, nb);
        }
        wait_for_the_oldest_step();
        // All lanes' copies are there, and all lanes are done with the place that is filled next.
        __syncwarp();
        const u32 ahead = c + (STAGES - 1) * WAVES, free_stage = stage == 0 ? STAGES - 1 : stage - 1;
        if (ahead < nb) copy_x(free_stage, ahead);
        copies_of_a_step_end();
        const u8* x = from + stage * STAGE_BYTES;
#pragma unroll
        for (u32 n = 0; n < GROUPS_MOST; ++n) {
            if (n < n_groups) {
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    const U32x2 y = *(const U32x2*)(x + n * 512 + (h ^ swapped) * 32);
#pragma unroll
                    for (u32 m = 0; m < 2; ++m)
                        multiply(acc[m][n], w[2 * m][h][0], w[2 * m + 1][h][0], w[2 * m][h][1], w[2 * m + 1][h][1], y.x, y.y);
                }
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_for_all_copies();
    block_sync();
    // [waves / 2][SUMS][lanes]: half of the waves at a time.
    F32x4* sums = (F32x4*)shared_staged;
    constexpr u32 HALF = WAVES / 2;
    auto sum_at = [&](u32 of, u32 i) { return sums + (of * SUMS + i) * WAVE + lane(); };
    if (wave() >= HALF) {
#pragma unroll
        for (u32 i = 0; i < SUMS; ++i) *sum_at(wave() - HALF, i) = acc[i / GROUPS_MOST][i % GROUPS_MOST];
    }
    block_sync();
    if (wave() < HALF) {
#pragma unroll
        for (u32 i = 0; i < SUMS; ++i) {
            F32x4* to = sum_at(wave(), i);
            const F32x4 s = *to, mine = acc[i / GROUPS_MOST][i % GROUPS_MOST];
            *to = F32x4{s.x + mine.x, s.y + mine.y, s.z + mine.z, s.w + mine.w};
        }
    }
    block_sync();
    // A fragment's lane: rows 16 m + g and + 8, tokens 8 n + 2 q and the next.
    for (u32 i = wave(); i < SUMS; i += WAVES) {
        const u32 m = i / GROUPS_MOST, n = i % GROUPS_MOST;
        if (n >= n_groups) continue;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 k = 0; k < HALF; ++k) {
            const F32x4 s = *sum_at(k, i);
            v[0] += s.x;
            v[1] += s.y;
            v[2] += s.z;
            v[3] += s.w;
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 row = row0 + m * 16 + j / 2 * 8 + g, token = n * 8 + q * 2 + j % 2;
            if (row < a.rows && token < n_tokens) {
                float* out = a.out + (u64)(token0 + token) * a.stride + row;
                const float y = v[j] * (a.factor / SCALE) + (a.bias ? a.bias[row] : 0.0f);
                *out = a.epilogue == 1 ? *out + y : y;
            }
        }
    }
}
#endif
