// A number as a sum of two f16: what f16 makes of it, and behind that what is left, LOW_SCALE
// times as large so that it keeps its 11 bits where it would be a subnormal number. Together
// they are exact to 22 bits.
#pragma once
#include "compat.h"

#define F16_MAX 65504.0f
#define LOW_SCALE 2048.0f

// Finite values beyond f16's range become its largest.
FORCE float in_f16(float v) {
    const float a = abs_of(v);
    return a > F16_MAX && is_finite(v) ? (v > 0.0f ? F16_MAX : -F16_MAX) : v;
}
// The second of the two, before it is rounded. What is not finite is in the first alone.
FORCE float low_part(float v) { return is_finite(v) ? (v - f32_of_f16(f16_of_f32(in_f16(v)))) * LOW_SCALE : 0.0f; }
