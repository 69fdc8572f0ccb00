//! The output head: the rows whose logits are wanted, their norm, and the product
//! with the vocabulary's matrix.

use rocmforge_ops::{Buf, Op, Product, Role, Rows};

use super::{PlanBuilder, Presence};
use crate::error::Error;

impl PlanBuilder<'_> {
    /// Names the norm of the output head where it is not `output_norm.weight`.
    pub(crate) fn head_norm_name(&mut self, name: &'static str) {
        self.output_norm = name;
    }

    /// The output head: norm, product, and what is done to the logits.
    pub(crate) fn head(
        &mut self,
        x: Buf,
        bias: Presence,
        scale: Option<f32>,
        softcap: Option<f32>,
    ) -> Result<(), Error> {
        self.cut("output".to_owned(), &[]);
        let logits = self.head_of(x, self.output_norm, "output.weight", bias)?;
        if let Some(factor) = scale.filter(|&f| f != 1.0) {
            self.op(Op::Scale { x: logits, factor });
        }
        if let Some(cap) = softcap.filter(|&c| c != 0.0) {
            self.op(Op::SoftCap { x: logits, cap });
        }
        self.close(&[]);
        Ok(())
    }

    /// Norm and product of an output head, in a segment that was begun for it.
    pub(crate) fn head_of(
        &mut self,
        x: Buf,
        norm: &str,
        matrix: &str,
        bias: Presence,
    ) -> Result<Buf, Error> {
        let (n_embd, n_vocab) = (self.n_embd, self.n_vocab);
        self.head_step = Some(self.steps.len());
        let o = self.buf_rows("o", n_embd, Rows::Outputs);
        self.op(Op::GatherOutputs { x, out: o });
        let on = self.norm(o, norm, "on")?;
        let logits = self.buf_rows("logits", n_vocab, Rows::Outputs);
        // Without a matrix of its own the head uses the embedding's (tied).
        let found = match self.tensor_if(matrix, &[n_embd, n_vocab])? {
            Some(found) => found,
            None => self.tensor("token_embd.weight", &[n_embd, n_vocab])?,
        };
        let weight = self.place(&found, Role::Matrix);
        self.scaled(matrix, logits)?;
        let bias = self.bias_if("output.bias", logits, bias)?;
        let out = logits;
        self.mat_mul(on, vec![Product { weight, bias, out }]);
        Ok(logits)
    }
}
