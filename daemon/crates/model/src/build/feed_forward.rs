//! Dense feed-forwards: gated, or with a single up matrix.

use rocmforge_ops::{Act, Buf, Op};

use super::{PlanBuilder, Presence, blk};
use crate::error::Error;

impl PlanBuilder<'_> {
    /// Emits `p = Wdown (act(Wgate n) * Wup n)` with the tensors `ffn_gate`, `ffn_up`, `ffn_down`;
    /// gate and up may be one matrix, the gate's rows first. Begins a segment for the down product.
    /// The buffers in `carried` stay alive after gate and up.
    pub(crate) fn gated_ffn(
        &mut self,
        layer: u32,
        n: Buf,
        n_ff: u64,
        act: Act,
        bias: Presence,
        carried: &[Buf],
    ) -> Result<Buf, Error> {
        let h = self.gated_up(layer, n, n_ff, act, bias, "")?;
        let mut alive = vec![h];
        alive.extend(carried);
        self.cut(blk(layer, "ffn_down"), &alive);
        let p = self.buf("p", self.n_embd);
        self.product(&blk(layer, "ffn_down"), h, bias, p)
    }

    /// Emits `act(Wgate n) * Wup n`.
    pub(crate) fn gated_up(
        &mut self,
        layer: u32,
        n: Buf,
        n_ff: u64,
        act: Act,
        bias: Presence,
        suffix: &str,
    ) -> Result<Buf, Error> {
        let cols = self.width(n);
        let g = self.buf("gate", n_ff);
        let u = self.buf("up", n_ff);
        let (gate, up) = (format!("ffn_gate{suffix}"), format!("ffn_up{suffix}"));
        let products = if self.has(&blk(layer, &format!("{gate}.weight"))) {
            vec![
                self.linear(&blk(layer, &gate), cols, n_ff, bias, g)?,
                self.linear(&blk(layer, &up), cols, n_ff, bias, u)?,
            ]
        } else {
            let matrix = self.tensor(&blk(layer, &format!("{up}.weight")), &[cols, 2 * n_ff])?;
            let (gate_at, up_at) = match self.up_lies_first {
                true => (n_ff, 0),
                false => (0, n_ff),
            };
            vec![
                self.rows_of(&matrix, gate_at, n_ff, g)?,
                self.rows_of(&matrix, up_at, n_ff, u)?,
            ]
        };
        self.mat_mul(n, products);
        self.op(Op::Gate {
            gate: g,
            up: u,
            act,
        });
        Ok(g)
    }

    /// Emits `p = Wdown act(Wup n)` in one segment; `suffix` is appended to the tensors' names, and
    /// `out` names the buffer of `p`.
    pub(crate) fn plain_ffn(
        &mut self,
        layer: u32,
        n: Buf,
        n_ff: u64,
        act: Act,
        bias: Presence,
        (suffix, out): (&str, &'static str),
    ) -> Result<Buf, Error> {
        let u = self.buf("up", n_ff);
        let name = |part: &str| blk(layer, &format!("{part}{suffix}"));
        self.product(&name("ffn_up"), n, bias, u)?;
        self.op(Op::Activate { x: u, act });
        let p = self.buf(out, self.n_embd);
        self.product(&name("ffn_down"), u, bias, p)
    }

    /// Emits a shared expert's gated feed-forward in the current segment, into a separate buffer.
    pub(crate) fn shared_expert(
        &mut self,
        layer: u32,
        n: Buf,
        n_ff: u64,
        act: Act,
    ) -> Result<Buf, Error> {
        let h = self.gated_up(layer, n, n_ff, act, Presence::Absent, "_shexp")?;
        let s = self.buf("shared", self.n_embd);
        let name = blk(layer, "ffn_down_shexp");
        self.product(&name, h, Presence::Absent, s)
    }
}
