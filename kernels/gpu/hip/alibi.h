// ALiBi (arXiv 2108.12409): scores that fall with the distance of query and key, in units that
// define ALIBI, whose names end in _alibi. In others nothing of this is left.
//
// The bias has softcap's place in the arguments of their kernels, which cap nothing. What a head's
// scores fall by for each position is alibi_slope of rocmforge_ops; scores are in units of log 2,
// as attention_decode.hip and attention_prefill.hip have them.
#pragma once
#include "compat.h"

#ifdef ALIBI
#define FALLS true
#else
#define FALLS false
#endif

FORCE float cap_of(float softcap) { return FALLS ? 0.0f : softcap * 1.44269504088896341f; }
FORCE float alibi_slope(float bias, u32 n_head, u32 head) {
    u32 whole = 1;
    while (whole <= n_head / 2) whole *= 2;
    const float at = head < whole ? (float)(head + 1) : (float)(head - whole) + 0.5f;
    return exp2_of(-bias * at / (float)whole) * 1.44269504088896341f;
}
// Positions between two.
FORCE float apart(u32 a, u32 b) { return (float)(a > b ? a - b : b - a); }
