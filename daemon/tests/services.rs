//! The services over a socket, in process.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use rocmforge_engine::api::{Budget, Policy};
use rocmforge_engine::{DeviceChoice, EngineConfig};
use rocmforge_proto::v1;
use rocmforge_proto::v1::cache_client::CacheClient;
use rocmforge_proto::v1::inference_client::InferenceClient;
use rocmforge_proto::v1::models_client::ModelsClient;
use rocmforge_proto::v1::server_client::ServerClient;
use rocmforged::model_files::ModelDirs;
use rocmforged::socket::Socket;
use rocmforged::{End, Limits, ServeError, ServeOptions, serve};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;

/// Far longer than any test runs.
const GRACE: Duration = Duration::from_secs(300);

/// A daemon in this process.
struct Daemon {
    dir: tempfile::TempDir,
    channel: Channel,
    stops: mpsc::Sender<()>,
    served: JoinHandle<Result<End, ServeError>>,
    _socket: Socket,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// A connection whose reader takes at most `window` bytes at a time.
async fn connect(path: PathBuf, window: u32) -> Channel {
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

impl Daemon {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let socket = Socket::bind(&path).unwrap();
        let (engine, _thread) = rocmforge_engine::start(EngineConfig {
            device: DeviceChoice::Host,
            threads: std::num::NonZeroUsize::new(2),
            budget: Budget::Bytes(64 << 20),
            policy: Policy::Belady,
            max_sequences: std::num::NonZeroUsize::new(4).unwrap(),
            queue_capacity: 16,
            n_ctx_max: 1024,
            ..EngineConfig::default()
        })
        .unwrap();
        let options = ServeOptions {
            model_dirs: ModelDirs::new(&[fixtures(), dir.path().to_owned()]).unwrap(),
            limits: Limits {
                n_ctx_max: 1024,
                max_sequences: 4,
                threads: 2,
            },
            drain_grace: GRACE,
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

    fn models(&self) -> ModelsClient<Channel> {
        ModelsClient::new(self.channel.clone())
    }

    fn inference(&self) -> InferenceClient<Channel> {
        InferenceClient::new(self.channel.clone())
    }

    fn cache(&self) -> CacheClient<Channel> {
        CacheClient::new(self.channel.clone())
    }

    fn server(&self) -> ServerClient<Channel> {
        ServerClient::new(self.channel.clone())
    }

    async fn health(&self, service: &str) -> Result<ServingStatus, Status> {
        let request = tonic_health::pb::HealthCheckRequest {
            service: service.to_owned(),
        };
        Ok(HealthClient::new(self.channel.clone())
            .check(request)
            .await?
            .into_inner()
            .status())
    }

    async fn load(&self, path: impl Into<String>, name: &str) -> Result<v1::Model, Status> {
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

    async fn generate(
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

    async fn stop(self) -> End {
        self.stops.send(()).await.unwrap();
        drop(self.channel);
        self.served.await.unwrap().unwrap()
    }
}

fn greedy(model: &str, prompt: &str, max_tokens: i32) -> v1::GenerateRequest {
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

/// Nearly evenly drawn tokens, among which the end of the text is rare, up to the end of the context.
fn endless(model: &str, seed: u64) -> v1::GenerateRequest {
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
fn assert_status<T>(result: Result<T, Status>, code: Code, mentions: &[&str]) -> Status {
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

#[tokio::test]
async fn status_health_and_reflection_answer() {
    let daemon = Daemon::start().await;
    let status = daemon
        .server()
        .status(v1::StatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(status.state(), v1::ServerState::Serving);
    assert_eq!(status.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(status.pid, std::process::id());
    assert_eq!(status.running_capacity, 4);
    assert_eq!(status.model_dirs.len(), 2);
    assert_eq!(status.device.unwrap().kind(), v1::DeviceKind::Host);

    for service in [
        "",
        "rocmforge.v1.Models",
        "rocmforge.v1.Inference",
        "rocmforge.v1.Cache",
        "rocmforge.v1.Server",
    ] {
        assert_eq!(
            daemon.health(service).await.unwrap(),
            ServingStatus::Serving,
            "'{service}'"
        );
    }
    assert_eq!(
        daemon.health("nonsense").await.unwrap_err().code(),
        Code::NotFound
    );

    use tonic_reflection::pb::v1 as reflection;
    let ask = reflection::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(
            reflection::server_reflection_request::MessageRequest::ListServices(String::new()),
        ),
    };
    let mut client =
        reflection::server_reflection_client::ServerReflectionClient::new(daemon.channel.clone());
    let mut answers = client
        .server_reflection_info(tokio_stream::once(ask))
        .await
        .unwrap()
        .into_inner();
    let answer = answers.message().await.unwrap().unwrap();
    let text = format!("{answer:?}");
    for service in [
        "rocmforge.v1.Models",
        "rocmforge.v1.Inference",
        "rocmforge.v1.Cache",
        "grpc.health.v1.Health",
    ] {
        assert!(text.contains(service), "{text} lacks {service}");
    }
    drop((answers, client));
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn a_drain_refuses_new_work_says_so_in_health_and_answers_status() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    // Readers that hold their own generations up, so that they run for as long as the test needs them. Four, because
    // one may draw the end of its text before its reader's buffers are full.
    let slow = connect(daemon.dir.path().join("s"), 64).await;
    let mut running = Vec::new();
    for seed in 1..=4 {
        let mut client = InferenceClient::new(slow.clone());
        let mut events = client
            .generate(endless("m", seed))
            .await
            .unwrap()
            .into_inner();
        assert!(events.message().await.unwrap().is_some());
        running.push(events);
    }
    drop(slow);
    // A watch that stays open must not hold the end up for long.
    let mut watch = HealthClient::new(daemon.channel.clone())
        .watch(tonic_health::pb::HealthCheckRequest {
            service: String::new(),
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        watch.message().await.unwrap().unwrap().status(),
        ServingStatus::Serving
    );
    daemon.stops.send(()).await.unwrap();
    assert_eq!(
        watch.message().await.unwrap().unwrap().status(),
        ServingStatus::NotServing
    );
    let refused = daemon.inference().generate(greedy("m", "x", 1)).await;
    let status = assert_status(refused, Code::Unavailable, &["retry"]);
    assert!(status.get_error_details().retry_info().is_some());
    assert_status(
        daemon.load("tiny-qwen3-Q8_0.gguf", "").await,
        Code::Unavailable,
        &["retry"],
    );
    let status = daemon
        .server()
        .status(v1::StatusRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(status.state(), v1::ServerState::Draining);
    assert!(status.running > 0, "{status:?}");
    for events in &mut running {
        assert!(
            events.message().await.unwrap().is_some(),
            "what runs goes on"
        );
    }
    drop(running);
    let waiting = Instant::now();
    assert_eq!(daemon.served.await.unwrap().unwrap(), End::Drained);
    assert!(
        waiting.elapsed() < GRACE,
        "a drain ends with its last reader, not with the grace period"
    );
}

#[tokio::test]
async fn bad_requests_get_their_code_and_what_to_do() {
    let daemon = Daemon::start().await;
    let (mut models, mut inference, mut cache) =
        (daemon.models(), daemon.inference(), daemon.cache());

    assert_status(daemon.load("", "").await, Code::InvalidArgument, &["path"]);
    assert_status(
        daemon.load("/etc/passwd", "x").await,
        Code::PermissionDenied,
        &["--model-dir"],
    );
    assert_status(
        daemon.load("/no/such/file", "x").await,
        Code::PermissionDenied,
        &["--model-dir"],
    );
    assert_status(
        daemon.load("missing.gguf", "x").await,
        Code::NotFound,
        &["missing.gguf", "tried"],
    );
    assert_status(
        daemon.load(".", "x").await,
        Code::InvalidArgument,
        &["directory"],
    );
    std::fs::write(daemon.dir.path().join("text.gguf"), "this is no model").unwrap();
    assert_status(
        daemon.load("text.gguf", "x").await,
        Code::InvalidArgument,
        &["text.gguf"],
    );
    std::fs::write(daemon.dir.path().join("empty.gguf"), "").unwrap();
    assert_status(
        daemon.load("empty.gguf", "x").await,
        Code::InvalidArgument,
        &["empty"],
    );
    let fifo = daemon.dir.path().join("fifo.gguf");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_status(
        daemon.load("fifo.gguf", "x").await,
        Code::InvalidArgument,
        &["FIFO"],
    );

    let name = || "ghost".to_owned();
    let get = models.get(v1::GetModelRequest { name: name() }).await;
    assert_status(get, Code::NotFound, &["'ghost'", "loaded: none"]);
    let unload = models
        .unload(v1::UnloadRequest {
            name: name(),
            force: false,
        })
        .await;
    assert_status(unload, Code::NotFound, &["'ghost'"]);
    assert_status(
        models.unload(v1::UnloadRequest::default()).await,
        Code::InvalidArgument,
        &["name"],
    );
    let pin = models
        .pin(v1::PinRequest {
            name: name(),
            segments: vec![],
        })
        .await;
    assert_status(pin, Code::NotFound, &["'ghost'"]);
    let preload = models
        .preload(v1::PreloadRequest {
            name: name(),
            segments: vec![],
        })
        .await;
    assert_status(preload, Code::NotFound, &["'ghost'"]);
    assert_status(
        inference.generate(greedy("ghost", "x", 1)).await,
        Code::NotFound,
        &["'ghost'"],
    );
    assert_status(
        inference.generate(greedy("", "x", 0)).await,
        Code::InvalidArgument,
        &["model", "max_tokens"],
    );
    assert_status(
        inference.generate(greedy("ghost", "", 1)).await,
        Code::InvalidArgument,
        &["prompt"],
    );
    assert_status(
        inference.chat(v1::ChatRequest::default()).await,
        Code::InvalidArgument,
        &["model", "messages"],
    );
    let score = v1::ScoreRequest {
        model: name(),
        top_n: Some(-1),
        ..Default::default()
    };
    assert_status(
        inference.score(score).await,
        Code::InvalidArgument,
        &["top_n", "input"],
    );
    let tokenize = v1::TokenizeRequest {
        model: name(),
        ..Default::default()
    };
    assert_status(
        inference.tokenize(tokenize).await,
        Code::NotFound,
        &["'ghost'"],
    );
    let budget = cache.set_budget(v1::SetBudgetRequest::default()).await;
    assert_status(budget, Code::InvalidArgument, &["budget"]);
    assert_status(
        cache.set_policy(v1::SetPolicyRequest::default()).await,
        Code::InvalidArgument,
        &["policy"],
    );
    let clear = cache
        .clear(v1::ClearRequest {
            model: Some(name()),
        })
        .await;
    assert_status(clear, Code::NotFound, &["'ghost'"]);
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn a_model_is_loaded_described_run_and_unloaded() {
    let daemon = Daemon::start().await;
    let model = daemon.load("tiny-llama-Q4_K_M.gguf", "").await.unwrap();
    assert_eq!(
        model.name, "tiny-llama-Q4_K_M",
        "the file's name, without .gguf"
    );
    assert_eq!(model.architecture, "llama");
    assert!(model.has_chat_template && model.n_layer > 0 && !model.segments.is_empty());
    let again = daemon
        .load(
            fixtures()
                .join("tiny-llama-Q4_K_M.gguf")
                .display()
                .to_string(),
            &model.name,
        )
        .await
        .unwrap();
    assert_eq!(
        again.segments.len(),
        model.segments.len(),
        "the same file under the same name is no error"
    );
    let taken = daemon.load("tiny-qwen3-Q8_0.gguf", &model.name).await;
    assert_status(taken, Code::AlreadyExists, &[&model.name, "another name"]);

    let (text, done) = daemon
        .generate(greedy(&model.name, "Once upon a time", 16))
        .await
        .unwrap();
    assert!(!text.is_empty());
    assert!(
        done.generated_tokens <= 16 && done.prompt_tokens > 0 && done.ttft_ms > 0.0,
        "{done:?}"
    );
    let again = daemon
        .generate(greedy(&model.name, "Once upon a time", 16))
        .await
        .unwrap();
    assert_eq!(again.0, text, "greedy text is the same each time");

    let chat = v1::ChatRequest {
        model: model.name.clone(),
        messages: vec![v1::ChatMessage {
            role: "user".into(),
            content: "Hello".into(),
        }],
        sampling: Some(v1::SamplingParams {
            max_tokens: Some(4),
            ..Default::default()
        }),
        ..Default::default()
    };
    let mut events = daemon.inference().chat(chat).await.unwrap().into_inner();
    let mut last = None;
    while let Some(event) = events.message().await.unwrap() {
        last = event.event;
    }
    assert!(matches!(last, Some(v1::generate_event::Event::Done(_))));

    let input = Some(v1::score_request::Input::Text("Once upon a time".into()));
    let score = v1::ScoreRequest {
        model: model.name.clone(),
        input,
        top_n: Some(3),
        ..Default::default()
    };
    let score = daemon.inference().score(score).await.unwrap().into_inner();
    assert_eq!(score.tokens.len(), score.n_scored as usize + 1);
    assert!(
        score.perplexity.is_finite() && score.perplexity >= 1.0,
        "{}",
        score.perplexity
    );
    assert!(score.tokens[0].logprob.is_none() && score.tokens[1].top.len() == 3);

    let tokenize = v1::TokenizeRequest {
        model: model.name.clone(),
        text: "Once upon".into(),
        ..Default::default()
    };
    let ids = daemon
        .inference()
        .tokenize(tokenize)
        .await
        .unwrap()
        .into_inner()
        .ids;
    let detokenize = v1::DetokenizeRequest {
        model: model.name.clone(),
        ids,
    };
    assert_eq!(
        daemon
            .inference()
            .detokenize(detokenize)
            .await
            .unwrap()
            .into_inner()
            .text,
        "Once upon"
    );

    let (mut models, mut cache) = (daemon.models(), daemon.cache());
    let pinned = models
        .pin(v1::PinRequest {
            name: model.name.clone(),
            segments: vec![0],
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(pinned.pinned_segments, 1);
    let stats = cache.stats(v1::StatsRequest {}).await.unwrap().into_inner();
    let total = stats.total.unwrap();
    assert!(total.misses > 0 && total.uploads > 0, "{total:?}");
    assert!(
        stats.peak_bytes <= stats.budget_bytes,
        "{} of {}",
        stats.peak_bytes,
        stats.budget_bytes
    );
    let cleared = cache
        .clear(v1::ClearRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(
        cleared.freed_segments > 0 && cleared.kept.iter().all(|kept| kept.index == 0),
        "{cleared:?}"
    );
    models
        .unpin(v1::UnpinRequest {
            name: model.name.clone(),
            segments: vec![],
        })
        .await
        .unwrap();
    models
        .unload(v1::UnloadRequest {
            name: model.name.clone(),
            force: false,
        })
        .await
        .unwrap();
    assert!(
        models
            .list(v1::ListModelsRequest {})
            .await
            .unwrap()
            .into_inner()
            .models
            .is_empty()
    );
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn prompts_are_judged_by_their_tokens_and_ids_by_the_vocabulary() {
    let daemon = Daemon::start().await;
    let model = daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    let long = "word ".repeat(8 << 20 >> 3);
    let status = assert_status(
        daemon.generate(greedy("m", &long, 1)).await,
        Code::InvalidArgument,
        &["tokens", "n_ctx"],
    );
    assert_eq!(
        status
            .get_error_details()
            .bad_request()
            .unwrap()
            .field_violations[0]
            .field,
        "text"
    );
    let mut ids = greedy("m", "", 1);
    ids.prompt = Some(v1::generate_request::Prompt::Tokens(v1::TokenIds {
        ids: vec![model.n_vocab],
    }));
    assert_status(
        daemon.generate(ids).await,
        Code::InvalidArgument,
        &["tokens.ids"],
    );
    let n_ctx = v1::GenerateRequest {
        n_ctx: Some(1 << 20),
        ..greedy("m", "x", 1)
    };
    assert_status(
        daemon.generate(n_ctx).await,
        Code::InvalidArgument,
        &["n_ctx", "at most"],
    );
    let logprobs = v1::GenerateRequest {
        logprobs: Some(1),
        ..greedy("m", "x", 1)
    };
    assert_status(
        daemon.generate(logprobs).await,
        Code::Unimplemented,
        &["logprobs", "Score"],
    );
    assert!(
        daemon.generate(greedy("m", "x", 1)).await.is_ok(),
        "the next request works"
    );
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn a_deadline_ends_a_call_with_its_own_code() {
    let daemon = Daemon::start().await;
    daemon.load("tiny-llama-Q4_K_M.gguf", "m").await.unwrap();
    let mut request = Request::new(greedy("m", "Once upon a time", 900));
    // Written by hand, so that the client's own timer stays out of it.
    request
        .metadata_mut()
        .insert("grpc-timeout", "1m".parse().unwrap());
    let ended = async {
        let mut events = daemon.inference().generate(request).await?.into_inner();
        while events.message().await?.is_some() {}
        Ok(())
    };
    assert_status(ended.await, Code::DeadlineExceeded, &["deadline"]);
    assert_eq!(daemon.stop().await, End::Drained);
}
