//! Names of models.

use crate::api::error::Error;

/// Longest name of a model in bytes.
pub const MODEL_NAME_MAX: usize = 128;

/// Whether a name of a model may have it: letters and digits of any script, and a few others. None
/// breaks a line, is a space or changes what stands beside it.
pub fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || "._-:/@+".contains(c)
}

/// Refuses what is no name of a model.
///
/// # Errors
/// [`Error::InvalidArgument`].
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    if name.is_empty() || name.len() > MODEL_NAME_MAX || !name.chars().all(is_name_char) {
        return Err(Error::InvalidArgument {
            field: "name",
            message: format!(
                "'{}' is no model name: 1 to {MODEL_NAME_MAX} bytes of letters, digits and any of . _ - : / @ +",
                name.chars().take(MODEL_NAME_MAX).collect::<String>()
            ),
        });
    }
    Ok(())
}
