//! Llama 1 to 3 and what shares its form (Mistral, and many others that are converted under this name).
//!
//! Source: Touvron et al. 2023; the GGUF convention that query and key rows are permuted so that adjacent elements
//! rotate together.

use super::{Arch, Need};
use crate::hparams::RopeOrder;

pub(crate) const ARCH: Arch = Arch {
    name: "llama",
    rope: RopeOrder::Norm,
    qkv_bias: Need::Optional,
    output_bias: Need::Optional,
    ffn_bias: Need::Optional,
    qk_norm: Need::Absent,
};
