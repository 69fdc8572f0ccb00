//! `POST /api/pull`, `DELETE /api/delete`, `POST /api/copy`: downloads and changes of model files,
//! in Ollama's format.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use rocmforge_failure::{self as failure, Failure};
use rocmforge_hub::{Event, Planned};
use rocmforge_service::Service;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::super::Http;
use super::super::call::{Call, json as answer, with_type};
use super::super::model_store::{IfLoaded, copied, is_at_socket, removed};
use super::super::pulls::{Step, failed};
use super::super::sending::Streamed;
use super::{NDJSON, line};

/// Interval at which a silent download checks whether the daemon ends.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long the first step is awaited, so that an early failure gets an HTTP status.
const FIRST_WAIT: Duration = Duration::from_secs(5);

/// A request that names a model.
#[derive(Debug, Deserialize)]
struct Named {
    model: Option<String>,
    /// Older name of the field `model`.
    name: Option<String>,
    /// Whether progress is streamed (default true).
    stream: Option<bool>,
}

impl Named {
    /// The model's name; empty if there is none.
    fn into_name(self) -> String {
        let model = self.model.filter(|name| !name.is_empty());
        model.or(self.name).unwrap_or_default()
    }
}

/// Handler of `POST /api/pull`: downloads a model.
pub(in super::super) async fn pull(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /api/pull", &request);
    let result = pulled(&http, &call, request).await;
    call.respond(result)
}

async fn pulled(http: &Http, call: &Call, request: Request) -> Result<Response, Failure> {
    let may_name_urls = is_at_socket(&request);
    let asked: Named = call.read_small(request).await?;
    let is_streamed = asked.stream != Some(false);
    let name = asked.into_name();
    call.service.admit()?;
    call.has_name(&name)?;
    let log = call.audit(&name, "download");
    let mut steps = log.end(http.pulls.start(&name, may_name_urls))?;
    if !is_streamed {
        loop {
            match steps.recv().await {
                Some(Step::Event(_)) => {}
                Some(Step::Ended(Ok(_))) => {
                    call.service.forget_listing();
                    return answer(&json!({"status": "success"}));
                }
                Some(Step::Ended(Err(error))) => return Err(failed(&error)),
                None => return Err(failure::draining()),
            }
        }
    }
    let first = tokio::time::timeout(FIRST_WAIT, steps.recv()).await;
    if let Ok(Some(Step::Ended(Err(error)))) = &first {
        return Err(failed(error));
    }
    let mut pulling = Pulling {
        service: Arc::clone(&call.service),
        steps,
        files: Vec::new(),
        has_ended: false,
        waiting: vec![json!({"status": "pulling manifest"})],
    };
    if let Ok(step) = first {
        pulling.hear(step);
    }
    let lines = stream::unfold(pulling, |mut pulling| async move {
        let text = pulling.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(text)), pulling))
    });
    let mut response = with_type(NDJSON, Body::from_stream(lines));
    response.extensions_mut().insert(Streamed);
    Ok(response)
}

/// A download that a client follows.
struct Pulling {
    service: Arc<Service>,
    steps: mpsc::Receiver<Step>,
    files: Vec<Planned>,
    has_ended: bool,
    /// Lines that wait to be sent.
    waiting: Vec<Value>,
}

impl Pulling {
    /// Waits for the next line; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        while self.waiting.is_empty() {
            if self.has_ended {
                return None;
            }
            if self.service.is_draining() {
                self.end(json!({"error": "the daemon ends; pull again to go on where it stopped"}));
                break;
            }
            // A download that waits for its hub says nothing.
            if let Ok(step) = tokio::time::timeout(LOOK_EVERY, self.steps.recv()).await {
                self.hear(step);
            }
        }
        let mut text = String::new();
        for value in self.waiting.drain(..) {
            line(&value, &mut text);
        }
        Some(text)
    }

    fn end(&mut self, last: Value) {
        self.has_ended = true;
        self.steps.close();
        self.waiting.push(last);
    }

    fn hear(&mut self, step: Option<Step>) {
        match step {
            None => self.end(json!({"error": "the download ended without a word; pull again"})),
            Some(Step::Ended(Err(error))) => self.end(json!({"error": error.to_string()})),
            Some(Step::Ended(Ok(_))) => {
                self.service.forget_listing();
                self.waiting.push(json!({"status": "writing manifest"}));
                self.end(json!({"status": "success"}));
            }
            Some(Step::Event(Event::Planned { files, .. })) => {
                let each = files.iter().map(|file| progress(file, file.have));
                self.waiting.extend(each);
                self.files = files;
            }
            Some(Step::Event(Event::Progress { file, done })) => {
                if let Some(file) = self.files.get(file) {
                    self.waiting.push(progress(file, done));
                }
            }
            Some(Step::Event(Event::Checking { .. })) => {
                self.waiting
                    .push(json!({"status": "verifying sha256 digest"}));
            }
            Some(Step::Event(Event::Waiting { why, .. })) => {
                self.waiting.push(json!({"status": why}))
            }
            Some(Step::Event(Event::Done { .. })) => {}
        }
    }
}

/// Progress of a file's download, in Ollama's format.
fn progress(file: &Planned, completed: u64) -> Value {
    let name = file.path.file_name().unwrap_or_default().to_string_lossy();
    // Clients show a bar for each digest.
    let digest = file.sha256.as_ref().map_or_else(
        || format!("name:{name}"),
        |sha256| format!("sha256:{sha256}"),
    );
    let short: String = file
        .sha256
        .as_deref()
        .unwrap_or(&name)
        .chars()
        .take(12)
        .collect();
    json!({"status": format!("pulling {short}"), "digest": digest, "total": file.bytes, "completed": completed})
}

/// Handler of `DELETE /api/delete`.
pub(in super::super) async fn delete(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "DELETE /api/delete", &request);
    let result = async {
        let asked: Named = call.read_small(request).await?;
        removed(&http, &call, &asked.into_name(), IfLoaded::Unload).await?;
        Ok(Response::new(Body::empty()))
    };
    let result = result.await;
    call.respond(result)
}

#[derive(Debug, Deserialize)]
struct CopyRequest {
    source: String,
    destination: String,
}

/// Handler of `POST /api/copy`.
pub(in super::super) async fn copy(State(http): State<Arc<Http>>, request: Request) -> Response {
    let call = Call::of(&http, "POST /api/copy", &request);
    let result = async {
        let asked: CopyRequest = call.read_small(request).await?;
        copied(&http, &call, &asked.source, &asked.destination).await?;
        Ok(Response::new(Body::empty()))
    };
    let result = result.await;
    call.respond(result)
}
