//! The MTP head of a model, which predicts one token more: what it drafts, and when it runs.
//!
//! To the cache and the device it is a separate model: a plan, segments and a name among the
//! models', under the file of the model that it belongs to. So its segments are uploaded when it
//! drafts and evicted like those of an idle model. It runs after each pass, on the pass's accepted
//! rows, each with the token that follows it, which is known then:
//!
//! ```text
//! pass:   rows of positions p..q  ->  stream of each row, tokens up to q
//! block:  the same rows, each with the stream and the token behind it
//!             ->  keys and values of p..q, a draft of token q + 1
//! ```
//!
//! Its K and V lie in the sequence's pages beside those of the layers ([`crate::request::kv`]), and
//! are shared with them. A sequence whose rows it once missed cannot use it any more, since the
//! hidden states of those rows are gone.
//!
//! A failure here fails no request: the sequence goes on without the MTP head.
//!
//! *Invariant:* a sequence drafts with the block only while the block has the keys and values of
//! all its positions (`rows_to_predict`; test `drafts_do_not_depend_on_how_a_prompt_was_computed`).

use std::sync::Arc;

use rocmforge_ops::Plan;
use rocmforge_tensor_cache::ModelId;

use crate::api::error::Error;
use crate::model::rotations::Rotations;
use crate::pass::spec::{PassClient, RowOutput, WantedRow};

/// The MTP head of a registered model.
pub(crate) struct MtpHead {
    /// Id of the MTP head in the cache and among the models.
    pub(crate) id: ModelId,
    pub(crate) plan: Arc<Plan>,
    /// RoPE tables of the head's plan; made when it runs first.
    pub(super) rope: Vec<Rotations>,
    /// Whether sequences use the head; `false` if the budget has no room for its KV cache.
    pub(crate) on: bool,
    /// Moving average of the seconds that the head takes after a pass that only decodes.
    pub(crate) seconds: f64,
}

impl MtpHead {
    pub(super) fn new(id: ModelId, plan: &Arc<Plan>) -> Self {
        Self {
            id,
            plan: Arc::clone(plan),
            rope: Vec::new(),
            on: true,
            seconds: 0.0,
        }
    }

    /// Notes how many seconds the MTP head took behind a pass that only decodes.
    pub(super) fn note(&mut self, took: f64) {
        self.seconds = match self.seconds {
            0.0 => took,
            known => known + (took.min(known * 2.0) - known) / 8.0,
        };
    }
}

/// The tokens that a pass of an MTP head or a draft model found, in the order of its wanted rows.
pub(super) struct DraftRows {
    pub(super) tokens: Vec<Option<u32>>,
}

impl DraftRows {
    pub(super) fn with_capacity(rows: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(rows),
        }
    }
}

impl PassClient for DraftRows {
    fn ended(&self) -> Option<Error> {
        None
    }

    fn begun(&mut self) {}

    fn take(&mut self, _: WantedRow, found: RowOutput<'_>) {
        self.tokens.push(best_of(&found));
    }
}

/// The token with the largest logit, the one with the lowest id among equals.
fn best_of(found: &RowOutput<'_>) -> Option<u32> {
    match found {
        RowOutput::Best(best) => *best,
        RowOutput::Top(top) => top.and_then(|top| top.first()).map(|best| best.0),
        RowOutput::Logits(logits) => {
            let finite = logits.iter().enumerate().filter(|(_, x)| x.is_finite());
            let best = finite.reduce(|best, next| if next.1 > best.1 { next } else { best });
            best.map(|(token, _)| token as u32)
        }
        RowOutput::Hidden(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_of_the_best_tokens_is_drafted_and_none_where_nothing_is_finite() {
        let mut rows = DraftRows::with_capacity(4);
        let row = |row| WantedRow { wanted: row, row };
        rows.take(row(0), RowOutput::Logits(&mut [0.5, 2.0, f32::NAN, 2.0]));
        rows.take(row(1), RowOutput::Logits(&mut [f32::NAN, f32::INFINITY]));
        rows.take(row(2), RowOutput::Top(Some(&[(7, 1.0), (3, 0.5)])));
        rows.take(row(3), RowOutput::Best(Some(9)));
        assert_eq!(rows.tokens, [Some(1), None, Some(7), Some(9)]);
    }
}
