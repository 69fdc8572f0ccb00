//! Requests that make no sense: each is refused with its code, the field and its range,
//! and the next request works.

use rocmforge_client::Code;
use rocmforge_client::proto::v1::generate_request::Prompt;
use rocmforge_client::proto::v1::score_request::Input;
use rocmforge_client::proto::v1::set_budget_request::Budget;
use rocmforge_client::proto::v1::{
    ChatRequest, GenerateRequest, SamplingParams, ScoreRequest, TokenIds, TokenizeRequest,
};
use rocmforge_tests::daemon::{Daemon, Options};
use rocmforge_tests::fixtures::TINY_LLAMA;
use rocmforge_tests::session::{
    assert_works, connect, continuation, generate, greedy, load, question, refused,
};

/// Changes one parameter of an otherwise good request.
type Spoil = fn(&mut SamplingParams);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parameters_out_of_range_name_their_field() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let cases: [(&str, Spoil); 27] = [
        ("max_tokens", |p| p.max_tokens = Some(0)),
        ("max_tokens", |p| p.max_tokens = Some(-1)),
        ("max_tokens", |p| p.max_tokens = Some(i32::MIN)),
        ("temperature", |p| p.temperature = Some(-0.5)),
        ("temperature", |p| p.temperature = Some(f32::NAN)),
        ("temperature", |p| p.temperature = Some(f32::INFINITY)),
        ("top_k", |p| p.top_k = Some(-1)),
        ("top_p", |p| p.top_p = Some(0.0)),
        ("top_p", |p| p.top_p = Some(-1.0)),
        ("top_p", |p| p.top_p = Some(1.5)),
        ("top_p", |p| p.top_p = Some(f32::NAN)),
        ("min_p", |p| p.min_p = Some(-0.1)),
        ("min_p", |p| p.min_p = Some(1.0)),
        ("min_p", |p| p.min_p = Some(f32::NAN)),
        ("repeat_penalty", |p| p.repeat_penalty = Some(0.0)),
        ("repeat_penalty", |p| p.repeat_penalty = Some(-1.0)),
        ("repeat_penalty", |p| p.repeat_penalty = Some(f32::NAN)),
        ("repeat_penalty", |p| p.repeat_penalty = Some(f32::INFINITY)),
        ("presence_penalty", |p| p.presence_penalty = Some(101.0)),
        ("presence_penalty", |p| p.presence_penalty = Some(f32::NAN)),
        ("frequency_penalty", |p| p.frequency_penalty = Some(-101.0)),
        ("frequency_penalty", |p| {
            p.frequency_penalty = Some(f32::NAN)
        }),
        ("penalty_last_n", |p| p.penalty_last_n = Some(-1)),
        ("stop", |p| p.stop = vec![String::new()]),
        ("stop", |p| p.stop = vec!["x".repeat(257)]),
        ("stop", |p| p.stop = vec!["x".into(); 257]),
        ("stop", |p| p.stop = vec!["x".repeat(1 << 20)]),
    ];
    for (field, spoil) in cases {
        let mut sampling = greedy(8);
        spoil(&mut sampling);
        let what = format!("{sampling:.80?}");
        let error = refused(
            &what,
            generate(&client, continuation(TINY_LLAMA, "Once", sampling.clone())).await,
        );
        assert_eq!(
            error.code,
            Code::InvalidArgument,
            "{field}: {}",
            error.message
        );
        assert!(
            error.message.contains(field),
            "{field} is not in {:?}",
            error.message
        );
        let violations: Vec<_> = error.field_violations().collect();
        assert!(
            violations.iter().any(|(at, _)| at.contains(field)),
            "{field}: {violations:?}"
        );
        let chatted = client
            .chat(question(TINY_LLAMA, "Hello", sampling))
            .await
            .map(|_| ());
        assert_eq!(
            refused(&what, chatted).code,
            Code::InvalidArgument,
            "{field} in Chat"
        );
    }
    assert_works(&client).await;
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_and_contexts_are_checked() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    let model = load(&client, TINY_LLAMA).await;
    let good = continuation(TINY_LLAMA, "Once", greedy(4));
    let ids = |ids: Vec<u32>| Some(Prompt::Tokens(TokenIds { ids }));
    let cases: Vec<(&str, GenerateRequest)> = vec![
        (
            "prompt",
            GenerateRequest {
                prompt: None,
                ..good.clone()
            },
        ),
        (
            "",
            GenerateRequest {
                prompt: Some(Prompt::Text(String::new())),
                ..good.clone()
            },
        ),
        (
            "",
            GenerateRequest {
                prompt: ids(vec![]),
                ..good.clone()
            },
        ),
        (
            "1216",
            GenerateRequest {
                prompt: ids(vec![5, 1216]),
                ..good.clone()
            },
        ),
        (
            "4294967295",
            GenerateRequest {
                prompt: ids(vec![u32::MAX]),
                ..good.clone()
            },
        ),
        (
            "n_ctx",
            GenerateRequest {
                n_ctx: Some(0),
                ..good.clone()
            },
        ),
        (
            "n_ctx",
            GenerateRequest {
                n_ctx: Some(-7),
                ..good.clone()
            },
        ),
        (
            "n_ctx",
            GenerateRequest {
                n_ctx: Some(i32::MAX),
                ..good.clone()
            },
        ),
        (
            "n_ctx",
            GenerateRequest {
                prompt: ids(vec![5; 64]),
                n_ctx: Some(32),
                ..good.clone()
            },
        ),
        (
            "4096",
            GenerateRequest {
                prompt: ids(vec![5; model.n_ctx_train as usize + 1]),
                ..good.clone()
            },
        ),
        (
            "logprobs",
            GenerateRequest {
                logprobs: Some(-1),
                ..good.clone()
            },
        ),
        (
            "logprobs",
            GenerateRequest {
                logprobs: Some(101),
                ..good.clone()
            },
        ),
        (
            "model",
            GenerateRequest {
                model: String::new(),
                ..good.clone()
            },
        ),
    ];
    for (word, request) in cases {
        let what = format!("{:.200}", format!("{request:?}"));
        let error = refused(&what, generate(&client, request).await);
        assert!(
            error.code == Code::InvalidArgument,
            "{what}: {:?} {}",
            error.code,
            error.message
        );
        assert!(
            error.message.contains(word),
            "{what}: {word} is not in {:?}",
            error.message
        );
        assert!(!error.message.is_empty(), "{what}: no message");
    }

    let request = ChatRequest {
        messages: vec![],
        ..question(TINY_LLAMA, "", greedy(4))
    };
    let error = refused("no messages", client.chat(request).await.map(|_| ()));
    assert_eq!(error.code, Code::InvalidArgument, "{}", error.message);

    let unknown = generate(&client, continuation("nobody", "Once", greedy(4))).await;
    let error = refused("an unknown model", unknown);
    assert_eq!(error.code, Code::NotFound, "{}", error.message);
    assert!(
        error.message.contains(TINY_LLAMA),
        "the message lists what is loaded: {:?}",
        error.message
    );
    assert_works(&client).await;
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_requests_are_checked_too() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let score = |input, top_n| ScoreRequest {
        model: TINY_LLAMA.into(),
        input,
        top_n,
        ..Default::default()
    };
    let text = Some(Input::Text("Once upon a time".into()));
    let outside = Some(Input::Tokens(TokenIds {
        ids: vec![5, 1216, 5],
    }));
    let invalid = Code::InvalidArgument;
    for (what, request) in [
        ("no input", score(None, None)),
        ("an id outside", score(outside, None)),
        ("top_n below", score(text.clone(), Some(-1))),
        ("top_n above", score(text, Some(101))),
    ] {
        assert_eq!(
            refused(what, client.score(request).await).code,
            invalid,
            "{what}"
        );
    }
    let error = refused(
        "an id outside",
        client.detokenize(TINY_LLAMA, &[1216]).await,
    );
    assert_eq!(error.code, invalid, "{}", error.message);
    let request = TokenizeRequest {
        model: "nobody".into(),
        text: "x".into(),
        ..Default::default()
    };
    assert_eq!(
        refused("Tokenize", client.tokenize(request).await).code,
        Code::NotFound
    );
    assert_eq!(
        refused("Get", client.get("nobody").await).code,
        Code::NotFound
    );
    assert_eq!(
        refused("Unload", client.unload("nobody", false).await).code,
        Code::NotFound
    );
    assert_eq!(
        refused("Pin", client.pin("nobody", &[]).await).code,
        Code::NotFound
    );
    assert_eq!(
        refused("Pin", client.pin(TINY_LLAMA, &[9999]).await).code,
        invalid
    );
    assert_eq!(
        refused("Clear", client.cache_clear(Some("nobody")).await).code,
        Code::NotFound
    );

    let budgets = [
        (Budget::Bytes(0), invalid),
        (Budget::Percent(0.0), invalid),
        (Budget::Percent(-5.0), invalid),
        (Budget::Percent(f64::NAN), invalid),
        (Budget::Percent(100.5), invalid),
        (Budget::Bytes(u64::MAX), Code::FailedPrecondition),
        (Budget::Bytes(4096), Code::FailedPrecondition),
    ];
    for (budget, code) in budgets {
        let error = refused("a budget", client.cache_set_budget(budget).await);
        assert_eq!(error.code, code, "{budget:?}: {}", error.message);
    }
    assert_works(&client).await;
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_a_long_text_take_a_fraction_of_their_message() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let request = |unit: &str, n: usize| TokenizeRequest {
        model: TINY_LLAMA.into(),
        text: unit.repeat(n),
        add_special: Some(false),
        ..Default::default()
    };
    let before = daemon.peak_memory_bytes();
    let long = request("a b ", 2 << 20);
    let answer = client.tokenize(long.clone()).await.expect("its tokens");
    let grown = daemon.peak_memory_bytes() - before;
    assert!(answer.ids.len() > 4 << 20, "{}", answer.ids.len());
    assert_eq!(answer.ids.len(), answer.pieces.len());
    assert!(answer.pieces.concat() == long.text.as_bytes());
    assert!(grown < 100 << 20, "{grown} bytes");

    // Its tokens would be more than a message holds.
    let too_long = request("\u{1f600}", 15 << 18);
    let error = refused("Tokenize", client.tokenize(too_long).await);
    assert_eq!(error.code, Code::InvalidArgument, "{}", error.message);
    assert!(error.message.contains("in parts"), "{}", error.message);
    assert_works(&client).await;
    daemon.stop();
}

/// The transport takes it, the tokenizer gets through it, and the answer is about the context.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_of_8_mib_is_too_long() {
    let daemon = Daemon::start(&Options::default());
    let client = connect(&daemon).await;
    load(&client, TINY_LLAMA).await;
    let shapes = ["Once upon a time ", "a", " ", "<|im_start|>", "\u{1f600}"];
    for unit in shapes {
        let text = unit.repeat((8 << 20) / unit.len());
        let error = refused(
            unit,
            generate(&client, continuation(TINY_LLAMA, &text, greedy(4))).await,
        );
        assert_eq!(
            error.code,
            Code::InvalidArgument,
            "8 MiB of {unit:?}: {}",
            error.message
        );
        assert!(
            error.message.contains("4096"),
            "the limit is not in {:?}",
            error.message
        );
        assert!(error.message.len() < 4096, "the message quotes the prompt");
    }
    assert_works(&client).await;
    daemon.stop();
}
