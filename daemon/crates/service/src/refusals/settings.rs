//! Failures of reloading the settings.

use rocmforge_failure::{Failure, Reason};

/// FAILED_PRECONDITION: the configuration contains something that the daemon cannot use.
pub fn settings_unusable(message: &str) -> Failure {
    let reason = Reason::SettingsUnusable;
    Failure::new(reason)
        .requires(reason.name(), "configuration", message)
        .says(&format!(
            "the settings cannot be used, and nothing was reloaded: {message}"
        ))
}

/// UNIMPLEMENTED: the daemon has no configuration that could be reloaded.
pub(crate) fn no_settings() -> Failure {
    Failure::new(Reason::Unsupported).says(
        "this daemon was not started from settings that can be reloaded; restart it to change them",
    )
}
