// Products of 16, 32 or 64 tokens a block by AMD's matrix instructions (wmma.h), x on its way
// through shared memory. Included by matmat_f16.h.
//
// The first operand is weights, the second x, so that a lane has sums of one token, RESULTS rows
// behind each other. The order of k in a product is free as long as both operands have the same: a
// lane's elements are of one block of 32 weights, which it unpacks once. Of a step's four blocks
// the lanes of group G = lane / 16 take those at G, G + K_GROUPS and so on; on gfx11, where both
// halves of a wave have the same operand, each lane takes all four.
// A wave has 32 rows, as two operands that share what is read of x. Weights are loaded DEPTH blocks
// before they are unpacked. Geometry: tiles of TILE_ROWS rows (gfx9: 128, elsewhere 256) and TOKENS
// tokens. Partial sums: [fragment][thread], a Result each. Shared memory: two places of x (or one),
// [TOKENS][STEP] f16, rows padded by 16 bytes: 8 lanes that are served at once meet all banks.
// While one is computed with, what comes next travels in registers.
// Places of tokens that are not there are the last one's: a column of the product depends on its
// own token alone, and is not stored. Bytes: the weights once per TOKENS tokens, x (2 bytes an
// element) once per TILE_ROWS rows, from the second-level cache.
#pragma once

#define TILE_ROWS (WAVES * 32)
// Elements of an operand that a lane has, and groups of lanes that have different ones.
#define ELEMENTS (sizeof(Operand) / 2)
#define K_GROUPS (16 / ELEMENTS)

// The operand that begins at weight k of a block.
template <class T>
FORCE Operand weights_from(const HalfBlock<T>& block, u32 k) {
    OperandWords o;
#pragma unroll
    for (u32 w = 0; w < ELEMENTS / 4; ++w) {
        u32 two[2];
        block.four(k / 4 + w, two);
        o.w[2 * w] = two[0];
        o.w[2 * w + 1] = two[1];
    }
    return o.v;
}

// `Tokens` as tokens.h says; token0 is the first of the block.
template <class T, u32 TOKENS, class Tokens>
FORCE void matmat_wmma(const MmaTile& a, const Tokens& tokens, u32 token0) {
    // Where registers are few, weights are loaded a block ahead only.
    constexpr bool TIGHT = K_GROUPS == 1 && TOKENS == 64;
    constexpr u32 COLUMNS_OF_16 = TOKENS / 16, FRAGMENTS = 2 * COLUMNS_OF_16;
    constexpr u32 COPIES = TOKENS * (STEP / 8) / THREADS;
    constexpr u32 SUBS = 4 / K_GROUPS, DEPTH = SUBS < 2 || TIGHT ? 1 : 2;
    // Of 64 KiB of shared memory three blocks are to have their part.
    constexpr u32 PLACES = WAVE == 64 && TOKENS == 64 ? 1 : 2;
    // Elements that are read of x at once: at least 16 bytes.
    constexpr u32 UNIT = ELEMENTS < 8 ? 8 : ELEMENTS;
    static_assert(COPIES * THREADS == TOKENS * (STEP / 8), "threads copy alike");
    __shared__ alignas(16) u16 room[PLACES][TOKENS][STEP + 8];
    const u32 nb = a.cols / 32, group = K_GROUPS == 1 ? 0 : lane() / 16, row0 = a.row0 + wave() * 32;
    const u32 n_tokens = least(TOKENS, tokens.n - token0), steps = (nb + 3) / 4;
    const u32 begin = steps * a.part / a.parts, end = steps * (a.part + 1) / a.parts;

    RowAt at[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) at[r] = T::row(a.weights, a.rows, nb, least(row0 + r * 16 + operand_row(), a.rows - 1));
    // The block that a lane takes in turn `sub` of a step.
    auto block_of = [&](u32 step, u32 sub) { return step * 4 + sub * K_GROUPS + group; };
    typename T::Chunk next[DEPTH][2];
    auto load_weights = [&](u32 step, u32 sub, u32 d) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) next[d][r] = T::load(at[r], least(block_of(step, sub), nb - 1), nb);
    };
#pragma unroll
    for (u32 d = 0; d < DEPTH; ++d) load_weights(begin, d, d);

    u32 x_row[COPIES];
#pragma unroll
    for (u32 i = 0; i < COPIES; ++i) x_row[i] = tokens.x_row(token0 + least((i * THREADS + thread_x()) / (STEP / 8), n_tokens - 1));
    rf_u32x4 travelling[COPIES];
    // Columns past the last are those before it: their weights count as zero.
    auto load_x = [&](u32 step) {
        const u32 k = least(step * STEP + thread_x() % (STEP / 8) * 8, a.cols - 8);
#pragma unroll
        for (u32 i = 0; i < COPIES; ++i) travelling[i] = *(const rf_u32x4*)(a.x + (u64)x_row[i] * a.cols + k);
    };
    auto store_x = [&](u32 place) {
#pragma unroll
        for (u32 i = 0; i < COPIES; ++i)
            *(rf_u32x4*)&room[place][(i * THREADS + thread_x()) / (STEP / 8)][thread_x() % (STEP / 8) * 8] = travelling[i];
    };
    load_x(begin);
    store_x(0);
    if (begin + 1 < end) load_x(begin + 1);
    block_sync();

    Result acc[2][COLUMNS_OF_16];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
#pragma unroll
        for (u32 n = 0; n < COLUMNS_OF_16; ++n) acc[r][n] = Result(0.0f);
    }
    u32 place = 0;
    for (u32 step = begin; step < end; ++step) {
// Unrolled wholly, what is read of x early would not fit registers.
#pragma unroll 1
        for (u32 first = 0; first < SUBS; first += DEPTH) {
#pragma unroll
        for (u32 d = 0; d < DEPTH; ++d) {
            const u32 sub = first + d, c = block_of(step, sub);
            HalfBlock<T> w[2];
#pragma unroll
            for (u32 r = 0; r < 2; ++r) w[r].begin(next[d][r], least(c, nb - 1), c < nb);
            if (sub + DEPTH < SUBS) load_weights(step, sub + DEPTH, d);
            else if (step + 1 < end) load_weights(step + 1, sub + DEPTH - SUBS, d);
            const u16* x = &room[place][lane() % 16][(sub * K_GROUPS + group) * 32];
#pragma unroll
            for (u32 k = 0; k < 32; k += UNIT) {
                Operand f[2][UNIT / ELEMENTS];
#pragma unroll
                for (u32 r = 0; r < 2; ++r) {
#pragma unroll
                    for (u32 p = 0; p < UNIT / ELEMENTS; ++p) f[r][p] = weights_from(w[r], k + p * ELEMENTS);
                }
#pragma unroll
                for (u32 n = 0; n < COLUMNS_OF_16; ++n) {
                    u32 y[UNIT / 2];
#pragma unroll
                    for (u32 i = 0; i < UNIT / 8; ++i) {
                        const rf_u32x4 four = *(const rf_u32x4*)(x + n * 16 * (STEP + 8) + k + i * 8);
#pragma unroll
                        for (u32 j = 0; j < 4; ++j) y[4 * i + j] = four[j];
                    }
#pragma unroll
                    for (u32 p = 0; p < UNIT / ELEMENTS; ++p) {
                        OperandWords o;
#pragma unroll
                        for (u32 i = 0; i < OPERAND_WORDS; ++i) o.w[i] = y[p * OPERAND_WORDS + i];
#pragma unroll
                        for (u32 r = 0; r < 2; ++r) acc[r][n] = multiply(f[r][p], o.v, acc[r][n]);
                    }
                }
            }
        }
        }
        // Of two places waves that are still at this step read the other one.
        if (PLACES == 1) block_sync();
        else place ^= 1;
        if (step + 1 < end) store_x(place);
        if (step + 2 < end) load_x(step + 2);
        block_sync();
    }

    auto store = [&](u32 i, const Result& sum) {
        const u32 token = i % COLUMNS_OF_16 * 16 + lane() % 16, row = row0 + i / COLUMNS_OF_16 * 16 + lane() / 16 * RESULTS;
        if (token >= n_tokens) return;
        float* out = a.out + (u64)tokens.out_row(token0 + token) * a.rows;
        // What is added is asked for before the first one is stored: a load behind a store that may
        // be to the same place would wait for it.
        Result before = Result(0.0f);
#pragma unroll
        for (u32 j = 0; j < RESULTS; ++j) {
            if (a.epilogue == 1 && row + j < a.rows) before[j] = out[row + j];
        }
#pragma unroll
        for (u32 j = 0; j < RESULTS; ++j) {
            if (row + j < a.rows) out[row + j] = tokens.finish(sum[j] * (a.factor / SCALE), a.bias, row + j) + before[j];
        }
    };
    if (a.parts == 1) {
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS; ++i) store(i, acc[i / COLUMNS_OF_16][i % COLUMNS_OF_16]);
        return;
    }
    auto partial = [&](u32 of, u32 i) { return (Result*)a.partials + (of * FRAGMENTS + i) * THREADS + thread_x(); };
#pragma unroll
    for (u32 i = 0; i < FRAGMENTS; ++i) *partial(a.part, i) = acc[i / COLUMNS_OF_16][i % COLUMNS_OF_16];
    __shared__ u32 before;
    device_fence();
    block_sync();
    if (thread_x() == 0) before = counter_add(a.counter, 1);
    block_sync();
    if (before != a.parts - 1) return;
    device_fence();
    // A part of all fragments at once: one after the other each would take a round trip to memory.
    Result sum[FRAGMENTS];
#pragma unroll
    for (u32 i = 0; i < FRAGMENTS; ++i) sum[i] = Result(0.0f);
    for (u32 of = 0; of < a.parts; ++of) {
#pragma unroll
        for (u32 i = 0; i < FRAGMENTS; ++i) sum[i] += *partial(of, i);
    }
#pragma unroll
    for (u32 i = 0; i < FRAGMENTS; ++i) store(i, sum[i]);
    if (thread_x() == 0) *a.counter = 0;
}

// A block of the launch that MatmatMmaArgs describes.
template <class T, u32 TOKENS>
FORCE void matmat_wmma(const MatmatMmaArgs& a) {
    const MmaTile tile = mma_tile(a, TILE_ROWS, TOKENS);
    matmat_wmma<T, TOKENS>(tile, EveryToken{a.n_tokens, tile.rows}, block_y() * TOKENS);
}
