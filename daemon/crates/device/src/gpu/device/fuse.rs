//! Operations that follow each other, put together where a kernel does them at once.
//!
//! ```text
//! RmsNorm, MatMul                    -> product with the norm on its input
//! MatMul, Add                        -> product added to the residual stream
//! MatMul (gate, up), SiluMul         -> product with SwiGLU, or SwiGLU on the next product's input
//! RopeKv, Attention                  -> attention that rotates and appends
//! ```
//!
//! A buffer between two fused operations is not written. That is seen by nobody: within a segment it is checked that no
//! later operation reads it, and a plan's segments hand on the residual stream and the gated feed-forward only, which are
//! written. A layer of a plan ends a segment with SwiGLU, whose product begins the next, so that there SwiGLU is no product's
//! input; lists of operations that have both in one are what the parity cases are.

use crate::ops::{Buf, HeadShape, Op, Product, TensorIndex};

/// What a product reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Input {
    /// A buffer.
    Plain(Buf),
    /// `rms_norm(x) * weight`; `to` is the buffer that it was meant for.
    Norm {
        x: Buf,
        weight: TensorIndex,
        eps: f32,
        to: Buf,
    },
    /// `silu(gate) * up`, meant for `gate`.
    Silu { gate: Buf, up: Buf },
}

impl Input {
    /// Whether it is computed of this buffer.
    fn is_made_of(self, buf: Buf) -> bool {
        match self {
            Input::Plain(x) | Input::Norm { x, .. } => x == buf,
            Input::Silu { gate, up } => gate == buf || up == buf,
        }
    }
}

/// Operations fused into one step.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fused<'a> {
    /// Products of one input. With `add`, the one product is added to that buffer instead of stored.
    Products {
        input: Input,
        products: &'a [Product],
        add: Option<Buf>,
    },
    /// Gate and up products of one input; `silu(gate) * up` goes to the gate's buffer.
    SwiGlu {
        input: Input,
        gate: &'a Product,
        up: &'a Product,
    },
    /// Rotation, appending and attention.
    Attention {
        q: Buf,
        k: Buf,
        v: Buf,
        out: Buf,
        heads: HeadShape,
        q_norm: Option<(TensorIndex, f32)>,
        k_norm: Option<(TensorIndex, f32)>,
        layer: u32,
        scale: f32,
    },
    /// One operation as it is.
    Single(&'a Op),
}

/// Fuses a segment's operations. `swiglu` tells whether two products can be one launch with their SwiGLU.
pub(super) fn fuse<'a>(
    ops: &'a [Op],
    swiglu: impl Fn(&Product, &Product) -> bool,
) -> Vec<Fused<'a>> {
    let mut fused = Vec::with_capacity(ops.len());
    // A norm or SwiGLU that the next product takes over.
    let mut input: Option<Input> = None;
    let mut at = 0;
    while let Some(op) = ops.get(at) {
        let rest = &ops[at + 1..];
        at += 1;
        match op {
            Op::RmsNorm {
                x,
                weight,
                eps,
                out,
            } => {
                if feeds_next(*out, rest) {
                    input = Some(Input::Norm {
                        x: *x,
                        weight: *weight,
                        eps: *eps,
                        to: *out,
                    });
                } else {
                    fused.push(Fused::Single(op));
                }
            }
            Op::SiluMul { gate, up } if feeds_next(*gate, rest) && !read_later(*up, rest) => {
                input = Some(Input::Silu {
                    gate: *gate,
                    up: *up,
                });
            }
            Op::MatMul { x, products } => {
                let taken = input.take().unwrap_or(Input::Plain(*x));
                let swiglu = match (&products[..], rest.first()) {
                    ([gate, up], Some(Op::SiluMul { gate: g, up: u })) => {
                        (gate.out, up.out) == (*g, *u)
                            && !read_later(*u, &rest[1..])
                            && swiglu(gate, up)
                    }
                    _ => false,
                };
                if swiglu {
                    fused.push(Fused::SwiGlu {
                        input: taken,
                        gate: &products[0],
                        up: &products[1],
                    });
                    at += 1;
                    continue;
                }
                let add = match (&products[..], rest.first()) {
                    // Blocks that add would change what others still read.
                    ([one], Some(Op::Add { x, y }))
                        if one.out == *y
                            && !taken.is_made_of(*x)
                            && !read_later(*y, &rest[1..]) =>
                    {
                        at += 1;
                        Some(*x)
                    }
                    _ => None,
                };
                fused.push(Fused::Products {
                    input: taken,
                    products,
                    add,
                });
            }
            Op::RopeKv {
                q,
                k,
                v,
                heads,
                q_norm,
                k_norm,
                layer,
            } => match rest.first() {
                Some(Op::Attention {
                    q: attended,
                    out,
                    heads: same_heads,
                    layer: same_layer,
                    scale,
                }) if attended == q
                    && same_layer == layer
                    && same_heads == heads
                    && ![*q, *k, *v].iter().any(|b| read_later(*b, &rest[1..])) =>
                {
                    fused.push(Fused::Attention {
                        q: *q,
                        k: *k,
                        v: *v,
                        out: *out,
                        heads: *heads,
                        q_norm: *q_norm,
                        k_norm: *k_norm,
                        layer: *layer,
                        scale: *scale,
                    });
                    at += 1;
                }
                _ => fused.push(Fused::Single(op)),
            },
            _ => fused.push(Fused::Single(op)),
        }
    }
    fused
}

/// Whether the next operation is a product of `buf` and nothing after it reads `buf`.
fn feeds_next(buf: Buf, rest: &[Op]) -> bool {
    match rest.first() {
        Some(Op::MatMul { x, products }) => {
            *x == buf && (products.iter().any(|p| p.out == buf) || !read_later(buf, &rest[1..]))
        }
        _ => false,
    }
}

/// Whether an operation reads the buffer before one writes all of it.
fn read_later(buf: Buf, ops: &[Op]) -> bool {
    for op in ops {
        let (reads, writes): (&[Buf], &[Buf]) = match op {
            Op::RmsNorm { x, out, .. } => (&[*x], &[*out]),
            Op::Add { x, y } => (&[*x, *y], &[]),
            Op::MatMul { x, products } => {
                if *x == buf {
                    return true;
                }
                if products.iter().any(|p| p.out == buf) {
                    return false;
                }
                continue;
            }
            Op::RopeKv { q, k, v, .. } => (&[*q, *k, *v], &[]),
            Op::Attention { q, out, .. } => (&[*q], &[*out]),
            Op::SiluMul { gate, up } => (&[*gate, *up], &[]),
            Op::GatherOutputs { x, out } => (&[*x], &[*out]),
        };
        if reads.contains(&buf) {
            return true;
        }
        if writes.contains(&buf) {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
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

    fn feed_forward() -> Vec<Op> {
        vec![
            Op::MatMul {
                x: Buf(6),
                products: vec![product(0, P)],
            },
            Op::Add { x: X, y: P },
            Op::RmsNorm {
                x: X,
                weight: 1,
                eps: 1e-5,
                out: N,
            },
            Op::MatMul {
                x: N,
                products: vec![product(2, G), product(3, U)],
            },
            Op::SiluMul { gate: G, up: U },
            Op::MatMul {
                x: G,
                products: vec![product(4, P)],
            },
            Op::Add { x: X, y: P },
        ]
    }

    #[test]
    fn a_feed_forward_is_three_steps() {
        let ops = feed_forward();
        let fused = fuse(&ops, |_, _| true);
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
                Fused::SwiGlu {
                    input: norm,
                    gate: &product(2, G),
                    up: &product(3, U),
                },
                Fused::Products {
                    input: Input::Plain(G),
                    products: &[product(4, P)],
                    add: Some(X),
                },
            ]
        );
        let fused = fuse(&ops, |_, _| false);
        assert_eq!(fused.len(), 3);
        assert!(matches!(
            fused[2],
            Fused::Products {
                input: Input::Silu { gate: G, up: U },
                add: Some(X),
                ..
            }
        ));
    }

    #[test]
    fn what_is_read_later_is_written() {
        let mut ops = feed_forward();
        ops.push(Op::Add { x: X, y: N });
        let fused = fuse(&ops, |_, _| true);
        let normed = Fused::Single(&ops[2]);
        assert!(fused.contains(&normed), "{fused:?}");
        ops.push(Op::Add { x: X, y: P });
        let fused = fuse(&ops, |_, _| true);
        let stored = |f: &Fused<'_>| matches!(f, Fused::Products { add: None, products, .. } if products[0].weight == 4);
        assert!(fused.iter().any(stored), "{fused:?}");
    }

    #[test]
    fn a_sum_is_not_written_while_its_product_reads_it() {
        let product_of = |x| Op::MatMul {
            x,
            products: vec![product(0, P)],
        };
        let add = Op::Add { x: X, y: P };
        let norm = Op::RmsNorm {
            x: X,
            weight: 1,
            eps: 1e-5,
            out: N,
        };
        for ops in [
            vec![product_of(X), add.clone()],
            vec![norm, product_of(N), add.clone()],
        ] {
            let fused = fuse(&ops, |_, _| true);
            assert_eq!(fused.last(), Some(&Fused::Single(&add)), "{fused:?}");
        }
    }
}
