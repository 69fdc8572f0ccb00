// Attention of many rows over their sequences' pages, of all positions up to their own or a window,
// or ahead too (encoders), with soft cap and sinks as attention_decode.hip has them: prefill.
//
// q [rows][n_head][DIM] f32, rotated already (rope_kv); K and V of the rows themselves are in the
// pages. A tile is up to 128 consecutive rows of one sequence; `tiles` [n_tiles]{first_row, n_rows}
// lies in device memory. The heads of a group read the same keys, so a tile's work for one
// key/value head is a list of n_rows * group entries, (row, head of the group), which is cut into
// blocks of M_BLOCK. Online softmax (arXiv 2205.14135, 2307.08691) with f32 sums; the maximum that
// is subtracted may lag behind the true one by a factor of 2^LAG, which f16 weights have room for
// and the final division takes out, so that the outputs are rarely rescaled.
// Geometry: grid (n_head_kv * blocks, n_tiles, parts), THREADS threads; blocks = rows of the
// longest tile * group / M_BLOCK rounded up. Parts (attention_mma.h alone): few rows far into a
// text would leave multiprocessors idle, so their positions are shared. Bound by arithmetic: 4 DIM
// multiply-adds a pair of positions and head, half of that for causality. Bytes: q and the output
// once, K and V once a block.
//
// Three forms: NVIDIA's matrix instructions from sm_80 on (attention_mma.h), AMD's WMMA
// (gfx11, gfx12) and MFMA (gfx908 and later gfx9; attention_wmma.h), and f32 arithmetic for
// everything else (attention_plain.h). The host chooses M_BLOCK and the shared memory to
// match (gpu/ops/attention.rs).
// Entry: attention_prefill_<dim> (DIM); with KV_Q8, pages of 8 bits and scales,
// attention_prefill_<dim>_q8. There what goes to shared memory is f16 too: codes times their scale.
// With ALIBI, attention_prefill_<dim>_alibi: scores fall with distance (alibi.h).
#include "compat.h"
#include "act.h"
#include "kv.h"
#include "recurrent.h"
#include "alibi.h"

#define THREADS 128
#define LAG 8.0f
// A head in whole blocks of 16, as matrix instructions take it.
#define WIDE ((DIM + 15) / 16 * 16)

struct AttentionPrefillArgs {
    const float* q;
    float* out;
    const u32* tiles;
    KvPlace kv;
    const float* sinks;  // [n_head], or null
    const SequencePlace* places;  // [sequences]; read where rows attend ahead
    float scale;
    float softcap;  // 0 for none; the bias in units with ALIBI
    u32 window;     // 0 for none
    u32 n_head;
    F32x4* partials;  // of more than one part
    u32* counters;    // zero before and after, one a block and one for each run of its parts
    u32 blocks;       // of a key/value head and tile
    u32 part_threads; // threads of a block that have entries where it has most
    u32 ahead;        // positions behind its own that a row attends to; 0: none
    u32 reserved;
};

// A block's share of a tile: entries m0 up to `entries` of one key/value head.
struct PrefillBlock {
    const AttentionPrefillArgs& a;
    u32 group, head_kv, m0, entries, first_row, sequence, first_position, last_position;

    FORCE PrefillBlock(const AttentionPrefillArgs& args, u32 m_block) : a(args) {
        const u32 tile = block_y();
        group = a.n_head / a.kv.n_head_kv;
        head_kv = block_x() / a.blocks;
        m0 = block_x() % a.blocks * m_block;
        first_row = a.tiles[2 * tile];
        entries = a.tiles[2 * tile + 1] * group;
        sequence = sequence_of(a.kv, first_row);
        first_position = a.kv.positions[first_row];
        last_position = 0;
        if (a.ahead) last_position = a.places[sequence].last;
    }
    // Entries past the end stand for the last one; they are not stored.
    FORCE u32 row(u32 m) const { return least(m, entries - 1) / group; }
    FORCE u32 position(u32 m) const { return first_position + row(m); }
    FORCE u64 element(u32 m) const {
        u32 r = row(m), h = least(m, entries - 1) - r * group;
        return ((u64)(first_row + r) * a.n_head + head_kv * group + h) * DIM;
    }
    // The head of an entry.
    FORCE u32 head(u32 m) const { return head_kv * group + least(m, entries - 1) % group; }
    // The first position that the row at a position attends to.
    FORCE u32 start(u32 position) const { return a.window && position >= a.window ? position + 1 - a.window : 0; }
    // Behind the last one.
    FORCE u32 behind(u32 position) const {
        const u32 last = least(position + a.ahead, last_position);
        return (last > position ? last : position) + 1;
    }
    // What an entry's scores fall by for each position between its own and a key's.
    FORCE float slope(u32 m) const { return alibi_slope(a.softcap, a.n_head, head(m)); }
    // What a head's softmax begins with: largest score, and sum.
    FORCE float first_largest(u32 m) const { return a.sinks ? a.sinks[head(m)] * 1.44269504088896341f : NEG_INF; }
    FORCE float first_total() const { return a.sinks ? 1.0f : 0.0f; }
    FORCE const u8* page(u32 n) const { return page_of(a.kv, sequence, n); }
};

FORCE float capped(float s, float cap) { return cap * tanh_of(s / cap); }
// What is subtracted of scores: a row that has met only positions behind its window has none yet.
FORCE float base_of(float largest) { return largest == NEG_INF ? 0.0f : largest; }

#if defined(RF_CUDA) && __CUDA_ARCH__ >= 800
#include "attention_mma.h"
#elif defined(RF_WMMA)
#include "attention_wmma.h"
#else
#include "attention_plain.h"
#endif

ENTRY(THREADS, 2) UNIT(AttentionPrefillArgs a) { attention_prefill(a); }
