// Functions of one element, and of a gate and its partner.
#pragma once
#include "compat.h"

struct ActSpec {
    u32 kind;  // ACT_*
    float alpha, limit;
    u32 reserved;
};

#define ACT_IDENTITY 0u
#define ACT_SILU 1u
#define ACT_GELU_TANH 2u
#define ACT_RELU_SQUARED 3u
#define ACT_SIGMOID 4u
#define ACT_SOFTPLUS 5u
#define ACT_SWIGLU_CLAMPED 6u  // of a gate alone
#define ACT_GELU_ERF 7u

FORCE float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }
// 1 - 2 / (1 + exp(2 x)): exact at both ends, and near 0 to the 2^-24 that a sum with 1 has.
FORCE float tanh_of(float x) { return 1.0f - 2.0f / (1.0f + exp_of(2.0f * x)); }
// ln(1 + e) to the last bits for small e too, where the sum with 1 has lost some.
FORCE float softplus_of(float x) {
    if (x > 20.0f) return x;
    const float e = exp_of(x), sum = 1.0f + e;
    return sum == 1.0f ? e : log_of(sum) * (e / (sum - 1.0f));
}

// erfc(z) = t exp(p(t) - z^2) with t = 1 / (1 + z / 2), of z = |x| / sqrt(2), to 1.2e-7 of it
// (Press et al., Numerical Recipes, 6.2).
FORCE float gelu_erf_of(float x) {
    const float size = x < 0.0f ? -x : x, z = 0.70710678118654752f * size, t = 1.0f / (1.0f + 0.5f * z);
    float p = 0.17087277f;
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    return max_of(x, 0.0f) - 0.5f * size * t * exp_of(p - z * z);
}

FORCE float act_of(const ActSpec& act, float x) {
    switch (act.kind) {
        case ACT_SILU: return silu(x);
        case ACT_GELU_TANH: return 0.5f * x * (1.0f + tanh_of(0.7978845608028654f * (x + 0.044715f * x * x * x)));
        case ACT_GELU_ERF: return gelu_erf_of(x);
        case ACT_RELU_SQUARED: return x > 0.0f ? x * x : (x <= 0.0f ? 0.0f : x);
        case ACT_SIGMOID: return sigmoid_of(x);
        case ACT_SOFTPLUS: return softplus_of(x);
        default: return x;
    }
}
FORCE float gate_of(const ActSpec& act, float gate, float up) {
    if (act.kind == ACT_SWIGLU_CLAMPED) {
        const float g = gate > act.limit ? act.limit : gate;
        const float u = up > act.limit ? act.limit : (up < -act.limit ? -act.limit : up);
        return g * sigmoid_of(act.alpha * g) * (u + 1.0f);
    }
    return act_of(act, gate) * up;
}
