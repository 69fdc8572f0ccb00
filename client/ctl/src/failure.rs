//! Errors as users read them: what went wrong, and the flag or command that
//! mends it.

use rocmforge_client::{Code, Error, RpcError};

use crate::sampling::flag_of;

/// The error with its causes, one after the other, and what to do about it.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    let causes = error.chain().skip(1);
    for cause in causes {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    if let Some(rpc) = error.chain().find_map(rpc_of) {
        for (field, description) in rpc.field_violations() {
            let name = flag_of(field).unwrap_or_else(|| field.to_owned());
            if !text.contains(&name) {
                text.push_str(&format!("\n  {name}: {description}"));
            }
        }
        for (_, subject, description) in rpc.precondition_violations() {
            if !text.contains(description) {
                text.push_str(&format!("\n  {subject}: {description}"));
            }
        }
        if let Some(hint) = hint(rpc) {
            text.push_str("\n  hint: ");
            text.push_str(&hint);
        }
    }
    text
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
        ("Models.Load", Code::NotFound) => "check the path; the daemon has to see the file too",
        ("Models.Load", Code::AlreadyExists) => {
            "load it under another name with --name, or `rocmforgectl unload` that one"
        }
        ("Models.Load", Code::PermissionDenied) => {
            "move the file below a model directory (`rocmforgectl status` lists them), start \
             rocmforged with --model-dir, or use `rocmforgectl run --private`"
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
        (_, Code::NotFound) => "`rocmforgectl ls` lists the models, `rocmforgectl load` opens one",
        (_, Code::DataLoss) => "`rocmforgectl unload` the model and load it again",
        (_, Code::Unimplemented) if error.rpc != "Models.Load" => {
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
        assert_eq!(text, "bad parameter\n  --top-p: must be above 0");
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
    fn causes_follow_and_are_not_repeated() {
        let io = std::io::Error::other("disk on fire");
        let error = anyhow::Error::new(io).context("cannot read x");
        assert_eq!(describe(&error), "cannot read x: disk on fire");
        let error = anyhow::anyhow!("same").context("same");
        assert_eq!(describe(&error), "same");
    }
}
