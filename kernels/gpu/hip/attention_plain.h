// Prefill attention in f32 arithmetic, for what has no matrix instructions that are used here.
// Included by attention_prefill.hip.
//
// 64 entries a block, threads in 16 x 8. A page of K, then of V, goes through shared memory as f16;
// each thread has 4 entries x 4 positions of scores and 4 entries x DIM / 8 outputs.
#pragma once

#define M_BLOCK 64u

// A page's keys or values of a head, as f16.
FORCE void load_rows(u16 (&to)[PAGE][DIM + 4], const u8* head) {
#ifdef KV_Q8
    for (u32 i = thread_x(); i < PAGE * DIM / 8; i += THREADS) {
        const u32 slot = i / (DIM / 8), at = i % (DIM / 8);
        const U32x4 x = halves_of(piece_of(head, DIM, slot, at));
        U32x2* row = (U32x2*)&to[slot][at * 8];
        row[0] = U32x2{x.x, x.y};
        row[1] = U32x2{x.z, x.w};
    }
#else
    for (u32 i = thread_x(); i < PAGE * DIM / 2; i += THREADS) {
        *(u32*)&to[i / (DIM / 2)][i % (DIM / 2) * 2] = ((const u32*)head)[i];
    }
#endif
}

FORCE void attention_prefill(const AttentionPrefillArgs& a) {
    // Queries transposed in f16: [DIM][M_BLOCK]; a page of K or V in f16: [PAGE][DIM +
    // 4]; weights [M_BLOCK][PAGE].
    __shared__ alignas(16) u16 q[DIM][M_BLOCK + 4];
    __shared__ alignas(16) u16 kv[PAGE][DIM + 4];
    __shared__ float weights[M_BLOCK][PAGE + 1];
    let_next_start();
    wait_for_inputs();
    const PrefillBlock block(a, M_BLOCK);
    if (block.m0 >= block.entries) return;
    const u32 t = thread_x();
    const float factor = a.scale * 1.44269504088896341f, cap = cap_of(a.softcap);
    for (u32 i = t; i < M_BLOCK * DIM; i += THREADS) {
        u32 e = i / DIM, d = i % DIM;
        q[d][e] = f16_of_f32(a.q[block.element(block.m0 + e) + d] * factor);
    }
    const u32 entries4 = t / 8 * 4, column = t % 8;
    float largest[4], total[4], acc[4][DIM / 8];
#pragma unroll
    for (u32 r = 0; r < 4; ++r) {
        largest[r] = block.first_largest(block.m0 + entries4 + r);
        total[r] = block.first_total();
#pragma unroll
        for (u32 d = 0; d < DIM / 8; ++d) acc[r][d] = 0.0f;
    }
    const u32 n_visible = block.behind(block.position(block.m0 + M_BLOCK - 1));
    for (u32 page = block.start(block.position(block.m0)) / PAGE; page * PAGE < n_visible; ++page) {
        const u8* at = block.page(page);
        const u8* keys = at + k_offset(a.kv, block.head_kv);
        const u8* values = at + v_offset(a.kv, block.head_kv);
        block_sync();
        load_rows(kv, keys);
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
            for (u32 r = 0; r < 4; ++r) x[r] = f32_of_f16(q[d][entries4 + r]);
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
            const u32 position = block.position(block.m0 + entries4 + r), start = block.start(position), behind = block.behind(position);
#ifdef ALIBI
            const float slope = block.slope(block.m0 + entries4 + r);
#endif
            float m = largest[r];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 p = page * PAGE + column + 8 * j;
                if (cap > 0.0f) s[r][j] = capped(s[r][j], cap);
#ifdef ALIBI
                s[r][j] -= slope * apart(p, position);
#endif
                if (p >= behind || p < start) s[r][j] = NEG_INF;
                m = max_of(m, s[r][j]);
            }
            m = lanes_max(m, 8);
            const float base = base_of(m);
            float sum = 0.0f;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                float w = exp2_of(s[r][j] - base);
                weights[entries4 + r][column + 8 * j] = w;
                sum += w;
            }
            float rescale = exp2_of(largest[r] - base);
            total[r] = total[r] * rescale + lanes_sum(sum, 8);
            largest[r] = m;
#pragma unroll
            for (u32 d = 0; d < DIM / 8; ++d) acc[r][d] *= rescale;
        }
        block_sync();
        load_rows(kv, values);
        block_sync();
        // Slots past the last position may hold anything, NaN too: their weight is
        // zero, so they are left out.
        const u32 n_slots = least(PAGE, n_visible - page * PAGE);
        for (u32 p = 0; p < n_slots; ++p) {
            float w[4];
#pragma unroll
            for (u32 r = 0; r < 4; ++r) w[r] = weights[entries4 + r][p];
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
        if (block.m0 + entries4 + r < block.entries) {
            float* out = a.out + block.element(block.m0 + entries4 + r);
            const float share = 1.0f / total[r];
#pragma unroll
            for (u32 d = 0; d < DIM / 8; ++d) out[column + 8 * d] = acc[r][d] * share;
        }
    }
}
