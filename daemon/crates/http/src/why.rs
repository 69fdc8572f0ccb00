//! `GET /why`: time accounts of ended requests.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::Uri;
use axum::response::Response;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::why::{KEPT_MAX, Report, Which};
use serde::Serialize;

use super::Http;
use super::call::{Call, json as answer, query};

/// The response of `GET /why`.
#[derive(Debug, Serialize)]
struct Answer {
    requests: Vec<Report>,
}

/// `GET /why`: the account of the request in `?request=`, of the `?latest=` N last ones, or of the
/// one that took longest.
pub(super) async fn why(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /why", &request);
    let result = match which(request.uri()) {
        Ok(which) => {
            let viewer = call.service.viewer(&call.arrival).await;
            call.service.why(&viewer, &which)
        }
        Err(failure) => Err(failure),
    };
    call.respond(result.and_then(|requests| answer(&Answer { requests })))
}

/// The requests that a query selects.
fn which(uri: &Uri) -> Result<Which, Failure> {
    match (query(uri, "request"), query(uri, "latest")) {
        (Some(name), _) if !name.is_empty() => Ok(Which::Named(name)),
        (_, None) => Ok(Which::Slowest),
        (_, Some(latest)) => match latest.parse() {
            Ok(n) if (1..=KEPT_MAX).contains(&n) => Ok(Which::Latest(n)),
            _ => {
                let why = format!("'{latest}' is no number from 1 to {KEPT_MAX}");
                Err(failure::invalid("latest", &why))
            }
        },
    }
}
