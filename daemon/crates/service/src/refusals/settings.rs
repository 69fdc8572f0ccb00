//! Failures of reading the settings anew.

use rocmforge_failure::{Failure, Reason};

/// FAILED_PRECONDITION: the daemon's files say what it cannot use.
pub fn settings_unusable(message: &str) -> Failure {
    let reason = Reason::SettingsUnusable;
    Failure::new(reason)
        .requires(reason.name(), "configuration", message)
        .says(&format!(
            "the settings cannot be used, and nothing was reloaded: {message}"
        ))
}

/// UNIMPLEMENTED: there is nothing that settings could be read from.
pub(crate) fn no_settings() -> Failure {
    Failure::new(Reason::Unsupported).says(
        "this daemon was not started from settings that can be reloaded; restart it to change them",
    )
}
