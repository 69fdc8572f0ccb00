// One page of compatibility: what clang for AMDGPU (with or without ROCm), hiprtc and
// nvrtc/nvcc call by different names.
//
// Everything above this header is written against these names only. No header of any toolkit
// is needed. WAVE is the number of lanes that run together: 64 on gfx9, 32 elsewhere; nothing
// else in the sources knows it.
//
// Invariant: every lane of a wave reaches every shuffle and every wave_* reduction.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define RF_CUDA 1
#else
#define RF_AMD 1
#endif

#ifdef RF_AMD
#ifndef __HIPCC_RTC__
#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
#endif
#ifdef __GFX9__
#define WAVE 64
#else
#define WAVE 32
#endif
// Before gfx906, on the APUs of gfx9 and on the first of gfx10 there is no product of four bytes.
#if defined(__gfx900__) || defined(__gfx902__) || defined(__gfx904__) || defined(__gfx909__) || defined(__gfx90c__) || \
    defined(__gfx9_generic__) || defined(__gfx1010__) || defined(__gfx1013__) || defined(__gfx10_1_generic__)
#define RF_NO_DOT4 1
#endif
// Matrix instructions of 16 x 16 x 16 f16: WMMA or MFMA.
#if defined(__GFX11__) || (defined(__GFX12__) && !defined(__gfx1250__)) || defined(__gfx908__) || defined(__gfx90a__) || \
    defined(__gfx942__) || defined(__gfx950__) || defined(__gfx9_4_generic__)
#define RF_WMMA 1
#endif
#define FORCE __device__ inline __attribute__((always_inline))
#else
#define WAVE 32
#define FORCE __device__ __forceinline__
#endif

// An entry: C name, exactly `threads` threads a block; `min_blocks` blocks a multiprocessor are
// hoped for. AMD is told by its own attribute: from launch_bounds alone the compiler takes 1024
// threads, keeps to 128 registers and spills the rest.
#ifdef RF_CUDA
#define ENTRY(threads, min_blocks) extern "C" __global__ void __launch_bounds__(threads, min_blocks)
#elif defined(__GFX11__) || defined(__GFX12__)
// 104 are s0 to s101 and VCC: AMD's simulator takes s102 and s103 for something else. Only kernels
// that spill scalar registers to lanes anyhow are other code for it.
#define ENTRY(threads, min_blocks) \
    extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(threads, threads), amdgpu_num_sgpr(104)))
#else
#define ENTRY(threads, min_blocks) \
    extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#endif

// No value stays in VCC_HI over this. In waves of 32 lanes it is a scalar register like others, but
// AMD's simulator clears it at compares; in some loops a row's length was there.
FORCE void leave_vcc_hi() {
#if defined(__GFX11__) || defined(__GFX12__)
    asm volatile("" ::: "vcc_hi");
#endif
}

// ---- places in the launch ----
#ifdef RF_CUDA
FORCE u32 thread_x() { return threadIdx.x; }
FORCE u32 block_x() { return blockIdx.x; }
FORCE u32 block_y() { return blockIdx.y; }
FORCE u32 block_z() { return blockIdx.z; }
FORCE void block_sync() { __syncthreads(); }
FORCE void block_sync_shared() { __syncthreads(); }
FORCE void device_fence() { __threadfence(); }
#else
FORCE u32 thread_x() { return __builtin_amdgcn_workitem_id_x(); }
FORCE u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
FORCE u32 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
FORCE u32 block_z() { return __builtin_amdgcn_workgroup_id_z(); }
FORCE void block_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// The same for shared memory alone. From gfx10 on a block's waves may sit on two compute units, so
// block_sync waits for all loads from device memory, those ahead of their use too; this one leaves
// them under way. Compilers before LLVM 20 may not know the address space of a fence.
FORCE void block_sync_shared() {
#if __clang_major__ >= 20
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
#else
    block_sync();
#endif
}
FORCE void device_fence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
#endif
// The same number, of which the compiler does not know that it is the same in each turn of a loop:
// what is made of it is not kept in registers from turn to turn.
FORCE u32 made_anew(u32 n) {
#ifdef RF_CUDA
    asm volatile("" : "+r"(n));
#else
    asm volatile("" : "+v"(n));
#endif
    return n;
}
FORCE u32 lane() { return thread_x() % WAVE; }
#ifdef RF_CUDA
FORCE u32 wave() { return thread_x() / WAVE; }
#else
// The same for all lanes, which the compiler cannot know: so what follows from it is computed once
// a wave, and branches are not divergent.
FORCE u32 wave() { return __builtin_amdgcn_readfirstlane(thread_x() / WAVE); }
#endif

// A counter shared by the blocks of a launch; returns the value before.
FORCE u32 counter_add(u32* at, u32 by) {
#ifdef RF_CUDA
    return atomicAdd(at, by);
#else
    return __hip_atomic_fetch_add(at, by, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
#endif
}

// Programmatic dependent launch (NVIDIA): with that attribute a launch may begin while the one
// before still runs. Every kernel lets the next one begin at once, and waits here until the launch
// before has ended and all that it wrote can be seen; without the attribute, and on AMD, this
// passes at once. Before it, only that may be read which no launch of the chain writes: weights,
// tables of pages and positions, keys and values of earlier passes. Nothing may be written.
FORCE void wait_for_inputs() {
#if defined(RF_CUDA) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
FORCE void let_next_start() {
#if defined(RF_CUDA) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- bits, f16, bf16 ----
FORCE float f32_of_bits(u32 bits) {
    union { u32 u; float f; } v;
    v.u = bits;
    return v.f;
}
FORCE u32 bits_of_f32(float f) {
    union { u32 u; float f; } v;
    v.f = f;
    return v.u;
}
#ifdef RF_CUDA
FORCE float f32_of_f16(u32 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}
FORCE u16 f16_of_f32(float f) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
    return bits;
}
#else
FORCE float f32_of_f16(u32 bits) {
    union { u16 u; _Float16 h; } v;
    v.u = (u16)bits;
    return (float)v.h;
}
FORCE u16 f16_of_f32(float f) {
    union { u16 u; _Float16 h; } v;
    v.h = (_Float16)f;
    return v.u;
}
#endif
FORCE float f32_of_bf16(u32 bits) { return f32_of_bits(bits << 16); }
FORCE u32 pack_f16(float low, float high) {
#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return (u32)f16_of_f32(low) | ((u32)f16_of_f32(high) << 16);
#endif
}

// ---- memory ----
// Device memory at an address that was read from memory. AMD's compiler has to be told that it is
// no shared memory, which takes other loads.
FORCE const u8* device_memory(u64 address) {
#ifdef RF_CUDA
    return (const u8*)address;
#else
    return (const u8*)(const __attribute__((address_space(1))) u8*)address;
#endif
}
struct alignas(8) U32x2 {
    u32 x, y;
};
struct alignas(16) U32x4 {
    u32 x, y, z, w;
};
struct alignas(8) F32x2 {
    float x, y;
};
struct alignas(16) F32x4 {
    float x, y, z, w;
};

// Loads of what is read once and by nobody else: weights. They leave the first-level
// cache alone, unless a source says that the neighbours of what it reads will be read
// soon by others (WEIGHTS_SHARED).
#ifdef WEIGHTS_SHARED
#define STREAM_HINT "ld.global.nc.L2::128B"
#else
#define STREAM_HINT "ld.global.nc.L1::no_allocate.L2::128B"
#endif
#ifdef RF_CUDA
FORCE U32x4 stream16(const void* at) {
    U32x4 v;
    asm volatile(STREAM_HINT ".v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
FORCE U32x2 stream8(const void* at) {
    U32x2 v;
    asm volatile(STREAM_HINT ".v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
FORCE u32 stream4(const void* at) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
FORCE u32 stream2(const void* at) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}
FORCE u32 stream1(const void* at) {
    u32 v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}
// 8 and 16 bytes of constants that neighbours read too (block headers).
FORCE U32x2 shared8(const void* at) {
    U32x2 v;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
FORCE U32x4 shared16(const void* at) {
    U32x4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
#else
typedef u32 rf_u32x4 __attribute__((ext_vector_type(4)));
typedef u32 rf_u32x2 __attribute__((ext_vector_type(2)));
#ifdef WEIGHTS_SHARED
#define STREAM_LOAD(at) (*(at))
#else
#define STREAM_LOAD(at) __builtin_nontemporal_load(at)
#endif
FORCE U32x4 stream16(const void* at) {
    rf_u32x4 v = STREAM_LOAD((const rf_u32x4*)at);
    return U32x4{v.x, v.y, v.z, v.w};
}
FORCE U32x2 stream8(const void* at) {
    rf_u32x2 v = STREAM_LOAD((const rf_u32x2*)at);
    return U32x2{v.x, v.y};
}
FORCE u32 stream4(const void* at) { return *(const u32*)at; }
FORCE u32 stream2(const void* at) { return *(const u16*)at; }
FORCE u32 stream1(const void* at) { return *(const u8*)at; }
FORCE U32x2 shared8(const void* at) { return *(const U32x2*)at; }
FORCE U32x4 shared16(const void* at) { return *(const U32x4*)at; }
#endif

// ---- arithmetic ----
// acc + the sum of the products of four signed bytes.
FORCE i32 dot4(u32 a, u32 b, i32 acc) {
#ifdef RF_CUDA
    return __dp4a((int)a, (int)b, acc);
#elif defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_sudot4(true, (int)a, true, (int)b, acc, false);
#elif defined(RF_NO_DOT4)
    for (int i = 0; i < 32; i += 8) acc += (i32)(i8)(a >> i) * (i32)(i8)(b >> i);
    return acc;
#else
    return __builtin_amdgcn_sdot4((int)a, (int)b, acc, false);
#endif
}
// Byte i of the result is byte sel[i] (0 to 7) of the table low:high.
FORCE u32 pick_bytes(u32 low, u32 high, u32 sel) {
#ifdef RF_CUDA
    u32 s = sel | (sel >> 4);
    return __byte_perm(low, high, __byte_perm(s, 0, 0x4420));
#else
    return __builtin_amdgcn_perm(high, low, sel);
#endif
}
// Bytes 0 of a, b, c and d, in this order.
FORCE u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
#ifdef RF_CUDA
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
#else
    return __builtin_amdgcn_perm(__builtin_amdgcn_perm(d, c, 0x0c0c0400u), __builtin_amdgcn_perm(b, a, 0x0c0c0400u), 0x05040100u);
#endif
}
FORCE float multiply_add(float a, float b, float c) {
#ifdef RF_CUDA
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}
FORCE float exp2_of(float x) {
#ifdef RF_CUDA
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return __builtin_amdgcn_exp2f(x);
#endif
}
FORCE float exp_of(float x) { return exp2_of(x * 1.44269504088896341f); }
FORCE float log2_of(float x) {
#ifdef RF_CUDA
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return __builtin_amdgcn_logf(x);
#endif
}
FORCE float log_of(float x) { return log2_of(x) * 0.69314718055994531f; }
FORCE float floor_of(float x) {
#ifdef RF_CUDA
    return floorf(x);
#else
    return __builtin_floorf(x);
#endif
}
FORCE float sqrt_of(float x) {
#ifdef RF_CUDA
    return sqrtf(x);
#else
    return __builtin_sqrtf(x);
#endif
}
FORCE float max_of(float a, float b) { return a > b ? a : b; }
FORCE float abs_of(float a) { return f32_of_bits(bits_of_f32(a) & 0x7fffffffu); }
FORCE u32 least(u32 a, u32 b) { return a < b ? a : b; }
FORCE bool is_finite(float x) { return (bits_of_f32(x) & 0x7f800000u) != 0x7f800000u; }
#define NEG_INF f32_of_bits(0xff800000u)
#define QUIET_NAN f32_of_bits(0x7fc00000u)
FORCE float silu(float x) { return x / (1.0f + exp_of(-x)); }

// ---- lanes ----
// What the lanes of a wave have read, they have read before any of them writes.
FORCE void wave_sync() {
#ifdef RF_CUDA
    __syncwarp();
#else
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
#endif
}
FORCE u32 shuffle_xor(u32 v, u32 mask) {
#ifdef RF_CUDA
    return __shfl_xor_sync(0xffffffffu, v, (int)mask);
#else
    return (u32)__builtin_amdgcn_ds_bpermute((int)((lane() ^ mask) << 2), (int)v);
#endif
}
FORCE float shuffle_xor(float v, u32 mask) { return f32_of_bits(shuffle_xor(bits_of_f32(v), mask)); }
FORCE i32 shuffle_xor(i32 v, u32 mask) { return (i32)shuffle_xor((u32)v, mask); }

// Over groups of `width` neighbouring lanes, a power of two up to WAVE; every lane gets the result.
FORCE float lanes_sum(float v, u32 width) {
    for (u32 m = width / 2; m > 0; m /= 2) v += shuffle_xor(v, m);
    return v;
}
FORCE i32 lanes_sum(i32 v, u32 width) {
    for (u32 m = width / 2; m > 0; m /= 2) v += shuffle_xor(v, m);
    return v;
}
FORCE float lanes_max(float v, u32 width) {
    for (u32 m = width / 2; m > 0; m /= 2) v = max_of(v, shuffle_xor(v, m));
    return v;
}
FORCE float wave_sum(float v) { return lanes_sum(v, WAVE); }
FORCE float wave_max(float v) { return lanes_max(v, WAVE); }

// The sum over a block of `threads` (a multiple of WAVE, at most 1024); every thread gets it.
// `room`: 1024 / WAVE + 1 floats of shared memory, free again after the next block_sync.
FORCE float block_sum(float v, u32 threads, float* room) {
    v = wave_sum(v);
    if (lane() == 0) room[wave()] = v;
    block_sync();
    float sum = 0.0f;
    for (u32 i = 0; i < threads / WAVE; ++i) sum += room[i];
    return sum;
}
