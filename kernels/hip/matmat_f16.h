// Products of some 2 to 128 tokens by mma.sync (NVIDIA, sm_80 and later). Included by matmat.hip.
//
// out[t][r] = factor * sum_k W[r][k] * x[t][k] with x [tokens][cols] f16 (activations.hip), W as f16 made in registers, f32 sums.
// Geometry: grid (rows / 32 rounded up, tokens / 64 rounded up), THREADS threads: a block has 32 rows and up to 64 tokens, and its waves
// share the blocks of 32 weights round robin, so that they read neighbours at once; their sums meet in shared memory.
// A lane (4 g + q) unpacks rows g, g + 8, g + 16 and g + 24, of which it takes weights 4 q to 4 q + 3 and 16 more: the order of k in a
// product is free as long as both operands have the same, and in this one a lane's share of x is 8 bytes in a row.
// All of a block's weights are asked for at its start, into the second-level cache: the loop itself would have too few bytes under way.
// Bytes: the weights once per 64 tokens, x (64 bytes a token and block of 32) once per 32 rows, from the caches.
#pragma once

#define TILE_ROWS 32u
#define TILE_TOKENS 64u
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

// A lane's eight weights of a block: [half][pair].
template <class T>
FORCE void fragment(const typename T::Chunk& chunk, u32 c, u32 q, u32 (&to)[2][2]) {
    Codes codes;
    T::unpack(chunk, c, codes);
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const u32 bytes = select4(codes.v + 4 * h, q), s = T::HALVES ? h : 0;
        float v[4];
#pragma unroll
        for (u32 b = 0; b < 4; ++b) {
            v[b] = codes.scale[s] * (float)(i32)(i8)((bytes >> (8 * b)) & 255);
            if (T::MIN) v[b] -= codes.min[s];
        }
        to[h][0] = pack_f16(v[0], v[1]);
        to[h][1] = pack_f16(v[2], v[3]);
    }
}

template <class T>
FORCE void matmat_f16(const MatmatF16Args& a) {
    // [waves][2][8] fragments of 16 bytes a lane; half of the waves at a time.
    __shared__ F32x4 sums[WAVES / 2][16][WAVE];
    let_next_start();
    const u32 nb = a.cols / 32, g = lane() / 4, q = lane() % 4;
    const u32 row0 = block_x() * TILE_ROWS, token0 = block_y() * TILE_TOKENS;
    const u32 n_tokens = least(TILE_TOKENS, a.n_tokens - token0), n_groups = (n_tokens + 7) / 8;
    {
        const u32 rows = least(TILE_ROWS, a.rows - row0);
        const RowAt first = T::row(a.weights, a.rows, nb, row0);
        prefetch(first.q, rows * nb * T::Q_BYTES);
        prefetch(first.h, rows * nb * T::H_BYTES);
        prefetch(first.s, rows * (nb / T::S_EVERY) * T::S_BYTES);
        prefetch(first.d, rows * (nb / T::D_EVERY) * T::D_BYTES);
    }
    RowAt at[4];
#pragma unroll
    for (u32 r = 0; r < 4; ++r) at[r] = T::row(a.weights, a.rows, nb, least(row0 + r * 8 + g, a.rows - 1));
    F32x4 acc[2][8];
#pragma unroll
    for (u32 m = 0; m < 2; ++m) {
#pragma unroll
        for (u32 n = 0; n < 8; ++n) acc[m][n] = F32x4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    typename T::Chunk next[4];
    u32 c = wave();
    if (c < nb) {
#pragma unroll
        for (u32 r = 0; r < 4; ++r) next[r] = T::load(at[r], c, nb);
    }
    wait_for_inputs();
    const u16* x = a.x + (u64)token0 * a.cols + q * 4;
    for (; c < nb; c += WAVES) {
        u32 w[4][2][2];
#pragma unroll
        for (u32 r = 0; r < 4; ++r) fragment<T>(next[r], c, q, w[r]);
        if (c + WAVES < nb) {
#pragma unroll
            for (u32 r = 0; r < 4; ++r) next[r] = T::load(at[r], c + WAVES, nb);
        }
#pragma unroll
        for (u32 n = 0; n < 8; ++n) {
            if (n < n_groups) {
                const u16* from = x + (u64)least(n * 8 + g, n_tokens - 1) * a.cols + c * 32;
                const U32x2 low = *(const U32x2*)from, high = *(const U32x2*)(from + 16);
#pragma unroll
                for (u32 m = 0; m < 2; ++m) {
                    multiply(acc[m][n], w[2 * m][0][0], w[2 * m + 1][0][0], w[2 * m][0][1], w[2 * m + 1][0][1], low.x, low.y);
                    multiply(acc[m][n], w[2 * m][1][0], w[2 * m + 1][1][0], w[2 * m][1][1], w[2 * m + 1][1][1], high.x, high.y);
                }
            }
        }
    }
    constexpr u32 HALF = WAVES / 2;
    if (wave() >= HALF) {
#pragma unroll
        for (u32 i = 0; i < 16; ++i) sums[wave() - HALF][i][lane()] = acc[i / 8][i % 8];
    }
    block_sync();
    if (wave() < HALF) {
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
            F32x4 s = sums[wave()][i][lane()];
            const F32x4 mine = acc[i / 8][i % 8];
            sums[wave()][i][lane()] = F32x4{s.x + mine.x, s.y + mine.y, s.z + mine.z, s.w + mine.w};
        }
    }
    block_sync();
    // A fragment's lane: rows 16 m + g and + 8, tokens 8 n + 2 q and the next.
    for (u32 i = wave(); i < 16; i += WAVES) {
        const u32 m = i / 8, n = i % 8;
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
                float* out = a.out + (u64)(token0 + token) * a.stride + row;
                float y = v[j] * a.factor;
                if (a.bias) y += a.bias[row];
                *out = a.epilogue == 1 ? *out + y : y;
            }
        }
    }
}
#endif
