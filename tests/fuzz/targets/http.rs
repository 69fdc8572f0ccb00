//! Bodies of HTTP requests in all dialects, through gate, parsing and checks, up to the model that
//! is not there. An input is a byte that chooses the route, and the body.
//!
//! Every request is answered with JSON, and none with an error of ours.
#![no_main]

use std::cell::LazyCell;

use libfuzzer_sys::fuzz_target;
use rocmforge_fuzz::desk::Desk;

const ROUTES: [&str; 18] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/tokenize",
    "/models/load",
    "/models/unload",
    "/none",
    "/completion",
    "/v1/chat/completions/input_tokens",
    "/v1/chat/completions/control",
];

thread_local! {
    static DESK: LazyCell<Desk> = LazyCell::new(Desk::new);
}

fuzz_target!(|data: &[u8]| {
    let Some((&route, body)) = data.split_first() else {
        return;
    };
    let route = ROUTES[usize::from(route) % ROUTES.len()];
    let (status, answer) = DESK.with(|desk| desk.http(route, body));
    let shown = String::from_utf8_lossy(&answer);
    assert!((400..500).contains(&status), "{route}: {status}: {shown}");
    let answer: serde_json::Value = serde_json::from_slice(&answer).expect("an answer in JSON");
    assert!(answer.get("error").is_some(), "{route}: {answer}");
});
