//! Experts: which rows go where, and what they compute, few rows and many.

use rocmforge_ops::{Router, RouterGate};

use super::*;

const EMBD: u64 = 512;
const FF: u64 = 256;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (ty, down) in [
        (WeightType::Q4K, WeightType::Q6K),
        (WeightType::Q8_0, WeightType::Q8_0),
        (WeightType::MXFP4, WeightType::MXFP4),
        (WeightType::F16, WeightType::F16),
    ] {
        // Two of 8 experts a token. By mat-vecs, and sorted by expert: where there are tiles of up
        // to 8 rows from 32 routed rows on, and in tiles of up to 32 from 64 on, or from 72.
        for tokens in [1, 5, 25, 40] {
            for form in [Form::Gated, Form::Plain, Form::Biased] {
                cases.push(experts((ty, down), form, tokens, (EMBD, FF)));
            }
        }
    }
    // Widths that are no multiples of 256, as gpt-oss's, and numbers of rows that are none of 16.
    for ty in [WeightType::Q8_0, WeightType::MXFP4] {
        for form in [Form::Gated, Form::Plain] {
            cases.push(experts((ty, ty), form, 25, (544, 352)));
            cases.push(experts((ty, ty), form, 25, (1024, 288)));
        }
    }
    // Every other type, by mat-vecs and sorted by expert.
    for ty in WeightType::ALL {
        if ty.is_quantized() && !matches!(ty, WeightType::Q8_0 | WeightType::MXFP4) {
            cases.push(experts((ty, ty), Form::Gated, 1, (EMBD, FF)));
            cases.push(experts((ty, ty), Form::Plain, 40, (EMBD, FF)));
        }
    }
    cases
}

/// Routers as models have them.
pub(super) fn routers() -> Vec<Router> {
    let router = |gate, n_expert, n_used| Router {
        n_expert,
        n_used,
        gate,
        n_group: 1,
        n_group_used: 1,
        renormalize: false,
        scale: 1.0,
    };
    vec![
        router(RouterGate::Softmax, 64, 6),
        Router {
            renormalize: true,
            ..router(RouterGate::Softmax, 512, 10)
        },
        Router {
            n_group: 8,
            n_group_used: 4,
            renormalize: true,
            scale: 2.5,
            ..router(RouterGate::Sigmoid, 256, 8)
        },
        router(RouterGate::SoftmaxOfChosen, 32, 4),
        Router {
            renormalize: true,
            scale: 1.5,
            ..router(RouterGate::SqrtSoftplus, 128, 6)
        },
    ]
}

/// A choice alone. No logit is so large that a function of it is that of another one.
pub(super) fn routed(router: Router, tokens: u64) -> Case {
    let n_used = u64::from(router.n_used);
    let bias = match router.gate {
        RouterGate::Sigmoid | RouterGate::SqrtSoftplus => Some(0),
        RouterGate::Softmax | RouterGate::SoftmaxOfChosen => None,
    };
    let mut case = plain(
        "route".to_owned(),
        format!(
            "{} of {} by {:?} * {tokens}",
            router.n_used, router.n_expert, router.gate
        ),
        vec![vector(u64::from(router.n_expert))],
        vec![
            token_buf("logits", u64::from(router.n_expert)),
            token_buf("ids", n_used),
            token_buf("weights", n_used),
        ],
        vec![Op::Route {
            logits: X,
            bias,
            router,
            ids: N,
            weights: A,
        }],
    );
    case.tokens = tokens;
    case.compared = vec![N, A];
    case.tolerance = 1e-5;
    case.outliers = false;
    // A pass has room for rotations of no more than its widest row.
    case.n_rot = 32;
    case
}

/// Experts of a row.
const N_USED: u32 = 2;

/// What an expert has.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    /// A gate.
    Gated,
    /// None, as Nemotron's.
    Plain,
    /// A gate, and biases of all three products, as gpt-oss's.
    Biased,
}

/// The products of an expert, and its tensors.
fn ffn(
    form: Form,
    (ty, down): (WeightType, WeightType),
    (embd, ff): (u64, u64),
    [x, ids, gate, up, out]: [Buf; 5],
) -> (ExpertFfn, Vec<Tensor>) {
    let mut each = vec![matrix(ty, ff, embd), matrix(down, embd, ff)];
    let mut add = |tensor| {
        each.push(tensor);
        Some(each.len() - 1)
    };
    let is_gated = form != Form::Plain;
    let is_biased = form == Form::Biased;
    let mut ffn = ExpertFfn {
        x,
        ids,
        n_used: N_USED,
        gate_out: if is_gated { gate } else { up },
        up_out: up,
        out,
        act: match form {
            Form::Gated => Act::Silu,
            Form::Plain => Act::ReluSquared,
            Form::Biased => Act::SwigluClamped {
                alpha: 1.702,
                limit: 7.0,
            },
        },
        gate: None,
        up: 0,
        down: 1,
        gate_bias: None,
        up_bias: None,
        down_bias: None,
        gate_scale: None,
        up_scale: None,
        scale: None,
        n_tensors: 0,
    };
    if is_gated {
        ffn.gate = add(matrix(ty, ff, embd));
    }
    if is_biased {
        ffn.gate_bias = add(vector(ff));
        ffn.up_bias = add(vector(ff));
        ffn.down_bias = add(vector(embd));
    } else {
        ffn.scale = add(vector(1));
    }
    ffn.n_tensors = each.len() as u32;
    (ffn, each)
}

fn experts(
    (ty, down): (WeightType, WeightType),
    form: Form,
    tokens: u64,
    (embd, ff): (u64, u64),
) -> Case {
    let (n_expert, n_used) = (8, N_USED);
    let routed = |name, width| BufSpec {
        rows: Rows::Routed(n_used),
        ..token_buf(name, width)
    };
    let [x, logits, ids, weights, gate, up, out] = [0, 1, 2, 3, 4, 5, 6].map(Buf);
    let (ffn, each) = ffn(form, (ty, down), (embd, ff), [x, ids, gate, up, out]);
    let mut tensors = vec![vector(u64::from(n_expert))];
    tensors.extend((0..n_expert).flat_map(|_| each.clone()));
    let mut case = plain(
        "experts".to_owned(),
        format!("{form:?}, {ty}/{down}, {n_used} of {n_expert} * {tokens}"),
        tensors,
        vec![
            token_buf("x", embd),
            token_buf("logits", u64::from(n_expert)),
            token_buf("ids", u64::from(n_used)),
            token_buf("weights", u64::from(n_used)),
            routed("gate", ff),
            routed("up", ff),
            routed("out", embd),
        ],
        Vec::new(),
    );
    let router = Router {
        n_expert,
        n_used,
        gate: RouterGate::Softmax,
        n_group: 1,
        n_group_used: 1,
        renormalize: true,
        scale: 1.0,
    };
    case.work = Work::Experts {
        route: Op::Route {
            logits,
            bias: Some(0),
            router,
            ids,
            weights,
        },
        ffn,
        first_tensor: 1,
        n_expert,
    };
    case.tokens = tokens;
    case.compared = vec![out];
    case.outliers = false;
    // Two products in a row: the second one's input has the error of the first.
    case.tolerance = 3e-2;
    case
}
