//! Deletion and copies of model files, and downloads started by clients: shared by the routes of
//! llama-server and Ollama.

use std::path::Path;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_service::model_files::ModelFile;
use rocmforge_service::refusals::from_engine;
use serde::Deserialize;
use serde_json::json;

use super::Http;
use super::call::{Call, Client, json as answer, query};
use super::pulls::failed;
use super::refusals;

/// Whether a request came over the Unix socket.
pub(super) fn is_at_socket(request: &Request) -> bool {
    let client = request.extensions().get::<Client>();
    client.is_some_and(|client| client.caller.is_some())
}

#[derive(Debug, Deserialize)]
struct Named {
    model: Option<String>,
}

/// `POST /models`: begins a download in the background; `GET /models/sse` reports its progress.
pub(super) async fn download(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /models", &request);
    let result = downloaded(&http, &call, request).await;
    call.respond(result)
}

async fn downloaded(http: &Http, call: &Call, request: Request) -> Result<Response, Failure> {
    let may_name_urls = is_at_socket(&request);
    let asked: Named = call.read_small(request).await?;
    let name = asked.model.unwrap_or_default();
    call.service.admit()?;
    call.has_name(&name)?;
    let log = call.audit(&name, "download");
    log.end(http.pulls.start_behind(&name, may_name_urls))?;
    answer(&json!({"success": true}))
}

/// `DELETE /models?model=NAME`: deletes the file of a model.
pub(super) async fn delete(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "DELETE /models", &request);
    let name = query(request.uri(), "model").unwrap_or_default();
    let result = removed(&http, &call, &name, IfLoaded::Refuse).await;
    call.respond(result.and_then(|()| answer(&json!({"success": true}))))
}

/// What to do if the model whose file is to be deleted is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IfLoaded {
    /// Reject the deletion.
    Refuse,
    /// Unload the model, unless it has requests or is pinned: Ollama's clients cannot unload.
    Unload,
}

/// Deletes the file of the model with this name.
pub(super) async fn removed(
    http: &Http,
    call: &Call,
    name: &str,
    if_loaded: IfLoaded,
) -> Result<(), Failure> {
    call.has_name(name)?;
    let log = call.audit(name, "delete");
    let done = async {
        let file = file_of(call, name).await?;
        // A copy is a link: deleting it leaves the file.
        let is_file = file.path == file.real;
        let snapshot = call.service.engine.snapshot();
        let loaded = snapshot.models.iter().map(|status| &status.model);
        for model in loaded.filter(|model| is_file && model.path() == file.real) {
            if if_loaded == IfLoaded::Refuse {
                return Err(refusals::file_loaded(model.name()));
            }
            let unloaded = call.service.engine.unload(model.name(), false).await;
            unloaded.map_err(|error| from_engine(&error))?;
        }
        let path = file.path;
        in_dir(http, move |dir| {
            rocmforge_hub::remove(dir, &path).map(|_| ())
        })
        .await?;
        call.service.forget_listing();
        Ok(())
    };
    let done = done.await;
    log.end(done)
}

/// Makes a model available under a second name.
pub(super) async fn copied(
    http: &Http,
    call: &Call,
    name: &str,
    second: &str,
) -> Result<(), Failure> {
    call.has_name(name)?;
    let log = call.audit(name, "copy");
    let done = async {
        let (path, second) = (file_of(call, name).await?.path, second.to_owned());
        in_dir(http, move |dir| {
            rocmforge_hub::copy(dir, &path, &second).map(|_| ())
        })
        .await?;
        call.service.forget_listing();
        Ok(())
    };
    let done = done.await;
    log.end(done)
}

/// The file of the model with this name.
async fn file_of(call: &Call, name: &str) -> Result<ModelFile, Failure> {
    let listed = call.service.list_files().await?;
    let short = name.strip_suffix(":latest").unwrap_or(name);
    let mut files = listed.served.into_iter();
    match files.find(|named| named.name == name || named.name == short) {
        Some(named) => Ok(named.file),
        None => call.service.file_by_hub_name(short).await,
    }
}

/// Runs work that blocks on the download directory.
async fn in_dir(
    http: &Http,
    work: impl FnOnce(&Path) -> Result<(), rocmforge_hub::Error> + Send + 'static,
) -> Result<(), Failure> {
    let dir = http.pulls.dir()?;
    let done = tokio::task::spawn_blocking(move || work(&dir)).await;
    let done = done.map_err(|_| failure::draining())?;
    done.map_err(|error| failed(&error))
}
