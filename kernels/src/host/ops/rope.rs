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

use super::lanes::{Lanes, simd_fn};
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
    simd: Simd,
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
            rotate(simd, angles.order, &mut head[..n_rot], cos, sin);
        }
    }
}

simd_fn! {
    fn rotate(order: RopeOrder, x: &mut [f32], cos: &[f32], sin: &[f32]);
    simd rotate_lanes;
    scalar rotate_scalar;
}

#[inline(always)]
fn rotate_lanes<S: Lanes>(s: S, order: RopeOrder, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    match order {
        RopeOrder::Norm => {
            // A chunk is a whole number of pairs, and so is what is left.
            for ((x, cos), sin) in x
                .chunks_mut(S::N)
                .zip(cos.chunks(S::N))
                .zip(sin.chunks(S::N))
            {
                if x.len() == S::N {
                    let v = s.load(x);
                    s.store(
                        x,
                        s.fma(s.swap_pairs(v), s.load(sin), s.mul(v, s.load(cos))),
                    );
                } else {
                    let v = s.load_part(x, 0.0);
                    let (cos, sin) = (s.load_part(cos, 0.0), s.load_part(sin, 0.0));
                    s.store_part(x, s.fma(s.swap_pairs(v), sin, s.mul(v, cos)));
                }
            }
        }
        RopeOrder::Neox => {
            let half = x.len() / 2;
            let (first, second) = x.split_at_mut(half);
            // The second half of sin is the positive one.
            let halves = first.chunks_mut(S::N).zip(second.chunks_mut(S::N));
            for ((a, b), (cos, sin)) in halves.zip(cos.chunks(S::N).zip(sin[half..].chunks(S::N))) {
                let n = a.len();
                if n == S::N {
                    let (va, vb, cos, sin) = (s.load(a), s.load(b), s.load(cos), s.load(sin));
                    s.store(a, s.sub(s.mul(va, cos), s.mul(vb, sin)));
                    s.store(b, s.fma(va, sin, s.mul(vb, cos)));
                } else {
                    rotate_pairs(a, b, &cos[..n], &sin[..n]);
                }
            }
        }
    }
}

fn rotate_pairs(first: &mut [f32], second: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

fn rotate_scalar(order: RopeOrder, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = x.len() / 2;
    match order {
        RopeOrder::Norm => {
            for ((x, cos), sin) in x
                .chunks_exact_mut(2)
                .zip(cos.chunks_exact(2))
                .zip(sin.chunks_exact(2))
            {
                (x[0], x[1]) = (x[0] * cos[0] + x[1] * sin[0], x[1] * cos[1] + x[0] * sin[1]);
            }
        }
        RopeOrder::Neox => {
            let (first, second) = x.split_at_mut(half);
            rotate_pairs(first, second, &cos[..half], &sin[half..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::ops::testing::{Source, assert_close};

    fn plain(n_rot: usize, freq_base: f64) -> RopeParams {
        RopeParams {
            n_rot,
            freq_base,
            scaling: RopeScaling::None,
            freq_factors: None,
        }
    }

    /// The rotation of one head straight from the definition, in f64.
    fn reference(x: &[f32], n_rot: usize, base: f64, position: u32, order: RopeOrder) -> Vec<f64> {
        let mut out: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        for pair in 0..n_rot / 2 {
            let t = f64::from(position) * base.powf(-2.0 * pair as f64 / n_rot as f64);
            let (i, j) = match order {
                RopeOrder::Norm => (2 * pair, 2 * pair + 1),
                RopeOrder::Neox => (pair, pair + n_rot / 2),
            };
            out[i] = f64::from(x[i]) * t.cos() - f64::from(x[j]) * t.sin();
            out[j] = f64::from(x[i]) * t.sin() + f64::from(x[j]) * t.cos();
        }
        out
    }

    #[test]
    fn both_orders_agree_with_the_definition_up_to_a_million() {
        let mut source = Source::new("rope");
        for (head_dim, n_rot) in [
            (64, 64),
            (128, 128),
            (80, 32),
            (96, 96),
            (20, 6),
            (7, 2),
            (50, 50),
        ] {
            for order in [RopeOrder::Norm, RopeOrder::Neox] {
                let n_head = 1 + source.below(3);
                let positions = [0, 1, 31, 5000, 131_071, 999_999, 1_000_000];
                let x = source.normal(positions.len() * n_head * head_dim);
                let mut angles = RopeAngles::new(order);
                angles.set(
                    &RopeTable::new(&plain(n_rot, 500_000.0)).unwrap(),
                    positions,
                );
                let expected: Vec<f64> = x
                    .chunks(head_dim)
                    .enumerate()
                    .flat_map(|(i, head)| {
                        reference(head, n_rot, 500_000.0, positions[i / n_head], order)
                    })
                    .collect();
                for simd in Simd::available() {
                    let what = format!("{simd:?} {order:?} {head_dim} {n_rot}");
                    let mut out = x.clone();
                    rope(simd, &angles, 0, &mut out, n_head, head_dim);
                    assert_close(&out, &expected, 2e-6, &what);
                    // The rows from the third on by themselves: the same bits.
                    let start = 2 * n_head * head_dim;
                    let mut tail = x[start..].to_vec();
                    rope(simd, &angles, 2, &mut tail, n_head, head_dim);
                    assert_eq!(tail, out[start..], "{what}");
                }
            }
        }
    }

    #[test]
    fn a_shift_of_both_positions_keeps_the_product() {
        let mut source = Source::new("rope shift");
        let table = RopeTable::new(&plain(64, 10_000.0)).unwrap();
        let (q, k) = (source.normal(64), source.normal(64));
        let product = |position_q: u32, position_k: u32| {
            let mut angles = RopeAngles::new(RopeOrder::Norm);
            angles.set(&table, [position_q, position_k]);
            let (mut q, mut k) = (q.clone(), k.clone());
            rope(Simd::detect(), &angles, 0, &mut q, 1, 64);
            rope(Simd::detect(), &angles, 1, &mut k, 1, 64);
            q.iter()
                .zip(&k)
                .map(|(q, k)| f64::from(*q) * f64::from(*k))
                .sum::<f64>()
        };
        assert!((product(17, 5) - product(100_017, 100_005)).abs() < 1e-4);
        assert!(
            (product(17, 5) - product(17, 6)).abs() > 1e-3,
            "the position has no effect"
        );
    }

    #[test]
    fn factors_and_linear_scaling_divide_the_frequency() {
        let factors: Vec<f32> = (0..32).map(|i| 1.0 + i as f32 / 4.0).collect();
        let params = RopeParams {
            scaling: RopeScaling::Linear { factor: 4.0 },
            freq_factors: Some(factors.clone()),
            ..plain(64, 10_000.0)
        };
        let (table, bare) = (
            RopeTable::new(&params).unwrap(),
            RopeTable::new(&plain(64, 10_000.0)).unwrap(),
        );
        for ((freq, bare), factor) in table.freqs.iter().zip(&bare.freqs).zip(&factors) {
            let expected = bare / (4.0 * f64::from(*factor));
            assert!((freq / expected - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn yarn_keeps_the_fast_pairs_and_stretches_the_slow_ones() {
        let yarn = |ext_factor| RopeParams {
            scaling: RopeScaling::Yarn {
                factor: 4.0,
                orig_ctx: 32_768,
                beta_fast: 32.0,
                beta_slow: 1.0,
                ext_factor,
                attn_factor: 1.0,
            },
            ..plain(128, 1_000_000.0)
        };
        let bare = RopeTable::new(&plain(128, 1_000_000.0)).unwrap();
        let table = RopeTable::new(&yarn(1.0)).unwrap();
        // Pairs with 32 turns and 1 turn in 32,768 positions: 64 ln(32768 / (32 * 2 pi)) / ln 1e6 = 23.6 and
        // 64 ln(32768 / 2 pi) / ln 1e6 = 39.65, rounded outwards to 23 and 40.
        for pair in 0..64 {
            let ratio = table.freqs[pair] / bare.freqs[pair];
            let blend = ((pair as f64 - 23.0) / 17.0).clamp(0.0, 1.0);
            assert!(
                (ratio - (1.0 - blend * 0.75)).abs() < 1e-12,
                "pair {pair}: {ratio}"
            );
        }
        assert!((table.magnitude - 1.138_629_436_111_989).abs() < 1e-12);
        // Without extrapolation: linear, and no magnitude.
        let linear = RopeTable::new(&yarn(0.0)).unwrap();
        assert!(
            linear
                .freqs
                .iter()
                .zip(&bare.freqs)
                .all(|(a, b)| (a * 4.0 / b - 1.0).abs() < 1e-12)
        );
        assert_eq!(linear.cos_sin(5, 0), (1.0, 0.0));
    }

    #[test]
    fn senseless_parameters_are_named() {
        let refused = |params: RopeParams| RopeTable::new(&params).unwrap_err().to_string();
        assert!(refused(plain(0, 1e4)).contains("dimension_count"));
        assert!(refused(plain(7, 1e4)).contains("is 7"));
        assert!(refused(plain(8, f64::NAN)).contains("freq_base"));
        let scaling = RopeScaling::Linear { factor: 0.0 };
        assert!(
            refused(RopeParams {
                scaling,
                ..plain(8, 1e4)
            })
            .contains("scaling factor is 0")
        );
        let freq_factors = Some(vec![1.0; 3]);
        assert!(
            refused(RopeParams {
                freq_factors,
                ..plain(8, 1e4)
            })
            .contains("3 factors")
        );
        let freq_factors = Some(vec![1.0, 0.0, 1.0, 1.0]);
        assert!(
            refused(RopeParams {
                freq_factors,
                ..plain(8, 1e4)
            })
            .contains("frequency factor is 0")
        );
    }
}
