//! The table of errors and statuses, row by row.

use std::path::PathBuf;
use std::time::Duration;

use rocmforge_engine::{Error, Refusal};
use rocmforge_failure as failure;
use rocmforge_service::model_files::ModelFileError;
use rocmforge_service::refusals;

use super::*;

fn from_engine(error: &Error) -> Status {
    status(refusals::from_engine(error))
}

fn from_model_file(error: &ModelFileError) -> Status {
    status(refusals::from_model_file(error))
}

fn second() -> Duration {
    Duration::from_secs(1)
}

fn details_of(status: &Status) -> ErrorDetails {
    status.get_error_details()
}

fn assert_row(status: &Status, code: Code, reason: &str, mentions: &[&str]) {
    assert_eq!(status.code(), code, "{status:?}");
    let details = details_of(status);
    let info = details.error_info().expect("every status has an ErrorInfo");
    assert_eq!(
        (info.domain.as_str(), info.reason.as_str()),
        (DOMAIN, reason)
    );
    for word in mentions {
        assert!(
            status.message().contains(word),
            "'{}' lacks '{word}'",
            status.message()
        );
    }
}

#[test]
fn every_error_of_the_engine_has_its_code_reason_and_words() {
    let path = PathBuf::from("/models/a.gguf");
    let rows = [
        (
            Error::InvalidArgument {
                field: "sampling.top_p",
                message: "2 is out of range".into(),
            },
            Code::InvalidArgument,
            "INVALID_FIELD",
            vec!["sampling.top_p", "2 is out of range"],
        ),
        (
            Error::BadModel {
                path: path.clone(),
                message: "magic".into(),
            },
            Code::InvalidArgument,
            "BAD_MODEL_FILE",
            vec!["/models/a.gguf", "magic"],
        ),
        (
            Error::Unsupported("architecture 'gpt9'".into()),
            Code::Unimplemented,
            "UNSUPPORTED",
            vec!["gpt9"],
        ),
        (
            Error::UnknownModel {
                name: "x".into(),
                known: vec!["a".into(), "b".into()],
            },
            Code::NotFound,
            "UNKNOWN_MODEL",
            vec!["'x'", "a, b"],
        ),
        (
            Error::NameTaken {
                name: "x".into(),
                changed: false,
                path: path.clone(),
            },
            Code::AlreadyExists,
            "NAME_TAKEN",
            vec!["'x'", "unload"],
        ),
        (
            Error::NameTaken {
                name: "x".into(),
                changed: true,
                path,
            },
            Code::AlreadyExists,
            "LOADED_FILE_CHANGED",
            vec!["'x'", "changed", "unload"],
        ),
        (
            Error::Precondition(Refusal::Busy {
                model: "x".into(),
                requests: 3,
            }),
            Code::FailedPrecondition,
            "MODEL_BUSY",
            vec!["'x'", "3", "force"],
        ),
        (
            Error::Exhausted {
                message: "queue full".into(),
                retry_after: second(),
            },
            Code::ResourceExhausted,
            "FULL_NOW",
            vec!["queue full"],
        ),
        (
            Error::AskerLimit {
                running: 2,
                queued: 3,
                running_max: 2,
                queued_max: 3,
            },
            Code::ResourceExhausted,
            "PEER_LIMIT",
            vec!["running = 2", "queued = 3"],
        ),
        (
            Error::Unavailable {
                message: "draining".into(),
                retry_after: second(),
            },
            Code::Unavailable,
            "NOT_SERVING",
            vec!["draining"],
        ),
        (
            Error::DataLoss {
                name: "x".into(),
                message: "shorter".into(),
            },
            Code::DataLoss,
            "MODEL_FILE_CHANGED",
            vec!["'x'", "shorter", "load it again"],
        ),
        (
            Error::FileSilent {
                name: "x".into(),
                path: "/far/x.gguf".into(),
                seconds: 12,
            },
            Code::Unavailable,
            "MODEL_FILE_SILENT",
            vec!["'x'", "/far/x.gguf", "12 s", "ask again"],
        ),
        (
            Error::DeadlineExceeded { generated: 7 },
            Code::DeadlineExceeded,
            "DEADLINE",
            vec!["7", "allow more time"],
        ),
        (Error::Cancelled, Code::Cancelled, "CANCELLED", vec![]),
        (
            Error::NoDevice("device hip: no card".into()),
            Code::FailedPrecondition,
            "NO_DEVICE",
            vec!["no card"],
        ),
        (
            Error::DeviceLost(rocmforge_engine::Loss::unknown("it hangs")),
            Code::Unavailable,
            "NOT_SERVING",
            vec!["it hangs"],
        ),
        (
            Error::Internal("odd".into()),
            Code::Internal,
            "BUG",
            vec!["odd", "report"],
        ),
    ];
    for (error, code, reason, mentions) in rows {
        assert_row(&from_engine(&error), code, reason, &mentions);
    }
}

#[test]
fn details_tell_programs_what_the_message_tells_people() {
    let status = from_engine(&Error::InvalidArgument {
        field: "n_ctx",
        message: "0".into(),
    });
    let details = details_of(&status);
    assert_eq!(
        details.bad_request().unwrap().field_violations[0].field,
        "n_ctx"
    );

    for error in [
        Error::Exhausted {
            message: String::new(),
            retry_after: second(),
        },
        Error::Unavailable {
            message: String::new(),
            retry_after: second(),
        },
    ] {
        let details = details_of(&from_engine(&error));
        assert_eq!(
            details.retry_info().unwrap().retry_delay,
            Some(second()),
            "{error:?}"
        );
    }
    assert!(
        details_of(&super::status(failure::draining()))
            .retry_info()
            .is_some()
    );
    assert!(
        details_of(&super::status(failure::engine_gone()))
            .retry_info()
            .is_some()
    );

    let details = details_of(&from_engine(&Error::Precondition(Refusal::NeverFits {
        message: "too small".into(),
        need: 7,
        budget: 5,
        pinned: 1,
    })));
    let violation = &details.precondition_failure().unwrap().violations[0];
    assert_eq!(
        (violation.r#type.as_str(), violation.description.as_str()),
        ("NEVER_FITS", "too small")
    );
    let numbers = &details.error_info().unwrap().metadata;
    assert_eq!(
        [
            &numbers["need_bytes"],
            &numbers["budget_bytes"],
            &numbers["pinned_bytes"]
        ],
        ["7", "5", "1"]
    );

    let details = details_of(&from_engine(&Error::UnknownModel {
        name: "x".into(),
        known: vec!["a".into()],
    }));
    assert_eq!(details.resource_info().unwrap().resource_name, "x");
    assert_eq!(details.error_info().unwrap().metadata["loaded"], "a");
}

#[test]
fn every_refusal_of_a_file_has_its_code_and_words() {
    let path = PathBuf::from("/models/a.gguf");
    let rows = [
        (
            ModelFileError::BadPath {
                message: "long".into(),
            },
            Code::InvalidArgument,
            vec!["long"],
        ),
        (
            ModelFileError::Outside {
                path: path.clone(),
                dirs: vec!["/models".into()],
            },
            Code::PermissionDenied,
            vec!["--model-dir", "/models"],
        ),
        (
            ModelFileError::NoModelDir,
            Code::PermissionDenied,
            vec!["--model-dir"],
        ),
        (
            ModelFileError::DirSilent {
                dir: "/models".into(),
                why: "does not answer (an error); check the server".into(),
            },
            Code::Unavailable,
            vec!["/models does not answer", "an error", "then try again"],
        ),
        (
            ModelFileError::NotFound {
                tried: vec!["/models/a".into(), "/more/a".into()],
            },
            Code::NotFound,
            vec!["/models/a", "/more/a"],
        ),
        (
            ModelFileError::MissingParts {
                path: path.clone(),
                count: 3,
                missing: vec!["/models/a-00003-of-00003.gguf".into()],
            },
            Code::NotFound,
            vec!["3 parts", "1 is not there", "/models/a-00003-of-00003.gguf"],
        ),
        (
            ModelFileError::NotFirstPart {
                path: path.clone(),
                number: 2,
                count: 3,
                first: "/models/a-00001-of-00003.gguf".into(),
            },
            Code::InvalidArgument,
            vec!["part 2 of 3", "/models/a-00001-of-00003.gguf"],
        ),
        (
            ModelFileError::NotAFile {
                path: path.clone(),
                kind: "a FIFO",
            },
            Code::InvalidArgument,
            vec!["FIFO", "give the path"],
        ),
        (
            ModelFileError::Unreadable {
                path: path.clone(),
                user: 7,
            },
            Code::PermissionDenied,
            vec!["user 7"],
        ),
        (
            ModelFileError::Replaced { path: path.clone() },
            Code::Unavailable,
            vec!["replaced"],
        ),
        (
            ModelFileError::Empty { path: path.clone() },
            Code::InvalidArgument,
            vec!["empty", "fetch"],
        ),
        (
            ModelFileError::Io {
                path,
                message: "i/o".into(),
            },
            Code::FailedPrecondition,
            vec!["i/o"],
        ),
    ];
    for (error, code, mentions) in rows {
        let status = from_model_file(&error);
        assert_eq!(status.code(), code, "{error:?}");
        assert!(details_of(&status).error_info().is_some(), "{error:?}");
        for word in mentions {
            assert!(
                status.message().contains(word),
                "'{}' lacks '{word}'",
                status.message()
            );
        }
    }
}

#[test]
fn a_status_fits_the_headers_of_any_client() {
    let long = "\u{e9}".repeat(100_000);
    let known: Vec<String> = (0..10_000).map(|i| format!("model-{i}")).collect();
    let violations: Vec<_> = (0..1000)
        .map(|i| (format!("field{i}"), long.clone()))
        .collect();
    let statuses = [
        from_engine(&Error::UnknownModel {
            name: long.clone(),
            known,
        }),
        from_engine(&Error::Precondition(Refusal::Setting {
            message: long.clone(),
        })),
        from_model_file(&ModelFileError::Outside {
            path: long.clone().into(),
            dirs: vec![long.clone().into(); 64],
        }),
        super::status(failure::invalid_all(&violations)),
    ];
    for status in statuses {
        // Text is percent-encoded, details are base64.
        let bytes = status.message().len() * 3 + status.details().len() * 4 / 3;
        assert!(
            bytes < 15_000,
            "{bytes} bytes of headers for {:?}",
            status.code()
        );
    }
}
