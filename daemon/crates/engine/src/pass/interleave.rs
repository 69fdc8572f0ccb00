//! Prompts of MoE models that run a few steps at a time, between decode passes.
//!
//! A pass that has rows of prompts beside tokens reads a dense model's weights once for both. A MoE
//! model's rows go to different experts: beside 8 tokens, 8 rows of a prompt have a layer of 128
//! experts read 82 of them where the tokens alone need 52, and so a pass has few rows of prompts if
//! tokens are not to wait long. Many rows read all experts once. So such a chunk is a pass of its
//! own, which stops between two steps whenever the tokens' next pass is due:
//!
//! ```text
//! tokens |####|      |####|      |####|      |####|
//! prompt |    |000111|    |223344|    |455667|    |88..   (layers of one chunk)
//! ```
//!
//! All that a pass has between two steps lies in its scratch. The two have parts of one block,
//! tokens the first one, as in passes of their own: their graphs stay valid.
//!
//! While a chunk is under way nobody is admitted and no command is taken, as in any pass; each
//! slice has a step at least, so it ends. If a request ends meanwhile, its last tokens are sent at
//! once and its memory is freed; its end is reported with the chunk's. No tokens are drafted
//! meanwhile.

use std::collections::HashMap;

use rocmforge_scheduler::PassPlan;
use rocmforge_tensor_cache::ModelId;

use crate::pass::share::TOLERANCE;

/// Number of rows of a chunk: if each row goes to 8 of 128 experts, each expert has 32 rows, as
/// many as the kernels for many rows take at a time.
pub(crate) const CHUNK_ROWS: u32 = 512;

/// Prompts with fewer rows join a decode pass instead of being interleaved.
pub(crate) const CHUNK_ROWS_MIN: u32 = 16;

/// Length of the first slice, as a fraction of the time that tokens may be delayed.
const SLICE_FIRST: f64 = 0.75;

/// Decrease of a slice's length, as a fraction of the allowed delay, if tokens were delayed more
/// than allowed, and increase (one part in thirty of it) if they were not. A slice ends with a
/// layer, and layers of many rows late in a text take a third of a slice: the mean delay says
/// little about the longest.
const TOO_LONG: f64 = 0.06;
const SHORT: f64 = 0.002;

/// The slice grows further if tokens were delayed less than allowed by more than this fraction.
const FAR_TOO_SHORT: f64 = 0.45;
const MUCH: f64 = 0.02;

/// Decode passes also run at a chunk's end if its last slice was longer than this fraction of a
/// slice.
pub(crate) const LAST_PART: f64 = 0.125;

/// A pass that was split into a chunk of prompts and decode passes.
pub(crate) struct Interleaved {
    pub(crate) tokens: PassPlan,
    pub(crate) prompts: PassPlan,
    /// Offset of the prompts' scratch in the scratch block.
    pub(crate) prompts_at: u64,
}

/// How long a chunk runs between two decode passes. Learns from the measured time between decode
/// passes, since a device has work queued when a chunk stops.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Slice {
    /// Length of the slice, as a fraction of the time that tokens may be delayed.
    part: Option<f64>,
    /// Whether there was no memory for two scratch areas, so that prompts share passes with tokens
    /// until the next pass without prompts.
    pub(crate) declined: bool,
}

impl Slice {
    /// Seconds of the next slice, if tokens may be delayed by `longer` seconds.
    pub(crate) fn seconds(self, longer: f64) -> f64 {
        self.part.unwrap_or(SLICE_FIRST) * longer
    }

    /// Learns from a slice after which decode passes were `took` seconds apart, where `allowed` was
    /// the limit.
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

/// State of interleaved prompts of all models.
#[derive(Debug, Default)]
pub(crate) struct Interleaving {
    slices: HashMap<ModelId, Slice>,
    /// Number of decode passes that ran between the steps of a chunk.
    pub(crate) passes: u64,
}

impl Interleaving {
    /// The slice of a model's chunks, mutable.
    pub(crate) fn slice(&mut self, model: ModelId) -> &mut Slice {
        self.slices.entry(model).or_default()
    }

    /// Whether there was no memory for two scratch areas, and no pass without prompts since.
    pub(crate) fn is_declined(&self, model: ModelId) -> bool {
        self.slices.get(&model).is_some_and(|slice| slice.declined)
    }

    /// Forgets the state of a model that is unloaded.
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
