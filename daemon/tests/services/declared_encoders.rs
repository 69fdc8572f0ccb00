//! Encoders that the configuration declares: their pooling, and prompts for what texts are embedded
//! for.

use rocmforge_engine::api::Pooling;
use rocmforge_proto::v1;
use rocmforged::config::Config;
use rocmforged::defaults::Defaults;
use rocmforged::{Declared, End};
use serde_json::{Value, json};
use tonic::Code;

use crate::config::files;
use crate::daemon::{assert_status, fixtures};
use crate::declared::Declaring;

/// What `--check-config` shows is a file that says the same; what is wrong is refused by its key.
#[test]
fn prompts_and_pooling_are_read_shown_and_refused() {
    let model = |rest: &str| format!("[[model]]\nname = \"b\"\npath = \"/m\"\n{rest}\n");
    let read = |text: &str| -> Result<Config, String> {
        let (_dir, read) = files(text, &[]);
        read.map_err(|error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            format!("{error}: {}", cause.unwrap_or_default())
        })
    };
    let text = model(
        "pooling = \"cls\"\nprompts = { query = \"find: \\\"\\n\", \"a b\" = '', document = \"d: \" }",
    );
    let first = read(&text).unwrap();
    let defaults = first.models[0].model.defaults.clone();
    assert_eq!(defaults.pooling, Some(Pooling::First));
    assert_eq!(defaults.prompts["query"], "find: \"\n");
    assert_eq!(defaults.prompts.len(), 3);
    let shown = first.describe();
    let shown = &shown[shown.find("[[model]]").unwrap()..];
    assert_eq!(read(shown).unwrap().models[0].model.defaults, defaults);
    for (pooling, expected) in [
        ("none", Pooling::None),
        ("mean", Pooling::Mean),
        ("last", Pooling::Last),
    ] {
        let config = read(&model(&format!("pooling = \"{pooling}\""))).unwrap();
        let defaults = &config.models[0].model.defaults;
        assert_eq!(defaults.pooling, Some(expected));
        assert!(
            config
                .describe()
                .contains(&format!("pooling = \"{pooling}\"\n"))
        );
    }
    for (rest, words) in [
        ("pooling = \"rank\"", ["unknown variant `rank`", "cls"]),
        (
            "prompts = { \"\" = \"a\" }",
            ["prompts of [[model]] 1 ('b')", "is no name"],
        ),
    ] {
        let error = read(&model(rest)).unwrap_err();
        for word in words {
            assert!(error.contains(word), "'{error}' lacks '{word}'");
        }
    }
}

/// What an embedding is for puts the declared prompt before the text, and the declared pooling is
/// used in the place of the file's.
#[tokio::test]
async fn a_declared_encoder_has_prompts_and_another_pooling() {
    let declared = |name: &str, pooling, prompts: &[(&str, &str)]| Declared {
        name: name.to_owned(),
        path: fixtures().join("encoders/bert.gguf"),
        aliases: vec![format!("{name}-alias")],
        preload: false,
        pin: false,
        draft: None,
        mmproj: None,
        lora: Vec::new(),
        defaults: Defaults {
            pooling,
            prompts: prompts
                .iter()
                .map(|(name, prompt)| ((*name).to_owned(), (*prompt).to_owned()))
                .collect(),
            ..Defaults::default()
        },
    };
    let it = Declaring::start_with(vec![
        declared("asks", None, &[("query", "how do I "), ("document", "")]),
        declared("each", Some(Pooling::None), &[]),
        declared("first", Some(Pooling::First), &[]),
    ])
    .await;
    let embed = async |route: &str, body: Value| {
        let reply = it.http("POST", route, &body).await;
        (reply.status, reply.json())
    };
    let openai = async |body: Value| {
        let (status, reply) = embed("/v1/embeddings", body).await;
        assert_eq!(status, 200, "{reply}");
        reply["data"][0]["embedding"].clone()
    };
    let spelled = openai(json!({"model": "asks", "input": "how do I return"})).await;
    let plain = openai(json!({"model": "asks", "input": "return"})).await;
    assert_ne!(spelled, plain);
    // Each name for the same, of the model's alias as well.
    for (field, name) in [
        ("input_type", "query"),
        ("input_type", "search_query"),
        ("task", "retrieval.query"),
        ("prompt_name", "query"),
    ] {
        for model in ["asks", "asks-alias"] {
            let found = openai(json!({"model": model, "input": "return", field: name})).await;
            assert_eq!(found, spelled, "{model}: {field} {name}");
        }
    }
    let bare = openai(json!({"model": "asks", "input": "return", "input_type": "passage"})).await;
    assert_eq!(bare, plain);
    let asked = json!({"model": "asks", "content": "return", "input_type": "query"});
    let (_, native) = embed("/embedding", asked).await;
    assert_eq!(native[0]["embedding"][0], spelled);
    let request = v1::EmbedRequest {
        model: "asks".into(),
        inputs: vec![v1::EmbedInput {
            input: Some(v1::embed_input::Input::Text("return".into())),
        }],
        input_type: "query".into(),
        ..Default::default()
    };
    let over_grpc = it.daemon.inference().embed(request.clone()).await.unwrap();
    let values: Vec<f32> = serde_json::from_value(spelled.clone()).unwrap();
    assert_eq!(over_grpc.into_inner().embeddings[0].values, values);
    let request = v1::EmbedRequest {
        input_type: "clustering".into(),
        ..request
    };
    let refused = it.daemon.inference().embed(request).await;
    assert_status(refused, Code::InvalidArgument, &["input_type", "prompts"]);

    for (body, mentions) in [
        (
            json!({"model": "asks", "input": "a", "input_type": "clustering"}),
            "document, query",
        ),
        (
            json!({"model": "first", "input": "a", "input_type": "query"}),
            "prompts = {",
        ),
        (
            json!({"model": "asks", "input": [[5, 6]], "input_type": "query"}),
            "token ids take no prompt",
        ),
        (json!({"model": "each", "input": "a"}), "use /embedding"),
    ] {
        let (status, reply) = embed("/v1/embeddings", body.clone()).await;
        assert_eq!(status, 400, "{body}: {reply}");
        let message = reply["error"]["message"].as_str().unwrap();
        assert!(message.contains(mentions), "{body}: {message}");
    }
    let (_, each) = embed("/embedding", json!({"model": "each", "content": "return"})).await;
    assert!(each[0]["embedding"].as_array().unwrap().len() > 1, "{each}");
    // The first of the vectors of tokens is what the other pooling makes its vector of.
    let row = |value: &Value| -> Vec<f64> { serde_json::from_value(value.clone()).unwrap() };
    let (row_of_first, first) = (
        row(&each[0]["embedding"][0]),
        row(&openai(json!({"model": "first", "input": "return"})).await),
    );
    let length = row_of_first.iter().map(|v| v * v).sum::<f64>().sqrt();
    for (row, first) in row_of_first.iter().zip(&first) {
        assert!((row / length - first).abs() < 1e-5, "{row} {first}");
    }
    assert_eq!(it.daemon.stop().await, End::Drained);
}
