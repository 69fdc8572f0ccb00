//! Rotary positions (Su et al. 2021, arXiv 2104.09864): the parameters of one table of rotations.

/// Which elements of a head rotate together as a pair.
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
    /// No scaling.
    None,
    /// Linear: all frequencies are divided by one factor (Chen et al. 2023).
    Linear {
        /// How many times longer.
        factor: f64,
    },
    /// YaRN: scaling by the number of turns within the original context (Peng et al. 2023).
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

/// Which coordinate of a row's position rotates a pair of elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeAxes {
    /// The position in the sequence.
    #[default]
    Sequence,
    /// The sequence for some pairs, an image's rows and columns for others (M-RoPE, Wang et al.
    /// 2024, arXiv 2409.12191). Text has the same position in all three.
    Sections {
        /// Pairs that turn by the sequence, by rows and by columns.
        pairs: [u32; 3],
        /// Whether pairs of the three follow each other in turn; else first all of one, then all of
        /// the next.
        interleaved: bool,
    },
    /// Rows for one half of the pairs, columns for the other.
    Plane {
        /// Whether the first half is that of columns.
        columns_first: bool,
        /// Whether the halves have the frequencies of a head in turn; else either half has those of
        /// a head of half the size.
        in_turn: bool,
    },
}

impl RopeAxes {
    /// The coordinate of each of `n` pairs: 0 for the sequence, 1 for rows, 2 for columns.
    #[must_use]
    pub fn of_pairs(self, n: u32) -> Vec<u8> {
        let axis = |pair: u32| match self {
            Self::Sequence => 0,
            Self::Sections {
                pairs: [_, rows, columns],
                interleaved: true,
            } => match pair % 3 {
                1 if pair < 3 * rows => 1,
                2 if pair < 3 * columns => 2,
                _ => 0,
            },
            Self::Sections {
                pairs: [sequence, rows, _],
                interleaved: false,
            } => match pair {
                pair if pair < sequence => 0,
                pair if pair < sequence + rows => 1,
                _ => 2,
            },
            Self::Plane { columns_first, .. } => 1 + u8::from((pair >= n / 2) != columns_first),
        };
        (0..n).map(axis).collect()
    }
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
    /// Coordinates that rotate each pair.
    pub axes: RopeAxes,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_turn_by_the_coordinates_of_their_sections() {
        let sections = |pairs, interleaved| RopeAxes::Sections { pairs, interleaved };
        // Qwen3-VL's 24, 20, 20 in small, and Qwen2-VL's order.
        let of_pairs = sections([4, 2, 2], true).of_pairs(8);
        assert_eq!(of_pairs, [0, 1, 2, 0, 1, 2, 0, 0]);
        let of_pairs = sections([4, 2, 2], false).of_pairs(8);
        assert_eq!(of_pairs, [0, 0, 0, 0, 1, 1, 2, 2]);
        let plane = |columns_first| RopeAxes::Plane {
            columns_first,
            in_turn: false,
        };
        assert_eq!(plane(false).of_pairs(6), [1, 1, 1, 2, 2, 2]);
        assert_eq!(plane(true).of_pairs(4), [2, 2, 1, 1]);
        assert_eq!(RopeAxes::Sequence.of_pairs(2), [0, 0]);
    }
}
