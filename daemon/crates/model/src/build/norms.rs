//! Norms of rows, and sums with the residual stream.

use rocmforge_ops::{Buf, Op, TensorIndex};

use super::{PlanBuilder, Presence};
use crate::error::Error;

/// How rows are normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormKind {
    /// RMS norm: by the root of the mean of squares.
    Rms,
    /// Layer norm: by mean and variance, with a bias.
    Layer {
        /// Whether the norm's bias is required, optional or absent.
        bias: Presence,
    },
}

impl PlanBuilder<'_> {
    /// Norms of rows are of this kind from here on.
    pub(crate) fn norms_are(&mut self, kind: NormKind) {
        self.norm_kind = kind;
    }

    /// `out = norm(x) * {name}`, with the bias of the same name where the kind of norm has one.
    pub(crate) fn norm(&mut self, x: Buf, name: &str, out: &'static str) -> Result<Buf, Error> {
        self.norm_by(x, name, out, self.eps)
    }

    /// As [`Self::norm`], with an eps of its own.
    pub(crate) fn norm_by(
        &mut self,
        x: Buf,
        name: &str,
        out: &'static str,
        eps: f32,
    ) -> Result<Buf, Error> {
        let width = self.width(x);
        let rows = self.bufs[usize::from(x.0)].rows;
        let weight = self.vector(name, width)?;
        let out = self.buf_rows(out, width, rows);
        let group = width as u32;
        match self.norm_kind {
            NormKind::Rms => self.op(Op::RmsNorm {
                x,
                weight: Some(weight),
                eps,
                group,
                out,
            }),
            NormKind::Layer { bias } => {
                let name = name.strip_suffix("weight").unwrap_or(name);
                let bias = self.vector_if(&format!("{name}bias"), width, bias)?;
                self.op(Op::LayerNorm {
                    x,
                    weight,
                    bias,
                    eps,
                    group,
                    out,
                });
            }
        }
        Ok(out)
    }

    /// `out = rms_norm(x) * weight`, each group of so many elements by itself.
    pub(crate) fn rms_norm(&mut self, x: Buf, weight: Option<TensorIndex>, group: u32, out: Buf) {
        let eps = self.eps;
        self.op(Op::RmsNorm {
            x,
            weight,
            eps,
            group,
            out,
        });
    }

    /// `x += p`, `p` normed by `{norm}` before where a name is given.
    pub(crate) fn residual(
        &mut self,
        x: Buf,
        p: Buf,
        norm: Option<&str>,
        scale: f32,
    ) -> Result<(), Error> {
        let y = match norm {
            Some(name) => self.norm(p, name, "post")?,
            None => p,
        };
        self.op(Op::Add { x, y, scale });
        Ok(())
    }
}
