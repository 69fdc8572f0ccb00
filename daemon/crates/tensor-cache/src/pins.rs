//! Pins: a promise that a segment stays, given only while everything else can still run beside it.

use crate::{Cache, Error, ModelId, SegmentId};

impl Cache {
    /// Pins a segment, which is not evicted once it is resident. Uploads nothing. A second pin has
    /// no effect.
    ///
    /// # Errors
    /// `UnknownModel`, `UnknownSegment`; `NeverFits` if the largest segment that is not
    /// pinned would no longer fit beside all that are: nothing else could run.
    pub fn pin(&mut self, segment: SegmentId) -> Result<(), Error> {
        self.segment(segment)?;
        self.may_pin(|id| id == segment)?;
        self.change_wants(segment, |found| found.pinned = true);
        Ok(())
    }

    /// Pins all segments of a model; if one cannot be pinned, none is.
    ///
    /// # Errors
    ///
    /// As `pin`.
    pub fn pin_model(&mut self, model: ModelId) -> Result<(), Error> {
        let segments = self
            .models
            .get(&model)
            .ok_or(Error::UnknownModel(model))?
            .segments
            .len() as u32;
        self.may_pin(|id| id.model == model)?;
        for index in 0..segments {
            self.change_wants(SegmentId { model, index }, |found| found.pinned = true);
        }
        Ok(())
    }

    /// Unpins a segment, so that it may be evicted again. No effect if it was not pinned.
    ///
    /// # Errors
    /// `UnknownModel`, `UnknownSegment`.
    pub fn unpin(&mut self, segment: SegmentId) -> Result<(), Error> {
        self.segment(segment)?;
        self.change_wants(segment, |found| found.pinned = false);
        Ok(())
    }

    /// Unpins every segment of a model.
    ///
    /// # Errors
    /// `UnknownModel`.
    pub fn unpin_model(&mut self, model: ModelId) -> Result<(), Error> {
        let segments = self
            .models
            .get(&model)
            .ok_or(Error::UnknownModel(model))?
            .segments
            .len() as u32;
        for index in 0..segments {
            self.change_wants(SegmentId { model, index }, |found| found.pinned = false);
        }
        Ok(())
    }

    fn may_pin(&self, chosen: impl Fn(SegmentId) -> bool) -> Result<(), Error> {
        let (mut pinned, mut largest) = (0, 0);
        for (&model, state) in &self.models {
            for (index, found) in (0u32..).zip(&state.segments) {
                if found.pinned || chosen(SegmentId { model, index }) {
                    pinned += found.bytes;
                } else {
                    largest = largest.max(found.bytes);
                }
            }
        }
        if pinned + largest > self.arena.end() {
            return Err(Error::NeverFits {
                need: largest,
                budget: self.config.budget,
                pinned,
            });
        }
        Ok(())
    }
}
