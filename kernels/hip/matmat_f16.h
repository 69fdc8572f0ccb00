// Products of some 2 to 32 tokens a block by mma.sync (NVIDIA, sm_80 and later), of whichever rows `Tokens` names. Included by
// experts_many.hip and, for its fragments of weights, by matmat_staged.h.
//
// out[t][r] = factor * sum_k W[r][k] * x[t][k] with x [tokens][cols] f16 (activations.hip), W as f16 made in registers, f32 sums.
// Geometry: grid (rows / 32 rounded up, tokens / 32 rounded up), THREADS threads: a block has 32 rows and up to 32 tokens, and its waves
// share the blocks of 32 weights round robin, so that they read neighbours at once; their sums meet in shared memory.
// A lane (4 g + q) takes of rows g, g + 8, g + 16 and g + 24 the weights 4 q to 4 q + 3 of a block and those 16 behind: the order of k in a
// product is free as long as both operands have the same, and in this one a lane's share of x is 8 bytes in a row.
// All of a block's weights are asked for at its start, into the second-level cache: the loop itself would have too few bytes under way.
// Bytes: the weights once per 32 tokens, x (64 bytes a token and block of 32) once per 32 rows, from the caches.
#pragma once
#include "tokens.h"

#define TILE_ROWS 32u
#define TILE_TOKENS 32u
#define GROUPS (TILE_TOKENS / 8)
#define WAVES (THREADS / WAVE)

struct MatmatF16Args {
    const u8* weights;
    const u16* x;
    float* out;         // [n_tokens][stride]
    const float* bias;  // or null
    u32 rows, cols;
    u32 n_tokens;
    u32 stride;
    u32 epilogue;  // 0 store, 1 add to out
    float factor;
};

#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
FORCE u32 select4(const u32* v, u32 q) { return q & 2 ? (q & 1 ? v[3] : v[2]) : (q & 1 ? v[1] : v[0]); }

// c += a [16][16] b [16][8]
FORCE void multiply(F32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Asks for `bytes` bytes, all threads together, without waiting for them.
FORCE void prefetch(const u8* at, u32 bytes) {
    for (u32 i = thread_x() * 128; i < bytes; i += THREADS * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(at + i));
}

// Words q and 4 + q of a block's codes, of all eight or, where a type says how, of the bits that hold them.
template <class T, class Chunk>
FORCE void two_words(T, const Chunk&, const Codes& codes, u32 q, u32 (&to)[2]) {
    to[0] = select4(codes.v, q);
    to[1] = select4(codes.v + 4, q);
}
FORCE u32 select4(const U32x4& v, u32 q) { return q & 2 ? (q & 1 ? v.w : v.z) : (q & 1 ? v.y : v.x); }
FORCE void two_nibbles(const U32x4& v, u32 q, u32 (&to)[2]) {
    const u32 both = select4(v, q);
    to[0] = both & 0x0f0f0f0fu;
    to[1] = (both >> 4) & 0x0f0f0f0fu;
}
FORCE void two_words(Q4_0, const Q4_0::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) {
    const u32 both = select4(k.q, q);
    to[0] = (both << 4) & 0xf0f0f0f0u;
    to[1] = both & 0xf0f0f0f0u;
}
FORCE void two_words(Q4_1, const Q4_1::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) { two_nibbles(k.q, q, to); }
FORCE void two_words(Q4_K, const Q4_K::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) { two_nibbles(k.q, q, to); }
FORCE void two_words(Q5_K, const Q5_K::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) {
    two_nibbles(k.q, q, to);
    to[0] |= (k.h << (4 - q)) & 0x10101010u;
    to[1] |= (k.h >> q) & 0x10101010u;
}
FORCE void two_words(Q6_K, const Q6_K::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) {
    const u32 both = select4(k.q, q);
    to[0] = ((both << 2) & 0x3c3c3c3cu) | ((k.h.x << (6 - 2 * q)) & 0xc0c0c0c0u);
    to[1] = ((both >> 2) & 0x3c3c3c3cu) | ((k.h.y << (6 - 2 * q)) & 0xc0c0c0c0u);
}
FORCE void two_words(MXFP4, const MXFP4::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) {
    two_nibbles(k.q, q, to);
    for (u32 i = 0; i < 2; ++i) to[i] = fp4_doubled(to[i]);
}
FORCE void two_words(NVFP4, const NVFP4::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) {
    two_nibbles(k.q, q, to);
    for (u32 i = 0; i < 2; ++i) to[i] = fp4_doubled(to[i]);
}
FORCE void two_words(IQ4_NL, const IQ4_NL::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) {
    two_nibbles(k.q, q, to);
    for (u32 i = 0; i < 2; ++i) to[i] = iq4_values(to[i]);
}
FORCE void two_words(IQ4_XS, const IQ4_XS::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) {
    two_nibbles(k.q, q, to);
    for (u32 i = 0; i < 2; ++i) to[i] = iq4_values(to[i]);
}
FORCE void two_words(Q8_0, const Q8_0::Chunk& k, const Codes&, u32 q, u32 (&to)[2]) {
    to[0] = select4(k.low, q);
    to[1] = select4(k.high, q);
}

// Weights in registers are SCALE times what they are, so that scales of small weights keep f16's bits; the sums are divided by it.
#define SCALE 64.0f

FORCE u32 difference(u32 a, u32 b) {
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
FORCE u32 product(u32 a, u32 b) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
FORCE u32 product_sum(u32 a, u32 b, u32 c) {
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
    return a;
}

// A lane's eight weights of a block: [half][pair]. A byte under 0x64 is the f16 1024 + byte; signed bytes are brought to 0 to 255.
template <class T>
FORCE void fragment(const typename T::Chunk& chunk, u32 c, u32 q, u32 (&to)[2][2]) {
    Codes codes;
    T::unpack(chunk, c, codes);
    u32 words[2];
    two_words(T(), chunk, codes, q, words);
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const u32 s = T::HALVES ? h : 0, bytes = T::MIN ? words[h] : words[h] ^ 0x80808080u;
        const u32 zero = T::MIN ? 0x64006400u : 0x64806480u;
        const float scale = codes.scale[s] * SCALE;
        const u32 scales = pack_f16(scale, scale);
#pragma unroll
        for (u32 pair = 0; pair < 2; ++pair) {
            const u32 v = difference(__byte_perm(bytes, 0x64646464u, pair ? 0x4342 : 0x4140), zero);
            if (T::MIN) {
                const float least = codes.min[s] * -SCALE;
                to[h][pair] = product_sum(v, scales, pack_f16(least, least));
            } else {
                to[h][pair] = product(v, scales);
            }
        }
    }
}

template <class T, class Tokens>
FORCE void matmat_f16(const MatmatF16Args& a, const Tokens& tokens) {
    // [waves][2][GROUPS] fragments of 16 bytes a lane; half of the waves at a time.
    __shared__ F32x4 sums[WAVES / 2][2 * GROUPS][WAVE];
    let_next_start();
    const u32 nb = a.cols / 32, g = lane() / 4, q = lane() % 4;
    const u32 row0 = block_x() * TILE_ROWS, token0 = tokens.first(TILE_TOKENS);
    const u8* weights = tokens.weights(a.weights);
    const u32 n_tokens = least(TILE_TOKENS, tokens.n - token0), n_groups = (n_tokens + 7) / 8;
    {
        const u32 rows = least(TILE_ROWS, a.rows - row0);
        const RowAt first = T::row(weights, a.rows, nb, row0);
        prefetch(first.q, rows * nb * T::Q_BYTES);
        prefetch(first.h, rows * nb * T::H_BYTES);
        prefetch(first.s, rows * (nb / T::S_EVERY) * T::S_BYTES);
        prefetch(first.d, rows * (nb / T::D_EVERY) * T::D_BYTES);
    }
    RowAt at[4];
#pragma unroll
    for (u32 r = 0; r < 4; ++r) at[r] = T::row(weights, a.rows, nb, least(row0 + r * 8 + g, a.rows - 1));
    F32x4 acc[2][GROUPS];
#pragma unroll
    for (u32 m = 0; m < 2; ++m) {
#pragma unroll
        for (u32 n = 0; n < GROUPS; ++n) acc[m][n] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    // What the next step works on travels during this one.
    typename T::Chunk next[4];
    U32x2 x_next[GROUPS][2];
    const u16* x = a.x + q * 4;
    u64 x_at[GROUPS];
#pragma unroll
    for (u32 n = 0; n < GROUPS; ++n) x_at[n] = (u64)tokens.x_row(token0 + least(n * 8 + g, n_tokens - 1)) * a.cols;
    auto load_x = [&](u32 c) {
#pragma unroll
        for (u32 n = 0; n < GROUPS; ++n) {
            if (n < n_groups) {
                const u16* from = x + x_at[n] + c * 32;
                x_next[n][0] = *(const U32x2*)from;
                x_next[n][1] = *(const U32x2*)(from + 16);
            }
        }
    };
    u32 c = wave();
    if (c < nb) {
#pragma unroll
        for (u32 r = 0; r < 4; ++r) next[r] = T::load(at[r], c, nb);
    }
    wait_for_inputs();
    if (c < nb) load_x(c);
    for (; c < nb; c += WAVES) {
        u32 w[4][2][2];
        U32x2 y[GROUPS][2];
#pragma unroll
        for (u32 r = 0; r < 4; ++r) fragment<T>(next[r], c, q, w[r]);
#pragma unroll
        for (u32 n = 0; n < GROUPS; ++n) {
            y[n][0] = x_next[n][0];
            y[n][1] = x_next[n][1];
        }
        if (c + WAVES < nb) {
#pragma unroll
            for (u32 r = 0; r < 4; ++r) next[r] = T::load(at[r], c + WAVES, nb);
            load_x(c + WAVES);
        }
#pragma unroll
        for (u32 n = 0; n < GROUPS; ++n) {
            if (n < n_groups) {
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
#pragma unroll
                    for (u32 m = 0; m < 2; ++m)
                        multiply(acc[m][n], w[2 * m][h][0], w[2 * m + 1][h][0], w[2 * m][h][1], w[2 * m + 1][h][1], y[n][h].x, y[n][h].y);
                }
            }
        }
    }
    constexpr u32 HALF = WAVES / 2;
    if (wave() >= HALF) {
#pragma unroll
        for (u32 i = 0; i < 2 * GROUPS; ++i) sums[wave() - HALF][i][lane()] = acc[i / GROUPS][i % GROUPS];
    }
    block_sync();
    if (wave() < HALF) {
#pragma unroll
        for (u32 i = 0; i < 2 * GROUPS; ++i) {
            F32x4 s = sums[wave()][i][lane()];
            const F32x4 mine = acc[i / GROUPS][i % GROUPS];
            sums[wave()][i][lane()] = F32x4{s.x + mine.x, s.y + mine.y, s.z + mine.z, s.w + mine.w};
        }
    }
    block_sync();
    // A fragment's lane: rows 16 m + g and + 8, tokens 8 n + 2 q and the next.
    for (u32 i = wave(); i < 2 * GROUPS; i += WAVES) {
        const u32 m = i / GROUPS, n = i % GROUPS;
        if (n >= n_groups) continue;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 k = 0; k < HALF; ++k) {
            const F32x4 s = sums[k][i][lane()];
            v[0] += s.x;
            v[1] += s.y;
            v[2] += s.z;
            v[3] += s.w;
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 row = row0 + m * 16 + j / 2 * 8 + g, token = n * 8 + q * 2 + j % 2;
            if (row < a.rows && token < n_tokens) {
                float* out = a.out + (u64)tokens.out_row(token0 + token) * a.stride + row;
                const float y = tokens.finish(v[j] * (a.factor / SCALE), a.bias, row);
                *out = a.epilogue == 1 ? *out + y : y;
            }
        }
    }
}
#endif
