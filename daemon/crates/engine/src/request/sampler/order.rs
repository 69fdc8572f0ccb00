//! The samplers by name, and their order.

/// A sampler of the chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplerKind {
    /// Penalties for repetition, presence and frequency.
    Penalties,
    /// DRY: the penalty for continuing repeated sequences.
    Dry,
    /// Top-n-sigma: keeps tokens within some standard deviations of the largest logit.
    TopNSigma,
    /// Top-k: keeps the k most likely tokens.
    TopK,
    /// Typical-p: keeps locally typical tokens.
    TypicalP,
    /// Top-p: keeps the most likely tokens that together reach a probability.
    TopP,
    /// Min-p: keeps tokens with at least a share of the most likely one's probability.
    MinP,
    /// XTC: sometimes removes the most likely tokens.
    Xtc,
    /// The temperature, fixed or dynamic.
    Temperature,
}

impl SamplerKind {
    /// All samplers in the default order, which is llama.cpp's.
    pub const ALL: [Self; 9] = [
        Self::Penalties,
        Self::Dry,
        Self::TopNSigma,
        Self::TopK,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Xtc,
        Self::Temperature,
    ];

    /// The sampler's name in a request.
    pub fn name(self) -> &'static str {
        match self {
            Self::Penalties => "penalties",
            Self::Dry => "dry",
            Self::TopNSigma => "top_n_sigma",
            Self::TopK => "top_k",
            Self::TypicalP => "typ_p",
            Self::TopP => "top_p",
            Self::MinP => "min_p",
            Self::Xtc => "xtc",
            Self::Temperature => "temperature",
        }
    }

    /// The sampler's letter in the short form of an order (llama-server's `samplers` as a string).
    pub fn letter(self) -> char {
        match self {
            Self::Penalties => 'e',
            Self::Dry => 'd',
            Self::TopNSigma => 's',
            Self::TopK => 'k',
            Self::TypicalP => 'y',
            Self::TopP => 'p',
            Self::MinP => 'm',
            Self::Xtc => 'x',
            Self::Temperature => 't',
        }
    }

    /// Whether this sampler can change which token is the most likely.
    pub(super) fn moves_best(self) -> bool {
        match self {
            Self::Penalties | Self::Dry | Self::TypicalP | Self::Xtc => true,
            Self::TopNSigma | Self::TopK | Self::TopP | Self::MinP | Self::Temperature => false,
        }
    }
}
