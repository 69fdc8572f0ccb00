//! Finds the token at which the most likely tokens reach a share of all weights, without sorting
//! the vocabulary: logits are counted in buckets, and only one bucket is sorted.

use crate::request::sampler::candidates::{Weight, falling};

/// Number of buckets between the largest and the smallest logit. With a vocabulary of 150k tokens
/// each bucket has at most some hundreds, unless most logits are alike.
const BUCKETS: usize = 2048;

/// A weight of `exp(-NO_SHARE)` adds nothing to the sum over a vocabulary.
const NO_SHARE: f64 = 60.0;

/// The smallest logit that is not minus infinity; none may be above `best`.
fn least_left(all: &[f32], best: f32) -> f32 {
    let least = |a: f32, b: f32| if b < a && b > f32::NEG_INFINITY { b } else { a };
    // Lanes, so that several are looked at a time.
    let mut lanes = [best; 32];
    let blocks = all.chunks_exact(lanes.len());
    let rest = blocks.remainder();
    for block in blocks {
        for (lane, logit) in lanes.iter_mut().zip(block) {
            *lane = least(*lane, *logit);
        }
    }
    let all = lanes.iter().chain(rest);
    all.fold(best, |a, b| least(a, *b))
}

/// The bucket of a logit that lies `below` buckets under the best. Monotonic, so buckets have the
/// same order as tokens; NaN (all logits equal) goes to the last bucket.
fn bucket(below: f32) -> u32 {
    // Adding it rounds a small number to an integer, in the lowest bits.
    const ROUNDER: f32 = 8_388_608.0;
    let last = (BUCKETS - 1) as f32;
    let below = if below < last { below } else { last };
    (below + ROUNDER).to_bits() & (BUCKETS as u32 - 1)
}

/// Number of logits whose weights are computed at a time.
const BLOCK: usize = 256;

/// The token at which the most likely tokens reach a share of the sum of all weights, computed from
/// the same weights so that rounding leaves no rest. `None` if no token is left.
pub(super) fn at_share(all: &[f32], share: f64, weight: Weight) -> Option<(u32, f32)> {
    let least = least_left(all, weight.best);
    let spread = f64::from(weight.best) - f64::from(least);
    // What is below has no share, and few such logits must not leave all others one bucket.
    let spread = spread.min(NO_SHARE / weight.inverse_temperature);
    let buckets_of_one = (BUCKETS as f64 / spread) as f32;
    let bucket = |logit: f32| bucket((weight.best - logit) * buckets_of_one);
    let fill = |logits: &[f32], places: &mut [u32; BLOCK]| {
        let each = places.iter_mut().zip(logits);
        each.for_each(|(place, logit)| *place = bucket(*logit));
    };
    let mut sums = vec![0.0; BUCKETS];
    let (mut weights, mut places) = ([0.0; BLOCK], [0; BLOCK]);
    for logits in all.chunks(BLOCK) {
        let weights = &mut weights[..logits.len()];
        weight.fill(logits, weights);
        fill(logits, &mut places);
        for (place, weight) in places.iter().zip(weights) {
            sums[*place as usize] += f64::from(*weight);
        }
    }
    let wanted = share * sums.iter().sum::<f64>();
    let mut sum = 0.0;
    let crossed = sums.iter().position(|of_bucket| {
        let crosses = sum + of_bucket >= wanted;
        sum += if crosses { 0.0 } else { *of_bucket };
        crosses
    });
    let crossed = crossed.map_or_else(|| bucket(least), |at| at as u32);
    let mut tokens = Vec::new();
    for (logits, first) in all.chunks(BLOCK).zip((0u32..).step_by(BLOCK)) {
        fill(logits, &mut places);
        if !places.contains(&crossed) {
            continue;
        }
        let each = (first..).zip(logits.iter().copied()).zip(&places);
        let inside =
            each.filter(|((_, logit), place)| **place == crossed && *logit != f32::NEG_INFINITY);
        tokens.extend(inside.map(|(token, _)| token));
    }
    tokens.sort_unstable_by(falling);
    let crossing = tokens.iter().find(|token| {
        let mut of_token = [0.0];
        weight.fill(&[token.1], &mut of_token);
        sum += f64::from(of_token[0]);
        sum >= wanted
    });
    crossing.or(tokens.last()).copied()
}
