// Norms (where given) and rotates the heads of q and k; writes k and v of every row
// into its sequence's page.
//
// q [rows][n_head][dim_k] f32 -> q_out, f32 (may be q itself) or f16 (q_half); k
// [rows][n_head_kv][dim_k] and v [rows][n_head_kv][dim_v] f32 -> pages (kv.h).
// Geometry: grid (ceil((n_head + 2 n_head_kv) / WAVES), rows); a wave a head. Bound by memory:
// reads q, k, v, writes q and the pages once.
// Entries: rope_kv_<dim> (DIM = dim_k), rope_kv_any (ANY; dim_k up to DIM); with KV_Q8
// rope_kv_<dim>_q8 and rope_kv_any_q8, with KV_F32 rope_kv_any_f32.
#include "compat.h"
#include "kv.h"

#define THREADS 128

struct RopeKvArgs {
    const float* q;
    const float* k;
    const float* v;
    void* q_out;
    KvPlace kv;
    RopePlace rope;
    u32 n_head;
    u32 q_half;
};

#ifdef ANY
#define HEAD_K(a) (a).kv.dim_k
#else
#define HEAD_K(a) DIM
#endif

ENTRY(THREADS, 1) UNIT(RopeKvArgs a) {
    let_next_start();
    wait_for_inputs();
    u32 head = block_x() * (THREADS / WAVE) + wave(), row = block_y();
    u32 n_kv = a.kv.n_head_kv;
    if (head < a.n_head + 2 * n_kv) {
        u32 position = a.kv.positions[row];
        u32 entry = a.rope.by_position ? position : row;
        if (head < a.n_head) {
            u64 at = ((u64)row * a.n_head + head) * a.kv.dim_k;
            float* to = (float*)a.q_out + at;
            u16* to_half = (u16*)a.q_out + at;
            bool half = a.q_half != 0;
            rotate_head<DIM>(HEAD_K(a), a.q + at, a.rope.q_norm, a.rope, entry, [=](u32 i, bool in, float x) {
                if (in && half) to_half[i] = f16_of_f32(x);
                else if (in) to[i] = x;
            });
        } else {
            u8* page = page_of(a.kv, sequence_of(a.kv, row), position / PAGE);
            u32 slot = position % PAGE;
            if (head < a.n_head + n_kv) {
                head -= a.n_head;
                u8* to = page + k_offset(a.kv, head);
                const u32 dim = HEAD_K(a);
                rotate_head<DIM>(dim, a.k + ((u64)row * n_kv + head) * dim, a.rope.k_norm, a.rope, entry,
                                 [=](u32 i, bool in, float x) { store_element(to, dim, slot, i, in, x); });
            } else {
                head -= a.n_head + n_kv;
                u8* to = page + v_offset(a.kv, head);
                const float* from = a.v + ((u64)row * n_kv + head) * a.kv.dim_v;
                for (u32 first = 0; first < a.kv.dim_v; first += WAVE) {
                    const u32 i = first + lane();
                    const bool in = i < a.kv.dim_v;
                    store_element(to, a.kv.dim_v, slot, i, in, in ? from[i] : 0.0f);
                }
            }
        }
    }
}
