//! A model from its load to its unload.

use rocmforge_proto::v1;
use rocmforge_proto::v1::models_client::ModelsClient;
use rocmforged::End;
use tonic::Code;

use rocmforge_gguf::write::GgufWriter;

use crate::daemon::{Daemon, assert_status, connect, fixtures, greedy};

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
            ..Default::default()
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
async fn a_load_preloads_and_pins_where_it_is_asked_to() {
    let daemon = Daemon::start().await;
    let request = v1::LoadRequest {
        path: "tiny-qwen3-Q8_0.gguf".into(),
        name: "q".into(),
        pin: true,
        preload: true,
        ..Default::default()
    };
    let mut events = daemon.models().load(request).await.unwrap().into_inner();
    let (mut stages, mut last) = (Vec::new(), None);
    while let Some(event) = events.message().await.unwrap() {
        match event.event.unwrap() {
            v1::load_event::Event::Progress(progress) => stages.push(progress.stage()),
            v1::load_event::Event::Loaded(model) => last = Some(model),
        }
    }
    assert!(stages.is_sorted(), "{stages:?}");
    for stage in [
        v1::LoadStage::Metadata,
        v1::LoadStage::Tokenizer,
        v1::LoadStage::Plan,
        v1::LoadStage::Preload,
    ] {
        assert!(stages.contains(&stage), "{stages:?} lacks {stage:?}");
    }
    let model = last.expect("the model is the last message");
    let resident = |s: &v1::Segment| s.state() == v1::SegmentState::Resident && s.pinned;
    assert!(model.segments.iter().all(resident), "{:?}", model.segments);
    assert_eq!(model.resident_bytes, model.weight_bytes);

    let preload = v1::PreloadRequest {
        name: "q".into(),
        segments: vec![1, 1],
    };
    let mut events = daemon.models().preload(preload).await.unwrap().into_inner();
    let mut done = None;
    while let Some(event) = events.message().await.unwrap() {
        if let Some(v1::preload_event::Event::Done(outcome)) = event.event {
            done = Some(outcome);
        }
    }
    let done = done.expect("the outcome is the last message");
    assert_eq!((done.resident_segments, done.skipped_segments), (1, 0));

    let cleared = daemon.cache().clear(v1::ClearRequest::default()).await;
    let kept = cleared.unwrap().into_inner().kept;
    assert_eq!(kept.len(), model.segments.len(), "what is pinned stays");
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn a_load_names_a_model_that_drafts_for_it() {
    let daemon = Daemon::start().await;
    let load = async |path: &str, draft: &str| {
        let request = v1::LoadRequest {
            path: path.into(),
            name: "m".into(),
            draft: draft.into(),
            ..Default::default()
        };
        let mut events = daemon.models().load(request).await?.into_inner();
        let mut loaded = None;
        while let Some(event) = events.message().await? {
            if let Some(v1::load_event::Event::Loaded(model)) = event.event {
                loaded = Some(model);
            }
        }
        Ok::<_, tonic::Status>(loaded.expect("the model is the last message"))
    };
    let large = "tiny-qwen3moe-Q4_K_M.gguf";
    let refusals = [
        ("no-such", Code::NotFound, "tiny-llama-Q4_K_M"),
        (
            "tiny-qwen3-Q8_0",
            Code::InvalidArgument,
            "it has 2048 tokens there and 1216 here",
        ),
    ];
    for (draft, code, part) in refusals {
        let refused = load(large, draft).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
        assert!(refused.message().contains(part), "{refused}");
    }
    // A file in a model directory is loaded first.
    let model = load(large, "tiny-llama-Q4_K_M").await.unwrap();
    assert_eq!(model.draft, "tiny-llama-Q4_K_M");
    let list = daemon
        .models()
        .list(v1::ListModelsRequest {})
        .await
        .unwrap();
    let names: Vec<_> = list
        .into_inner()
        .models
        .into_iter()
        .map(|m| m.name)
        .collect();
    assert_eq!(names, ["m", "tiny-llama-Q4_K_M", "tiny-qwen3-Q8_0"]);
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn a_load_that_is_cancelled_while_it_preloads_leaves_nothing() {
    let daemon = Daemon::start().await;
    // A reader that takes next to nothing holds the preload up.
    let slow = connect(daemon.dir.path().join("s"), 1).await;
    let request = v1::LoadRequest {
        path: "tiny-llama-Q4_K_M.gguf".into(),
        name: "m".into(),
        pin: true,
        preload: true,
        ..Default::default()
    };
    let events = ModelsClient::new(slow).load(request).await.unwrap();
    let loaded = |n: usize| {
        let mut models = daemon.models();
        async move {
            for _ in 0..1000 {
                let list = models.list(v1::ListModelsRequest {}).await.unwrap();
                if list.into_inner().models.len() == n {
                    return;
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            panic!("there are never {n} models");
        }
    };
    loaded(1).await;
    drop(events);
    loaded(0).await;
    assert_eq!(daemon.stop().await, End::Drained);
}

/// Both counts were 0 for every model.
#[tokio::test]
async fn a_mixture_is_described_with_its_experts() {
    let daemon = Daemon::start().await;
    for (file, experts) in [
        ("tiny-qwen3moe-Q4_K_M.gguf", (16, 2)),
        ("tiny-llama-Q4_K_M.gguf", (0, 0)),
    ] {
        let model = daemon.load(file, "").await.unwrap();
        assert_eq!((model.n_expert, model.n_expert_used), experts, "{file}");
    }
    assert_eq!(daemon.stop().await, End::Drained);
}

#[tokio::test]
async fn a_name_is_made_of_the_file_when_none_is_given() {
    let daemon = Daemon::start().await;
    for (file, name) in [
        ("my model.GGUF", "my-model"),
        ("Qwen3-0.6B", "Qwen3-0.6B"),
        ("\u{e9}t\u{e9}!.gguf", "\u{e9}t\u{e9}-"),
    ] {
        let path = daemon.dir.path().join(file);
        std::os::unix::fs::symlink(fixtures().join("tiny-qwen3-Q8_0.gguf"), &path).unwrap();
        let model = daemon.load(path.display().to_string(), "").await.unwrap();
        assert_eq!(model.name, name);
    }
    assert_eq!(daemon.stop().await, End::Drained);
}

/// Copying another model over a file with its times kept once gave wrong text without a word; over
/// gRPC such a model was then refused until HTTP or a reload opened it again.
#[tokio::test]
async fn a_file_that_is_rewritten_with_its_time_put_back_is_opened_again() {
    let daemon = Daemon::start().await;
    let path = daemon.dir.path().join("copy.gguf");
    std::fs::copy(fixtures().join("tiny-llama-Q4_K_M.gguf"), &path).unwrap();
    daemon.load("copy.gguf", "copy").await.unwrap();
    let ask = || daemon.generate(greedy("copy", "Once upon a time", 8));
    let (text, _) = ask().await.unwrap();
    assert!(!text.is_empty());

    // Permissions are no content.
    std::thread::sleep(std::time::Duration::from_millis(30));
    let mut permissions = path.metadata().unwrap().permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&path, permissions.clone()).unwrap();
    assert_eq!(ask().await.unwrap().0, text);
    daemon.load("copy.gguf", "copy").await.unwrap();
    #[expect(
        clippy::permissions_set_readonly_false,
        reason = "the file is the test's"
    )]
    permissions.set_readonly(false);
    std::fs::set_permissions(&path, permissions).unwrap();
    assert_eq!(ask().await.unwrap().0, text);

    let other = fixtures().join("tiny-qwen3-Q8_0.gguf");
    daemon.load(other.to_str().unwrap(), "other").await.unwrap();
    let of_other = daemon.generate(greedy("other", "Once upon a time", 8));
    let (of_other, _) = of_other.await.unwrap();
    assert_ne!(of_other, text);
    for (from, expected) in [
        (other, of_other),
        (fixtures().join("tiny-llama-Q4_K_M.gguf"), text),
    ] {
        std::thread::sleep(std::time::Duration::from_millis(30));
        let modified = path.metadata().unwrap().modified().unwrap();
        std::fs::write(&path, std::fs::read(from).unwrap()).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_modified(modified).unwrap();
        assert_eq!(ask().await.unwrap().0, expected);
    }
    std::fs::write(&path, "no model").unwrap();
    assert_status(
        ask().await,
        Code::InvalidArgument,
        &["copy.gguf", "not a GGUF file"],
    );
}

#[tokio::test]
async fn files_of_other_kinds_are_told_apart() {
    let daemon = Daemon::start().await;
    for (kind, mentions) in [
        ("adapter", &["kind.gguf", "LoRA"]),
        ("mmproj", &["images", "text model"]),
        ("imatrix", &["importance matrix", "the file of the model"]),
    ] {
        let file = GgufWriter::new()
            .key("general.architecture", "llama")
            .key("general.type", kind)
            .zeros("t", &[4], rocmforge_gguf::TensorType::F32);
        file.write_to(&daemon.dir.path().join("kind.gguf")).unwrap();
        let refused = daemon.load("kind.gguf", "").await;
        assert_status(refused, Code::Unimplemented, mentions);
    }
    std::fs::write(
        daemon.dir.path().join("pointer.gguf"),
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    )
    .unwrap();
    let refused = daemon.load("pointer.gguf", "").await;
    assert_status(
        refused,
        Code::InvalidArgument,
        &["not a GGUF file", "git lfs pull"],
    );
    // A file that only the daemon may read can be linked into a model directory; what it begins
    // with is not told.
    std::fs::write(daemon.dir.path().join("secret.gguf"), "s3cr and more of it").unwrap();
    let refused = daemon.load("secret.gguf", "").await;
    let status = assert_status(refused, Code::InvalidArgument, &["not a GGUF file"]);
    assert!(!format!("{status:?}").contains("s3cr"), "{status:?}");
}
