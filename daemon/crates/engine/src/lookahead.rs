//! What is done ahead of need: a model's kernels and file when it is loaded, and uploads before a pass comes to their
//! segments.

use rocmforge_device::{Op, Outline, Pace, SegmentLayout};
use rocmforge_kernels::host::WeightType;
use rocmforge_kernels::host::ops::{KvLayout, RopeAngles};
use rocmforge_model::Model;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::error::Error;
use crate::residency::Residency;

/// From so many segments on that a pass has to upload, [`Residency::hand_on`] is worth its slab: computing those that are
/// resident takes as long as uploading the one that the slab costs.
const HAND_ON_MIN: u64 = 7;

impl Residency {
    /// Lets the device get ready for a registered model in the background.
    pub(crate) fn prepare(
        &mut self,
        id: ModelId,
        model: &Model,
        kv: &KvLayout,
        rope: &RopeAngles,
        embedding: WeightType,
    ) {
        let source = &self.sources[&id];
        let segments: Vec<(&[Op], &SegmentLayout)> = model
            .segments()
            .iter()
            .zip(&source.layouts)
            .map(|(segment, layout)| (segment.ops.as_slice(), &**layout))
            .collect();
        self.device.prepare(&Outline {
            file: &source.file,
            segments: &segments,
            bufs: model.bufs(),
            kv,
            rope,
            embedding,
        });
    }

    /// Segments whose upload should be started ahead of their turn in a pass of so many rows, `most` at most.
    ///
    /// For a model that fits, uploads ahead cost nothing. For one that does not, each takes a slab from what could stay
    /// resident, so there are no more than keep the link busy: none if a segment is computed in the time that what is on
    /// the device ahead of its slab takes to arrive, as when one token is decoded; else as many as are uploaded while one
    /// is computed.
    pub(crate) fn lookahead(&mut self, model: ModelId, rows: usize, most: u32) -> u32 {
        if most == 0 || self.fits(model) {
            return most;
        }
        let source = &self.sources[&model];
        let mean = source.bytes as f64 / source.layouts.len().max(1) as f64;
        match self.device.pace(rows) {
            Some(pace) => lookahead(pace, mean, most),
            None => most,
        }
    }

    /// Starts the upload of a segment that will be needed soon, if that costs nothing needed sooner.
    pub(crate) fn prefetch(&mut self, segment: SegmentId) -> Result<(), Error> {
        if self.cache.prefetch(segment, &mut self.actions) {
            self.execute()?;
        }
        Ok(())
    }

    /// After a pass that looks no uploads ahead has used and released a segment that it had to wait for: hands its room on
    /// to the next one that is absent, so that uploads go on meanwhile.
    ///
    /// What is handed on is one slab more that holds nothing of use while resident segments are computed; that is worth
    /// it where so much is uploaded in a pass that the link should never rest.
    pub(crate) fn hand_on(&mut self, segment: SegmentId) -> Result<(), Error> {
        let source = &self.sources[&segment.model];
        let stats = self.cache.stats();
        let room = stats.budget.saturating_sub(stats.total.usage.blocks());
        let absent = source.bytes.saturating_sub(room);
        let many = HAND_ON_MIN * source.bytes / source.layouts.len().max(1) as u64;
        if absent >= many && self.cache.replace(segment, &mut self.actions) {
            self.execute()?;
        }
        Ok(())
    }

    /// Whether all of a model has room beside what is not weights.
    pub(crate) fn fits(&self, model: ModelId) -> bool {
        let stats = self.cache.stats();
        self.sources[&model].bytes + stats.total.usage.blocks() <= stats.budget
    }
}

/// See [`Residency::lookahead`]; `mean` is the bytes of a segment.
fn lookahead(pace: Pace, mean: f64, most: u32) -> u32 {
    let computed = pace.segment.as_secs_f64();
    // Some of what is ahead is spent on moving slabs.
    let hidden = pace.ahead_bytes as f64 / pace.upload_bytes_per_s / 2.0;
    if computed <= hidden {
        return 0;
    }
    let uploaded = mean / pace.upload_bytes_per_s;
    ((computed / uploaded).ceil().min(f64::from(most)) as u32).clamp(1, most)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn uploads_ahead_are_as_many_as_the_computing_hides() {
        let pace = |us| Pace {
            segment: Duration::from_micros(us),
            upload_bytes_per_s: 50e9,
            ahead_bytes: 24 << 20,
        };
        // A layer of 140 MB takes 2.8 ms; what is ahead of the slab 0.5 ms.
        let ahead = |us| lookahead(pace(us), 140e6, 3);
        assert_eq!([50, 200].map(ahead), [0, 0], "a token");
        assert_eq!([500, 2000].map(ahead), [1, 1], "a short prompt");
        assert_eq!([3000, 7000, 50_000].map(ahead), [2, 3, 3], "a long one");
        assert_eq!(lookahead(pace(7000), 140e6, 1), 1);
    }
}
