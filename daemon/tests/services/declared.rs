//! Declared models: there from the start, under each of their names, on both skins.

use rocmforge_engine::api::Class;
use rocmforge_gguf::write::GgufWriter;
use rocmforge_proto::v1;
use rocmforged::defaults::{Defaults, Template};
use rocmforged::roles::Roles;
use rocmforged::socket::Socket;
use rocmforged::{Declared, End, HttpListeners};
use serde_json::{Value, json};
use tonic::Code;

use crate::daemon::{Daemon, assert_status, fixtures, greedy};
use crate::http::client::{Reply, unix};

/// A daemon that declares `small` with two aliases, and a model whose file is not there.
pub(crate) struct Declaring {
    pub(crate) daemon: Daemon,
    dir: tempfile::TempDir,
    _socket: Socket,
}

impl Declaring {
    async fn start() -> Self {
        let declared = |name: &str, file: &str, aliases: &[&str]| Declared {
            name: name.to_owned(),
            path: fixtures().join(file),
            aliases: aliases.iter().map(|&a| a.to_owned()).collect(),
            preload: false,
            pin: true,
            draft: None,
            mmproj: None,
            lora: Vec::new(),
            defaults: Defaults::default(),
        };
        let models = vec![
            declared("absent", "not-there.gguf", &[]),
            Declared {
                draft: Some("gpt-4o".to_owned()),
                ..declared("large", "tiny-qwen3moe-Q4_K_M.gguf", &[])
            },
            declared("small", "tiny-llama-Q4_K_M.gguf", &["gpt-4o", "org/m:7b"]),
            Declared {
                pin: false,
                defaults: Defaults {
                    temperature: Some(0.0),
                    top_k: Some(7),
                    max_tokens: Some(3),
                    class: Some(Class::Batch),
                    template: Some(Template {
                        path: "/etc/short.jinja".into(),
                        source: "{{ messages[-1].content }}".into(),
                    }),
                    ..Defaults::default()
                },
                ..declared("terse", "tiny-qwen3-Q8_0.gguf", &["short"])
            },
        ];
        Self::start_with(models).await
    }

    pub(crate) async fn start_with(models: Vec<Declared>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = Socket::bind(&dir.path().join("h")).unwrap();
        let http = HttpListeners {
            unix: Some(socket.listener().unwrap()),
            ..HttpListeners::default()
        };
        Self {
            daemon: Daemon::start_declaring(Roles::default(), http, models).await,
            dir,
            _socket: socket,
        }
    }

    pub(crate) async fn http(&self, method: &str, target: &str, body: &Value) -> Reply {
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        unix(&self.dir.path().join("h"), method, target, &[], &body).await
    }
}

fn names(list: &Value, key: &str) -> Vec<String> {
    let all = list.as_array().unwrap().iter();
    all.map(|model| model[key].as_str().unwrap().to_owned())
        .collect()
}

/// Whether a model thinks in requests that do not say so is a setting of the model.
#[tokio::test]
async fn a_declared_model_thinks_or_not_as_its_setting_has_it() {
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\
                  {% if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}";
    let declared = |name: &str, thinking: Option<bool>| Declared {
        name: name.to_owned(),
        path: fixtures().join("tiny-qwen3-Q8_0.gguf"),
        aliases: Vec::new(),
        preload: false,
        pin: false,
        draft: None,
        mmproj: None,
        lora: Vec::new(),
        defaults: Defaults {
            temperature: Some(0.0),
            max_tokens: Some(4),
            template: Some(Template {
                path: "/etc/hybrid.jinja".into(),
                source: source.into(),
            }),
            thinking,
            ..Defaults::default()
        },
    };
    for (setting, messages, chat) in [
        (None, false, true),
        (Some(true), true, true),
        (Some(false), false, false),
    ] {
        let it = Declaring::start_with(vec![declared("hybrid", setting)]).await;
        let mut asked = json!({
            "model": "hybrid", "max_tokens": 4, "messages": [{"role": "user", "content": "42 - 30 = ?"}],
        });
        let message = it.http("POST", "/v1/messages", &asked).await.json();
        let thinks = message["content"][0]["type"] == "thinking";
        assert_eq!(thinks, messages, "{setting:?}: {message}");
        let thinks = async |asked: &Value| {
            let chat = it.http("POST", "/v1/chat/completions", asked).await.json();
            chat["choices"][0]["message"]
                .get("reasoning_content")
                .is_some()
        };
        assert_eq!(thinks(&asked).await, chat, "{setting:?}");
        // What a request says counts.
        asked["chat_template_kwargs"] = json!({"enable_thinking": !chat});
        assert_eq!(thinks(&asked).await, !chat, "{setting:?}");
        assert_eq!(it.daemon.stop().await, End::Drained);
    }
}

#[tokio::test]
async fn an_alias_works_wherever_a_name_does() {
    let it = Declaring::start().await;
    let daemon = &it.daemon;
    // Over gRPC, which loads nothing by itself: it is there from the start.
    let (by_alias, _) = daemon.generate(greedy("gpt-4o", "Once", 4)).await.unwrap();
    let (by_name, _) = daemon.generate(greedy("small", "Once", 4)).await.unwrap();
    assert_eq!(by_alias, by_name);
    let asked = v1::GetModelRequest {
        name: "org/m:7b".into(),
    };
    let found = daemon.models().get(asked).await.unwrap().into_inner();
    assert_eq!(found.model.unwrap().name, "small");
    // One that drafts is there, too, whichever of both is declared first.
    let asked = v1::GetModelRequest {
        name: "large".into(),
    };
    let found = daemon.models().get(asked).await.unwrap().into_inner();
    assert_eq!(found.model.unwrap().draft, "small");
    let tokenized = daemon
        .inference()
        .tokenize(v1::TokenizeRequest {
            model: "gpt-4o".into(),
            text: "Once".into(),
            ..Default::default()
        })
        .await
        .unwrap()
        .into_inner();
    assert!(!tokenized.ids.is_empty());
    let unpinned = daemon
        .models()
        .unpin(v1::UnpinRequest {
            name: "gpt-4o".into(),
            segments: Vec::new(),
        })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(unpinned.pinned_segments, 0);
    let pin = || v1::PinRequest {
        name: "gpt-4o".into(),
        segments: Vec::new(),
    };
    let cleared = daemon
        .cache()
        .clear(v1::ClearRequest {
            model: Some("gpt-4o".into()),
            kv_disk: false,
        })
        .await
        .unwrap()
        .into_inner();
    assert!(cleared.freed_segments > 0);
    let mut preload = daemon
        .models()
        .preload(v1::PreloadRequest {
            name: "gpt-4o".into(),
            segments: Vec::new(),
        })
        .await
        .unwrap()
        .into_inner();
    let mut last = None;
    while let Some(event) = preload.message().await.unwrap() {
        last = event.event;
    }
    let Some(v1::preload_event::Event::Done(done)) = last else {
        panic!("{last:?}")
    };
    assert!(done.resident_segments > 0 && done.skipped_segments == 0);
    let pinned = daemon.models().pin(pin()).await.unwrap().into_inner();
    assert_eq!(pinned.pinned_segments, done.resident_segments);
    assert_status(
        daemon.load("tiny-llama-Q4_K_M.gguf", "gpt-4o").await,
        Code::InvalidArgument,
        &["'gpt-4o' is an alias of the model 'small'"],
    );

    // Over HTTP, in the words of each dialect.
    let list = it.http("GET", "/v1/models", &Value::Null).await.json();
    let listed = names(&list["data"], "id");
    for name in ["small", "gpt-4o", "org/m:7b", "terse", "short"] {
        let times = listed.iter().filter(|id| *id == name).count();
        assert_eq!(times, 1, "{name} in {listed:?}");
    }
    assert!(
        !listed.contains(&"tiny-llama-Q4_K_M".to_owned()),
        "it is declared under another name"
    );
    let one = it.http("GET", "/v1/models/org/m:7b", &Value::Null).await;
    assert_eq!(one.json()["root"], "small");
    let tags = it.http("GET", "/api/tags", &Value::Null).await.json();
    assert!(names(&tags["models"], "name").contains(&"gpt-4o".to_owned()));
    let asked = json!({"model": "gpt-4o:latest", "prompt": "Once", "stream": false});
    let answer = it.http("POST", "/api/generate", &asked).await;
    assert_eq!(answer.status, 200, "{answer:?}");

    // Unloaded by an alias, it comes back at its first use, pinned as declared.
    let asked = json!({"model": "gpt-4o"});
    assert_eq!(
        it.http("POST", "/models/unload", &asked).await.status,
        409,
        "it is pinned"
    );
    let unloaded = daemon
        .models()
        .unload(v1::UnloadRequest {
            name: "gpt-4o".into(),
            force: true,
        })
        .await
        .unwrap()
        .into_inner();
    assert!(unloaded.freed_bytes > 0);
    let again = it.http("POST", "/models/load", &asked).await;
    assert_eq!(again.status, 200, "{again:?}");
    let asked = v1::GetModelRequest {
        name: "small".into(),
    };
    let found = daemon.models().get(asked).await.unwrap().into_inner();
    let segments = found.model.unwrap().segments;
    assert!(!segments.is_empty() && segments.iter().all(|segment| segment.pinned));
    assert_eq!(it.daemon.stop().await, End::Drained);
}

/// Once it answered every request with an error until it was unloaded by hand, then the first one.
#[tokio::test]
async fn a_declared_file_that_changed_in_place_is_loaded_again() {
    let it = Declaring::start_with(vec![Declared {
        name: "m".to_owned(),
        path: "m.gguf".into(),
        aliases: vec!["a".to_owned()],
        preload: false,
        pin: true,
        draft: None,
        mmproj: None,
        lora: Vec::new(),
        defaults: Defaults::default(),
    }])
    .await;
    // The daemon's own folder is a model directory.
    let path = it.daemon.dir.path().join("m.gguf");
    std::fs::copy(fixtures().join("tiny-llama-Q4_K_M.gguf"), &path).unwrap();
    let asked = json!({"model": "a", "prompt": "Once", "max_tokens": 4, "temperature": 0});
    let ask = || it.http("POST", "/v1/completions", &asked);
    let text = |reply: Reply| reply.json()["choices"][0]["text"].clone();
    let before = ask().await;
    assert_eq!(before.status, 200, "{before:?}");
    let before = text(before);

    // As `rsync --inplace` does, another model over it.
    let other = std::fs::read(fixtures().join("tiny-qwen3-Q8_0.gguf")).unwrap();
    std::fs::write(&path, other).unwrap();
    let after = futures_util::future::join_all((0..4).map(|_| ask())).await;
    for reply in after {
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    let found = v1::GetModelRequest { name: "m".into() };
    let found = it.daemon.models().get(found).await.unwrap().into_inner();
    assert_eq!(found.model.unwrap().architecture, "qwen3");
    // A file that is no model is refused by name, each time.
    std::fs::write(&path, "no model").unwrap();
    for told in [ask().await, ask().await] {
        assert_eq!(told.status, 400, "{told:?}");
        assert!(told.text.contains("m.gguf"), "{told:?}");
    }
    std::fs::copy(fixtures().join("tiny-llama-Q4_K_M.gguf"), &path).unwrap();
    let again = ask().await;
    assert_eq!(again.status, 200, "{again:?}");
    assert_eq!(text(again), before);
    assert_eq!(it.daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn a_declared_file_that_is_not_there_costs_its_own_model_only() {
    let it = Declaring::start().await;
    let asked = json!({"model": "absent", "prompt": "Once"});
    let answer = it.http("POST", "/v1/completions", &asked).await;
    assert_eq!(answer.status, 404, "{answer:?}");
    assert!(answer.text.contains("not-there.gguf"), "{answer:?}");
    let list = it.http("GET", "/v1/models", &Value::Null).await.json();
    assert!(!names(&list["data"], "id").contains(&"absent".to_owned()));
    assert_eq!(it.daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn what_a_request_leaves_unset_is_as_declared_in_every_dialect() {
    let it = Declaring::start().await;
    let messages = json!([{"role": "user", "content": "Once"}]);
    let greedy_text = {
        let (text, done) = it
            .daemon
            .generate(greedy("terse", "Once", 3))
            .await
            .unwrap();
        assert_eq!(done.generated_tokens, 3);
        text
    };
    // Nothing but the model and the text, four times; drawn without a seed, texts would differ.
    let bare = v1::GenerateRequest {
        sampling: None,
        ..greedy("short", "Once", 1)
    };
    let (text, done) = it.daemon.generate(bare).await.unwrap();
    assert_eq!((text.as_str(), done.generated_tokens), (&*greedy_text, 3));
    let asked = json!({"model": "terse", "prompt": "Once"});
    let answer = it.http("POST", "/v1/completions", &asked).await.json();
    assert_eq!(answer["choices"][0]["text"], greedy_text);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let asked = json!({"model": "short:latest", "prompt": "Once", "raw": true, "stream": false});
    let answer = it.http("POST", "/api/generate", &asked).await.json();
    assert_eq!(answer["response"], greedy_text);
    // The template of the declaration is the message and nothing else.
    let asked = json!({"model": "terse", "messages": messages});
    let answer = it.http("POST", "/v1/chat/completions", &asked).await.json();
    let tokens = |answer: &Value, key: &str| answer["usage"][key].as_u64().unwrap();
    assert_eq!(tokens(&answer, "completion_tokens"), 3);
    let tokenized = json!({"model": "terse", "content": "Once"});
    let tokenized = it.http("POST", "/tokenize", &tokenized).await.json();
    let n = tokenized["tokens"].as_array().unwrap().len() as u64;
    assert_eq!(tokens(&answer, "prompt_tokens"), n);
    // What a request sets wins.
    let asked = json!({"model": "terse", "prompt": "Once", "max_tokens": 5});
    let answer = it.http("POST", "/v1/completions", &asked).await.json();
    assert_eq!(tokens(&answer, "completion_tokens"), 5);
    let asked = json!({"model": "terse", "messages": messages, "max_tokens": 5});
    let answer = it.http("POST", "/v1/messages", &asked).await.json();
    assert_eq!(
        answer["usage"]["output_tokens"], 5,
        "Anthropic's requests always set it"
    );

    let show = it
        .http("POST", "/api/show", &json!({"model": "short"}))
        .await
        .json();
    let parameters = show["parameters"].as_str().unwrap();
    let lines: Vec<Vec<&str>> = parameters
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        lines,
        [["temperature", "0"], ["top_k", "7"], ["num_predict", "3"]]
    );
    assert_eq!(show["template"], "{{ messages[-1].content }}");
    let props = it
        .http("GET", "/props?model=terse", &Value::Null)
        .await
        .json();
    let params = &props["default_generation_settings"]["params"];
    assert_eq!(
        (&params["top_k"], &params["n_predict"]),
        (&json!(7), &json!(3))
    );
    assert_eq!(params["repeat_penalty"], 1.0);
    let asked = v1::GetModelRequest {
        name: "short".into(),
    };
    let found = it.daemon.models().get(asked).await.unwrap().into_inner();
    let defaults = found.model.unwrap().defaults.unwrap();
    assert_eq!((defaults.top_k, defaults.top_p), (Some(7), None));
    assert_eq!(
        (&*defaults.priority, &*defaults.template),
        ("batch", "/etc/short.jinja")
    );
    assert_eq!(it.daemon.stop().await, End::Drained);
}

/// Names that are no text were in one of the two alone, and projectors in both.
#[tokio::test]
async fn the_files_and_the_models_of_the_api_agree() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    let it = Declaring::start_with(Vec::new()).await;
    let dir = it.daemon.dir.path();
    let fixture = fixtures().join("tiny-llama-Q4_K_M.gguf");
    std::fs::copy(&fixture, dir.join(OsStr::from_bytes(b"model\xe9.gguf"))).unwrap();
    for (file, kind) in [("vision.gguf", "clip"), ("speech.gguf", "whisper")] {
        let writer = GgufWriter::new().key("general.architecture", kind);
        let writer = writer.zeros("v.x", &[4], rocmforge_gguf::TensorType::F32);
        writer.write_to(&dir.join(file)).unwrap();
    }
    std::os::unix::fs::symlink("/nonexistent/dir/out.gguf", dir.join("out.gguf")).unwrap();
    let listed = it.http("GET", "/v1/models", &Value::Null).await.json();
    let ids = listed["data"].as_array().unwrap().iter();
    let mut ids: Vec<String> = ids.map(|m| m["id"].as_str().unwrap().to_owned()).collect();
    let mut models = it.daemon.models();
    let found = models.list_files(v1::ListFilesRequest {}).await;
    let found = found.unwrap().into_inner();
    let mut names: Vec<_> = found.files.iter().map(|file| file.name.clone()).collect();
    ids.sort();
    names.sort();
    assert_eq!(ids, names);
    assert!(ids.contains(&"model-".to_owned()), "{ids:?}");
    assert!(
        found
            .files
            .iter()
            .any(|file| file.path.ends_with("model\u{fffd}.gguf"))
    );
    for (file, words) in [
        ("out", "--model-dir /nonexistent/dir"),
        ("speech", "whisper"),
        ("vision", "images"),
    ] {
        assert!(!ids.contains(&file.to_owned()), "{ids:?}");
        let unserved = found.unserved.iter();
        let why: Vec<_> = unserved
            .filter(|f| f.path.ends_with(&format!("{file}.gguf")))
            .collect();
        assert!(why.len() == 1 && why[0].reason.contains(words), "{why:?}");
        assert_eq!(why[0].is_trouble, file == "out");
        // Who asks for it all the same is told what it is.
        let asked = json!({"model": file, "prompt": "x", "max_tokens": 1});
        let refused = it.http("POST", "/v1/completions", &asked).await;
        assert!(
            refused.status >= 400 && refused.text.contains(words),
            "{refused:?}"
        );
        assert!(!refused.text.contains("tokenizer"), "{refused:?}");
    }
    // One that leads nowhere is told so, and not as one outside.
    std::os::unix::fs::symlink("gone.gguf", dir.join("broken.gguf")).unwrap();
    let asked = json!({"model": "broken", "prompt": "x", "max_tokens": 1});
    let refused = it.http("POST", "/v1/completions", &asked).await;
    assert_eq!(refused.status, 404, "{refused:?}");
    assert!(refused.text.contains("where nothing is"), "{refused:?}");
    let asked = json!({"model": "model-", "prompt": "Once", "max_tokens": 1});
    assert_eq!(it.http("POST", "/v1/completions", &asked).await.status, 200);
    assert!(
        found.directories.iter().all(|dir| dir.trouble.is_empty()),
        "{found:?}"
    );
    it.daemon.stop().await;
}
