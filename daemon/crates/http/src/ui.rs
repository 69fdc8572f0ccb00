//! `/ui`: a page to chat, to look at models and memory, and to see the settings in force.
//!
//! The page is its markup, script and style inside of the program. It uses the same routes as all
//! clients, with a token if one is needed, so that it may do what its user may. The page itself
//! says nothing of this daemon and is given to everyone who may connect.
//!
//! *Invariants* (tests below): no script or style but these two texts runs ([`POLICY`]); what comes
//! from models, files and the daemon is set as text, never as markup.

mod live;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use axum::response::Response;
use serde_json::json;

pub(super) use self::live::live;
use super::Http;
use super::call::{Call, json as answer, with_type};

const PAGE: &str = include_str!("ui/page.html");
const SCRIPT: &str = concat!(
    "\"use strict\";\n",
    include_str!("ui/residency.js"),
    include_str!("ui/requests.js"),
    include_str!("ui/page.js"),
    include_str!("ui/chat.js")
);
const STYLE: &str = include_str!("ui/page.css");

/// Content security policy: the page may run its script, apply its style, and send requests to this
/// daemon.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
);

/// Whether a request is for the page itself, which needs no role.
pub(super) fn is_page(method: &Method, path: &str) -> bool {
    method == Method::GET && matches!(path, "/ui" | "/ui/page.js" | "/ui/page.css")
}

/// A setting as the page `/ui` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShownSetting {
    /// The setting's key.
    pub key: &'static str,
    /// Value of the setting in TOML; `None` if it is not set.
    pub value: Option<String>,
    /// Source of the setting's value: default, file, environment or flag.
    pub origin: String,
    /// Help text of the setting.
    pub help: String,
}

fn part(content_type: &'static str, text: &'static str) -> Response {
    let mut response = with_type(content_type, Body::from(text));
    protect(response.headers_mut());
    response
}

fn protect(headers: &mut HeaderMap) {
    const NOSNIFF: HeaderValue = HeaderValue::from_static("nosniff");
    const NO_REFERRER: HeaderValue = HeaderValue::from_static("no-referrer");
    headers.insert(header::CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, NOSNIFF);
    headers.insert(header::REFERRER_POLICY, NO_REFERRER);
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(
        HeaderName::from_static("cross-origin-opener-policy"),
        HeaderValue::from_static("same-origin"),
    );
    // The next version of the daemon brings another page.
    let fresh = HeaderValue::from_static("no-cache");
    headers.insert(header::CACHE_CONTROL, fresh);
}

/// `GET /ui`: the page.
pub(super) async fn page() -> Response {
    part("text/html; charset=utf-8", PAGE)
}

/// The script of the page `/ui`.
pub(super) async fn script() -> Response {
    part("text/javascript; charset=utf-8", SCRIPT)
}

/// The style of the page `/ui`.
pub(super) async fn style() -> Response {
    part("text/css; charset=utf-8", STYLE)
}

/// `GET /ui/settings`: the settings in force, and where each value came from.
pub(super) async fn settings(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /ui/settings", &request);
    let each = http.settings.iter().map(|setting| {
        json!({
            "key": setting.key,
            "value": setting.value,
            "origin": setting.origin,
            "help": setting.help,
        })
    });
    let settings: Vec<_> = each.collect();
    call.respond(answer(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "settings": settings,
    })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_set_as_markup_and_nothing_runs_that_is_a_text() {
        for (what, why) in [
            ("innerHTML", "text of a model would be markup"),
            ("outerHTML", "text of a model would be markup"),
            ("insertAdjacentHTML", "text of a model would be markup"),
            ("document.write", "text of a model would be markup"),
            (
                "createContextualFragment",
                "text of a model would be markup",
            ),
            ("DOMParser", "text of a model would be markup"),
            ("eval(", "a text would run"),
            ("new Function", "a text would run"),
            ("setAttribute(\"on", "a text would run"),
            (".href", "a link to script: would run"),
            ("import(", "the page has one script"),
            ("localStorage", "a token would outlive the window"),
            ("http://", "the page asks this daemon alone"),
            ("https://", "the page asks this daemon alone"),
        ] {
            assert!(!SCRIPT.contains(what), "{what}: {why}");
        }
        assert!(SCRIPT.contains("textContent"));
    }

    #[test]
    fn the_page_loads_nothing_but_its_own_parts() {
        let lower = PAGE.to_ascii_lowercase();
        for tag in [
            "<iframe",
            "<object",
            "<embed",
            "<form",
            "<base",
            "javascript:",
            "style=",
            "<style",
        ] {
            assert!(!lower.contains(tag), "{tag}");
        }
        // No handler stands in the markup.
        for (at, _) in lower.match_indices(" on") {
            let word = lower[at + 1..].trim_start_matches(|c: char| c.is_ascii_lowercase());
            assert!(
                !word.trim_start().starts_with('='),
                "{}",
                &lower[at..at + 20]
            );
        }
        let scripts: Vec<_> = lower.match_indices("<script").collect();
        assert_eq!(scripts.len(), 1);
        assert!(PAGE.contains("<script src=\"/ui/page.js\" defer></script>"));
        assert!(PAGE.contains("<link rel=\"stylesheet\" href=\"/ui/page.css\">"));
        for outside in ["http://", "https://", "src=\"//", "url(", "@import"] {
            assert!(
                !PAGE.contains(outside) && !STYLE.contains(outside),
                "{outside}"
            );
        }
    }

    /// The values of an attribute of the page.
    fn values<'a>(attribute: &str) -> Vec<&'a str> {
        let mark = format!(" {attribute}=\"");
        let each = PAGE.match_indices(&mark).map(|(at, _)| {
            let rest = &PAGE[at + mark.len()..];
            &rest[..rest.find('"').unwrap()]
        });
        each.collect()
    }

    #[test]
    fn every_control_has_a_name_for_screen_readers() {
        let ids = values("id");
        let mut once = ids.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), ids.len(), "an id stands for one element");
        for label in values("for")
            .into_iter()
            .chain(values("aria-labelledby"))
            .chain(values("aria-controls"))
        {
            assert!(ids.contains(&label), "no element has the id {label}");
        }
        for (at, _) in PAGE
            .match_indices("<input")
            .chain(PAGE.match_indices("<textarea"))
            .chain(PAGE.match_indices("<select"))
        {
            let tag = &PAGE[at..at + PAGE[at..].find('>').unwrap()];
            let id = tag
                .split(" id=\"")
                .nth(1)
                .map(|rest| rest.split('"').next().unwrap_or_default());
            let has_label = id.is_some_and(|id| values("for").contains(&id));
            assert!(has_label || tag.contains("aria-label="), "{tag}");
        }
        for (at, _) in PAGE.match_indices("<button") {
            let rest = &PAGE[at..];
            let inner = &rest[rest.find('>').unwrap() + 1..rest.find("</button>").unwrap()];
            assert!(!inner.trim().is_empty(), "{inner}");
        }
        assert!(
            PAGE.contains("<html lang=\"en\">")
                && PAGE.contains("<title>")
                && PAGE.contains("<main")
        );
        assert!(
            PAGE.contains("aria-live=\"polite\""),
            "what arrives is read out"
        );
        assert!(STYLE.contains("prefers-color-scheme: dark") && STYLE.contains(":focus-visible"));
        // Every element that the script looks for is there.
        for (at, _) in SCRIPT.match_indices("element(\"") {
            let rest = &SCRIPT[at + "element(\"".len()..];
            let (id, behind) = rest.split_once('"').unwrap();
            // Others are put together.
            let is_whole = behind.starts_with(')');
            assert!(!is_whole || ids.contains(&id), "no element has the id {id}");
        }
    }
}
