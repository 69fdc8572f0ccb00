//! The architectures: one file each, which says how it differs from the common decoder.
//!
//! All of them are decoders of the same block: RMSNorm, grouped-query attention with rotary positions, residual,
//! RMSNorm, gated feed-forward, residual. [`Arch`] holds what varies.

mod llama;
mod qwen2;
mod qwen3;

use rocmforge_gguf::Gguf;

use crate::error::Error;
use crate::hparams::RopeOrder;

/// What an architecture asks of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// The file must have it.
    Required,
    /// Used if the file has it.
    Optional,
    /// The architecture does not know it.
    Absent,
}

/// How an architecture differs from the common decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Arch {
    /// `general.architecture`, and the prefix of its keys.
    pub(crate) name: &'static str,
    /// Which elements of a head rotate together.
    pub(crate) rope: RopeOrder,
    /// Biases of the query, key and value products.
    pub(crate) qkv_bias: Need,
    /// Bias of the attention's output product.
    pub(crate) output_bias: Need,
    /// Biases of the feed-forward products.
    pub(crate) ffn_bias: Need,
    /// RMSNorms over each query and key head.
    pub(crate) qk_norm: Need,
}

const ALL: [Arch; 3] = [llama::ARCH, qwen2::ARCH, qwen3::ARCH];

/// Names of the architectures that work.
pub fn supported_architectures() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|a| a.name)
}

/// The architecture of a file.
pub(crate) fn find(gguf: &Gguf) -> Result<&'static Arch, Error> {
    const KEY: &str = "general.architecture";
    let name = gguf
        .str(KEY)?
        .ok_or_else(|| Error::MissingKey(KEY.to_owned()))?;
    ALL.iter()
        .find(|a| a.name == name)
        .ok_or_else(|| Error::UnknownArchitecture {
            name: name.chars().take(64).collect(),
            supported: supported_architectures().collect::<Vec<_>>().join(", "),
        })
}
