//! `GET /slots`: a slot for each request that may run at once, as llama-server has it.
//!
//! Requests have no fixed slots here: running requests are in the first ones, in the order of their
//! arrival. Details are shown only to a request's own client, and to the role admin.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_engine::api::{LiveRequest, LiveState};
use serde_json::{Value, json};

use super::super::Http;
use super::super::call::{Call, json as answer};

/// Handler of `GET /slots`.
pub(in super::super) async fn slots(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /slots", &request);
    let viewer = call.service.viewer(&call.arrival).await;
    let snapshot = call.service.engine.snapshot();
    let limits = call.service.limits;
    let waits =
        |live: &&LiveRequest| matches!(live.state, LiveState::Queued | LiveState::Preempted);
    let all = snapshot.requests.iter();
    let running: Vec<_> = all.filter(|live| !waits(live)).collect();
    let slot = |id: u32| {
        let mut slot = json!({
            "id": id,
            "n_ctx": limits.n_ctx_max,
            "speculative": false,
            "is_processing": id < snapshot.running,
        });
        let live = running.get(id as usize);
        if let (Some(live), Some(slot)) = (live, slot.as_object_mut())
            && call.service.is_seen_by(&viewer, live.client)
        {
            slot.extend(task(live));
        }
        slot
    };
    let slots: Vec<_> = (0..limits.max_sequences).map(slot).collect();
    call.respond(answer(&slots))
}

/// The state of a request, in llama-server's fields.
fn task(live: &LiveRequest) -> [(String, Value); 5] {
    let next = json!([{"has_next_token": true, "n_decoded": live.generated_tokens}]);
    let fields = [
        ("id_task", json!(live.number)),
        ("model", json!(live.model.name())),
        ("n_prompt_tokens", json!(live.prompt_tokens)),
        (
            "n_prompt_tokens_processed",
            json!(live.computed_tokens.min(live.prompt_tokens)),
        ),
        ("next_token", next),
    ];
    fields.map(|(name, value)| (name.to_owned(), value))
}
