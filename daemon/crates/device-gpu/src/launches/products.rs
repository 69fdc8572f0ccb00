//! Products of one input: which kernels do them, and the form that they want the input in.

use rocmforge_device::SegmentBinding;
use rocmforge_device::ops::{Buf, Product};
use rocmforge_kernels_gpu::ops::activations::{self, Norm, Sink, Transform};
use rocmforge_kernels_gpu::ops::adapters::Rows;
use rocmforge_kernels_gpu::ops::matmat::{self, HalfInputs, HalfLayout, Inputs, PartsRoom};
use rocmforge_kernels_gpu::ops::matvec::{self, Epilogue, Matrix};

use super::super::fuse::Input;
use super::super::workspace::{is_recorded, library_rows};
use super::tiled::Halves;
use super::{Lowered, Lowering};

impl Lowering<'_> {
    /// Products of one input, and how its rows lie behind them, if they are `wanted` then.
    pub(super) fn products(
        &mut self,
        input: Input,
        products: &[Product],
        add: Option<Buf>,
        wanted: bool,
        bound: SegmentBinding<'_>,
    ) -> Lowered<Rows> {
        let mut input = self.with_handed_on(input);
        let x = input.reads();
        let (tokens, cols) = (self.count(x), self.width(x));
        let matrices = products
            .iter()
            .map(|p| self.matrix(p, bound, add))
            .collect::<Lowered<Vec<Matrix>>>()?;
        if tokens == 0 {
            return Ok(self.floats(input, bound));
        }
        if tokens == 1 && self.vector_fits(cols) {
            let fuses = matrices.iter().all(|m| matvec::fuses_norm(m.ty));
            let input = self.vector_input(input, fuses, bound)?;
            let epilogue = if add.is_some() {
                Epilogue::Add
            } else {
                Epilogue::Store
            };
            for some in matrices.chunks(matvec::MATRICES_MAX) {
                let launches = matvec::matvec(self.target, input, some, epilogue);
                self.push_all(launches)?;
            }
            let (x, norm) = (input.x, input.norm);
            return Ok(Rows::Floats { x, norm });
        }
        let quantized_only = matrices.iter().all(|m| m.ty.is_quantized());
        let by_columns =
            quantized_only && matmat::half_layout(self.target, cols, tokens) == HalfLayout::Columns;
        let layout = self.scratch.layout;
        let recorded = is_recorded(layout, self.batch.rows_of_a_sequence() <= 1);
        let few = library_rows(layout, self.target, recorded);
        // Of few rows a launch for all matrices reads the weights once; the library does a product
        // for each part of the rows.
        let by_instructions = matmat::takes_floats(self.target, &matrices, cols, tokens);
        let large = tokens >= few && !by_columns && !by_instructions;
        if large && self.vendor && self.workspace.tile_bytes > 0 {
            if wanted && self.scratch.layout.float_weights {
                input = self.stored_if_gated(input, bound)?;
            }
            let halves = self.halves(input, bound)?;
            self.tiled(halves, &matrices, add.is_some())?;
            return Ok(match halves.second {
                None => Rows::Halves(halves.first),
                Some(_) => self.floats(input, bound),
            });
        }
        let half = matmat::f16_from(self.target).is_some_and(|from| tokens >= from);
        if half && quantized_only {
            let half = self.half(input, bound)?;
            let (room, add) = (self.parts_room(), add.is_some());
            self.push_all(matmat::matmat_f16(self.target, half, &matrices, add, room))?;
            return Ok(Rows::Halves(half));
        }
        let quantized = matrices.iter().any(|m| m.ty.is_quantized());
        let floats = matrices.iter().any(|m| !m.ty.is_quantized());
        let bytes = self.scratch_base + self.workspace.input;
        let scales = (bytes + activations::q8_bytes(tokens, cols))
            .next_multiple_of(rocmforge_device::ALIGNMENT);
        let mut plain = self.at(x);
        if wanted {
            input = self.stored_if_gated(input, bound)?;
        }
        if floats {
            // Float kernels read f32: what is computed on the way in is stored
            // where it was meant to be.
            plain = self.stored(input, bound)?;
            input = Input::Plain(input.target());
        }
        if by_instructions {
            let shape = (cols, tokens);
            let add = add.is_some();
            let launches = matmat::matmat_floats(self.target, plain, shape, &matrices, add);
            self.push_all(launches)?;
            return Ok(self.floats(input, bound));
        }
        if quantized {
            self.prepare(input, Sink::Q8(bytes, scales), bound)?;
        }
        let inputs = Inputs {
            x: plain,
            q8: (bytes, scales),
            cols,
            n_tokens: tokens,
        };
        for matrix in &matrices {
            self.push(matmat::matmat(self.target, inputs, matrix, add.is_some()))?;
        }
        Ok(self.floats(input, bound))
    }

    /// A gated unit computed to its buffer, since nobody but products makes it on the way in.
    fn stored_if_gated(&mut self, input: Input, bound: SegmentBinding<'_>) -> Lowered<Input> {
        if matches!(input, Input::Gated { .. }) {
            self.stored(input, bound)?;
            return Ok(Input::Plain(input.target()));
        }
        Ok(input)
    }

    /// An input's rows as f32; a gated unit's were stored.
    fn floats(&self, input: Input, bound: SegmentBinding<'_>) -> Rows {
        match input {
            Input::Norm { x, weight, eps, .. } => Rows::Floats {
                x: self.at(x),
                norm: Some((self.vector(weight, bound), eps)),
            },
            other => Rows::Floats {
                x: self.at(other.target()),
                norm: None,
            },
        }
    }

    /// Where blocks leave what others add up.
    pub(super) fn parts_room(&self) -> PartsRoom {
        PartsRoom {
            partials: self.scratch_base + self.workspace.partials,
            bytes: self.workspace.partials_bytes,
            counters: self.reserve.counters,
            n_counters: self.reserve.counters_len,
        }
    }

    /// The input of a step's first product, with what the step before left to it.
    pub(super) fn with_handed_on(&mut self, input: Input) -> Input {
        match self.handed_on.take() {
            Some(gated) if input == Input::Plain(gated.target()) => gated,
            _ => input,
        }
    }

    /// An input as f16, for [`matmat::matmat_f16`].
    fn half(&mut self, input: Input, bound: SegmentBinding<'_>) -> Lowered<HalfInputs> {
        let mut half = self.half_at(input);
        half.layout = matmat::half_layout(self.target, half.cols, half.n_tokens);
        let sink = match half.layout {
            HalfLayout::Rows => Sink::F16(half.x),
            HalfLayout::Columns => Sink::F16Columns(half.x),
        };
        self.prepare(input, sink, bound)?;
        Ok(half)
    }

    /// An input as f16, and where the plan's weights are floats what that leaves of it.
    pub(super) fn halves(&mut self, input: Input, bound: SegmentBinding<'_>) -> Lowered<Halves> {
        if !self.scratch.layout.float_weights {
            let first = self.half_at(input);
            self.prepare(input, Sink::F16(first.x), bound)?;
            return Ok(Halves {
                first,
                second: None,
            });
        }
        let first = self.half_at(input);
        let bytes = (first.n_tokens * first.cols * 2).next_multiple_of(rocmforge_device::ALIGNMENT);
        let second = first.x + bytes;
        self.prepare(input, Sink::F16Pair(first.x, second), bound)?;
        Ok(Halves {
            first,
            second: Some(second),
        })
    }

    /// Where an input lies as f16, row by row.
    fn half_at(&self, input: Input) -> HalfInputs {
        let reads = input.reads();
        HalfInputs {
            x: self.scratch_base + self.workspace.input,
            layout: HalfLayout::Rows,
            cols: self.width(reads),
            n_tokens: self.count(reads),
            factor: match input {
                Input::Gated { .. } | Input::Plain(_) => 1.0 / activations::GATED_F16_SCALE,
                Input::Norm { .. } => 1.0,
            },
        }
    }

    /// The input of a mat-vec; with `fuses` a norm is left to it.
    pub(super) fn vector_input(
        &mut self,
        input: Input,
        fuses: bool,
        bound: SegmentBinding<'_>,
    ) -> Lowered<matvec::Input> {
        let cols = self.width(input.reads());
        let (x, norm) = match input {
            Input::Norm { x, weight, eps, .. } if fuses => {
                (self.at(x), Some((self.vector(weight, bound), eps)))
            }
            other => (self.stored(other, bound)?, None),
        };
        Ok(matvec::Input { x, cols, norm })
    }

    /// Computes an input to the buffer that it was meant for, as f32, and says where that is.
    pub(super) fn stored(&mut self, input: Input, bound: SegmentBinding<'_>) -> Lowered<u64> {
        let to = self.at(input.target());
        if !matches!(input, Input::Plain(_)) {
            self.prepare(input, Sink::F32(to), bound)?;
        }
        Ok(to)
    }

    fn prepare(&mut self, input: Input, sink: Sink, bound: SegmentBinding<'_>) -> Lowered {
        let transform = match input {
            Input::Plain(_) => Transform::Plain,
            Input::Norm { x, weight, eps, .. } => {
                Transform::Norm(Norm::of_row(self.vector(weight, bound), self.width(x), eps))
            }
            Input::Gated { up, act, .. } => Transform::Gate {
                other: Some(self.at(up)),
                act,
            },
        };
        self.rows_to(input.reads(), transform, sink)
    }

    pub(super) fn rows_to(&mut self, x: Buf, transform: Transform, sink: Sink) -> Lowered {
        let (at, rows, cols) = (self.at(x), self.count(x), self.width(x));
        self.push(activations::activations(at, rows, cols, transform, sink))
    }
}
