//! Emits what LoRA adapters add to products.
//!
//! Tensors of adapters lie in the segment of the matrix that they are for, in the plan with
//! adapters and in the one without: both run on the same segments. The operations are in the first
//! alone, so that a pass in which no row has an adapter costs nothing more.
//!
//! ```text
//!   out = W x;  out += B (scales * (A x))
//! ```

use std::collections::HashSet;

use rocmforge_ops::{
    ADAPTED_INPUTS_MAX, Adapted, Buf, InputRows, Op, Role, Rows, TensorDesc, TensorIndex,
};

use super::PlanBuilder;
use crate::adapter::AdapterSet;

/// State of a model's adapters while its plan is built.
pub(crate) struct Adapting<'a> {
    set: &'a AdapterSet,
    /// Whether the plan is the one for passes with adapters.
    applies: bool,
    /// Matrices with adapters whose products were found.
    used: HashSet<String>,
    /// Input with each row's scales of adapters.
    scales: Option<Buf>,
    /// Adapter terms of products that have not been emitted yet.
    pending: Vec<Adapted>,
}

impl<'a> Adapting<'a> {
    pub(crate) fn new(set: &'a AdapterSet, applies: bool) -> Self {
        Self {
            set,
            applies,
            used: HashSet::new(),
            scales: None,
            pending: Vec::new(),
        }
    }

    /// Whether a product uses the adapters' matrices for this matrix.
    pub(crate) fn is_used(&self, matrix: &str) -> bool {
        self.used.contains(matrix)
    }
}

impl PlanBuilder<'_> {
    /// Records the adapters' term for the product of rows of a matrix into `out`.
    pub(super) fn adapt(&mut self, matrix: &str, first: u64, rows: u64, out: Buf) {
        let kind = self.bufs[usize::from(out.0)].rows;
        let Some(adapting) = &mut self.adapting else {
            return;
        };
        let Some(of) = adapting.set.matrices.get(matrix) else {
            return;
        };
        if !matches!(kind, Rows::Tokens | Rows::Outputs) {
            return;
        }
        adapting.used.insert(matrix.to_owned());
        // Products of parts of one matrix have `A` in common.
        let a = self.place_once(&of.a);
        let b = self.place_once(&of.b.slice(first, rows));
        if let Some(adapting) = &mut self.adapting {
            adapting.pending.push(Adapted { a, b, out });
        }
    }

    fn place_once(&mut self, tensor: &TensorDesc) -> TensorIndex {
        let open = self.open.as_mut().expect("a segment was begun");
        let tensor = TensorDesc {
            role: Role::Matrix,
            ..tensor.clone()
        };
        let there = open.tensors.iter().position(|t| *t == tensor);
        there.unwrap_or_else(|| {
            open.tensors.push(tensor);
            open.tensors.len() - 1
        })
    }

    /// Emits the adapters' terms for the products of `x` into these buffers.
    pub(super) fn add_deltas(&mut self, x: Buf, outs: &[Buf]) {
        let Some(adapting) = &mut self.adapting else {
            return;
        };
        let ours = adapting.pending.extract_if(.., |d| outs.contains(&d.out));
        let mut deltas: Vec<Adapted> = ours.collect();
        if !adapting.applies || deltas.is_empty() {
            return;
        }
        let width = adapting.set.width;
        let kind = self.bufs[usize::from(deltas[0].out.0)].rows;
        let scales = self.row_scales(width, kind);
        // Products with one first matrix follow each other.
        deltas.sort_by_key(|delta| delta.a);
        let groups: Vec<&[Adapted]> = deltas.chunk_by(|a, b| a.a == b.a).collect();
        for groups in groups.chunks(ADAPTED_INPUTS_MAX) {
            let low = self.buf_rows("lora_low", groups.len() as u64 * width, kind);
            self.op(Op::AddAdapters {
                x,
                scales,
                low,
                products: groups.concat(),
            });
        }
    }

    /// The scales of a pass's rows, or of its output rows only.
    fn row_scales(&mut self, width: u64, kind: Rows) -> Buf {
        let known = self.adapting.as_ref().and_then(|adapting| adapting.scales);
        let scales = known.unwrap_or_else(|| {
            let buf = self.given("lora_scales", width, InputRows::AdapterScales);
            self.stream.push(buf);
            // It was alive behind the steps before, too.
            self.carried.iter_mut().for_each(|step| step.push(buf));
            buf
        });
        if let Some(adapting) = &mut self.adapting {
            adapting.scales = Some(scales);
        }
        match kind {
            Rows::Outputs => {
                let out = self.buf_rows("lora_out_scales", width, Rows::Outputs);
                self.op(Op::GatherOutputs { x: scales, out });
                out
            }
            _ => scales,
        }
    }
}
