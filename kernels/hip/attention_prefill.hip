// Causal attention of many rows over their sequences' pages: prefill. Portable form, f32 arithmetic.
//
// q [rows][n_head][DIM] f32, rotated already (rope_kv); K and V of the rows themselves are in the pages. A tile is up to
// TILE_ROWS consecutive rows of one sequence; `tiles` [n_tiles]{first_row, n_rows} lies in device memory.
// Geometry: grid (n_head, n_tiles), THREADS threads: 16 x 8. A page of K, then of V, goes through shared memory as f32; each
// thread has 4 rows x 4 positions of scores and 4 rows x DIM / 8 outputs. Online softmax (arXiv 2205.14135), a step a page.
// Bound by arithmetic: 4 DIM multiply-adds a pair of positions and head.
// Shared memory: static, see below (DIM 128: 50 KiB in f32 would be too much, so K and V stay f16).
// Entry: attention_prefill_<dim> (DIM).
#include "compat.h"
#include "kv.h"

#define THREADS 128
#define TILE_ROWS 64u

struct AttentionPrefillArgs {
    const float* q;
    float* out;
    const u32* tiles;
    KvPlace kv;
    float scale;
    u32 n_head;
};

ENTRY(THREADS, 1) UNIT(AttentionPrefillArgs a) {
    // q transposed in f16: [DIM][TILE_ROWS]; a page of K or V in f16: [PAGE][DIM + 2]; weights [TILE_ROWS][PAGE].
    __shared__ alignas(16) u16 q[DIM][TILE_ROWS + 4];
    __shared__ alignas(16) u16 kv[PAGE][DIM + 4];
    __shared__ float weights[TILE_ROWS][PAGE + 1];
    let_next_start();
    wait_for_inputs();
    const u32 t = thread_x(), head = block_x();
    const u32 first_row = a.tiles[2 * block_y()], n_rows = a.tiles[2 * block_y() + 1];
    const u32 head_kv = head / (a.n_head / a.kv.n_head_kv);
    const u32 sequence = sequence_of(a.kv, first_row), first_position = a.kv.positions[first_row];
    const float factor = a.scale * 1.44269504088896341f;
    for (u32 i = t; i < TILE_ROWS * DIM; i += THREADS) {
        u32 r = i / DIM, d = i % DIM;
        q[d][r] = f16_of_f32(r < n_rows ? a.q[((u64)(first_row + r) * a.n_head + head) * DIM + d] * factor : 0.0f);
    }
    const u32 rows4 = t / 8 * 4, column = t % 8;
    float largest[4], total[4], acc[4][DIM / 8];
#pragma unroll
    for (u32 r = 0; r < 4; ++r) {
        largest[r] = NEG_INF;
        total[r] = 0.0f;
#pragma unroll
        for (u32 d = 0; d < DIM / 8; ++d) acc[r][d] = 0.0f;
    }
    const u32 n_pages = (first_position + n_rows - 1) / PAGE + 1;
    for (u32 page = 0; page < n_pages; ++page) {
        const u8* at = page_of(a.kv, sequence, page);
        const u32* keys = (const u32*)(at + k_offset(a.kv, head_kv));
        const u32* values = (const u32*)(at + v_offset(a.kv, head_kv));
        block_sync();
        for (u32 i = t; i < PAGE * DIM / 2; i += THREADS) *(u32*)&kv[i / (DIM / 2)][i % (DIM / 2) * 2] = keys[i];
        block_sync();
        float s[4][4];
#pragma unroll
        for (u32 r = 0; r < 4; ++r) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) s[r][j] = 0.0f;
        }
        for (u32 d = 0; d < DIM; ++d) {
            float x[4], y[4];
#pragma unroll
            for (u32 r = 0; r < 4; ++r) x[r] = f32_of_f16(q[d][rows4 + r]);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) y[j] = f32_of_f16(kv[column + 8 * j][d]);
#pragma unroll
            for (u32 r = 0; r < 4; ++r) {
#pragma unroll
                for (u32 j = 0; j < 4; ++j) s[r][j] += x[r] * y[j];
            }
        }
#pragma unroll
        for (u32 r = 0; r < 4; ++r) {
            u32 visible = first_position + rows4 + r + 1;  // positions below this
            float m = largest[r];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                if (page * PAGE + column + 8 * j >= visible) s[r][j] = NEG_INF;
                m = max_of(m, s[r][j]);
            }
            m = lanes_max(m, 8);
            float sum = 0.0f;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                float w = exp2_of(s[r][j] - m);
                weights[rows4 + r][column + 8 * j] = w;
                sum += w;
            }
            float rescale = exp2_of(largest[r] - m);
            total[r] = total[r] * rescale + lanes_sum(sum, 8);
            largest[r] = m;
#pragma unroll
            for (u32 d = 0; d < DIM / 8; ++d) acc[r][d] *= rescale;
        }
        block_sync();
        for (u32 i = t; i < PAGE * DIM / 2; i += THREADS) *(u32*)&kv[i / (DIM / 2)][i % (DIM / 2) * 2] = values[i];
        block_sync();
        // Slots past the last position may hold anything, NaN too: their weight is zero, so they are left out.
        const u32 n_slots = least(PAGE, first_position + n_rows - page * PAGE);
        for (u32 p = 0; p < n_slots; ++p) {
            float w[4];
#pragma unroll
            for (u32 r = 0; r < 4; ++r) w[r] = weights[rows4 + r][p];
#pragma unroll
            for (u32 d = 0; d < DIM / 8; ++d) {
                float v = f32_of_f16(kv[p][column + 8 * d]);
#pragma unroll
                for (u32 r = 0; r < 4; ++r) acc[r][d] += w[r] * v;
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < 4; ++r) {
        if (rows4 + r < n_rows) {
            float* out = a.out + ((u64)(first_row + rows4 + r) * a.n_head + head) * DIM;
            const float share = 1.0f / total[r];
#pragma unroll
            for (u32 d = 0; d < DIM / 8; ++d) out[column + 8 * d] = acc[r][d] * share;
        }
    }
}
