// Prefill attention by mma.sync (NVIDIA, sm_80 and later). Included by attention_prefill.hip.
//
// A block has 128 entries, a warp 32 of them as two blocks of 16 rows: what it loads of K and V is
// multiplied twice. Tiles of up to 64 entries are dealt out 16 to a warp, so that twice as many
// warps have half the work each. A step is 64 keys. Heads of more than 128 leave registers for one
// block of rows and shared memory for 32 keys. Shared memory: the queries as f16, scaled, and three
// places for 64 rows of K or V, in turn: while K is multiplied its V and the next K are on their
// way. Rows are padded by 16 bytes so that ldmatrix meets no bank twice. Of pages of 8 bits
// (KV_Q8), a step's K and V as f16 are in two places; the next step's come as they are stored,
// meanwhile, each thread's to a place that only it reads again to make f16 of them, when nobody
// reads the step's any more. Heads that are no whole blocks of 16 (DIM of 72) have zeros behind
// them in shared memory, up to WIDE. Fragments (PTX ISA, mma.m16n8k16): lane l has rows l / 4 and l
// / 4 + 8, columns 2 (l % 4) and the next; scores as they come out are weights as they go in.
#pragma once

#if WIDE > 128
#define ROW_BLOCKS 1u
#define KEYS 32u
#else
#define ROW_BLOCKS 2u
#define KEYS 64u
#endif
#define M_BLOCK (64u * ROW_BLOCKS)
#define STRIDE (WIDE + 8u)

FORCE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
FORCE void matrices(u32 at, u32 (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
FORCE void matrices_transposed(u32 at, u32 (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
// c += a [16][16] b [16][8]
FORCE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// 16 bytes to shared memory when they come; zeros if `bytes` is 0.
FORCE void copy16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
FORCE void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last group of copies have come.
FORCE void copies_but_one() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

#ifdef KV_Q8
// 4 bytes to shared memory, likewise.
FORCE void copy4(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
FORCE void copies_all() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// 16 codes of a row, and the word that their scale is in, are a thread's share of what comes at
// once.
#define RAW_CHUNKS (DIM / 16)
#define RAW_BYTES (KEYS * DIM + KEYS * RAW_CHUNKS * 4)

// Queues the copy of a step's keys (offset of K) or values as they are stored, rows before `start`
// and past `n_visible` as zeros with scales of zero. `to` is the address of RAW_BYTES.
FORCE void copy_codes(const PrefillBlock& block, u32 step, u32 offset, u32 start, u32 n_visible, u32 to) {
    const u32 first = step * KEYS;
    if (first < n_visible) {
        const u32 last_page = (n_visible - 1) / PAGE;
        const u8* low = block.page(first / PAGE) + offset;
        const u8* high = block.page(least(first / PAGE + 1, last_page)) + offset;
#pragma unroll
        for (u32 i = 0; i < KEYS * RAW_CHUNKS / THREADS; ++i) {
            const u32 c = i * THREADS + thread_x(), r = c / RAW_CHUNKS, k = c % RAW_CHUNKS, slot = r % PAGE;
            const u8* from = r < PAGE ? low : high;
            const bool seen = first + r < n_visible && first + r >= start;
            copy16(to + c * 16, from + (slot * RAW_CHUNKS + k) * 16, seen ? 16 : 0);
            copy4(to + KEYS * DIM + c * 4, from + PAGE * DIM + (slot * (DIM / 32) + k / 2) / 2 * 4, seen ? 4 : 0);
        }
    }
    copies_end();
}
// Makes f16 rows of what this thread's copies brought to byte `from` of shared memory, at byte
// `to`.
FORCE void widen_rows(U32x4* shared, u32 from, u32 to) {
    const u8* codes = (const u8*)shared + from;
#pragma unroll
    for (u32 i = 0; i < KEYS * RAW_CHUNKS / THREADS; ++i) {
        const u32 c = i * THREADS + thread_x(), r = c / RAW_CHUNKS, k = c % RAW_CHUNKS;
        const U32x4 x = *(const U32x4*)(codes + c * 16);
        const u32 scales = *(const u32*)(codes + KEYS * DIM + c * 4);
        const u32 scale = (r % PAGE * (DIM / 32) + k / 2) % 2 ? scales >> 16 : scales & 0xffffu;
        U32x4* row = (U32x4*)((u8*)shared + to + r * (STRIDE * 2) + k * 32);
        row[0] = halves_of(Piece{x.x, x.y, scale});
        row[1] = halves_of(Piece{x.z, x.w, scale});
    }
}
#else

// Queues the copy of a step's keys (offset of K) or values, rows before `start` and
// past `n_visible` as zeros.
FORCE void copy_rows(const PrefillBlock& block, u32 step, u32 offset, u32 start, u32 n_visible, u32 to) {
    constexpr u32 CHUNKS = WIDE / 8, STORED = DIM / 8;
    const u32 first = step * KEYS;
    if (first < n_visible) {
        const u32 last_page = (n_visible - 1) / PAGE;
        const u8* low = block.page(first / PAGE) + offset;
        const u8* high = block.page(least(first / PAGE + 1, last_page)) + offset;
#pragma unroll
        for (u32 i = 0; i < KEYS * CHUNKS / THREADS; ++i) {
            const u32 c = i * THREADS + thread_x(), r = c / CHUNKS, k = c % CHUNKS;
            const bool stored = WIDE == DIM || k < STORED;
            const u8* from = (r < PAGE ? low : high) + (r % PAGE * STORED + (stored ? k : 0)) * 16;
            copy16(to + r * (STRIDE * 2) + k * 16, from, stored && first + r < n_visible && first + r >= start ? 16 : 0);
        }
    }
    copies_end();
}
#endif

// Of what several found, `found(of, b, d)` for `of` from `first` on by steps, what all found
// together. Summed in their order, so that the result does not depend on who came last.
template <class Found>
FORCE void join(const Found& found, u32 first, u32 end, u32 step, bool all_rows, float (&out)[ROW_BLOCKS][WIDE / 8][4],
                float (&largest)[ROW_BLOCKS][2], float (&total)[ROW_BLOCKS][2]) {
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; ++b) {
        if (b > 0 && !all_rows) continue;
        largest[b][0] = largest[b][1] = NEG_INF;
        for (u32 of = first; of < end; of += step) {
            const F32x4 x = *found(of, b, WIDE / 8);
            largest[b][0] = max_of(largest[b][0], x.x);
            largest[b][1] = max_of(largest[b][1], x.y);
        }
        total[b][0] = total[b][1] = 0.0f;
#pragma unroll
        for (u32 d = 0; d < WIDE / 8; ++d) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) out[b][d][i] = 0.0f;
        }
        for (u32 of = first; of < end; of += step) {
            const F32x4 x = *found(of, b, WIDE / 8);
            // A part of which a row sees nothing has none.
            const float low = x.x == NEG_INF ? 0.0f : exp2_of(x.x - base_of(largest[b][0]));
            const float high = x.y == NEG_INF ? 0.0f : exp2_of(x.y - base_of(largest[b][1]));
            total[b][0] += x.z * low;
            total[b][1] += x.w * high;
#pragma unroll
            for (u32 d = 0; d < WIDE / 8; ++d) {
                const F32x4 y = *found(of, b, d);
                out[b][d][0] += y.x * low;
                out[b][d][1] += y.y * low;
                out[b][d][2] += y.z * high;
                out[b][d][3] += y.w * high;
            }
        }
    }
}

// Whether this block is the last of so many that come here, and then sees what the others left.
FORCE bool comes_last(u32* counter, u32 blocks, U32x4* shared) {
    device_fence();
    block_sync();
    u32* before = (u32*)shared;
    if (thread_x() == 0) *before = counter_add(counter, 1);
    block_sync();
    const bool last = *before == blocks - 1;
    // Nobody writes there again before all have read it.
    block_sync();
    if (!last) return false;
    device_fence();
    if (thread_x() == 0) *counter = 0;
    return true;
}

// Leaves what a part found in `partials`, [block][part][ROW_BLOCKS * (WIDE / 8 + 1)][part_threads]
// of 16 bytes (of one block of rows the others' places stay empty). Whether this block is the last
// one of its parts: it has what all found together then. Parts are joined in two rounds, runs of
// consecutive ones and then the runs, so that no block has to read what more than about twice the
// root of their number found. Counters: [block][1 + runs].
FORCE bool joins_parts(const AttentionPrefillArgs& a, u32 part, u32 parts, bool all_rows, float (&out)[ROW_BLOCKS][WIDE / 8][4],
                       float (&largest)[ROW_BLOCKS][2], float (&total)[ROW_BLOCKS][2], U32x4* shared) {
    constexpr u32 EACH = WIDE / 8 + 1;
    const u32 place = block_y() * gridDim.x + block_x(), threads = a.part_threads;
    F32x4* const all = a.partials + (u64)place * parts * (ROW_BLOCKS * EACH * threads) + thread_x();
    auto found = [&](u32 of, u32 b, u32 d) { return all + ((of * ROW_BLOCKS + b) * EACH + d) * threads; };
    // Threads without entries have nothing to leave.
    const bool has_some = thread_x() < threads;
    auto leave = [&](u32 of) {
        if (!has_some) return;
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
            if (b > 0 && !all_rows) continue;
#pragma unroll
            for (u32 d = 0; d < WIDE / 8; ++d) *found(of, b, d) = F32x4{out[b][d][0], out[b][d][1], out[b][d][2], out[b][d][3]};
            *found(of, b, WIDE / 8) = F32x4{largest[b][0], largest[b][1], total[b][0], total[b][1]};
        }
    };
    u32 each = 1;
    while (each * each < parts) ++each;
    const u32 runs = (parts + each - 1) / each, run = part / each;
    const u32 first = run * each, end = least(first + each, parts);
    u32* const counters = a.counters + place * (runs + 1);
    leave(part);
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (!comes_last(counters + 1 + run, end - first, shared)) return false;
    if (has_some) join(found, first, end, 1, all_rows, out, largest, total);
    if (runs == 1) return true;
    leave(first);
    if (!comes_last(counters, runs, shared)) return false;
    if (has_some) join(found, 0, parts, each, all_rows, out, largest, total);
    return true;
}

FORCE void attention_prefill(const AttentionPrefillArgs& a) {
    extern __shared__ U32x4 shared_prefill[];
    let_next_start();
    wait_for_inputs();
    const PrefillBlock block(a, M_BLOCK);
    if (block.m0 >= block.entries) return;
    // Whether warps have all their blocks of rows, or the first one alone.
    const bool all_rows = ROW_BLOCKS == 1 || block.entries > 64;
    const u32 l = lane(), warp_entry = wave() * (all_rows ? 16 * ROW_BLOCKS : 16), m = block.m0 + warp_entry;
    // A warp without entries copies with the others, and computes nothing.
    const bool busy = m < block.entries;
    const u32 queries = shared_address(shared_prefill);
    const u32 places = queries + M_BLOCK * STRIDE * 2, place_bytes = KEYS * STRIDE * 2;
    const u32 k_at = k_offset(a.kv, block.head_kv), v_at = v_offset(a.kv, block.head_kv);
    // Which of the three places K of this step, V of this step and K of the next one have.
    u32 k_place = places, v_place = places + place_bytes, next_place = places + 2 * place_bytes;
    // The first page that any row attends to; those before may have been given back.
    const u32 start = block.start(block.position(block.m0)) / PAGE * PAGE, behind = block.behind(block.position(block.m0 + M_BLOCK - 1));
    const u32 part = block_z(), parts = gridDim.z, all_steps = (behind + KEYS - 1) / KEYS - start / KEYS;
    const u32 first_step = start / KEYS + all_steps * part / parts, n_steps = start / KEYS + all_steps * (part + 1) / parts;
    const u32 n_visible = least(behind, n_steps * KEYS);
#ifdef KV_Q8
    // K and V of a step, and behind them both of the next one as they come.
    const u32 k_bytes = k_place - queries, v_bytes = v_place - queries;
    const u32 k_raw = next_place - queries, v_raw = k_raw + RAW_BYTES;
    copy_codes(block, first_step, k_at, start, n_visible, queries + k_raw);
    copy_codes(block, first_step, v_at, start, n_visible, queries + v_raw);
#else
    copy_rows(block, first_step, k_at, start, n_visible, k_place);
    copy_rows(block, first_step, v_at, start, n_visible, v_place);
    copy_rows(block, first_step + 1, k_at, start, n_visible, next_place);
#endif
    const float factor = a.scale * 1.44269504088896341f, cap = cap_of(a.softcap);
    for (u32 i = thread_x(); i < M_BLOCK * (WIDE / 8); i += THREADS) {
        const u32 e = i / (WIDE / 8), k = i % (WIDE / 8);
        if (WIDE != DIM && k >= DIM / 8) {
            shared_prefill[e * (STRIDE / 8) + k] = U32x4{0, 0, 0, 0};
            continue;
        }
        const F32x4* from = (const F32x4*)(a.q + block.element(block.m0 + e) + k * 8);
        const F32x4 x = from[0], y = from[1];
        shared_prefill[e * (STRIDE / 8) + k] =
            U32x4{pack_f16(x.x * factor, x.y * factor), pack_f16(x.z * factor, x.w * factor),
                  pack_f16(y.x * factor, y.y * factor), pack_f16(y.z * factor, y.w * factor)};
    }
    // Positions of this lane's four rows, and the first of the warp.
    u32 position[ROW_BLOCKS][2];
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; ++b) {
        position[b][0] = block.position(m + 16 * b + l / 4);
        position[b][1] = block.position(m + 16 * b + l / 4 + 8);
    }
#ifdef ALIBI
    // What the scores of this lane's rows fall by a position.
    float slope[ROW_BLOCKS][2];
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; ++b) {
        slope[b][0] = block.slope(m + 16 * b + l / 4);
        slope[b][1] = block.slope(m + 16 * b + l / 4 + 8);
    }
#endif
    const u32 first_behind = block.behind(block.position(m));
    float out[ROW_BLOCKS][WIDE / 8][4], largest[ROW_BLOCKS][2], total[ROW_BLOCKS][2];
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            largest[b][h] = part == 0 ? block.first_largest(m + 16 * b + 8 * h + l / 4) : NEG_INF;
            total[b][h] = part == 0 && l % 4 == 0 ? block.first_total() : 0.0f;
        }
#pragma unroll
        for (u32 d = 0; d < WIDE / 8; ++d) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) out[b][d][i] = 0.0f;
        }
    }
    const u32 q_lane = queries + ((warp_entry + l % 16) * STRIDE + l / 16 * 8) * 2;
    const u32 k_lane = ((l / 16 * 8 + l % 8) * STRIDE + l / 8 % 2 * 8) * 2;
    const u32 v_lane = ((l / 8 % 2 * 8 + l % 8) * STRIDE + l / 16 * 8) * 2;
#ifdef KV_Q8
    copies_all();
    widen_rows(shared_prefill, k_raw, k_bytes);
    widen_rows(shared_prefill, v_raw, v_bytes);
    block_sync();
    copy_codes(block, first_step + 1, k_at, start, n_visible, queries + k_raw);
    copy_codes(block, first_step + 1, v_at, start, n_visible, queries + v_raw);
#else
    asm volatile("cp.async.wait_group 2;" ::: "memory");
    block_sync();
#endif
    for (u32 step = first_step; step < n_steps; ++step) {
        float s[ROW_BLOCKS][KEYS / 8][4];
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) s[b][n][i] = 0.0f;
            }
        }
        if (busy) {
#pragma unroll
        for (u32 k = 0; k < WIDE / 16; ++k) {
            u32 x[ROW_BLOCKS][4];
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                if (b == 0 || all_rows) matrices(q_lane + b * (16 * STRIDE * 2) + k * 32, x[b]);
            }
#pragma unroll
            for (u32 n = 0; n < KEYS / 16; ++n) {
                u32 y[4];
                matrices(k_place + k_lane + n * (16 * STRIDE * 2) + k * 32, y);
#pragma unroll
                for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                    if (b > 0 && !all_rows) continue;
                    multiply(s[b][2 * n], x[b], y[0], y[1]);
                    multiply(s[b][2 * n + 1], x[b], y[2], y[3]);
                }
            }
        }
        }
#ifndef KV_Q8
        // V has come, and nobody reads K any more.
        copies_but_one();
        block_sync();
        copy_rows(block, step + 1, v_at, start, n_visible, k_place);
#endif
        if (busy) {
        if (cap > 0.0f) {
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                if (b > 0 && !all_rows) continue;
#pragma unroll
                for (u32 n = 0; n < KEYS / 8; ++n) {
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) s[b][n][i] = capped(s[b][n][i], cap);
                }
            }
        }
#ifdef ALIBI
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
            if (b > 0 && !all_rows) continue;
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; ++n) {
                const u32 p = step * KEYS + n * 8 + l % 4 * 2;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) s[b][n][i] -= slope[b][i / 2] * apart(p + i % 2, position[b][i / 2]);
            }
        }
#endif
        if (a.window || step * KEYS + KEYS > first_behind) {
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                if (b > 0 && !all_rows) continue;
#pragma unroll
                for (u32 n = 0; n < KEYS / 8; ++n) {
                    const u32 p = step * KEYS + n * 8 + l % 4 * 2;
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        const u32 at = p + i % 2, own = position[b][i / 2];
                        if (at >= block.behind(own) || at < block.start(own)) s[b][n][i] = NEG_INF;
                    }
                }
            }
        }
        bool grown = false;
        float m_new[ROW_BLOCKS][2];
#pragma unroll
        for (u32 b = 0; b < ROW_BLOCKS; ++b) {
            m_new[b][0] = m_new[b][1] = NEG_INF;
            if (b > 0 && !all_rows) continue;
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                float x = largest[b][h];
#pragma unroll
                for (u32 n = 0; n < KEYS / 8; ++n) x = max_of(x, max_of(s[b][n][2 * h], s[b][n][2 * h + 1]));
                x = max_of(x, shuffle_xor(x, 1));
                x = max_of(x, shuffle_xor(x, 2));
                m_new[b][h] = x;
                grown = grown || x > largest[b][h] + LAG;
            }
        }
        if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                if (b > 0 && !all_rows) continue;
                const float low = exp2_of(largest[b][0] - base_of(m_new[b][0]));
                const float high = exp2_of(largest[b][1] - base_of(m_new[b][1]));
                largest[b][0] = m_new[b][0];
                largest[b][1] = m_new[b][1];
                total[b][0] *= low;
                total[b][1] *= high;
#pragma unroll
                for (u32 d = 0; d < WIDE / 8; ++d) {
                    out[b][d][0] *= low;
                    out[b][d][1] *= low;
                    out[b][d][2] *= high;
                    out[b][d][3] *= high;
                }
            }
        }
#pragma unroll
        for (u32 k = 0; k < KEYS / 16; ++k) {
            u32 w[ROW_BLOCKS][4];
#pragma unroll
            for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                if (b > 0 && !all_rows) continue;
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    const float base = base_of(largest[b][h]);
#pragma unroll
                    for (u32 half = 0; half < 2; ++half) {
                        const float x = exp2_of(s[b][2 * k + half][2 * h] - base);
                        const float y = exp2_of(s[b][2 * k + half][2 * h + 1] - base);
                        total[b][h] += x + y;
                        w[b][2 * half + h] = pack_f16(x, y);
                    }
                }
            }
#pragma unroll
            for (u32 d = 0; d < WIDE / 16; ++d) {
                u32 y[4];
                matrices_transposed(v_place + v_lane + k * (16 * STRIDE * 2) + d * 32, y);
#pragma unroll
                for (u32 b = 0; b < ROW_BLOCKS; ++b) {
                    if (b > 0 && !all_rows) continue;
                    multiply(out[b][2 * d], w[b], y[0], y[1]);
                    multiply(out[b][2 * d + 1], w[b], y[2], y[3]);
                }
            }
        }
        }
#ifdef KV_Q8
        if (step + 1 == n_steps) break;
        // The next K and V have come, and nobody reads these any more.
        copies_all();
        block_sync();
        widen_rows(shared_prefill, k_raw, k_bytes);
        widen_rows(shared_prefill, v_raw, v_bytes);
        block_sync();
        copy_codes(block, step + 2, k_at, start, n_visible, queries + k_raw);
        copy_codes(block, step + 2, v_at, start, n_visible, queries + v_raw);
#else
        // The next K has come, and nobody reads V any more.
        copies_but_one();
        block_sync();
        copy_rows(block, step + 2, k_at, start, n_visible, v_place);
        const u32 old_k = k_place, old_v = v_place;
        k_place = next_place;
        v_place = old_k;
        next_place = old_v;
#endif
    }
    if (parts > 1 && !joins_parts(a, part, parts, all_rows, out, largest, total, shared_prefill)) return;
#pragma unroll
    for (u32 b = 0; b < ROW_BLOCKS; ++b) {
        if (b > 0 && !all_rows) continue;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            float x = total[b][h];
            x += shuffle_xor(x, 1);
            x += shuffle_xor(x, 2);
            const float share = 1.0f / x;
            const u32 e = m + 16 * b + 8 * h + l / 4;
            if (e < block.entries) {
                float* to = a.out + block.element(e) + l % 4 * 2;
#pragma unroll
                for (u32 d = 0; d < DIM / 8; ++d) *(F32x2*)(to + d * 8) = F32x2{out[b][d][2 * h] * share, out[b][d][2 * h + 1] * share};
            }
        }
    }
}
