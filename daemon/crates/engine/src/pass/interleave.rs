//! Prompts of a mixture that go through the layers a few steps at a time, between passes of tokens.
//!
//! A pass that has rows of prompts beside tokens reads a dense model's weights once for both. A
//! mixture's rows go to experts of their own: beside 8 tokens, 8 rows of a prompt have a layer of
//! 128 experts read 82 of them where the tokens alone need 52, and so a pass has few rows of
//! prompts if tokens are not to wait long. Many rows read all experts once. So such a chunk is a
//! pass of its own, which stops between two steps whenever the tokens' next pass is due:
//!
//! ```text
//! tokens |####|      |####|      |####|      |####|
//! prompt |    |000111|    |223344|    |455667|    |88..   (layers of one chunk)
//! ```
//!
//! All that a pass has between two steps lies in its scratch. The two have parts of one block,
//! tokens the first one, as in passes of their own: their recordings stay valid.
//!
//! While a chunk is under way nobody is admitted and no command is taken, as in any pass; each
//! slice has a step at least, so it ends. Of a text that ends meanwhile the last tokens are told at
//! once, and its memory is given back; its end is told with the chunk's. Nor are tokens drafted.

use std::collections::HashMap;

use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::ModelId;

use crate::pass::share::TOLERANCE;

/// Rows of a chunk: each expert of 128 of which a row goes to 8 has 32, what the kernels for
/// many rows take at a time.
pub(crate) const CHUNK_ROWS: u32 = 512;

/// Prompts with fewer rows join a decode pass instead of being interleaved.
pub(crate) const CHUNK_ROWS_MIN: u32 = 16;

/// A slice at first, in parts of what tokens may wait longer.
const SLICE_FIRST: f64 = 0.75;

/// What a slice loses, in such parts, when tokens took longer than they may, and what it gains when
/// they did not: so one of thirty may take longer. A slice ends with a layer, and layers of many
/// rows far into a text take a third of it: what tokens take in the mean says little of the
/// longest.
const TOO_LONG: f64 = 0.06;
const SHORT: f64 = 0.002;

/// What a slice gains when tokens took much less than they may, by more than such a part.
const FAR_TOO_SHORT: f64 = 0.45;
const MUCH: f64 = 0.02;

/// Tokens have a pass at a chunk's end too if its last slice was longer than this part of one.
pub(crate) const LAST_PART: f64 = 0.125;

/// A pass taken apart.
pub(crate) struct Interleaved {
    pub(crate) tokens: PassPlan,
    pub(crate) prompts: PassPlan,
    /// Where the prompts' scratch begins in the block.
    pub(crate) prompts_at: u64,
}

/// How long a chunk goes on between two passes of tokens. It learns from the time that tokens
/// took from pass to pass: a device has work queued when a chunk stops.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Slice {
    /// Seconds of the slice, in parts of those that tokens may wait longer.
    part: Option<f64>,
    /// There was no room for two scratches: prompts share passes until tokens have one alone.
    pub(crate) declined: bool,
}

impl Slice {
    /// Seconds of the next slice, where tokens may wait `longer` seconds longer than alone.
    pub(crate) fn seconds(self, longer: f64) -> f64 {
        self.part.unwrap_or(SLICE_FIRST) * longer
    }

    /// With such a slice tokens took `took` seconds from pass to pass, of `allowed`.
    pub(crate) fn note(&mut self, longer: f64, allowed: f64, took: f64) {
        let change = match (allowed * TOLERANCE - took) / longer {
            left if left < 0.0 => -TOO_LONG,
            left if left > FAR_TOO_SHORT => MUCH,
            _ => SHORT,
        };
        let part = self.part.unwrap_or(SLICE_FIRST) + change;
        self.part = Some(part.clamp(0.0, 1.0));
    }
}

/// The slices of all models' chunks.
#[derive(Debug, Default)]
pub(crate) struct Interleaving {
    slices: HashMap<ModelId, Slice>,
    /// Passes of tokens that ran between the steps of a prompt's chunk.
    pub(crate) passes: u64,
}

impl Interleaving {
    /// The slice of a model's chunks.
    pub(crate) fn slice(&mut self, model: ModelId) -> &mut Slice {
        self.slices.entry(model).or_default()
    }

    /// Whether there was no room for two scratches, and no pass of tokens alone since.
    pub(crate) fn is_declined(&self, model: ModelId) -> bool {
        self.slices.get(&model).is_some_and(|slice| slice.declined)
    }

    /// A model is gone.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.slices.remove(&model);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens take 4 ms alone, and layers of a chunk `layer` seconds, of which `queued` of one is
    /// behind when a slice stops. What they take from pass to pass once that is learned.
    fn passes(layer: f64, queued: f64) -> Vec<f64> {
        let (alone, longer) = (4e-3, 4e-3);
        let mut slice = Slice::default();
        let mut passes = Vec::new();
        for pass in 0..2000 {
            let seconds = slice.seconds(longer);
            // As `run_chunk` does: one at least.
            let mut layers = 1;
            while f64::from(layers + 1) * layer < seconds {
                layers += 1;
            }
            // Some vary a little.
            let took = alone + f64::from(layers) * layer + queued + f64::from(pass % 7) * 2e-5;
            slice.note(longer, alone + longer, took);
            passes.push(took);
        }
        passes.split_off(200)
    }

    #[test]
    fn few_tokens_wait_longer_than_they_may_and_most_wait_nearly_as_long() {
        for layer in [0.1e-3, 0.4e-3, 0.9e-3, 1.3e-3] {
            for queued in [0.0, 0.3e-3, 1e-3] {
                let passes = passes(layer, queued);
                let long = passes
                    .iter()
                    .filter(|took| **took > 8e-3 * TOLERANCE)
                    .count();
                assert!(long * 20 <= passes.len(), "{layer} {queued}: {long}");
                let mean = passes.iter().sum::<f64>() / passes.len() as f64;
                assert!(mean >= 7.5e-3 - 1.3 * layer, "{layer} {queued}: {mean}");
            }
        }
    }

    #[test]
    fn what_held_up_one_pass_changes_little() {
        let mut slice = Slice::default();
        let before = slice.seconds(4e-3);
        slice.note(4e-3, 8e-3, 1.0);
        assert!(slice.seconds(4e-3) >= before * 0.8);
    }
}
