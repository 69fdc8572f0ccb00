//! The output head: the rows whose logits are wanted, their norm, and the product
//! with the vocabulary's matrix.

use rocmforge_ops::{Act, Buf, Op, Product, Role, Rows};

use super::{PlanBuilder, Presence};
use crate::error::Error;

/// Activation behind the first product of a classification head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClassAct {
    /// `tanh(x)`.
    Tanh,
    /// [`Act::GeluErf`].
    GeluErf,
}

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
        if self.both_ways {
            // Such a model generates nothing.
            self.leave_alone(|name| name.starts_with("output."));
            return self.encoder_end(x, ClassAct::Tanh);
        }
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

    /// The norm behind the last layer, and an encoder's head.
    pub(crate) fn encoder_end(&mut self, x: Buf, act: ClassAct) -> Result<(), Error> {
        self.cut("output_norm".to_owned(), &[]);
        let n = self.norm(x, self.output_norm, "n")?;
        self.encoder_head(n, act)
    }

    /// An encoder's head: of each text the row, or the mean of rows, that stands for it; then dense
    /// layers where the file has some, whose outputs are the embedding; and the classification
    /// where the file has one.
    pub(crate) fn encoder_head(&mut self, x: Buf, act: ClassAct) -> Result<(), Error> {
        self.cut("head".to_owned(), &[x]);
        self.head_step = Some(self.steps.len());
        let mut on = self.buf_rows("on", self.n_embd, Rows::Outputs);
        self.op(Op::GatherOutputs { x, out: on });
        for (name, buf) in [("dense_2", "dense_2"), ("dense_3", "dense_3")] {
            if let Some(rows) = self.rows_in_file(&format!("{name}.weight")) {
                on = self.class_product(on, name, rows, buf)?;
            }
        }
        let mut classes = on;
        if let Some(rows) = self.rows_in_file("cls.weight") {
            classes = self.class_product(classes, "cls", rows, "cls")?;
            match act {
                ClassAct::Tanh => self.op(Op::SoftCap {
                    x: classes,
                    cap: 1.0,
                }),
                ClassAct::GeluErf => self.op(Op::Activate {
                    x: classes,
                    act: Act::GeluErf,
                }),
            }
            if self.has("cls.norm.weight") {
                classes = self.norm(classes, "cls.norm.weight", "cls")?;
            }
        }
        if let Some(rows) = self.rows_in_file("cls.output.weight") {
            classes = self.class_product(classes, "cls.output", rows, "classes")?;
        }
        self.ends = Some((on, classes));
        self.close(&[]);
        Ok(())
    }

    /// An end that gathers the rows that are wanted, and does nothing with them.
    pub(crate) fn gathered_end(&mut self, x: Buf) {
        let width = self.width(x);
        self.cut("head".to_owned(), &[x]);
        self.head_step = Some(self.steps.len());
        let on = self.buf_rows("on", width, Rows::Outputs);
        self.op(Op::GatherOutputs { x, out: on });
        self.ends = Some((on, on));
        self.close(&[]);
    }

    /// A product of output rows with its bias, if it has one.
    fn class_product(
        &mut self,
        x: Buf,
        name: &str,
        rows: u64,
        out: &'static str,
    ) -> Result<Buf, Error> {
        let out = self.buf_rows(out, rows, Rows::Outputs);
        self.product(name, x, Presence::Optional, out)
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
        if self.has(matrix) {
            self.adapt(matrix, 0, n_vocab, logits);
        }
        let bias = self.bias_if("output.bias", logits, bias)?;
        let out = logits;
        self.mat_mul(on, vec![Product { weight, bias, out }]);
        Ok(logits)
    }
}
