// Products of 17 to 128 tokens by wgmma (NVIDIA, sm_90a): weights as f16 in registers, x
// by the copy engine to shared memory, where the instruction reads it. Included by
// matmat.hip, behind matmat_few.h.
//
// A block has 128 rows and all tokens; each of its two groups of four waves multiplies 64 rows, 16
// a wave. A lane (4 g + q) takes of rows g and g + 8 of its wave whole blocks of 32 weights: blocks
// 8 i + q and 8 i + q + 4 in step i of 256 columns. So it reads each weight's bytes once and
// unpacks a block's scale once. The next 16 columns are unpacked while products run, and the next
// half of a step is loaded meanwhile. Two blocks a multiprocessor, of 128 tokens one: while waves
// of one wait for their products, others unpack.
// x: [cols / 128][16][tokens rounded up to 8][8] f16 (activations.hip writes it). Of 128 columns,
// the 16 numbers of product w are weights 4 w to 4 w + 3 of four blocks: in the first 8 numbers 0
// and 2 of each block, in the others 1 and 3, as nibbles come out of a word. A half of a step
// lies together and is one copy. Tokens past the last hold anything: a column of the product
// depends on its own token alone.
// Geometry: grid (tiles of 128 rows of all matrices, 1, parts of the columns), THREADS threads.
// Columns: a multiple of 256. Blocks begin at different steps and go round, since all would read
// the same lines of x at once otherwise.
// Shared memory, dynamic: STAGES_OF_X places of x, [128 columns][tokens of the entry] f16; behind
// them a barrier for each that is passed when x is there, and one when all waves are done with it.
// Parts: as matmat_f16.h says, but that each block of a tile adds up a share of the sums
// (wait_for_parts): one block that adds up all takes 5 to 15 us, behind which everything waits. A
// tile's partial sums are [part][four floats of a thread][THREADS].
// Bytes: the weights once; x (2 bytes an element) once a tile, from the second-level cache.
#pragma once

#define STAGES_OF_X 4u
// Products of 16 columns that run while as many are unpacked.
#define AT_ONCE 2u
// Most parts of the columns, and how often a block looks whether all of a tile's have
// arrived: some 0.7 us each.
#define WGMMA_PARTS 8u
#ifndef POLLS
#define POLLS 1000u
#endif

// The feature of sm_90a, which sm_90 is compiled as.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// c += a [64][16] x [16][tokens]: a wave's part of a is that of mma.sync; x by where it begins
// and how far the other 8 columns (in the upper half of x_low) and the next 8 tokens (x_high)
// are, in units of 16 bytes.
FORCE void multiply_wide(float (&c)[16], const u32 (&a)[4], u32 x_low, u32 x_high) {
    asm volatile(
        "{ .reg .b64 x; mov.b64 x, {%20, %21};\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, x, 1, 1, 1, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]),
          "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]),
          "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x_low), "r"(x_high));
}
FORCE void multiply_wide(float (&c)[32], const u32 (&a)[4], u32 x_low, u32 x_high) {
    asm volatile(
        "{ .reg .b64 x; mov.b64 x, {%36, %37};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, x, 1, 1, 1, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]),
          "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]),
          "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]),
          "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),
          "+f"(c[30]), "+f"(c[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x_low), "r"(x_high));
}
FORCE void multiply_wide(float (&c)[64], const u32 (&a)[4], u32 x_low, u32 x_high) {
    asm volatile(
        "{ .reg .b64 x; mov.b64 x, {%68, %69};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, x, 1, 1, 1, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]),
          "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]),
          "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]),
          "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),
          "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]),
          "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
          "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]),
          "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]),
          "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]),
          "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x_low), "r"(x_high));
}
// Registers that products read are as they were written, and none is written before they have
// ended.
FORCE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FORCE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
FORCE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// What is written so far is not moved behind what follows.
FORCE void written(u32 (&a)[4]) { asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory"); }

// Barriers in shared memory, at an address there.
FORCE void barrier_init(u32 at, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
FORCE void barrier_arrive(u32 at) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(at) : "memory");
}
// Arrives, and so many bytes will.
FORCE void barrier_expect(u32 at, u32 bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(at), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended.
FORCE void barrier_wait(u32 at, u32 parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra.uni again; }" ::"r"(at), "r"(parity) : "memory");
}
FORCE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// What a lane has of a row: in half h of 256 columns, block c. The next one is
// loaded while one is in use.
template <class T>
struct StepRow {
    typename T::Chunk chunk[2];
    HalfBlock<T> block;

    FORCE void load(const RowAt& at, u32 h, u32 c, u32 nb) { chunk[h] = T::load(at, c, nb); }
    FORCE void begin(u32 h, u32 c) { block.begin(chunk[h], c, true); }
    // Weights 4 w and 4 w + 2, 4 w + 1 and 4 w + 3.
    FORCE void four(u32, u32 w, u32 (&to)[2]) const { block.template four<true>(w, to); }
};
template <>
struct StepRow<Q4_K> {
    U32x4 q[2], head;
    u32 scales[2], least_ones[2];

    FORCE void load(const RowAt& at, u32 h, u32 c, u32) {
        q[h] = stream16(at.q + c * 16);
        if (h == 0) head = shared16(at.d + c / 8 * 16);
    }
    FORCE void begin(u32 h, u32 c) {
        if (h == 0) both_scales(head, c % 8, scales, least_ones);
    }
    FORCE void four(u32 h, u32 w, u32 (&to)[2]) const { nibbles_f16(q[h], w, scales[h], least_ones[h], to); }
};

// Says that a part's sums are written, waits for those of all parts of the tile and returns
// which shares of the sums this block is to add up, bit k for share k of as many as there are
// parts. The order of arrival gives each block one. A block waits POLLS looks at most: then it
// gives its share up, and leaves, so nobody depends on all of them running at once. The last one
// to arrive never waits, and takes what was given up: each share is given up before it arrives
// or not at all. counter: bits 0 to 7 those that have arrived, 8 to 15 left (by the caller),
// from 16 on shares given up.
FORCE u32 wait_for_parts(u32* counter, u32 parts) {
    const u32 before = counter_add(counter, 1), share = before & 255;
    if (share == parts - 1) return 1u << share | before >> 16;
    for (u32 i = 0; i < POLLS; ++i) {
        if ((*(volatile u32*)counter & 255) == parts) return 1u << share;
    }
    const u32 now = counter_add(counter, 1u << (16 + share));
    return (now & 255) == parts ? 1u << share : 0;
}

template <class T, u32 TOKENS>
FORCE void matmat_wgmma(const MatmatMmaArgs& a) {
    constexpr u32 ROWS = 128, STAGE_BYTES = 256 * TOKENS, FLOATS = TOKENS / 2, PARTS = 8 / AT_ONCE;
    extern __shared__ U32x4 shared_wide[];
    let_next_start();
    const MmaTile tile = mma_tile(a, ROWS, TOKENS);
    const u32 nb = a.cols / 32, steps = nb / 8, tokens = (a.n_tokens + 7) / 8 * 8;
    const u32 begin = steps * tile.part / tile.parts, n_steps = steps * (tile.part + 1) / tile.parts - begin;
    const u32 turn = tile.row0 / ROWS * 5 % n_steps;
    auto step_of = [&](u32 i) { return begin + (i + turn >= n_steps ? i + turn - n_steps : i + turn); };
    const u32 room = made_anew((u32)__cvta_generic_to_shared(shared_wide));
    const u32 ready = room + STAGES_OF_X * STAGE_BYTES, done = ready + 8 * STAGES_OF_X;
    if (thread_x() == 0) {
#pragma unroll
        for (u32 s = 0; s < STAGES_OF_X; ++s) {
            barrier_init(ready + 8 * s, 1);
            barrier_init(done + 8 * s, WAVES);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    block_sync();
    // Half j, in the order of this block.
    const u32 bytes = tokens * 256, halves = 2 * n_steps;
    auto copy_x = [&](u32 j) {
        const u32 stage = j % STAGES_OF_X;
        if (j >= STAGES_OF_X) barrier_wait(done + 8 * stage, (j / STAGES_OF_X - 1) & 1);
        barrier_expect(ready + 8 * stage, bytes);
        copy_bulk(room + stage * STAGE_BYTES, (const u8*)a.x + (u64)(2 * step_of(j / 2) + j % 2) * bytes, bytes, ready + 8 * stage);
    };
    const u32 g = lane() / 4, q = lane() % 4, row0 = tile.row0 + wave() * 16 + g;
    RowAt at[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) at[r] = T::row(tile.weights, tile.rows, nb, least(row0 + r * 8, tile.rows - 1));
    StepRow<T> w[2];
    auto load = [&](u32 i, u32 h) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) w[r].load(at[r], h, step_of(i) * 8 + h * 4 + q, nb);
    };
    auto begin_half = [&](u32 i, u32 h) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) w[r].begin(h, step_of(i) * 8 + h * 4 + q);
    };
    load(0, 0);
    if (thread_x() == 0) {
        wait_for_inputs();
        for (u32 j = 0; j < STAGES_OF_X && j < halves; ++j) copy_x(j);
    }
    float acc[FLOATS];
#pragma unroll
    for (u32 i = 0; i < FLOATS; ++i) acc[i] = 0.0f;
    u32 f[2][AT_ONCE][4];
    auto unpack = [&](u32 h, u32 p) {
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; ++k) {
            u32(&to)[4] = f[p % 2][k];
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                u32 two[2];
                w[r].four(h, p * AT_ONCE + k, two);
                to[r] = two[0];
                to[2 + r] = two[1];
            }
            written(to);
        }
    };
    begin_half(0, 0);
    unpack(0, 0);
#pragma unroll 1
    for (u32 i = 0; i < n_steps; ++i) {
        const bool more = i + 1 < n_steps;
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            if (h == 0) {
                load(i, 1);
            } else if (more) {
                load(i + 1, 0);
            }
            const u32 j = 2 * i + h, stage = j % STAGES_OF_X;
            barrier_wait(ready + 8 * stage, j / STAGES_OF_X & 1);
            const u32 x = tokens << 16 | (room + stage * STAGE_BYTES) >> 4;
#pragma unroll
            for (u32 p = 0; p < PARTS; ++p) {
                products_begin();
#pragma unroll
                for (u32 k = 0; k < AT_ONCE; ++k) multiply_wide(acc, f[p % 2][k], x + (p * AT_ONCE + k) * (2 * tokens), 8);
                products_end();
                if (p + 1 < PARTS) {
                    unpack(h, p + 1);
                } else {
                    // Behind the last step come weights that nothing is multiplied with.
                    if (h == 0) {
                        begin_half(i, 1);
                    } else if (more) {
                        begin_half(i + 1, 0);
                    }
                    unpack(1 - h, 0);
                }
                wait_for_products();
            }
            if (lane() == 0) barrier_arrive(done + 8 * stage);
            // Into the place of the half before, which others may still be at.
            if (thread_x() == 0 && j > 0 && j - 1 + STAGES_OF_X < halves) copy_x(j - 1 + STAGES_OF_X);
        }
    }
    // What is added to may have been written by launches that only one thread has waited for.
    wait_for_inputs();
    // Float i of a lane: of each 8 tokens rows g and 8 further, tokens 2 q and the next.
    struct Place {
        float* out;
        bool is;
    };
    auto place_of = [&](u32 i) {
        const u32 row = row0 + i % 4 / 2 * 8, token = i / 4 * 8 + q * 2 + i % 2;
        return Place{tile.out + (u64)token * tile.rows + row, row < tile.rows && token < a.n_tokens};
    };
    float bias[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) bias[r] = tile.bias ? tile.bias[least(row0 + r * 8, tile.rows - 1)] : 0.0f;
    // Floats 4 i to 4 i + 3, each added to what is there if that is wanted.
    auto before_of = [&](u32 i) {
        float before[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const Place place = place_of(4 * i + j);
            before[j] = bias[j / 2];
            if (tile.epilogue == 1 && place.is) before[j] += *place.out;
        }
        return F32x4{before[0], before[1], before[2], before[3]};
    };
    auto store = [&](u32 i, const F32x4& sum, const F32x4& before) {
        const float v[4] = {sum.x, sum.y, sum.z, sum.w}, b[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const Place place = place_of(4 * i + j);
            if (place.is) *place.out = v[j] * (tile.factor / SCALE) + b[j];
        }
    };
    // What is added is asked for AT_A_TIME times four floats before the first of them is
    // stored: a load behind a store that may be to the same place would wait for it, one round
    // trip to memory after the other.
    constexpr u32 AT_A_TIME = TOKENS > 64 ? 4 : 2;
    if (tile.parts == 1) {
#pragma unroll
        for (u32 first = 0; first < FLOATS / 4; first += 2 * AT_A_TIME) {
            F32x4 before[2 * AT_A_TIME];
#pragma unroll
            for (u32 i = 0; i < 2 * AT_A_TIME; ++i) before[i] = before_of(first + i);
#pragma unroll
            for (u32 i = 0; i < 2 * AT_A_TIME; ++i) {
                const float* v = acc + 4 * (first + i);
                store(first + i, F32x4{v[0], v[1], v[2], v[3]}, before[i]);
            }
        }
        return;
    }
    auto partial = [&](u32 part, u32 i) { return tile.partials + (part * (FLOATS / 4) + i) * THREADS + thread_x(); };
    const u32 n_groups = tokens / 8;
#pragma unroll
    for (u32 i = 0; i < FLOATS / 4; ++i) {
        if (i < n_groups) *partial(tile.part, i) = F32x4{acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
    }
    u32* shares = (u32*)shared_wide;
    device_fence();
    block_sync();
    if (thread_x() == 0) *shares = wait_for_parts(tile.counter, tile.parts);
    block_sync();
    device_fence();
    // Bit k: the groups of 8 tokens k, k + parts and so on are this block's to add up.
    for (u32 mine = *shares, k = 0; mine != 0; mine >>= 1, ++k) {
        if ((mine & 1) == 0) continue;
#pragma unroll 1
        for (u32 first = k; first < n_groups; first += AT_A_TIME * tile.parts) {
            F32x4 before[AT_A_TIME], sum[AT_A_TIME];
#pragma unroll
            for (u32 n = 0; n < AT_A_TIME; ++n) {
                const u32 i = first + n * tile.parts;
                if (i >= n_groups) continue;
                before[n] = before_of(i);
                F32x4 one[WGMMA_PARTS];
#pragma unroll
                for (u32 p = 0; p < WGMMA_PARTS; ++p) one[p] = p < tile.parts ? *partial(p, i) : F32x4{0.0f, 0.0f, 0.0f, 0.0f};
                sum[n] = one[0];
#pragma unroll
                for (u32 p = 1; p < WGMMA_PARTS; ++p) sum[n] = plus(sum[n], one[p]);
            }
#pragma unroll
            for (u32 n = 0; n < AT_A_TIME; ++n) {
                if (first + n * tile.parts < n_groups) store(first + n * tile.parts, sum[n], before[n]);
            }
        }
    }
    // The last block to leave finds all others done with the counter.
    if (thread_x() == 0 && (counter_add(tile.counter, 1u << 8) >> 8 & 255) == tile.parts - 1) *tile.counter = 0;
}
#endif
