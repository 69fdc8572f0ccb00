//! Steps that are recorded when they are run, and replayed when they come again.

use crate::{Batch, BoundStep, Device, Error, Scratch};

/// A device that may record what it does for steps, and replay the record.
pub trait Recording {
    /// Runs steps in order that may come again. `stamp` stands for a plan and the first of so many
    /// of its steps, and for nothing else ever until [`crate::Preparation::forget_file`]; a device
    /// may record what it does for a stamp, a number of steps, their slabs and such a batch, and
    /// replay that.
    ///
    /// # Errors
    /// As [`Device::run`].
    fn run_again(
        &mut self,
        stamp: [u64; 2],
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error>;

    /// Runs again what [`Recording::run_all`] recorded under this stamp for such a batch. Whether
    /// there was a record; else nothing was done.
    ///
    /// # Errors
    /// As [`Device::run`].
    fn replay(
        &mut self,
        stamp: u64,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<bool, Error>;

    /// Runs several steps in order, all of their weights resident: a whole pass. A device may
    /// record it and replay the record when the same comes again: `stamp` stands for the steps,
    /// their weights and where these lie, and for nothing else ever.
    ///
    /// # Errors
    /// As [`Device::run`].
    fn run_all(
        &mut self,
        stamp: u64,
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error>;
}

impl dyn Device + '_ {
    /// Runs steps in order, one by one.
    ///
    /// # Errors
    /// As [`Device::run`].
    pub fn run_each(
        &mut self,
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        steps
            .iter()
            .try_for_each(|step| self.run(step, scratch, batch))
    }

    /// [`Recording::run_again`]; a device without runs the steps one by one.
    ///
    /// # Errors
    /// As [`Device::run`].
    pub fn run_again(
        &mut self,
        stamp: [u64; 2],
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        match self.recording() {
            Some(device) => device.run_again(stamp, steps, scratch, batch),
            None => self.run_each(steps, scratch, batch),
        }
    }

    /// [`Recording::replay`]; a device without has no record.
    ///
    /// # Errors
    /// As [`Device::run`].
    pub fn replay(
        &mut self,
        stamp: u64,
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<bool, Error> {
        self.recording()
            .map_or(Ok(false), |device| device.replay(stamp, scratch, batch))
    }

    /// [`Recording::run_all`]; a device without runs the steps one by one.
    ///
    /// # Errors
    /// As [`Device::run`].
    pub fn run_all(
        &mut self,
        stamp: u64,
        steps: &[BoundStep<'_>],
        scratch: Scratch<'_>,
        batch: &Batch<'_>,
    ) -> Result<(), Error> {
        match self.recording() {
            Some(device) => device.run_all(stamp, steps, scratch, batch),
            None => self.run_each(steps, scratch, batch),
        }
    }
}
