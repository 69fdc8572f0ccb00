//! `GET` and `DELETE /v1/responses/ID`, and `GET /v1/responses/ID/input_items`: stored responses of
//! the client.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_failure::{self as failure, Failure};
use serde_json::{Value, json};

use super::super::super::Http;
use super::super::super::call::{Call, json as answer, percent_decoded, with_type};

/// The response's id in a request's path.
fn id_of(request: &Request) -> String {
    let rest = request.uri().path().strip_prefix("/v1/responses/");
    let name = rest.and_then(|rest| rest.split('/').next());
    percent_decoded(name.unwrap_or_default())
}

/// Handler that returns a stored response.
pub(in super::super::super) async fn get(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "GET /v1/responses/ID", &request);
    let found = http.memory.response(call.arrival.peer(), &id_of(&request));
    let body = |text: &str| with_type("application/json", Body::from(text.to_owned()));
    call.respond(found.map(|kept| body(&kept.whole)))
}

/// Handler that deletes a stored response.
pub(in super::super::super) async fn delete(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "DELETE /v1/responses/ID", &request);
    let id = id_of(&request);
    let forgotten = http.memory.forget(call.arrival.peer(), &id);
    call.respond(
        forgotten.and_then(|()| answer(&json!({"id": id, "object": "response", "deleted": true}))),
    )
}

/// Handler that returns the input items of a stored response.
pub(in super::super::super) async fn input(
    State(http): State<Arc<Http>>,
    request: Request,
) -> Response {
    let call = Call::of(&http, "GET /v1/responses/ID/input_items", &request);
    let found = http.memory.response(call.arrival.peer(), &id_of(&request));
    call.respond(found.and_then(|kept| listed(&kept.input)))
}

fn listed(input: &str) -> Result<Response, Failure> {
    let items: Vec<Value> = serde_json::from_str(input)
        .map_err(|error| failure::bug(&format!("a kept input is no JSON: {error}")))?;
    let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (id(items.first()), id(items.last()));
    answer(&json!({
        "object": "list", "data": items, "first_id": first, "last_id": last, "has_more": false,
    }))
}
