//! Operations that follow each other, put together where a kernel does them at once.
//!
//! ```text
//! RmsNorm, MatMul                    -> product with the norm on its input
//! MatMul, Add                        -> product added to the residual stream
//! MatMul (gate, up), Gate            -> product with SwiGLU, or SwiGLU on the next product's
//!                                       input, of this step or the next
//! RopeKv, Attention                  -> attention that rotates and appends
//! Combine, Add                       -> routed rows summed on top of the residual stream
//! product, AddAdapters               -> product whose rows adapters take over, then these; what is
//!                                       added to or gated by a product, behind them
//! ```
//!
//! A buffer between two fused operations is not written. That is seen by nobody: no later operation
//! of the step reads it, and it is not among those that the plan says are read by later steps
//! (`live_out`). A plan keeps the memory of buffers apart for
//! [`FUSED_OPS_MAX`](rocmforge_ops::plan::FUSED_OPS_MAX) operations, so no more than these become
//! one; but for a fourth that adds to, or gates, what adapters have added to. What that changes is
//! alive before the product, or is the product's own.

use rocmforge_device::ops::{
    Act, Buf, HeadShape, KvLayer, Mask, Op, Product, RopeUse, TensorIndex,
};

/// How attention makes its scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ScoresOf {
    pub(super) scale: f32,
    pub(super) mask: Mask,
    pub(super) softcap: f32,
    pub(super) sinks: Option<TensorIndex>,
    pub(super) alibi: f32,
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
    /// Products of one input, and what the operation adds to them. With `add`, the one product and
    /// what is added to it are added to that buffer. With `gate`, two products of one row become
    /// `act(first) * second`, which goes to the first one's buffer.
    Adapted {
        input: Input,
        products: &'a [Product],
        add: Option<Buf>,
        gate: Option<Act>,
        adapters: &'a Op,
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

/// What adds to products of these rows, directly behind them.
fn adapters_of(rows: Buf, behind: &[Op]) -> Option<&Op> {
    let first = behind.first()?;
    matches!(first, Op::AddAdapters { x, .. } if *x == rows).then_some(first)
}

/// Whether adapters add to nothing but these buffers.
fn writes_only(adapters: &Op, bufs: &[Buf]) -> bool {
    let mut only = true;
    adapters.buffers(&mut |_| {}, &mut |b| only &= bufs.contains(&b));
    only
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
        rest: &'a [Op],
        gated_unit: impl Fn(&Product, &Product) -> bool,
    ) -> (Fused<'a>, usize) {
        let is_out = products.iter().any(|p| p.out == input.target());
        if let Some(adapters) = adapters_of(input.target(), rest)
            && !is_out
        {
            return self.of_adapted(input, products, adapters, rest, gated_unit);
        }
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

    /// Products and what adapters add to them, with what is done to the sum.
    fn of_adapted<'a>(
        &self,
        input: Input,
        products: &'a [Product],
        adapters: &'a Op,
        rest: &[Op],
        gated_unit: impl Fn(&Product, &Product) -> bool,
    ) -> (Fused<'a>, usize) {
        let adapted = |add, gate| Fused::Adapted {
            input,
            products,
            add,
            gate,
            adapters,
        };
        match (products, rest.get(1)) {
            (
                [gate, up],
                Some(Op::Gate {
                    gate: g,
                    up: u,
                    act,
                }),
            ) if (gate.out, up.out) == (*g, *u)
                && writes_only(adapters, &[*g, *u])
                && !self.reads(*u, &rest[2..])
                && gated_unit(gate, up) =>
            {
                (adapted(None, Some(*act)), 2)
            }
            ([one], Some(Op::Add { x, y, scale }))
                if one.out == *y
                    && *scale == 1.0
                    && writes_only(adapters, &[*y])
                    && !adapters.reads(*x)
                    && !input.is_made_of(*x)
                    && !self.reads(*y, &rest[2..]) =>
            {
                (adapted(Some(*x), None), 2)
            }
            _ => (adapted(None, None), 1),
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
            alibi,
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
                alibi: *alibi,
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
                // Adapters take the rows over as the product does.
                let taken = 1 + usize::from(adapters_of(buf, &rest[1..]).is_some());
                let is_out = products.iter().any(|p| p.out == buf);
                *x == buf && (is_out || !self.reads(buf, &rest[taken..]))
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
mod tests;
