//! Controls a running generation: `POST /v1/chat/completions/control`.
//!
//! ```text
//! chat with reasoning_control -> Control (a flag that the matcher reads at each token)
//!   id in Controls while the answer runs <- control: {id, action: "reasoning_end"}
//! ```
//!
//! *Invariant:* an id is in the list only as long as its generation runs, so that the list is
//! bounded by the number of requests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_failure::{self as failure, Failure};
use serde::Deserialize;
use serde_json::json;

use super::Http;
use super::call::{Call, json as answer};

/// Running responses that a client can control, by id.
#[derive(Debug, Default)]
pub(crate) struct Controls(Mutex<HashMap<String, Arc<AtomicBool>>>);

/// Entry of a running response in [`Controls`]; removed when it is dropped.
#[derive(Debug)]
pub(super) struct Control {
    controls: Arc<Controls>,
    id: String,
}

impl Controls {
    /// Adds a response, and returns its entry with the flag that ends its reasoning.
    pub(super) fn list(self: &Arc<Self>, id: &str) -> (Control, Arc<AtomicBool>) {
        let flag = Arc::new(AtomicBool::new(false));
        let mut flags = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        flags.insert(id.to_owned(), Arc::clone(&flag));
        let control = Control {
            controls: Arc::clone(self),
            id: id.to_owned(),
        };
        (control, flag)
    }

    /// Ends the reasoning of the chat with this id. Returns whether such a chat is running.
    fn end_reasoning(&self, id: &str) -> bool {
        let flags = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let flag = flags.get(id);
        flag.inspect(|flag| flag.store(true, Ordering::Relaxed))
            .is_some()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let flags = &self.controls.0;
        let mut flags = flags.lock().unwrap_or_else(PoisonError::into_inner);
        flags.remove(&self.id);
    }
}

#[derive(Debug, Deserialize)]
struct ControlRequest {
    #[serde(default)]
    id: String,
    #[serde(default)]
    action: String,
}

/// Handler of `POST /v1/chat/completions/control`.
pub(super) async fn control(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /v1/chat/completions/control", &request);
    let result = controlled(&http, &call, request).await;
    call.respond(result)
}

async fn controlled(http: &Http, call: &Call, request: Request) -> Result<Response, Failure> {
    let asked: ControlRequest = call.read_small(request).await?;
    if asked.action != "reasoning_end" {
        let why = format!("'{}' is no action; give \"reasoning_end\"", asked.action);
        return Err(failure::invalid("action", &why));
    }
    if !http.controls.end_reasoning(&asked.id) {
        let why = "no answer of this id is generated that may be controlled; give the id of its \
                   chunks, and set reasoning_control in the request";
        return Err(failure::invalid("id", why));
    }
    answer(&json!({"success": true}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_listed_as_long_as_it_runs() {
        let controls = Arc::new(Controls::default());
        let (first, ends_first) = controls.list("a");
        let (_second, ends_second) = controls.list("b");
        assert!(controls.end_reasoning("a") && !controls.end_reasoning("c"));
        assert!(ends_first.load(Ordering::Relaxed));
        assert!(!ends_second.load(Ordering::Relaxed));
        drop(first);
        assert!(!controls.end_reasoning("a") && controls.end_reasoning("b"));
    }
}
