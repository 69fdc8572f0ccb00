// Adapters for up to 16 tokens in one launch (NVIDIA, sm_90). Included by adapters.hip.
//
// What adapters_down and adapters_up compute one after the other: out_m[t][r] += sum_w B_m[r][w] *
// s[t][w] * factor * sum_k A_m[w][k] x[t][k], or the gated unit of two such sums. CLUSTER blocks
// that run at the same time (a cluster) have rows of one matrix (of both of a gated unit) and one
// token. Each multiplies A by its share of the columns, stores the sums into the shared memory of
// all eight, and adds what B makes of the totals to its own rows. Each cluster multiplies all of A:
// 16 ranks of 4,096 columns are 16 KiB a block, from the second-level cache.
//
// Ranks without a scale are left out by tiles of CHUNK. Of FEW_TILES tiles at once, a lane reads 8
// columns of RANKS ranks; a tile's ranks are of four waves, and the other four waves have the other
// columns. A, B and scales are read or asked for before the launch before has ended.
// Geometry: grid (CLUSTER * clusters of all matrices, tokens), clusters of a matrix: its rows /
// (CLUSTER * rows_per_block) rounded up. Columns are a multiple of 8, widths at most FEW_WIDTH.
#pragma once

#define CLUSTER 8
#define FEW_TILES 8
#define FEW_ROWS 512
#define FEW_WIDTH 1024

struct AdapterPair {
    const u8* first;   // A, or null
    const u8* second;  // B, or null
    float* out;
    u32 rows;
    u32 reserved;
};

struct AdaptersFewArgs {
    const u8* x;
    const float* norm;  // or null
    const float* scales;
    float eps;
    float factor;
    u32 cols, width;
    u32 n_matrices, rows_per_block;
    u32 early;
    u32 reserved;
    ActSpec act;
    AdapterPair matrices[4];
};

#if defined(RF_CUDA) && __CUDA_ARCH__ >= 900
#ifndef EMULATED
// Counts bytes that other blocks of the cluster store, and one arrival, in turns.
struct ClusterBarrier {
    u64 state;
};
FORCE u32 shared_place(const void* at) { return (u32)__cvta_generic_to_shared(at); }
FORCE void cluster_init(ClusterBarrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_place(barrier)) : "memory");
}
// Arrives at one's own barrier, and so many bytes will.
FORCE void cluster_expect(ClusterBarrier* barrier, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(shared_place(barrier)), "r"(bytes)
                 : "memory");
}
// Until the turn of this parity has ended: what was stored can be read.
FORCE void cluster_wait_for(ClusterBarrier* barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra.uni again; }" ::"r"(shared_place(barrier)),
        "r"(parity)
        : "memory");
}
// Stores into the shared memory of block `of`, at the place that `to` is in one's own, and counts
// the bytes at its barrier.
FORCE void store_in(float* to, u32 of, float v, ClusterBarrier* barrier) {
    asm volatile(
        "{ .reg .b32 at, bar;\n"
        "mapa.shared::cluster.u32 at, %0, %2;\n"
        "mapa.shared::cluster.u32 bar, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [at], %3, [bar]; }" ::"r"(shared_place(to)),
        "r"(shared_place(barrier)), "r"(of), "r"(bits_of_f32(v))
        : "memory");
}
// All blocks of the cluster are here, and their barriers are made.
FORCE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
FORCE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif

// Tiles of ranks of which one has a scale, a bit each, the same in all lanes.
struct ActiveTiles {
    u32 bits[FEW_WIDTH / CHUNK / 32];

    FORCE void load(const float* scales, u32 width) {
#pragma unroll
        for (u32 i = 0; i < FEW_WIDTH / CHUNK / 32; ++i) {
            const u32 first = (i * 32 + lane()) * CHUNK;
            bool is = false;
#pragma unroll
            for (u32 j = 0; j < CHUNK; j += 4) is |= first + j < width && has_any(*(const F32x4*)(scales + first + j));
            bits[i] = i * 32 * CHUNK < width ? lanes_or(is ? 1u << lane() : 0) : 0;
        }
    }
    FORCE bool any() const { return bits[0] | bits[1]; }
    FORCE u32 count() const { return __popc(bits[0]) + __popc(bits[1]); }
    // The nth from the first on.
    FORCE u32 at(u32 nth) const {
        ActiveTiles left = *this;
        while (nth-- > 0) left.next();
        return left.next();
    }
    // The first one, which there is, is taken out.
    FORCE u32 next() {
        const u32 word = bits[0] ? bits[0] : bits[1], tile = __ffs((int)word) - 1;
        const u32 at = bits[0] ? tile : tile + 32;
        if (bits[0]) {
            bits[0] &= bits[0] - 1;
        } else {
            bits[1] &= bits[1] - 1;
        }
        return at;
    }
};

// A block's columns, in units of 8: a lane has every STEP-th from `mine` on.
struct FewColumns {
    static constexpr u32 STEP = THREADS / (CHUNK / RANKS);
    u32 from, to, mine;

    FORCE FewColumns(u32 cols, u32 of) {
        from = cols / 8 * of / CLUSTER;
        to = cols / 8 * (of + 1) / CLUSTER;
        mine = from + wave() / (CHUNK / RANKS) * WAVE + lane();
    }
};

// Asks for A of a tile from unit `from` on, and for B.
template <class T, u32 MATRICES>
FORCE void prefetch_tile(const AdaptersFewArgs& a, const AdapterPair (&pair)[MATRICES], u32 tile, u32 from, u32 to, u32 row0, bool second) {
    constexpr u32 UNITS = 128 / (8 * T::BYTES);
    const u32 lines = from < to ? (to - from + UNITS - 1) / UNITS : 0;
#pragma unroll
    for (u32 m = 0; m < MATRICES; ++m) {
        if (!pair[m].first) continue;
#pragma unroll 1
        for (u32 i = thread_x(); i < CHUNK * lines; i += THREADS)
            prefetch_line(pair[m].first + ((u64)(tile * CHUNK + i / lines) * a.cols + (from + i % lines * UNITS) * 8) * T::BYTES);
#pragma unroll 1
        for (u32 i = thread_x(); second && i < a.rows_per_block && row0 + i < pair[m].rows; i += THREADS)
            prefetch_line(pair[m].second + ((u64)(row0 + i) * a.width + tile * CHUNK) * T::BYTES);
    }
}

template <class T, class X, bool GATED>
FORCE void few(const AdaptersFewArgs& a) {
    constexpr u32 MATRICES = GATED ? 2 : 1, GROUPS = CHUNK / RANKS, SHARES = WAVES / GROUPS, ROWS = FEW_ROWS / THREADS;
    constexpr u32 SUMS = FEW_TILES * MATRICES * CHUNK;
    // Units whose weights are read at once, of the first tile before x is there.
    constexpr u32 AT_ONCE = 8 / (T::BYTES * MATRICES);
    __shared__ float sums[SHARES][SUMS], squares_of[SHARES];
    // What each block of the cluster stores here, in turn: those who are late still read the other.
    // A block stores of its next turn when it has what all have stored of this one, which they did
    // behind reading the one before.
    __shared__ float totals[2][CLUSTER][SUMS], all_squares[CLUSTER];
    __shared__ ClusterBarrier stored[2];
    __shared__ F32x4 low[SUMS / 4];
    let_next_start();
    const u32 of = block_x() % CLUSTER, group = wave() % GROUPS, share = wave() / GROUPS;
    u32 m = 0, cluster = block_x() / CLUSTER;
    if (!GATED) {
#pragma unroll
        for (u32 i = 0; i < 3; ++i) {
            const u32 clusters = (a.matrices[i].rows + CLUSTER * a.rows_per_block - 1) / (CLUSTER * a.rows_per_block);
            if (m == i && i + 1 < a.n_matrices && cluster >= clusters) {
                cluster -= clusters;
                m = i + 1;
            }
        }
    }
    const u32 row0 = (cluster * CLUSTER + of) * a.rows_per_block, token = block_y();
    AdapterPair pair[MATRICES];
    float before[MATRICES][ROWS], added[MATRICES][ROWS];
#pragma unroll
    for (u32 i = 0; i < MATRICES; ++i) pair[i] = GATED ? a.matrices[i] : one_of(a.matrices, m);
    auto is_row = [&](u32 j) {
        const u32 i = j * THREADS + thread_x();
        return i < a.rows_per_block && row0 + i < pair[0].rows;
    };
    if (!a.early) wait_for_inputs();
    const float* scales = a.scales + (u64)token * a.width;
    ActiveTiles left;
    left.load(scales, a.width);
    // A launch ends behind the one before it, also where it has nothing to do.
    if (!GATED && !left.any()) {
        wait_for_inputs();
        return;
    }
    const bool is_any = left.any();
    const FewColumns columns(a.cols, of);
    Eight<T> w[AT_ONCE][MATRICES][RANKS];
    Chunk<T> second[MATRICES][ROWS];
    auto load = [&](u32 tile, u32 unit) {
#pragma unroll
        for (u32 u = 0; u < AT_ONCE; ++u) {
            const u32 at = unit + u * columns.STEP;
#pragma unroll
            for (u32 i = 0; i < MATRICES * RANKS; ++i) {
                const AdapterPair& p = pair[i / RANKS];
                const u32 rank = tile * CHUNK + group * RANKS + i % RANKS;
                w[u][i / RANKS][i % RANKS].template load<true>(p.first + (u64)rank * a.cols * T::BYTES, at < columns.to && p.first ? at * 8 : a.cols, a.cols);
            }
        }
    };
    auto load_second = [&](u32 tile) {
#pragma unroll
        for (u32 i = 0; i < MATRICES * ROWS; ++i) {
            const AdapterPair& p = pair[i / ROWS];
            const u32 row = row0 + i % ROWS * THREADS + thread_x();
            if (p.second && is_row(i % ROWS)) second[i / ROWS][i % ROWS].template load<true>(p.second + (u64)row * a.width * T::BYTES, tile * CHUNK, a.width);
        }
    };
    ActiveTiles seen = left;
    u32 tile = 0;
    if (is_any) {
        if (thread_x() == 0) {
            cluster_init(&stored[0]);
            cluster_init(&stored[1]);
        }
        cluster_arrive();
        tile = left.next();
        load(tile, columns.mine);
        load_second(tile);
        prefetch_tile<T>(a, pair, tile, columns.from + AT_ONCE * columns.STEP, columns.to, row0, false);
        ActiveTiles more = left;
        while (more.any()) prefetch_tile<T>(a, pair, more.next(), columns.from, columns.to, row0, true);
    }
    wait_for_inputs();
#pragma unroll
    for (u32 i = 0; i < MATRICES * ROWS; ++i) {
        const u32 row = row0 + i % ROWS * THREADS + thread_x();
        before[i / ROWS][i % ROWS] = is_row(i % ROWS) ? pair[i / ROWS].out[(u64)token * pair[i / ROWS].rows + row] : 0.0f;
        added[i / ROWS][i % ROWS] = 0.0f;
    }
    bool is_first = true;
#pragma unroll 1
    for (u32 turns = 0; seen.any(); ++turns) {
        const u32 turn = turns % 2;
        ActiveTiles now = seen;
        const u32 n = least(seen.count(), FEW_TILES);
#pragma unroll 1
        for (u32 t = 0; t < n; ++t) {
            const u32 this_tile = now.next();
            float acc[MATRICES][RANKS], squares = 0.0f;
#pragma unroll
            for (u32 i = 0; i < MATRICES * RANKS; ++i) acc[i / RANKS][i % RANKS] = 0.0f;
#pragma unroll 1
            for (u32 unit = columns.mine - lane(); unit < columns.to; unit += AT_ONCE * columns.STEP) {
                const u32 mine = unit + lane();
                if (!(is_first && t == 0 && mine == columns.mine)) load(this_tile, mine);
#pragma unroll
                for (u32 u = 0; u < AT_ONCE; ++u) {
                    const u32 k = mine + u * columns.STEP < columns.to ? (mine + u * columns.STEP) * 8 : a.cols;
                    X v;
                    v.template load<true>(a, token, k);
                    Floats norm;
                    if (!X::HALF && a.norm) {
                        norm.v[0] = norm.v[1] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
                        if (k < a.cols) norm.template read<true>(a.norm, k, a.cols);
                    }
#pragma unroll
                    for (u32 e = 0; e < 8; ++e) {
                        float x = v.at(e);
                        if (!X::HALF && a.norm) {
                            squares += x * x;
                            x *= norm.at(e);
                        }
#pragma unroll
                        for (u32 i = 0; i < MATRICES * RANKS; ++i) acc[i / RANKS][i % RANKS] += w[u][i / RANKS][i % RANKS].at(e) * x;
                    }
                }
            }
#pragma unroll
            for (u32 i = 0; i < MATRICES; ++i) {
                const float sum = four_sums(acc[i]);
                if (lane() % 8 == 0) sums[share][(t * MATRICES + i) * CHUNK + group * RANKS + lane() / 8] = sum;
            }
            if (!X::HALF && a.norm && is_first && t == 0) {
                squares = wave_sum(squares);
                if (group == 0 && lane() == 0) squares_of[share] = squares;
            }
        }
        block_sync();
        // Nobody's memory is written before its block has begun.
        if (is_first) cluster_wait();
        const u32 n_sums = n * MATRICES * CHUNK;
        if (thread_x() == 0) cluster_expect(&stored[turn], CLUSTER * (n_sums + is_first) * 4);
        for (u32 i = thread_x(); i < n_sums * CLUSTER; i += THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (u32 s = 0; s < SHARES; ++s) sum += sums[s][i / CLUSTER];
            store_in(&totals[turn][of][i / CLUSTER], i % CLUSTER, sum, &stored[turn]);
        }
        if (is_first && thread_x() < CLUSTER) {
            float sum = 0.0f;
#pragma unroll
            for (u32 s = 0; s < SHARES; ++s) sum += a.norm ? squares_of[s] : 0.0f;
            store_in(&all_squares[of], thread_x(), sum, &stored[turn]);
        }
        // While the others' arrive.
        const u32 my_tile = seen.at(least(thread_x() / (MATRICES * CHUNK), n - 1));
        const float scale = thread_x() < n_sums ? scales[my_tile * CHUNK + thread_x() % CHUNK] : 0.0f;
        cluster_wait_for(&stored[turn], turns / 2 % 2);
        if (thread_x() < n_sums) {
            float sum = 0.0f, squares = 0.0f, factor = scale * a.factor;
#pragma unroll
            for (u32 b = 0; b < CLUSTER; ++b) sum += totals[turn][b][thread_x()];
            if (!X::HALF && a.norm) {
#pragma unroll
                for (u32 b = 0; b < CLUSTER; ++b) squares += all_squares[b];
                factor /= sqrt_of(squares / (float)a.cols + a.eps);
            }
            // What has no scale is nobody's: it may be infinite.
            ((float*)low)[thread_x()] = scale == 0.0f ? 0.0f : sum * factor;
        }
        block_sync();
#pragma unroll 1
        for (u32 t = 0; t < n; ++t) {
            const u32 this_tile = seen.next();
            if (!(is_first && t == 0)) load_second(this_tile);
#pragma unroll
            for (u32 i = 0; i < MATRICES * ROWS; ++i) {
                if (!is_row(i % ROWS) || !pair[i / ROWS].second) continue;
                float& sum = added[i / ROWS][i % ROWS];
                sum = second[i / ROWS][i % ROWS].dot((const float*)low + (t * MATRICES + i / ROWS) * CHUNK, sum);
            }
        }
        is_first = false;
    }
#pragma unroll
    for (u32 j = 0; j < ROWS; ++j) {
        if (!is_row(j)) continue;
        float* out = pair[0].out + (u64)token * pair[0].rows + row0 + j * THREADS + thread_x();
        const float sum = before[0][j] + added[0][j], other = before[MATRICES - 1][j] + added[MATRICES - 1][j];
        *out = GATED ? gate_of(a.act, sum, other) : sum;
    }
}
#endif
