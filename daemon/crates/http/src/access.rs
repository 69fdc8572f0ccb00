//! Access control of HTTP requests.
//!
//! ```text
//! Unix socket                    the roles of the process, as over gRPC
//! TCP, a token is configured     with the token: use and manage; without: health, preflights, /ui
//! TCP, no token (loopback only)  use, for requests that name this machine
//! ```
//!
//! Model files are downloaded, copied and deleted with the role `admin`, over TCP only where
//! `pull_over_tcp` is on.
//!
//! A browser lets any page send requests to this machine. So if no token is configured, requests
//! whose `Origin` or `Host` names another machine are rejected, unless it is allowed ([`Allowed`]):
//! the first comes from a foreign page, the second from one whose name was made to lead here.
//!
//! Pages that are let in may read answers and refusals (`Access-Control-Allow-Origin`), and have
//! their question answered whether they may send a request (a preflight, which brings no token).
//! With tokens these are all pages, so that one without a token reads that it needs one. Cookies
//! and the like are never allowed: there are none here.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::arrival::Caller;
use rocmforge_service::peer::TokenName;
use rocmforge_service::refusals::role_missing;
use rocmforge_service::roles::Role;

use super::Http;
use super::allowed::Allowed;
use super::body;
use super::call::{ANTHROPIC_ID, Call, Client, REQUEST_ID, RequestId, is_light};
use super::refusals;
use super::ui::is_page;

/// Delay after which a client should retry when there are too many connections.
const RETRY: Duration = Duration::from_secs(1);

/// The role that a request needs, by its method and path.
fn needed(method: &Method, path: &str) -> Role {
    let is_change = method == Method::POST || method == Method::DELETE;
    if method == Method::POST
        && matches!(path, "/models/load" | "/models/unload" | "/lora-adapters")
    {
        Role::Manage
    } else if is_change && matches!(path, "/models" | "/api/pull" | "/api/copy" | "/api/delete") {
        Role::Admin
    } else {
        Role::Use
    }
}

impl Http {
    /// Checks a request's role, token and origin; over TCP returns the name of its token, if one is
    /// needed.
    async fn check(
        &self,
        client: Client,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Option<TokenName>, Failure> {
        if is_health(method, path) {
            return Ok(None);
        }
        let role = needed(method, path);
        // A browser sends no token with the page that asks for one.
        if client.caller.is_none() && self.tokens().is_some() && is_page(method, path) {
            return Ok(None);
        }
        let mut name = None;
        match (client.caller, self.tokens()) {
            (Some(caller), _) => {
                if self.service.roles.highest(caller.uid, caller.gid).await < Some(role) {
                    tracing::info!(target: "audit", uid = caller.uid, pid = caller.pid, %role, path, "refused: the role is missing");
                    return Err(role_missing(role, caller.uid));
                }
            }
            (None, Some(tokens)) => {
                name = tokens.sent(headers);
                if name.is_none() {
                    tracing::info!(target: "audit", path, "refused: the token is missing or wrong");
                    return Err(refusals::token_missing());
                }
                if role > Role::Manage && !self.pulls.over_tcp() {
                    return Err(refusals::pull_over_tcp_off());
                }
            }
            (None, None) => {
                names_this_machine(headers, &self.allowed)?;
                if role > Role::Manage && !self.pulls.over_tcp() {
                    return Err(refusals::pull_over_tcp_off());
                }
                if role == Role::Manage {
                    return Err(refusals::role_missing_here(role));
                }
            }
        }
        if client.reserved && !is_light(method, path) {
            return Err(failure::exhausted(
                "all connections that the daemon keeps for work are busy; this one answers health and metrics only: try \
                 again when one is free",
                RETRY,
            ));
        }
        if !is_light(method, path) {
            let uid = client.caller.map_or(Caller::NOBODY, |caller| caller.uid);
            self.service.room_for_reply(uid)?;
        }
        Ok(name)
    }
}

/// Response headers that pages may read.
const EXPOSED: HeaderValue = HeaderValue::from_static("x-request-id, request-id, retry-after");
/// How long a browser may cache the answer to a preflight, in seconds.
const PREFLIGHT_S: HeaderValue = HeaderValue::from_static("600");
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE");
/// Header with which pages of the Internet ask for access to machines of a private network.
const PRIVATE_ASKED: &str = "access-control-request-private-network";
const PRIVATE_ALLOWED: &str = "access-control-allow-private-network";

impl Http {
    /// The origin of the page that sends a request over TCP, if pages of that origin are allowed:
    /// with tokens all of them, since each request has to bring one; without, those of this
    /// machine.
    fn page(&self, client: Client, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let is_in = client.caller.is_none()
            && (self.tokens().is_some() || names_this_machine(headers, &self.allowed).is_ok());
        is_in.then(|| origin.clone())
    }
}

/// The response to a preflight, in which a browser asks whether a page may send a request.
fn preflight(headers: &HeaderMap) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let told = response.headers_mut();
    told.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    told.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_S);
    if let Some(asked) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        told.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    if headers.contains_key(PRIVATE_ASKED) {
        told.insert(PRIVATE_ALLOWED, HeaderValue::from_static("true"));
    }
    response
}

fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// Adds the headers that let a page of this origin read a response.
fn allow(origin: HeaderValue, response: &mut Response) {
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}

fn is_health(method: &Method, path: &str) -> bool {
    method == Method::GET && matches!(path, "/health" | "/v1/health")
}

/// Rejects requests of foreign pages, and requests to a host name that someone else made resolve to
/// this machine.
fn names_this_machine(headers: &HeaderMap, allowed: &Allowed) -> Result<(), Failure> {
    let is_allowed = |name: &str, value: &str| match name {
        "Host" => allowed.has_host(value),
        _ => allowed.has_origin(value),
    };
    for (name, shown) in [(header::HOST, "Host"), (header::ORIGIN, "Origin")] {
        let Some(value) = headers.get(name) else {
            continue;
        };
        let value = String::from_utf8_lossy(value.as_bytes());
        if !is_local(&value) && !is_allowed(shown, &value) {
            return Err(refusals::foreign_origin(shown, &value));
        }
    }
    Ok(())
}

/// Whether `[SCHEME://]HOST[:PORT]` names this machine.
fn is_local(value: &str) -> bool {
    let host = value.split_once("://").map_or(value, |(_, host)| host);
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    host.eq_ignore_ascii_case("localhost")
        || host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// Middleware of all routes: gives each request its id, and rejects requests that the client may
/// not send.
pub(super) async fn gate(
    State(http): State<Arc<Http>>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = RequestId::of(request.headers());
    request.extensions_mut().insert(id.clone());
    let client = request.extensions().get::<Client>().copied();
    let page = client.and_then(|client| http.page(client, request.headers()));
    if let Some(origin) = &page
        && is_preflight(request.method(), request.headers())
    {
        let mut response = preflight(request.headers());
        allow(origin.clone(), &mut response);
        return response;
    }
    let checked = match client {
        Some(client) => {
            // The body cannot be shared across an await, so these are taken out.
            let (method, uri) = (request.method().clone(), request.uri().clone());
            let headers = request.headers().clone();
            http.check(client, &method, uri.path(), &headers).await
        }
        None => Err(failure::bug("a request without a connection")),
    };
    let mut response = match checked {
        Ok(token) => {
            if let Some(token) = token {
                request.extensions_mut().insert(token);
            }
            next.run(request).await
        }
        Err(refused) => {
            body::discard(&mut request).await;
            Call::of(&http, "gate", &request).refuse(&refused)
        }
    };
    // Refusals, too: a page has to see that its token is wrong, or when to try again.
    if let Some(origin) = page {
        allow(origin, &mut response);
    }
    response.headers_mut().insert(REQUEST_ID, id.0.clone());
    response.headers_mut().insert(ANTHROPIC_ID, id.0);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine_are_told_from_others() {
        for local in [
            "localhost",
            "LOCALHOST:8080",
            "127.0.0.1:80",
            "[::1]:8080",
            "http://localhost:3000",
            "http://127.8.8.8",
        ] {
            assert!(is_local(local), "{local}");
        }
        for foreign in [
            "example.com",
            "https://example.com",
            "localhost.example.com",
            "127.0.0.1.nip.io:80",
            "null",
            "10.0.0.1",
            "",
        ] {
            assert!(!is_local(foreign), "{foreign}");
        }
    }
}
