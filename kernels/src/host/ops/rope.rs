//! Rotary position embedding: the pair `(a, b)` at position `p` becomes
//! `(a cos t - b sin t, a sin t + b cos t)` with `t = p * freq[pair]`.
//!
//! Frequencies: RoFormer (arXiv 2104.09864) gives `freq[i] = base^(-2 i / n_rot)`; per-pair factors (the
//! `rope_freqs` tensor of Llama 3) divide it; linear scaling divides it by the context's stretch; YaRN
//! (arXiv 2309.00071) blends the stretched and the plain frequency by how many turns a pair makes within the
//! original context, and multiplies cos and sin by a magnitude `0.1 ln(factor) + 1`. Conventions (rounding
//! of the ramp's ends, what attn_factor and ext_factor multiply) are those of ggml's `ggml_rope_ext`.
//!
//! The frequencies do not depend on the position, so a [`RopeTable`] holds one f64 a pair, and the angle is
//! one f64 product: exact to 1e-9 turns at position 1M. cos and sin of a pass's positions are computed once into
//! [`RopeAngles`] and used by every layer.

use std::f64::consts::PI;

use super::{Simd, rows_of};

/// Which elements form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// All alike.
    Linear {
        /// How many times longer.
        factor: f64,
    },
    /// By the number of turns within the original context.
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
    },
}

/// The hyperparameters of the embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeParams {
    /// Elements of a head that are rotated, from the first; even.
    pub n_rot: usize,
    /// The base of the frequencies (10,000; 500,000 for Llama 3).
    pub freq_base: f64,
    /// The stretch.
    pub scaling: RopeScaling,
    /// Divides each pair's frequency, `[n_rot / 2]`: the rope_freqs tensor.
    pub freq_factors: Option<Vec<f32>>,
}

/// Why parameters were refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RopeError {
    /// Odd or zero number of rotated elements.
    #[error(
        "rope dimension count is {n_rot}, it must be even and not zero: check the model's rope.dimension_count"
    )]
    OddDimensions {
        /// The count.
        n_rot: usize,
    },
    /// A parameter is zero, negative, or no number.
    #[error("rope {name} is {value}, it must be a positive number: check the model's metadata")]
    NotPositive {
        /// Which.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// The factors do not match the pairs.
    #[error("rope_freqs has {found} factors, {expected} pairs are rotated: check the model file")]
    FactorCount {
        /// In the tensor.
        found: usize,
        /// n_rot / 2.
        expected: usize,
    },
}

/// The frequency of every pair and the magnitude, for one model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians a position, `[n_rot / 2]`.
    freqs: Vec<f64>,
    /// Multiplies cos and sin.
    magnitude: f64,
}

impl RopeTable {
    /// The table of `params`.
    ///
    /// # Errors
    /// A parameter that makes no sense; see [`RopeError`].
    pub fn new(params: &RopeParams) -> Result<RopeTable, RopeError> {
        let n_rot = params.n_rot;
        if n_rot == 0 || !n_rot.is_multiple_of(2) {
            return Err(RopeError::OddDimensions { n_rot });
        }
        positive("freq_base", params.freq_base)?;
        if let Some(factors) = &params.freq_factors {
            if factors.len() != n_rot / 2 {
                return Err(RopeError::FactorCount {
                    found: factors.len(),
                    expected: n_rot / 2,
                });
            }
            factors
                .iter()
                .try_for_each(|&f| positive("frequency factor", f64::from(f)))?;
        }
        let plain = |pair: usize| {
            let divisor = params
                .freq_factors
                .as_ref()
                .map_or(1.0, |f| f64::from(f[pair]));
            params.freq_base.powf(-2.0 * pair as f64 / n_rot as f64) / divisor
        };
        let pairs = 0..n_rot / 2;
        match params.scaling {
            RopeScaling::None => Ok(RopeTable {
                freqs: pairs.map(plain).collect(),
                magnitude: 1.0,
            }),
            RopeScaling::Linear { factor } => {
                positive("scaling factor", factor)?;
                Ok(RopeTable {
                    freqs: pairs.map(|i| plain(i) / factor).collect(),
                    magnitude: 1.0,
                })
            }
            RopeScaling::Yarn {
                factor,
                orig_ctx,
                beta_fast,
                beta_slow,
                ext_factor,
                attn_factor,
            } => {
                positive("scaling factor", factor)?;
                positive("original context", f64::from(orig_ctx))?;
                positive("beta_fast", beta_fast)?;
                positive("beta_slow", beta_slow)?;
                positive("attention factor", attn_factor)?;
                // The pair that makes `turns` turns within the original context, as a real number.
                let pair_of = |turns: f64| {
                    n_rot as f64 * (f64::from(orig_ctx) / (turns * 2.0 * PI)).ln()
                        / (2.0 * params.freq_base.ln())
                };
                let low = pair_of(beta_fast).floor().max(0.0);
                let high = pair_of(beta_slow).ceil().min(n_rot as f64 - 1.0);
                let freqs = pairs.map(|i| {
                    let keep = 1.0 - ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    let keep = keep * ext_factor;
                    plain(i) * (keep + (1.0 - keep) / factor)
                });
                let stretch = if ext_factor == 0.0 {
                    1.0
                } else {
                    1.0 + 0.1 * factor.ln()
                };
                Ok(RopeTable {
                    freqs: freqs.collect(),
                    magnitude: attn_factor * stretch,
                })
            }
        }
    }

    /// Elements of a head that are rotated.
    #[must_use]
    pub fn n_rot(&self) -> usize {
        self.freqs.len() * 2
    }

    /// cos and sin of `pair` at `position`, the magnitude included.
    ///
    /// # Panics
    /// When `pair` is not below n_rot / 2.
    #[must_use]
    pub fn cos_sin(&self, pair: usize, position: u32) -> (f32, f32) {
        let (sin, cos) = (f64::from(position) * self.freqs[pair]).sin_cos();
        ((cos * self.magnitude) as f32, (sin * self.magnitude) as f32)
    }
}

fn positive(name: &'static str, value: f64) -> Result<(), RopeError> {
    if value > 0.0 && value.is_finite() {
        Ok(())
    } else {
        Err(RopeError::NotPositive { name, value })
    }
}

/// cos and sin for the rows of one pass, laid out for one pair order. Computed once a pass, used by all layers.
#[derive(Clone, Debug)]
pub struct RopeAngles {
    order: RopeOrder,
    n_rot: usize,
    /// `[rows][n_rot]`, what an element itself is multiplied by: cos of its pair.
    cos: Vec<f32>,
    /// `[rows][n_rot]`, what its partner is multiplied by: -sin for the first of a pair, sin for the second.
    sin: Vec<f32>,
}

impl RopeAngles {
    /// No rows yet, see [`RopeAngles::set`].
    #[must_use]
    pub fn new(order: RopeOrder) -> RopeAngles {
        RopeAngles {
            order,
            n_rot: 0,
            cos: Vec::new(),
            sin: Vec::new(),
        }
    }

    /// Computes the angles of `positions`, one a row; memory is kept between calls.
    pub fn set(&mut self, table: &RopeTable, positions: impl IntoIterator<Item = u32>) {
        self.n_rot = table.n_rot();
        self.cos.clear();
        self.sin.clear();
        for position in positions {
            let start = self.cos.len();
            self.cos.resize(start + self.n_rot, 0.0);
            self.sin.resize(start + self.n_rot, 0.0);
            for pair in 0..self.n_rot / 2 {
                let (cos, sin) = table.cos_sin(pair, position);
                let (first, second) = match self.order {
                    RopeOrder::Norm => (2 * pair, 2 * pair + 1),
                    RopeOrder::Neox => (pair, pair + self.n_rot / 2),
                };
                self.cos[start + first] = cos;
                self.cos[start + second] = cos;
                self.sin[start + first] = -sin;
                self.sin[start + second] = sin;
            }
        }
    }

    /// The number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.cos.len().checked_div(self.n_rot).unwrap_or(0)
    }
}

/// Rotates the first n_rot elements of every head of `x`, `[rows][n_head][head_dim]`, in place. Row `i` of `x`
/// is row `first_row + i` of `angles`.
///
/// # Panics
/// When the shapes do not fit each other.
pub fn rope(
    _simd: Simd,
    angles: &RopeAngles,
    first_row: usize,
    x: &mut [f32],
    n_head: usize,
    head_dim: usize,
) {
    let n_rot = angles.n_rot;
    let rows = rows_of(x.len(), n_head * head_dim);
    assert!(
        n_rot <= head_dim,
        "rope: {n_rot} rotated elements in heads of {head_dim}"
    );
    assert!(
        first_row + rows <= angles.rows(),
        "rope: {rows} rows from {first_row} of {}",
        angles.rows()
    );
    for (row, x) in x.chunks_exact_mut(n_head * head_dim).enumerate() {
        let start = (first_row + row) * n_rot;
        let (cos, sin) = (
            &angles.cos[start..start + n_rot],
            &angles.sin[start..start + n_rot],
        );
        for head in x.chunks_exact_mut(head_dim) {
            rotate(angles.order, &mut head[..n_rot], cos, sin);
        }
    }
}

fn rotate(order: RopeOrder, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = x.len() / 2;
    for pair in 0..half {
        let (i, j) = match order {
            RopeOrder::Norm => (2 * pair, 2 * pair + 1),
            RopeOrder::Neox => (pair, pair + half),
        };
        let (a, b) = (x[i], x[j]);
        x[i] = a * cos[i] + b * sin[i];
        x[j] = b * cos[j] + a * sin[j];
    }
}
