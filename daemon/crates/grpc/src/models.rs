//! `rocmforge.v1.Models`: loads and unloads models, and controls what is resident.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt, stream};
use rocmforge_engine::api as engine;
use rocmforge_engine::{Error, Events, LoadedModel, PrepareStage};
use rocmforge_failure::{self as failure, Failure, Violations};
use rocmforge_proto::v1;
use rocmforge_proto::v1::models_server::Models;
use rocmforge_service::Service;
use rocmforge_service::adapters::AdapterSpec;
use rocmforge_service::arrival::Arrival;
use rocmforge_service::check;
use rocmforge_service::files::NamedFile;
use rocmforge_service::load::{Load, LoadStep};
use rocmforge_service::refusals;
use rocmforge_service::request_log::RequestLog;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::arrival;
use super::convert::{self, ResidencySums};
use super::status_code::status;

/// Maximum number of a load's steps that wait for the client: more than there are stages, so that
/// none is lost; no more, so that a client that does not read pauses the preload.
const LOAD_EVENTS: usize = 4;

/// Implementation of `rocmforge.v1.Models`.
#[derive(Debug)]
pub(super) struct ModelsService {
    context: Arc<Service>,
}

type LoadStream = Pin<Box<dyn Stream<Item = Result<v1::LoadEvent, Status>> + Send>>;
type PreloadStream = Pin<Box<dyn Stream<Item = Result<v1::PreloadEvent, Status>> + Send>>;

impl ModelsService {
    pub(super) fn new(context: Arc<Service>) -> Self {
        Self { context }
    }
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

/// Converts an adapter of a load.
fn adapter_spec(wire: &v1::AdapterFile) -> AdapterSpec {
    AdapterSpec {
        path: PathBuf::from(&wire.path),
        name: (!wire.name.is_empty()).then(|| wire.name.clone()),
        scale: wire.scale.unwrap_or(1.0),
    }
}

/// The segments of a request as text, for the audit log.
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

/// Converts a step of a load to an event.
fn load_event(step: LoadStep) -> v1::LoadEvent {
    match step {
        LoadStep::Header(PrepareStage::Header) => stage(v1::LoadStage::Metadata, 0, 0),
        LoadStep::Header(PrepareStage::Tokenizer) => stage(v1::LoadStage::Tokenizer, 0, 0),
        LoadStep::Header(PrepareStage::Plan) => stage(v1::LoadStage::Plan, 0, 0),
        LoadStep::Preload {
            done_bytes,
            total_bytes,
        } => stage(v1::LoadStage::Preload, done_bytes, total_bytes),
    }
}

impl ModelsService {
    /// The model and the segments that a request names.
    fn named_segments(
        &self,
        name: &str,
        asked: Vec<u32>,
    ) -> Result<(Arc<LoadedModel>, Option<Vec<u32>>), Failure> {
        self.context.admit()?;
        let mut violations = Violations::default();
        check::model_name("name", name, &mut violations);
        violations.result()?;
        let model = self.context.model(name)?;
        let segments = check::segments(asked, model.model().info().segments.len())?;
        Ok((model, segments))
    }

    async fn set_pins(
        &self,
        name: &str,
        segments: Vec<u32>,
        pinned: bool,
        arrival: Arrival,
    ) -> Result<(u32, u64), Failure> {
        self.context.opened(name, &arrival).await?;
        let (model, segments) = self.named_segments(name, segments)?;
        let name = model.name();
        let bytes = arrival
            .limit(self.context.pin(&model, segments, pinned))
            .await?;
        Ok((residency(&self.context, name, None).n_pinned, bytes))
    }

    async fn files(&self) -> Result<v1::ListFilesResponse, Failure> {
        let listed = self.context.list_files().await?;
        let snapshot = self.context.engine.snapshot();
        let summary = |named: &NamedFile| {
            let loaded = snapshot.models.iter().map(|status| &status.model);
            let mut loaded_as: Vec<_> = loaded
                .filter(|model| model.path() == named.file.real)
                .map(|model| model.name().to_owned())
                .collect();
            loaded_as.sort();
            v1::FileSummary {
                path: named.file.shown(),
                size_bytes: named.file.bytes,
                mtime_unix_ms: named.file.mtime_unix_ms,
                loaded_as,
                name: named.name.clone(),
            }
        };
        let unserved = listed.unserved.iter().filter_map(|file| {
            let why = file.unserved.as_ref()?;
            Some(v1::UnservedFile {
                path: file.shown(),
                reason: why.to_string(),
                is_trouble: why.is_trouble(),
            })
        });
        let directories = listed.dirs.iter().map(|dir| v1::ModelDirectory {
            path: dir.path.display().to_string(),
            trouble: dir.trouble.clone().unwrap_or_default(),
        });
        Ok(v1::ListFilesResponse {
            files: listed.served.iter().map(summary).collect(),
            is_cut: !listed.is_whole,
            unserved: unserved.collect(),
            directories: directories.collect(),
        })
    }

    async fn forget(
        &self,
        request: v1::UnloadRequest,
        arrival: Arrival,
    ) -> Result<v1::UnloadResponse, Failure> {
        let mut violations = Violations::default();
        check::model_name("name", &request.name, &mut violations);
        violations.result()?;
        let unloading = self.context.unload(&request.name, request.force);
        let unloaded = arrival.limit(unloading).await?;
        Ok(v1::UnloadResponse {
            freed_bytes: unloaded.freed_bytes,
            cancelled_requests: unloaded.cancelled_requests,
        })
    }
}

fn residency(context: &Service, name: &str, asked: Option<&[u32]>) -> ResidencySums {
    let snapshot = context.engine.snapshot();
    let found = snapshot.models.iter().find(|m| m.model.name() == name);
    found
        .map(|status| ResidencySums::of_segments(status, asked))
        .unwrap_or_default()
}

/// Stream of a preload's events. Dropping it stops the preload after the current upload.
fn preload_stream(
    context: Arc<Service>,
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
                .limit(async { events.next().await.ok_or_else(failure::engine_gone) })
                .await;
            let now = residency(&context, &name, asked.as_deref());
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
                    (Err(refusals::from_engine(&error)), false)
                }
                Err(failure) => (Err(failure), false),
            };
            if !goes_on {
                log.note(&item);
            }
            let item = item
                .map(|event| v1::PreloadEvent { event: Some(event) })
                .map_err(status);
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
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let v1::LoadRequest {
            path,
            name,
            pin,
            preload,
            draft,
            mmproj,
            lora,
        } = &request;
        let asked = format!(
            "path={path:?} name={name:?} pin={pin} preload={preload} draft={draft:?} mmproj={mmproj:?} lora={lora:?}"
        );
        let admitted = self.context.admit();
        let checked =
            admitted.and_then(|()| Load::checked(&request.path, &request.name, *pin, *preload));
        let given = |load: Load| {
            let lora = lora.iter().map(adapter_spec);
            let load = load.with_draft(draft).with_mmproj(mmproj);
            load.with_lora(lora.collect())
        };
        let load = match checked.and_then(given) {
            Ok(load) => load,
            Err(failure) => {
                let log = RequestLog::audit("Load", "", &asked, &arrival);
                return log.end(Err(failure)).map_err(status);
            }
        };
        let (steps, taken) = mpsc::channel(LOAD_EVENTS);
        let (last, ended) = oneshot::channel();
        let context = Arc::clone(&self.context);
        tokio::spawn(async move {
            let mut log = RequestLog::audit("Load", &load.name, &asked, &arrival);
            let stop = async {
                tokio::select! {
                    failure = arrival.passed() => failure,
                    () = steps.closed() => refusals::from_engine(&Error::Cancelled),
                }
            };
            let result = match context.with_draft_loaded(load, &arrival).await {
                Ok(load) => context.load(&load, &steps, stop).await,
                Err(failure) => Err(failure),
            };
            log.note(&result);
            // The client may be gone; then nobody waits for the end.
            let _ = last.send(result);
        });
        let declared = self.context.declared();
        let end = async move {
            let result = ended.await.unwrap_or_else(|_| Err(failure::engine_gone()));
            let model = convert::model(&result.map_err(status)?, &declared);
            Ok(v1::LoadEvent {
                event: Some(v1::load_event::Event::Loaded(model)),
            })
        };
        let steps = ReceiverStream::new(taken).map(|step| Ok(load_event(step)));
        Ok(Response::new(Box::pin(steps.chain(stream::once(end)))))
    }

    async fn unload(
        &self,
        request: Request<v1::UnloadRequest>,
    ) -> Result<Response<v1::UnloadResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let asked = format!("force={}", request.force);
        let log = RequestLog::audit("Unload", &request.name, &asked, &arrival);
        log.end(self.forget(request, arrival).await)
            .map(Response::new)
            .map_err(status)
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
        let arrival = arrival::of(&request);
        let files = arrival.limit(self.files()).await.map_err(status)?;
        Ok(Response::new(files))
    }

    async fn get(
        &self,
        request: Request<v1::GetModelRequest>,
    ) -> Result<Response<v1::GetModelResponse>, Status> {
        let name = request.into_inner().name;
        let mut violations = Violations::default();
        check::model_name("name", &name, &mut violations);
        violations.result().map_err(status)?;
        let snapshot = self.context.engine.snapshot();
        let real = self.context.real_name(&name);
        match snapshot.models.iter().find(|m| m.model.name() == real) {
            Some(found) => Ok(Response::new(v1::GetModelResponse {
                model: Some(convert::model(found, &self.context.declared())),
            })),
            None => Err(status(refusals::unknown_model(&name, &snapshot.models))),
        }
    }

    async fn preload(
        &self,
        request: Request<v1::PreloadRequest>,
    ) -> Result<Response<Self::PreloadStream>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let asked = asked_segments(&request.segments);
        let log = RequestLog::audit("Preload", &request.name, &asked, &arrival);
        let opened = self.context.opened(&request.name, &arrival).await;
        let started = opened
            .and_then(|()| self.named_segments(&request.name, request.segments))
            .and_then(|(model, segments)| {
                let name = model.name().to_owned();
                let events = self.context.preload(&name, segments.clone())?;
                Ok((name, segments, events))
            });
        match started {
            Ok((name, segments, events)) => {
                let context = Arc::clone(&self.context);
                let stream = preload_stream(context, name, segments, events, arrival, log);
                Ok(Response::new(Box::pin(stream)))
            }
            Err(failure) => log.end(Err(failure)).map_err(status),
        }
    }

    async fn pin(
        &self,
        request: Request<v1::PinRequest>,
    ) -> Result<Response<v1::PinResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let asked = asked_segments(&request.segments);
        let log = RequestLog::audit("Pin", &request.name, &asked, &arrival);
        let result = self
            .set_pins(&request.name, request.segments, true, arrival)
            .await;
        let (pinned_segments, pinned_bytes) = log.end(result).map_err(status)?;
        Ok(Response::new(v1::PinResponse {
            pinned_segments,
            pinned_bytes,
        }))
    }

    async fn unpin(
        &self,
        request: Request<v1::UnpinRequest>,
    ) -> Result<Response<v1::UnpinResponse>, Status> {
        let (arrival, request) = (arrival::of(&request), request.into_inner());
        let asked = asked_segments(&request.segments);
        let log = RequestLog::audit("Unpin", &request.name, &asked, &arrival);
        let result = self
            .set_pins(&request.name, request.segments, false, arrival)
            .await;
        let (pinned_segments, pinned_bytes) = log.end(result).map_err(status)?;
        Ok(Response::new(v1::UnpinResponse {
            pinned_segments,
            pinned_bytes,
        }))
    }
}
