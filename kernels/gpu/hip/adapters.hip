// What adapters (LoRA) add to products of one input: out[t] += B (s[t] * (A x[t])) for up to four
// matrices. A [width][cols] has the rows of all adapters one after the other, B [rows][width] their
// columns; s[t] has a scale for each of them, most of which are 0.
//
// adapters_down: low[part][m][t][r] = s[t][r] * factor * sum_k A_m[r][k] x[t][k] over a part of the
// columns, where s[t][r] is not 0. A block takes RANKS rows of one matrix, TOKENS tokens, and of
// SLICE columns every n_parts-th. It reads its rows of A once, if one of its tokens has a scale for
// one of them, and after that the rows of x of these tokens alone. x is f32, with the weight of a
// norm on it (each block sums up the squares of whole rows then, so there is one part), or f16:
// row by row (adapters_down_half_*) or as matmat_wgmma.h has it (adapters_down_columns_*).
// Geometry: grid (n_matrices * width / RANKS, tokens / TOKENS rounded up, parts).
//
// adapters_up: out_m[t][r] += sum_w B_m[r][w] * (the sum of low's parts)[t][w] over w whose scale
// is not 0. A thread takes a row of B and up to <tokens> tokens, and reads CHUNK columns of the row
// where one of these tokens has a scale for one of them. With `gated` in its name: of two
// matrices, one token, out_0 = act(out_0 + ..) * (out_1 + ..); a matrix without weights adds
// nothing. Geometry: grid (blocks of UP_THREADS rows, tokens / <tokens> rounded up).
//
// Bytes of one adapter among many are read alone, whole sectors of 32 bytes for f16 and ranks that
// are multiples of 16. What depends on weights and scales alone is read before the launch before
// has ended, where `early` says that no launch writes scales: so of decode little is left but x,
// low and out, from caches. Widths are multiples of 32.
// Entries: adapters_down_<type>, adapters_down_half_<type>, adapters_down_columns_<type>,
// adapters_up_<tokens>_<type>, adapters_up_gated_<type> (WEIGHT one of F32, F16, TYPE its name).
#include "compat.h"
#include "floats.h"
#include "act.h"

#define THREADS 256
#define UP_THREADS 128
#define TOKENS 32
#define RANKS 4
#define SLICE 4096
#define CHUNK 16
#define PARTS 4

struct AdapterMatrix {
    const u8* weights;  // B
    float* out;
    u32 rows;
    u32 low;  // which of Down's matrices
};

struct AdaptersDownArgs {
    const u8* x;
    const float* norm;  // or null
    const float* scales;
    float* low;
    float eps;
    float factor;
    u32 cols, width;
    u32 n_tokens, n_matrices;
    u32 n_parts;
    u32 early;
    const u8* weights[4];
};

struct AdaptersUpArgs {
    const float* scales;
    const float* low;
    u32 width, n_tokens;
    u32 n_matrices, n_low;
    u32 n_parts;
    u32 early;
    ActSpec act;
    AdapterMatrix matrices[4];
};

// A by-value argument that is indexed at run time is copied to memory of each thread; a choice is
// not.
template <class T>
FORCE T one_of(const T (&all)[4], u32 i) {
    return i == 0 ? all[0] : i == 1 ? all[1] : i == 2 ? all[2] : all[3];
}

FORCE bool has_any(const F32x4& s) { return s.x != 0.0f || s.y != 0.0f || s.z != 0.0f || s.w != 0.0f; }

// The same bits of 32 lanes in one word.
FORCE u32 lanes_or(u32 bits) {
#pragma unroll
    for (u32 m = 16; m > 0; m /= 2) bits |= shuffle_xor(bits, m);
    return bits;
}

FORCE u32 word_of(const U32x4& v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Eight weights that follow each other, as they lie in memory.
template <class T>
struct Eight {
    static constexpr u32 VECTORS = T::BYTES / 2;
    U32x4 v[VECTORS];

    // Columns k to k + 7 of a row; those past the last are 0.
    FORCE void load(const u8* row, u32 k, u32 cols) {
#pragma unroll
        for (u32 i = 0; i < VECTORS; ++i) v[i] = U32x4{0, 0, 0, 0};
        if (cols % 8 == 0) {
#pragma unroll
            for (u32 i = 0; i < VECTORS; ++i) {
                if (k < cols) v[i] = stream16(row + (u64)k * T::BYTES + i * 16);
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            const u8* at = row + (u64)(k + i) * T::BYTES;
            const u32 bits = k + i >= cols ? 0 : T::BYTES == 4 ? *(const u32*)at : *(const u16*)at;
            const u32 word = i * T::BYTES / 4;
            set(word, get(word) | bits << (T::BYTES == 4 ? 0 : i % 2 * 16));
        }
    }
    FORCE u32 get(u32 word) const { return word_of(v[word / 4], word % 4); }
    FORCE void set(u32 word, u32 bits) {
        U32x4& w = v[word / 4];
        (word % 4 == 0 ? w.x : word % 4 == 1 ? w.y : word % 4 == 2 ? w.z : w.w) = bits;
    }
    FORCE float at(u32 i) const {
        constexpr u32 PER = 16 / T::BYTES;
        return T::of(v[i / PER], i % PER);
    }
};

struct Floats {
    static constexpr bool HALF = false;
    F32x4 v[2];

    FORCE void load(const AdaptersDownArgs& a, u32 token, u32 k) {
        v[0] = v[1] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
        if (k < a.cols) read((const float*)a.x + (u64)token * a.cols, k, a.cols);
    }
    FORCE void read(const float* row, u32 k, u32 cols) {
        if (cols % 8 == 0) {
            v[0] = *(const F32x4*)(row + k);
            v[1] = *(const F32x4*)(row + k + 4);
            return;
        }
        float all[8];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) all[i] = k + i < cols ? row[k + i] : 0.0f;
        v[0] = F32x4{all[0], all[1], all[2], all[3]};
        v[1] = F32x4{all[4], all[5], all[6], all[7]};
    }
    FORCE float at(u32 i) const {
        const F32x4& w = v[i / 4];
        return i % 4 == 0 ? w.x : i % 4 == 1 ? w.y : i % 4 == 2 ? w.z : w.w;
    }
};

struct Halves {
    static constexpr bool HALF = true;
    U32x4 v;

    FORCE void load(const AdaptersDownArgs& a, u32 token, u32 k) {
        v = U32x4{0, 0, 0, 0};
        if (k < a.cols) v = *(const U32x4*)(a.x + ((u64)token * a.cols + k) * 2);
    }
    FORCE float at(u32 i) const { return F16::of(v, i); }
};

// As matmat_wgmma.h has them: columns k and k + 2, k + 1 and k + 3, k + 4 and k + 6, k + 5 and k +
// 7 are a word each, which lies beside those of three other blocks.
struct Columns {
    static constexpr bool HALF = true;
    u32 word[4];

    FORCE void load(const AdaptersDownArgs& a, u32 token, u32 k) {
        const u64 tokens = (a.n_tokens + 7) / 8 * 8;
        const u32* from = (const u32*)a.x + ((k / 128 * 16 + k % 32 / 2) * tokens + token) * 4 + k / 32 % 4;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) word[j] = k < a.cols ? from[j * tokens * 4] : 0;
    }
    FORCE float at(u32 i) const { return f32_of_f16(word[i / 4 * 2 + i % 2] >> i % 4 / 2 * 16); }
};

// The sums of RANKS values over a wave, one in lanes 0, 8, 16 and 24 each.
FORCE float four_sums(const float (&v)[RANKS]) {
    const bool high = lane() & 16, odd = lane() & 8;
    float a = high ? v[2] : v[0], b = high ? v[3] : v[1];
    a += shuffle_xor(high ? v[0] : v[2], 16);
    b += shuffle_xor(high ? v[1] : v[3], 16);
    float sum = odd ? b : a;
    sum += shuffle_xor(odd ? a : b, 8);
    sum = lanes_sum(sum, 8);
    return WAVE == 64 ? sum + shuffle_xor(sum, WAVE / 2) : sum;
}

template <class T, class X>
FORCE void down(const AdaptersDownArgs& a) {
    constexpr u32 N_WAVES = THREADS / WAVE, PER = SLICE / 8 / THREADS;
    // Of each wave, and behind the sums of products that of the squares.
    __shared__ float sums[N_WAVES][TOKENS][RANKS + 1];
    let_next_start();
    const u32 blocks = a.width / RANKS, m = block_x() / blocks, rank0 = block_x() % blocks * RANKS;
    const u32 token0 = block_y() * TOKENS, n = least(TOKENS, a.n_tokens - token0), slice0 = block_z();
    if (!a.early) wait_for_inputs();
    const u32 mine = lane() % 32;
    const float* scales = a.scales + (u64)token0 * a.width + rank0;
    const bool is = mine < n && has_any(*(const F32x4*)(scales + (u64)least(mine, n - 1) * a.width));
    const u32 tokens = lanes_or((is ? 1u : 0u) << mine);
    // A launch ends behind the one before it, also where it has nothing to do.
    if (tokens == 0) {
        wait_for_inputs();
        return;
    }
    const u8* matrix = one_of(a.weights, m);
    bool waits = true;
#pragma unroll 1
    for (u32 slice = slice0; slice * SLICE < a.cols; slice += a.n_parts) {
        const u32 k0 = slice * SLICE + thread_x() * 8;
        Eight<T> w[RANKS][PER];
        Floats norm[PER];
#pragma unroll
        for (u32 r = 0; r < RANKS; ++r) {
#pragma unroll
            for (u32 p = 0; p < PER; ++p) w[r][p].load(matrix + (u64)(rank0 + r) * a.cols * T::BYTES, k0 + p * THREADS * 8, a.cols);
        }
        if (!X::HALF && a.norm) {
#pragma unroll
            for (u32 p = 0; p < PER; ++p) {
                const u32 k = k0 + p * THREADS * 8;
                norm[p].v[0] = norm[p].v[1] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
                if (k < a.cols) norm[p].read(a.norm, k, a.cols);
            }
        }
        if (waits) wait_for_inputs();
        waits = false;
        X now[PER];
        u32 left = tokens, t = 0;
        while (!(left >> t & 1)) ++t;
#pragma unroll
        for (u32 p = 0; p < PER; ++p) now[p].load(a, token0 + t, k0 + p * THREADS * 8);
        while (left) {
            left &= ~(1u << t);
            u32 next_t = t;
            X next[PER];
            if (left) {
                while (!(left >> next_t & 1)) ++next_t;
#pragma unroll
                for (u32 p = 0; p < PER; ++p) next[p].load(a, token0 + next_t, k0 + p * THREADS * 8);
            }
            float acc[RANKS] = {0.0f, 0.0f, 0.0f, 0.0f}, squares = 0.0f;
#pragma unroll
            for (u32 p = 0; p < PER; ++p) {
#pragma unroll
                for (u32 i = 0; i < 8; ++i) {
                    float v = now[p].at(i);
                    if (!X::HALF && a.norm) {
                        squares += v * v;
                        v *= norm[p].at(i);
                    }
#pragma unroll
                    for (u32 r = 0; r < RANKS; ++r) acc[r] += w[r][p].at(i) * v;
                }
            }
            const float sum = four_sums(acc);
            float* room = sums[wave()][t];
            const bool first = slice == slice0;
            if (lane() % 8 == 0 && lane() < 32) room[lane() / 8] = first ? sum : room[lane() / 8] + sum;
            if (!X::HALF && a.norm) {
                squares = wave_sum(squares);
                if (lane() == 0) room[RANKS] = first ? squares : room[RANKS] + squares;
            }
            t = next_t;
#pragma unroll
            for (u32 p = 0; p < PER; ++p) now[p] = next[p];
        }
    }
    if (waits) wait_for_inputs();
    block_sync();
    const u32 t = thread_x() / RANKS, r = thread_x() % RANKS;
    if (t >= n || !(tokens >> t & 1)) return;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (u32 w = 0; w < N_WAVES; ++w) sum += sums[w][t][r];
    float factor = scales[(u64)t * a.width + r];
    // What has no scale is nobody's: it may be infinite.
    if (factor == 0.0f) sum = 0.0f;
    factor *= a.factor;
    if (!X::HALF && a.norm) {
#pragma unroll
        for (u32 w = 0; w < N_WAVES; ++w) squares += sums[w][t][RANKS];
        factor /= sqrt_of(squares / (float)a.cols + a.eps);
    }
    a.low[((u64)(slice0 * a.n_matrices + m) * a.n_tokens + token0 + t) * a.width + rank0 + r] = sum * factor;
}

// Which of the matrices a block's rows are of, and which block of that matrix it is.
FORCE u32 matrix_of(const AdaptersUpArgs& a, u32& block) {
    u32 m = 0;
    block = block_x();
#pragma unroll
    for (u32 i = 0; i < 3; ++i) {
        const u32 blocks = (a.matrices[i].rows + UP_THREADS - 1) / UP_THREADS;
        if (m == i && i + 1 < a.n_matrices && block >= blocks) {
            block -= blocks;
            m = i + 1;
        }
    }
    return m;
}

// CHUNK columns of a row of B.
template <class T>
struct Chunk {
    Eight<T> v[CHUNK / 8];

    FORCE void load(const u8* row, u32 k, u32 width) {
#pragma unroll
        for (u32 i = 0; i < CHUNK / 8; ++i) v[i].load(row, k + i * 8, width);
    }
    // acc + the product with as many floats of shared memory
    FORCE float dot(const float* low, float acc) const {
#pragma unroll
        for (u32 i = 0; i < CHUNK; i += 4) {
            const F32x4 y = *(const F32x4*)(low + i);
            const Eight<T>& w = v[i / 8];
            acc += w.at(i % 8) * y.x;
            acc += w.at(i % 8 + 1) * y.y;
            acc += w.at(i % 8 + 2) * y.z;
            acc += w.at(i % 8 + 3) * y.w;
        }
        return acc;
    }
};

// One token, or COUNT; two matrices and a gated unit, or one of up to four.
template <class T, u32 COUNT, bool GATED>
FORCE void up(const AdaptersUpArgs& a) {
    constexpr u32 MATRICES = GATED ? 2 : 1;
    // Columns whose weights are under way at once: 256 bytes of a row.
    constexpr u32 WINDOW = 256 / T::BYTES, CHUNKS = WINDOW / CHUNK, QUARTERS = WINDOW / 4;
    // Tokens whose sums are asked for before the first of them is stored.
    constexpr u32 AT_ONCE = COUNT < 8 ? COUNT : 8;
    // Scales, and in their place what adapters_down left.
    __shared__ F32x4 low[MATRICES][COUNT][QUARTERS];
    // Whether a token has one of four scales, a byte each; a word has those of a chunk.
    __shared__ u32 has_scale[COUNT][CHUNKS];
    let_next_start();
    const u32 token0 = block_y() * COUNT, n = least(COUNT, a.n_tokens - token0);
    u32 block = block_x();
    const u32 m = GATED ? 0 : matrix_of(a, block);
    const u32 row = block * UP_THREADS + thread_x();
    AdapterMatrix matrix[MATRICES];
    float* out[MATRICES];
    float acc[MATRICES], before[AT_ONCE];
#pragma unroll
    for (u32 i = 0; i < MATRICES; ++i) {
        matrix[i] = GATED ? a.matrices[i] : one_of(a.matrices, m);
        out[i] = matrix[i].out + (u64)token0 * matrix[i].rows + row;
        acc[i] = 0.0f;
    }
    const bool is_row = row < matrix[0].rows;
    bool waits = true;
    if (!a.early) {
        wait_for_inputs();
        waits = false;
    }
#pragma unroll 1
    for (u32 first = 0; first < a.width; first += WINDOW) {
        // All have read what was there.
        if (first > 0) block_sync();
#pragma unroll 4
        for (u32 i = thread_x(); i < COUNT * QUARTERS; i += UP_THREADS) {
            const u32 t = i / QUARTERS, k = first + i % QUARTERS * 4;
            F32x4 s = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
            if (t < n && k < a.width) s = *(const F32x4*)(a.scales + (u64)(token0 + t) * a.width + k);
            low[0][t][i % QUARTERS] = s;
            ((u8*)has_scale)[i] = has_any(s);
        }
        block_sync();
        // Of each chunk the tokens that have a scale there, and all of these.
        u32 active[CHUNKS], added = 0;
        Chunk<T> chunk[MATRICES][CHUNKS];
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
            const u32 t = COUNT == 1 ? 0 : lane() % 32;
            const u32 is = t < COUNT && has_scale[t][c] ? 1u << t : 0u;
            active[c] = COUNT == 1 ? is : lanes_or(is);
            added |= active[c];
#pragma unroll
            for (u32 i = 0; i < MATRICES; ++i) {
                if (active[c] && is_row && matrix[i].weights)
                    chunk[i][c].load(matrix[i].weights + (u64)row * a.width * T::BYTES, first + c * CHUNK, a.width);
            }
        }
        if (waits) wait_for_inputs();
        waits = false;
        if (COUNT == 1 && is_row) before[0] = *out[0];
#pragma unroll 2
        for (u32 i = thread_x(); i < COUNT * QUARTERS; i += UP_THREADS) {
            const u32 t = i / QUARTERS, q = i % QUARTERS;
            // Where none of the four has a scale, adapters_down wrote nothing.
            const bool is = ((const u8*)has_scale)[i];
#pragma unroll
            for (u32 o = 0; o < MATRICES; ++o) {
                F32x4 sum = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
                F32x4 parts[PARTS];
#pragma unroll
                for (u32 part = 0; part < PARTS; ++part) {
                    const u64 place = ((u64)(part * a.n_low + matrix[o].low) * a.n_tokens + token0 + t) * a.width + first + q * 4;
                    parts[part] = is && part < a.n_parts ? *(const F32x4*)(a.low + place) : sum;
                }
#pragma unroll
                for (u32 part = 0; part < PARTS; ++part)
                    sum = F32x4{sum.x + parts[part].x, sum.y + parts[part].y, sum.z + parts[part].z, sum.w + parts[part].w};
                low[o][t][q] = sum;
            }
        }
        block_sync();
        if (GATED) {
#pragma unroll
            for (u32 i = 0; i < MATRICES; ++i) {
#pragma unroll
                for (u32 c = 0; c < CHUNKS; ++c) {
                    if (active[c] && matrix[i].weights) acc[i] = chunk[i][c].dot((const float*)&low[i][0][c * (CHUNK / 4)], acc[i]);
                }
            }
            continue;
        }
        if (!is_row) continue;
#pragma unroll 1
        for (u32 t0 = 0; t0 < COUNT; t0 += AT_ONCE) {
            const u32 these = added >> t0;
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j) {
                if (COUNT > 1 && these >> j & 1) before[j] = out[0][(u64)(t0 + j) * matrix[0].rows];
            }
#pragma unroll
            for (u32 j = 0; j < AT_ONCE; ++j) {
                if (!(these >> j & 1)) continue;
                float sum = 0.0f;
#pragma unroll
                for (u32 c = 0; c < CHUNKS; ++c) {
                    if (active[c] >> (t0 + j) & 1) sum = chunk[0][c].dot((const float*)&low[0][t0 + j][c * (CHUNK / 4)], sum);
                }
                out[0][(u64)(t0 + j) * matrix[0].rows] = before[j] + sum;
            }
        }
    }
    if (GATED && is_row) *out[0] = gate_of(a.act, *out[0] + acc[0], *out[MATRICES - 1] + acc[MATRICES - 1]);
}

#include "adapters_mma.h"

// Of f16 and many rows by matrix instructions where there are.
template <class T>
struct Many {
    static FORCE void down_columns(const AdaptersDownArgs& a) { down<T, Columns>(a); }
    static FORCE void up_many(const AdaptersUpArgs& a) { up<T, TOKENS, false>(a); }
};
#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
template <>
struct Many<F16> {
    static FORCE void down_columns(const AdaptersDownArgs& a) { down_by_mma(a); }
    static FORCE void up_many(const AdaptersUpArgs& a) { up_by_mma(a); }
};
#endif

#define NAME2(a, b) a##b
#define NAME(a, b) NAME2(a, b)
ENTRY(THREADS, 1) NAME(adapters_down_, TYPE)(AdaptersDownArgs a) { down<WEIGHT, Floats>(a); }
ENTRY(THREADS, 1) NAME(adapters_down_half_, TYPE)(AdaptersDownArgs a) { down<WEIGHT, Halves>(a); }
#ifdef RF_CUDA
ENTRY(THREADS, 2) NAME(adapters_down_columns_, TYPE)(AdaptersDownArgs a) { Many<WEIGHT>::down_columns(a); }
#endif
ENTRY(UP_THREADS, 1) NAME(adapters_up_1_, TYPE)(AdaptersUpArgs a) { up<WEIGHT, 1, false>(a); }
ENTRY(UP_THREADS, 1) NAME(adapters_up_32_, TYPE)(AdaptersUpArgs a) { Many<WEIGHT>::up_many(a); }
ENTRY(UP_THREADS, 1) NAME(adapters_up_gated_, TYPE)(AdaptersUpArgs a) { up<WEIGHT, 1, true>(a); }
