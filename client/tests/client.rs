//! The client against a daemon of the generated traits, over a real socket.

mod fake;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fake::{FakeDaemon, STORY};
use futures_util::StreamExt;
use rocmforge_client::proto::v1::*;
use rocmforge_client::{Client, Code, Error};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn start() -> (FakeDaemon, Client) {
    let daemon = FakeDaemon::start();
    let client = Client::connect(Some(&daemon.socket))
        .await
        .expect("the fake listens");
    (daemon, client)
}

fn prompt(text: &str) -> GenerateRequest {
    GenerateRequest {
        model: "tiny".into(),
        prompt: Some(generate_request::Prompt::Text(text.into())),
        ..Default::default()
    }
}

#[tokio::test]
async fn without_a_daemon_the_error_names_the_path_and_what_to_start() {
    let path = Path::new("/nonexistent/rocmforged.sock");
    let error = Client::connect(Some(path)).await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::NoDaemon { ref tried } if tried.len() == 1));
    for part in [
        "/nonexistent/rocmforged.sock: no such socket",
        "`rocmforged`",
        "--socket",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[tokio::test]
async fn a_socket_that_nobody_serves_any_more_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stale.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let text = Client::connect(Some(&path)).await.unwrap_err().to_string();
    assert!(text.contains("nobody behind it"), "{text}");
}

#[tokio::test]
async fn a_generation_streams_its_pieces_and_then_the_outcome() {
    let (daemon, client) = start().await;
    let mut events = client.generate(prompt("Tell me")).await.unwrap();
    let (mut text, mut ids, mut done) = (String::new(), Vec::new(), None);
    while let Some(event) = events.next().await {
        match event.unwrap() {
            generate_event::Event::Piece(piece) => {
                assert!(done.is_none(), "a piece after the outcome");
                text.push_str(&piece.text);
                ids.extend(piece.token_ids);
            }
            generate_event::Event::Done(outcome) => done = Some(outcome),
        }
    }
    assert_eq!(text, STORY.concat());
    assert_eq!(ids, [0, 1, 2, 3, 4]);
    assert_eq!(done.unwrap().finish_reason(), FinishReason::Stop);
    assert!(events.next().await.is_none(), "the end is not final");
    assert_eq!(daemon.seen.completed.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn devices_come_with_what_was_looked_for() {
    let (_daemon, client) = start().await;
    let found = client.list_devices().await.unwrap();
    assert_eq!(found.in_use.unwrap().name, "Test CPU");
    assert_eq!(found.drivers[0].tried[0].library, "libamdhip64.so.7");
    assert_eq!(found.drivers[1].devices.len(), 2);
}

#[tokio::test]
async fn requests_come_with_the_parts_of_their_time() {
    let (_daemon, client) = start().await;
    let latest = WhyRequest {
        latest: 9,
        ..Default::default()
    };
    let requests = client.why(latest).await.unwrap();
    assert_eq!(requests.len(), 2);
    assert_eq!(requests[0].parts[1].behind[0].model, "big");
    let unknown = WhyRequest {
        request: "4".into(),
        latest: 0,
    };
    assert!(client.why(unknown).await.is_err());
}

#[tokio::test]
async fn dropping_the_stream_cancels_the_request() {
    let (daemon, client) = start().await;
    let mut events = client.generate(prompt("hang")).await.unwrap();
    assert!(events.next().await.unwrap().is_ok());
    drop(events);
    daemon.cancelled(1).await;
    client.status().await.unwrap();
}

#[tokio::test]
async fn an_error_in_mid_stream_ends_it() {
    let (_daemon, client) = start().await;
    let mut events = client.generate(prompt("changed")).await.unwrap();
    assert!(events.next().await.unwrap().is_ok());
    let error = events.next().await.unwrap().unwrap_err();
    assert_eq!(error.code(), Some(Code::DataLoss));
    assert!(error.to_string().contains("load it again"), "{error}");
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn a_stream_without_an_outcome_is_an_error() {
    let (_daemon, client) = start().await;
    let mut events = client.generate(prompt("break")).await.unwrap();
    assert!(events.next().await.unwrap().is_ok());
    let error = events.next().await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Incomplete { .. }), "{error}");
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn details_come_decoded() {
    let (_daemon, client) = start().await;

    let error = client.generate(prompt("full")).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::ResourceExhausted));
    assert_eq!(error.retry_after(), Some(Duration::from_millis(1500)));

    let mut request = prompt("x");
    request.sampling = Some(SamplingParams {
        temperature: Some(-1.0),
        ..Default::default()
    });
    let error = client.generate(request).await.unwrap_err();
    let rpc = error.as_rpc().unwrap();
    assert_eq!(rpc.rpc, "Inference.Generate");
    let fields: Vec<_> = rpc.field_violations().collect();
    assert_eq!(fields, [("sampling.temperature", "must be at least 0")]);

    let error = client.unload("tiny", false).await.unwrap_err();
    let rpc = error.as_rpc().unwrap();
    let violations: Vec<_> = rpc.precondition_violations().collect();
    assert_eq!(violations, [("PINNED", "tiny", "3 segments are pinned")]);
}

#[tokio::test]
async fn a_prompt_of_8_mib_reaches_the_daemon_and_is_judged_there() {
    let (_daemon, client) = start().await;
    let error = client
        .generate(prompt(&"a".repeat(8 << 20)))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Some(Code::InvalidArgument));
    assert!(
        error.to_string().contains("8388608 bytes is too long"),
        "{error}"
    );
    client.status().await.unwrap();
}

#[tokio::test]
async fn the_connection_is_made_anew_after_the_daemon_restarted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d.sock");
    let daemon = FakeDaemon::start_at(&path);
    let client = Client::connect(Some(&path)).await.unwrap();
    client.status().await.unwrap();
    drop(daemon);
    std::fs::remove_file(&path).unwrap();
    let _daemon = FakeDaemon::start_at(&path);
    let mut last = client.status().await;
    for _ in 0..100 {
        if last.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        last = client.status().await;
    }
    last.unwrap();
}

/// A daemon that ends says so to calls that reach it then, with the code of an internal error.
#[tokio::test]
async fn a_call_that_meets_the_end_of_the_daemon_has_lost_its_connection() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let ending = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&SETTINGS).await.unwrap();
        while read_frame(&mut stream).await.unwrap() != HEADERS {}
        stream.write_all(&GO_AWAY_WITHOUT_ERROR).await.unwrap();
    });
    let client = Client::connect(Some(&path)).await.unwrap();
    let error = client.status().await.unwrap_err();
    assert!(matches!(error, Error::ConnectionLost { .. }), "{error:?}");
    ending.await.unwrap();
}

const HEADERS: u8 = 1;
/// An empty frame of settings: length of 3 bytes, type, flags, stream of 4 bytes.
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
/// Stream 0 is the last that was looked at, and there was no error.
const GO_AWAY_WITHOUT_ERROR: [u8; 17] = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Reads a frame, behind the preface where there is one, and gives its type.
async fn read_frame(stream: &mut tokio::net::UnixStream) -> std::io::Result<u8> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await?;
    if head.starts_with(b"PRI ") {
        let mut rest = [0; b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len() - 9];
        stream.read_exact(&mut rest).await?;
        stream.read_exact(&mut head).await?;
    }
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body).await?;
    Ok(head[3])
}

#[tokio::test]
async fn models_are_loaded_listed_described_and_unloaded() {
    let (daemon, client) = start().await;
    let request = LoadRequest {
        path: "/models/b.gguf".into(),
        name: "b".into(),
        pin: true,
        preload: true,
        ..Default::default()
    };
    let mut events = client.load(request.clone()).await.unwrap();
    let mut stages = Vec::new();
    let mut loaded = None;
    while let Some(event) = events.next().await {
        match event.unwrap() {
            load_event::Event::Progress(progress) => stages.push(progress.stage()),
            load_event::Event::Loaded(model) => loaded = Some(model),
        }
    }
    assert_eq!(stages, [LoadStage::Metadata, LoadStage::Preload]);
    assert_eq!(loaded.unwrap(), client.get("b").await.unwrap());
    assert_eq!(*daemon.seen.load.lock().unwrap(), [request]);

    let names: Vec<_> = client
        .list()
        .await
        .unwrap()
        .into_iter()
        .map(|m| m.name)
        .collect();
    assert_eq!(names, ["tiny", "b"]);
    client.unload("b", true).await.unwrap();
    let error = client.get("b").await.unwrap_err();
    assert_eq!(error.code(), Some(Code::NotFound));
    assert!(error.to_string().contains("loaded: tiny"), "{error}");
}

#[tokio::test]
async fn every_other_rpc_passes_its_arguments_and_answers() {
    let (daemon, client) = start().await;

    let mut events = client.preload("tiny", &[0, 2]).await.unwrap();
    let mut done = None;
    while let Some(event) = events.next().await {
        if let preload_event::Event::Done(outcome) = event.unwrap() {
            done = Some(outcome);
        }
    }
    assert_eq!(done.unwrap().skipped_segments, 1);
    assert_eq!(daemon.seen.preload.lock().unwrap()[0].segments, [0, 2]);

    assert_eq!(client.pin("tiny", &[1]).await.unwrap().pinned_segments, 1);
    assert_eq!(client.unpin("tiny", &[]).await.unwrap().pinned_segments, 0);

    let request = TokenizeRequest {
        model: "tiny".into(),
        text: "a b".into(),
        ..Default::default()
    };
    assert_eq!(client.tokenize(request).await.unwrap().ids, [10, 11]);
    assert_eq!(client.detokenize("tiny", &[3, 4]).await.unwrap(), "<3><4>");
    let request = ScoreRequest {
        model: "tiny".into(),
        top_n: Some(2),
        ..Default::default()
    };
    let score = client.score(request).await.unwrap();
    assert_eq!(score.tokens[0].logprob, None);
    assert_eq!(score.tokens[1].top.len(), 2);

    assert_eq!(client.cache_stats().await.unwrap().total.unwrap().hits, 75);
    let cleared = client.cache_clear(Some("tiny")).await.unwrap();
    assert_eq!(cleared.kept[0].reason(), KeepReason::Pinned);
    let budget = set_budget_request::Budget::Percent(80.0);
    client.cache_set_budget(budget).await.unwrap();
    assert_eq!(daemon.seen.budget.lock().unwrap()[0].budget, Some(budget));
    assert_eq!(
        client.cache_release(false).await.unwrap().host_freed_bytes,
        0
    );
    let released = client.cache_release(true).await.unwrap();
    assert_eq!(
        (released.kept_bytes, released.host_freed_bytes),
        (1 << 30, 2 << 30)
    );
    let policy = client.cache_set_policy(CachePolicy::Lru).await.unwrap();
    assert_eq!(policy.policy(), CachePolicy::Lru);
    assert_eq!(client.status().await.unwrap().version, "0.1.0");

    let request = ChatRequest {
        model: "tiny".into(),
        messages: vec![ChatMessage {
            role: "user".into(),
            content: "Hi".into(),
            ..Default::default()
        }],
        ..Default::default()
    };
    let events: Vec<_> = client.chat(request).await.unwrap().collect().await;
    assert_eq!(events.len(), STORY.len() + 1);
}
