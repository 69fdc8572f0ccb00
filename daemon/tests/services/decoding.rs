//! Log-probabilities, bias, ends and formats, over gRPC.

use rocmforge_proto::v1;
use rocmforged::End;
use tonic::Code;

use crate::daemon::{Daemon, assert_status, greedy};

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";

/// The tokens with their log-probabilities.
async fn scored(
    daemon: &Daemon,
    request: v1::GenerateRequest,
) -> (String, Vec<u32>, Vec<v1::TokenLogprob>) {
    let mut events = daemon
        .inference()
        .generate(request)
        .await
        .unwrap()
        .into_inner();
    let (mut text, mut ids, mut scores) = (String::new(), Vec::new(), Vec::new());
    while let Some(event) = events.message().await.unwrap() {
        if let Some(v1::generate_event::Event::Piece(piece)) = event.event {
            text += &piece.text;
            ids.extend(piece.token_ids);
            scores.extend(piece.logprobs);
        }
    }
    (text, ids, scores)
}

fn held(kind: v1::format::Kind) -> v1::GenerateRequest {
    let mut request = greedy("m", "Once upon a time", 100);
    let sampling = request.sampling.get_or_insert_default();
    sampling.format = Some(v1::Format { kind: Some(kind) });
    request
}

#[tokio::test]
async fn log_probabilities_come_with_the_tokens() {
    let daemon = Daemon::start().await;
    daemon.load(LLAMA, "m").await.unwrap();
    let request = v1::GenerateRequest {
        logprobs: Some(2),
        ..greedy("m", "Once upon a time", 10)
    };
    let (text, ids, scores) = scored(&daemon, request).await;
    assert_eq!(ids, scores.iter().map(|s| s.id).collect::<Vec<_>>());
    let bytes: Vec<u8> = scores.iter().flat_map(|s| s.piece.clone()).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), text);
    for score in &scores {
        assert_eq!(score.top.len(), 2);
        assert_eq!(score.top[0].id, score.id, "it is greedy");
        assert_eq!(Some(score.top[0].logprob), score.logprob);
    }
    let (_, _, none) = scored(&daemon, greedy("m", "Once upon a time", 3)).await;
    assert!(none.is_empty());
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn bias_and_ends_change_what_comes() {
    let daemon = Daemon::start().await;
    daemon.load(LLAMA, "m").await.unwrap();
    let plain = greedy("m", "Once upon a time", 40);
    let (_, ids, _) = scored(&daemon, plain.clone()).await;
    let with = |change: &dyn Fn(&mut v1::SamplingParams)| {
        let mut request = plain.clone();
        change(request.sampling.get_or_insert_default());
        request
    };
    let stop = ids[4];
    let until = ids.iter().position(|&id| id == stop).unwrap();
    let request = with(&|p| p.stop_token_ids = vec![stop]);
    let (_, found, _) = scored(&daemon, request.clone()).await;
    assert_eq!(found, ids[..until]);
    let (_, done) = daemon.generate(request).await.unwrap();
    assert_eq!(done.finish_reason(), v1::FinishReason::StopToken);
    assert_eq!(done.stop_token_id, Some(stop));
    let (_, found, _) = scored(&daemon, with(&|p| p.logit_bias = [(stop, -100.0)].into())).await;
    assert!(!found.contains(&stop));
    let request = with(&|p| p.ignore_eos = true);
    let (_, done) = daemon.generate(request).await.unwrap();
    assert_eq!((done.generated_tokens, done.stop_token_id), (40, None));
    let request = with(&|p| p.min_tokens = Some(40));
    assert_eq!(
        daemon.generate(request).await.unwrap().1.generated_tokens,
        40
    );
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn each_kind_of_format_holds() {
    use v1::format::Kind;

    let daemon = Daemon::start().await;
    daemon.load(LLAMA, "m").await.unwrap();
    let text = |kind: Kind| {
        let daemon = &daemon;
        async move { scored(daemon, held(kind)).await.0 }
    };
    let schema = r#"{"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}"#;
    let array = text(Kind::JsonSchema(schema.to_owned())).await;
    let digits: Vec<_> = array.chars().filter(char::is_ascii_digit).collect();
    assert!(digits.len() == 3 && array.ends_with(']'), "{array}");
    let regex = text(Kind::Regex("[xyz]{4}".to_owned())).await;
    assert!(
        regex.len() == 4 && regex.chars().all(|c| "xyz".contains(c)),
        "{regex}"
    );
    assert_eq!(
        text(Kind::Lark("start: \"a\" \"b\"".to_owned())).await,
        "ab"
    );
    let gbnf = "root ::= \"(\" inner{2} \")\" # no more\ninner ::= [xyz] | \"[\" [xyz] \"]\"";
    let held = text(Kind::Gbnf(gbnf.to_owned())).await;
    let letters = held.chars().filter(|c| "xyz".contains(*c)).count();
    assert!(
        letters == 2 && held.starts_with('(') && held.ends_with(')'),
        "{held}"
    );
    let object = text(Kind::JsonObject(v1::JsonObject {})).await;
    assert!(object.starts_with('{'), "{object}");
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn bad_fields_are_named_with_the_reason() {
    use v1::format::Kind;

    let daemon = Daemon::start().await;
    daemon.load(LLAMA, "m").await.unwrap();
    let rows = [
        (
            Kind::JsonSchema("{".to_owned()),
            "sampling.format.json_schema",
            "EOF",
        ),
        (
            Kind::JsonSchema(r#"{"type": 5}"#.to_owned()),
            "sampling.format",
            "type",
        ),
        (Kind::Regex("(".to_owned()), "sampling.format.regex", ""),
        (
            Kind::Regex("a".repeat(300 << 10)),
            "sampling.format.regex",
            "at most 262144",
        ),
        (
            Kind::Gbnf("root ::= \"a\"\nroot ::= b".to_owned()),
            "sampling.format.gbnf",
            "line 2, column 1",
        ),
        (
            Kind::Lark("start: nothing".to_owned()),
            "sampling.format.lark",
            "nothing",
        ),
    ];
    for (kind, field, word) in rows {
        let result = daemon.generate(held(kind)).await;
        assert_status(result, Code::InvalidArgument, &[field, word]);
    }
    let mut empty = greedy("m", "x", 1);
    empty.sampling.get_or_insert_default().format = Some(v1::Format { kind: None });
    let result = daemon.generate(empty).await;
    assert_status(result, Code::InvalidArgument, &["sampling.format", "empty"]);
    let mut beyond = greedy("m", "x", 1);
    beyond.sampling.get_or_insert_default().logit_bias = [(1 << 30, 1.0)].into();
    let result = daemon.generate(beyond).await;
    assert_status(
        result,
        Code::InvalidArgument,
        &["sampling.logit_bias", "vocabulary"],
    );
    let mut many = greedy("m", "x", 1);
    let bias = (0..5000).map(|id| (id, 1.0)).collect();
    many.sampling.get_or_insert_default().logit_bias = bias;
    let result = daemon.generate(many).await;
    assert_status(
        result,
        Code::InvalidArgument,
        &["sampling.logit_bias", "1024"],
    );
    assert!(daemon.generate(greedy("m", "x", 1)).await.is_ok());
    assert_eq!(daemon.stop().await, End::Drained);
}
