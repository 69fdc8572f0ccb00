//! A daemon without a model: the generated service traits over a real socket,
//! with answers that tests can predict. The client's tests and rocmforgectl's
//! share it.
//!
//! What it answers depends on the prompt: see [`Fake::generate_text`].

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]
#![expect(clippy::unwrap_used, reason = "only tests run this")]

mod answers;
mod server;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rocmforge_client::MAX_MESSAGE_BYTES;
use rocmforge_client::proto::v1::cache_server::CacheServer;
use rocmforge_client::proto::v1::inference_server::{Inference, InferenceServer};
use rocmforge_client::proto::v1::models_server::{Models, ModelsServer};
use rocmforge_client::proto::v1::server_server::ServerServer;
use rocmforge_client::proto::v1::*;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt};

pub use answers::STORY;
use answers::{model, piece, script, summary};

/// Longest prompt that the fake takes, in bytes.
pub const PROMPT_BYTES_MAX: usize = 1 << 20;

/// A model that reads images, once it is loaded.
pub const SEEING: &str = "seeing";

/// What the fake was asked, and what became of it.
#[derive(Default)]
pub struct Seen {
    pub load: Mutex<Vec<LoadRequest>>,
    pub generate: Mutex<Vec<GenerateRequest>>,
    pub chat: Mutex<Vec<ChatRequest>>,
    pub preload: Mutex<Vec<PreloadRequest>>,
    pub budget: Mutex<Vec<SetBudgetRequest>>,
    /// Streams whose client went away.
    pub cancelled: AtomicUsize,
    /// Streams that were read to their end.
    pub completed: AtomicUsize,
}

/// A running fake daemon; it stops when it is dropped.
pub struct FakeDaemon {
    pub socket: PathBuf,
    pub seen: Arc<Seen>,
    task: tokio::task::JoinHandle<()>,
    dir: Option<tempfile::TempDir>,
}

impl FakeDaemon {
    /// Serves on a socket of its own.
    pub fn start() -> FakeDaemon {
        let dir = tempfile::tempdir().unwrap();
        let mut daemon = FakeDaemon::start_at(&dir.path().join("fake.sock"));
        daemon.dir = Some(dir);
        daemon
    }

    /// Serves on the socket at `path`, which must not exist.
    pub fn start_at(path: &Path) -> FakeDaemon {
        let listener = UnixListener::bind(path).unwrap();
        let seen = Arc::new(Seen::default());
        let fake = Fake {
            seen: Arc::clone(&seen),
            models: Arc::new(Mutex::new(vec!["tiny".to_owned()])),
        };
        let router = tonic::transport::Server::builder()
            .add_service(ModelsServer::new(fake.clone()))
            .add_service(
                InferenceServer::new(fake.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES),
            )
            .add_service(CacheServer::new(fake.clone()))
            .add_service(ServerServer::new(fake));
        let task = tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            router.serve_with_incoming(incoming).await.unwrap();
        });
        FakeDaemon {
            socket: path.to_owned(),
            seen,
            task,
            dir: None,
        }
    }

    /// Waits until `count` streams were cancelled; panics if that takes long.
    pub async fn cancelled(&self, count: usize) {
        for _ in 0..500 {
            if self.seen.cancelled.load(Ordering::SeqCst) >= count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the request was not cancelled");
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Clone)]
struct Fake {
    seen: Arc<Seen>,
    models: Arc<Mutex<Vec<String>>>,
}

type Events<T> = ReceiverStream<Result<T, Status>>;

/// Sends `events` one by one from a task of its own.
fn stream<T: Send + 'static>(events: Vec<Result<T, Status>>) -> Response<Events<T>> {
    let (tx, rx) = mpsc::channel(1);
    tokio::spawn(async move {
        for event in events {
            if tx.send(event).await.is_err() {
                return;
            }
        }
    });
    Response::new(ReceiverStream::new(rx))
}

impl Fake {
    fn check(&self, name: &str) -> Result<(), Status> {
        let models = self.models.lock().unwrap();
        if models.iter().any(|model| model == name) {
            return Ok(());
        }
        let loaded = models.join(", ");
        Err(Status::not_found(format!(
            "no model named {name:?}; loaded: {loaded}"
        )))
    }

    /// Answers by the prompt:
    /// - "hang": one piece, then nothing until the client goes away;
    /// - "endless": pieces until the client goes away;
    /// - "break": one piece, then the end of the stream without an outcome;
    /// - "changed": one piece, then DATA_LOSS;
    /// - "full": RESOURCE_EXHAUSTED, to be retried after 1.5 s;
    /// - anything else: [`STORY`], and an outcome.
    fn generate_text(
        &self,
        prompt: &str,
        sampling: Option<SamplingParams>,
    ) -> Result<Response<Events<GenerateEvent>>, Status> {
        let sampling = sampling.unwrap_or_default();
        if sampling.temperature.is_some_and(|t| t < 0.0) {
            let details = ErrorDetails::with_bad_request_violation(
                "sampling.temperature",
                "must be at least 0",
            );
            return Err(Status::with_error_details(
                Code::InvalidArgument,
                "temperature must be at least 0",
                details,
            ));
        }
        if prompt.len() > PROMPT_BYTES_MAX {
            let bytes = prompt.len();
            return Err(Status::invalid_argument(format!(
                "a prompt of {bytes} bytes is too long"
            )));
        }
        if prompt == "full" {
            let details = ErrorDetails::with_retry_info(Some(Duration::from_millis(1500)));
            return Err(Status::with_error_details(
                Code::ResourceExhausted,
                "the queue is full",
                details,
            ));
        }
        let most = sampling.max_tokens.map_or(usize::MAX, |n| n as usize);
        let events = script(prompt, most);
        let hang = prompt == "hang";
        let endless = prompt == "endless";
        let seen = Arc::clone(&self.seen);
        let (tx, rx) = mpsc::channel(1);
        tokio::spawn(async move {
            for event in events {
                if tx.send(event).await.is_err() {
                    seen.cancelled.fetch_add(1, Ordering::SeqCst);
                    return;
                }
            }
            if endless {
                while tx.send(Ok(piece(0, STORY[0]))).await.is_ok() {}
                seen.cancelled.fetch_add(1, Ordering::SeqCst);
            } else if hang {
                tx.closed().await;
                seen.cancelled.fetch_add(1, Ordering::SeqCst);
            } else {
                seen.completed.fetch_add(1, Ordering::SeqCst);
            }
        });
        Ok(Response::new(ReceiverStream::new(rx)))
    }
}

#[tonic::async_trait]
impl Models for Fake {
    type LoadStream = Events<LoadEvent>;
    type PreloadStream = Events<PreloadEvent>;

    async fn load(
        &self,
        request: Request<LoadRequest>,
    ) -> Result<Response<Self::LoadStream>, Status> {
        let mut request = request.into_inner();
        self.seen.load.lock().unwrap().push(request.clone());
        if request.name.is_empty() {
            let file = request.path.rsplit('/').next().unwrap_or_default();
            request.name = file.trim_end_matches(".gguf").to_owned();
        }
        if request.path.ends_with("missing.gguf") {
            return Err(Status::not_found(format!("no file {}", request.path)));
        }
        if request.name == "taken" {
            return Err(Status::already_exists(
                "the name \"taken\" belongs to /models/a.gguf",
            ));
        }
        self.models.lock().unwrap().push(request.name.clone());
        let progress = |stage: LoadStage, done_bytes, total_bytes| LoadProgress {
            stage: stage.into(),
            done_bytes,
            total_bytes,
        };
        let events = [
            load_event::Event::Progress(progress(LoadStage::Metadata, 100, 100)),
            load_event::Event::Progress(progress(LoadStage::Preload, 1 << 20, 3 << 20)),
            load_event::Event::Loaded(model(&request.name)),
        ];
        Ok(stream(
            events
                .map(|event| Ok(LoadEvent { event: Some(event) }))
                .into(),
        ))
    }

    async fn unload(
        &self,
        request: Request<UnloadRequest>,
    ) -> Result<Response<UnloadResponse>, Status> {
        let request = request.into_inner();
        self.check(&request.name)?;
        if !request.force {
            let details = ErrorDetails::with_precondition_failure_violation(
                "PINNED",
                request.name,
                "3 segments are pinned",
            );
            return Err(Status::with_error_details(
                Code::FailedPrecondition,
                "the model is pinned",
                details,
            ));
        }
        self.models
            .lock()
            .unwrap()
            .retain(|name| *name != request.name);
        Ok(Response::new(UnloadResponse {
            freed_bytes: 1 << 20,
            cancelled_requests: 0,
        }))
    }

    async fn list(
        &self,
        _: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        let models = self.models.lock().unwrap();
        let models = models.iter().map(|name| summary(name)).collect();
        Ok(Response::new(ListModelsResponse { models }))
    }

    async fn list_files(
        &self,
        _: Request<ListFilesRequest>,
    ) -> Result<Response<ListFilesResponse>, Status> {
        let file = |path: &str, loaded_as: &[&str]| FileSummary {
            path: path.into(),
            size_bytes: 3 << 20,
            mtime_unix_ms: 1,
            loaded_as: loaded_as.iter().map(|name| (*name).to_owned()).collect(),
            name: "tiny".into(),
        };
        let unserved = |path: &str, reason: &str, is_trouble| UnservedFile {
            path: path.into(),
            reason: reason.into(),
            is_trouble,
        };
        let directory = |path: &str, trouble: &str| ModelDirectory {
            path: path.into(),
            trouble: trouble.into(),
        };
        let files = vec![
            file("/models/tiny.gguf", &["tiny"]),
            file("/models/\u{1b}[2J.gguf", &[]),
        ];
        Ok(Response::new(ListFilesResponse {
            files,
            is_cut: true,
            unserved: vec![
                unserved(
                    "/models/l.gguf",
                    "it is a link to /nvme/l.gguf; name /nvme",
                    true,
                ),
                unserved(
                    "/models/mmproj.gguf",
                    "it is a projector; give the model",
                    false,
                ),
            ],
            directories: vec![
                directory("/models", ""),
                directory("/usb", "is not there; mount or create it"),
            ],
        }))
    }

    async fn get(
        &self,
        request: Request<GetModelRequest>,
    ) -> Result<Response<GetModelResponse>, Status> {
        let name = request.into_inner().name;
        self.check(&name)?;
        let mut model = model(&name);
        if name == SEEING {
            model.mmproj = "/m/mmproj.gguf".to_owned();
        }
        let model = Some(model);
        Ok(Response::new(GetModelResponse { model }))
    }

    async fn preload(
        &self,
        request: Request<PreloadRequest>,
    ) -> Result<Response<Self::PreloadStream>, Status> {
        let request = request.into_inner();
        self.seen.preload.lock().unwrap().push(request.clone());
        self.check(&request.name)?;
        let events = [
            preload_event::Event::Progress(PreloadProgress {
                done_bytes: 1 << 20,
                total_bytes: 3 << 20,
                done_segments: 1,
                total_segments: 3,
            }),
            preload_event::Event::Done(PreloadDone {
                resident_segments: 2,
                resident_bytes: 2 << 20,
                skipped_segments: 1,
                skipped_bytes: 1 << 20,
            }),
        ];
        Ok(stream(
            events
                .map(|event| Ok(PreloadEvent { event: Some(event) }))
                .into(),
        ))
    }

    async fn pin(&self, request: Request<PinRequest>) -> Result<Response<PinResponse>, Status> {
        let request = request.into_inner();
        self.check(&request.name)?;
        let pinned_segments = match request.segments.len() {
            0 => 3,
            some => some as u32,
        };
        Ok(Response::new(PinResponse {
            pinned_segments,
            pinned_bytes: u64::from(pinned_segments) << 20,
        }))
    }

    async fn unpin(
        &self,
        request: Request<UnpinRequest>,
    ) -> Result<Response<UnpinResponse>, Status> {
        self.check(&request.into_inner().name)?;
        Ok(Response::new(UnpinResponse::default()))
    }
}

#[tonic::async_trait]
impl Inference for Fake {
    type GenerateStream = Events<GenerateEvent>;
    type ChatStream = Events<GenerateEvent>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        self.check(&request.model)?;
        self.seen.generate.lock().unwrap().push(request.clone());
        let prompt = match request.prompt {
            Some(generate_request::Prompt::Text(text)) => text,
            Some(generate_request::Prompt::Tokens(tokens)) => format!("{:?}", tokens.ids),
            None => return Err(Status::invalid_argument("prompt is required")),
        };
        self.generate_text(&prompt, request.sampling)
    }

    async fn chat(
        &self,
        request: Request<ChatRequest>,
    ) -> Result<Response<Self::ChatStream>, Status> {
        let request = request.into_inner();
        self.check(&request.model)?;
        self.seen.chat.lock().unwrap().push(request.clone());
        let last = request
            .messages
            .last()
            .map_or("", |message| &message.content);
        self.generate_text(last, request.sampling)
    }

    /// One token a word.
    async fn tokenize(
        &self,
        request: Request<TokenizeRequest>,
    ) -> Result<Response<TokenizeResponse>, Status> {
        let request = request.into_inner();
        self.check(&request.model)?;
        let pieces: Vec<Vec<u8>> = request.text.split_inclusive(' ').map(Into::into).collect();
        let ids = (10..).take(pieces.len()).collect();
        Ok(Response::new(TokenizeResponse { ids, pieces }))
    }

    async fn detokenize(
        &self,
        request: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeResponse>, Status> {
        let request = request.into_inner();
        let words: Vec<String> = request.ids.iter().map(|id| format!("<{id}>")).collect();
        let text = words.concat();
        Ok(Response::new(DetokenizeResponse { text }))
    }

    async fn render(
        &self,
        request: Request<ChatRequest>,
    ) -> Result<Response<RenderResponse>, Status> {
        let request = request.into_inner();
        self.check(&request.model)?;
        self.seen.chat.lock().unwrap().push(request.clone());
        let said = request
            .messages
            .iter()
            .map(|m| format!("<{}>{}", m.role, m.content));
        let text = said.collect();
        let ids = vec![1, 2];
        Ok(Response::new(RenderResponse { text, ids }))
    }

    /// As many tokens as bytes, which are the vector.
    async fn embed(
        &self,
        request: Request<EmbedRequest>,
    ) -> Result<Response<EmbedResponse>, Status> {
        let request = request.into_inner();
        self.check(&request.model)?;
        let vector = |input: &EmbedInput| {
            let values: Vec<f32> = match &input.input {
                Some(embed_input::Input::Text(text)) => text.bytes().map(f32::from).collect(),
                Some(embed_input::Input::Tokens(ids)) => {
                    ids.ids.iter().map(|&id| id as f32).collect()
                }
                None => vec![],
            };
            let tokens = values.len() as u32;
            Embedding { values, tokens }
        };
        let embeddings: Vec<Embedding> = request.inputs.iter().map(vector).collect();
        Ok(Response::new(EmbedResponse {
            prompt_tokens: embeddings.iter().map(|e| e.tokens).sum(),
            embeddings,
            pooling: match request.pooling() {
                Pooling::Unspecified => Pooling::Last,
                asked => asked,
            }
            .into(),
            total_ms: 1.5,
        }))
    }

    /// The last document is the best.
    async fn rerank(
        &self,
        request: Request<RerankRequest>,
    ) -> Result<Response<RerankResponse>, Status> {
        let request = request.into_inner();
        self.check(&request.model)?;
        let n = request.documents.len() as u32;
        let results = (0..n).rev().map(|index| RerankResult {
            index,
            score: index as f32 / n as f32,
        });
        let most = request.top_n.map_or(n as usize, |n| n as usize);
        Ok(Response::new(RerankResponse {
            results: results.take(most).collect(),
            prompt_tokens: 9,
            total_ms: 1.5,
        }))
    }

    async fn score(
        &self,
        request: Request<ScoreRequest>,
    ) -> Result<Response<ScoreResponse>, Status> {
        let request = request.into_inner();
        self.check(&request.model)?;
        let token = |id, logprob, piece: &str| TokenLogprob {
            id,
            logprob,
            piece: piece.into(),
            top: (0..request.top_n.unwrap_or(0) as u32)
                .map(|id| TopLogprob {
                    id,
                    logprob: -0.5,
                    piece: b"x".to_vec(),
                })
                .collect(),
        };
        Ok(Response::new(ScoreResponse {
            tokens: vec![
                token(1, None, "<s>"),
                token(11, Some(-1.5), "Once"),
                token(12, Some(-0.5), " upon"),
            ],
            sum_logprob: -2.0,
            n_scored: 2,
            perplexity: 1.0f64.exp(),
            ..Default::default()
        }))
    }
}
