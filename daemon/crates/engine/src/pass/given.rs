//! Rows of images that replace rows of a pass's inputs.

use std::sync::Arc;

use rocmforge_ops::Buf;

use crate::api::images::ImageRows;

/// Consecutive rows of an image that replace rows of an input.
#[derive(Debug, Clone)]
pub(crate) struct GivenRows {
    pub(crate) buf: Buf,
    /// Index of the first replaced row in the pass.
    pub(crate) row: u64,
    pub(crate) image: Arc<ImageRows>,
    pub(crate) part: usize,
    pub(crate) first: usize,
    pub(crate) n: usize,
}

impl GivenRows {
    /// The values of the rows, f32, one row after another.
    pub(crate) fn values(&self) -> &[f32] {
        let width = self.image.width;
        &self.image.parts[self.part][self.first * width..][..self.n * width]
    }
}
