//! A Mamba-2 layer (Dao & Gu 2024, arXiv 2405.21060): one product for gate, x, B, C and time
//! steps, a short convolution over x, B and C, the state space recurrence, a gated norm over
//! groups, and the output product.

use rocmforge_ops::{Act, Buf, Op};

use crate::build::{PlanBuilder, Presence, blk};
use crate::error::Error;
use crate::keys::{Keys, N_HEAD_MAX, WIDTH_MAX};

/// Maximum length of the short convolution.
pub(super) const CONV_KERNEL_MAX: u32 = 16;

/// The shape of a Mamba-2 layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mamba2 {
    kernel: u32,
    d_inner: u32,
    n_state: u32,
    n_head: u32,
    n_group: u32,
}

impl Mamba2 {
    pub(super) fn read(keys: Keys<'_>) -> Result<Self, Error> {
        let shape = Self {
            kernel: keys.count("ssm.conv_kernel", CONV_KERNEL_MAX)?,
            d_inner: keys.count("ssm.inner_size", WIDTH_MAX)?,
            n_state: keys.count("ssm.state_size", WIDTH_MAX)?,
            n_head: keys.count("ssm.time_step_rank", N_HEAD_MAX)?,
            n_group: keys.count_or("ssm.group_count", N_HEAD_MAX, 1)?,
        };
        if shape.kernel < 2 {
            return Err(keys.bad("ssm.conv_kernel", shape.kernel, "must be at least 2"));
        }
        if !shape.d_inner.is_multiple_of(shape.n_head) {
            let message = format!("must be a multiple of the {} heads", shape.n_head);
            return Err(keys.bad("ssm.inner_size", shape.d_inner, message));
        }
        if !shape.n_head.is_multiple_of(shape.n_group) {
            let message = format!("must divide the {} heads", shape.n_head);
            return Err(keys.bad("ssm.group_count", shape.n_group, message));
        }
        Ok(shape)
    }

    /// Emits the layer on normed rows `n`. Returns the buffer of the output product.
    pub(super) fn emit(
        &self,
        b: &mut PlanBuilder<'_>,
        i: u32,
        n: Buf,
        norm: Presence,
    ) -> Result<Buf, Error> {
        let d_inner = u64::from(self.d_inner);
        let n_head = u64::from(self.n_head);
        let channels = d_inner + 2 * u64::from(self.n_group) * u64::from(self.n_state);
        let name = |part: &str| blk(i, part);
        let all = b.tensor(
            &name("ssm_in.weight"),
            &[b.n_embd, d_inner + channels + n_head],
        )?;
        let (z, xbc, dt) = (
            b.buf("z", d_inner),
            b.buf("xbc", channels),
            b.buf("dt", n_head),
        );
        let products = vec![
            b.rows_of(&all, 0, d_inner, z)?,
            b.rows_of(&all, d_inner, channels, xbc)?,
            b.rows_of(&all, d_inner + channels, n_head, dt)?,
        ];
        b.mat_mul(n, products);
        let conv = (self.kernel, Presence::Optional, Act::Silu);
        let mixed = b.conv(&name("ssm_conv1d"), xbc, conv, "xbc mixed")?;
        let y = b.buf("ssm out", d_inner);
        let a = b.vector(&name("ssm_a"), n_head)?;
        let skip = b.vector(&name("ssm_d"), n_head)?;
        let dt_bias = b.vector(&name("ssm_dt.bias"), n_head)?;
        let state = b.state(d_inner * u64::from(self.n_state));
        b.op(Op::Ssm {
            xbc: mixed,
            dt,
            a,
            skip,
            dt_bias,
            n_head: self.n_head,
            dim: self.d_inner / self.n_head,
            n_group: self.n_group,
            n_state: self.n_state,
            state,
            out: y,
        });
        b.op(Op::Gate {
            gate: z,
            up: y,
            act: Act::Silu,
        });
        if let Some(weight) = b.vector_if(&name("ssm_norm.weight"), d_inner, norm)? {
            b.rms_norm(z, Some(weight), self.d_inner / self.n_group, z);
        }
        let p = b.buf("p", b.n_embd);
        b.product(&name("ssm_out"), z, Presence::Absent, p)
    }
}
