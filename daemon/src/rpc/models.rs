//! `rocmforge.v1.Models`: which files are open, and what of them is kept on the device.

use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, stream};
use rocmforge_engine::api as engine;
use rocmforge_engine::{Error, Events, LoadedModel, PrepareStage, PreparedModel};
use rocmforge_gguf::PartName;
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
use crate::model_files::ModelFile;

/// Events of a load that may wait for its reader: more than it has stages, so that none of them is lost.
const LOAD_EVENTS: usize = 16;
/// How long a load waits for others before it is refused.
const LOAD_WAIT_MAX: Duration = Duration::from_secs(10);
/// How long a change that the engine has confirmed may take to show in its snapshot.
const PUBLISH_WAIT_MAX: Duration = Duration::from_secs(2);
/// How long a model that a failed load has registered may take to go, and how often that is tried.
const FORGET_WAIT_MAX: Duration = Duration::from_secs(10);
const FORGET_RETRY: Duration = Duration::from_millis(20);

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

/// The file's name without `.gguf`, in either case, and of a split model without the part's number;
/// what a name cannot have becomes `-`.
fn default_name(path: &Path) -> String {
    const SUFFIX: &str = ".gguf";
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = PartName::of(path);
    let stem = match (&part, name.len().checked_sub(SUFFIX.len())) {
        (Some(part), _) => part.stem(),
        (None, Some(at))
            if name.is_char_boundary(at) && name[at..].eq_ignore_ascii_case(SUFFIX) =>
        {
            &name[..at]
        }
        _ => &name,
    };
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-:@+".contains(c);
    stem.chars()
        .map(|c| if allowed(c) { c } else { '-' })
        .collect()
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

/// The segments that a request names, as an argument in the log.
fn asked_segments(segments: &[u32]) -> String {
    const SHOWN: usize = 16;
    match segments {
        [] => "segments=all".to_owned(),
        few if few.len() <= SHOWN => format!("segments={few:?}"),
        many => format!(
            "segments={:?} and {} more",
            &many[..SHOWN],
            many.len() - SHOWN
        ),
    }
}

/// The client of a stream went away.
fn client_gone<T>(_: T) -> Status {
    Status::cancelled("the client went away")
}

impl Context {
    /// Loads, sending stages to `events`. Returns the model as it is then. Where `stop` comes first, or anything fails,
    /// the call leaves nothing behind; a model that was there before it stays.
    async fn load(
        &self,
        load: &Load,
        events: &LoadSender,
        stop: impl Future<Output = Status>,
    ) -> Result<v1::Model, Status> {
        let mut stop = pin!(stop);
        let prepared = tokio::select! {
            prepared = self.prepared(load, events) => prepared?,
            status = &mut stop => return Err(status),
        };
        let known = self.engine.model(&load.name).is_ok();
        // Not stopped: once the engine has it, only its answer tells what there is to undo.
        let registered = self.engine.load(prepared).await;
        let model = registered.map_err(|error| status_code::from_engine(&error))?;
        let mut kept = if load.preload {
            tokio::select! {
                done = self.preload_all(&model, events) => done,
                status = &mut stop => Err(status),
            }
        } else {
            Ok(())
        };
        if kept.is_ok() && load.pin {
            let pinned = self.engine.pin(model.name(), None, true).await;
            kept = pinned
                .map(drop)
                .map_err(|error| status_code::from_engine(&error));
        }
        match kept {
            Ok(()) => self.published(&model).await,
            Err(status) => {
                if !known {
                    self.forget(&load.name).await;
                }
                Err(status)
            }
        }
    }

    /// Unloads what a load has left. What was under way for it may take a moment to end.
    async fn forget(&self, name: &str) {
        let give_up = Instant::now() + FORGET_WAIT_MAX;
        loop {
            match self.engine.unload(name, false).await {
                Ok(_) | Err(Error::UnknownModel { .. }) => return,
                Err(error) if Instant::now() >= give_up => {
                    tracing::warn!(model = ?name, %error, "a load failed after the model was registered, and it stays");
                    return;
                }
                Err(_) => tokio::time::sleep(FORGET_RETRY).await,
            }
        }
    }

    /// Opens the file and reads its header.
    async fn prepared(&self, load: &Load, events: &LoadSender) -> Result<PreparedModel, Status> {
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
        let snapshot = self.engine.snapshot();
        let prepared = tokio::task::spawn_blocking(move || {
            let _place = place;
            let file = dirs
                .open(&path)
                .map_err(|error| status_code::from_model_file(&error))?;
            let bytes = file.size_bytes();
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
            let others = snapshot.models.iter().map(|status| &*status.model);
            rocmforge_engine::prepare_among(&name, file, others, &mut progress)
                .map_err(|error| status_code::from_engine(&error))
        });
        match prepared.await {
            Ok(prepared) => prepared,
            Err(error) if error.is_panic() => {
                Err(status_code::bug("reading the model's header panicked"))
            }
            Err(_) => Err(status_code::draining()),
        }
    }

    /// Uploads what fits, telling `events`.
    async fn preload_all(&self, model: &LoadedModel, events: &LoadSender) -> Result<(), Status> {
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
                Some(engine::PreloadEvent::Done { .. }) => return Ok(()),
                Some(engine::PreloadEvent::Failed(error)) => {
                    return Err(status_code::from_engine(&error));
                }
                None => return Err(status_code::engine_gone()),
            }
        }
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

    async fn list_files(&self) -> Result<v1::ListFilesResponse, Status> {
        let Ok(turn) = Arc::clone(&self.listings).try_acquire_owned() else {
            return Err(status_code::exhausted(
                "the model directories are being read for another caller",
                Duration::from_secs(1),
            ));
        };
        let dirs = Arc::clone(&self.dirs);
        let listing = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            dirs.list()
        });
        let (files, is_whole) = listing.await.map_err(|_| status_code::draining())?;
        let snapshot = self.engine.snapshot();
        let summary = |file: &ModelFile| {
            let loaded = snapshot.models.iter().map(|status| &status.model);
            let mut loaded_as: Vec<_> = loaded
                .filter(|model| model.path() == file.real)
                .map(|model| model.name().to_owned())
                .collect();
            loaded_as.sort();
            Some(v1::FileSummary {
                path: file.name()?.to_owned(),
                size_bytes: file.bytes,
                mtime_unix_ms: file.mtime_unix_ms,
                loaded_as,
            })
        };
        Ok(v1::ListFilesResponse {
            files: files.iter().filter_map(summary).collect(),
            is_cut: !is_whole,
        })
    }

    async fn unload(
        &self,
        request: v1::UnloadRequest,
        arrival: Arrival,
    ) -> Result<v1::UnloadResponse, Status> {
        let mut violations = Violations::default();
        check::model_name("name", &request.name, &mut violations);
        violations.result()?;
        let work = async {
            let unloaded = self.engine.unload(&request.name, request.force).await;
            unloaded.map_err(|error| status_code::from_engine(&error))
        };
        let unloaded = arrival.limit(work).await?;
        Ok(v1::UnloadResponse {
            freed_bytes: unloaded.freed_bytes,
            cancelled_requests: unloaded.cancelled_requests,
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
        let v1::LoadRequest {
            path,
            name,
            pin,
            preload,
        } = &request;
        let asked = format!("path={path:?} name={name:?} pin={pin} preload={preload}");
        let checked = self.context.admit().and_then(|()| check_load(request));
        let load = match checked {
            Ok(load) => load,
            Err(status) => return RequestLog::audit("Load", "", &asked, &arrival).end(Err(status)),
        };
        let (events, receiver) = mpsc::channel(LOAD_EVENTS);
        let context = Arc::clone(&self.context);
        tokio::spawn(async move {
            let mut log = RequestLog::audit("Load", &load.name, &asked, &arrival);
            let stop = async {
                tokio::select! {
                    status = arrival.passed() => status,
                    () = events.closed() => client_gone(()),
                }
            };
            let result = context.load(&load, &events, stop).await;
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
        let asked = format!("force={}", request.force);
        let log = RequestLog::audit("Unload", &request.name, &asked, &arrival);
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

    async fn list_files(
        &self,
        request: Request<v1::ListFilesRequest>,
    ) -> Result<Response<v1::ListFilesResponse>, Status> {
        let arrival = Arrival::of(&request);
        let files = arrival.limit(self.context.list_files()).await?;
        Ok(Response::new(files))
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
        let asked = asked_segments(&request.segments);
        let log = RequestLog::audit("Preload", &request.name, &asked, &arrival);
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
        let asked = asked_segments(&request.segments);
        let log = RequestLog::audit("Pin", &request.name, &asked, &arrival);
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
        let asked = asked_segments(&request.segments);
        let log = RequestLog::audit("Unpin", &request.name, &asked, &arrival);
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
