//! Forecasts when a segment is used next, from what is known (the order of a pass, the passes still
//! expected, the models that requests wait for) and predicted (when a model is requested again,
//! which expert is routed to).
//!
//! A next use is a pair, compared in this order: how many requests ahead, and how far into the
//! pass. A request is a run of passes of one model. Counting requests and not accesses makes the
//! prediction independent of how long the requests are: of two models that alternate, the one that
//! is idle is always one request ahead, and the one that runs its last pass two. A model without
//! waiting requests comes after all that have some, in the predicted order.

use crate::state::Model;
use crate::{Cache, ModelId};

/// Expected next use of a segment; the greater, the later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NextUse {
    /// Number of requests until the use, in units of 1/256; 0 within what runs now.
    pub(crate) requests: u64,
    /// Number of segments until the use, counted from now or from the start of that request.
    pub(crate) segments: u64,
}

/// History of a model's requests: the time of the last one and the usual distance between them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct History {
    /// The request clock at the last request, or at registration.
    last: u64,
    /// Number of distances seen.
    samples: u32,
    /// Moving average of the distance between two requests.
    gap: f64,
    /// Moving average of the absolute deviation from `gap`.
    deviation: f64,
}

impl History {
    pub(crate) fn new(now: u64) -> History {
        History {
            last: now,
            ..History::default()
        }
    }

    /// Records that a request begins at `now` on the request clock.
    pub(crate) fn request(&mut self, now: u64, is_first: bool) {
        if !is_first {
            let gap = now.saturating_sub(self.last) as f64;
            if self.samples == 0 {
                self.gap = gap;
            } else {
                self.deviation += ((gap - self.gap).abs() - self.deviation) / 4.0;
                self.gap += (gap - self.gap) / 4.0;
            }
            self.samples = self.samples.saturating_add(1);
        }
        self.last = now;
    }

    /// Expected number of requests until the next one of this model, in units of 1/256, at least 1.
    pub(crate) fn ahead(&self, now: u64) -> u64 {
        let elapsed = now.saturating_sub(self.last) as f64;
        let requests = if self.samples == 0 {
            // Nothing is known: the longer ago, the farther, so the order is that of recency.
            1.0 + elapsed
        } else if self.deviation * 4.0 <= self.gap {
            // Regular: it is due one gap after the last, and when it is overdue, ever less likely.
            if elapsed < self.gap {
                self.gap - elapsed
            } else {
                1.0 + elapsed - self.gap
            }
        } else {
            // Irregular: how long ago says nothing until it is longer than usual.
            self.gap.max(elapsed)
        };
        (requests.max(1.0) * 256.0) as u64
    }
}

impl Cache {
    /// Sets the order in which models will run after the current one, as far as requests wait for
    /// them. It stays valid until it is set again. Unknown models and repeated ones are ignored.
    pub fn foresee(&mut self, upcoming: &[ModelId]) {
        for model in self.models.values_mut() {
            model.awaited = None;
        }
        self.awaited = 0;
        for id in upcoming {
            if let Some(model) = self.models.get_mut(id)
                && model.awaited.is_none()
            {
                model.awaited = Some(self.awaited);
                self.awaited += 1;
            }
        }
    }

    /// Number of requests until the next one of a model that expects no pass now, in units of
    /// 1/256, at least 1.
    pub(crate) fn requests_ahead(&self, model: &Model) -> u64 {
        match model.awaited {
            Some(place) => (u64::from(place) + 1) * 256,
            None => u64::from(self.awaited) * 256 + model.history.ahead(self.request_clock),
        }
    }
}

/// Recency and frequency of an expert in one number: the logarithm of the sum of 2^(t /
/// HALF_LIFE) over its uses at passes t (LRFU: Lee et al., "LRFU: a spectrum of policies",
/// IEEE ToC 2001). Scores decay alike, so their order changes only by a use, and a score can
/// be the key of an ordered set.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Score(f64);

/// Number of passes without a use after which a use counts half.
const HALF_LIFE_PASSES: f64 = 16.0;

impl Score {
    /// The score after one more use of the segment, in pass number `pass` of its model.
    pub(crate) fn used(self, pass: u64) -> Score {
        let t = pass as f64 / HALF_LIFE_PASSES + 1.0;
        if self.0 == 0.0 {
            return Score(t);
        }
        let (high, low) = if t > self.0 { (t, self.0) } else { (self.0, t) };
        Score(high + (low - high).exp2().ln_1p() / std::f64::consts::LN_2)
    }

    /// The score as a number.
    pub(crate) fn value(self) -> f64 {
        self.0
    }

    /// A key that orders as the score does (positive floats order as their bits do).
    pub(crate) fn key(self) -> u64 {
        self.0.to_bits()
    }

    /// Passes until the next use, if it is used in future as often as in the recent past.
    pub(crate) fn passes_ahead(self, pass: u64) -> f64 {
        let t = pass as f64 / HALF_LIFE_PASSES + 1.0;
        let uses = (self.0 - t).exp2();
        let uses_max = 1.0 / (1.0 - (-1.0 / HALF_LIFE_PASSES).exp2());
        (uses_max / uses.max(1e-9)).clamp(1.0, 1e9)
    }
}
