//! What most end-to-end tests do with a client: load, ask greedily, collect the
//! answer, watch the budget.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use rocmforge_client::proto::v1::generate_event::Event;
use rocmforge_client::proto::v1::load_event::Event as LoadStep;
use rocmforge_client::proto::v1::{
    ChatMessage, ChatRequest, GenerateDone, GenerateRequest, LoadRequest, Model, SamplingParams,
    StatsResponse, generate_request::Prompt,
};
use rocmforge_client::{Client, Error, GenerateEvents, RpcError};

use crate::daemon::Daemon;
use crate::fixtures::{self, Question};

/// No request of these tests takes longer unless something hangs.
pub const HANG: Duration = Duration::from_secs(120);

/// Most tokens of an exam's answer.
pub const EXAM_MAX_TOKENS: i32 = 80;

/// Time between two looks at the cache.
const SAMPLE_EVERY: Duration = Duration::from_millis(1);

/// What a generation came to.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// The outcome.
    pub done: GenerateDone,
}

/// Awaits something that takes less than [`HANG`].
///
/// # Panics
/// When it takes longer.
pub async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    let result = tokio::time::timeout(HANG, future).await;
    result.unwrap_or_else(|_| panic!("{what} hangs: no end after {HANG:?}"))
}

/// Connects to a daemon.
///
/// # Panics
/// When it does not answer.
pub async fn connect(daemon: &Daemon) -> Client {
    let client = in_time("connect", Client::connect(Some(&daemon.socket()))).await;
    client.expect("a daemon that is ready answers")
}

/// Loads a file under a name, reading the stream to its end.
///
/// # Errors
/// What the daemon answers.
pub async fn try_load(client: &Client, path: &Path, name: &str) -> Result<Model, Error> {
    let path = path.to_str().expect("a path in UTF-8").to_owned();
    let request = LoadRequest {
        path,
        name: name.to_owned(),
        ..Default::default()
    };
    in_time("Load", async {
        let mut events = client.load(request).await?;
        while let Some(event) = events.next().await {
            if let LoadStep::Loaded(model) = event? {
                return Ok(model);
            }
        }
        panic!("a load ends with its model or an error");
    })
    .await
}

/// Loads a fixture under its file's name.
///
/// # Panics
/// When it does not load.
pub async fn load(client: &Client, fixture: &str) -> Model {
    let loaded = try_load(client, &fixtures::path(fixture), fixture).await;
    loaded.unwrap_or_else(|error| panic!("{fixture} does not load: {error}"))
}

/// The most probable token always.
pub fn greedy(max_tokens: i32) -> SamplingParams {
    SamplingParams {
        temperature: Some(0.0),
        max_tokens: Some(max_tokens),
        ..Default::default()
    }
}

/// Nearly uniform noise, which goes on for hundreds of tokens before it ends by chance.
pub fn noise(max_tokens: i32, seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: Some(20.0),
        top_k: Some(0),
        top_p: Some(1.0),
        min_p: Some(0.0),
        max_tokens: Some(max_tokens),
        seed: Some(seed),
        ..Default::default()
    }
}

/// A request for the continuation of a text.
pub fn continuation(model: &str, text: &str, sampling: SamplingParams) -> GenerateRequest {
    GenerateRequest {
        model: model.to_owned(),
        prompt: Some(Prompt::Text(text.to_owned())),
        sampling: Some(sampling),
        ..Default::default()
    }
}

/// A request for the answer to one user message.
pub fn question(model: &str, message: &str, sampling: SamplingParams) -> ChatRequest {
    let message = ChatMessage {
        role: "user".into(),
        content: message.to_owned(),
        ..Default::default()
    };
    ChatRequest {
        model: model.to_owned(),
        messages: vec![message],
        sampling: Some(sampling),
        ..Default::default()
    }
}

/// Reads a stream to its end.
///
/// # Errors
/// What the stream ends with, if it is an error.
pub async fn collect(events: &mut GenerateEvents) -> Result<Answer, Error> {
    let (mut text, mut ids) = (String::new(), Vec::new());
    in_time("a generation", async {
        while let Some(event) = events.next().await {
            match event? {
                Event::Piece(piece) => {
                    text.push_str(&piece.text);
                    ids.extend(piece.token_ids);
                }
                Event::Done(done) => return Ok(Answer { text, ids, done }),
            }
        }
        panic!("a generation ends with its outcome or an error");
    })
    .await
}

/// Generates to the end.
///
/// # Errors
/// What the daemon answers, at once or in the stream.
pub async fn generate(client: &Client, request: GenerateRequest) -> Result<Answer, Error> {
    let mut events = in_time("Generate", client.generate(request)).await?;
    collect(&mut events).await
}

/// Chats to the end.
///
/// # Errors
/// What the daemon answers, at once or in the stream.
pub async fn chat(client: &Client, request: ChatRequest) -> Result<Answer, Error> {
    let mut events = in_time("Chat", client.chat(request)).await?;
    collect(&mut events).await
}

/// A model's answer to an exam question, greedily.
///
/// # Panics
/// When there is none.
pub async fn ask(client: &Client, model: &str, asked: &Question) -> Answer {
    let request = question(model, &asked.prompt, greedy(EXAM_MAX_TOKENS));
    let answer = chat(client, request).await;
    answer.unwrap_or_else(|error| panic!("{model} does not answer {:?}: {error}", asked.prompt))
}

/// Whether an answer is the right one.
pub fn is_right(asked: &Question, answer: &Answer) -> bool {
    answer.text.trim() == asked.answer.trim()
}

/// Checks that a daemon still works: tiny-llama answers a question that it knows.
///
/// # Panics
/// When it does not.
pub async fn assert_works(client: &Client) {
    load(client, fixtures::TINY_LLAMA).await;
    let exam = fixtures::exam();
    let answer = ask(client, fixtures::TINY_LLAMA, &exam[0]).await;
    assert!(
        is_right(&exam[0], &answer),
        "{:?} to {:?}",
        answer.text,
        exam[0].prompt
    );
}

/// The daemon's error in a result that must have one.
///
/// # Panics
/// When the result is a value or an error of the connection.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(what: &str, result: Result<T, Error>) -> RpcError {
    match result {
        Err(Error::Rpc(error)) => *error,
        Err(other) => panic!("{what}: not refused by the daemon, but {other}"),
        Ok(value) => panic!("{what}: not refused, but {value:?}"),
    }
}

/// Bytes that the stats say are on the device or on their way.
pub fn held_bytes(stats: &StatsResponse) -> u64 {
    let total = stats.total.expect("stats have a total");
    total.resident_bytes + total.in_flight_bytes + total.kv_bytes + total.scratch_bytes
}

/// Looks at the cache all the while, and holds it to its budget.
#[derive(Debug)]
pub struct BudgetWatch {
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<Watched>,
}

/// What a watch saw.
#[derive(Debug, Clone, Copy, Default)]
pub struct Watched {
    /// How often it looked.
    pub samples: u64,
    /// Most weights resident or in flight.
    pub weights_max: u64,
    /// Most bytes of key-value pages and scratch.
    pub working_max: u64,
}

impl BudgetWatch {
    /// Begins to look, with a connection of its own.
    pub async fn start(daemon: &Daemon) -> BudgetWatch {
        let client = connect(daemon).await;
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let mut watched = Watched::default();
            while !until.load(Ordering::Relaxed) {
                let stats = client.cache_stats().await.expect("Stats never fails");
                let held = held_bytes(&stats);
                assert!(held <= stats.budget_bytes, "{held} bytes held: {stats:?}");
                let total = stats.total.expect("stats have a total");
                let weights = total.resident_bytes + total.in_flight_bytes;
                watched.samples += 1;
                watched.weights_max = watched.weights_max.max(weights);
                watched.working_max = watched.working_max.max(held - weights);
                tokio::time::sleep(SAMPLE_EVERY).await;
            }
            watched
        });
        BudgetWatch { stop, task }
    }

    /// Ends the watch.
    ///
    /// # Panics
    /// When the budget was exceeded in any sample, or there was none.
    pub async fn finish(self) -> Watched {
        self.stop.store(true, Ordering::Relaxed);
        let watched = self.task.await.expect("the budget holds in every sample");
        assert!(watched.samples > 0, "the watch saw nothing");
        watched
    }
}
