//! Launches of attention, and of what comes before it.

use super::*;

/// Of each size of heads, type of pages and number of query heads a key/value head.
pub(super) fn one_of_each(target: &GpuTarget, rotation: Option<Rotation>) -> Vec<Launch> {
    let mut all = Vec::new();
    let rope = Rope {
        rotation,
        q_norm: None,
        k_norm: Some(3),
        eps: 1e-6,
    };
    let sizes = [
        (64, 64),
        (72, 72),
        (80, 80),
        (96, 96),
        (128, 128),
        (256, 256),
        (192, 128),
        (576, 512),
    ];
    for (head_dim_k, head_dim_v) in sizes {
        let types = KvType::ALL.into_iter().filter(|ty| ty.fits(head_dim_k));
        for (ty, group) in types.flat_map(|ty| [1, 4, 8, 20].map(|group| (ty, group))) {
            let layout = KvLayout {
                n_layer: 2,
                n_head_kv: 2,
                head_dim_k,
                head_dim_v,
                ty,
            };
            let kv = Kv {
                layout: &layout,
                layer: 1,
                base: 1 << 40,
                table: 2,
                table_stride: 16,
                positions: 3,
                sequences: None,
            };
            let qkv = Qkv {
                q: 1,
                k: 2,
                v: 3,
                n_head: 2 * group,
                rows: 5,
            };
            let partials = Partials {
                partials: 1,
                counters: 2,
            };
            all.push(rope_kv(target, qkv, 4, &kv, &rope).unwrap());
            let scores = Scores {
                mask: Mask::Window(128),
                softcap: 50.0,
                sinks: Some(9),
                ..Scores::causal(0.1)
            };
            for (n_tiles, positions) in [(4, 100), (1, 10_000)] {
                let shared = SharedPositions {
                    room: ROOM,
                    positions,
                };
                let (heads, n) = (2 * group, (n_tiles, 5));
                let launch = attention::prefill(target, 1, heads, 5, 2, &kv, &scores, 3, n, shared);
                all.push(launch.unwrap());
            }
            let (append, to) = (Some(&rope), partials);
            for (rows, positions) in [(1, 64), (1, 10_000), (8, 10_000), (640, 64)] {
                let shape = attention::decode_shape(target, rows, 2 * group, &layout, positions);
                let shape = shape.unwrap();
                all.push(attention::decode(qkv, 4, &kv, append, &scores, shape, to).unwrap());
            }
            if layout.ty != KvType::Q8_0 {
                let scores = Scores {
                    softcap: 0.0,
                    alibi: 8.0,
                    ..scores
                };
                let (heads, shared) = (
                    2 * group,
                    SharedPositions {
                        room: ROOM,
                        positions: 9,
                    },
                );
                let many =
                    attention::prefill(target, 1, heads, 5, 2, &kv, &scores, 3, (4, 5), shared);
                let shape = attention::decode_shape_of(&scores, target, 1, heads, &layout, 64);
                let one = attention::decode(qkv, 4, &kv, append, &scores, shape.unwrap(), to);
                all.extend([many.unwrap(), one.unwrap()]);
            }
        }
    }
    all
}
