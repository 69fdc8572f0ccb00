//! Attention: shapes of heads, types of keys and values, few rows and many, near and far.

use super::*;

/// Rotation, keys and values appended, attention over pages of each type. What is appended is compared by what rows that come
/// later see of it.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes = [
        heads(4, 4, 64),
        heads(8, 2, 64),
        heads(32, 8, 128),
        heads(16, 2, 128),
        heads(4, 1, 80),
        heads(4, 2, 96),
        heads(4, 1, 256),
        heads(4, 2, 160),
    ];
    let types = |shape: HeadShape| {
        let fit = move |ty: &KvType| ty.fits(shape.head_dim as usize);
        KvType::ALL.into_iter().filter(fit)
    };
    let all = shapes
        .into_iter()
        .flat_map(|shape| types(shape).map(move |ty| (shape, ty)));
    for (shape, ty) in all {
        // Few rows far into a text share its positions among blocks.
        for (tokens, first) in [
            (1, 0),
            (1, 31),
            (1, 300),
            (5, 0),
            (64, 20),
            (130, 70),
            (20, 1500),
        ] {
            for (order, norms) in [(RopeOrder::Norm, false), (RopeOrder::Neox, true)] {
                let (q, kv) = (
                    u64::from(shape.n_head * shape.head_dim),
                    u64::from(shape.n_head_kv * shape.head_dim),
                );
                let norm = |t| norms.then_some((t, 1e-6));
                let mut case = plain(
                    match ty {
                        KvType::F16 => "attention".to_owned(),
                        KvType::Q8_0 => format!("attention, {}", ty.name()),
                    },
                    format!("{shape:?} {order:?} * {tokens} at {first}").replace("HeadShape ", ""),
                    vec![
                        vector(u64::from(shape.head_dim)),
                        vector(u64::from(shape.head_dim)),
                    ],
                    vec![
                        token_buf("q", q),
                        token_buf("k", kv),
                        token_buf("v", kv),
                        token_buf("out", q),
                    ],
                    vec![
                        Op::RopeKv {
                            q: X,
                            k: N,
                            v: A,
                            heads: shape,
                            q_norm: norm(0),
                            k_norm: norm(1),
                            rope: ROPE,
                            layer: kv_layer(1),
                        },
                        Op::Attention {
                            q: X,
                            out: B,
                            heads: shape,
                            layer: kv_layer(1),
                            scale: 1.0 / (shape.head_dim as f32).sqrt(),
                            mask: Mask::Causal,
                            softcap: 0.0,
                            sinks: None,
                        },
                    ],
                );
                case.tokens = tokens;
                case.first_position = first;
                case.compared = vec![B];
                case.heads = shape;
                case.order = order;
                case.kv = ty;
                case.tolerance = 5e-3;
                cases.push(case);
            }
        }
    }
    cases
}
