//! Qwen 2 and 2.5: biases on query, key and value; rotation of half-split pairs.
//!
//! Source: Yang et al. 2024, "Qwen2 Technical Report".

use super::{Arch, Need};
use crate::hparams::RopeOrder;

pub(crate) const ARCH: Arch = Arch {
    name: "qwen2",
    rope: RopeOrder::Neox,
    qkv_bias: Need::Required,
    output_bias: Need::Optional,
    ffn_bias: Need::Absent,
    qk_norm: Need::Absent,
};
