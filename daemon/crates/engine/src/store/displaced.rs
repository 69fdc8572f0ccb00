//! Records why weights are uploaded (what evicted them, and for which model), and how long passes
//! wait for uploads.
//!
//! *Invariant:* a segment's latest eviction is kept until the segment is uploaded again or its
//! model is unloaded, and a model has at most [`REASONS_MAX`] distinct reasons.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use rocmforge_tensor_cache::{EvictionCause, ModelId, SegmentId};

use crate::api::times::UploadsBefore;

/// Maximum number of reasons for uploads that are listed per model; the bytes of further reasons
/// are added to the last.
pub(crate) const REASONS_MAX: usize = 16;

/// Why a segment was not resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reason {
    /// Cause of the segment's eviction; `None` if it had not been resident before.
    pub(crate) cause: Option<EvictionCause>,
    /// The model that took the segment's memory, if one did.
    pub(crate) by: Option<ModelId>,
}

/// Bytes uploaded of a model since it was loaded.
#[derive(Debug, Default)]
struct Tally {
    bytes: u64,
    cold_bytes: u64,
    /// Bytes by reason. Reasons are only appended, so that an index in this list names one.
    reasons: Vec<(Reason, u64)>,
}

/// Time that the engine waited for uploads and disk, and bytes uploaded, since start-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Waited {
    /// Time that passes waited for uploads and reads from disk.
    pub(crate) all: Duration,
    /// Time that passes waited for reads from disk: files of uploads, and rows of embeddings.
    pub(crate) disk: Duration,
    /// Bytes of completed uploads.
    pub(crate) linked_bytes: u64,
    /// The model that passes waited for last.
    pub(crate) model: Option<ModelId>,
}

/// Records why weights are uploaded, and how long passes wait for uploads.
#[derive(Debug, Default)]
pub(crate) struct UploadReasons {
    evicted: HashMap<SegmentId, Reason>,
    of_models: HashMap<ModelId, Tally>,
    /// Segments in flight whose file range was not in the page cache.
    cold: HashSet<SegmentId>,
    pub(crate) waited: Waited,
}

impl UploadReasons {
    /// Records the eviction of a segment.
    pub(crate) fn evicted(&mut self, segment: SegmentId, reason: Reason) {
        self.evicted.insert(segment, reason);
    }

    /// Records that an upload begins; `is_cold` says that its file range is not in the page cache.
    pub(crate) fn begun(&mut self, segment: SegmentId, bytes: u64, is_cold: bool) {
        let reason = self.evicted.remove(&segment).unwrap_or(Reason {
            cause: None,
            by: None,
        });
        let tally = self.of_models.entry(segment.model).or_default();
        tally.bytes += bytes;
        if is_cold {
            tally.cold_bytes += bytes;
            self.cold.insert(segment);
        }
        let has_room = tally.reasons.len() < REASONS_MAX;
        let known = tally.reasons.iter_mut().find(|(r, _)| *r == reason);
        match known {
            Some((_, sum)) => *sum += bytes,
            None if has_room => tally.reasons.push((reason, bytes)),
            None => {
                if let Some((_, sum)) = tally.reasons.last_mut() {
                    *sum += bytes;
                }
            }
        }
    }

    /// Whether the upload of a segment in flight reads from disk.
    pub(crate) fn is_cold(&self, segment: SegmentId) -> bool {
        self.cold.contains(&segment)
    }

    /// Notes that an upload has ended, with the bytes that it uploaded.
    pub(crate) fn ended(&mut self, segment: SegmentId, bytes: u64) {
        self.waited.linked_bytes += bytes;
        self.cold.remove(&segment);
    }

    /// Notes that the engine waited for an upload.
    pub(crate) fn note_wait(&mut self, segment: SegmentId, took: Duration, is_cold: bool) {
        self.waited.all += took;
        self.waited.model = Some(segment.model);
        if is_cold {
            self.waited.disk += took;
        }
    }

    /// Notes how long the engine waited for embedding rows that were read from disk.
    pub(crate) fn note_rows_from_disk(&mut self, model: ModelId, took: Duration) {
        self.waited.all += took;
        self.waited.disk += took;
        self.waited.model = Some(model);
    }

    /// Bytes of a model that were uploaded since it was loaded.
    pub(crate) fn uploaded_bytes(&self, model: ModelId) -> u64 {
        self.of_models.get(&model).map_or(0, |tally| tally.bytes)
    }

    /// The sums of a model's uploads so far, for a later [`UploadReasons::since`].
    pub(crate) fn before(&self, model: ModelId) -> UploadsBefore {
        let Some(tally) = self.of_models.get(&model) else {
            return UploadsBefore::default();
        };
        UploadsBefore {
            bytes: tally.bytes,
            cold_bytes: tally.cold_bytes,
            reasons: tally.reasons.iter().map(|&(_, bytes)| bytes).collect(),
        }
    }

    /// Bytes of a model uploaded since `before`, those of them read from disk, and the reasons with
    /// their bytes, largest first.
    pub(crate) fn since(
        &self,
        model: ModelId,
        before: &UploadsBefore,
    ) -> (u64, u64, Vec<(Reason, u64)>) {
        let Some(tally) = self.of_models.get(&model) else {
            return (0, 0, Vec::new());
        };
        let earlier = before.reasons.iter().copied().chain(std::iter::repeat(0));
        let reasons = tally.reasons.iter().zip(earlier);
        let reasons = reasons.map(|(&(reason, now), then)| (reason, now.saturating_sub(then)));
        let mut reasons: Vec<_> = reasons.filter(|(_, bytes)| *bytes > 0).collect();
        reasons.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let bytes = tally.bytes.saturating_sub(before.bytes);
        let cold = tally.cold_bytes.saturating_sub(before.cold_bytes);
        (bytes, cold, reasons)
    }

    /// Forgets the sums of a model that is unloaded.
    pub(crate) fn forget(&mut self, model: ModelId) {
        self.evicted.retain(|segment, _| segment.model != model);
        self.cold.retain(|segment| segment.model != model);
        self.of_models.remove(&model);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: ModelId = ModelId(1);

    const fn segment(index: u32) -> SegmentId {
        SegmentId {
            model: MODEL,
            index,
        }
    }

    #[test]
    fn what_is_uploaded_again_has_the_reason_of_its_eviction() {
        let mut reasons = UploadReasons::default();
        reasons.begun(segment(0), 100, true);
        assert!(reasons.is_cold(segment(0)));
        reasons.ended(segment(0), 100);
        assert!(!reasons.is_cold(segment(0)));
        let before = reasons.before(MODEL);
        let by_other = Reason {
            cause: Some(EvictionCause::OtherModel),
            by: Some(ModelId(2)),
        };
        reasons.evicted(segment(0), by_other);
        reasons.begun(segment(0), 100, false);
        reasons.begun(segment(1), 30, false);
        let first = Reason {
            cause: None,
            by: None,
        };
        let since = reasons.since(MODEL, &before);
        assert_eq!(since, (130, 0, vec![(by_other, 100), (first, 30)]));
        reasons.begun(segment(0), 7, false);
        let (_, _, all) = reasons.since(MODEL, &UploadsBefore::default());
        assert_eq!(all[0], (first, 137), "an eviction counts once");
        reasons.forget(MODEL);
        assert_eq!(reasons.since(MODEL, &before), (0, 0, Vec::new()));
    }

    #[test]
    fn reasons_of_a_model_are_bounded_and_their_bytes_are_kept() {
        let mut reasons = UploadReasons::default();
        for n in 0..100 {
            let reason = Reason {
                cause: Some(EvictionCause::OtherModel),
                by: Some(ModelId(n)),
            };
            reasons.evicted(segment(0), reason);
            reasons.begun(segment(0), 1, false);
        }
        let (bytes, _, of) = reasons.since(MODEL, &UploadsBefore::default());
        assert_eq!((bytes, of.len()), (100, REASONS_MAX));
        assert_eq!(of.iter().map(|(_, bytes)| bytes).sum::<u64>(), 100);
    }
}
