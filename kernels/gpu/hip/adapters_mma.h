// Adapters of f16 for many rows by mma.sync (NVIDIA, sm_80 and later). Included by adapters.hip.
//
// adapters_down_columns_f16: a block takes TILE ranks of one matrix and TOKENS tokens, of which
// those that have a scale for one of the ranks are brought together, eight to an instruction. Of
// 128 columns, which a wave multiplies at once, a lane (4 g + q) has columns 8 q to 8 q + 7 of each
// of four blocks of 32: 16 bytes of a row of A, and of x, as matmat_wgmma.h has it, words 0 to 3 of
// numbers 4 q to 4 q + 3. So both are read 16 bytes at a time. A part takes every n_parts-th 128
// columns of each of its waves. Geometry: grid (n_matrices * width / TILE, tokens / TOKENS rounded
// up, parts), THREADS threads.
//
// adapters_up_32_f16: geometry and result as adapters.hip says. A wave has 32 rows. Tokens are
// brought into the order of their first CHUNK columns with a scale, so that eight of them have few
// chunks between them, and only these are multiplied. What adapters_down left is f32: tf32 holds 11
// bits of it, so it is multiplied as a sum of two.
#pragma once
#include "mma_f16.h"

#define TILE 16

#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
// Bits of `from` in front of this lane's.
FORCE u32 count_before(u32 from) { return __popc(from & ((1u << lane()) - 1)); }

FORCE void down_by_mma(const AdaptersDownArgs& a) {
    constexpr u32 TILES = TOKENS / 8;
    __shared__ float sums[WAVES][TOKENS][TILE + 1];
    __shared__ u8 token_at[WAVES][TOKENS];
    let_next_start();
    const u32 blocks = a.width / TILE, m = block_x() / blocks, rank0 = block_x() % blocks * TILE;
    const u32 token0 = block_y() * TOKENS, n = least(TOKENS, a.n_tokens - token0);
    if (!a.early) wait_for_inputs();
    const float* scales = a.scales + (u64)token0 * a.width + rank0;
    bool is = false;
#pragma unroll
    for (u32 i = 0; i < TILE / 4; ++i) is |= has_any(*(const F32x4*)(scales + (u64)least(lane(), n - 1) * a.width + i * 4));
    is &= lane() < n;
    const u32 active = lanes_or(is ? 1u << lane() : 0), count = __popc(active);
    if (count == 0) {
        wait_for_inputs();
        return;
    }
    if (is) token_at[wave()][count_before(active)] = (u8)lane();
    wave_sync();
    const u32 g = lane() / 4, q = lane() % 4, tokens = (a.n_tokens + 7) / 8 * 8;
    // Behind the last token comes the last one again.
    u32 of[TILES];
    F32x4 acc[TILES];
#pragma unroll
    for (u32 i = 0; i < TILES; ++i) {
        of[i] = q * 4 * tokens + token0 + token_at[wave()][least(i * 8 + g, count - 1)];
        acc[i] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    const u8* row = one_of(a.weights, m) + ((u64)(rank0 + g) * a.cols + q * 8) * 2;
    auto load = [&](U32x4 (&w)[2][4], u32 b) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) w[i / 4][i % 4] = stream16(row + ((u64)(i / 4 * 8) * a.cols + b * 128 + i % 4 * 32) * 2);
    };
    const u32 n_blocks = a.cols / 128, first = block_z() * WAVES + wave(), step = a.n_parts * WAVES;
    U32x4 w[2][4], next[2][4];
    if (first < n_blocks) load(w, first);
    wait_for_inputs();
#pragma unroll 1
    for (u32 b = first; b < n_blocks; b += step) {
        if (b + step < n_blocks) load(next, b + step);
#pragma unroll
        for (u32 i = 0; i < TILES; ++i) {
            if (i * 8 >= count) continue;
            U32x4 v[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) v[j] = ((const U32x4*)a.x)[((u64)b * 16 + j) * tokens + of[i]];
#pragma unroll
            for (u32 s = 0; s < 4; ++s) {
                const U32x4 top = w[0][s], low = w[1][s];
                // Columns 0 and 2, 1 and 3, and the same of the other four.
                multiply(acc[i], __byte_perm(top.x, top.y, 0x5410), __byte_perm(low.x, low.y, 0x5410), __byte_perm(top.x, top.y, 0x7632),
                         __byte_perm(low.x, low.y, 0x7632), word_of(v[0], s), word_of(v[1], s));
                multiply(acc[i], __byte_perm(top.z, top.w, 0x5410), __byte_perm(low.z, low.w, 0x5410), __byte_perm(top.z, top.w, 0x7632),
                         __byte_perm(low.z, low.w, 0x7632), word_of(v[2], s), word_of(v[3], s));
            }
        }
#pragma unroll
        for (u32 i = 0; i < 8; ++i) w[i / 4][i % 4] = next[i / 4][i % 4];
    }
#pragma unroll
    for (u32 i = 0; i < TILES; ++i) {
        float(*to)[TILE + 1] = sums[wave()] + i * 8 + q * 2;
        to[0][g] = acc[i].x;
        to[1][g] = acc[i].y;
        to[0][g + 8] = acc[i].z;
        to[1][g + 8] = acc[i].w;
    }
    block_sync();
    for (u32 i = thread_x(); i < count * TILE; i += THREADS) {
        const u32 t = token_at[0][i / TILE], r = i % TILE;
        float sum = 0.0f;
#pragma unroll
        for (u32 j = 0; j < WAVES; ++j) sum += sums[j][i / TILE][r];
        const float scale = scales[(u64)t * a.width + r];
        // What has no scale is nobody's: it may be infinite.
        const float low = scale == 0.0f ? 0.0f : sum * (scale * a.factor);
        a.low[((u64)(block_z() * a.n_matrices + m) * a.n_tokens + token0 + t) * a.width + rank0 + r] = low;
    }
}

#ifndef EMULATED
// c += a [16][8] b [8][8], in tf32: a lane (4 g + q) has of rows g and g + 8 two columns each, of
// column g of b the same two.
FORCE void multiply_tf32(F32x4& c, const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
        : "r"(bits_of_f32(a[0])), "r"(bits_of_f32(a[1])), "r"(bits_of_f32(a[2])), "r"(bits_of_f32(a[3])), "r"(bits_of_f32(b0)),
          "r"(bits_of_f32(b1)));
}
#endif
// The bits that tf32 holds.
FORCE float in_tf32(float v) { return f32_of_bits(bits_of_f32(v) & 0xffffe000u); }

FORCE void up_by_mma(const AdaptersUpArgs& a) {
    constexpr u32 COUNT = TOKENS, WINDOW = 128, CHUNKS = WINDOW / CHUNK, QUARTERS = WINDOW / 4, ROW_TILES = 2, TILES = COUNT / 8;
    // What adapters_down left, zero where there is no scale.
    __shared__ F32x4 low[COUNT][QUARTERS];
    // Whether a token has one of four scales, a byte each; a word has those of a chunk.
    __shared__ u32 has_scale[COUNT][CHUNKS];
    // Those that have one.
    __shared__ u16 quarters[COUNT * QUARTERS];
    __shared__ u32 n_quarters;
    __shared__ u8 token_at[UP_THREADS / WAVE][COUNT];
    let_next_start();
    const u32 token0 = block_y() * COUNT, n = least(COUNT, a.n_tokens - token0);
    u32 block;
    const AdapterMatrix matrix = one_of(a.matrices, matrix_of(a, block));
    const u32 g = lane() / 4, q = lane() % 4, row0 = block * UP_THREADS + wave() * (ROW_TILES * 16) + g;
    float* out = matrix.out + (u64)token0 * matrix.rows + row0;
    const u8* weights = matrix.weights + ((u64)row0 * a.width + q * 4) * 2;
    bool waits = true;
    if (!a.early) {
        wait_for_inputs();
        waits = false;
    }
#pragma unroll 1
    for (u32 first = 0; first < a.width; first += WINDOW) {
        // All have read what was there, and what was stored is seen.
        if (first > 0) block_sync();
        if (thread_x() == 0) n_quarters = 0;
        block_sync();
#pragma unroll
        for (u32 i = thread_x(); i < COUNT * QUARTERS; i += UP_THREADS) {
            const u32 t = i / QUARTERS, k = first + i % QUARTERS * 4;
            F32x4 s = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
            if (t < n && k < a.width) s = *(const F32x4*)(a.scales + (u64)(token0 + t) * a.width + k);
            const bool is = has_any(s);
            low[t][i % QUARTERS] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
            ((u8*)has_scale)[i] = is;
            if (is) quarters[counter_add(&n_quarters, 1)] = (u16)i;
        }
        block_sync();
        // Places of tokens in their order; bits of a chunk are places.
        u32 chunk_places[CHUNKS], left = ~0u, before = 0, place = 0, added = 0;
        bool is[CHUNKS];
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
            is[c] = has_scale[lane()][c] != 0;
            const u32 these = lanes_or(is[c] ? 1u << lane() : 0) & left;
            if (these >> lane() & 1) place = before + count_before(these);
            before += __popc(these);
            left &= ~these;
        }
        if (left >> lane() & 1) place = before + count_before(left);
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
            chunk_places[c] = lanes_or(is[c] ? 1u << place : 0);
            added |= chunk_places[c];
        }
        token_at[wave()][place] = (u8)lane();
        wave_sync();
        // A lane's four weights of rows g and g + 8, of both tiles of rows.
        U32x2 w[ROW_TILES][2][CHUNKS];
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (u32 r = 0; r < ROW_TILES * 2; ++r) {
                w[r / 2][r % 2][c] = U32x2{0, 0};
                if (chunk_places[c] && row0 + r * 8 < matrix.rows)
                    w[r / 2][r % 2][c] = stream8(weights + (r * 8 * a.width + first + c * CHUNK) * 2);
            }
        }
        if (waits) wait_for_inputs();
        waits = false;
        // A lane's sums of a tile: of rows g and g + 8 those of places 2 q and 2 q + 1 of eight.
        auto at = [&](u32 r, u32 i, u32 j) {
            return out + (token_at[wave()][i * 8 + q * 2 + j % 2] * matrix.rows + r * 16 + j / 2 * 8);
        };
        auto there = [&](u32 r, u32 i, u32 j) {
            return (added >> (i * 8 + q * 2 + j % 2) & 1) && row0 + r * 16 + j / 2 * 8 < matrix.rows;
        };
        float was[TILES][4];
        auto read = [&](u32 r) {
#pragma unroll
            for (u32 i = 0; i < TILES * 4; ++i) was[i / 4][i % 4] = there(r, i / 4, i % 4) ? *at(r, i / 4, i % 4) : 0.0f;
        };
        read(0);
#pragma unroll 1
        for (u32 i = thread_x(); i < n_quarters; i += UP_THREADS) {
            const u32 t = quarters[i] / QUARTERS, k = quarters[i] % QUARTERS;
            F32x4 sum = F32x4{0.0f, 0.0f, 0.0f, 0.0f}, parts[PARTS];
#pragma unroll
            for (u32 part = 0; part < PARTS; ++part) {
                const u64 place = ((u64)(part * a.n_low + matrix.low) * a.n_tokens + token0 + t) * a.width + first + k * 4;
                parts[part] = part < a.n_parts ? *(const F32x4*)(a.low + place) : sum;
            }
#pragma unroll
            for (u32 part = 0; part < PARTS; ++part) sum = plus(sum, parts[part]);
            low[t][k] = sum;
        }
        block_sync();
#pragma unroll
        for (u32 r = 0; r < ROW_TILES; ++r) {
            F32x4 acc[TILES];
#pragma unroll
            for (u32 i = 0; i < TILES; ++i) acc[i] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (u32 c = 0; c < CHUNKS; ++c) {
                if (chunk_places[c] == 0) continue;
                const U32x2 top = w[r][0][c], bottom = w[r][1][c];
                const float one[4] = {f32_of_f16(top.x), f32_of_f16(bottom.x), f32_of_f16(top.x >> 16), f32_of_f16(bottom.x >> 16)};
                const float two[4] = {f32_of_f16(top.y), f32_of_f16(bottom.y), f32_of_f16(top.y >> 16), f32_of_f16(bottom.y >> 16)};
#pragma unroll
                for (u32 i = 0; i < TILES; ++i) {
                    if ((chunk_places[c] >> (i * 8) & 255) == 0) continue;
                    const F32x4 y = low[token_at[wave()][i * 8 + g]][c * (CHUNK / 4) + q];
                    const F32x4 high = F32x4{in_tf32(y.x), in_tf32(y.y), in_tf32(y.z), in_tf32(y.w)};
                    multiply_tf32(acc[i], one, high.x, high.y);
                    multiply_tf32(acc[i], one, y.x - high.x, y.y - high.y);
                    multiply_tf32(acc[i], two, high.z, high.w);
                    multiply_tf32(acc[i], two, y.z - high.z, y.w - high.w);
                }
            }
            float sums[TILES][4];
#pragma unroll
            for (u32 i = 0; i < TILES; ++i) {
                sums[i][0] = was[i][0] + acc[i].x;
                sums[i][1] = was[i][1] + acc[i].y;
                sums[i][2] = was[i][2] + acc[i].z;
                sums[i][3] = was[i][3] + acc[i].w;
            }
            // Asked for before the first is stored.
            if (r + 1 < ROW_TILES) read(r + 1);
#pragma unroll
            for (u32 i = 0; i < TILES * 4; ++i) {
                if (there(r, i / 4, i % 4)) *at(r, i / 4, i % 4) = sums[i / 4][i % 4];
            }
        }
    }
}
#endif
