//! Failures for the engine's errors, names and files of models, roles, limits and settings.

mod limits;
mod model_file;
mod settings;
mod silent;

use std::time::Duration;

use rocmforge_engine::api::ModelStatus;
use rocmforge_engine::{Error, Refusal};
use rocmforge_failure::{Failure, Reason, model_precondition};

pub(crate) use self::limits::{peer_limit, prompts_held};
pub use self::model_file::from_model_file;
pub(crate) use self::model_file::leads_away;
pub(crate) use self::settings::no_settings;
pub use self::settings::settings_unusable;
pub(crate) use self::silent::{beside_unreadable, directory_silent, file_silent};
use crate::roles::Role;

/// Delay after which a client with too many requests should retry: some have ended by then.
const LIMIT_RETRY: Duration = Duration::from_secs(1);

/// Converts an error of the engine to a failure.
pub fn from_engine(error: &Error) -> Failure {
    let text = error.to_string();
    let failure = match error {
        Error::InvalidArgument { field, message } => Failure::new(Reason::InvalidField)
            .with("field", field)
            .field(field, message),
        Error::BadModel { path, message } => {
            let path = path.display().to_string();
            Failure::new(Reason::BadModelFile)
                .with("path", &path)
                .about("gguf", &path, message)
        }
        Error::Unsupported(message) => {
            Failure::new(Reason::Unsupported).about("feature", "", message)
        }
        Error::UnknownModel { name, known } => Failure::new(Reason::UnknownModel)
            .with("model", name)
            .with("loaded", known.join(", "))
            .about("model", name, "not loaded"),
        Error::NameTaken {
            name,
            path,
            changed,
        } => {
            let (reason, what) = if *changed {
                (
                    Reason::LoadedFileChanged,
                    "the file has changed since it was loaded",
                )
            } else {
                (Reason::NameTaken, "another file has this name")
            };
            Failure::new(reason)
                .with("model", name)
                .with("path", path.display().to_string())
                .about("model", name, what)
        }
        Error::Precondition(refusal) => from_refusal(refusal, &text),
        Error::Exhausted {
            message: _,
            retry_after,
        } => Failure::new(Reason::FullNow).retry(*retry_after),
        Error::AskerLimit {
            running,
            queued,
            running_max,
            queued_max,
        } => Failure::new(Reason::PeerLimit)
            .with("limit", "queued")
            .with("max", queued_max.to_string())
            .with("running", running.to_string())
            .with("queued", queued.to_string())
            .with("running_max", running_max.to_string())
            .retry(LIMIT_RETRY),
        Error::Unavailable {
            message: _,
            retry_after,
        } => Failure::new(Reason::NotServing).retry(*retry_after),
        Error::DataLoss { name, message } => Failure::new(Reason::ModelFileChanged)
            .with("model", name)
            .about("model", name, message),
        Error::FileSilent {
            name,
            path,
            seconds,
        } => Failure::new(Reason::ModelFileSilent)
            .with("model", name)
            .with("path", path.display().to_string())
            .with("seconds", seconds.to_string())
            .retry(Duration::from_secs(5)),
        Error::DeadlineExceeded { generated } => {
            Failure::new(Reason::Deadline).with("generated_tokens", generated.to_string())
        }
        Error::Cancelled => Failure::new(Reason::Cancelled),
        Error::NoDevice(message) => {
            Failure::new(Reason::NoDevice).requires("DEVICE", "engine", message)
        }
        Error::DeviceLost(_) => Failure::new(Reason::NotServing).retry(Duration::from_secs(5)),
        Error::Internal(_) => Failure::new(Reason::Bug),
    };
    failure.says(&text)
}

/// Converts a refusal of the engine to a failure with its reason and numbers.
fn from_refusal(refusal: &Refusal, text: &str) -> Failure {
    let reason = reason(refusal);
    let mut failure = Failure::new(reason);
    for (name, number) in refusal.numbers() {
        failure = failure.with(name, number.to_string());
    }
    match refusal.model() {
        Some(model) => failure
            .with("model", model)
            .requires(reason.name(), model, text),
        None => failure.requires(reason.name(), "engine", text),
    }
}

/// The reason code of an engine's refusal.
fn reason(refusal: &Refusal) -> Reason {
    match refusal {
        Refusal::TooManyModels { .. } => Reason::TooManyModels,
        Refusal::Busy { .. } => Reason::ModelBusy,
        Refusal::Pinned { .. } => Reason::ModelPinned,
        Refusal::Unloaded { .. } => Reason::ModelUnloaded,
        Refusal::Reloaded { .. } => Reason::ModelReloaded,
        Refusal::PinTooLarge { .. } => Reason::PinTooLarge,
        Refusal::NeverFits { .. } => Reason::NeverFits,
        Refusal::NoDeviceMemory { .. } => Reason::NoDeviceMemory,
        Refusal::BudgetOutOfRange { .. } | Refusal::BudgetTooSmall { .. } => {
            Reason::BudgetOutOfRange
        }
        Refusal::InUse { .. } => Reason::InUse,
        Refusal::Setting { .. } => Reason::Setting,
    }
}

/// NOT_FOUND: no model of this name is loaded; lists the loaded ones.
pub fn unknown_model(name: &str, models: &[ModelStatus]) -> Failure {
    let known = models
        .iter()
        .map(|status| status.model.name().to_owned())
        .collect();
    from_engine(&Error::UnknownModel {
        name: name.to_owned(),
        known,
    })
}

/// NOT_FOUND: the request is not among the last `kept` ones that the client may see.
pub(crate) fn unknown_request(name: &str, kept: usize) -> Failure {
    Failure::new(Reason::UnknownRequest).says(&format!(
        "no request '{name}' of yours is among the last {kept} of all clients that have ended: list them (rocmforgectl \
         why --list)"
    ))
}

/// NOT_FOUND: there is no model of this name; lists loaded models and model files.
pub(crate) fn no_such_model<'l, 'f>(
    name: &str,
    loaded: impl Iterator<Item = &'l str>,
    on_disk: impl Iterator<Item = &'f str>,
) -> Failure {
    let list = |names: Vec<&str>| match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    };
    let (loaded, on_disk) = (list(loaded.collect()), list(on_disk.collect()));
    Failure::new(Reason::UnknownModel)
        .with("model", name)
        .with("loaded", &loaded)
        .with("on_disk", &on_disk)
        .about("model", name, "neither loaded nor in a model directory")
        .says(&format!(
            "no model '{name}' is loaded or in a model directory; name one of these, or put its file into a model \
             directory; loaded: {loaded}; files: {on_disk}"
        ))
}

/// FAILED_PRECONDITION: the model was unloaded before its load was answered; the same failure as
/// when it is unloaded under a request.
pub fn unloaded_meanwhile(name: &str) -> Failure {
    let message = format!(
        "model '{name}' was loaded, and unloaded again by another client before this call ended; load it again"
    );
    model_precondition(Reason::ModelUnloaded, name, &message)
}

/// PERMISSION_DENIED: the client lacks a role.
pub fn role_missing(role: Role, uid: u32) -> Failure {
    let key = format!("{role}_by");
    Failure::new(Reason::RoleMissing)
        .with("role", role.to_string())
        .with("setting", &key)
        .says(&format!(
            "user {uid} has not the role '{role}', which this call needs; the daemon's setting {key} names who has it"
        ))
}

#[cfg(test)]
mod tests;
