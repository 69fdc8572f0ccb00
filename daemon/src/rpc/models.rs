//! `rocmforge.v1.Models`: which files are open, and what of them is kept on the device.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use rocmforge_engine::api as engine;
use rocmforge_engine::{Events, LoadedModel, PrepareStage};
use rocmforge_proto::v1;
use rocmforge_proto::v1::models_server::Models;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::arrival::Arrival;
use super::check::{self, Violations};
use super::convert::{self, Residency};
use super::request_log::RequestLog;
use super::{Context, status_code};

/// Events of a load that may wait for its reader: more than it has stages, so that none of them is lost.
const LOAD_EVENTS: usize = 16;
/// How long a load waits for others before it is refused.
const LOAD_WAIT_MAX: Duration = Duration::from_secs(10);
/// How long a change that the engine has confirmed may take to show in its snapshot.
const PUBLISH_WAIT_MAX: Duration = Duration::from_secs(2);

/// The service.
#[derive(Debug)]
pub(super) struct ModelsService {
    context: Arc<Context>,
}

type LoadStream = ReceiverStream<Result<v1::LoadEvent, Status>>;
type LoadSender = mpsc::Sender<Result<v1::LoadEvent, Status>>;
type PreloadStream = Pin<Box<dyn Stream<Item = Result<v1::PreloadEvent, Status>> + Send>>;

/// A checked load.
#[derive(Debug)]
struct Load {
    path: PathBuf,
    name: String,
    pin: bool,
    preload: bool,
}

impl ModelsService {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }
}

fn check_load(request: v1::LoadRequest) -> Result<Load, Status> {
    let path = PathBuf::from(request.path);
    let mut violations = Violations::default();
    if path.as_os_str().is_empty() {
        violations.add(
            "path",
            "empty; give the path of a GGUF file, absolute or relative to a model directory",
        );
    }
    let name = if request.name.is_empty() {
        default_name(&path)
    } else {
        request.name
    };
    if name.is_empty() {
        violations.add(
            "name",
            "empty, and the path has no file name to take it from; give a name",
        );
    }
    violations.result()?;
    Ok(Load {
        path,
        name,
        pin: request.pin,
        preload: request.preload,
    })
}

/// The file's name without `.gguf`.
fn default_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_suffix(".gguf").unwrap_or(&name).to_owned()
}

fn stage(stage: v1::LoadStage, done_bytes: u64, total_bytes: u64) -> v1::LoadEvent {
    let progress = v1::LoadProgress {
        stage: stage.into(),
        done_bytes,
        total_bytes,
    };
    v1::LoadEvent {
        event: Some(v1::load_event::Event::Progress(progress)),
    }
}

/// The client of a stream went away.
fn client_gone<T>(_: T) -> Status {
    Status::cancelled("the client went away")
}

impl Context {
    /// Loads, sending stages to `events`. Returns the model as it is then.
    async fn load(&self, load: &Load, events: &LoadSender) -> Result<v1::Model, Status> {
        let known = self.engine.model(&load.name).is_ok();
        let model = self.register(load, events).await?;
        let kept = self.keep(load, &model, events).await;
        if let Err(status) = kept {
            // The call failed, so that it leaves nothing behind; a model that was there before it stays.
            if !known && let Err(error) = self.engine.unload(&load.name, false).await {
                tracing::warn!(model = %load.name, %error, "a load failed after the model was registered, and it stays");
            }
            return Err(status);
        }
        self.published(&model).await
    }

    async fn register(&self, load: &Load, events: &LoadSender) -> Result<Arc<LoadedModel>, Status> {
        let place =
            tokio::time::timeout(LOAD_WAIT_MAX, Arc::clone(&self.loads).acquire_owned()).await;
        let Ok(Ok(place)) = place else {
            return Err(status_code::exhausted(
                "too many models are being loaded at once",
                Duration::from_secs(1),
            ));
        };
        let (dirs, path, name, events) = (
            Arc::clone(&self.dirs),
            load.path.clone(),
            load.name.clone(),
            events.clone(),
        );
        let prepared = tokio::task::spawn_blocking(move || {
            let _place = place;
            let file = dirs
                .open(&path)
                .map_err(|error| status_code::from_model_file(&error))?;
            let bytes = file.len();
            let mut progress = |at| {
                let at = match at {
                    PrepareStage::Header => v1::LoadStage::Metadata,
                    PrepareStage::Tokenizer => v1::LoadStage::Tokenizer,
                    PrepareStage::Plan => v1::LoadStage::Plan,
                };
                // A reader that is gone or asleep does not stop the load here; the next await notices.
                let _ = events.try_send(Ok(stage(at, 0, 0)));
            };
            tracing::debug!(path = %file.path().display(), bytes, "reading a model's header");
            rocmforge_engine::prepare(&name, file, &mut progress)
                .map_err(|error| status_code::from_engine(&error))
        });
        let prepared = match prepared.await {
            Ok(prepared) => prepared?,
            Err(error) if error.is_panic() => {
                return Err(status_code::bug("reading the model's header panicked"));
            }
            Err(_) => return Err(status_code::draining()),
        };
        self.engine
            .load(prepared)
            .await
            .map_err(|error| status_code::from_engine(&error))
    }

    /// Preloads and pins, where the load asks for it.
    async fn keep(
        &self,
        load: &Load,
        model: &LoadedModel,
        events: &LoadSender,
    ) -> Result<(), Status> {
        if load.preload {
            let mut steps = self.preload_events(model.name(), None)?;
            loop {
                match steps.next().await {
                    Some(engine::PreloadEvent::Progress {
                        done_bytes,
                        total_bytes,
                    }) => events
                        .send(Ok(stage(v1::LoadStage::Preload, done_bytes, total_bytes)))
                        .await
                        .map_err(client_gone)?,
                    Some(engine::PreloadEvent::Done { .. }) => break,
                    Some(engine::PreloadEvent::Failed(error)) => {
                        return Err(status_code::from_engine(&error));
                    }
                    None => return Err(status_code::engine_gone()),
                }
            }
        }
        if load.pin {
            let pinned = self.engine.pin(model.name(), None, true).await;
            pinned.map_err(|error| status_code::from_engine(&error))?;
        }
        Ok(())
    }

    /// The model as the engine publishes it, which may be a moment after it confirmed the load.
    async fn published(&self, model: &Arc<LoadedModel>) -> Result<v1::Model, Status> {
        let mut snapshots = self.engine.watch();
        let is_there = |snapshot: &Arc<engine::Snapshot>| {
            snapshot.models.iter().any(|m| Arc::ptr_eq(&m.model, model))
        };
        let shown = tokio::time::timeout(PUBLISH_WAIT_MAX, snapshots.wait_for(is_there)).await;
        let found = match &shown {
            Ok(Ok(snapshot)) => snapshot
                .models
                .iter()
                .find(|m| Arc::ptr_eq(&m.model, model)),
            Ok(Err(_)) => return Err(status_code::engine_gone()),
            Err(_) => None,
        };
        match found {
            Some(status) => Ok(convert::model(status)),
            None => Err(status_code::unloaded_meanwhile(model.name())),
        }
    }

    fn preload_events(
        &self,
        name: &str,
        segments: Option<Vec<u32>>,
    ) -> Result<Events<engine::PreloadEvent>, Status> {
        self.engine
            .preload(name, segments)
            .map_err(|error| status_code::from_engine(&error))
    }

    fn residency(&self, name: &str, asked: Option<&[u32]>) -> Residency {
        let snapshot = self.engine.snapshot();
        let found = snapshot.models.iter().find(|m| m.model.name() == name);
        found
            .map(|status| Residency::of_segments(status, asked))
            .unwrap_or_default()
    }

    /// The model and the segments that a request names.
    fn named_segments(
        &self,
        name: &str,
        asked: Vec<u32>,
    ) -> Result<(Arc<LoadedModel>, Option<Vec<u32>>), Status> {
        self.admit()?;
        let mut violations = Violations::default();
        check::model_name("name", name, &mut violations);
        violations.result()?;
        let model = self.model(name)?;
        let segments = check::segments(asked, model.model().info().segments.len())?;
        Ok((model, segments))
    }

    async fn pin(
        &self,
        name: &str,
        segments: Vec<u32>,
        pinned: bool,
        arrival: Arrival,
    ) -> Result<(u32, u64), Status> {
        let (_, segments) = self.named_segments(name, segments)?;
        let work = async {
            let bytes = self.engine.pin(name, segments, pinned).await;
            bytes.map_err(|error| status_code::from_engine(&error))
        };
        let bytes = arrival.limit(work).await?;
        Ok((self.residency(name, None).n_pinned, bytes))
    }

    async fn unload(
        &self,
        request: v1::UnloadRequest,
        arrival: Arrival,
    ) -> Result<v1::UnloadResponse, Status> {
        let mut violations = Violations::default();
        check::model_name("name", &request.name, &mut violations);
        violations.result()?;
        let snapshot = self.engine.snapshot();
        let active = snapshot
            .models
            .iter()
            .find(|m| m.model.name() == request.name)
            .map_or(0, |m| m.requests);
        let work = async {
            let freed = self.engine.unload(&request.name, request.force).await;
            freed.map_err(|error| status_code::from_engine(&error))
        };
        let freed_bytes = arrival.limit(work).await?;
        Ok(v1::UnloadResponse {
            freed_bytes,
            cancelled_requests: if request.force { active } else { 0 },
        })
    }
}

/// The wire's events of a preload. Dropping the stream stops it after the upload under way.
fn preload_stream(
    context: Arc<Context>,
    name: String,
    asked: Option<Vec<u32>>,
    events: Events<engine::PreloadEvent>,
    arrival: Arrival,
    log: RequestLog,
) -> impl Stream<Item = Result<v1::PreloadEvent, Status>> + Send {
    use v1::preload_event::Event;

    stream::unfold(
        Some((context, name, asked, events, log)),
        move |state| async move {
            let (context, name, asked, mut events, mut log) = state?;
            let next = arrival
                .limit(async { events.next().await.ok_or_else(status_code::engine_gone) })
                .await;
            let now = context.residency(&name, asked.as_deref());
            let (item, goes_on) = match next {
                Ok(engine::PreloadEvent::Progress {
                    done_bytes,
                    total_bytes,
                }) => {
                    let (done_segments, total_segments) = (now.n_resident, now.n_segments);
                    let progress = v1::PreloadProgress {
                        done_bytes,
                        total_bytes,
                        done_segments,
                        total_segments,
                    };
                    (Ok(Event::Progress(progress)), true)
                }
                Ok(engine::PreloadEvent::Done { uploaded_bytes }) => {
                    log.uploaded_bytes = Some(uploaded_bytes);
                    let done = v1::PreloadDone {
                        resident_segments: now.n_resident,
                        resident_bytes: now.resident_bytes,
                        skipped_segments: now.n_segments - now.n_resident,
                        skipped_bytes: now.weight_bytes - now.resident_bytes,
                    };
                    (Ok(Event::Done(done)), false)
                }
                Ok(engine::PreloadEvent::Failed(error)) => {
                    (Err(status_code::from_engine(&error)), false)
                }
                Err(status) => (Err(status), false),
            };
            if !goes_on {
                log.note(&item);
            }
            let item = item.map(|event| v1::PreloadEvent { event: Some(event) });
            Some((item, goes_on.then_some((context, name, asked, events, log))))
        },
    )
}

#[tonic::async_trait]
impl Models for ModelsService {
    type LoadStream = LoadStream;
    type PreloadStream = PreloadStream;

    async fn load(
        &self,
        request: Request<v1::LoadRequest>,
    ) -> Result<Response<Self::LoadStream>, Status> {
        let (arrival, request) = (Arrival::of(&request), request.into_inner());
        let checked = self.context.admit().and_then(|()| check_load(request));
        let load = match checked {
            Ok(load) => load,
            Err(status) => return RequestLog::new("Load", "", arrival.at).end(Err(status)),
        };
        let (events, receiver) = mpsc::channel(LOAD_EVENTS);
        let context = Arc::clone(&self.context);
        tokio::spawn(async move {
            let mut log = RequestLog::new("Load", &load.name, arrival.at);
            let loading = arrival.limit(context.load(&load, &events));
            let result = tokio::select! {
                result = loading => result,
                () = events.closed() => Err(client_gone(())),
            };
            log.note(&result);
            let last = result.map(|model| v1::LoadEvent {
                event: Some(v1::load_event::Event::Loaded(model)),
            });
            // The client may be gone; then nobody waits for the end.
            let _ = events.send(last).await;
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn unload(
        &self,
        request: Request<v1::UnloadRequest>,
    ) -> Result<Response<v1::UnloadResponse>, Status> {
        let (arrival, request) = (Arrival::of(&request), request.into_inner());
        let log = RequestLog::new("Unload", &request.name, arrival.at);
        log.end(self.context.unload(request, arrival).await)
            .map(Response::new)
    }

    async fn list(
        &self,
        _: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let models = convert::summaries(&self.context.engine.snapshot().models);
        Ok(Response::new(v1::ListModelsResponse { models }))
    }

    async fn get(
        &self,
        request: Request<v1::GetModelRequest>,
    ) -> Result<Response<v1::GetModelResponse>, Status> {
        let name = request.into_inner().name;
        let mut violations = Violations::default();
        check::model_name("name", &name, &mut violations);
        violations.result()?;
        let snapshot = self.context.engine.snapshot();
        match snapshot.models.iter().find(|m| m.model.name() == name) {
            Some(status) => Ok(Response::new(v1::GetModelResponse {
                model: Some(convert::model(status)),
            })),
            None => Err(status_code::unknown_model(&name, &snapshot.models)),
        }
    }

    async fn preload(
        &self,
        request: Request<v1::PreloadRequest>,
    ) -> Result<Response<Self::PreloadStream>, Status> {
        let (arrival, request) = (Arrival::of(&request), request.into_inner());
        let log = RequestLog::new("Preload", &request.name, arrival.at);
        let started = self
            .context
            .named_segments(&request.name, request.segments)
            .and_then(|(_, segments)| {
                let events = self
                    .context
                    .preload_events(&request.name, segments.clone())?;
                Ok((segments, events))
            });
        match started {
            Ok((segments, events)) => {
                let context = Arc::clone(&self.context);
                let stream = preload_stream(context, request.name, segments, events, arrival, log);
                Ok(Response::new(Box::pin(stream)))
            }
            Err(status) => log.end(Err(status)),
        }
    }

    async fn pin(
        &self,
        request: Request<v1::PinRequest>,
    ) -> Result<Response<v1::PinResponse>, Status> {
        let (arrival, request) = (Arrival::of(&request), request.into_inner());
        let log = RequestLog::new("Pin", &request.name, arrival.at);
        let result = self
            .context
            .pin(&request.name, request.segments, true, arrival)
            .await;
        let (pinned_segments, pinned_bytes) = log.end(result)?;
        Ok(Response::new(v1::PinResponse {
            pinned_segments,
            pinned_bytes,
        }))
    }

    async fn unpin(
        &self,
        request: Request<v1::UnpinRequest>,
    ) -> Result<Response<v1::UnpinResponse>, Status> {
        let (arrival, request) = (Arrival::of(&request), request.into_inner());
        let log = RequestLog::new("Unpin", &request.name, arrival.at);
        let result = self
            .context
            .pin(&request.name, request.segments, false, arrival)
            .await;
        let (pinned_segments, pinned_bytes) = log.end(result)?;
        Ok(Response::new(v1::UnpinResponse {
            pinned_segments,
            pinned_bytes,
        }))
    }
}
