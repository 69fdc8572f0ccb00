// Norms (where given) and rotates the heads of one buffer [rows][n_head][dim] in place.
//
// Geometry: grid (ceil(n_head / WAVES), rows); a wave a head of up to DIM elements. Bound by
// memory. Entry: rope_heads.
#include "compat.h"
#include "kv.h"

#define THREADS 128
#define DIM 576

struct RopeHeadsArgs {
    float* x;
    const u32* positions;  // of the rows, where entries go by position
    RopePlace rope;        // q_norm is the norm
    u32 n_head;
    u32 dim;
};

ENTRY(THREADS, 1) rope_heads(RopeHeadsArgs a) {
    let_next_start();
    wait_for_inputs();
    const u32 head = block_x() * (THREADS / WAVE) + wave(), row = block_y();
    if (head >= a.n_head) return;
    float* x = a.x + ((u64)row * a.n_head + head) * a.dim;
    rotate_head<DIM>(a.dim, x, a.rope.q_norm, a.rope, a.rope.by_position ? a.positions[row] : row, [=](u32 i, bool in, float y) {
        if (in) x[i] = y;
    });
}
