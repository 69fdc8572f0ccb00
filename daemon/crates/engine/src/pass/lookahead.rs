//! Work ahead of need: preparing a model's kernels and file when it is loaded, and uploading
//! segments before a pass reaches them.

use rocmforge_device::{ModelPlanView, Throughput};
use rocmforge_ops::Plan;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::api::error::Error;
use crate::store::Store;

/// How a pass handles segments that will be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lookahead {
    /// Maximum number of uploads in flight ahead of need.
    pub(crate) uploads: u32,
    /// Whether the slab of a missed segment, once used, is given to the next absent segment.
    pub(crate) recycles_slab: bool,
}

impl Lookahead {
    /// No uploads ahead of need, and no reuse of slabs.
    pub(crate) const NOTHING: Self = Self {
        uploads: 0,
        recycles_slab: false,
    };
}

/// Number of uploads ahead in a pass of many rows of a model that does not fit: one in progress and
/// one that follows at once. Each takes a slab from segments that could stay resident.
const UPLOADS_AHEAD: u32 = 2;

/// Maximum number of speculative uploads of experts at a time.
const SPARE_UPLOADS: usize = 4;

impl Store {
    /// Lets the device get ready for a registered model in the background. An error
    /// says that it cannot run it.
    pub(crate) fn prepare(
        &mut self,
        id: ModelId,
        plan: &Plan,
    ) -> Result<(), rocmforge_device::Error> {
        let source = &self.sources[&id];
        self.device.prepare(&ModelPlanView {
            file: &source.file,
            plan,
            layouts: &source.layouts,
        })
    }

    /// Lets a device that was reopened prepare for a model that a pass is about to use.
    pub(crate) fn prepare_anew(&mut self, id: ModelId, plan: &Plan) {
        let openings = self.openings;
        let Some(source) = self.sources.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut source.prepared_at, openings) == openings {
            return;
        }
        // It could when the model was loaded; a pass meets the error if it cannot now.
        if let Err(error) = self.prepare(id, plan) {
            tracing::debug!(%error, "a model is not prepared again");
        }
    }

    /// How a pass of `rows` rows handles segments that will be missing, with at most `most` uploads
    /// ahead.
    ///
    /// For a model that fits, uploads ahead cost nothing. For one that does not, each takes a slab
    /// from what could stay resident, so there are none if a segment is computed in the time that
    /// what is on the device ahead of its slab takes to arrive, as when one token is decoded. Then
    /// the slab of a missed segment is reused for the next one, which costs a resident slab as
    /// well: that is worthwhile if computing the resident segments takes longer than uploading that
    /// one, since the link would be idle meanwhile.
    pub(crate) fn lookahead(&mut self, model: ModelId, rows: usize, most: u32) -> Lookahead {
        let uploads = |uploads| Lookahead {
            uploads,
            recycles_slab: false,
        };
        if most == 0 || self.cache.fits(model) {
            return uploads(most);
        }
        let resident = self.cache.model_stats(model).usage.resident;
        let source = &self.sources[&model];
        let mean = source.bytes as f64 / source.layouts.len().max(1) as f64;
        match self.device.pace(rows) {
            Some(pace) if is_hidden(pace, mean) => Lookahead {
                uploads: 0,
                recycles_slab: is_worth_a_slab(pace, mean, resident as f64),
            },
            _ => uploads(most.min(UPLOADS_AHEAD)),
        }
    }

    /// Starts uploads of a model's absent segments from `from` to before `end`, while fewer than
    /// `uploads` are in flight and no segment that is needed sooner is evicted.
    pub(crate) fn prefetch(
        &mut self,
        model: ModelId,
        from: u32,
        end: u32,
        uploads: u32,
    ) -> Result<(), Error> {
        while self.under_way() < uploads as usize
            && let Some(segment) = self.cache.next_absent(model, from)
            && segment.index < end
            && self.cache.prefetch(segment, &mut self.actions)
        {
            self.execute()?;
        }
        Ok(())
    }

    /// Starts uploads of experts that no row was routed to yet, from the segment `from` on, for a
    /// model that fits: only into free memory, and few at a time, since a miss waits behind them.
    /// Returns where to continue.
    ///
    /// Once all of a model is resident, a GPU replays decode passes as graphs. Until then each
    /// layer waits for the chosen experts: a token of Qwen3-30B-A3B took 4.9 ms on an H100 so, and
    /// 2.8 ms as a graph. Routing alone leaves a few of thousands of experts absent for long.
    pub(crate) fn bring_spare_experts(&mut self, model: ModelId, from: u32) -> Result<u32, Error> {
        let mut next = from;
        if !self.records || !self.cache.fits(model) {
            return Ok(next);
        }
        while self.under_way() < SPARE_UPLOADS
            && let Some(begun) = self
                .cache
                .bring_spare_expert(model, next, &mut self.actions)
        {
            self.execute()?;
            next = begun + 1;
        }
        Ok(next)
    }

    /// After a pass has used and released a segment that it had to wait for: gives its slab to the
    /// next absent segment.
    pub(crate) fn recycle_slab(&mut self, segment: SegmentId) -> Result<(), Error> {
        if self.cache.recycle_slab(segment, &mut self.actions) {
            self.execute()?;
        }
        Ok(())
    }
}

/// Whether a segment of `mean` bytes is computed in the time in which the next one is transferred
/// to staging buffers, which needs no slab yet.
fn is_hidden(pace: Throughput, mean: f64) -> bool {
    // Some of what is ahead is spent on moving slabs.
    let ahead = pace.ahead_bytes as f64 / 2.0;
    mean / pace.computed_bytes_per_s <= ahead / pace.upload_bytes_per_s
}

/// Whether computing `resident` bytes takes longer than uploading a segment of `mean` bytes.
fn is_worth_a_slab(pace: Throughput, mean: f64, resident: f64) -> bool {
    resident / pace.computed_bytes_per_s > mean / pace.upload_bytes_per_s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_decides() {
        let pace = |computed_bytes_per_s| Throughput {
            computed_bytes_per_s,
            upload_bytes_per_s: 50e9,
            ahead_bytes: 24 << 20,
        };
        // A segment of 48 MB is uploaded in 1 ms, and a quarter of it lies ahead of its slab.
        let token = pace(2e12);
        assert!(is_hidden(token, 48e6));
        assert!(is_worth_a_slab(token, 48e6, 3e9), "1.5 ms for 1");
        assert!(!is_worth_a_slab(token, 48e6, 1e9), "0.5 ms for 1");
        assert!(!is_hidden(pace(150e9), 48e6), "a prompt");
    }
}
