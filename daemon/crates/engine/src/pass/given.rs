//! Rows of an image that take the place of rows of a pass.

use std::sync::Arc;

use rocmforge_ops::Buf;

use crate::api::images::ImageRows;

/// Rows of an image in the place of others.
#[derive(Debug, Clone)]
pub(crate) struct GivenRows {
    pub(crate) buf: Buf,
    /// The first of the pass's rows.
    pub(crate) row: u64,
    pub(crate) image: Arc<ImageRows>,
    pub(crate) part: usize,
    pub(crate) first: usize,
    pub(crate) n: usize,
}

impl GivenRows {
    /// The rows.
    pub(crate) fn values(&self) -> &[f32] {
        let width = self.image.width;
        &self.image.parts[self.part][self.first * width..][..self.n * width]
    }
}
