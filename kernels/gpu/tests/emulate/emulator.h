// Kernels of hip/ as a program for the host: what compat.h, mma_f16.h and the guarded parts of
// headers declare. A lane is a fiber, and blocks run one after the other. Barriers and shuffles
// hand over to the next fiber.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef signed char i8;
typedef unsigned long long u64;

#ifndef WAVE
#define WAVE 32
#endif
#define WAVES (THREADS / WAVE)
#define FORCE inline
#define __shared__ static
// g++ has the standard's own at the beginning of a declaration alone.
#define alignas(n) __attribute__((aligned(n)))
#define ENTRY(threads, min_blocks) inline void

#define CHECK(what)                                                   \
    do {                                                              \
        if (!(what)) {                                                \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #what);    \
            std::fflush(stdout);                                      \
            std::_Exit(1);                                            \
        }                                                             \
    } while (0)

constexpr u32 THREADS_MAX = 256, STACK = 64 << 10;

struct Barrier {
    u32 count = 0, turn = 0;
};

// The operands of a lane for a matrix instruction.
struct Fragment {
    u32 a[4], b[2];
};

struct Block {
    u32 thread, x, y, z, n;
    ucontext_t fibers[THREADS_MAX], scheduler;
    bool done[THREADS_MAX], waited[THREADS_MAX];
    Barrier all, waves[THREADS_MAX / 32];
    u32 slots[THREADS_MAX];
    Fragment fragments[THREADS_MAX];
    std::function<void()> body;
    std::vector<u8> stacks = std::vector<u8>(THREADS_MAX * STACK);
};
inline Block* block = nullptr;

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
inline void block_sync_shared() { block_sync(); }
inline void device_fence() {}
inline void let_next_start() {}
// What the launch before wrote may be read from here on.
inline void wait_for_inputs() { block->waited[block->thread] = true; }

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
inline u16 f16_of_f32(float v) { return same_bits<u16>((_Float16)v); }
inline u32 pack_f16(float low, float high) { return f16_of_f32(low) | (u32)f16_of_f32(high) << 16; }
inline float abs_of(float a) { return std::fabs(a); }
inline bool is_finite(float x) { return std::isfinite(x); }
inline float f32_of_bf16(u32 bits) { return f32_of_bits(bits << 16); }
inline u32 least(u32 a, u32 b) { return a < b ? a : b; }
inline float max_of(float a, float b) { return a > b ? a : b; }
inline float sqrt_of(float x) { return std::sqrt(x); }
inline float exp_of(float x) { return std::exp(x); }
inline float exp2_of(float x) { return std::exp2(x); }
inline float log_of(float x) { return std::log(x); }
inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline u32 made_anew(u32 n) { return n; }
inline void leave_vcc_hi() {}
#define NEG_INF f32_of_bits(0xff800000u)
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
struct alignas(8) F32x2 {
    float x, y;
};
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
inline float lanes_max(float v, u32 width) {
    for (u32 m = width / 2; m > 0; m /= 2) v = max_of(v, shuffle_xor(v, m));
    return v;
}
inline float wave_max(float v) { return lanes_max(v, WAVE); }
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
    here.all = Barrier{};
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
inline void launch(u32 x, u32 y, u32 z, u32 threads, const std::function<void()>& body) {
    CHECK(threads <= THREADS_MAX);
    static Block here;
    for (u32 i = 0; i < x * y * z; ++i) {
        here.x = i % x;
        here.y = i / x % y;
        here.z = i / x / y;
        here.n = threads;
        here.body = body;
        run_block(here);
    }
}
