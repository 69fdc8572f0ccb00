//! Operations that follow each other, put together where a kernel does them at once.
//!
//! ```text
//! RmsNorm, MatMul                    -> product with the norm on its input
//! MatMul, Add                        -> product added to the residual stream
//! MatMul (gate, up), Gate            -> product with SwiGLU, or SwiGLU on the next product's
//!                                       input, of this step or the next
//! RopeKv, Attention                  -> attention that rotates and appends
//! Combine, Add                       -> routed rows summed on top of the residual stream
//! ```
//!
//! A buffer between two fused operations is not written. That is seen by nobody: no later operation
//! of the step reads it, and it is not among those that the plan says are read by later steps
//! (`live_out`). A plan keeps the memory of buffers apart for
//! [`FUSED_OPS_MAX`](rocmforge_ops::plan::FUSED_OPS_MAX) operations, so no more than these become
//! one.

use crate::ops::{Act, Buf, HeadShape, KvLayer, Mask, Op, Product, RopeUse, TensorIndex};

/// How attention makes its scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ScoresOf {
    pub(super) scale: f32,
    pub(super) mask: Mask,
    pub(super) softcap: f32,
    pub(super) sinks: Option<TensorIndex>,
}

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
    /// `act(gate) * up`, meant for `gate`.
    Gated { gate: Buf, up: Buf, act: Act },
}

impl Input {
    /// Whether it is computed of this buffer.
    pub(super) fn is_made_of(self, buf: Buf) -> bool {
        match self {
            Input::Plain(x) | Input::Norm { x, .. } => x == buf,
            Input::Gated { gate, up, .. } => gate == buf || up == buf,
        }
    }

    /// The buffer whose rows it is computed of.
    pub(super) fn reads(self) -> Buf {
        match self {
            Input::Plain(x) | Input::Norm { x, .. } => x,
            Input::Gated { gate, .. } => gate,
        }
    }

    /// The buffer that the product was to read.
    pub(super) fn target(self) -> Buf {
        match self {
            Input::Plain(x) => x,
            Input::Norm { to, .. } => to,
            Input::Gated { gate, .. } => gate,
        }
    }
}

/// Operations fused into one step.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fused<'a> {
    /// Products of one input. With `add`, the one product is added to that
    /// buffer instead of stored.
    Products {
        input: Input,
        products: &'a [Product],
        add: Option<Buf>,
    },
    /// Gate and up products of one input; `act(gate) * up` goes to the gate's buffer.
    GatedUnit {
        input: Input,
        gate: &'a Product,
        up: &'a Product,
        act: Act,
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
        rope: Option<RopeUse>,
        layer: KvLayer,
        scores: ScoresOf,
    },
    /// Routed rows summed by their weights and added to `x`.
    Combined { y: Buf, weights: Buf, x: Buf },
    /// One operation as it is.
    Single(&'a Op),
}

/// Fuses a step's operations. `live_out` are the buffers that later steps read; `width` tells a
/// buffer's; `gated_unit` whether two products can be one launch with their gated unit.
pub(super) fn fuse<'a>(
    ops: &'a [Op],
    live_out: &[Buf],
    width: impl Fn(Buf) -> u64,
    gated_unit: impl Fn(&Product, &Product) -> bool,
) -> Vec<Fused<'a>> {
    let later = Later { live_out };
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
                weight: Some(weight),
                eps,
                group,
                out,
            } if x != out && u64::from(*group) == width(*x) && later.feeds_next(*out, rest) => {
                input = Some(Input::Norm {
                    x: *x,
                    weight: *weight,
                    eps: *eps,
                    to: *out,
                });
            }
            Op::Gate { gate, up, act }
                if later.feeds_next(*gate, rest) && !later.reads(*up, rest) =>
            {
                input = Some(Input::Gated {
                    gate: *gate,
                    up: *up,
                    act: *act,
                });
            }
            Op::MatMul { x, products } => {
                let taken = input.take().unwrap_or(Input::Plain(*x));
                let (one, n) = later.of_products(taken, products, rest, &gated_unit);
                fused.push(one);
                at += n;
            }
            _ => {
                let more = later.of_attention(op, rest);
                let more = more.or_else(|| later.of_combined(op, rest));
                at += usize::from(more.is_some());
                fused.push(more.unwrap_or(Fused::Single(op)));
            }
        }
    }
    fused
}

/// What is read after some operations.
struct Later<'a> {
    live_out: &'a [Buf],
}

impl Later<'_> {
    /// Products of one input, and how many of the operations behind go with them.
    fn of_products<'a>(
        &self,
        input: Input,
        products: &'a [Product],
        rest: &[Op],
        gated_unit: impl Fn(&Product, &Product) -> bool,
    ) -> (Fused<'a>, usize) {
        match (products, rest.first()) {
            (
                [gate, up],
                Some(Op::Gate {
                    gate: g,
                    up: u,
                    act,
                }),
            ) if (gate.out, up.out) == (*g, *u)
                && !self.reads(*u, &rest[1..])
                && gated_unit(gate, up) =>
            {
                let act = *act;
                let unit = Fused::GatedUnit {
                    input,
                    gate,
                    up,
                    act,
                };
                (unit, 1)
            }
            // Blocks that add would change what others still read.
            ([one], Some(Op::Add { x, y, scale }))
                if one.out == *y
                    && *scale == 1.0
                    && !input.is_made_of(*x)
                    && !self.reads(*y, &rest[1..]) =>
            {
                let add = Some(*x);
                let summed = Fused::Products {
                    input,
                    products,
                    add,
                };
                (summed, 1)
            }
            _ => {
                let add = None;
                let plain = Fused::Products {
                    input,
                    products,
                    add,
                };
                (plain, 0)
            }
        }
    }

    /// Rotations and the store into the KV cache with the attention behind them, where both are of
    /// the same layer and nothing else reads what they make.
    fn of_attention<'a>(&self, op: &Op, rest: &[Op]) -> Option<Fused<'a>> {
        let Op::RopeKv {
            q,
            k,
            v,
            heads,
            q_norm,
            k_norm,
            rope,
            layer,
        } = op
        else {
            return None;
        };
        let Some(Op::Attention {
            q: attended,
            out,
            heads: same_heads,
            layer: same_layer,
            scale,
            mask,
            softcap,
            sinks,
        }) = rest.first()
        else {
            return None;
        };
        let is_one = attended == q
            && same_layer == layer
            && same_heads == heads
            && ![*q, *k, *v].iter().any(|b| self.reads(*b, &rest[1..]));
        is_one.then_some(Fused::Attention {
            q: *q,
            k: *k,
            v: *v,
            out: *out,
            heads: *heads,
            q_norm: *q_norm,
            k_norm: *k_norm,
            rope: *rope,
            layer: *layer,
            scores: ScoresOf {
                scale: *scale,
                mask: *mask,
                softcap: *softcap,
                sinks: *sinks,
            },
        })
    }

    /// The sum of experts' rows with the addition behind it.
    fn of_combined<'a>(&self, op: &Op, rest: &[Op]) -> Option<Fused<'a>> {
        let (Op::Combine { y, weights, out }, Some(Op::Add { x, y: sum, scale })) =
            (op, rest.first())
        else {
            return None;
        };
        let is_one = sum == out
            && *scale == 1.0
            && ![*y, *weights, *out].contains(x)
            && !self.reads(*out, &rest[1..]);
        is_one.then_some(Fused::Combined {
            y: *y,
            weights: *weights,
            x: *x,
        })
    }

    /// Whether the next operation is a product of `buf` and nothing after it reads `buf`.
    fn feeds_next(&self, buf: Buf, rest: &[Op]) -> bool {
        match rest.first() {
            Some(Op::MatMul { x, products }) => {
                *x == buf && (products.iter().any(|p| p.out == buf) || !self.reads(buf, &rest[1..]))
            }
            _ => false,
        }
    }

    /// Whether an operation, or a later step, reads the buffer before one writes all of it.
    fn reads(&self, buf: Buf, ops: &[Op]) -> bool {
        for op in ops {
            if op.reads(buf) {
                return true;
            }
            if op.writes(buf) {
                return false;
            }
        }
        self.live_out.contains(&buf)
    }
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
}
