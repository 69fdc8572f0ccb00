//! The samplers by name, and the order in which they come.

/// A sampler of the chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SamplerKind {
    /// Penalties for repetition, presence and frequency.
    Penalties,
    /// The penalty for repeated sequences.
    Dry,
    /// Tokens within some standard deviations of the largest logit.
    TopNSigma,
    /// The k most likely tokens.
    TopK,
    /// Locally typical tokens.
    TypicalP,
    /// The most likely tokens that add up to a probability.
    TopP,
    /// Tokens at least as likely as a share of the most likely one.
    MinP,
    /// Now and then without the most likely tokens.
    Xtc,
    /// The temperature, fixed or dynamic.
    Temperature,
}

impl SamplerKind {
    /// All of them in the order in which they come where a request gives none: llama.cpp's.
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

    /// The sampler's letter, in the short form of an order.
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

    /// Whether the most likely token behind it may be another than before it.
    pub(super) fn moves_best(self) -> bool {
        match self {
            Self::Penalties | Self::Dry | Self::TypicalP | Self::Xtc => true,
            Self::TopNSigma | Self::TopK | Self::TopP | Self::MinP | Self::Temperature => false,
        }
    }
}
