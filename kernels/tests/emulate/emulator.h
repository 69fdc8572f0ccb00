// Kernels of hip/ as a program for the host: what compat.h, mma_f16.h and the guarded parts of
// headers declare. A lane is a fiber, a block a thread with its fibers in turn, and the blocks of a
// cluster run as threads beside each other. Barriers and shuffles hand over to the next fiber.
#pragma once
#include <sched.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;

#ifndef WAVE
#define WAVE 32
#endif
#define WAVES (THREADS / WAVE)
#define FORCE inline
#define __shared__ static thread_local
#define ENTRY(threads, min_blocks) inline void
#define __cluster_dims__(...)

#define CHECK(what)                                                   \
    do {                                                              \
        if (!(what)) {                                                \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #what);    \
            std::fflush(stdout);                                      \
            std::_Exit(1);                                            \
        }                                                             \
    } while (0)

constexpr u32 THREADS_MAX = 256, STACK = 64 << 10, CLUSTER_MAX = 8;

struct Barrier {
    u32 count = 0, turn = 0;
};

// The operands of a lane for a matrix instruction.
struct Fragment {
    u32 a[4], b[2];
};

// A cluster's barrier, and where its blocks' shared memory is.
struct Cluster {
    u32 n = 1;
    std::atomic<u32> arrived{0}, turn{0};
    std::atomic<const u8*> base[CLUSTER_MAX];
};

struct Block {
    u32 thread, x, y, z, n;
    ucontext_t fibers[THREADS_MAX], scheduler;
    bool done[THREADS_MAX], waited[THREADS_MAX];
    Barrier all, waves[THREADS_MAX / 32], cluster_here;
    u32 cluster_turn[THREADS_MAX];
    u32 slots[THREADS_MAX];
    Fragment fragments[THREADS_MAX];
    Cluster* cluster;
    std::function<void()> body;
    std::vector<u8> stacks = std::vector<u8>(THREADS_MAX * STACK);
};
inline thread_local Block* block = nullptr;
// Its address differs from that of any shared memory by the same in all threads.
inline thread_local u8 shared_base = 0;

inline void hand_over() { swapcontext(&block->fibers[block->thread], &block->scheduler); }
inline void pass(Barrier& barrier, u32 n) {
    const u32 turn = barrier.turn;
    if (++barrier.count == n) {
        barrier.count = 0;
        barrier.turn++;
    } else {
        while (barrier.turn == turn) hand_over();
    }
}

inline u32 thread_x() { return block->thread; }
inline u32 block_x() { return block->x; }
inline u32 block_y() { return block->y; }
inline u32 block_z() { return block->z; }
inline u32 lane() { return block->thread % WAVE; }
inline u32 wave() { return block->thread / WAVE; }
inline void block_sync() { pass(block->all, block->n); }
inline void wave_sync() { pass(block->waves[wave()], WAVE); }
inline void let_next_start() {}
// What the launch before wrote may be read from here on.
inline void wait_for_inputs() { block->waited[block->thread] = true; }

// ---- clusters ----
inline void cluster_arrive() {
    Cluster& cluster = *block->cluster;
    block->cluster_turn[block->thread] = cluster.turn;
    if (++block->cluster_here.count < block->n) return;
    block->cluster_here.count = 0;
    if (++cluster.arrived == cluster.n) {
        cluster.arrived = 0;
        ++cluster.turn;
    }
}
inline void wait_until(const std::function<bool()>& is) {
    while (!is()) {
        if (block->thread == 0) sched_yield();
        hand_over();
    }
}
inline void cluster_wait() {
    const u32 turn = block->cluster_turn[block->thread];
    wait_until([=] { return block->cluster->turn != turn; });
}
// PTX, "mbarrier": a turn ends when one has arrived and as many bytes as were expected.
struct ClusterBarrier {
    std::mutex lock;
    bool is = false, arrived;
    long bytes;
    std::atomic<u32> turn;

    void count(bool arrives, long more) {
        const std::lock_guard<std::mutex> held(lock);
        CHECK(is);
        CHECK(!(arrives && arrived));
        arrived |= arrives;
        bytes += more;
        if (arrived && bytes == 0) {
            arrived = false;
            ++turn;
        }
    }
};
inline void cluster_init(ClusterBarrier* barrier) {
    barrier->is = true;
    barrier->arrived = false;
    barrier->bytes = 0;
    barrier->turn = 0;
}
inline void cluster_expect(ClusterBarrier* barrier, u32 bytes) { barrier->count(true, bytes); }
inline void cluster_wait_for(ClusterBarrier* barrier, u32 parity) {
    wait_until([=] { return barrier->turn % 2 != parity; });
}
template <class T>
inline T* place_in(T* at, u32 of) {
    return (T*)(block->cluster->base[of] + ((const u8*)at - &shared_base));
}
inline void store_in(float* to, u32 of, float v, ClusterBarrier* barrier) {
    *place_in(to, of) = v;
    place_in(barrier, of)->count(false, -(long)sizeof v);
}

// ---- numbers ----
template <class To, class From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float f32_of_bits(u32 bits) { return same_bits<float>(bits); }
inline u32 bits_of_f32(float v) { return same_bits<u32>(v); }
inline float f32_of_f16(u32 bits) { return (float)same_bits<_Float16>((u16)bits); }
inline float f32_of_bf16(u32 bits) { return f32_of_bits(bits << 16); }
inline u32 least(u32 a, u32 b) { return a < b ? a : b; }
inline float max_of(float a, float b) { return a > b ? a : b; }
inline float sqrt_of(float x) { return std::sqrt(x); }
inline float exp_of(float x) { return std::exp(x); }
inline float log_of(float x) { return std::log(x); }
inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline u32 __popc(u32 v) { return (u32)__builtin_popcount(v); }
inline u32 __ffs(i32 v) { return (u32)__builtin_ffs(v); }
inline u32 __byte_perm(u32 a, u32 b, u32 which) {
    const u64 bytes = (u64)b << 32 | a;
    u32 to = 0;
    for (u32 i = 0; i < 4; ++i) to |= (u32)(bytes >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return to;
}
inline u32 counter_add(u32* at, u32 by) {
    const u32 before = *at;
    *at += by;
    return before;
}

// ---- memory ----
struct alignas(8) U32x2 {
    u32 x, y;
};
struct alignas(16) U32x4 {
    u32 x, y, z, w;
};
struct alignas(16) F32x4 {
    float x, y, z, w;
};
template <class T>
inline T aligned(const void* at) {
    CHECK((u64)at % sizeof(T) == 0);
    return *(const T*)at;
}
inline U32x4 stream16(const void* at) { return aligned<U32x4>(at); }
inline U32x2 stream8(const void* at) { return aligned<U32x2>(at); }
inline void prefetch_line(const u8*) {}
inline F32x4 plus(const F32x4& a, const F32x4& b) { return F32x4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// ---- lanes ----
inline u32 shuffle_xor(u32 v, u32 mask) {
    block->slots[block->thread] = v;
    wave_sync();
    const u32 other = block->slots[block->thread ^ mask];
    wave_sync();
    return other;
}
inline float shuffle_xor(float v, u32 mask) { return f32_of_bits(shuffle_xor(bits_of_f32(v), mask)); }
inline float lanes_sum(float v, u32 width) {
    for (u32 m = width / 2; m > 0; m /= 2) v += shuffle_xor(v, m);
    return v;
}
inline float wave_sum(float v) { return lanes_sum(v, WAVE); }

// c += a [16][DEPTH] b [DEPTH][8], `of` gives an element of a lane's registers (PTX, "Matrix
// Fragments for mma.m16n8k8 .tf32" and "for mma.m16n8k16 .f16").
template <u32 DEPTH, class A, class B>
inline void multiply_fragments(F32x4& c, A a, B b) {
    wave_sync();
    const Fragment* of = block->fragments + wave() * WAVE;
    const u32 g = lane() / 4, q = lane() % 4;
    float* sums[4] = {&c.x, &c.y, &c.z, &c.w};
    for (u32 s = 0; s < 4; ++s) {
        const u32 row = g + s / 2 * 8, col = 2 * q + s % 2;
        double sum = *sums[s];
        for (u32 k = 0; k < DEPTH; ++k) sum += (double)a(of, row, k) * b(of, k, col);
        *sums[s] = (float)sum;
    }
    wave_sync();
}
inline void multiply(F32x4& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    block->fragments[block->thread] = Fragment{{a0, a1, a2, a3}, {b0, b1}};
    auto a = [](const Fragment* of, u32 row, u32 k) {
        return f32_of_f16(of[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2] >> k % 2 * 16);
    };
    auto b = [](const Fragment* of, u32 k, u32 col) { return f32_of_f16(of[col * 4 + k % 8 / 2].b[k / 8] >> k % 2 * 16); };
    multiply_fragments<16>(c, a, b);
}
inline void multiply_tf32(F32x4& c, const float (&v)[4], float b0, float b1) {
    Fragment& mine = block->fragments[block->thread];
    for (u32 i = 0; i < 4; ++i) mine.a[i] = bits_of_f32(v[i]);
    mine.b[0] = bits_of_f32(b0);
    mine.b[1] = bits_of_f32(b1);
    // The instruction ignores the lower bits.
    auto tf32 = [](u32 bits) { return f32_of_bits(bits & 0xffffe000u); };
    auto a = [=](const Fragment* of, u32 row, u32 k) { return tf32(of[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]); };
    auto b = [=](const Fragment* of, u32 k, u32 col) { return tf32(of[col * 4 + k % 4].b[k / 4]); };
    multiply_fragments<8>(c, a, b);
}

// ---- launches ----
inline void fiber() {
    block->body();
    block->done[block->thread] = true;
    hand_over();
}
inline void run_block(Block& here) {
    block = &here;
    here.all = here.cluster_here = Barrier{};
    for (Barrier& wave : here.waves) wave = Barrier{};
    for (u32 i = 0; i < here.n; ++i) {
        here.done[i] = here.waited[i] = false;
        getcontext(&here.fibers[i]);
        here.fibers[i].uc_stack.ss_sp = &here.stacks[(u64)i * STACK];
        here.fibers[i].uc_stack.ss_size = STACK;
        here.fibers[i].uc_link = nullptr;
        makecontext(&here.fibers[i], fiber, 0);
    }
    for (u32 left = here.n; left > 0;) {
        for (u32 i = 0; i < here.n; ++i) {
            if (here.done[i]) continue;
            here.thread = i;
            swapcontext(&here.scheduler, &here.fibers[i]);
            left -= here.done[i];
        }
    }
    // A launch ends behind the one before it.
    for (u32 i = 0; i < here.n; ++i) CHECK(here.waited[i]);
}
// `cluster` blocks that follow each other in x run at the same time.
inline void launch(u32 x, u32 y, u32 z, u32 threads, u32 cluster, const std::function<void()>& body) {
    CHECK(threads <= THREADS_MAX && cluster <= CLUSTER_MAX && x % cluster == 0);
    static std::vector<Block> blocks(CLUSTER_MAX);
    for (u32 i = 0; i < x * y * z; i += cluster) {
        Cluster together;
        together.n = cluster;
        std::atomic<u32> ready{0};
        auto run = [&](u32 of) {
            Block& here = blocks[of];
            here.x = (i + of) % x;
            here.y = (i + of) / x % y;
            here.z = (i + of) / x / y;
            here.n = threads;
            here.body = body;
            here.cluster = &together;
            together.base[of] = &shared_base;
            for (++ready; ready < cluster;) sched_yield();
            run_block(here);
        };
        if (cluster == 1) {
            run(0);
            continue;
        }
        std::vector<std::thread> all;
        for (u32 of = 0; of < cluster; ++of) all.emplace_back(run, of);
        for (std::thread& one : all) one.join();
    }
}
