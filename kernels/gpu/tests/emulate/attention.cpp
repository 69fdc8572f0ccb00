// attention_prefill.hip or attention_decode.hip on the host, of texts of random lengths whose rows
// attend both ways, against sums of f64. KERNELS is the text of one, with the definitions of a unit
// and without compat.h. Of attention_prefill.hip, the form without matrix instructions.
// usage: attention SEED CASES
#include "emulator.h"
#include KERNELS

#ifdef LAG
constexpr bool PREFILL = true;
// Rounds queries to f16.
constexpr double TOLERANCE = 2e-3;
#else
constexpr bool PREFILL = false;
constexpr double TOLERANCE = 1e-5;
#endif
#ifdef KV_F32
typedef float Element;
#else
typedef _Float16 Element;
#endif

static u32 state;
static u32 any(u32 n) {
    state = state * 1664525u + 1013904223u;
    return (state >> 10) % n;
}
static float number() { return (float)any(1 << 16) / 16384.0f - 2.0f; }

struct Case {
    u32 dim, n_head, n_head_kv, rows = 0;
    std::vector<u32> texts;
    std::vector<float> q;
    std::vector<double> keys, values;          // [rows][n_head_kv][dim]
    std::vector<std::vector<Element>> pages;   // [PAGE] positions of a text; NaN where there is none
    std::vector<u64> table;
    std::vector<u32> positions, sequences;
    std::vector<SequencePlace> places;
    u32 stride = 0;

    u64 at(u32 row, u32 head) const { return ((u64)row * n_head_kv + head) * dim; }
    // A layer of a page: keys of all heads, then values.
    void append(std::vector<Element>& page, u32 slot) {
        for (u32 h = 0; h < n_head_kv; ++h) {
            for (u32 i = 0; i < dim; ++i) {
                const Element k = number(), v = number();
                keys.push_back(k);
                values.push_back(v);
                page[(h * PAGE + slot) * dim + i] = k;
                page[((n_head_kv + h) * PAGE + slot) * dim + i] = v;
            }
        }
    }
    Case(u32 i) {
#ifdef ANY
        dim = 8 * (1 + any(10));
#else
        dim = DIM;
#endif
        n_head_kv = 1 + any(4);
        n_head = n_head_kv * (1 + any(3));
        // A launch of single rows takes as many blocks as there are rows, heads and parts.
        const u32 most = i % 2 ? 20 : PREFILL ? 90 : 40;
        for (u32 n = 1 + any(PREFILL ? 3 : 2); n > 0; --n) texts.push_back(1 + any(most));
        for (u32 n : texts) stride = n / PAGE + 1 > stride ? n / PAGE + 1 : stride;
        for (u32 s = 0; s < texts.size(); ++s) {
            places.push_back(SequencePlace{rows, texts[s], 0, 0, 0, 0, texts[s] - 1, 0});
            for (u32 p = 0; p < texts[s]; ++p, ++rows) {
                if (p % PAGE == 0) pages.push_back(std::vector<Element>((u64)2 * n_head_kv * PAGE * dim, (Element)NAN));
                append(pages.back(), p % PAGE);
                positions.push_back(p);
                sequences.push_back(s);
            }
        }
        table.resize((u64)stride * texts.size());
        u32 page = 0;
        for (u32 s = 0; s < texts.size(); ++s)
            for (u32 p = 0; p * PAGE < texts[s]; ++p) table[(u64)s * stride + p] = (u64)pages[page++].data();
        q.resize((u64)rows * n_head * dim);
        for (float& x : q) x = number();
    }
    float scale() const { return 1.0f / std::sqrt((float)dim); }
};

// As the authors of ALiBi write it down.
static double slope(u32 n, u32 head) {
    if ((n & (n - 1)) == 0) return std::pow(2.0, -8.0 / n * (head + 1));
    u32 near = 1;
    while (near * 2 < n) near *= 2;
    return head < near ? slope(near, head) : slope(2 * near, 2 * (head - near));
}

static std::vector<double> reference(const Case& c) {
    std::vector<double> out;
    for (u32 row = 0; row < c.rows; ++row) {
        const SequencePlace& text = c.places[c.sequences[row]];
        for (u32 h = 0; h < c.n_head; ++h) {
            const u32 head_kv = h / (c.n_head / c.n_head_kv);
            std::vector<double> weights;
            double sum = 0.0, most = -1e300;
            for (u32 p = 0; p < text.n_rows; ++p) {
                double score = 0.0;
                for (u32 i = 0; i < c.dim; ++i)
                    score += (double)c.q[((u64)row * c.n_head + h) * c.dim + i] * c.keys[c.at(text.first_row + p, head_kv) + i];
                score *= c.scale();
                if (FALLS) score -= slope(c.n_head, h) * std::abs((double)p - c.positions[row]);
                weights.push_back(score);
                most = std::fmax(most, score);
            }
            for (double& w : weights) sum += w = std::exp(w - most);
            for (u32 i = 0; i < c.dim; ++i) {
                double v = 0.0;
                for (u32 p = 0; p < text.n_rows; ++p) v += weights[p] * c.values[c.at(text.first_row + p, head_kv) + i];
                out.push_back(v / sum);
            }
        }
    }
    return out;
}

static KvPlace place(const Case& c) {
    KvPlace kv{};
    kv.table = c.table.data();
    kv.positions = c.positions.data();
    kv.sequences = c.sequences.data();
    kv.table_stride = c.stride;
    kv.n_head_kv = c.n_head_kv;
    kv.dim_k = kv.dim_v = c.dim;
    return kv;
}

#ifdef LAG
static std::vector<float> by_kernel(const Case& c) {
    std::vector<float> out(c.q.size(), NAN);
    std::vector<u32> tiles;
    u32 longest = 0;
    for (const SequencePlace& text : c.places) {
        tiles.push_back(text.first_row);
        tiles.push_back(text.n_rows);
        longest = text.n_rows > longest ? text.n_rows : longest;
    }
    AttentionPrefillArgs a{};
    a.q = c.q.data();
    a.out = out.data();
    a.tiles = tiles.data();
    a.kv = place(c);
    a.places = c.places.data();
    a.scale = c.scale();
    a.softcap = FALLS ? 8.0f : 0.0f;
    a.n_head = c.n_head;
    a.blocks = (longest * (c.n_head / c.n_head_kv) + M_BLOCK - 1) / M_BLOCK;
    a.ahead = 0x7fffffff;
    launch(c.n_head_kv * a.blocks, (u32)c.places.size(), 1, THREADS, [&] { UNIT(a); });
    return out;
}
#else
static std::vector<float> by_kernel(const Case& c) {
    std::vector<float> out(c.q.size(), NAN);
    const u32 heads = c.n_head / c.n_head_kv < GROUP ? c.n_head / c.n_head_kv : GROUP, n_split = 3;
    std::vector<float> partials((u64)c.rows * c.n_head * n_split * (c.dim + 2));
    std::vector<u32> counters((u64)c.rows * c.n_head / heads);
    AttentionDecodeArgs a{};
    a.q = c.q.data();
    a.out = out.data();
    a.partials = partials.data();
    a.counters = counters.data();
    a.kv = place(c);
    a.places = c.places.data();
    a.scale = c.scale();
    a.softcap = FALLS ? 8.0f : 0.0f;
    a.n_head = c.n_head;
    a.heads = heads;
    a.n_split = n_split;
    a.ahead = 0x7fffffff;
    launch(c.n_head / heads, n_split, c.rows, THREADS, [&] { UNIT(a); });
    for (u32 n : counters) CHECK(n == 0);
    return out;
}
#endif

int main(int n_args, char** args) {
    CHECK(n_args == 3);
    const u32 n = (u32)std::atoi(args[2]);
    double worst = 0.0;
    for (u32 i = 0; i < n; ++i) {
        state = (u32)std::atoi(args[1]) * 7919 + i;
        const Case c(i);
        const std::vector<double> right = reference(c);
        const std::vector<float> made = by_kernel(c);
        double most = 0.0;
        for (u64 j = 0; j < right.size(); ++j) {
            const double d = std::abs(made[j] - right[j]);
            // NaN is no smaller.
            most = d < most ? most : d;
        }
        if (!(most < TOLERANCE)) {
            std::printf("case %u: %u rows, heads %u / %u of %u: off by %g\n", i, c.rows, c.n_head, c.n_head_kv, c.dim, most);
            return 1;
        }
        worst = std::fmax(worst, most);
    }
    std::printf("%u cases: off by at most %g\n", n, worst);
    return 0;
}
