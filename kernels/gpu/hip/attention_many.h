// Decode of many rows, and of several, by matrix instructions (NVIDIA, sm_80 and later), of pages
// of f16. Included by attention_decode.hip, whose arguments it takes. Of many, enough to fill the
// device, contexts are not split. Those of several are, but a part has PART_TILES tiles at least,
// so that short ones are not, however many parts there may be.
//
// Rows are bound by the latency of short loops, not by bytes: 64 rows of 192 positions
// took four times what their keys and values take to read. Here each warp of a block goes
// on by itself, through every WAVES_-th tile of 16 positions with a softmax of its own,
// and all meet once at the end.
//
// Scores are keys times queries, [16 positions] x [8 heads], and values come in as [16 elements]
// x [16 positions], so that eight heads fill a multiplication (m16n8k16) and nothing goes
// through shared memory: a lane reads 16 bytes at a time of two positions, in an order of
// elements that keys and queries share, and movmatrix turns weights and values. Queries and
// weights are rounded to f16, as in prefill.
#pragma once

#define MANY_THREADS 128
#define SEVERAL_THREADS 256
#define MANY_HEADS 8u
#define TILE 16u
#define PART_TILES 32u
// 16-byte pieces of a position that a lane has: lane % 4 and every fourth behind it.
#define PIECES (DIM / 32)

// c += a [16][16] b [16][8]
FORCE void multiply_many(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Eight rows of eight f16, two a lane: rows become columns.
FORCE u32 turned(u32 rows) {
    u32 columns;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
    return columns;
}

// A lane's pieces of a tile's positions lane / 4 and lane / 4 + 8.
struct ManyTile {
    U32x4 keys[2][PIECES], values[2][PIECES];

    // Positions before `start`, and from `stop` on, are zeros.
    FORCE void load(const AttentionDecodeArgs& a, u32 sequence, u32 head_kv, u32 base, u32 start, u32 stop) {
        const u8* page = page_of(a.kv, sequence, base / PAGE);
        const U32x4* k = (const U32x4*)(page + k_offset(a.kv, head_kv)) + lane() % 4;
        const U32x4* v = (const U32x4*)(page + v_offset(a.kv, head_kv)) + lane() % 4;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 p = base + lane() / 4 + 8 * half, at = p % PAGE * (DIM / 8);
            const bool in = p >= start && p < stop;
#pragma unroll
            for (u32 i = 0; i < PIECES; ++i) keys[half][i] = in ? k[at + 4 * i] : U32x4{0, 0, 0, 0};
#pragma unroll
            for (u32 i = 0; i < PIECES; ++i) values[half][i] = in ? v[at + 4 * i] : U32x4{0, 0, 0, 0};
        }
    }
};

template <u32 WAVES_, bool SPLITS>
FORCE void attention_by_warps(const AttentionDecodeArgs& a) {
    __shared__ alignas(16) u16 q[MANY_HEADS][DIM + 8];
    __shared__ alignas(16) u16 own_k[DIM];
    __shared__ alignas(16) u16 own_v[DIM];
    __shared__ float wave_largest[WAVES_][MANY_HEADS], wave_total[WAVES_][MANY_HEADS];
    __shared__ float sums[WAVES_][MANY_HEADS][DIM];
    let_next_start();
    const u32 t = thread_x(), w = wave(), l = lane(), split = SPLITS ? block_y() : 0, row = block_z();
    const u32 group = a.heads, blocks_kv = a.n_head / a.kv.n_head_kv / group;
    const u32 head_kv = block_x() / blocks_kv, first_head = block_x() * group;
    const u32 position = a.kv.positions[row], sequence = sequence_of(a.kv, row);
    const u32 start = a.window && position >= a.window ? position + 1 - a.window : 0;
    const u32 stop = a.append ? position : position + 1;  // positions that are read from pages
    const u32 first_tile = start / TILE, n_tiles = position / TILE + 1 - first_tile;
    const u32 evenly = SPLITS ? (n_tiles + a.n_split - 1) / a.n_split : n_tiles, part_tiles = evenly < PART_TILES ? PART_TILES : evenly;
    const u32 n_parts = SPLITS ? (n_tiles + part_tiles - 1) / part_tiles : 1;
    if (split >= n_parts) {
        // As attention_decode.
        wait_for_inputs();
        return;
    }
    const bool is_last_part = split == n_parts - 1;
    const u32 begin = (first_tile + split * part_tiles + w) * TILE;
    const u32 end = (first_tile + least((split + 1) * part_tiles, n_tiles)) * TILE;
    ManyTile tile;
    if (!a.append) wait_for_inputs();
    if (begin < end) tile.load(a, sequence, head_kv, begin, start, stop);
    if (a.append) wait_for_inputs();

    const u32 entry = a.rope.by_position ? position : row;
    const float* q_row = a.q + ((u64)row * a.n_head + first_head) * DIM;
    const float q_factor = a.scale * 1.44269504088896341f, cap = a.softcap * 1.44269504088896341f;
    for (u32 g = w; g < MANY_HEADS; g += WAVES_) {
        u16* to = q[g];
        if (g >= group) {
            for (u32 i = l; i < DIM; i += WAVE) to[i] = 0;
        } else if (a.append) {
            rotate_head<DIM>(DIM, q_row + g * DIM, a.rope.q_norm, a.rope, entry, [=](u32 i, bool in, float x) {
                if (in) to[i] = f16_of_f32(x * q_factor);
            });
        } else {
            for (u32 i = l; i < DIM; i += WAVE) to[i] = f16_of_f32(q_row[g * DIM + i] * q_factor);
        }
    }
    if (a.append && is_last_part && w >= WAVES_ - 2) {
        u8* page = page_of(a.kv, sequence, position / PAGE);
        const u32 slot = position % PAGE;
        const u64 at = (u64)row * a.kv.n_head_kv + head_kv;
        const bool writes = block_x() % blocks_kv == 0;
        if (w == WAVES_ - 1) {
            u8* to = page + k_offset(a.kv, head_kv);
            u16* own = own_k;
            rotate_head<DIM>(DIM, a.k + at * DIM, a.rope.k_norm, a.rope, entry, [=](u32 i, bool in, float x) {
                keep_element(own, writes, to, DIM, slot, i, in, x);
            });
        } else {
            u8* to = page + v_offset(a.kv, head_kv);
            for (u32 i = l; i < DIM; i += WAVE) keep_element(own_v, writes, to, DIM, slot, i, true, a.v[at * DIM + i]);
        }
    }
    block_sync();

    // Heads 2 (l % 4) and the next are a lane's columns.
    U32x4 query[PIECES];
#pragma unroll
    for (u32 i = 0; i < PIECES; ++i) query[i] = ((const U32x4*)q[l / 4])[l % 4 + 4 * i];
    float largest[2], total[2], out[DIM / 16][4];
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const u32 g = l % 4 * 2 + h;
        const bool sink = a.sinks && split == 0 && w == 0 && g < group;
        largest[h] = sink ? a.sinks[first_head + g] * 1.44269504088896341f : NEG_INF;
        total[h] = sink && l / 4 == 0 ? 1.0f : 0.0f;
    }
#pragma unroll
    for (u32 d = 0; d < DIM / 16; ++d) out[d][0] = out[d][1] = out[d][2] = out[d][3] = 0.0f;

    for (u32 base = begin; base < end; base += WAVES_ * TILE) {
        if (base != begin) tile.load(a, sequence, head_kv, base, start, stop);
        if (a.append && base + TILE > position) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const bool own = base + l / 4 + 8 * half == position;
#pragma unroll
                for (u32 i = 0; i < PIECES; ++i) {
                    tile.keys[half][i] = either(own, ((const U32x4*)own_k)[l % 4 + 4 * i], tile.keys[half][i]);
                    tile.values[half][i] = either(own, ((const U32x4*)own_v)[l % 4 + 4 * i], tile.values[half][i]);
                }
            }
        }
        // Of positions l / 4 and l / 4 + 8, two heads each.
        float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 i = 0; i < PIECES; ++i) {
            const U32x4 low = tile.keys[0][i], high = tile.keys[1][i];
            multiply_many(s, low.x, high.x, low.y, high.y, query[i].x, query[i].y);
            multiply_many(s, low.z, high.z, low.w, high.w, query[i].z, query[i].w);
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 p = base + l / 4 + i / 2 * 8;
            if (cap > 0.0f) s[i] = cap * tanh_of(s[i] / cap);
            if (p < start || p > position) s[i] = NEG_INF;
        }
        float weights[4];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            float m = max_of(s[h], s[2 + h]);
#pragma unroll
            for (u32 x = 4; x < WAVE; x *= 2) m = max_of(m, shuffle_xor(m, x));
            m = max_of(m, largest[h]);
            const float rescale = exp2_of(largest[h] - m);
            largest[h] = m;
            weights[h] = exp2_of(s[h] - m);
            weights[2 + h] = exp2_of(s[2 + h] - m);
            total[h] = total[h] * rescale + weights[h] + weights[2 + h];
#pragma unroll
            for (u32 d = 0; d < DIM / 16; ++d) {
                out[d][h] *= rescale;
                out[d][2 + h] *= rescale;
            }
        }
        const u32 w0 = turned(pack_f16(weights[0], weights[1])), w1 = turned(pack_f16(weights[2], weights[3]));
#pragma unroll
        for (u32 i = 0; i < PIECES; ++i) {
            const U32x4 low = tile.values[0][i], high = tile.values[1][i];
            multiply_many(out[2 * i], turned(low.x), turned(low.y), turned(high.x), turned(high.y), w0, w1);
            multiply_many(out[2 * i + 1], turned(low.z), turned(low.w), turned(high.z), turned(high.w), w0, w1);
        }
    }

#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const u32 g = l % 4 * 2 + h;
#pragma unroll
        for (u32 x = 4; x < WAVE; x *= 2) total[h] += shuffle_xor(total[h], x);
        if (l / 4 == 0) {
            wave_largest[w][g] = largest[h];
            wave_total[w][g] = total[h];
        }
        // Column l / 4 of a turned word: an element of the piece of lane l / 8, one of two.
        const u32 element = 8 * (l / 8) + l / 4 % 2;
#pragma unroll
        for (u32 d = 0; d < DIM / 16; ++d) {
            float* to = &sums[w][g][d / 2 * 32 + d % 2 * 4 + element];
            to[0] = out[d][h];
            to[2] = out[d][2 + h];
        }
    }
    block_sync();
    const u64 place = (u64)row * (a.n_head / group) + block_x();
    float* to = a.out + ((u64)row * a.n_head + first_head) * DIM;
    float* mine = a.partials + (place * a.n_split + split) * group * (DIM + 2);
    for (u32 i = t; i < group * DIM; i += WAVES_ * WAVE) {
        const u32 g = i / DIM, d = i % DIM;
        float m = wave_largest[0][g], sum = 0.0f, all = 0.0f;
#pragma unroll
        for (u32 of = 1; of < WAVES_; ++of) m = max_of(m, wave_largest[of][g]);
#pragma unroll
        for (u32 of = 0; of < WAVES_; ++of) {
            const float share = exp2_of(wave_largest[of][g] - m);
            sum += share * sums[of][g][d];
            all += share * wave_total[of][g];
        }
        if (n_parts == 1) {
            to[i] = sum / all;
        } else {
            mine[g * (DIM + 2) + 2 + d] = sum;
            if (d == 0) {
                mine[g * (DIM + 2)] = m;
                mine[g * (DIM + 2) + 1] = all;
            }
        }
    }
    if (SPLITS && n_parts > 1) join_parts<WAVES_ * WAVE>(a, place, n_parts, group, DIM, to);
}
