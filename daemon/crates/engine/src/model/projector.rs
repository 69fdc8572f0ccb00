//! Projector files (mmproj): which models they fit, and the vision tower that they contain.

use rocmforge_gguf::{Gguf, Glance, MappedFile, OtherUse};
use rocmforge_model::Model;

use crate::api::error::{Error, from_gguf, from_model};

/// Checks that a projector fits a model: that the model accepts the rows of the projector's tower.
/// Reads both headers.
///
/// # Errors
/// Why it does not, as [`prepare_reading_images`](crate::prepare_reading_images).
pub fn is_projector_for(file: &MappedFile, projector: &MappedFile) -> Result<(), Error> {
    let tower = tower_model("", projector)?;
    let tower = tower
        .tower()
        .ok_or_else(|| Error::Internal("a projector without a tower".to_owned()))?;
    let gguf = Gguf::open_recognising(file).map_err(|e| from_gguf("", file.path(), e))?;
    let model = Model::reading_images(&gguf, tower);
    model.map(drop).map_err(|e| from_model(file.path(), e))
}

/// Whether any projector can fit a text model: whether its architecture supports images.
///
/// # Errors
/// What is wrong with the model's header.
pub fn can_read_images(file: &MappedFile) -> Result<bool, Error> {
    let gguf = Gguf::open_recognising(file).map_err(|e| from_gguf("", file.path(), e))?;
    let name = gguf.str("general.architecture");
    let name = name.map_err(|e| from_gguf("", file.path(), e))?;
    Ok(name.is_some_and(rocmforge_model::reads_images))
}

/// Reads the header of a projector file.
pub(super) fn tower_model(name: &str, file: &MappedFile) -> Result<Model, Error> {
    let gguf = Gguf::open_recognising(file).map_err(|e| from_gguf(name, file.path(), e))?;
    if Glance::of(&gguf, false).other_use != Some(OtherUse::Projector) {
        return Err(Error::Unsupported(format!(
            "{}: it is no projector (mmproj), which has general.architecture = clip; give the file that was published \
             beside the model for images",
            file.path().display()
        )));
    }
    Model::tower_from_gguf(&gguf).map_err(|e| from_model(file.path(), e))
}
