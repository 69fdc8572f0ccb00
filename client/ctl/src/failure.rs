//! Errors as users read them: what went wrong, and the flag or command that
//! mends it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::{fmt, io};

use rocmforge_client::{Code, Error, RpcError};
use serde_json::{Value, json};

use crate::human::clean;
use crate::sampling::flag_of;

/// A file that was named cannot be read here.
#[derive(Debug)]
pub(crate) struct Unreadable(pub(crate) PathBuf);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot read {}", self.0.display())
    }
}

/// The error with its causes, one after the other, and what to do about it.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    let mut text = clean(&error.to_string());
    let causes = error.chain().skip(1);
    for cause in causes {
        let cause = clean(&cause.to_string());
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    if let Some(rpc) = rpc_in(error) {
        let fields: Vec<String> = rpc
            .field_violations()
            .map(|(field, description)| {
                let flag = match (rpc.rpc, field) {
                    // Elsewhere it is an argument without a flag.
                    ("Models.Load", "name") => Some("--name".to_owned()),
                    _ => flag_of(field),
                };
                let name = flag.unwrap_or_else(|| field.to_owned());
                clean(&format!("{name}: {description}"))
            })
            .collect();
        if !fields.is_empty() {
            // The daemon's message is these in a row, under its own names for them.
            text = fields.join("\n  ");
        }
        for (_, subject, description) in rpc.precondition_violations() {
            let description = clean(description);
            if !text.contains(&description) {
                text.push_str(&format!("\n  {}: {description}", clean(subject)));
            }
        }
        if let Some(hint) = hint(rpc) {
            text.push_str("\n  hint: ");
            text.push_str(&hint);
        }
    }
    text
}

/// The error as a JSON object, for `--json`.
pub(crate) fn as_json(error: &anyhow::Error) -> Value {
    let mut value = json!({"message": describe(error), "exit_code": exit_code(error)});
    if let Some(of_hub) = hub_in(error) {
        value["reason"] = of_hub.word().into();
    }
    if let Some(rpc) = rpc_in(error) {
        value["message"] = rpc.to_string().into();
        value["rpc"] = rpc.rpc.into();
        value["code"] = code_name(rpc.code).into();
        if let Some(reason) = rpc.reason() {
            value["reason"] = reason.into();
        }
        if let Some(info) = rpc.details.error_info() {
            let sorted: BTreeMap<_, _> = info.metadata.iter().collect();
            value["details"] = json!(sorted);
        }
        if let Some(delay) = rpc.retry_after() {
            value["retry_after_ms"] = json!(delay.as_millis() as u64);
        }
        let fields: Vec<Value> = rpc
            .field_violations()
            .map(|(field, description)| json!({"field": field, "description": description}))
            .collect();
        if !fields.is_empty() {
            value["fields"] = fields.into();
        }
    }
    json!({"error": value})
}

/// The exit code of an error, as listed in `--help`.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(of_hub) = hub_in(error) {
        return code_of_hub(of_hub);
    }
    let of_client = error
        .chain()
        .find_map(|cause| cause.downcast_ref::<Error>());
    match of_client {
        None if error.is::<Unreadable>() && is_absent(error) => 5,
        None | Some(Error::Incomplete { .. }) => 1,
        Some(Error::Rpc(rpc)) => match rpc.code {
            Code::ResourceExhausted | Code::Unavailable | Code::DeadlineExceeded => 4,
            Code::NotFound => 5,
            Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::AlreadyExists
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::DataLoss => 6,
            Code::PermissionDenied | Code::Unauthenticated => 7,
            Code::Ok | Code::Cancelled | Code::Unknown | Code::Aborted | Code::Internal => 1,
        },
        Some(_) => 3,
    }
}

fn hub_in(error: &anyhow::Error) -> Option<&rocmforge_hub::Error> {
    error.chain().find_map(|cause| cause.downcast_ref())
}

fn code_of_hub(error: &rocmforge_hub::Error) -> u8 {
    use rocmforge_hub::Error;
    match error {
        Error::RateLimited { .. }
        | Error::Unavailable { .. }
        | Error::Unreachable { .. }
        | Error::Broken { .. }
        | Error::Changed { .. }
        | Error::Busy { .. } => 4,
        Error::NotFound { .. }
        | Error::NoSuchTag { .. }
        | Error::NoModel { .. }
        | Error::NoFile { .. } => 5,
        Error::BadName { .. }
        | Error::BadAnswer { .. }
        | Error::Redirect { .. }
        | Error::Length { .. }
        | Error::BadChecksum { .. }
        | Error::NoSpace { .. }
        | Error::Ambiguous { .. }
        | Error::MissingParts { .. }
        | Error::Exists { .. } => 6,
        Error::Denied { .. } => 7,
        Error::Io { .. } => 1,
    }
}

fn is_absent(error: &anyhow::Error) -> bool {
    let of_io = error.chain().find_map(|cause| cause.downcast_ref());
    of_io.is_some_and(|error: &io::Error| error.kind() == io::ErrorKind::NotFound)
}

fn code_name(code: Code) -> String {
    let mut name = String::new();
    for c in format!("{code:?}").chars() {
        if c.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(c.to_ascii_uppercase());
    }
    name
}

fn rpc_in(error: &anyhow::Error) -> Option<&RpcError> {
    error.chain().find_map(rpc_of)
}

fn rpc_of<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a RpcError> {
    cause.downcast_ref::<Error>().and_then(Error::as_rpc)
}

/// What the user of this program can do; the daemon's message knows no commands.
fn hint(error: &RpcError) -> Option<String> {
    if let Some(delay) = error.retry_after() {
        return Some(format!("try again in {:.1} s", delay.as_secs_f64()));
    }
    let hint = match (error.rpc, error.code) {
        ("Models.Load", Code::NotFound) if error.reason() == Some("UNKNOWN_MODEL") => {
            "--draft names a model that is loaded (`rocmforgectl ls`) or below a model directory \
             (`rocmforgectl files`)"
        }
        ("Models.Load", Code::NotFound) => "check the path; the daemon has to see the file too",
        ("Models.Load", Code::AlreadyExists) if error.reason() == Some("LOADED_FILE_CHANGED") => {
            return None;
        }
        ("Models.Load", Code::AlreadyExists) => {
            "load it under another name with --name, or `rocmforgectl unload` that one"
        }
        (_, Code::PermissionDenied) if error.reason() == Some("ROLE_MISSING") => {
            "ask the daemon's administrator for the role"
        }
        ("Models.Load", Code::PermissionDenied) => {
            "`rocmforgectl run --private` answers a prompt with a file anywhere"
        }
        (_, Code::FailedPrecondition) if error.reason() == Some("TOO_MANY_MODELS") => {
            "`rocmforgectl unload` a model that is not needed"
        }
        (_, Code::FailedPrecondition)
            if matches!(error.reason(), Some("MODEL_UNLOADED" | "MODEL_RELOADED")) =>
        {
            "the model was unloaded or replaced during the call; `rocmforgectl load` it and try again"
        }
        ("Models.Load" | "Models.Pin", Code::FailedPrecondition) => {
            "raise the budget with `rocmforgectl cache budget`"
        }
        ("Models.Unload", Code::FailedPrecondition) => {
            "use --force, or `rocmforgectl unpin` it and wait for its requests"
        }
        ("Inference.Chat", Code::FailedPrecondition) => {
            "a model without a chat template takes `rocmforgectl generate`; if the budget is too \
             small, lower --n-ctx or use `rocmforgectl cache budget`"
        }
        ("Inference.Generate" | "Inference.Score", Code::FailedPrecondition) => {
            "lower --n-ctx, or raise the budget with `rocmforgectl cache budget`"
        }
        (_, Code::NotFound) if error.reason() != Some("UNKNOWN_REQUEST") => {
            "`rocmforgectl files` lists the model files, `rocmforgectl load FILE` loads one"
        }
        // The daemon's message says it all.
        (_, Code::DataLoss) => return None,
        // A cause of the daemon's says more than its version; without one it has no such call.
        (_, Code::Unimplemented) if error.reason().is_none() => {
            "rocmforgectl and rocmforged differ in version; see --version and `rocmforgectl status`"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

#[cfg(test)]
mod tests {
    use rocmforge_client::ErrorDetails;

    use super::*;

    fn failure(rpc: &'static str, code: Code, message: &str, details: ErrorDetails) -> String {
        let message = message.to_owned();
        let error = Error::Rpc(Box::new(RpcError {
            rpc,
            code,
            message,
            details,
        }));
        describe(&error.into())
    }

    #[test]
    fn a_wrong_field_names_its_flag() {
        let details = ErrorDetails::with_bad_request_violation("sampling.top_p", "must be above 0");
        let text = failure(
            "Inference.Generate",
            Code::InvalidArgument,
            "bad parameter",
            details,
        );
        assert_eq!(text, "--top-p: must be above 0", "once, by its flag");
    }

    #[test]
    fn a_hint_follows_the_cause_and_not_the_code_alone() {
        let of = |rpc, code, reason: &str| {
            let mut details = ErrorDetails::new();
            if !reason.is_empty() {
                details.set_error_info(reason, "rocmforge", std::collections::HashMap::new());
            }
            failure(rpc, code, "no", details)
        };
        let rerank = |reason| of("Inference.Rerank", Code::Unimplemented, reason);
        assert!(!rerank("UNSUPPORTED").contains("version"));
        assert!(rerank("").contains("differ in version"));
        let load = |code, reason| of("Models.Load", code, reason);
        assert!(load(Code::NotFound, "UNKNOWN_MODEL").contains("--draft"));
        assert!(load(Code::NotFound, "NO_SUCH_FILE").contains("check the path"));
        assert!(of("Inference.Chat", Code::NotFound, "UNKNOWN_MODEL").contains("load FILE"));
        assert!(load(Code::FailedPrecondition, "TOO_MANY_MODELS").contains("unload"));
        let gone = of(
            "Inference.Generate",
            Code::FailedPrecondition,
            "MODEL_UNLOADED",
        );
        assert!(gone.contains("load") && !gone.contains("n-ctx"), "{gone}");
    }

    #[test]
    fn an_error_in_json_tells_causes_apart() {
        let mut details = ErrorDetails::with_retry_info(Some(std::time::Duration::from_secs(2)));
        let bytes = [("need_bytes".to_owned(), "7".to_owned())];
        details.set_error_info("FULL_NOW", "rocmforge", bytes);
        let error = Error::Rpc(Box::new(RpcError {
            rpc: "Inference.Chat",
            code: Code::ResourceExhausted,
            message: "full".to_owned(),
            details,
        }));
        let value = as_json(&error.into());
        assert_eq!(
            value["error"],
            json!({
                "message": "full",
                "exit_code": 4,
                "rpc": "Inference.Chat",
                "code": "RESOURCE_EXHAUSTED",
                "reason": "FULL_NOW",
                "details": {"need_bytes": "7"},
                "retry_after_ms": 2000,
            })
        );
        assert_eq!(exit_code(&anyhow::anyhow!("x")), 1);
    }

    #[test]
    fn escape_sequences_of_a_template_do_not_reach_the_terminal() {
        let text = failure(
            "Inference.Chat",
            Code::Internal,
            "template: \u{1b}[2J\nrocmforgectl: all is well",
            ErrorDetails::default(),
        );
        assert!(
            !text.contains('\u{1b}') && text.lines().count() == 1,
            "{text}"
        );
    }

    #[test]
    fn a_full_queue_says_when_to_come_again() {
        let delay = std::time::Duration::from_millis(1500);
        let details = ErrorDetails::with_retry_info(Some(delay));
        let text = failure(
            "Inference.Chat",
            Code::ResourceExhausted,
            "queue full",
            details,
        );
        assert_eq!(text, "queue full\n  hint: try again in 1.5 s");
    }

    #[test]
    fn a_taken_name_points_to_the_flag() {
        let text = failure(
            "Models.Load",
            Code::AlreadyExists,
            "taken",
            ErrorDetails::default(),
        );
        assert!(text.contains("--name"), "{text}");
    }

    #[test]
    fn a_name_is_called_a_flag_only_where_it_is_one() {
        let said = |rpc| {
            let empty = ErrorDetails::with_bad_request_violation("name", "empty; give one");
            failure(rpc, Code::InvalidArgument, "name: empty; give one", empty)
        };
        assert_eq!(said("Models.Get"), "name: empty; give one");
        assert_eq!(said("Models.Load"), "--name: empty; give one");
    }

    #[test]
    fn causes_follow_and_are_not_repeated() {
        let io = std::io::Error::other("disk on fire");
        let error = anyhow::Error::new(io).context("cannot read x");
        assert_eq!(describe(&error), "cannot read x: disk on fire");
        let error = anyhow::anyhow!("same").context("same");
        assert_eq!(describe(&error), "same");
    }
}
