// Products of matmat_floats.h on the host, of random shapes, against sums of f64. KERNELS is the
// text of matvec_float.hip, with the definitions of a unit and without compat.h and mma_f16.h.
// usage: floats SEED CASES
#include "emulator.h"
#include KERNELS

typedef std::vector<float> Floats;

static u32 state;
static u32 any(u32 n) {
    state = state * 1664525u + 1013904223u;
    return (state >> 10) % n;
}
static float number() { return (float)any(1 << 16) / 32768.0f - 1.0f; }
template <class T>
static T* aligned_to_16(std::vector<T>& of) {
    return (T*)(((u64)of.data() + 15) / 16 * 16);
}

struct Matrix {
    u32 rows;
    std::vector<u16> halves;
    Floats bias, out, before;
    bool has_bias;

    Matrix(u32 rows, u32 cols, u32 tokens)
        : rows(rows), halves((u64)rows * cols + 8), bias(rows), out((u64)tokens * rows + 64), has_bias(any(3) > 0) {
        u16* to = aligned_to_16(halves);
        for (u64 i = 0; i < (u64)rows * cols; ++i) to[i] = f16_of_f32(number() * 0.1f);
        for (float& v : bias) v = number();
        for (float& v : out) v = number();
        before = out;
    }
};

static void run_case(u32 i) {
    const u32 cols = 64 * (1 + any(i % 4 == 1 ? 40 : 9)), tokens = 1 + any(i % 3 == 0 ? 40 : 16), n = 1 + any(4), tiles = 1u << any(3);
    const bool add = any(2);
    // Rows of any size: large ones keep their bits, too.
    const float size = i % 5 == 4 ? 3e5f : 1.0f;
    Floats room((u64)tokens * cols + 4);
    float* x = aligned_to_16(room);
    for (u64 k = 0; k < (u64)tokens * cols; ++k) x[k] = number() * size;
    std::vector<Matrix> matrices;
    MatmatFloatsArgs a = {x, cols, tokens, add, n, 1.0f / 64.0f, 0, {}};
    u32 blocks = 0;
    for (u32 m = 0; m < n; ++m) matrices.emplace_back(1 + any(70), cols, tokens);
    for (u32 m = 0; m < n; ++m) {
        Matrix& of = matrices[m];
        a.matrices[m] = {(const u8*)aligned_to_16(of.halves), of.out.data(), of.has_bias ? of.bias.data() : nullptr, of.rows, 0};
        blocks += (of.rows + 8 * tiles - 1) / (8 * tiles);
    }
    launch(blocks, (tokens + 15) / 16, 1, THREADS, [=] {
        if (tiles == 1) matmat_floats_1_f16(a);
        if (tiles == 2) matmat_floats_2_f16(a);
        if (tiles == 4) matmat_floats_4_f16(a);
    });
    for (Matrix& of : matrices) {
        for (u32 t = 0; t < tokens; ++t) {
            for (u32 r = 0; r < of.rows; ++r) {
                const u64 at = (u64)t * of.rows + r;
                double sum = add ? of.before[at] : 0.0, all = std::fabs(sum) + 1.0;
                if (of.has_bias) sum += of.bias[r];
                for (u32 k = 0; k < cols; ++k) {
                    const double term = (double)f32_of_f16(aligned_to_16(of.halves)[(u64)r * cols + k]) * x[(u64)t * cols + k];
                    sum += term;
                    all += std::fabs(term);
                }
                // 22 bits of each element, and sums of f32.
                if (std::fabs(of.out[at] - sum) > all * 1e-6) std::printf("%u: %g for %g\n", i, of.out[at], sum);
                CHECK(std::fabs(of.out[at] - sum) <= all * 1e-6);
            }
        }
        for (u64 k = (u64)tokens * of.rows; k < of.out.size(); ++k) CHECK(of.out[k] == of.before[k]);
    }
}

int main(int, char** argv) {
    state = (u32)std::atoi(argv[1]);
    const u32 n = (u32)std::atoi(argv[2]) * 4;
    for (u32 i = 0; i < n; ++i) run_case(i);
    std::printf("%u cases\n", n);
}
