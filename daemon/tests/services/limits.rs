//! Limits per peer: what is above them waits or is refused, on both skins, and others go on.

use std::time::{Duration, Instant};

use rocmforge_proto::v1;
use rocmforge_proto::v1::inference_client::InferenceClient;
use rocmforged::End;
use rocmforged::limits::{PeerLimits, Rule};
use rocmforged::peer::TokenName;
use rocmforged::roles::{Roles, Who};
use serde_json::{Value, json};
use tonic::Code;
use tonic_types::StatusExt;

use crate::daemon::{Daemon, assert_status, connect, endless, fixtures, greedy};
use crate::http::client::{HttpDaemon, LLAMA, Reply, tcp};
use crate::vectors::reranker;

fn everyone(limits: PeerLimits) -> Rule {
    Rule {
        who: Who::Everyone,
        tokens: Vec::new(),
        limits,
    }
}

async fn start(limits: PeerLimits) -> HttpDaemon {
    let http = HttpDaemon::start_limiting(None, Roles::default(), vec![everyone(limits)]).await;
    let path = fixtures().join(format!("{LLAMA}.gguf"));
    let path = path.to_str().unwrap();
    http.daemon.load(path, LLAMA).await.unwrap();
    http
}

/// The value of a sample of `/metrics`, of the user that runs the tests.
async fn metric(http: &HttpDaemon, name: &str, more: &str) -> f64 {
    let uid = nix::unistd::geteuid();
    let sample = format!("{name}{{peer=\"user:{uid}\"{more}}} ");
    let text = http.get("/metrics").await.text;
    let line = text.lines().find_map(|line| line.strip_prefix(&sample));
    line.map_or(0.0, |value| value.parse().unwrap())
}

async fn until(http: &HttpDaemon, name: &str, expected: f64) {
    let give_up = Instant::now() + Duration::from_secs(60);
    while metric(http, name, "").await != expected {
        assert!(Instant::now() < give_up, "{name} never is {expected}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn completion(max_tokens: u32) -> Value {
    json!({"model": LLAMA, "prompt": "Once upon a time", "max_tokens": max_tokens})
}

/// The shape of a refusal over HTTP.
#[track_caller]
fn assert_refused(reply: &Reply, limit: &str, words: &str, retry: bool) {
    // What never fits is not to be sent again.
    let (status, kind) = match retry {
        true => (429, "rate_limit_error"),
        false => (413, "invalid_request_error"),
    };
    assert_eq!(reply.status, status, "{reply:?}");
    assert_eq!(
        reply.headers.contains_key("retry-after"),
        retry,
        "{reply:?}"
    );
    let error = &reply.json()["error"];
    assert_eq!(error["code"], "PEER_LIMIT");
    assert_eq!(error["type"], kind);
    assert_eq!(error["details"]["limit"], limit);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains(words), "{message}");
}

/// The same over gRPC.
#[track_caller]
fn assert_refused_by_status<T>(
    result: Result<T, tonic::Status>,
    limit: &str,
    words: &str,
    retry: bool,
) {
    let status = assert_status(result, Code::ResourceExhausted, &[words]);
    let details = status.get_error_details();
    let info = details.error_info().unwrap();
    assert_eq!(
        (&*info.reason, &*info.metadata["limit"]),
        ("PEER_LIMIT", limit)
    );
    assert_eq!(details.retry_info().is_some(), retry);
}

#[tokio::test]
async fn more_than_may_run_wait_and_more_than_may_wait_are_refused() {
    let http = start(PeerLimits {
        running: Some(1),
        queued: Some(1),
        ..PeerLimits::default()
    })
    .await;
    // It reads its first event and no more, so it runs for as long as it is there.
    let slow = connect(http.daemon.dir.path().join("s"), 64).await;
    let mut first = InferenceClient::new(slow).generate(endless(LLAMA, 1)).await;
    let events = first.as_mut().unwrap().get_mut();
    assert!(events.message().await.unwrap().is_some());
    let second = {
        let mut inference = http.daemon.inference();
        tokio::spawn(async move { inference.generate(greedy(LLAMA, "Once", 4)).await })
    };
    until(&http, "rocmforge_peer_requests_queued", 1.0).await;
    assert_eq!(
        metric(&http, "rocmforge_peer_requests_running", "").await,
        1.0
    );
    let running = http.daemon.server().status(v1::StatusRequest {}).await;
    assert_eq!(
        running.unwrap().into_inner().queue_depth,
        1,
        "the engine has room"
    );

    assert_refused(
        &http.post("/v1/completions", &completion(4)).await,
        "queued",
        "queued = 1",
        true,
    );
    let third = http.daemon.generate(greedy(LLAMA, "Once", 4)).await;
    assert_refused_by_status(third, "queued", "running = 1", true);
    let score = v1::ScoreRequest {
        model: LLAMA.into(),
        input: Some(v1::score_request::Input::Text("Once upon a time".into())),
        ..Default::default()
    };
    let scored = http.daemon.inference().score(score).await;
    assert_refused_by_status(scored, "queued", "queued = 1", true);
    let refused = metric(&http, "rocmforge_peer_refused_total", ",limit=\"queued\"").await;
    assert_eq!(refused, 3.0);

    // Its place is the next one's.
    drop(first);
    let mut events = second.await.unwrap().unwrap().into_inner();
    let mut done = false;
    while let Some(event) = events.message().await.unwrap() {
        done |= matches!(event.event, Some(v1::generate_event::Event::Done(_)));
    }
    assert!(done);
    assert_eq!(
        http.post("/v1/completions", &completion(4)).await.status,
        200
    );
    until(&http, "rocmforge_peer_requests_running", 0.0).await;
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_prompt_with_more_bytes_than_may_be_is_refused_before_it_is_read() {
    let http = start(PeerLimits {
        prompt_bytes: Some(15),
        ..PeerLimits::default()
    })
    .await;
    let words = "prompt_bytes = 15";
    assert_refused(
        &http.post("/v1/completions", &completion(4)).await,
        "prompt_bytes",
        words,
        false,
    );
    let generated = http
        .daemon
        .generate(greedy(LLAMA, "Once upon a time", 4))
        .await;
    assert_refused_by_status(generated, "prompt_bytes", words, false);
    let texts = json!({"model": LLAMA, "input": ["Once upon", " a time"]});
    assert_refused(
        &http.post("/v1/embeddings", &texts).await,
        "prompt_bytes",
        words,
        false,
    );
    let texts = ["Once upon", " a time"].map(|text| v1::EmbedInput {
        input: Some(v1::embed_input::Input::Text(text.into())),
    });
    let embedded = v1::EmbedRequest {
        model: LLAMA.into(),
        inputs: texts.to_vec(),
        ..Default::default()
    };
    let embedded = http.daemon.inference().embed(embedded).await;
    assert_refused_by_status(embedded, "prompt_bytes", words, false);
    let rendered = v1::ChatRequest {
        model: LLAMA.into(),
        messages: vec![v1::ChatMessage {
            role: "user".into(),
            content: "Once upon a time".into(),
            ..Default::default()
        }],
        ..Default::default()
    };
    let rendered = http.daemon.inference().render(rendered).await;
    assert_refused_by_status(rendered, "prompt_bytes", words, false);
    http.daemon.load(reranker(&http.daemon), "r").await.unwrap();
    let ranked = v1::RerankRequest {
        model: "r".into(),
        query: "Once".into(),
        documents: vec!["upon".into(), " a time".into()],
        ..Default::default()
    };
    let ranked = http.daemon.inference().rerank(ranked).await;
    assert_refused_by_status(ranked, "prompt_bytes", words, false);
    let mut echo = completion(0);
    echo["echo"] = true.into();
    assert_refused(
        &http.post("/v1/completions", &echo).await,
        "prompt_bytes",
        words,
        false,
    );
    http.daemon
        .generate(greedy(LLAMA, "Once", 4))
        .await
        .unwrap();
    until(&http, "rocmforge_peer_prompt_bytes", 0.0).await;
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_minutes_tokens_are_those_of_prompts_and_answers() {
    let http = start(PeerLimits {
        tokens_per_minute: Some(30),
        ..PeerLimits::default()
    })
    .await;
    // To the last of them, whatever the model would end with.
    let mut first = greedy(LLAMA, "Once", 24);
    if let Some(sampling) = &mut first.sampling {
        sampling.ignore_eos = true;
    }
    let (_, done) = http.daemon.generate(first).await.unwrap();
    let spent = f64::from(done.prompt_tokens + done.generated_tokens);
    let counted = metric(&http, "rocmforge_peer_tokens_total", "").await;
    assert!(counted >= spent, "{counted} of {done:?}");
    // Of two more one is refused at the latest, on either skin, with the time to wait.
    let words = "tokens_per_minute = 30";
    let long = json!({"model": LLAMA, "prompt": "Once upon a time. ".repeat(2), "max_tokens": 1});
    assert_refused(
        &http.post("/v1/completions", &long).await,
        "tokens_per_minute",
        words,
        true,
    );
    let again = http
        .daemon
        .generate(greedy(LLAMA, &"Once upon a time. ".repeat(2), 1))
        .await;
    let status = again.as_ref().unwrap_err();
    let delay = status.get_error_details().retry_info().unwrap().retry_delay;
    assert!(delay.unwrap() > Duration::from_secs(1) && delay.unwrap() < Duration::from_secs(60));
    assert_refused_by_status(again, "tokens_per_minute", words, true);
    let never = http
        .daemon
        .generate(greedy(LLAMA, &"Once ".repeat(100), 1))
        .await;
    assert_refused_by_status(never, "tokens_per_minute", "more than a minute's", false);
    http.daemon.load(reranker(&http.daemon), "r").await.unwrap();
    let ranked = v1::RerankRequest {
        model: "r".into(),
        query: "Once".into(),
        documents: vec!["upon a time".into()],
        ..Default::default()
    };
    let ranked = http.daemon.inference().rerank(ranked).await;
    assert_refused_by_status(ranked, "tokens_per_minute", "more than a minute's", false);
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn a_tokens_limits_are_its_own() {
    let limits = PeerLimits {
        prompt_bytes: Some(1),
        ..PeerLimits::default()
    };
    let rule = Rule {
        who: Who::parse(&[]).unwrap(),
        tokens: vec![TokenName::new("ci").unwrap()],
        limits,
    };
    let tokens = "0123456789abcdef0123456789abcdef\nci ci-0123456789abcdef";
    let http = HttpDaemon::start_limiting(Some(tokens), Roles::default(), vec![rule]).await;
    let ask = async |token: &str| {
        let bearer = format!("Bearer {token}");
        let headers = [("authorization", bearer.as_str())];
        let body = completion(2).to_string();
        tcp(http.tcp, "POST", "/v1/completions", &headers, &body).await
    };
    let refused = ask("ci-0123456789abcdef").await;
    assert_refused(&refused, "prompt_bytes", "token:ci", false);
    assert_eq!(ask("0123456789abcdef0123456789abcdef").await.status, 200);
    assert_eq!(ask("ci-0123456789abcdeg").await.status, 401);
    assert_eq!(
        http.post("/v1/completions", &completion(2)).await.status,
        200
    );
    let text = http.get("/metrics").await.text;
    for line in [
        "rocmforge_peer_refused_total{peer=\"token:ci\",limit=\"prompt_bytes\"} 1",
        "rocmforge_peer_refused_total{peer=\"token:default\",limit=\"prompt_bytes\"} 0",
    ] {
        assert!(text.contains(line), "{line}");
    }
    assert_eq!(http.stop().await, End::Drained);
}

#[tokio::test]
async fn without_limits_nobody_is_refused_and_everyone_is_counted() {
    let daemon = Daemon::start().await;
    let path = fixtures().join(format!("{LLAMA}.gguf"));
    daemon.load(path.to_str().unwrap(), LLAMA).await.unwrap();
    let all = (0..8).map(|_| daemon.generate(greedy(LLAMA, "Once upon a time", 4)));
    for generated in futures_util::future::join_all(all).await {
        generated.unwrap();
    }
    assert_eq!(daemon.stop().await, End::Drained);
}
