//! `/lora-adapters` as llama-server has it: the LoRA adapters of a model and their scales.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_engine::LoadedModel;
use rocmforge_failure::Failure;
use rocmforge_service::adapters::{AdapterScale, scales_of};
use rocmforge_service::refusals;
use serde_json::{Value, json};

use super::Http;
use super::adapter_scales::WireAdapter;
use super::call::{Call, json as answer, query};
use super::llama::named;

/// Handler of `GET /lora-adapters`: lists the adapters of the model in `?model=`.
pub(super) async fn list(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "GET /lora-adapters", &request);
    let name = query(request.uri(), "model");
    let result = async {
        // Without a name and without a single model there is nothing to list.
        if name.is_none() && call.service.engine.snapshot().models.len() != 1 {
            return answer(&json!([]));
        }
        let model = named(&call, name.as_deref()).await?;
        answer(&described(&model))
    };
    let result = result.await;
    call.respond(result)
}

fn described(model: &LoadedModel) -> Value {
    let adapters = model.adapters();
    let list = adapters.list().iter().zip(adapters.defaults()).enumerate();
    let describe = |(id, (adapter, scale)): (usize, (&rocmforge_engine::LoadedAdapter, f32))| {
        json!({
            "id": id,
            "name": adapter.name,
            "path": adapter.path.display().to_string(),
            "scale": scale,
            "rank": adapter.rank,
            "task_name": adapter.task_name,
            "prompt_prefix": adapter.prompt_prefix,
        })
    };
    list.map(describe).collect()
}

/// Handler of `POST /lora-adapters`: sets the default scales of adapters of the model in `?model=`;
/// adapters that are not listed get 0.
pub(super) async fn set(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /lora-adapters", &request);
    let name = query(request.uri(), "model");
    let result = async {
        let wire: Vec<WireAdapter> = call.read_small(request).await?;
        let listed: Vec<AdapterScale> = wire.into_iter().map(AdapterScale::from).collect();
        let model = named(&call, name.as_deref()).await?;
        let log = call.audit(model.name(), &format!("lora={listed:?}"));
        let scales = scales_of(&listed, &model).and_then(|scales| {
            let set = model.adapters().set_defaults(&scales);
            set.map_err(|error| refusals::from_engine(&error))
        });
        log.end(scales)?;
        answer(&json!({"success": true}))
    };
    let result: Result<Response, Failure> = result.await;
    call.respond(result)
}
