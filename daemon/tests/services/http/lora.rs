//! LoRA adapters by request: their list, their scales, their names, and what is refused.

use std::path::Path;

use rocmforge_gguf::write::GgufWriter;
use rocmforge_gguf::{Gguf, MappedFile, TensorType};
use rocmforge_proto::v1;
use serde_json::{Value, json};

use super::client::{HttpDaemon, LLAMA};
use crate::daemon::{fixtures, greedy};

/// Writes an adapter for queries and outputs of attention of the first layers of the fixture.
fn write_adapter(path: &Path, seed: u32, architecture: &str) {
    let base = MappedFile::open(&fixtures().join(format!("{LLAMA}.gguf"))).unwrap();
    let base = Gguf::open(&base).unwrap();
    let mut state = seed;
    let mut random = |n: u64, most: f32| -> Vec<u8> {
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * most
        };
        (0..n).flat_map(|_| value().to_le_bytes()).collect()
    };
    let mut writer = GgufWriter::new()
        .key("general.type", "adapter")
        .key("general.architecture", architecture)
        .key("adapter.type", "lora")
        .key("adapter.lora.alpha", 8.0f32)
        .key("adapter.lora.task_name", "rhymes");
    for layer in 0..2 {
        for matrix in ["attn_q", "attn_output"] {
            let name = format!("blk.{layer}.{matrix}.weight");
            let [cols, rows, ..] = base.tensor(&name).unwrap().dims;
            let (a, b) = (random(4 * cols, 0.3), random(4 * rows, 0.3));
            let of = |half: &str| format!("{name}.{half}");
            writer = writer.tensor(&of("lora_a"), &[cols, 4], TensorType::F32, a);
            writer = writer.tensor(&of("lora_b"), &[4, rows], TensorType::F32, b);
        }
    }
    writer.write_to(path).unwrap();
}

fn adapter(path: &str, name: &str, scale: Option<f32>) -> v1::AdapterFile {
    v1::AdapterFile {
        path: path.to_owned(),
        name: name.to_owned(),
        scale,
    }
}

async fn load(
    http: &HttpDaemon,
    name: &str,
    lora: Vec<v1::AdapterFile>,
) -> Result<v1::Model, tonic::Status> {
    let request = v1::LoadRequest {
        path: format!("{LLAMA}.gguf"),
        name: name.to_owned(),
        lora,
        ..Default::default()
    };
    let mut events = http.daemon.models().load(request).await?.into_inner();
    while let Some(event) = events.message().await? {
        if let Some(v1::load_event::Event::Loaded(model)) = event.event {
            return Ok(model);
        }
    }
    panic!("the stream ended without a model");
}

/// A daemon with a model `m` that has two adapters: `up` at 1, and `down`, whose scale is 0.
async fn start() -> HttpDaemon {
    let http = HttpDaemon::start().await;
    let dir = http.daemon.dir.path();
    write_adapter(&dir.join("up.gguf"), 1, "llama");
    write_adapter(&dir.join("other name.gguf"), 2, "llama");
    let lora = vec![
        adapter("up.gguf", "", None),
        adapter("other name.gguf", "down", Some(0.0)),
    ];
    let model = load(&http, "m", lora).await.unwrap();
    let told = model
        .adapters
        .iter()
        .map(|a| (a.name.as_str(), a.scale, a.rank));
    assert_eq!(told.collect::<Vec<_>>(), [("up", 1.0, 4), ("down", 0.0, 4)]);
    http
}

/// The text that a prompt of `/completion` gets.
async fn text(http: &HttpDaemon, model: &str, lora: Option<Value>) -> String {
    let mut asked = json!({
        "model": model, "prompt": "Once upon a time", "temperature": 0, "n_predict": 24,
    });
    if let Some(lora) = lora {
        asked["lora"] = lora;
    }
    let answer = http.post("/completion", &asked).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["content"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_request_has_the_adapters_that_it_lists_or_names_or_the_models_defaults() {
    let http = start().await;
    let base = text(&http, "m", Some(json!([]))).await;
    let up = text(&http, "m", Some(json!([{"id": 0, "scale": 1.0}]))).await;
    let down = text(&http, "m", Some(json!([{"id": 1, "scale": 1.0}]))).await;
    let both = json!([{"id": 1, "scale": 1.0}, {"id": 0, "scale": 1.0}]);
    let both = text(&http, "m", Some(both)).await;
    let all = [&base, &up, &down, &both];
    for (i, one) in all.iter().enumerate() {
        assert!(!all[..i].contains(one), "{all:?}");
    }
    assert_eq!(text(&http, "m", None).await, up, "as it was loaded");
    assert_eq!(text(&http, "m+up", None).await, up);
    assert_eq!(
        text(&http, "m+down:latest", None).await,
        down,
        "0 is 1 by name"
    );
    assert_eq!(text(&http, "m+down+up", None).await, both);
    let listed = Some(json!([{"id": 0, "scale": 0.0}]));
    assert_eq!(text(&http, "m+up", listed).await, base, "a list decides");

    // The scales of requests that say nothing are changed.
    let set = json!([{"id": 1, "scale": 1.0}]);
    let answer = http.post("/lora-adapters?model=m", &set).await;
    assert_eq!(
        (answer.status, answer.json()["success"].clone()),
        (200, json!(true))
    );
    assert_eq!(text(&http, "m", None).await, down);
    assert_eq!(
        text(&http, "m+up", None).await,
        up,
        "by name it is as loaded"
    );
    let listed = http.get("/lora-adapters").await.json();
    let dir = http.daemon.dir.path().canonicalize().unwrap();
    let expected = json!({
        "id": 1, "name": "down", "path": dir.join("other name.gguf").display().to_string(),
        "scale": 1.0, "rank": 4, "task_name": "rhymes", "prompt_prefix": "",
    });
    assert_eq!((&listed[0]["scale"], &listed[1]), (&json!(0.0), &expected));
}

#[tokio::test]
async fn every_dialect_knows_a_model_with_its_adapter() {
    let http = start().await;
    let message = json!([{"role": "user", "content": "Once upon a time"}]);
    let said = async |target: &str, model: &str, more: Value, place: &str| {
        let mut asked = json!({"model": model, "temperature": 0, "stream": false});
        for (key, value) in more.as_object().unwrap() {
            asked[key] = value.clone();
        }
        let answer = http.post(target, &asked).await;
        assert_eq!(answer.status, 200, "{target} {model}: {answer:?}");
        let answer = answer.json();
        let found = answer.pointer(place).unwrap_or_else(|| panic!("{answer}"));
        found.as_str().unwrap_or_default().to_owned()
    };
    let list = json!([{"id": 1, "scale": 1.0}]);
    let chat = |more: Value| {
        let mut body = json!({"messages": message, "max_tokens": 24});
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        body
    };
    let prompt = json!({"prompt": "Once upon a time", "max_tokens": 24});
    let input = json!({"input": "Once upon a time", "max_output_tokens": 24});
    let options = json!({"messages": message, "options": {"temperature": 0, "num_predict": 24}});
    for (target, body, place) in [
        (
            "/v1/chat/completions",
            chat(json!({})),
            "/choices/0/message/content",
        ),
        ("/v1/completions", prompt, "/choices/0/text"),
        ("/v1/messages", chat(json!({})), "/content/0/text"),
        ("/v1/responses", input, "/output/0/content/0/text"),
        ("/api/chat", options, "/message/content"),
    ] {
        let down = said(target, "m+down", body.clone(), place).await;
        let listing = |list: Value| {
            let mut body = body.clone();
            match body.get_mut("options") {
                Some(options) => options["lora"] = list,
                None => body["lora"] = list,
            }
            body
        };
        let base = said(target, "m", listing(json!([])), place).await;
        assert_ne!(down, base, "{target}");
        let listed = said(target, "m", listing(list.clone()), place).await;
        assert_eq!(listed, down, "{target}");
    }
    let embed = json!({"input": ["Once upon a time"]});
    let vector = async |model: &str| {
        let mut asked = embed.clone();
        asked["model"] = model.into();
        let answer = http.post("/v1/embeddings", &asked).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["data"][0]["embedding"].clone()
    };
    assert_ne!(vector("m+down").await, vector("m+up").await);
    let names = http.get("/v1/models").await.json();
    let names: Vec<&str> = names["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|model| model["id"].as_str())
        .collect();
    assert!(
        names.contains(&"m+up") && names.contains(&"m+down"),
        "{names:?}"
    );

    // Over gRPC.
    let by_name = http
        .daemon
        .generate(greedy("m+down", "Once upon a time", 24));
    let by_name = by_name.await.unwrap().0;
    let mut request = greedy("m", "Once upon a time", 24);
    request.sampling.as_mut().unwrap().lora = Some(v1::AdapterScales {
        adapters: vec![v1::AdapterScale { id: 1, scale: 1.0 }],
    });
    assert_eq!(http.daemon.generate(request).await.unwrap().0, by_name);
    assert_ne!(
        http.daemon
            .generate(greedy("m", "Once upon a time", 24))
            .await
            .unwrap()
            .0,
        by_name
    );
}

#[tokio::test]
async fn adapters_that_are_not_there_are_refused_with_what_there_is() {
    let http = start().await;
    let refused = async |lora: Value| {
        let asked = json!({"model": "m", "prompt": "a", "n_predict": 1, "lora": lora});
        let answer = http.post("/completion", &asked).await;
        assert_eq!(answer.status, 400, "{answer:?}");
        answer.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    for (lora, words) in [
        (json!([{"id": 2, "scale": 1}]), "has those of ids 0 to 1"),
        (json!([{"id": -1, "scale": 1}]), "no adapter has the id -1"),
        (
            json!([{"id": 0, "scale": 1}, {"id": 0, "scale": 1}]),
            "listed twice",
        ),
        (json!([{"id": 0, "scale": 1e9}]), "from -1000 to 1000"),
        (json!([{"id": 0}]), "scale"),
        (json!({"id": 0, "scale": 1}), "lora"),
    ] {
        let message = refused(lora.clone()).await;
        assert!(message.contains(words), "{lora}: {message}");
    }
    let mut request = greedy("m", "a", 1);
    request.sampling.as_mut().unwrap().lora = Some(v1::AdapterScales {
        adapters: vec![v1::AdapterScale {
            id: 0,
            scale: f32::NAN,
        }],
    });
    let status = http.daemon.generate(request).await.unwrap_err();
    assert!(status.message().contains("NaN; give a number"), "{status}");
    let asked = json!({"model": "m+gone", "prompt": "a"});
    let unknown = http.post("/completion", &asked).await;
    assert_eq!(unknown.status, 404, "{unknown:?}");
    assert!(unknown.text.contains("m+up"), "{unknown:?}");
    load(&http, "plain", Vec::new()).await.unwrap();
    let asked = json!({"model": "plain", "prompt": "a", "lora": [{"id": 0, "scale": 1}]});
    let none = http.post("/completion", &asked).await;
    assert!(none.text.contains("has no adapters"), "{none:?}");
    assert_eq!(
        http.get("/lora-adapters?model=plain").await.json(),
        json!([])
    );
}

#[tokio::test]
async fn a_load_says_what_is_wrong_with_an_adapter() {
    let http = HttpDaemon::start().await;
    let dir = http.daemon.dir.path();
    write_adapter(&dir.join("a.gguf"), 1, "llama");
    write_adapter(&dir.join("foreign.gguf"), 1, "qwen3");
    let whole = std::fs::read(dir.join("a.gguf")).unwrap();
    std::fs::write(dir.join("cut.gguf"), &whole[..whole.len() / 2]).unwrap();
    let named = |path: &str| vec![adapter(path, "", None)];
    for (lora, words) in [
        (named("foreign.gguf"), "'qwen3', and this model is 'llama'"),
        (named("cut.gguf"), "cut.gguf"),
        (named("gone.gguf"), "gone.gguf"),
        (named(&format!("{LLAMA}.gguf")), "it is no LoRA adapter"),
        (vec![adapter("a.gguf", "", Some(f32::INFINITY))], "no scale"),
        (
            [named("a.gguf"), named("a.gguf")].concat(),
            "two adapters are called 'a'",
        ),
        (vec![adapter("a.gguf", "a+b", None)], "no adapter name"),
        (vec![adapter("a.gguf", "", None); 17], "at most 16"),
        (vec![adapter("", "", None)], "empty"),
    ] {
        let status = load(&http, "m", lora).await.unwrap_err();
        assert!(status.message().contains(words), "{words}: {status}");
    }
    load(&http, "m", named("a.gguf")).await.unwrap();
    // Loaded again as it is, and with others.
    assert_eq!(
        load(&http, "m", Vec::new()).await.unwrap().adapters.len(),
        1
    );
    assert_eq!(
        load(&http, "m", named("a.gguf"))
            .await
            .unwrap()
            .adapters
            .len(),
        1
    );
    write_adapter(&dir.join("b.gguf"), 2, "llama");
    let status = load(&http, "m", named("b.gguf")).await.unwrap_err();
    assert!(status.message().contains("unload it first"), "{status}");
}
