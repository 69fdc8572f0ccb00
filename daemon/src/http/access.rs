//! Who may do what over HTTP.
//!
//! ```text
//! Unix socket                    the roles of the process, as over gRPC
//! TCP, a token is configured     with the token: use and manage; without: nothing but health
//! TCP, no token (loopback only)  use, for requests that name this machine
//! ```
//!
//! A browser lets any page send requests to this machine. So where no token tells callers apart,
//! requests whose `Origin` or `Host` names another machine are refused: the first comes from a
//! foreign page, the second from one whose name was made to lead here.

use std::fmt;
use std::fs;
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use nix::fcntl::OFlag;
use rocmforge_service::failure::{self, Failure};
use rocmforge_service::roles::Role;

use super::Http;
use super::call::{ANTHROPIC_ID, Call, Client, REQUEST_ID, RequestId, is_light};

/// Shortest token: as many characters as nobody guesses.
const TOKEN_MIN_BYTES: usize = 16;
/// Longest token.
const TOKEN_MAX_BYTES: usize = 1024;
/// Where Anthropic's clients put it.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// When to try again where connections are short.
const RETRY: Duration = Duration::from_secs(1);

/// The secret that callers over TCP send.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Reads the token of a file, without the space around it.
    ///
    /// # Errors
    /// A message that says what is wrong with the file or the token.
    pub fn read(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let failed = |error: std::io::Error| format!("{shown} cannot be read: {error}");
        // A FIFO would be waited for.
        let file = fs::OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(path)
            .map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        if !found.is_file() {
            return Err(format!("{shown} is not a regular file"));
        }
        if found.permissions().mode() & 0o007 != 0 {
            return Err(format!(
                "{shown} is open to every user; chmod 0600 it, and change the token"
            ));
        }
        let mut text = String::new();
        file.take(TOKEN_MAX_BYTES as u64 + 3)
            .read_to_string(&mut text)
            .map_err(failed)?;
        Self::new(text.trim()).map_err(|message| format!("{shown}: {message}"))
    }

    /// A token.
    ///
    /// # Errors
    /// A message, where its length or a character is not allowed.
    pub fn new(text: &str) -> Result<Self, String> {
        let fits = (TOKEN_MIN_BYTES..=TOKEN_MAX_BYTES).contains(&text.len());
        if fits && text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Ok(Self(text.to_owned()));
        }
        Err(format!(
            "a token has {TOKEN_MIN_BYTES} to {TOKEN_MAX_BYTES} printable characters without spaces; this one has {} \
             bytes (openssl rand -hex 32 makes one)",
            text.len()
        ))
    }

    /// Takes as long for any text of a length.
    fn is(&self, text: &str) -> bool {
        let (own, other) = (self.0.as_bytes(), text.as_bytes());
        let differences = own.iter().zip(other).fold(0, |sum, (a, b)| sum | (a ^ b));
        own.len() == other.len() && differences == 0
    }

    fn is_sent(&self, headers: &HeaderMap) -> bool {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
            scheme
                .eq_ignore_ascii_case("bearer")
                .then(|| token.trim_start())
        });
        let key = headers.get(X_API_KEY).and_then(|value| value.to_str().ok());
        [bearer, key]
            .into_iter()
            .flatten()
            .any(|sent| self.is(sent))
    }
}

/// What a request needs.
fn needed(method: &Method, path: &str) -> Role {
    if method == Method::POST && matches!(path, "/models/load" | "/models/unload") {
        Role::Manage
    } else {
        Role::Use
    }
}

impl Http {
    async fn check(
        &self,
        client: Client,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<(), Failure> {
        if is_health(method, path) {
            return Ok(());
        }
        let role = needed(method, path);
        match (client.caller, self.token()) {
            (Some(caller), _) => {
                if self.service.roles.highest(caller.uid, caller.gid).await < Some(role) {
                    tracing::info!(target: "audit", uid = caller.uid, pid = caller.pid, %role, path, "refused: the role is missing");
                    return Err(failure::role_missing(role, caller.uid));
                }
            }
            (None, Some(token)) => {
                if !token.is_sent(headers) {
                    tracing::info!(target: "audit", path, "refused: the token is missing or wrong");
                    return Err(failure::token_missing());
                }
            }
            (None, None) => {
                names_this_machine(headers)?;
                if role > Role::Use {
                    return Err(failure::role_missing_here(role));
                }
            }
        }
        if client.reserved && !is_light(method, path) {
            return Err(failure::exhausted(
                "all connections that the daemon keeps for work are busy; this one answers health and metrics only",
                RETRY,
            ));
        }
        Ok(())
    }
}

fn is_health(method: &Method, path: &str) -> bool {
    method == Method::GET && matches!(path, "/health" | "/v1/health")
}

/// Refuses what a foreign page, or a name that was made to lead here, has sent.
fn names_this_machine(headers: &HeaderMap) -> Result<(), Failure> {
    for (name, shown) in [(header::HOST, "Host"), (header::ORIGIN, "Origin")] {
        let Some(value) = headers.get(name) else {
            continue;
        };
        let value = String::from_utf8_lossy(value.as_bytes());
        if !is_local(&value) {
            return Err(failure::foreign_origin(shown, &value));
        }
    }
    Ok(())
}

/// Whether `[SCHEME://]HOST[:PORT]` is this machine.
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

/// What every request passes: it gets its name, and is refused where its caller may not.
pub(super) async fn gate(
    State(http): State<Arc<Http>>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = RequestId::of(request.headers());
    request.extensions_mut().insert(id.clone());
    let client = request.extensions().get::<Client>().copied();
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
        Ok(()) => next.run(request).await,
        Err(refused) => Call::of(&http, "gate", &request).refuse(&refused),
    };
    response.headers_mut().insert(REQUEST_ID, id.0.clone());
    response.headers_mut().insert(ANTHROPIC_ID, id.0);
    response
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn a_token_is_found_in_either_header() {
        let token = Token::new("0123456789abcdef").unwrap();
        for (name, value, expected) in [
            ("authorization", "Bearer 0123456789abcdef", true),
            ("authorization", "bearer 0123456789abcdef", true),
            ("x-api-key", "0123456789abcdef", true),
            ("authorization", "Bearer 0123456789abcdeF", false),
            ("authorization", "Bearer 0123456789abcde", false),
            ("authorization", "Basic 0123456789abcdef", false),
            ("authorization", "0123456789abcdef", false),
            ("x-api-key", "", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            assert_eq!(token.is_sent(&headers), expected, "{name}: {value}");
        }
        assert_eq!(format!("{token:?}"), "Token");
        assert!(Token::new("short").is_err() && Token::new(&"x ".repeat(20)).is_err());
    }

    #[test]
    fn a_token_file_that_everyone_reads_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(Token::read(&path).unwrap_err().contains("every user"));
        fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(
            Token::read(&path),
            Token::new("0123456789abcdef"),
            "the line's end is no part of it"
        );
        assert!(Token::read(dir.path()).unwrap_err().contains("regular"));
    }

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
