//! What is done ahead of need: a model's kernels and file when it is loaded, and uploads before a pass comes to their
//! segments.

use rocmforge_device::{Op, Outline, Pace, SegmentLayout};
use rocmforge_kernels::host::WeightType;
use rocmforge_kernels::host::ops::{KvLayout, RopeAngles};
use rocmforge_model::Model;
use rocmforge_tensor_cache::{ModelId, SegmentId};

use crate::error::Error;
use crate::residency::Residency;

/// What a pass does about segments that it will miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// Uploads under way ahead of their turn, at most.
    pub(crate) uploads: u32,
    /// The room of a segment that was missed, once used, goes to the next one that is absent.
    pub(crate) hands_on: bool,
}

/// Uploads ahead of a model that does not fit while nothing was measured.
const UNMEASURED: u32 = 3;

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

    /// What a pass of so many rows does about segments that it will miss, with at most `most` uploads ahead.
    ///
    /// For a model that fits, uploads ahead cost nothing. For one that does not, each takes a slab from what could stay
    /// resident, so there are no more than keep the link busy: none if a segment is computed in the time that what is on
    /// the device ahead of its slab takes to arrive, as when one token is decoded; else as many as are uploaded while one
    /// is computed. With none, the slab of one that was missed is handed on, which is a slab as well: worth it if computing
    /// what is resident takes longer than uploading that, for the link rests meanwhile otherwise.
    pub(crate) fn lookahead(&mut self, model: ModelId, rows: usize, most: u32) -> Ahead {
        let uploads = |uploads| Ahead {
            uploads,
            hands_on: false,
        };
        if most == 0 || self.fits(model) {
            return uploads(most);
        }
        let resident = self.cache.resident_bytes(model);
        let source = &self.sources[&model];
        let mean = source.bytes as f64 / source.layouts.len().max(1) as f64;
        match self.device.pace(rows) {
            Some(pace) => lookahead(pace, mean, resident as f64, most),
            None => uploads(most.min(UNMEASURED)),
        }
    }

    /// Starts uploads of absent segments of a model from `from` to before `end`, while fewer than so many are under way and as
    /// long as that costs nothing needed sooner.
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

    /// After a pass has used and released a segment that it had to wait for: hands its room on to the next one that is
    /// absent.
    pub(crate) fn hand_on(&mut self, segment: SegmentId) -> Result<(), Error> {
        if self.cache.replace(segment, &mut self.actions) {
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

/// See [`Residency::lookahead`]; `mean` is the bytes of a segment, `resident` those of all that are.
fn lookahead(pace: Pace, mean: f64, resident: f64, most: u32) -> Ahead {
    let Pace {
        computed_bytes_per_s: computed,
        upload_bytes_per_s: uploaded,
        ahead_bytes,
    } = pace;
    // Some of what is ahead is spent on moving slabs.
    let hidden = ahead_bytes as f64 / uploaded / 2.0;
    if mean / computed <= hidden {
        return Ahead {
            uploads: 0,
            hands_on: resident / computed > mean / uploaded,
        };
    }
    let uploads = (uploaded / computed).ceil().min(f64::from(most)) as u32;
    Ahead {
        uploads: uploads.clamp(1, most),
        hands_on: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uploads_ahead_are_as_many_as_the_computing_hides() {
        let ahead = |computed| {
            let pace = Pace {
                computed_bytes_per_s: computed,
                upload_bytes_per_s: 50e9,
                ahead_bytes: 24 << 20,
            };
            // Segments of 48 MB take 1 ms; what is ahead of the slab 0.5 ms.
            lookahead(pace, 48e6, 3e9, 3)
        };
        let only = |uploads| Ahead {
            uploads,
            hands_on: false,
        };
        let handed = Ahead {
            uploads: 0,
            hands_on: true,
        };
        assert_eq!(ahead(2.5e12), handed, "a token: 3 GB in 1.2 ms");
        assert_eq!(ahead(3.5e12), only(0), "in less than an upload takes");
        assert_eq!(
            [90e9, 50e9].map(ahead),
            [only(1), only(1)],
            "a short prompt"
        );
        assert_eq!(
            [40e9, 20e9, 1e9].map(ahead),
            [only(2), only(3), only(3)],
            "a long one"
        );
    }
}
