//! What becomes one step, and what stays apart.

use super::*;

const X: Buf = Buf(0);
const N: Buf = Buf(1);
const P: Buf = Buf(2);
const G: Buf = Buf(7);
const U: Buf = Buf(8);

fn product(weight: usize, out: Buf) -> Product {
    Product {
        weight,
        bias: None,
        out,
    }
}

fn add(y: Buf) -> Op {
    Op::Add {
        x: X,
        y,
        scale: 1.0,
    }
}

fn feed_forward() -> Vec<Op> {
    vec![
        Op::MatMul {
            x: Buf(6),
            products: vec![product(0, P)],
        },
        Op::Add {
            x: X,
            y: P,
            scale: 1.0,
        },
        Op::RmsNorm {
            x: X,
            weight: Some(1),
            eps: 1e-5,
            group: 64,
            out: N,
        },
        Op::MatMul {
            x: N,
            products: vec![product(2, G), product(3, U)],
        },
        Op::Gate {
            gate: G,
            up: U,
            act: Act::Silu,
        },
        Op::MatMul {
            x: G,
            products: vec![product(4, P)],
        },
        Op::Add {
            x: X,
            y: P,
            scale: 1.0,
        },
    ]
}

#[test]
fn a_feed_forward_is_three_steps() {
    let ops = feed_forward();
    let fused = fuse(&ops, &[X], |_| 64, |_, _| true);
    let norm = Input::Norm {
        x: X,
        weight: 1,
        eps: 1e-5,
        to: N,
    };
    assert_eq!(
        fused,
        [
            Fused::Products {
                input: Input::Plain(Buf(6)),
                products: &[product(0, P)],
                add: Some(X),
            },
            Fused::GatedUnit {
                input: norm,
                gate: &product(2, G),
                up: &product(3, U),
                act: Act::Silu,
            },
            Fused::Products {
                input: Input::Plain(G),
                products: &[product(4, P)],
                add: Some(X),
            },
        ]
    );
    let fused = fuse(&ops, &[X], |_| 64, |_, _| false);
    assert_eq!(fused.len(), 3);
    assert!(matches!(
        fused[2],
        Fused::Products {
            input: Input::Gated {
                gate: G,
                up: U,
                act: Act::Silu
            },
            add: Some(X),
            ..
        }
    ));
}

#[test]
fn what_is_read_later_is_written() {
    let mut ops = feed_forward();
    ops.push(add(N));
    let fused = fuse(&ops, &[X], |_| 64, |_, _| true);
    let normed = Fused::Single(&ops[2]);
    assert!(fused.contains(&normed), "{fused:?}");
    ops.push(add(P));
    let fused = fuse(&ops, &[X], |_| 64, |_, _| true);
    let stored = |f: &Fused<'_>| matches!(f, Fused::Products { add: None, products, .. } if products[0].weight == 4);
    assert!(fused.iter().any(stored), "{fused:?}");
}

#[test]
fn what_a_later_step_reads_is_written() {
    let ops = feed_forward();
    let fused = fuse(&ops[..5], &[X, G, U], |_| 64, |_, _| true);
    let apart = |f: &Fused<'_>| matches!(f, Fused::Single(Op::Gate { .. }));
    assert!(fused.iter().any(apart), "up is read later: {fused:?}");
    let fused = fuse(&ops[..5], &[X, G], |_| 64, |_, _| true);
    assert!(!fused.iter().any(apart), "{fused:?}");
}

#[test]
fn routed_rows_are_summed_on_top_of_what_they_are_added_to() {
    let combine = Op::Combine {
        y: G,
        weights: U,
        out: P,
    };
    let mut ops = vec![combine.clone(), add(P)];
    let sum = Fused::Combined {
        y: G,
        weights: U,
        x: X,
    };
    assert_eq!(fuse(&ops, &[X], |_| 64, |_, _| true), [sum]);
    // Somebody else needs them apart, the sum is scaled, or it would be of what it changes.
    assert_eq!(fuse(&ops, &[X, P], |_| 64, |_, _| true).len(), 2);
    let Op::Add { scale, .. } = &mut ops[1] else {
        unreachable!()
    };
    *scale = 0.5;
    assert_eq!(fuse(&ops, &[X], |_| 64, |_, _| true).len(), 2);
    let of_itself = [
        Op::Combine {
            y: X,
            weights: U,
            out: P,
        },
        add(P),
    ];
    assert_eq!(fuse(&of_itself, &[X], |_| 64, |_, _| true).len(), 2);
}

#[test]
fn a_sum_is_not_written_while_its_product_reads_it() {
    let product_of = |x| Op::MatMul {
        x,
        products: vec![product(0, P)],
    };
    let add = add(P);
    let norm = Op::RmsNorm {
        x: X,
        weight: Some(1),
        eps: 1e-5,
        group: 64,
        out: N,
    };
    for ops in [
        vec![product_of(X), add.clone()],
        vec![norm, product_of(N), add.clone()],
    ] {
        let fused = fuse(&ops, &[X], |_| 64, |_, _| true);
        assert_eq!(fused.last(), Some(&Fused::Single(&add)), "{fused:?}");
    }
}

const SCALES: Buf = Buf(10);
const LOW: Buf = Buf(11);

fn adapters(x: Buf, outs: &[Buf]) -> Op {
    Op::AddAdapters {
        x,
        scales: SCALES,
        low: LOW,
        products: (0..)
            .zip(outs)
            .map(|(i, &out)| rocmforge_device::ops::Adapted {
                a: 20 + i,
                b: 30 + i,
                out,
            })
            .collect(),
    }
}

/// The feed-forward with adapters behind each product.
fn adapted_feed_forward() -> Vec<Op> {
    let mut ops = Vec::new();
    for op in feed_forward() {
        ops.push(op.clone());
        if let Op::MatMul { x, products } = &op {
            let outs: Vec<Buf> = products.iter().map(|p| p.out).collect();
            ops.push(adapters(*x, &outs));
        }
    }
    ops
}

#[test]
fn adapters_go_with_their_products() {
    let ops = adapted_feed_forward();
    let norm = Input::Norm {
        x: X,
        weight: 1,
        eps: 1e-5,
        to: N,
    };
    let of = |input, products, add, gate, adapters| Fused::Adapted {
        input,
        products,
        add,
        gate,
        adapters,
    };
    let fused = fuse(&ops, &[X], |_| 64, |_, _| true);
    let silu = Some(Act::Silu);
    let unit = [product(2, G), product(3, U)];
    let (out, down) = ([product(0, P)], [product(4, P)]);
    let first = of(Input::Plain(Buf(6)), &out, Some(X), None, &ops[1]);
    let last = of(Input::Plain(G), &down, Some(X), None, &ops[8]);
    let whole = [first.clone(), of(norm, &unit, None, silu, &ops[5]), last];
    assert_eq!(fused, whole);
    // Of several rows the next product makes the gated unit.
    let fused = fuse(&ops, &[X], |_| 64, |_, _| false);
    let gated = Input::Gated {
        gate: G,
        up: U,
        act: Act::Silu,
    };
    let last = of(gated, &down, Some(X), None, &ops[8]);
    assert_eq!(fused, [first, of(norm, &unit, None, None, &ops[5]), last]);
}

/// What somebody reads behind adapters is there, and they add to what they were given.
#[test]
fn what_is_read_behind_adapters_is_written() {
    let whole = |ops: &[Op]| fuse(ops, &[X], |_| 64, |_, _| true).len();
    let ops = adapted_feed_forward();
    assert_eq!(whole(&ops), 3);
    // The normed rows, the sum, the gate's partner.
    for (read, n) in [(N, 5), (P, 5), (U, 5)] {
        let mut ops = ops.clone();
        ops.push(add(read));
        assert_eq!(whole(&ops), n, "{read:?}");
    }
    // Rows of more adapters behind the first.
    let mut more = ops.clone();
    more.insert(6, adapters(N, &[G]));
    let fused = fuse(&more, &[X], |_| 64, |_, _| true);
    assert!(fused.contains(&Fused::Single(&more[3])), "{fused:?}");
    // Adapters that add to something else, or read what the sum goes to.
    let mut other = ops.clone();
    other[1] = adapters(Buf(6), &[P, N]);
    assert_eq!(whole(&other), 4);
    let of_itself = [
        Op::MatMul {
            x: X,
            products: vec![product(0, P)],
        },
        adapters(X, &[P]),
        add(P),
    ];
    assert_eq!(whole(&of_itself), 2);
    // Adapters of other rows than the product's.
    let mut apart = ops.clone();
    apart[1] = adapters(Buf(5), &[P]);
    let fused = fuse(&apart, &[X], |_| 64, |_, _| true);
    assert!(fused.contains(&Fused::Single(&apart[1])), "{fused:?}");
    assert_eq!(fused.len(), 5);
}
