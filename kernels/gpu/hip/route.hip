// Chooses each row's experts (Shazeer et al. 2017; groups and selection biases as in arXiv
// 2412.19437).
//
// logits [rows][n_expert] become probabilities; experts are chosen by probability plus bias
// [n_expert], the lowest index first among equals, within the n_group_used groups of
// consecutive experts whose two largest selection values have the largest sums. ids
// [rows][n_used] are whole numbers in f32, always below n_expert and never twice the same,
// whatever the logits are; weights [rows][n_used].
// Geometry: grid (rows / WAVES rounded up), THREADS threads; a wave a row, up to EXPERTS_MAX
// experts. Bound by latency: n_used rounds of a maximum over the wave. Rows past the last are
// computed as the last one is, and not stored. Entry: route.
#include "compat.h"
#include "act.h"

#define THREADS 128
#define WAVES (THREADS / WAVE)
#define EXPERTS_MAX 512u
#define GROUPS_MAX 64u
#define SMALLEST 1.17549435e-38f  // that weights are divided by: the least normal number
#define EACH (EXPERTS_MAX / WAVE)

#define GATE_SOFTMAX 0u
#define GATE_SIGMOID 1u
#define GATE_SOFTMAX_OF_CHOSEN 2u
#define GATE_SQRT_SOFTPLUS 3u

struct RouteArgs {
    const float* logits;
    const float* bias;  // or null
    float* ids;
    float* weights;
    u32 rows;
    u32 n_expert, n_used;
    u32 gate;  // GATE_*
    u32 n_group, n_group_used;
    u32 renormalize;
    float scale;
};

// The largest value of a wave's lanes and its index, the lowest among equals; index ~0 stands for
// none. NaN counts as the smallest.
struct Best {
    float value;
    u32 index;

    FORCE void take(float v, u32 i) {
        v = v == v ? v : NEG_INF;
        if (i != ~0u && (index == ~0u || v > value || (v == value && i < index))) {
            value = v;
            index = i;
        }
    }
    FORCE void join() {
#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
        // As whole numbers in the order of the values; none is the least.
        const u32 bits = bits_of_f32(value + 0.0f), ordered = bits ^ (bits >> 31 ? ~0u : 0x80000000u);
        const u32 key = index == ~0u ? 0 : ordered;
        const u32 most = __reduce_max_sync(~0u, key);
        index = __reduce_min_sync(~0u, key == most ? index : ~0u);
        const u32 back = most ^ (most >> 31 ? 0x80000000u : ~0u);
        value = f32_of_bits(back);
#else
#pragma unroll
        for (u32 m = WAVE / 2; m > 0; m /= 2) {
            const float v = shuffle_xor(value, m);
            const u32 i = shuffle_xor(index, m);
            take(v, i);
        }
#endif
    }
};

ENTRY(THREADS, 1) route(RouteArgs a) {
    __shared__ float selection[WAVES][EXPERTS_MAX];
    __shared__ float probability[WAVES][EXPERTS_MAX];
    __shared__ float group_sum[WAVES][GROUPS_MAX];
    __shared__ u32 group_kept[WAVES][GROUPS_MAX];
    let_next_start();
    wait_for_inputs();
    const u32 w = wave(), item = block_x() * WAVES + w, row = least(item, a.rows - 1);
    const float* logits = a.logits + (u64)row * a.n_expert;
    float x[EACH];
    float largest = NEG_INF;
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) {
        const u32 e = lane() + j * WAVE;
        x[j] = e < a.n_expert ? logits[e] : NEG_INF;
        largest = max_of(largest, x[j]);
    }
    float sum = 0.0f;
    if (a.gate == GATE_SOFTMAX) {
        largest = wave_max(largest);
#pragma unroll
        for (u32 j = 0; j < EACH; ++j) {
            x[j] = exp_of(x[j] - largest);
            sum += lane() + j * WAVE < a.n_expert ? x[j] : 0.0f;
        }
        sum = 1.0f / wave_sum(sum);
    }
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) {
        const u32 e = lane() + j * WAVE;
        if (a.gate == GATE_SOFTMAX) x[j] *= sum;
        if (a.gate == GATE_SIGMOID) x[j] = sigmoid_of(x[j]);
        if (a.gate == GATE_SQRT_SOFTPLUS) x[j] = sqrt_of(softplus_of(x[j]));
        if (e < a.n_expert) {
            probability[w][e] = x[j];
            selection[w][e] = a.bias ? x[j] + a.bias[e] : x[j];
        }
    }
    block_sync();
    // Bit j: expert lane + WAVE j can be chosen.
    u32 open = 0;
    const u32 group_size = a.n_expert / a.n_group;
    if (a.n_group_used < a.n_group) {
        for (u32 g = 0; g < a.n_group; ++g) {
            Best first = Best{NEG_INF, ~0u}, second = first;
            for (u32 i = lane(); i < group_size; i += WAVE) first.take(selection[w][g * group_size + i], i);
            first.join();
            for (u32 i = lane(); i < group_size; i += WAVE) {
                if (i != first.index) second.take(selection[w][g * group_size + i], i);
            }
            second.join();
            if (lane() == 0) {
                group_sum[w][g] = second.index == ~0u ? first.value : first.value + second.value;
                group_kept[w][g] = 0;
            }
        }
        block_sync();
        for (u32 n = 0; n < a.n_group_used; ++n) {
            Best best = Best{NEG_INF, ~0u};
            for (u32 g = lane(); g < a.n_group; g += WAVE) {
                if (!group_kept[w][g]) best.take(group_sum[w][g], g);
            }
            best.join();
            if (lane() == 0) group_kept[w][best.index] = 1;
            block_sync();
        }
    }
#pragma unroll
    for (u32 j = 0; j < EACH; ++j) {
        const u32 e = lane() + j * WAVE;
        if (e < a.n_expert && (a.n_group_used >= a.n_group || group_kept[w][e / group_size])) open |= 1u << j;
    }
    float* ids = a.ids + (u64)row * a.n_used;
    float* weights = a.weights + (u64)row * a.n_used;
    // Lane s keeps choice s, s + WAVE and so on; there are at most EXPERTS_MAX of them.
    float total = 0.0f, first_logit = 0.0f;
    for (u32 s = 0; s < a.n_used; ++s) {
        Best best = Best{NEG_INF, ~0u};
#pragma unroll
        for (u32 j = 0; j < EACH; ++j) {
            if (j * WAVE >= a.n_expert) break;
            if (open >> j & 1) best.take(selection[w][lane() + j * WAVE], lane() + j * WAVE);
        }
        best.join();
        const u32 e = best.index;
        if (e % WAVE == lane()) open &= ~(1u << e / WAVE);
        float p = probability[w][e];
        if (a.gate == GATE_SOFTMAX_OF_CHOSEN) {
            // The first choice's logit is the largest but for the bias, which f32 has room for.
            if (s == 0) first_logit = p;
            p = exp_of(p - first_logit);
        }
        total += p;
        if (lane() == 0 && item < a.rows) {
            ids[s] = (float)e;
            weights[s] = p;
        }
    }
    float factor = a.scale;
    if (a.gate == GATE_SOFTMAX_OF_CHOSEN || a.renormalize) factor /= max_of(total, SMALLEST);
    if (lane() == 0 && item < a.rows) {
        for (u32 s = 0; s < a.n_used; ++s) weights[s] *= factor;
    }
}
