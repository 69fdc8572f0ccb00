//! Rotary positions (Su et al. 2021, arXiv 2104.09864): the parameters of one table of rotations.

/// Which elements of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeOrder {
    /// Adjacent ones: `(2 i, 2 i + 1)` (llama).
    Norm,
    /// Halves: `(i, i + n_rot / 2)` (qwen2, qwen3).
    Neox,
}

/// How the frequencies are stretched for a context longer than the one trained on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All alike (Chen et al. 2023).
    Linear {
        /// How many times longer.
        factor: f64,
    },
    /// By the number of turns within the original context (YaRN, Peng et al. 2023).
    Yarn {
        /// How many times longer.
        factor: f64,
        /// The context trained on, in tokens.
        orig_ctx: u32,
        /// Pairs with more turns than this keep their frequency (32 as published).
        beta_fast: f64,
        /// Pairs with fewer turns than this are stretched in full (1 as published).
        beta_slow: f64,
        /// How much of the blend is applied: 1, or 0 for linear scaling without the magnitude.
        ext_factor: f64,
        /// Multiplies the magnitude of cos and sin: 1 unless the model says otherwise.
        attn_factor: f64,
        /// Whether the blend begins and ends at whole pairs, rounded outwards, as
        /// published; gpt-oss does not round.
        rounded: bool,
    },
}

/// One table of rotations. A model may have several: windowed layers often have a base of their
/// own.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Pairs.
    pub order: RopeOrder,
    /// Elements of a head that rotate; even.
    pub n_rot: u32,
    /// Base of the frequencies.
    pub freq_base: f64,
    /// Scaling.
    pub scaling: RopeScaling,
    /// A tensor of `n_rot / 2` divisors of the frequencies.
    pub factors: Option<crate::TensorDesc>,
    /// Other divisors for sequences that may become long.
    pub long: Option<LongFactors>,
    /// Multiplies cos and sin, beside YaRN's own magnitude.
    pub magnitude: f64,
}

/// Divisors of the frequencies for sequences beyond the context first trained on (LongRoPE, Ding et
/// al. 2024). Keys rotated by them and by the usual ones do not go together, so a sequence has one
/// of them throughout ([`crate::Plan::rotates_long`]).
#[derive(Debug, Clone, PartialEq)]
pub struct LongFactors {
    /// Positions up to which a sequence has the usual divisors.
    pub beyond: u32,
    /// A tensor of `n_rot / 2` divisors.
    pub factors: crate::TensorDesc,
}
