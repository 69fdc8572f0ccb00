//! Rules for the names of models.

use crate::api::error::Error;

/// Maximum length of a model's name in bytes.
pub const MODEL_NAME_MAX: usize = 128;

/// Whether a model's name may contain this character: letters and digits of any script, and a few
/// others; no spaces, line breaks or characters that change the display of others.
pub fn is_name_char(c: char) -> bool {
    c.is_alphanumeric() || "._-:/@+".contains(c)
}

/// Checks that a string can be a model's name.
///
/// # Errors
///
/// [`Error::InvalidArgument`] if it is empty, too long or has a character that is not allowed.
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
