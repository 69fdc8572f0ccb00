//! Normalizes request paths: a base URL that ends in a slash leads to double slashes, and some
//! clients append one.
//!
//! *Invariant:* paths are normalized before roles and routes are determined.

use axum::http::Uri;
use axum::http::uri::PathAndQuery;

/// The URI with single slashes and none at its end; `None` if it is so already.
pub(super) fn regular(uri: &Uri) -> Option<Uri> {
    let path = uri.path();
    if !path.contains("//") && (path == "/" || !path.ends_with('/')) {
        return None;
    }
    let names = path.split('/').filter(|name| !name.is_empty());
    let mut target: String = names.flat_map(|name| ["/", name]).collect();
    if target.is_empty() {
        target.push('/');
    }
    if let Some(query) = uri.query() {
        target.push('?');
        target.push_str(query);
    }
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(target).ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_are_single_and_none_is_at_the_end() {
        let of = |target: &'static str| {
            let uri = Uri::from_static(target);
            regular(&uri).unwrap_or(uri).to_string()
        };
        for (target, expected) in [
            ("//v1/chat/completions", "/v1/chat/completions"),
            ("/v1/chat/completions/", "/v1/chat/completions"),
            ("/v1//messages///?beta=true//", "/v1/messages?beta=true//"),
            ("/v1/models/a%2F%2Fb", "/v1/models/a%2F%2Fb"),
            ("//", "/"),
            ("/", "/"),
            ("/?a", "/?a"),
            ("http://localhost:1//health/", "http://localhost:1/health"),
        ] {
            assert_eq!(of(target), expected);
        }
        assert!(regular(&Uri::from_static("/v1/models")).is_none());
    }
}
