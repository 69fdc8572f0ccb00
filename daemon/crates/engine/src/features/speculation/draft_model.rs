//! Draft models: a small model with the same vocabulary drafts what comes next, and the large one
//! checks several tokens at once.
//!
//! A draft model is a model like any other, named when the one it drafts for is loaded. It runs
//! behind a pass, for the sequences that have another token by it, with keys and values of its own
//! ([`crate::features::speculation::draft_kv::DraftKvCache`]):
//!
//! ```text
//! pass:     the last token, drafts -> the right ones, and a token behind them
//! catch up: a chunk of what the draft model does not know yet, where that is much;
//!           without drafts until it is done
//! draft:    the few tokens it does not know -> a draft; that draft -> the next one; ...
//!           of all sequences at once
//! ```
//!
//! Rows of wrong drafts are written over by the next run. How many are drafted, and for which
//! sequences, follows from how often drafts were right, from the number of sequences, and from the
//! measured times of both models' passes. The first [`TRIALS`] drafts of a pair are made whatever
//! they cost, to learn that. A sequence for which drafts are not worthwhile for a while gives its
//! draft KV cache back, and is tried again much later.
//!
//! Drafting begins when a sequence has its first token, so TTFT does not grow. Admission does not
//! count a draft model's memory, which is evicted whenever a request lacks memory. A failure here
//! fails no request: the sequence goes on without drafts.

use rocmforge_tensor_cache::ModelId;

use crate::api::error::Error;
use crate::features::speculation::drafts::{LIKELY_AT_FIRST, learn, recover};
use crate::model::loaded::LoadedModel;
use crate::model::registry::Models;

/// Rate at which a model pair whose drafts were rejected recovers in the estimate, per new
/// sequence, so that it is tried again.
const PAIR_RECOVERY: f64 = 1.0 / 32.0;

/// The draft model of a registered model.
#[derive(Debug)]
pub(crate) struct DraftModel {
    pub(crate) id: ModelId,
    pub(crate) name: String,
    /// Whether the draft model is usable: it had no failure but lack of room.
    pub(super) on: bool,
    /// Moving average, over all sequences, of the probability that a draft token is accepted if
    /// those before it were.
    likely: f64,
    /// Number of draft tokens that the pair has computed.
    pub(super) made: u32,
    /// Number of passes for which no drafts are made (after a lack of memory).
    pub(super) rest: u32,
    /// Seconds of a row of a long prompt on the draft model; 0 before the first measurement.
    pub(super) row_seconds: f64,
}

impl DraftModel {
    pub(super) fn new(id: ModelId, name: &str) -> Self {
        Self {
            id,
            name: name.to_owned(),
            on: true,
            likely: LIKELY_AT_FIRST,
            made: 0,
            rest: 0,
            row_seconds: 0.0,
        }
    }

    /// Whether the draft model has had no failure except lack of memory.
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Whether the draft model drafts now: it has not failed, and does not rest after a lack of
    /// room.
    pub(crate) fn is_used(&self) -> bool {
        self.on && self.rest == 0
    }

    /// Records that of `made` draft tokens the first `right` were accepted.
    pub(crate) fn note(&mut self, made: usize, right: usize) {
        self.made = self.made.saturating_add(made as u32);
        learn(&mut self.likely, made, right);
    }

    /// Estimated acceptance rate for a new sequence, for which the draft model has made no drafts
    /// yet; each call raises it a little, so that a rejected pair is tried again.
    pub(super) fn of_a_new_sequence(&mut self) -> f64 {
        recover(&mut self.likely, PAIR_RECOVERY);
        self.likely
    }
}

/// Looks up the model `name` as draft model of `of`.
///
/// # Errors
/// [`Error::UnknownModel`], and [`Error::InvalidArgument`] if it cannot draft for that
/// model.
pub(crate) fn draft_model(
    models: &Models,
    of: &LoadedModel,
    name: &str,
) -> Result<DraftModel, Error> {
    let invalid = |message: String| Error::InvalidArgument {
        field: "draft",
        message,
    };
    let of_name = of.name();
    if name == of_name {
        return Err(invalid(format!(
            "'{name}' cannot draft for itself; name a smaller model with the same vocabulary"
        )));
    }
    let entry = models.find(name)?;
    if entry.loaded.model().plan().state_elements > 0 {
        return Err(invalid(format!(
            "'{name}' ({}) has recurrent states, which a draft model cannot have yet; name a model of attention alone",
            entry.loaded.model().hparams().arch
        )));
    }
    if let Some(difference) = of.vocabulary_differs(&entry.loaded) {
        return Err(invalid(format!(
            "'{name}' cannot draft for '{of_name}', whose vocabulary is another one: {difference}; name a model with the \
             same vocabulary"
        )));
    }
    Ok(DraftModel::new(entry.id, name))
}
