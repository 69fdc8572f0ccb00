// Products of 2 to 16 tokens by mma.sync (NVIDIA, sm_80 and later): weights alone go through the
// loop. Included by matmat.hip.
//
// A wave takes one slice of 8 blocks of 32 columns, of all rows that its block has. So its part of
// x is brought into the order of the lanes once, to shared memory that nobody else reads, and no
// wave waits for another one but to add up. The order of k is free as long as both operands have
// the same: lane 4 g + q has of rows g and g + 8 of a tile the whole blocks q and q + 4 of the
// slice, and of token g the same columns. Of four weights that lie in a word a product takes 0 and
// 2, then 1 and 3: nibbles come out of a word in this order. The next tile's weights are under way
// while a tile is computed.
// Geometry: a block has `slices` waves beside each other, which share tiles of 16 rows, and
// `groups` of such. A block's tiles are n_blocks apart, so all blocks together read one stretch of
// memory. grid (n_blocks, tokens / (8 GROUPS) rounded up, parts).
// The waves' sums of two tiles are added by all threads, in the order of the slices, while waves
// are already at the next two: there are two rooms for them. Parts of the columns: as matmat_f16.h
// says, but for partial sums, [tile][part][floats of a tile], and a counter for all of a block's
// tiles.
// Shared memory, dynamic: sums [2][2][waves][GROUPS][lanes], x [waves][GROUPS][8][lanes], each 16
// bytes.
// Bytes: the weights once per 8 GROUPS tokens; x (2 bytes an element) once a block.
#pragma once

#define FEW_THREADS 512

struct MatmatFewArgs {
    const u16* x;
    float* partials;  // of more than one part
    u32* counters;
    u32 cols;
    u32 n_tokens;
    u32 epilogue;  // 0 store, 1 add to out
    u32 n_matrices;
    float factor;
    u32 parts;
    u32 slices, groups;
    u32 n_blocks;
    u32 reserved;
    MmaMatrix matrices[MATRICES];
};

#if __CUDA_ARCH__ >= 800
// What a lane loads of a row: blocks c and c + 4.
template <class T>
struct LaneRow {
    typename T::Chunk chunk[2];

    FORCE void load(const RowAt& at, u32 c, u32 nb) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) chunk[h] = T::load(at, least(c + 4 * h, nb - 1), nb);
    }
};

// The same as f16.
template <class T>
struct LaneHalves {
    HalfBlock<T> block[2];

    FORCE void begin(const LaneRow<T>& row, u32 c) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) block[h].begin(row.chunk[h], c + 4 * h, true);
    }
    // Weights 4 w and 4 w + 2, 4 w + 1 and 4 w + 3 of a block.
    FORCE void four(u32 h, u32 w, u32 (&to)[2]) const { block[h].template four<true>(w, to); }
};

// a & mask | with
FORCE u32 masked_with(u32 a, u32 mask, u32 with) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(mask), "r"(with));
    return out;
}

// Of a head of Q4_K, scales and least ones of blocks j (below 4) and j + 4, each twice in a word.
// In the halves of a word: whole numbers under 0x64. f16 rounds their products with d and dmin
// once, as f32 and f16 behind it would.
FORCE void both_scales(const U32x4& head, u32 j, u32 (&scales)[2], u32 (&least_ones)[2]) {
    const u32 bytes = __byte_perm(head.y, head.z, j | (j + 4) << 8), upper = head.w >> (4 * j);
    const u32 scale = difference(masked_with(bytes, 0x003f003fu, 0x64006400u), 0x64006400u);
    const u32 lower = masked_with(bytes >> 6, 0x00030003u, 0x64006400u);
    const u32 low = difference(masked_with(upper << 2, 0x003c003cu, lower), 0x64006400u);
    const u32 d = product(head.x, pack_f16(SCALE, -SCALE));
    const u32 s = product(scale, __byte_perm(d, 0, 0x1010)), m = product(low, __byte_perm(d, 0, 0x3232));
    scales[0] = __byte_perm(s, 0, 0x1010);
    scales[1] = __byte_perm(s, 0, 0x3232);
    least_ones[0] = __byte_perm(m, 0, 0x1010);
    least_ones[1] = __byte_perm(m, 0, 0x3232);
}

// Nibbles 4 w and 4 w + 2, 4 w + 1 and 4 w + 3 of a block as f16, with no bytes between. A nibble
// in the lowest bits under 0x64 is 1024 and it; one in bits 4 to 7 under 0x54 is 64 and it.
FORCE void nibbles_f16(const U32x4& q, u32 w, u32 scale, u32 least_one, u32 (&to)[2]) {
    const u32 mask = w < 4 ? 0x000f000fu : 0x00f000f0u, base = w < 4 ? 0x64006400u : 0x54005400u, nibbles = word(q, w % 4);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) to[i] = product_sum(difference(masked_with(i ? nibbles >> 8 : nibbles, mask, base), base), scale, least_one);
}

// Both blocks have one head.
template <>
struct LaneRow<Q4_K> {
    U32x4 q[2], head;

    FORCE void load(const RowAt& at, u32 c, u32) {
        q[0] = stream16(at.q + c * 16);
        q[1] = stream16(at.q + c * 16 + 64);
        head = shared16(at.d + c / 8 * 16);
    }
};
template <>
struct LaneHalves<Q4_K> {
    U32x4 q[2];
    u32 scales[2], least_ones[2];

    FORCE void begin(const LaneRow<Q4_K>& row, u32 c) {
        q[0] = row.q[0];
        q[1] = row.q[1];
        both_scales(row.head, c % 8, scales, least_ones);
    }
    FORCE void four(u32 h, u32 w, u32 (&to)[2]) const { nibbles_f16(q[h], w, scales[h], least_ones[h], to); }
};

// Which matrix tile `tile` of the list is of, and its first row there.
FORCE u32 few_tile(const MatmatFewArgs& a, u32 tile, u32& row) {
    u32 m = 0;
#pragma unroll
    for (u32 i = 0; i + 1 < MATRICES; ++i) {
        const u32 tiles = (a.matrices[i].rows + 15) / 16;
        if (m == i && i + 1 < a.n_matrices && tile >= tiles) {
            tile -= tiles;
            m = i + 1;
        }
    }
    row = tile * 16;
    return m;
}

// Where lane 4 g + q finds rows g and g + 8 of the tiles that its wave goes through.
template <class T>
struct FewRows {
    RowAt at[2];
    u32 m, row0;

    FORCE void begin(const MatmatFewArgs& a, u32 tile, u32 nb) {
        m = few_tile(a, tile, row0);
        const MmaMatrix matrix = a.matrices[m];
#pragma unroll
        for (u32 r = 0; r < 2; ++r) at[r] = T::row(matrix.weights, matrix.rows, nb, least(row0 + r * 8 + lane() / 4, matrix.rows - 1));
    }
    // To `tile`, which is so many further than the last one.
    FORCE void go_on(const MatmatFewArgs& a, u32 tile, u32 tiles, u32 nb) {
        const u32 rows = tiles * 16;
        if (row0 + rows + 16 > a.matrices[m].rows) {
            begin(a, tile, nb);
            return;
        }
        row0 += rows;
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            at[r].q += rows * (nb * T::Q_BYTES);
            at[r].h += rows * (nb * T::H_BYTES);
            at[r].s += rows * (nb / T::S_EVERY * T::S_BYTES);
            at[r].d += rows * (nb / T::D_EVERY * T::D_BYTES);
        }
    }
};

// Where 8 elements of a token's row are in a wave's room: of group n of tokens, those that lane
// `of` takes from its blocks c (i below 4) and c + 4. Lanes that write or read at once meet all
// banks.
FORCE u32 few_place(u32 n, u32 i, u32 of) { return (n * 8 + i) * WAVE + (of ^ (i % 4 * 2)); }

// A slice of x to the wave's own room in shared memory, in the order in which products take it. A
// row is read by all lanes beside each other. Columns and tokens that are not there are zeros.
template <u32 GROUPS>
FORCE void take_input(const MatmatFewArgs& a, u32 token0, u32 first_block, U32x4* to) {
    const u32 i = lane() / 16 * 4 + lane() % 4;
    const u16* from = a.x + (u64)token0 * a.cols + first_block * 32 + lane() * 8;
    const bool is = first_block + lane() / 4 < a.cols / 32;
#pragma unroll
    for (u32 t = 0; t < GROUPS * 8; ++t) {
        U32x4 v = U32x4{0, 0, 0, 0};
        if (is && token0 + t < a.n_tokens) v = *(const U32x4*)(from + (u64)t * a.cols);
        to[few_place(t / 8, i, t % 8 * 4 + lane() / 4 % 4)] = U32x4{__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                                                                   __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632)};
    }
    wave_sync();
}

template <class T, u32 GROUPS>
FORCE void matmat_few(const MatmatFewArgs& a) {
    constexpr u32 TOKENS = GROUPS * 8, FLOATS = 16 * TOKENS;  // of a tile
    extern __shared__ F32x4 shared_few[];
    let_next_start();
    const u32 nb = a.cols / 32, q = lane() % 4, token0 = block_y() * TOKENS;
    const u32 slice = wave() % a.slices, group = wave() / a.slices, n_waves = a.slices * a.groups, n_threads = n_waves * WAVE;
    const u32 first_block = (block_z() * a.slices + slice) * 8, c = first_block + q;
    u32 n_tiles = 0;
#pragma unroll
    for (u32 i = 0; i < MATRICES; ++i) n_tiles += i < a.n_matrices ? (a.matrices[i].rows + 15) / 16 : 0;
    // Tiles of this block, and turns in each of which every group takes one.
    const u32 mine = (n_tiles - block_x() + a.n_blocks - 1) / a.n_blocks, stride = a.n_blocks * a.groups;
    const u32 turns = (mine + a.groups - 1) / a.groups;
    // A tile past the last one is computed as that and not stored.
    auto tile_of = [&](u32 turn) { return least(block_x() + group * a.n_blocks + turn * stride, n_tiles - 1); };
    // A slice past the last one has zeros of x, and the first one's weights.
    const u32 c_read = c < nb ? c : q;
    FewRows<T> rows;
    LaneRow<T> next[2];
    rows.begin(a, tile_of(0), nb);
#pragma unroll
    for (u32 r = 0; r < 2; ++r) next[r].load(rows.at[r], c_read, nb);
    U32x4* x = (U32x4*)shared_few + (4 * n_waves + wave() * 8) * (GROUPS * WAVE);
    wait_for_inputs();
    take_input<GROUPS>(a, token0, first_block, x);
    // Float f of a tile, in the order of the lanes' sums: of 8 tokens lane l has rows l / 4 and 8
    // further, tokens 2 (l % 4) and the next. What is added is asked for before the sum is made.
    struct Place {
        float* out;
        float before;
        bool is;
    };
    auto place_of = [&](u32 tile, u32 f, bool adds) {
        u32 row0;
        const MmaMatrix matrix = a.matrices[few_tile(a, tile, row0)];
        const u32 row = row0 + f % 4 / 2 * 8 + f % 128 / 16, token = token0 + f / 128 * 8 + f / 4 % 4 * 2 + f % 2;
        Place place{matrix.out + (u64)token * matrix.rows + row, 0.0f, row < matrix.rows && token < a.n_tokens};
        if (adds && place.is && matrix.bias) place.before = matrix.bias[row];
        if (adds && place.is && a.epilogue == 1) place.before += *place.out;
        return place;
    };
    auto store = [&](const Place& place, float sum) {
        if (place.is) *place.out = sum * (a.factor / SCALE) + place.before;
    };
    auto partial = [&](u32 part, u32 tile, u32 f) {
        return a.partials + (((u64)block_y() * n_tiles + tile) * a.parts + part) * FLOATS + f;
    };
#pragma unroll 1
    for (u32 turn = 0; turn < turns; ++turn) {
        LaneHalves<T> w[2];
#pragma unroll
        for (u32 r = 0; r < 2; ++r) w[r].begin(next[r], c);
        if (turn + 1 < turns) {
            rows.go_on(a, tile_of(turn + 1), stride, nb);
#pragma unroll
            for (u32 r = 0; r < 2; ++r) next[r].load(rows.at[r], c_read, nb);
        }
        F32x4 acc[2][GROUPS];
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
#pragma unroll
            for (u32 n = 0; n < GROUPS; ++n) acc[h][n] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
        }
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) {
                U32x4 y[GROUPS];
#pragma unroll
                for (u32 n = 0; n < GROUPS; ++n) y[n] = x[few_place(n, h * 4 + k, lane())];
#pragma unroll
                for (u32 j = 0; j < 2; ++j) {
                    u32 f[2][2];
#pragma unroll
                    for (u32 r = 0; r < 2; ++r) w[r].four(h, 2 * k + j, f[r]);
#pragma unroll
                    for (u32 n = 0; n < GROUPS; ++n)
                        multiply(acc[h][n], f[0][0], f[1][0], f[0][1], f[1][1], j ? y[n].z : y[n].x, j ? y[n].w : y[n].y);
                }
            }
        }
        F32x4* room = shared_few + turn / 2 % 2 * (2 * n_waves * GROUPS * WAVE);
#pragma unroll
        for (u32 n = 0; n < GROUPS; ++n) room[((turn % 2 * n_waves + wave()) * GROUPS + n) * WAVE + lane()] = plus(acc[0][n], acc[1][n]);
        if (turn % 2 == 0 && turn + 1 < turns) continue;
        // What is in the other room, which is written next, has been added up by all threads.
        block_sync();
        // The tiles in the room: of one turn or of two, by groups.
        const u32 begun = turn / 2 * 2 * a.groups, here = least((turn % 2 + 1) * a.groups, mine - begun);
        for (u32 o = thread_x(); o < here * FLOATS; o += n_threads) {
            const u32 of = o / FLOATS, f = o % FLOATS, tile = block_x() + (begun + of) * a.n_blocks;
            const float* from = (const float*)room + of * a.slices * FLOATS + f;
            const Place place = place_of(tile, f, a.parts == 1);
            float sum = 0.0f;
#pragma unroll 4
            for (u32 s = 0; s < a.slices; ++s) sum += from[s * FLOATS];
            if (a.parts == 1) {
                store(place, sum);
            } else {
                *partial(block_z(), tile, f) = sum;
            }
        }
    }
    if (a.parts == 1) return;
    device_fence();
    block_sync();
    u32* before = (u32*)shared_few;
    u32* counter = a.counters + block_y() * a.n_blocks + block_x();
    if (thread_x() == 0) *before = counter_add(counter, 1);
    block_sync();
    if (*before != a.parts - 1) return;
    device_fence();
    // Four floats a thread, so that all of a block's come in one round trip to memory, or two.
    for (u32 o = thread_x() * 4; o < mine * FLOATS; o += n_threads * 4) {
        const u32 f = o % FLOATS, tile = block_x() + o / FLOATS * a.n_blocks;
        Place place[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) place[j] = place_of(tile, f + j, true);
        F32x4 sum = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (u32 part = 0; part < a.parts; ++part) sum = plus(sum, *(const F32x4*)partial(part, tile, f));
        store(place[0], sum.x);
        store(place[1], sum.y);
        store(place[2], sum.z);
        store(place[3], sum.w);
    }
    if (thread_x() == 0) *counter = 0;
}
#endif
