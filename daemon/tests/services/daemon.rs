//! A daemon in the test's own process, with a socket of its own, and the requests that tests share.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rocmforge_engine::api::{Budget, Policy};
use rocmforge_engine::{DeviceChoice, EngineConfig};
use rocmforge_proto::v1;
use rocmforge_proto::v1::cache_client::CacheClient;
use rocmforge_proto::v1::inference_client::InferenceClient;
use rocmforge_proto::v1::models_client::ModelsClient;
use rocmforge_proto::v1::server_client::ServerClient;
use rocmforge_tokenizer::{RenderLimits, Renderer};
use rocmforged::limits::Rules;
use rocmforged::model_files::ModelDirs;
use rocmforged::roles::Roles;
use rocmforged::socket::Socket;
use rocmforged::{Declared, End, HttpListeners, Limits, ServeError, ServeOptions, serve};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::StdError;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;

/// Far longer than any test runs.
pub(crate) const GRACE: Duration = Duration::from_secs(300);
/// Bytes for images; an image of 20 million pixels needs more than a client has.
pub(crate) const IMAGE_MEMORY: u64 = 256 << 20;

/// A daemon in this process.
pub(crate) struct Daemon {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) channel: Channel,
    pub(crate) stops: mpsc::Sender<()>,
    pub(crate) served: JoinHandle<Result<End, ServeError>>,
    _socket: Socket,
}

pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// A connection whose reader takes at most `window` bytes at a time.
pub(crate) async fn connect(path: PathBuf, window: u32) -> Channel {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://rocmforged")
        .initial_stream_window_size(window)
        .connect_with_connector(connector)
        .await
        .unwrap()
}

/// A connection that only carries: a [`Channel`] reads a deadline too and ends a call
/// itself, with a code of its own.
pub(crate) async fn connect_without_timers(
    path: PathBuf,
) -> InferenceClient<
    impl GrpcService<Body, ResponseBody = Incoming, Future: Send, Error: Into<StdError>>,
> {
    let stream = UnixStream::connect(path).await.unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    let send = tower::service_fn(move |request| {
        let mut sender: http2::SendRequest<Body> = sender.clone();
        async move { sender.send_request(request).await }
    });
    InferenceClient::with_origin(send, "http://rocmforged".parse().unwrap())
}

impl Daemon {
    pub(crate) async fn start() -> Self {
        Self::start_with(Roles::default()).await
    }

    pub(crate) async fn start_with(roles: Roles) -> Self {
        Self::start_with_http(roles, HttpListeners::default()).await
    }

    pub(crate) async fn start_with_http(roles: Roles, http: HttpListeners) -> Self {
        Self::start_declaring(roles, http, Vec::new()).await
    }

    pub(crate) async fn start_declaring(
        roles: Roles,
        http: HttpListeners,
        declared: Vec<Declared>,
    ) -> Self {
        Self::start_limiting(roles, http, declared, Vec::new()).await
    }

    pub(crate) async fn start_limiting(
        roles: Roles,
        http: HttpListeners,
        declared: Vec<Declared>,
        peer_limits: Rules,
    ) -> Self {
        Self::start_serving(&[fixtures()], roles, http, declared, peer_limits).await
    }

    /// One whose models are those of these directories and of its own.
    pub(crate) async fn start_serving(
        dirs: &[PathBuf],
        roles: Roles,
        http: HttpListeners,
        declared: Vec<Declared>,
        peer_limits: Rules,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut dirs = dirs.to_vec();
        dirs.push(dir.path().to_owned());
        let path = dir.path().join("s");
        let socket = Socket::bind(&path).unwrap();
        let (engine, _thread) = rocmforge_engine::start(EngineConfig {
            device: DeviceChoice::Host,
            threads: std::num::NonZeroUsize::new(2),
            budget: Budget::Bytes(64 << 20),
            policy: Policy::PassAware,
            max_sequences: std::num::NonZeroUsize::new(4).unwrap(),
            queue_capacity: 16,
            n_ctx_max: 1024,
            ..EngineConfig::default()
        })
        .unwrap();
        let options = ServeOptions {
            model_dirs: ModelDirs::new(&dirs).unwrap(),
            limits: Limits {
                n_ctx_max: 1024,
                max_sequences: 4,
                threads: 2,
            },
            roles,
            peer_limits,
            image_memory: IMAGE_MEMORY,
            drain_grace: GRACE,
            http,
            declared,
            remember: None,
            warm: None,
            reloads: None,
            templates: Renderer::with_children(
                Some(env!("CARGO_BIN_EXE_rocmforged").into()),
                RenderLimits::default(),
            ),
            sockets: tokio::runtime::Handle::current(),
            is_kept: false,
        };
        let (stops, stopped) = mpsc::channel(2);
        let served = tokio::spawn(serve(socket.listener().unwrap(), engine, options, stopped));
        let channel = connect(path, 1 << 20).await;
        Self {
            dir,
            channel,
            stops,
            served,
            _socket: socket,
        }
    }

    pub(crate) fn models(&self) -> ModelsClient<Channel> {
        ModelsClient::new(self.channel.clone())
    }

    pub(crate) fn inference(&self) -> InferenceClient<Channel> {
        InferenceClient::new(self.channel.clone())
    }

    pub(crate) fn cache(&self) -> CacheClient<Channel> {
        CacheClient::new(self.channel.clone())
    }

    pub(crate) fn server(&self) -> ServerClient<Channel> {
        ServerClient::new(self.channel.clone())
    }

    pub(crate) async fn health(&self, service: &str) -> Result<ServingStatus, Status> {
        let request = tonic_health::pb::HealthCheckRequest {
            service: service.to_owned(),
        };
        Ok(HealthClient::new(self.channel.clone())
            .check(request)
            .await?
            .into_inner()
            .status())
    }

    pub(crate) async fn load(
        &self,
        path: impl Into<String>,
        name: &str,
    ) -> Result<v1::Model, Status> {
        let request = v1::LoadRequest {
            path: path.into(),
            name: name.to_owned(),
            ..Default::default()
        };
        let mut events = self.models().load(request).await?.into_inner();
        while let Some(event) = events.message().await? {
            if let Some(v1::load_event::Event::Loaded(model)) = event.event {
                assert!(
                    events.message().await?.is_none(),
                    "the loaded model is the last message"
                );
                return Ok(model);
            }
        }
        panic!("the stream ended without a model");
    }

    pub(crate) async fn generate(
        &self,
        request: v1::GenerateRequest,
    ) -> Result<(String, v1::GenerateDone), Status> {
        let mut events = self.inference().generate(request).await?.into_inner();
        let mut text = String::new();
        while let Some(event) = events.message().await? {
            match event.event {
                Some(v1::generate_event::Event::Piece(piece)) => text.push_str(&piece.text),
                Some(v1::generate_event::Event::Done(done)) => return Ok((text, done)),
                None => panic!("an empty event"),
            }
        }
        panic!("the stream ended without its outcome");
    }

    pub(crate) async fn stop(self) -> End {
        self.stops.send(()).await.unwrap();
        drop(self.channel);
        self.served.await.unwrap().unwrap()
    }
}

pub(crate) fn greedy(model: &str, prompt: &str, max_tokens: i32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: model.into(),
        prompt: Some(v1::generate_request::Prompt::Text(prompt.into())),
        sampling: Some(v1::SamplingParams {
            max_tokens: Some(max_tokens),
            temperature: Some(0.0),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Nearly evenly drawn tokens, among which the end of the text is rare, up to the end of the
/// context.
pub(crate) fn endless(model: &str, seed: u64) -> v1::GenerateRequest {
    let mut request = greedy(model, "Once upon a time", 1);
    request.sampling = Some(v1::SamplingParams {
        temperature: Some(1000.0),
        top_k: Some(0),
        top_p: Some(1.0),
        min_p: Some(0.0),
        seed: Some(seed),
        ..Default::default()
    });
    request
}

#[track_caller]
pub(crate) fn assert_status<T>(result: Result<T, Status>, code: Code, mentions: &[&str]) -> Status {
    let Err(status) = result else {
        panic!("no error, expected {code:?} about {mentions:?}")
    };
    assert_eq!(status.code(), code, "{status:?}");
    for word in mentions {
        assert!(
            status.message().contains(word),
            "'{}' lacks '{word}'",
            status.message()
        );
    }
    let details = status.get_error_details();
    assert!(
        details
            .error_info()
            .is_some_and(|info| info.domain == "rocmforge"),
        "{details:?}"
    );
    status
}
