//! Hyperparameters, each read from its key, checked against a named limit, with the field's defaults.

use rocmforge_device::HeadShape;
use rocmforge_gguf::Gguf;

use crate::arch::Arch;
use crate::error::Error;

/// Most layers.
pub(crate) const N_LAYER_MAX: u32 = 1024;
/// Widest residual stream or feed-forward, in elements.
pub(crate) const WIDTH_MAX: u32 = 1 << 20;
/// Most heads.
pub(crate) const N_HEAD_MAX: u32 = 4096;
/// Largest head.
pub(crate) const HEAD_DIM_MAX: u32 = 1024;
/// Longest context.
pub(crate) const N_CTX_MAX: u32 = 1 << 24;

/// Which elements of a head rotate together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeOrder {
    /// Adjacent elements `(2 i, 2 i + 1)`.
    Norm,
    /// Halves `(i, i + n_rot / 2)`.
    Neox,
}

/// How positions beyond the training length are scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by a factor (Chen et al. 2023).
    Linear {
        /// The factor.
        factor: f32,
    },
    /// YaRN (Peng et al. 2023).
    Yarn {
        /// Extension of the context.
        factor: f32,
        /// Context length before it.
        original_context: u32,
        /// Rotations above which a dimension is extrapolated.
        beta_fast: f32,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f32,
        /// Share of extrapolation.
        ext_factor: f32,
        /// Factor on the magnitude, beside YaRN's own.
        attn_factor: f32,
    },
}

/// Rotary positions (Su et al. 2021).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeShape {
    /// Pairs.
    pub order: RopeOrder,
    /// Elements of a head that rotate.
    pub n_rot: u32,
    /// Base of the frequencies.
    pub freq_base: f32,
    /// Scaling.
    pub scaling: RopeScaling,
}

/// Hyperparameters of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Hparams {
    /// Architecture.
    pub arch: &'static str,
    /// Context length of the training, in tokens.
    pub n_ctx_train: u32,
    /// Width of the residual stream.
    pub n_embd: u32,
    /// Layers.
    pub n_layer: u32,
    /// Width of the feed-forward.
    pub n_ff: u32,
    /// Rows of the embedding.
    pub n_vocab: u32,
    /// Heads.
    pub heads: HeadShape,
    /// Added to the mean of squares in every RMSNorm.
    pub norm_eps: f32,
    /// Rotary positions.
    pub rope: RopeShape,
}

impl Hparams {
    pub(crate) fn read(gguf: &Gguf, arch: &Arch) -> Result<Self, Error> {
        let keys = Keys {
            gguf,
            arch: arch.name,
        };
        if keys.optional_u32("expert_count")?.unwrap_or(0) > 0 {
            return Err(Error::Unsupported(format!(
                "architecture '{}' with experts ({}.expert_count > 0) is not supported",
                arch.name, arch.name
            )));
        }
        let n_embd = keys.bounded("embedding_length", WIDTH_MAX)?;
        let n_head = keys.bounded("attention.head_count", N_HEAD_MAX)?;
        let n_head_kv = keys.bounded_or("attention.head_count_kv", N_HEAD_MAX, n_head)?;
        if n_head % n_head_kv != 0 {
            return Err(keys.bad(
                "attention.head_count_kv",
                n_head_kv,
                format!("must divide the {n_head} heads"),
            ));
        }
        let key_default = n_embd / n_head;
        let head_dim = keys.bounded_or("attention.key_length", HEAD_DIM_MAX, key_default)?;
        let head_dim_v = keys.bounded_or("attention.value_length", HEAD_DIM_MAX, key_default)?;
        let n_rot = keys.bounded_or("rope.dimension_count", HEAD_DIM_MAX, head_dim)?;
        if n_rot > head_dim || n_rot % 2 != 0 {
            return Err(keys.bad(
                "rope.dimension_count",
                n_rot,
                format!("must be even and at most the head's {head_dim} elements"),
            ));
        }
        let norm_eps = keys.required_f32("attention.layer_norm_rms_epsilon")?;
        if !(0.0..1.0).contains(&norm_eps) {
            return Err(keys.bad(
                "attention.layer_norm_rms_epsilon",
                norm_eps,
                "must be in 0..1".to_owned(),
            ));
        }
        Ok(Self {
            arch: arch.name,
            n_ctx_train: keys.bounded("context_length", N_CTX_MAX)?,
            n_embd,
            n_layer: keys.bounded("block_count", N_LAYER_MAX)?,
            n_ff: keys.bounded("feed_forward_length", WIDTH_MAX)?,
            n_vocab: vocab_rows(gguf)?,
            heads: HeadShape {
                n_head,
                n_head_kv,
                head_dim,
                head_dim_v,
            },
            norm_eps,
            rope: RopeShape {
                order: arch.rope,
                n_rot,
                freq_base: keys.positive_or("rope.freq_base", 10_000.0)?,
                scaling: scaling(&keys)?,
            },
        })
    }
}

/// Rows of the embedding. The tokenizer's count is compared with it where both are known.
fn vocab_rows(gguf: &Gguf) -> Result<u32, Error> {
    const NAME: &str = "token_embd.weight";
    let tensor = gguf
        .tensor(NAME)
        .ok_or_else(|| Error::MissingTensor(NAME.to_owned()))?;
    u32::try_from(tensor.dims[1])
        .ok()
        .filter(|&n| n > 0 && n <= 1 << 24)
        .ok_or_else(|| Error::WrongShape {
            name: NAME.to_owned(),
            found: tensor.dims.to_vec(),
            expected: vec![tensor.dims[0], 1 << 24],
            arch: "a decoder",
        })
}

fn scaling(keys: &Keys<'_>) -> Result<RopeScaling, Error> {
    let kind = keys.gguf.str(&keys.name("rope.scaling.type"))?;
    match kind {
        // Files from before the scaling type had a key state a linear factor alone.
        None => match keys.optional_f32("rope.scale_linear")? {
            None => Ok(RopeScaling::None),
            Some(_) => {
                let factor = keys.positive_or("rope.scale_linear", 1.0)?;
                Ok(if factor == 1.0 {
                    RopeScaling::None
                } else {
                    RopeScaling::Linear { factor }
                })
            }
        },
        Some("none") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: keys.positive_or("rope.scaling.factor", 1.0)?,
        }),
        Some("yarn") => {
            let n_ctx_train = keys.bounded("context_length", N_CTX_MAX)?;
            Ok(RopeScaling::Yarn {
                factor: keys.positive_or("rope.scaling.factor", 1.0)?,
                original_context: keys.bounded_or(
                    "rope.scaling.original_context_length",
                    N_CTX_MAX,
                    n_ctx_train,
                )?,
                beta_fast: keys.positive_or("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: keys.positive_or("rope.scaling.yarn_beta_slow", 1.0)?,
                ext_factor: keys.positive_or("rope.scaling.yarn_ext_factor", 1.0)?,
                attn_factor: keys.positive_or("rope.scaling.attn_factor", 1.0)?,
            })
        }
        Some(other) => Err(Error::Unsupported(format!(
            "RoPE scaling '{}' ({}) is not supported; supported: none, linear, yarn, and the rope_freqs tensor",
            other.chars().take(64).collect::<String>(),
            keys.name("rope.scaling.type"),
        ))),
    }
}

/// Reads keys below the architecture's prefix.
struct Keys<'a> {
    gguf: &'a Gguf,
    arch: &'static str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn bad(&self, key: &str, value: impl ToString, message: String) -> Error {
        Error::BadValue {
            key: self.name(key),
            value: value.to_string(),
            message,
        }
    }

    fn optional_u32(&self, key: &str) -> Result<Option<u32>, Error> {
        Ok(self.gguf.u32(&self.name(key))?)
    }

    fn bounded(&self, key: &str, max: u32) -> Result<u32, Error> {
        let value = self
            .optional_u32(key)?
            .ok_or_else(|| Error::MissingKey(self.name(key)))?;
        self.in_bounds(key, value, max)
    }

    fn bounded_or(&self, key: &str, max: u32, default: u32) -> Result<u32, Error> {
        self.in_bounds(key, self.optional_u32(key)?.unwrap_or(default), max)
    }

    fn in_bounds(&self, key: &str, value: u32, max: u32) -> Result<u32, Error> {
        if value == 0 || value > max {
            return Err(self.bad(key, value, format!("must be in 1..={max}")));
        }
        Ok(value)
    }

    fn optional_f32(&self, key: &str) -> Result<Option<f32>, Error> {
        Ok(self.gguf.f32(&self.name(key))?)
    }

    fn required_f32(&self, key: &str) -> Result<f32, Error> {
        self.optional_f32(key)?
            .ok_or_else(|| Error::MissingKey(self.name(key)))
    }

    fn positive_or(&self, key: &str, default: f32) -> Result<f32, Error> {
        let value = self.optional_f32(key)?.unwrap_or(default);
        if !(value.is_finite() && value > 0.0) {
            return Err(self.bad(key, value, "must be a positive number".to_owned()));
        }
        Ok(value)
    }
}
