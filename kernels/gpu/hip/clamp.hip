// out = min(max(x, low[0]), high[0]), both bounds from the device's memory. NaN stays NaN.
//
// Geometry: grid (ceil(cols / THREADS), rows), a thread an element. Bound by memory: 8 bytes an
// element.
// Entry: clamp.
#include "compat.h"

#define THREADS 256

struct ClampArgs {
    const float* x;
    float* out;
    const float* low;
    const float* high;
    u32 cols;
    u32 reserved;
};

ENTRY(THREADS, 1) clamp(ClampArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 i = block_x() * THREADS + thread_x();
    if (i >= a.cols) return;
    const u64 at = (u64)block_y() * a.cols + i;
    const float low = a.low[0], high = a.high[0];
    float v = a.x[at];
    v = v < low ? low : v;
    a.out[at] = v > high ? high : v;
}
