//! Attention: shapes of heads, types of keys and values, few rows and many, near and far.

use super::*;

/// Positions that a row with a window sees.
const WINDOW: u32 = 40;

/// Rotation, keys and values appended, attention over pages of each type. What is appended is
/// compared by what rows that come later see of it.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes = [
        heads(4, 4, 64),
        heads(8, 2, 64),
        heads(32, 8, 128),
        heads(16, 2, 128),
        heads(4, 4, 72),
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
            (8, 3000),
        ] {
            // So far once: the reference takes long.
            if first >= 3000 && (shape.head_dim != 128 || ty == KvType::F32) {
                continue;
            }
            for (order, norms) in [(RopeOrder::Norm, false), (RopeOrder::Neox, true)] {
                cases.push(appended((shape, ty), (tokens, first), order, norms));
            }
        }
    }
    cases
}

/// Rows from a position on, with heads normed before they are rotated or not.
fn appended(
    (shape, ty): (HeadShape, KvType),
    (tokens, first): (u64, u32),
    order: RopeOrder,
    norms: bool,
) -> Case {
    let (q, kv) = (
        u64::from(shape.n_head * shape.head_dim),
        u64::from(shape.n_head_kv * shape.head_dim),
    );
    let norm = |t| norms.then_some((t, 1e-6));
    let mut case = plain(
        match ty {
            KvType::F16 => "attention".to_owned(),
            KvType::F32 | KvType::Q8_0 => format!("attention, {}", ty.name()),
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
                alibi: 0.0,
            },
        ],
    );
    case.tokens = tokens;
    case.first_position = first;
    case.compared = vec![B];
    case.heads = shape;
    case.n_rot = shape.head_dim;
    case.order = order;
    case.kv = ty;
    case.tolerance = tolerance(ty);
    case
}

/// What a result may differ by: tiles of many rows multiply in f16, but for pages of f32, where
/// nothing is rounded to less than f32.
fn tolerance(ty: KvType) -> f64 {
    match ty {
        KvType::F32 => 5e-5,
        KvType::F16 | KvType::Q8_0 => 5e-3,
    }
}

/// A token and drafts behind it, each a span of its own: a draft's row sees the keys and
/// values of those before it.
pub(super) fn drafts() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in [heads(8, 2, 64), heads(32, 8, 128), heads(4, 1, 256)] {
        for (tokens, first) in [(2, 70), (4, 0), (8, 30), (8, 1500)] {
            for (kv, recorded) in [
                (KvType::F16, false),
                (KvType::F16, true),
                (KvType::Q8_0, false),
                (KvType::F32, false),
            ] {
                let near = (Mask::Causal, 0.0, None);
                let mut case = scored("attention, drafts", shape, (tokens, first), near);
                case.name = format!("{}, {}, recorded {recorded}", case.name, kv.name());
                (case.kv, case.recorded, case.drafts) = (kv, recorded, true);
                case.tolerance = tolerance(kv);
                cases.push(case);
            }
        }
    }
    cases
}

/// Positions that a row sees that is far behind the first.
const WIDE_WINDOW: u32 = 1100;

/// Tokens of many sequences: few rows share their positions among blocks, many do not.
pub(super) fn many() -> Vec<Case> {
    let shapes = [
        heads(8, 2, 64),
        heads(32, 8, 128),
        heads(64, 8, 64),
        heads(32, 2, 128),
        heads(8, 8, 128),
        heads(4, 1, 256),
    ];
    let near = (Mask::Causal, 0.0, None);
    let all = (Mask::Window(WINDOW), 2.0, Some(0));
    let mut cases = Vec::new();
    for shape in [heads(8, 2, 64), heads(32, 8, 128), heads(4, 4, 128)] {
        // Parts of some hundred positions, of which the first begins inside of a tile.
        let wide = (Mask::Window(WIDE_WINDOW), 2.0, Some(0));
        let mut case = scored("attention, many", shape, (2, 1500), wide);
        case.name += ", a wide window";
        (case.kv, case.apart) = (KvType::F16, true);
        case.tolerance = tolerance(KvType::F16);
        cases.push(case);
    }
    for shape in shapes {
        for (tokens, first) in [(3, 40), (20, 0), (24, 90)] {
            for (kv, recorded, scores) in [
                (KvType::F16, false, near),
                (KvType::F16, true, near),
                (KvType::F16, false, all),
                (KvType::Q8_0, false, near),
            ] {
                let mut case = scored("attention, many", shape, (tokens, first), scores);
                let windowed = scores.1 > 0.0;
                case.name = format!(
                    "{}, {}, recorded {recorded}, windowed {windowed}",
                    case.name,
                    kv.name()
                );
                (case.kv, case.recorded, case.apart) = (kv, recorded, true);
                case.tolerance = tolerance(kv);
                cases.push(case);
            }
        }
    }
    cases
}

/// Rows that attend to later ones too, to all of a text or to some before and behind, of many texts
/// in one pass and of one; heads of every kernel's size.
pub(super) fn both_ways() -> Vec<Case> {
    let shapes = [
        heads(12, 12, 32),
        heads(12, 12, 64),
        heads(4, 4, 72),
        heads(4, 1, 80),
        heads(4, 2, 96),
        heads(8, 2, 128),
        heads(4, 1, 256),
        heads(4, 2, 40),
    ];
    let mut cases = Vec::new();
    for shape in shapes {
        const TEXTS: [&[u32]; 3] = [&[1, 2, 1], &[70], &[33, 1, 130, 5, 64, 7]];
        for texts in TEXTS {
            for (mask, kv) in [
                (Mask::Whole, KvType::F16),
                (Mask::Around(40), KvType::F16),
                (Mask::Whole, KvType::F32),
            ] {
                // Row by row, whatever the heads: once.
                if kv == KvType::F32 && shape.head_dim != 64 {
                    continue;
                }
                let scores = (mask, 0.0, None);
                let tokens = u64::from(texts.iter().sum::<u32>());
                let mut case = scored("attention, both ways", shape, (tokens, 0), scores);
                case.name = format!("{}, {mask:?}, {}, texts {texts:?}", case.name, kv.name());
                (case.kv, case.texts) = (kv, texts);
                case.tolerance = tolerance(kv);
                unrotated(&mut case);
                cases.push(case);
            }
        }
    }
    cases
}

/// Rows of one sequence that attend within their part of it, whole windows of a vision tower's
/// image and those at its edges; parts that begin within a page of the whole.
pub(super) fn parts() -> Vec<Case> {
    const PARTS: [&[u32]; 2] = [&[64, 64, 33, 4, 130, 16], &[5, 3]];
    let mut cases = Vec::new();
    for (shape, kv) in [
        (heads(4, 4, 80), KvType::F16),
        (heads(4, 4, 64), KvType::F32),
        (heads(4, 2, 40), KvType::F16),
    ] {
        for parts in PARTS {
            let tokens = u64::from(parts.iter().sum::<u32>());
            let scores = (Mask::Whole, 0.0, None);
            let mut case = scored("attention, parts", shape, (tokens, 0), scores);
            case.name = format!("{}, {}, {parts:?}", case.name, kv.name());
            (case.kv, case.texts, case.parts) = (kv, parts, true);
            case.tolerance = tolerance(kv);
            unrotated(&mut case);
            cases.push(case);
        }
    }
    cases
}

/// Scores that fall with distance, of encoders' texts and of causal rows far into one; heads of a
/// power of two and of another number.
pub(super) fn alibi() -> Vec<Case> {
    const TEXTS: [&[u32]; 2] = [&[1, 2, 1], &[33, 1, 130, 5, 64, 7]];
    let mut cases = Vec::new();
    for shape in [heads(12, 12, 64), heads(8, 2, 64), heads(3, 3, 16)] {
        for kv in [KvType::F16, KvType::F32] {
            let mut of = |name: &str, span, mask, texts: &'static [u32]| {
                let mut case = scored(name, shape, span, (mask, 0.0, None));
                case.name = format!("{}, {}, texts {texts:?}", case.name, kv.name());
                (case.kv, case.texts, case.tolerance) = (kv, texts, tolerance(kv));
                case.n_rot = shape.head_dim;
                unrotated(&mut case);
                fall(&mut case);
                cases.push(case);
            };
            for texts in TEXTS {
                let tokens = u64::from(texts.iter().sum::<u32>());
                of("attention, ALiBi", (tokens, 0), Mask::Whole, texts);
            }
            for span in [(1, 300), (70, 150)] {
                of("attention, ALiBi", span, Mask::Causal, &[]);
            }
        }
    }
    cases
}

/// Lets scores fall as those of encoders with ALiBi do.
fn fall(case: &mut Case) {
    if let Work::Ops(ops) = &mut case.work
        && let Some(Op::Attention { alibi, .. }) = ops.last_mut()
    {
        *alibi = 8.0;
    }
}

/// Leaves the rotation out, which heads of fewer elements than it has cannot have.
fn unrotated(case: &mut Case) {
    if let Work::Ops(ops) = &mut case.work
        && let Some(Op::RopeKv { rope, .. }) = ops.first_mut()
    {
        *rope = None;
    }
}

/// Images between texts, whose rows see each other where those of texts do not.
pub(super) fn images() -> Vec<Case> {
    let shapes = [heads(8, 2, 128), heads(4, 1, 256), heads(4, 2, 40)];
    let mut cases = Vec::new();
    for shape in shapes {
        const TEXTS: [&[u32]; 2] = [&[1, 70], &[33, 1, 130, 64, 5, 20]];
        for texts in TEXTS {
            for (mask, kv) in [
                (Mask::Causal, KvType::F16),
                (Mask::CausalInImages, KvType::F16),
                (Mask::Window(40), KvType::F16),
                (Mask::Causal, KvType::F32),
            ] {
                let scores = (mask, 0.0, None);
                let tokens = u64::from(texts.iter().sum::<u32>());
                let mut case = scored("attention, images", shape, (tokens, 0), scores);
                case.name = format!("{}, {mask:?}, {}, texts {texts:?}", case.name, kv.name());
                (case.kv, case.texts, case.images) = (kv, texts, true);
                case.tolerance = tolerance(kv);
                unrotated(&mut case);
                cases.push(case);
            }
        }
    }
    cases
}

/// Windows, bounded scores, sinks, heads whose values are shorter than their keys, and
/// heads that are rotated alone.
pub(super) fn variants() -> Vec<Case> {
    let spans = [(1, 0), (1, 70), (5, 300), (64, 20), (130, 70)];
    let shape = heads(8, 2, 64);
    let latent = HeadShape {
        n_head: 4,
        n_head_kv: 1,
        head_dim: 576,
        head_dim_v: 512,
    };
    let mut cases = Vec::new();
    for span in spans {
        let causal = Mask::Causal;
        cases.push(scored(
            "attention, window",
            shape,
            span,
            (Mask::Window(WINDOW), 0.0, None),
        ));
        cases.push(scored(
            "attention, soft cap",
            shape,
            span,
            (causal, 2.0, None),
        ));
        cases.push(scored(
            "attention, sinks",
            shape,
            span,
            (Mask::Window(WINDOW), 0.0, Some(0)),
        ));
        cases.push(scored(
            "attention, latent",
            latent,
            span,
            (causal, 0.0, None),
        ));
        for (name, heads) in [("f32", shape), ("latent, f32", latent)] {
            let scores = (Mask::Window(WINDOW), 2.0, Some(0));
            let mut case = scored(&format!("attention, {name}"), heads, span, scores);
            (case.kv, case.tolerance) = (KvType::F32, tolerance(KvType::F32));
            cases.push(case);
        }
        cases.extend([(64, 64), (128, 128), (256, 64), (80, 80)].map(|dims| rotated(dims, span)));
    }
    cases
}

fn scored(
    operation: &str,
    shape: HeadShape,
    (tokens, first): (u64, u32),
    (mask, softcap, sinks): (Mask, f32, Option<usize>),
) -> Case {
    let wide = |heads: u32, dim: u32| u64::from(heads * dim);
    let HeadShape {
        n_head,
        n_head_kv,
        head_dim,
        head_dim_v,
    } = shape;
    let mut case = plain(
        operation.to_owned(),
        format!("{shape:?} * {tokens} at {first}").replace("HeadShape ", ""),
        vec![vector(u64::from(n_head))],
        vec![
            token_buf("q", wide(n_head, head_dim)),
            token_buf("k", wide(n_head_kv, head_dim)),
            token_buf("v", wide(n_head_kv, head_dim_v)),
            token_buf("out", wide(n_head, head_dim_v)),
        ],
        vec![
            Op::RopeKv {
                q: X,
                k: N,
                v: A,
                heads: shape,
                q_norm: None,
                k_norm: None,
                rope: Some(RopeUse {
                    table: 0,
                    first: head_dim.saturating_sub(64),
                }),
                layer: kv_layer(1),
            },
            Op::Attention {
                q: X,
                out: B,
                heads: shape,
                layer: kv_layer(1),
                scale: 1.0 / (head_dim as f32).sqrt(),
                mask,
                softcap,
                sinks,
                alibi: 0.0,
            },
        ],
    );
    case.tokens = tokens;
    case.first_position = first;
    case.compared = vec![B];
    case.heads = shape;
    case.tolerance = 5e-3;
    case
}

/// Heads of so many elements, of which the last ones are rotated.
fn rotated((dim, n_rot): (u32, u32), (tokens, first): (u64, u32)) -> Case {
    let norm = (dim == 128).then_some((0, 1e-6));
    let mut case = plain(
        "rope".to_owned(),
        format!("6 heads of {dim}, {n_rot} rotated * {tokens} at {first}"),
        vec![vector(u64::from(dim))],
        vec![token_buf("x", u64::from(6 * dim))],
        vec![Op::Rope {
            x: X,
            n_head: 6,
            head_dim: dim,
            norm,
            rope: RopeUse {
                table: 0,
                first: dim - n_rot,
            },
        }],
    );
    case.tokens = tokens;
    case.first_position = first;
    case.compared = vec![X];
    case.n_rot = n_rot;
    case.order = match dim {
        128 => RopeOrder::Neox,
        _ => RopeOrder::Norm,
    };
    case.tolerance = 1e-5;
    case
}
