//! Failures that only HTTP has.

use rocmforge_failure::{Failure, Reason};
use rocmforge_service::roles::Role;

/// NOT_FOUND: no response with this id is stored for this client.
pub(crate) fn unknown_response(id: &str) -> Failure {
    let message = format!(
        "no response '{id}' is kept; the last ones of each client are, until the daemon ends, where store is not false"
    );
    Failure::new(Reason::UnknownResponse)
        .with("response", id)
        .about("response", id, "not kept")
        .says(&message)
}

/// INVALID_ARGUMENT: `previous_response_id` names a response that is not stored.
pub(crate) fn unknown_previous(id: &str) -> Failure {
    let message = format!(
        "previous_response_id: response '{id}' is not kept; the last ones of each client are, until the daemon ends, \
         where store is not false: send the whole conversation as input"
    );
    Failure::new(Reason::UnknownPrevious)
        .with("response", id)
        .field("previous_response_id", "it is not kept")
        .says(&message)
}

/// NOT_FOUND: a request refers to an item that is not stored.
pub(crate) fn unknown_item(field: &str, id: &str) -> Failure {
    let message = format!(
        "{field}: item '{id}' is not kept; the last ones of each client are, until the daemon ends, where store is not \
         false: send the item itself"
    );
    Failure::new(Reason::UnknownItem)
        .with("item", id)
        .field(field, "it refers to an item that is not kept")
        .says(&message)
}

/// UNIMPLEMENTED: the content coding of a request's body is not supported.
pub(crate) fn content_encoding(encoding: &str, accepted: &str) -> Failure {
    let message = format!(
        "Content-Encoding: {encoding} is not read here; send the body as it is, or in one of {accepted}"
    );
    Failure::new(Reason::ContentEncoding)
        .with("encoding", encoding)
        .with("accepted", accepted)
        .says(&message)
}

/// UNAUTHENTICATED: the request has no token, or not the right one.
pub(crate) fn token_missing() -> Failure {
    Failure::new(Reason::TokenMissing)
        .with("setting", "http_token_file")
        .says(
            "this address needs the token of the daemon's http_token_file: send it as 'Authorization: Bearer TOKEN' or \
             'x-api-key: TOKEN'",
        )
}

/// PERMISSION_DENIED: clients of a TCP address without tokens do not get this role.
pub(crate) fn role_missing_here(role: Role) -> Failure {
    Failure::new(Reason::RoleMissing)
        .with("role", role.to_string())
        .with("setting", "http_token_file")
        .says(&format!(
            "this call needs the role '{role}', which callers over TCP have by a token alone; configure http_token_file, \
             or use the Unix socket"
        ))
}

/// PERMISSION_DENIED: clients over TCP may not download, copy or delete models.
pub(crate) fn pull_over_tcp_off() -> Failure {
    Failure::new(Reason::RoleMissing)
        .with("role", Role::Admin.to_string())
        .with("setting", "pull_over_tcp")
        .says(
            "this call needs the role 'admin', which callers over TCP do not have; use the Unix socket, or set \
             pull_over_tcp = \"on\"",
        )
}

/// NOT_FOUND: the hub has no such model or file, or there is none to delete.
pub(crate) fn not_on_hub(message: &str) -> Failure {
    Failure::new(Reason::NotOnHub).says(message)
}

/// UNAVAILABLE: the hub or a download failed.
pub(crate) fn hub_failed(word: &str, message: &str) -> Failure {
    Failure::new(Reason::HubFailed)
        .with("cause", word)
        .says(message)
}

/// FAILED_PRECONDITION: the file that is to be deleted is loaded as the model `name`.
pub(crate) fn file_loaded(name: &str) -> Failure {
    Failure::new(Reason::InUse)
        .with("model", name)
        .says(&format!(
            "the file is loaded as model '{name}'; unload the model first"
        ))
}

/// PERMISSION_DENIED: there is no model directory to download to.
pub(crate) fn no_model_dir() -> Failure {
    Failure::new(Reason::NoModelDir).says(
        "the daemon was started without a model directory; start it with --model-dir DIR (model_dir in the file)",
    )
}

/// PERMISSION_DENIED: a web page of another site sent the request.
pub(crate) fn foreign_origin(header: &str, value: &str) -> Failure {
    let setting = match header {
        "Host" => "http_allow_hosts",
        _ => "http_allow_origins",
    };
    Failure::new(Reason::ForeignOrigin)
        .with("header", header)
        .with("setting", setting)
        .says(&format!(
            "the header {header} names '{value}', and without a token only this machine's own names are served; use \
             http://127.0.0.1 or http://localhost, add it to {setting}, or configure http_token_file"
        ))
}

/// NOT_FOUND: there is no route at this path.
pub(crate) fn no_route(method: &str, path: &str) -> Failure {
    Failure::new(Reason::NoSuchRoute).says(&format!(
        "nothing answers {method} {path}; docs/http-api.md lists the routes"
    ))
}

/// UNIMPLEMENTED: the route does not support this method.
pub(crate) fn no_method(method: &str, path: &str, taken: &str) -> Failure {
    Failure::new(Reason::MethodNotAllowed).says(&format!("{path} takes no {method}; send {taken}"))
}
