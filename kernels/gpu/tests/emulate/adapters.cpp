// adapters.hip on the host, of random shapes, against sums of f64. KERNELS is its text, with the
// definitions of a unit and without compat.h and mma_f16.h.
// usage: adapters SEED CASES
#include "emulator.h"
#include KERNELS

typedef WEIGHT W;
typedef std::vector<float> Floats1;
#ifdef RF_CUDA
constexpr bool CUDA = true, MMA = W::BYTES == 2;
#else
constexpr bool CUDA = false, MMA = false;
#endif
enum Form { FLOATS, NORMED, HALVES, COLUMNS };

static u32 state;
static u32 any(u32 n) {
    state = state * 1664525u + 1013904223u;
    return (state >> 10) % n;
}
static float number() { return (float)any(1 << 16) / 32768.0f - 1.0f; }
template <class T, u32 N>
static T one(const T (&of)[N]) {
    return of[any(N)];
}

struct Matrix {
    u32 rows, cols;
    std::vector<u8> bytes;
    Floats1 values;

    Matrix(u32 rows, u32 cols) : rows(rows), cols(cols), bytes((u64)rows * cols * W::BYTES + 32), values((u64)rows * cols) {
        for (u64 i = 0; i < values.size(); ++i) {
            const float v = number() * 0.1f;
            const _Float16 half = v;
            values[i] = W::BYTES == 4 ? v : (float)half;
            std::memcpy(&bytes[i * W::BYTES], W::BYTES == 4 ? (const void*)&v : (const void*)&half, W::BYTES);
        }
    }
};

// A case: rows of x, scales of them, products of matrices.
struct Case {
    Form form;
    bool gated;
    u32 tokens, cols, width, n_parts, without;
    bool early;
    Floats1 x, norm, scales;
    std::vector<_Float16> halves;
    std::vector<Matrix> firsts, seconds;
    std::vector<u32> low;
    std::vector<Floats1> out;
    float factor = 1.0f, eps = 1e-5f;

    const float* row(u32 t) const { return &x[(u64)t * cols]; }
    bool has_scale(u32 t) const {
        for (u32 w = 0; w < width; ++w)
            if (scales[t * width + w] != 0.0f) return true;
        return false;
    }
    const u8* rows() const { return form >= HALVES ? (const u8*)halves.data() : (const u8*)x.data(); }
};

// Ranges of ranks as adapters have them, at any place: tiles of ranks are cut anywhere.
static void fill_scales(Case& c) {
    c.scales.assign((u64)c.tokens * c.width, 0.0f);
    const u32 ranks[] = {1, 2, 7, 8, 16, 17, 64, 128, c.width};
    for (u32 t = 0; t < c.tokens; ++t) {
        const u32 n = t % 4 == 3 ? 0 : any(4);
        for (u32 i = 0; i < n; ++i) {
            const u32 first = any(2) ? any(c.width) : any(c.width / 16) * 16, n_ranks = one(ranks);
            const float scale = number();
            for (u32 w = first; w < c.width && w < first + n_ranks; ++w) c.scales[t * c.width + w] = scale;
        }
    }
}

// Of f16 in both orders, as activations.hip stores them.
static void fill_halves(Case& c) {
    const u64 tokens = (c.tokens + 7) / 8 * 8;
    c.halves.assign(tokens * c.cols + 64, (_Float16)NAN);
    for (u32 t = 0; t < c.tokens; ++t) {
        for (u32 k = 0; k < c.cols; ++k) {
            const _Float16 half = c.x[(u64)t * c.cols + k];
            c.x[(u64)t * c.cols + k] = (float)half;
            // Of 128 columns, product 4 q + j has columns 8 q + 4 (j / 2) + j % 2 and the one two
            // behind of four blocks of 32.
            const u32 in = k % 32, product = in / 8 * 4 + in % 8 / 4 * 2 + in % 2;
            const u64 place = ((k / 128 * 16 + product) * tokens + t) * 8 + k % 128 / 32 * 2 + in % 4 / 2;
            c.halves[c.form == COLUMNS ? place : (u64)t * c.cols + k] = half;
        }
    }
}

static Case random_case(u32 i) {
    Case c;
    c.gated = any(5) == 0;
    c.form = c.gated ? (Form)any(2) : (Form)any(CUDA ? 4 : 3);
    c.width = 32 * (1 + any(any(4) == 0 ? 32 : 5));
    c.tokens = c.gated ? 1 : c.form == COLUMNS ? 17 + any(48) : one({1u, 1u, 2u, 3u, 8u, 16u, 17u + any(24)});
    c.cols = c.form == COLUMNS ? 256 * (1 + any(8)) : c.form == HALVES || any(4) ? 8 * (1 + any(300)) : 1 + any(300);
    // Some of more columns than a block has under way at once.
    if (i % 16 == 5 && c.tokens <= 8) c.cols = 8 * (1100 + any(500));
    // Some of one row with more ranks than a block reads of B at once, several times over.
    const bool wide = i % 8 == 3;
    if (wide) {
        c.form = (Form)any(2);
        c.tokens = 1;
        c.width = 32 * (10 + any(23));
        c.cols = 8 * (1 + any(100));
    }
    c.early = any(2);
    const u32 slice = MMA && c.form == COLUMNS ? 1024 : 4096, slices = (c.cols + slice - 1) / slice;
    c.n_parts = c.form == NORMED ? 1 : 1 + any(least(slices, 4));
    c.factor = c.form >= HALVES ? 64.0f : 1.0f;
    c.x.resize((u64)c.tokens * c.cols);
    for (float& v : c.x) v = number();
    if (c.form == NORMED) {
        c.norm.resize(c.cols);
        for (float& v : c.norm) v = number();
    }
    fill_scales(c);
    for (u32 w = 0; wide && w < c.width; ++w) c.scales[w] = number();
    const u32 n = c.gated ? 2 : 1 + any(4), n_firsts = c.gated ? 2 : 1 + any(n), rows = 1 + any(700);
    for (u32 m = 0; m < n_firsts; ++m) c.firsts.emplace_back(c.width, c.cols);
    for (u32 m = 0; m < n; ++m) {
        c.seconds.emplace_back(c.gated ? rows : 1 + any(any(8) ? 300 : 3000), c.width);
        c.low.push_back(m * n_firsts / n);
        c.out.emplace_back((u64)c.tokens * c.seconds[m].rows);
        for (float& v : c.out[m]) v = number();
    }
    // Of a gated unit one of the two may be without.
    c.without = c.gated ? any(4) : n;
    // Nobody reads rows without a scale.
    for (u32 t = 0; t < c.tokens; ++t)
        if (!c.has_scale(t)) c.x[(u64)t * c.cols + any(c.cols)] = INFINITY;
    if (c.form >= HALVES) fill_halves(c);
    return c;
}

static std::vector<Floats1> reference(const Case& c) {
    std::vector<double> low((u64)c.firsts.size() * c.tokens * c.width);
    for (u32 m = 0; m < c.firsts.size(); ++m) {
        for (u32 t = 0; t < c.tokens; ++t) {
            double squares = 0.0;
            for (u32 k = 0; k < c.cols; ++k) squares += (double)c.row(t)[k] * c.row(t)[k];
            const double factor = c.form == NORMED ? c.factor / std::sqrt(squares / c.cols + c.eps) : c.factor;
            for (u32 w = 0; w < c.width; ++w) {
                const float scale = c.scales[t * c.width + w];
                if (scale == 0.0f) continue;
                double sum = 0.0;
                for (u32 k = 0; k < c.cols; ++k)
                    sum += (double)c.firsts[m].values[(u64)w * c.cols + k] * c.row(t)[k] * (c.form == NORMED ? c.norm[k] : 1.0f);
                low[((u64)m * c.tokens + t) * c.width + w] = sum * scale * factor;
            }
        }
    }
    std::vector<Floats1> out = c.out;
    for (u32 m = 0; m < out.size(); ++m) {
        const Matrix& second = c.seconds[m];
        for (u32 t = 0; m != c.without && t < c.tokens; ++t) {
            for (u32 r = 0; c.has_scale(t) && r < second.rows; ++r) {
                double sum = out[m][(u64)t * second.rows + r];
                for (u32 w = 0; w < c.width; ++w)
                    sum += (double)second.values[(u64)r * c.width + w] * low[((u64)c.low[m] * c.tokens + t) * c.width + w];
                out[m][(u64)t * second.rows + r] = (float)sum;
            }
        }
    }
    if (c.gated) {
        for (u32 r = 0; r < out[0].size(); ++r) out[0][r] = silu(out[0][r]) * out[1][r];
        out[1] = c.out[1];
    }
    return out;
}

static std::vector<Floats1> by_kernels(const Case& c) {
    std::vector<Floats1> out = c.out;
    // What nobody wrote is NaN.
    Floats1 low(4 * c.firsts.size() * c.tokens * c.width + 4, NAN);
    AdaptersDownArgs down = {};
    down.x = c.rows();
    down.norm = c.form == NORMED ? c.norm.data() : nullptr;
    down.scales = c.scales.data();
    down.low = low.data();
    down.eps = c.eps;
    down.factor = c.factor;
    down.cols = c.cols;
    down.width = c.width;
    down.n_tokens = c.tokens;
    down.n_matrices = c.firsts.size();
    down.n_parts = c.n_parts;
    down.early = c.early;
    AdaptersUpArgs up = {};
    up.scales = c.scales.data();
    up.low = low.data();
    up.width = c.width;
    up.n_tokens = c.tokens;
    up.n_matrices = out.size();
    up.n_low = c.firsts.size();
    up.n_parts = c.n_parts;
    up.early = c.early;
    up.act.kind = ACT_SILU;
    u32 blocks = 0;
    for (u32 m = 0; m < c.firsts.size(); ++m) down.weights[m] = c.firsts[m].bytes.data();
    for (u32 m = 0; m < out.size(); ++m) {
        const Matrix& second = c.seconds[m];
        up.matrices[m] = {m == c.without ? nullptr : second.bytes.data(), out[m].data(), second.rows, c.low[m]};
        if (m == 0 || !c.gated) blocks += (second.rows + UP_THREADS - 1) / UP_THREADS;
    }
    const u32 ranks = MMA && c.form == COLUMNS ? TILE : RANKS;
    launch(c.firsts.size() * c.width / ranks, (c.tokens + TOKENS - 1) / TOKENS, c.n_parts, THREADS, [&] {
#ifdef RF_CUDA
        if (c.form == COLUMNS) NAME(adapters_down_columns_, TYPE)(down);
#endif
        if (c.form == HALVES) NAME(adapters_down_half_, TYPE)(down);
        if (c.form < HALVES) NAME(adapters_down_, TYPE)(down);
    });
    const bool many = c.tokens > 16;
    launch(blocks, many ? (c.tokens + TOKENS - 1) / TOKENS : c.tokens, 1, UP_THREADS, [&] {
        if (c.gated) NAME(adapters_up_gated_, TYPE)(up);
        if (!c.gated && many) NAME(adapters_up_32_, TYPE)(up);
        if (!c.gated && !many) NAME(adapters_up_1_, TYPE)(up);
    });
    return out;
}

// The norm of the difference over that of what is right.
static double difference(const std::vector<Floats1>& made, const std::vector<Floats1>& right) {
    double difference = 0.0, size = 1e-30;
    for (u32 m = 0; m < right.size(); ++m) {
        for (u64 i = 0; i < right[m].size(); ++i) {
            const double d = (double)made[m][i] - right[m][i];
            difference += d * d;
            size += (double)right[m][i] * right[m][i];
        }
    }
    return std::sqrt(difference / size);
}

int main(int n_args, char** args) {
    CHECK(n_args == 3);
    const u32 n = (u32)std::atoi(args[2]);
    double worst = 0.0;
    bool wrong = false;
    for (u32 i = 0; i < n; ++i) {
        state = (u32)std::atoi(args[1]) * 7919 + i;
        const Case c = random_case(i);
        const std::vector<Floats1> right = reference(c);
        const double d = difference(by_kernels(c), right);
        // NaN is no smaller.
        if (d < 1e-5) {
            worst = std::fmax(worst, d);
            continue;
        }
        wrong = true;
        std::printf("case %u: form %d, gated %d, %u tokens, %u columns, %u ranks, %zu products, %u parts: off by %g\n", i, c.form,
                    c.gated, c.tokens, c.cols, c.width, right.size(), c.n_parts, d);
    }
    std::printf("%u cases: off by at most %g\n", n, worst);
    return wrong ? 1 : 0;
}
