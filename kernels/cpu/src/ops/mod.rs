//! Operations on rows of f32, and the paged key/value store they attend to.
//!
//! Every operation is a function of slices that runs on the calling thread, except [`attention()`]
//! and those with a recurrent state ([`conv()`], [`delta_net()`], [`ssm()`]), which take a
//! [`Pool`](crate::Pool) because their work items are their own affair; the others are
//! divided by their caller, usually by [`Pool::run_rows`](crate::Pool::run_rows).
//!
//! Shapes are written `[rows][width]` with the last dimension contiguous. Lengths are checked
//! with `assert!`: a mismatch is a bug of the caller, not bad input. NaN propagates unless an
//! operation says otherwise.
//!
//! Each operation has a scalar form, which is the reference, and where it pays one generic SIMD
//! form that is instantiated for every instruction set; [`Simd`] chooses. A result depends on the
//! instruction set in the last bits, never on how rows are divided among calls or threads.

mod act;
mod add;
mod argmax;
mod attention;
mod attention_page;
#[cfg(test)]
mod attention_tests;
mod attention_tile;
mod columns;
mod conv;
mod delta_net;
mod exp;
mod kv;
mod lanes;
mod layer_norm;
mod likelihoods;
mod recurrent;
mod rms_norm;
mod rope;
mod rope_table;
mod route;
mod scale;
mod softmax;
mod ssm;
#[cfg(test)]
mod testing;
mod top_k;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use act::{activate, gate, gate_heads, silu_mul};
pub use add::{add, add_bias, add_gated, add_scaled, add_weighted, combine, mat_mul_transposed};
pub use argmax::argmax;
pub use attention::{AttentionShape, AttentionSpan, attention};
pub use columns::{ColumnSource, columns};
pub use conv::{CONV_KERNEL_MAX, ConvWeights, conv};
pub use delta_net::{DeltaNetInputs, DeltaNetShape, delta_net};
pub use kv::kv_append;
pub use layer_norm::layer_norm_in_place;
pub use likelihoods::{likelihood_sum, likelihoods};
pub use recurrent::StateSpan;
pub use rms_norm::{
    add_rms_norm, rms_norm, rms_norm_groups, rms_norm_groups_in_place, rms_norm_in_place,
};
pub use rope::{RopeAngles, rope, rope_at};
pub use rope_table::{RopeError, RopeParams, RopeTable};
pub use route::route;
pub use scale::{clamp, position_scale, scale, soft_cap};
pub use softmax::{log_softmax, softmax};
pub use ssm::{SsmInputs, SsmShape, ssm};
pub use top_k::top_k;

/// The instruction set that an operation uses. Asking for one that the CPU lacks
/// falls back to the next lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Simd {
    /// Plain Rust, the reference.
    Scalar,
    /// AVX2 with FMA and F16C, 8 lanes.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, 16 lanes.
    Avx512,
}

impl Simd {
    /// The widest instruction set of this CPU.
    #[must_use]
    pub fn detect() -> Simd {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            match (avx2, avx512) {
                (true, true) => return Simd::Avx512,
                (true, false) => return Simd::Avx2,
                (false, _) => {}
            }
        }
        Simd::Scalar
    }

    /// The instruction sets that this CPU has, lowest first.
    pub fn available() -> impl Iterator<Item = Simd> {
        let widest = Simd::detect();
        [Simd::Scalar, Simd::Avx2, Simd::Avx512]
            .into_iter()
            .filter(move |&simd| simd <= widest)
    }
}

/// The number of rows of `width` in `len` elements.
fn rows_of(len: usize, width: usize) -> usize {
    assert!(
        width > 0 && len.is_multiple_of(width),
        "{len} elements are no rows of {width}"
    );
    len / width
}
