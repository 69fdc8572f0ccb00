//! What adapters (LoRA) add to products: two launches for all products of one input, or for many
//! rows the vendor's library.
//!
//! The kernels read the rows in the form that the products before them were given: as f16 in either
//! order, or f32 with the norm still to do. They read only the ranks that rows have scales for, and
//! the library all of them, but by matrix instructions.

use rocmforge_device::SegmentBinding;
use rocmforge_device::ops::{Act, Adapted, Buf, Op, Product, Rows as BufRows, TensorIndex};
use rocmforge_kernels_gpu::ops::activations::{self, Sink, Transform};
use rocmforge_kernels_gpu::ops::adapters::{self, Low, Rows, Scales, Second};
use rocmforge_kernels_gpu::ops::matmat::{HalfInputs, HalfLayout};
use rocmforge_kernels_gpu::ops::matvec::Matrix;

use super::super::fuse::Input;
use super::tiled::Halves;
use super::{Lowered, Lowering};

/// Rows times the width of adapters up to which the kernels do them: 512 rows at 8 adapters of
/// rank 16.
///
/// By counting, for Llama-8B and a prompt's rows, all of one such adapter: the kernels' 16 ranks
/// are 2.6 MFLOP a row and layer in f32, 40 us for 512 rows on an H200; the library's 128 are 8
/// times as much in f16 and some 50 launches a layer, 150 us. More rows or more ranks are worth the
/// library's launches.
const DIRECT_MAX: u64 = 64 << 10;

/// The fields of an [`Op::AddAdapters`], and where its products are added.
#[derive(Clone, Copy)]
struct Adapters<'a> {
    x: Buf,
    scales: Buf,
    low: Buf,
    products: &'a [Adapted],
    /// What they are all added to in place of their own buffers.
    add: Option<Buf>,
}

impl<'a> Adapters<'a> {
    fn of(op: &'a Op, add: Option<Buf>) -> Self {
        let Op::AddAdapters {
            x,
            scales,
            low,
            products,
        } = op
        else {
            unreachable!("{} has no adapters", op.name());
        };
        Self {
            x: *x,
            scales: *scales,
            low: *low,
            products,
            add,
        }
    }

    /// The products by their first matrices.
    fn groups(self) -> impl Iterator<Item = &'a [Adapted]> {
        self.products.chunk_by(|a, b| a.a == b.a)
    }
}

impl Lowering<'_> {
    /// Products of one input with what adapters add to them. With `add`, the one product is added
    /// to that buffer; with `gate`, of two products of one row the gated unit is made.
    pub(super) fn adapted(
        &mut self,
        (input, products): (Input, &[Product]),
        (add, gate): (Option<Buf>, Option<Act>),
        op: &Op,
        bound: SegmentBinding<'_>,
    ) -> Lowered {
        let adapters = Adapters::of(op, add);
        let input = self.with_handed_on(input);
        let by_library = self.is_by_library(adapters);
        // The kernels read f16 eight at a time.
        if by_library || !self.width(adapters.x).is_multiple_of(8) {
            assert!(gate.is_none(), "a gated unit is of one row");
            self.stored(input, bound)?;
            self.products(Input::Plain(input.target()), products, add, false, bound)?;
            return match by_library {
                true => self.adapters_by_library(adapters, bound),
                false => self.add_adapters(self.plain_rows(adapters.x), adapters, None, bound),
            };
        }
        let rows = self.products(input, products, add, true, bound)?;
        let unit = gate.map(|act| (act, products));
        self.add_adapters(rows, adapters, unit, bound)
    }

    /// What adapters add to products that were made before.
    pub(super) fn adapters_alone(&mut self, op: &Op, bound: SegmentBinding<'_>) -> Lowered {
        let adapters = Adapters::of(op, None);
        match self.is_by_library(adapters) {
            true => self.adapters_by_library(adapters, bound),
            false => self.add_adapters(self.plain_rows(adapters.x), adapters, None, bound),
        }
    }

    fn plain_rows(&self, x: Buf) -> Rows {
        Rows::Floats {
            x: self.at(x),
            norm: None,
        }
    }

    fn is_by_library(&self, adapters: Adapters<'_>) -> bool {
        let elements = self.count(adapters.scales) * self.width(adapters.scales);
        elements > DIRECT_MAX && self.vendor && self.workspace.tile_bytes > 0
    }

    fn scales_of(&self, adapters: Adapters<'_>) -> Scales {
        Scales {
            at: self.at(adapters.scales),
            width: self.width(adapters.scales),
            n_tokens: self.count(adapters.scales),
            // Those of tokens are the pass's own data; others were gathered from them.
            early: self.buf(adapters.scales).rows == BufRows::Tokens,
        }
    }

    /// Two launches for all products of one input. A gated unit is of `unit`'s two products.
    fn add_adapters(
        &mut self,
        rows: Rows,
        adapters: Adapters<'_>,
        unit: Option<(Act, &[Product])>,
        bound: SegmentBinding<'_>,
    ) -> Lowered {
        let scales = self.scales_of(adapters);
        if scales.n_tokens == 0 {
            return Ok(());
        }
        let cols = self.width(adapters.x);
        let firsts: Vec<u64> = adapters
            .groups()
            .map(|group| self.vector(group[0].a, bound))
            .collect();
        let ty = bound.layout.tensors[adapters.products[0].a].desc.ty;
        let parts = adapters::parts(ty, cols, rows);
        let low = self.low(adapters, firsts.len() as u64, parts);
        self.push(adapters::down(ty, rows, cols, &firsts, scales, low))?;
        let groups = (0..).zip(adapters.groups());
        let seconds: Vec<(Buf, Second)> = groups
            .flat_map(|(low, group)| group.iter().map(move |product| (low, product)))
            .map(|(low, product)| {
                let second = Second {
                    weights: Some(self.vector(product.b, bound)),
                    out: self.at(adapters.add.unwrap_or(product.out)),
                    rows: self.rows_of(product.b, bound),
                    low,
                };
                (product.out, second)
            })
            .collect();
        if let Some((act, products)) = unit {
            let pair = products.iter().map(|product| {
                let adapted = seconds.iter().find(|(out, _)| *out == product.out);
                adapted.map_or_else(
                    || Second {
                        weights: None,
                        out: self.at(product.out),
                        rows: self.rows_of(product.weight, bound),
                        low: 0,
                    },
                    |(_, second)| *second,
                )
            });
            let pair: Vec<Second> = pair.collect();
            return self.push(adapters::up(ty, scales, low, &pair, Some(act)));
        }
        let seconds: Vec<Second> = seconds.into_iter().map(|(_, second)| second).collect();
        for some in seconds.chunks(adapters::MATRICES_MAX) {
            self.push(adapters::up(ty, scales, low, some, None))?;
        }
        Ok(())
    }

    /// Where the sums of `parts` parts of the columns go, or of one if there is no room for more.
    fn low(&self, adapters: Adapters<'_>, n: u64, parts: u64) -> Low {
        let bytes = Low::bytes(n, parts, self.scales_of(adapters));
        match parts > 1 && bytes <= self.workspace.partials_bytes {
            true => Low {
                at: self.scratch_base + self.workspace.partials,
                n,
                parts,
            },
            false => Low {
                at: self.at(adapters.low),
                n,
                parts: 1,
            },
        }
    }

    fn rows_of(&self, tensor: TensorIndex, bound: SegmentBinding<'_>) -> u64 {
        bound.layout.tensors[tensor].desc.rows
    }

    /// Products of all ranks by the vendor's library, of rows that lie as f32 in their buffer.
    fn adapters_by_library(
        &mut self,
        adapters: Adapters<'_>,
        bound: SegmentBinding<'_>,
    ) -> Lowered {
        let Scales {
            at: scales,
            width,
            n_tokens,
            ..
        } = self.scales_of(adapters);
        let low = self.at(adapters.low);
        // One first matrix's results behind the other's.
        let low_of = |i: u64| low + i * n_tokens * width * 4;
        let matrix = |tensor: TensorIndex, out: u64| Matrix {
            ty: bound.layout.tensors[tensor].desc.ty,
            weights: self.vector(tensor, bound),
            rows: self.rows_of(tensor, bound),
            out,
            bias: None,
        };
        let groups = (0..).zip(adapters.groups());
        let firsts: Vec<Matrix> = (0..)
            .zip(adapters.groups())
            .map(|(i, group)| matrix(group[0].a, low_of(i)))
            .collect();
        let seconds: Vec<Vec<Matrix>> = adapters
            .groups()
            .map(|group| {
                let to = |p: &Adapted| self.at(adapters.add.unwrap_or(p.out));
                group.iter().map(|p| matrix(p.b, to(p))).collect()
            })
            .collect();
        let halves = self.halves(Input::Plain(adapters.x), bound)?;
        self.tiled(halves, &firsts, false)?;
        for ((i, _), seconds) in groups.zip(seconds) {
            let halves = self.scaled_halves((low_of(i), scales), width, n_tokens)?;
            self.tiled(halves, &seconds, true)?;
        }
        Ok(())
    }

    /// Rows times their scales, as the library reads them.
    fn scaled_halves(
        &mut self,
        (rows, scales): (u64, u64),
        width: u64,
        n_tokens: u64,
    ) -> Lowered<Halves> {
        let first = HalfInputs {
            x: self.scratch_base + self.workspace.input,
            layout: HalfLayout::Rows,
            cols: width,
            n_tokens,
            factor: 1.0 / activations::GATED_F16_SCALE,
        };
        let transform = Transform::Gate {
            other: Some(scales),
            act: Act::Identity,
        };
        let second = self.scratch.layout.float_weights.then(|| {
            first.x + (n_tokens * width * 2).next_multiple_of(rocmforge_device::ALIGNMENT)
        });
        let sink = second.map_or(Sink::F16(first.x), |second| Sink::F16Pair(first.x, second));
        self.push(activations::activations(
            rows, n_tokens, width, transform, sink,
        ))?;
        Ok(Halves { first, second })
    }
}
