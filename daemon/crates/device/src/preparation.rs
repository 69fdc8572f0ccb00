//! What a device does ahead of a model's passes, and keeps for the model.

use std::sync::Arc;

use rocmforge_gguf::MappedFile;

use crate::{Device, Error, ModelPlanView};

/// A device that gets ready for models.
pub trait Preparation {
    /// Starts getting ready for a model in the background, as far as that takes none of the arena:
    /// what its passes need to be there, and its file to be readable. Returns at once; passes and
    /// uploads do not wait for the rest.
    ///
    /// # Errors
    /// [`Error::NoKernel`] names an operation that no kernel exists for, and its shape: so no
    /// request meets it.
    fn prepare(&mut self, model: &ModelPlanView<'_>) -> Result<(), Error>;

    /// A file will not be read any more: what the device keeps for it can go. None of its uploads
    /// is under way.
    fn forget_file(&mut self, file: &Arc<MappedFile>);
}

impl dyn Device + '_ {
    /// [`Preparation::prepare`]; a device without has nothing to get ready.
    ///
    /// # Errors
    /// As [`Preparation::prepare`].
    pub fn prepare(&mut self, model: &ModelPlanView<'_>) -> Result<(), Error> {
        self.preparation()
            .map_or(Ok(()), |device| device.prepare(model))
    }

    /// [`Preparation::forget_file`]; a device without keeps nothing.
    pub fn forget_file(&mut self, file: &Arc<MappedFile>) {
        if let Some(device) = self.preparation() {
            device.forget_file(file);
        }
    }
}
