// Rows of a matrix in the device's layout -> f16 (for the vendor's matrix library) or f32
// (embedding rows, by token id).
//
// dequantize_<type>: out[r][k] = f16(W[first_row + r][k]) for `rows` rows, rows side by side. A
// weight beyond f16 becomes infinite; sound models have none.
// dequantize_low_f32: what f16 leaves of the weights of the same rows (f16_pair.h). rows_<type>:
// out[i][k] = W[ids[i]][k] in f32, ids read from device memory; an id past the last row gives
// zeros. Geometry: THREADS threads, a thread 32 weights (floats: 32 or what is left). Moves the
// packed bytes and 2 (4) bytes a weight. Entries: as above, for WEIGHT.
#include "compat.h"
#include "formats.h"
#include "f16_pair.h"

#define THREADS 256

struct DequantizeArgs {
    const u8* weights;
    void* out;
    const u32* ids;  // or null
    u32 first_row;
    u32 rows;        // to write
    u32 total_rows;  // of the matrix
    u32 cols;
};

#ifdef FLOATS
FORCE float load_float(const u8* weights, u64 i) {
#if FLOATS == 0
    return ((const float*)weights)[i];
#elif FLOATS == 1
    return f32_of_f16(((const u16*)weights)[i]);
#else
    return f32_of_bf16(((const u16*)weights)[i]);
#endif
}
FORCE u32 two_f16(u32 two_bf16) { return pack_f16(f32_of_bits(two_bf16 << 16), f32_of_bits(two_bf16 & 0xffff0000u)); }
#endif

#ifdef FLOATS
enum Form { AS_F32, AS_F16, AS_LOW };

// Blocks of 32, the last one of a row may be shorter.
template <Form FORM>
FORCE void dequantize(const DequantizeArgs& a) {
    u32 nb = (a.cols + 31) / 32;
    u64 index = (u64)block_x() * THREADS + thread_x();
    if (index >= (u64)a.rows * nb) return;
    u32 r = (u32)(index / nb), c = (u32)(index % nb);
    u32 row = a.ids ? a.ids[r] : a.first_row + r;
    bool known = row < a.total_rows;
    row = known ? row : 0;
    u64 at = (u64)r * a.cols + (u64)c * 32;
    for (u32 k = 0; k < 32 && c * 32 + k < a.cols; ++k) {
        float v = known ? load_float(a.weights, (u64)row * a.cols + c * 32 + k) : 0.0f;
        if (FORM == AS_F32) ((float*)a.out)[at + k] = v;
        else ((u16*)a.out)[at + k] = f16_of_f32(FORM == AS_LOW ? low_part(v) : v);
    }
}

// Rows of a multiple of 8 are one run of numbers: 8 neighbours a lane, four times.
FORCE void to_f16(const DequantizeArgs& a) {
    if (a.cols % 8 != 0) return dequantize<AS_F16>(a);
    const u64 n = (u64)a.rows * a.cols, first = (u64)a.first_row * a.cols;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u64 at = (u64)block_x() * (THREADS * 32) + (i * THREADS + thread_x()) * 8;
        if (at >= n) return;
#if FLOATS == 0
        const U32x4 x = stream16(a.weights + (first + at) * 4), y = stream16(a.weights + (first + at + 4) * 4);
        const float v[8] = {f32_of_bits(x.x), f32_of_bits(x.y), f32_of_bits(x.z), f32_of_bits(x.w),
                            f32_of_bits(y.x), f32_of_bits(y.y), f32_of_bits(y.z), f32_of_bits(y.w)};
        *(U32x4*)((u16*)a.out + at) = U32x4{pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7])};
#else
        const U32x4 x = stream16(a.weights + (first + at) * 2);
#if FLOATS == 1
        *(U32x4*)((u16*)a.out + at) = x;
#else
        *(U32x4*)((u16*)a.out + at) = U32x4{two_f16(x.x), two_f16(x.y), two_f16(x.z), two_f16(x.w)};
#endif
#endif
    }
}
#else
// A block of 32 as f16 is 64 bytes: written as they are, 16 bytes a lane would be 64 apart. So a
// wave's blocks, which lie side by side in the output, pass through shared memory, and a wave
// writes WAVE * 16 bytes in a row.
FORCE void to_f16(const DequantizeArgs& a) {
    // 4 x 16 bytes a lane, and 16 to keep lanes off each other's banks.
    __shared__ U32x4 room[THREADS][5];
    const u32 nb = a.cols / 32;
    const u64 n = (u64)a.rows * nb, index = (u64)block_x() * THREADS + thread_x();
    if (index < n) {
        const u32 r = (u32)index / nb, c = (u32)index - r * nb;
        Codes codes;
        WEIGHT::unpack(WEIGHT::load(WEIGHT::row(a.weights, a.total_rows, nb, a.first_row + r), c, nb), c, codes);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            float v[8];
#pragma unroll
            for (u32 j = 0; j < 8; ++j) v[j] = weight_of<WEIGHT>(codes, 2 * i + j / 4, j % 4);
            room[thread_x()][i] = U32x4{pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7])};
        }
    }
    block_sync();
    const u32 first = thread_x() - lane();
    U32x4* to = (U32x4*)a.out + (index - lane()) * 4;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 k = i * WAVE + lane();
        if (index - lane() + k / 4 < n) to[k] = room[first + k / 4][k % 4];
    }
}

FORCE void to_f32(const DequantizeArgs& a) {
    const u32 nb = a.cols / 32;
    const u64 index = (u64)block_x() * THREADS + thread_x();
    if (index >= (u64)a.rows * nb) return;
    u32 r = (u32)(index / nb), c = (u32)(index % nb);
    u32 row = a.ids ? a.ids[r] : a.first_row + r;
    bool known = row < a.total_rows;
    row = known ? row : 0;
    Codes codes;
    WEIGHT::unpack(WEIGHT::load(WEIGHT::row(a.weights, a.total_rows, nb, row), c, nb), c, codes);
    float* out = (float*)a.out + index * 32;
    for (u32 w = 0; w < 8; ++w) {
        float v[4];
        for (u32 b = 0; b < 4; ++b) v[b] = known ? weight_of<WEIGHT>(codes, w, b) : 0.0f;
        *(F32x4*)(out + 4 * w) = F32x4{v[0], v[1], v[2], v[3]};
    }
}
#endif

#define NAME2(a, b) a##b
#define NAME(a, b) NAME2(a, b)
#ifdef FLOATS
#define TO_F16 to_f16
#define TO_F32 dequantize<AS_F32>
#else
#define TO_F16 to_f16
#define TO_F32 to_f32
#endif
ENTRY(THREADS, 6) NAME(dequantize_, TYPE)(DequantizeArgs a) { TO_F16(a); }
ENTRY(THREADS, 1) NAME(rows_, TYPE)(DequantizeArgs a) {
    let_next_start();
    wait_for_inputs();
    TO_F32(a);
}
#if defined(FLOATS) && FLOATS == 0
ENTRY(THREADS, 1) NAME(dequantize_low_, TYPE)(DequantizeArgs a) { dequantize<AS_LOW>(a); }
#endif
