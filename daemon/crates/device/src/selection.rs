//! The largest elements of rows, found where the rows are.

use crate::{Buf, Device, Error, Scratch};

/// Elements of a row with their indices, largest first.
pub type Candidates = Vec<(u32, f32)>;

/// A device that finds the largest elements of rows of a scratch buffer.
pub trait Selection {
    /// Waits for the operations before and finds, in each of the first `rows` rows of a scratch
    /// buffer, the `k` largest elements with their indices, largest first, the lowest index first
    /// among equals; fewer if a row has fewer. `None` for a row whose largest is NaN or infinite.
    /// `Ok(None)` if the device has no room for so many: the caller reads the rows.
    ///
    /// # Errors
    /// As [`Device::read`].
    fn top_k(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
        k: usize,
    ) -> Result<Option<Vec<Option<Candidates>>>, Error>;
}

impl dyn Device + '_ {
    /// [`Selection::top_k`]; `Ok(None)` also of a device without.
    ///
    /// # Errors
    /// As [`Device::read`].
    pub fn top_k(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
        k: usize,
    ) -> Result<Option<Vec<Option<Candidates>>>, Error> {
        self.selection()
            .map_or(Ok(None), |device| device.top_k(scratch, buf, rows, k))
    }

    /// Waits for the operations before and finds, in each of the first `rows` rows of a scratch
    /// buffer, the index of the largest element, the lowest among equals; both kinds of `None`
    /// as with [`Selection::top_k`].
    ///
    /// # Errors
    /// As [`Device::read`].
    pub fn argmax(
        &mut self,
        scratch: Scratch<'_>,
        buf: Buf,
        rows: usize,
    ) -> Result<Option<Vec<Option<u32>>>, Error> {
        let best = self.top_k(scratch, buf, rows, 1)?;
        let id = |row: Option<Candidates>| row.and_then(|best| best.first().map(|b| b.0));
        Ok(best.map(|rows| rows.into_iter().map(id).collect()))
    }
}
