//! Qwen 3 (dense): RMSNorms over each query and key head instead of biases; head size independent of the width.
//!
//! Source: Yang et al. 2025, "Qwen3 Technical Report".

use super::{Arch, Need};
use crate::hparams::RopeOrder;

pub(crate) const ARCH: Arch = Arch {
    name: "qwen3",
    rope: RopeOrder::Neox,
    qkv_bias: Need::Optional,
    output_bias: Need::Optional,
    ffn_bias: Need::Absent,
    qk_norm: Need::Required,
};
