//! The frequencies of the rotary position embedding.
//!
//! RoFormer (arXiv 2104.09864) gives `freq[i] = base^(-2 i / n_rot)`; per-pair factors (the
//! `rope_freqs` tensor of Llama 3) divide it; linear scaling divides it by the context's stretch;
//! YaRN (arXiv 2309.00071) blends the stretched and the plain frequency by how many turns a pair
//! makes within the original context, and multiplies cos and sin by a magnitude
//! `0.1 ln(factor) + 1`. Conventions (rounding of the ramp's ends, what attn_factor and ext_factor
//! multiply) are those of ggml's `ggml_rope_ext`.
//!
//! Frequencies do not depend on the position, so a [`RopeTable`] holds one f64 a pair, and the
//! angle is one f64 product: exact to 1e-9 radians at position 1M.

use std::f64::consts::PI;

use rocmforge_ops::RopeScaling;

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
    /// Multiplies cos and sin, beside the stretch's own magnitude.
    pub magnitude: f64,
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
        /// Name of the parameter.
        name: &'static str,
        /// Value of the parameter.
        value: f64,
    },
    /// The number of factors differs from the number of rotated pairs.
    #[error(
        "rope_freqs has {found} factors where {expected} pairs are rotated; fetch or convert the file again"
    )]
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
    /// cos and sin of the first [`SPAN`] positions, `[SPAN][n_rot / 2]`, without the magnitude.
    low: Vec<(f64, f64)>,
}

/// Positions whose angles are the sum of two: of the multiple of this below, and of the
/// rest. Half of it is looked up.
const SPAN: u32 = 64;

/// cos and sin of two angles' sum.
fn sum((cos_a, sin_a): (f64, f64), (cos_b, sin_b): (f64, f64)) -> (f64, f64) {
    (cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b)
}

/// cos and sin of all pairs at a multiple of [`SPAN`], `[n_rot / 2]`.
#[derive(Clone, Debug, Default)]
struct RopeSpan {
    start: Option<u32>,
    cos_sin: Vec<(f64, f64)>,
}

/// Spans that are kept: sequences of a pass are at positions far from each other, and come to
/// the next ones pass by pass.
const SPANS_KEPT: usize = 256;

/// The spans of one table that were used last, each in the place of its number.
#[derive(Clone, Debug, Default)]
pub(super) struct RopeSpans {
    /// Whose they are.
    freqs: Vec<f64>,
    spans: Vec<RopeSpan>,
}

impl RopeSpans {
    /// The span of `table` that begins at `start`.
    fn get(&mut self, table: &RopeTable, start: u32) -> &[(f64, f64)] {
        if self.freqs != table.freqs {
            self.freqs.clone_from(&table.freqs);
            self.spans.clear();
        }
        let place = (start / SPAN) as usize % SPANS_KEPT;
        if self.spans.len() <= place {
            self.spans.resize_with(place + 1, RopeSpan::default);
        }
        let span = &mut self.spans[place];
        if span.start != Some(start) {
            span.start = Some(start);
            span.cos_sin.clear();
            span.cos_sin
                .extend(table.freqs.iter().map(|f| cos_sin(start, *f)));
        }
        &span.cos_sin
    }
}

/// Refuses dimensions, a base and divisors of frequencies that make no sense.
fn check_frequencies(params: &RopeParams) -> Result<(), RopeError> {
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
    Ok(())
}

impl RopeTable {
    fn with(freqs: Vec<f64>, magnitude: f64) -> RopeTable {
        let low = (0..SPAN).flat_map(|p| freqs.iter().map(move |f| cos_sin(p, *f)));
        RopeTable {
            low: low.collect(),
            freqs,
            magnitude,
        }
    }

    /// The table of `params`.
    ///
    /// # Errors
    /// A parameter that makes no sense; see [`RopeError`].
    pub fn new(params: &RopeParams) -> Result<RopeTable, RopeError> {
        check_frequencies(params)?;
        let n_rot = params.n_rot;
        let plain = |pair: usize| {
            let divisor = params
                .freq_factors
                .as_ref()
                .map_or(1.0, |f| f64::from(f[pair]));
            params.freq_base.powf(-2.0 * pair as f64 / n_rot as f64) / divisor
        };
        let pairs = 0..n_rot / 2;
        match params.scaling {
            RopeScaling::None => Ok(RopeTable::with(
                pairs.map(plain).collect(),
                params.magnitude,
            )),
            RopeScaling::Linear { factor } => {
                positive("scaling factor", factor)?;
                Ok(RopeTable::with(
                    pairs.map(|i| plain(i) / factor).collect(),
                    params.magnitude,
                ))
            }
            RopeScaling::Yarn {
                factor,
                orig_ctx,
                beta_fast,
                beta_slow,
                ext_factor,
                attn_factor,
                rounded,
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
                let (low, high) = match (pair_of(beta_fast), pair_of(beta_slow)) {
                    (low, high) if rounded => (low.floor(), high.ceil()),
                    exact => exact,
                };
                let (low, high) = (low.max(0.0), high.min(n_rot as f64 - 1.0));
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
                Ok(RopeTable::with(
                    freqs.collect(),
                    attn_factor * stretch * params.magnitude,
                ))
            }
        }
    }

    /// The table for places in a plane ([`RopeAxes::Plane`](rocmforge_ops::RopeAxes)): the second
    /// half of the pairs has the frequencies of the first, or those between them.
    ///
    /// # Errors
    /// As [`RopeTable::new`]; the rotated elements must be a multiple of four.
    pub fn plane(n_rot: usize, freq_base: f64, in_turn: bool) -> Result<RopeTable, RopeError> {
        if n_rot == 0 || !n_rot.is_multiple_of(4) {
            return Err(RopeError::OddDimensions { n_rot });
        }
        positive("freq_base", freq_base)?;
        let pairs = n_rot / 4;
        let between = if in_turn { 0.5 } else { 0.0 };
        let freq = |pair: usize| {
            let half = if pair < pairs { 0.0 } else { between };
            freq_base.powf(-((pair % pairs) as f64 + half) / pairs as f64)
        };
        Ok(RopeTable::with((0..2 * pairs).map(freq).collect(), 1.0))
    }

    /// Elements of a head that are rotated.
    #[must_use]
    pub fn n_rot(&self) -> usize {
        self.freqs.len() * 2
    }

    /// cos and sin of every pair at `position`, the magnitude included. They depend on the position
    /// alone; `spans` are kept from call to call.
    pub(super) fn cos_sin(
        &self,
        position: u32,
        spans: &mut RopeSpans,
    ) -> impl Iterator<Item = (f32, f32)> {
        let start = position - position % SPAN;
        let span = spans.get(self, start);
        let low = (position - start) as usize * self.freqs.len();
        span.iter().zip(&self.low[low..]).map(|(&a, &b)| {
            let (cos, sin) = sum(a, b);
            ((cos * self.magnitude) as f32, (sin * self.magnitude) as f32)
        })
    }
}

fn cos_sin(position: u32, freq: f64) -> (f64, f64) {
    let (sin, cos) = (f64::from(position) * freq).sin_cos();
    (cos, sin)
}

fn positive(name: &'static str, value: f64) -> Result<(), RopeError> {
    if value > 0.0 && value.is_finite() {
        Ok(())
    } else {
        Err(RopeError::NotPositive { name, value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(n_rot: usize, freq_base: f64) -> RopeParams {
        RopeParams {
            n_rot,
            freq_base,
            scaling: RopeScaling::None,
            freq_factors: None,
            magnitude: 1.0,
        }
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
    fn a_plane_has_the_frequencies_of_half_a_head_twice() {
        let (table, half) = (
            RopeTable::plane(72, 10_000.0, false).unwrap(),
            RopeTable::new(&plain(36, 10_000.0)).unwrap(),
        );
        let (rows, columns) = table.freqs.split_at(18);
        assert_eq!(rows, columns);
        for (freq, half) in rows.iter().zip(&half.freqs) {
            assert!((freq / half - 1.0).abs() < 1e-12);
        }
        assert!(RopeTable::plane(70, 10_000.0, false).is_err());
        // In turn: those of the whole head, every second one in each half.
        let table = RopeTable::plane(72, 10_000.0, true).unwrap();
        let whole = RopeTable::new(&plain(72, 10_000.0)).unwrap();
        for (pair, freq) in table.freqs.iter().enumerate() {
            let expected = whole.freqs[pair % 18 * 2 + pair / 18];
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
                rounded: true,
            },
            ..plain(128, 1_000_000.0)
        };
        let bare = RopeTable::new(&plain(128, 1_000_000.0)).unwrap();
        let table = RopeTable::new(&yarn(1.0)).unwrap();
        // Pairs with 32 turns and 1 turn in 32,768 positions: 64 ln(32768 / (32 * 2 pi)) / ln 1e6 =
        // 23.6 and 64 ln(32768 / 2 pi) / ln 1e6 = 39.65, rounded outwards to 23 and 40.
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
        let mut spans = RopeSpans::default();
        assert!(
            linear
                .cos_sin(0, &mut spans)
                .all(|cos_sin| cos_sin == (1.0, 0.0))
        );
    }

    #[test]
    fn angles_are_those_of_the_position_to_the_last_bit_but_one() {
        let table = RopeTable::new(&plain(128, 500_000.0)).unwrap();
        let mut spans = RopeSpans::default();
        // 16,448 and 64 have one place, as 131,071 and 16,383; of another table nothing is taken.
        let other = RopeTable::new(&plain(128, 10_000.0)).unwrap();
        for position in [0, 1, 63, 64, 65, 4095, 131_071, 16_383, 70, 16_448, 64] {
            other.cos_sin(position, &mut spans).for_each(drop);
            let found: Vec<_> = table.cos_sin(position, &mut spans).collect();
            let again: Vec<_> = table.cos_sin(position, &mut spans).collect();
            assert_eq!(found, again);
            for ((cos, sin), freq) in found.into_iter().zip(&table.freqs) {
                let (s, c) = (f64::from(position) * freq).sin_cos();
                for (found, exact) in [(cos, c), (sin, s)] {
                    assert!((f64::from(found) - exact).abs() < 6.1e-8, "{position}");
                }
            }
        }
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
