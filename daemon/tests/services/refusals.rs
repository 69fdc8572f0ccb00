//! Requests that cannot be had, each with its code and what to do.

use rocmforge_proto::v1;
use rocmforged::End;
use tonic::{Code, Request};
use tonic_types::StatusExt;

use crate::daemon::{Daemon, assert_status, connect_without_timers, greedy};

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
            kv_disk: false,
        })
        .await;
    assert_status(clear, Code::NotFound, &["'ghost'"]);
    let reload = daemon.server().reload(v1::ReloadRequest {}).await;
    assert_status(reload, Code::Unimplemented, &["settings"]);
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
    let priority = v1::GenerateRequest {
        priority: 3,
        ..greedy("m", "x", 1)
    };
    assert_status(
        daemon.generate(priority).await,
        Code::InvalidArgument,
        &["priority", "2 for batch"],
    );
    let batch = v1::GenerateRequest {
        priority: v1::Priority::Batch.into(),
        ..greedy("m", "x", 1)
    };
    assert!(daemon.generate(batch).await.is_ok());
    let logprobs = v1::GenerateRequest {
        logprobs: Some(21),
        ..greedy("m", "x", 1)
    };
    assert_status(
        daemon.generate(logprobs).await,
        Code::InvalidArgument,
        &["logprobs", "from 0 to 20"],
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
    let mut client = connect_without_timers(daemon.dir.path().join("s")).await;
    for timeout in ["0m", "1u", "1m"] {
        let mut request = Request::new(greedy("m", "Once upon a time", 900));
        request
            .metadata_mut()
            .insert("grpc-timeout", timeout.parse().unwrap());
        let mut events = match client.generate(request).await {
            Ok(answer) => answer.into_inner(),
            refused => {
                assert_status(refused, Code::DeadlineExceeded, &["deadline"]);
                continue;
            }
        };
        let ended = loop {
            match events.message().await {
                Ok(Some(_)) => {}
                ended => break ended,
            }
        };
        assert_status(ended, Code::DeadlineExceeded, &["deadline"]);
    }
    drop(client);
    assert_eq!(daemon.stop().await, End::Drained);
}
