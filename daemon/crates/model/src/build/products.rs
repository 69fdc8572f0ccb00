//! Products of matrices, with biases, and with the factor that some files keep beside a matrix.
//!
//! Files of NVFP4 weights have a tensor of one f32 for each matrix, `{name}.scale`: `out = (W x) *
//! scale`. It is an operation behind the product, since a plan is made without a tensor's content.

use rocmforge_ops::{Buf, Op, Product, Role, TensorIndex};

use super::{Found, PlanBuilder, Presence};
use crate::error::Error;

impl PlanBuilder<'_> {
    /// A product of `{name}.weight` `[cols, rows]` with `{name}.bias` and `{name}.scale`.
    pub(crate) fn linear(
        &mut self,
        name: &str,
        cols: u64,
        rows: u64,
        bias: Presence,
        out: Buf,
    ) -> Result<Product, Error> {
        let matrix = format!("{name}.weight");
        let found = self.tensor(&matrix, &[cols, rows])?;
        let weight = self.place(&found, Role::Matrix);
        self.scaled(&matrix, out)?;
        self.adapt(&matrix, 0, rows, out);
        let bias = self.bias_if(&format!("{name}.bias"), out, bias)?;
        Ok(Product { weight, bias, out })
    }

    /// A product of rows of a matrix, without a bias, with the matrix's scale.
    pub(crate) fn rows_of(
        &mut self,
        matrix: &Found,
        first: u64,
        rows: u64,
        out: Buf,
    ) -> Result<Product, Error> {
        let weight = self.place(&matrix.slice(first, rows), Role::Matrix);
        self.scaled(&matrix.0.name, out)?;
        self.adapt(&matrix.0.name, first, rows, out);
        Ok(Product {
            weight,
            bias: None,
            out,
        })
    }

    /// Notes the factor of a matrix, if the file has one, for the product into `out`. A tensor of
    /// this name with more elements is something else, such as the weights of the norm before Gemma
    /// 4's router.
    pub(super) fn scaled(&mut self, matrix: &str, out: Buf) -> Result<(), Error> {
        let name = format!("{}scale", matrix.strip_suffix("weight").unwrap_or(matrix));
        let is_factor = self.gguf().tensor(&name).is_some_and(|t| t.elements() == 1);
        if is_factor && let Some(found) = self.tensor_if(&name, &[1])? {
            let scale = self.place(&found, Role::Vector);
            self.scales.push((out, scale));
        }
        Ok(())
    }

    /// A bias of the product into `out`.
    pub(super) fn bias_if(
        &mut self,
        name: &str,
        out: Buf,
        presence: Presence,
    ) -> Result<Option<TensorIndex>, Error> {
        let bias = self.vector_if(name, self.width(out), presence)?;
        self.refuse_scaled_bias(name, out, bias.is_some())?;
        Ok(bias)
    }

    /// The product adds its bias itself, and the factor is applied behind it: it would multiply the
    /// bias, too.
    pub(super) fn refuse_scaled_bias(
        &self,
        name: &str,
        out: Buf,
        biased: bool,
    ) -> Result<(), Error> {
        if biased && self.scales.iter().any(|(scaled, _)| *scaled == out) {
            return Err(Error::Unsupported(format!(
                "the matrix of '{name}' has both a bias and a scale, which is not supported; use a file of another \
                 quantization"
            )));
        }
        Ok(())
    }

    /// Emits the product of `x` with one matrix alone; `out`.
    pub(crate) fn product(
        &mut self,
        name: &str,
        x: Buf,
        bias: Presence,
        out: Buf,
    ) -> Result<Buf, Error> {
        let product = self.linear(name, self.width(x), self.width(out), bias, out)?;
        self.mat_mul(x, vec![product]);
        Ok(out)
    }

    /// Emits products of one input, the factors on them, and what adapters add to them.
    pub(crate) fn mat_mul(&mut self, x: Buf, products: Vec<Product>) {
        let outs: Vec<Buf> = products.iter().map(|p| p.out).collect();
        self.op(Op::MatMul { x, products });
        let ours = self.scales.extract_if(.., |(out, _)| outs.contains(out));
        for (x, weight) in ours.collect::<Vec<_>>() {
            self.op(Op::ScaleBy { x, weight });
        }
        self.add_deltas(x, &outs);
    }
}
