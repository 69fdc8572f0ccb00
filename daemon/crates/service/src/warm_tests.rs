//! What was in use comes back in another service over the same directory.

use std::fs;
use std::num::NonZeroUsize;

use rocmforge_engine::api::{Asker, Budget, GenerateEvent, GenerateRequest, SamplingParams};
use rocmforge_engine::{DeviceChoice, EngineConfig};
use rocmforge_tokenizer::Renderer;
use serde_json::{Value, json};

use super::*;
use crate::Limits;
use crate::declared::Declared;
use crate::defaults::Defaults;
use crate::model_files::ModelDirs;
use crate::roles::Roles;

const PATIENCE: Duration = Duration::from_secs(60);

/// A directory of models, and the note of the services over it.
struct Ground(tempfile::TempDir);

impl Ground {
    fn new(names: &[&str]) -> Self {
        let ground = Self(tempfile::tempdir().unwrap());
        for name in names {
            ground.copy("tiny-llama-Q4_K_M.gguf", name);
        }
        ground
    }

    fn copy(&self, fixture: &str, name: &str) {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures");
        fs::copy(fixtures.join(fixture), self.path(name)).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(format!("{name}.gguf"))
    }

    fn note(&self) -> PathBuf {
        self.0.path().join("warm.json")
    }

    /// The note, changed.
    fn edit(&self, change: impl FnOnce(&mut Value)) {
        let mut note = serde_json::from_slice(&fs::read(self.note()).unwrap()).unwrap();
        change(&mut note);
        fs::write(self.note(), note.to_string()).unwrap();
    }

    /// The names and paths of the note.
    fn noted(&self) -> Vec<(String, Option<String>)> {
        let bytes = fs::read(self.note()).unwrap();
        let models = Note::parse(&bytes).unwrap().into_models();
        models.into_iter().map(|m| (m.name, m.path)).collect()
    }

    fn service(&self) -> Arc<Service> {
        let (engine, _) = rocmforge_engine::start(EngineConfig {
            device: DeviceChoice::Host,
            threads: NonZeroUsize::new(1),
            budget: Budget::Bytes(64 << 20),
            ..EngineConfig::default()
        })
        .unwrap();
        let limits = Limits {
            n_ctx_max: 1024,
            max_sequences: 2,
            threads: 1,
        };
        let dirs = ModelDirs::new(&[self.0.path().to_owned()]).unwrap();
        let templates = Renderer::in_process();
        Arc::new(Service::new(
            engine,
            dirs,
            limits,
            templates,
            Roles::default(),
        ))
    }

    /// A service that has brought back what the note says.
    async fn warm(&self) -> Arc<Service> {
        let service = self.service();
        keep_warm(&service, self.note()).await;
        service
    }
}

/// Brings back, and waits until this service's first note is written.
async fn keep_warm(service: &Arc<Service>, note: PathBuf) {
    tokio::spawn(Service::keep_warm(Arc::downgrade(service), note));
    let is_written = || {
        let ledger = service.warmth.0.get();
        ledger.is_some_and(|ledger| ledger.state().written.is_some())
    };
    let begin = Instant::now();
    while !is_written() {
        assert!(begin.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A request that opens a model, if it is a file, and reads all of its weights.
async fn ask(service: &Arc<Service>, name: &str) {
    let arrival = Arrival::now(None);
    let model = service.model_at_first_use("model", name, &arrival);
    let request = GenerateRequest {
        model: model.await.unwrap(),
        prompt: vec![5, 6, 7],
        sampling: SamplingParams::default(),
        max_tokens: Some(1),
        n_ctx: None,
        stop: Vec::new(),
        decoding: Default::default(),
        deadline: None,
        max_gap: None,
        asker: Asker::default(),
        reuse: false,
        adapters: None,
    };
    let mut events = service.engine.generate(request).unwrap();
    while let Some(event) = events.next().await {
        assert!(!matches!(event, GenerateEvent::Failed(_)), "{event:?}");
    }
}

/// The models that are loaded, each with how many of its segments are resident, of how many.
fn there(service: &Arc<Service>) -> Vec<(String, usize, usize)> {
    let snapshot = service.engine.snapshot();
    let of = |status: &ModelStatus| {
        let segments = status.segments.iter();
        let resident = segments.filter(|s| s.state == SegmentState::Resident);
        let name = status.model.name().to_owned();
        (name, resident.count(), status.segments.len())
    };
    let mut all: Vec<_> = snapshot.models.iter().map(of).collect();
    all.sort();
    all
}

/// The names of the loaded models whose weights are all resident.
fn resident(service: &Arc<Service>) -> Vec<String> {
    let whole = there(service).into_iter().filter(|(_, n, of)| n == of);
    whole.map(|(name, ..)| name).collect()
}

/// What a service that is warm notes as its last act.
async fn stop(service: &Arc<Service>) {
    service
        .note_at_stop()
        .expect("it keeps a note")
        .await
        .unwrap();
    service.drain();
}

/// A ground on whose service "a" and "b" were asked for, "b" last, and that has stopped.
async fn used(names: &[&str]) -> Ground {
    let ground = Ground::new(names);
    let service = ground.warm().await;
    for name in ["a", "b"] {
        ask(&service, name).await;
    }
    stop(&service).await;
    ground
}

#[tokio::test]
async fn what_was_used_comes_back_and_nothing_else() {
    let ground = used(&["a", "b", "c"]).await;
    let path = |name| Some(ground.path(name).to_str().unwrap().to_owned());
    let mut noted = ground.noted();
    noted.sort();
    let expected = ["a", "b"].map(|name| (name.to_owned(), path(name)));
    assert_eq!(noted, expected);

    let service = ground.warm().await;
    assert_eq!(resident(&service), ["a", "b"], "{:?}", there(&service));
    assert_eq!(service.engine.snapshot().models.len(), 2);
    assert_eq!(service.models_coming_back(), 0);
    // So it does again, although nobody has asked for anything.
    stop(&service).await;
    assert_eq!(resident(&ground.warm().await), ["a", "b"]);
}

#[tokio::test]
async fn what_comes_back_is_as_long_unused_as_it_was() {
    let ground = used(&["a", "b"]).await;
    ground.edit(|note| {
        for model in note["models"].as_array_mut().unwrap() {
            model["idle_s"] = json!(if model["name"] == "a" { 1000 } else { 2000 });
        }
    });
    let service = ground.warm().await;
    let idle = |name: &str| {
        let model = service.engine.model(name).unwrap();
        let used_at = service.origins.of(&model).unwrap().used_at.unwrap();
        used_at.elapsed().as_secs()
    };
    assert!((1000..1100).contains(&idle("a")), "{}", idle("a"));
    assert!((2000..2100).contains(&idle("b")), "{}", idle("b"));
    ask(&service, "b").await;
    assert!(idle("b") < 100);
    stop(&service).await;
    let names: Vec<_> = ground.noted().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["b", "a"], "last used first");
}

#[tokio::test]
async fn files_that_are_gone_or_changed_do_not_come_back() {
    let ground = used(&["a", "b"]).await;
    ground.copy("tiny-qwen3-Q8_0.gguf", "a");
    assert_eq!(resident(&ground.warm().await), ["b"]);

    let ground = used(&["a", "b"]).await;
    fs::remove_file(ground.path("b")).unwrap();
    let service = ground.warm().await;
    assert_eq!(resident(&service), ["a"]);
    assert_eq!(there(&service).len(), 1);
}

#[tokio::test]
async fn what_was_resident_comes_back_and_no_more_of_it() {
    let ground = used(&["a", "b"]).await;
    ground.edit(|note| {
        for model in note["models"].as_array_mut().unwrap() {
            match model["name"] == "a" {
                true => model["resident"] = json!([[1, 2], [4, 4]]),
                // A version that divides it into others.
                false => model["n_segments"] = json!(1000),
            }
        }
    });
    let service = ground.warm().await;
    let snapshot = service.engine.snapshot();
    let of = |name: &str| {
        let status = snapshot.models.iter().find(|s| s.model.name() == name);
        let segments = (0..).zip(status.unwrap().segments.iter());
        let there = segments.filter(|(_, s)| s.state == SegmentState::Resident);
        runs(there.map(|(index, _)| index))
    };
    assert_eq!(of("a"), [[1, 2], [4, 4]]);
    assert!(of("b").is_empty(), "{:?}", of("b"));
}

#[tokio::test]
async fn declared_models_come_as_declared_and_their_weights_from_the_note() {
    let declared = |path| Declared {
        name: "d".to_owned(),
        path,
        aliases: Vec::new(),
        preload: false,
        pin: false,
        draft: None,
        mmproj: None,
        lora: Vec::new(),
        defaults: Defaults::default(),
    };
    let ground = Ground::new(&["a"]);
    let service = ground.service();
    service.declare(vec![declared(ground.path("a"))]);
    service.register_declared().await;
    keep_warm(&service, ground.note()).await;
    ask(&service, "d").await;
    stop(&service).await;
    assert_eq!(ground.noted(), [("d".to_owned(), None)]);

    let service = ground.service();
    service.declare(vec![declared(ground.path("a"))]);
    // Who brings back waits for the registration.
    let registering = Arc::clone(&service);
    let registering = tokio::spawn(async move { registering.register_declared().await });
    tokio::task::yield_now().await;
    keep_warm(&service, ground.note()).await;
    assert_eq!(resident(&service), ["d"]);
    assert!(registering.await.unwrap().refused.is_empty());

    // Not declared any more, it does not come: the file has another name.
    stop(&service).await;
    assert!(there(&ground.warm().await).is_empty());
}

#[tokio::test]
async fn a_model_that_was_not_asked_for_is_not_noted() {
    let ground = Ground::new(&["a"]);
    let service = ground.warm().await;
    let path = ground.path("a");
    let load = crate::load::Load::checked(path.to_str().unwrap(), "x", false, false).unwrap();
    let (steps, _reader) = tokio::sync::mpsc::channel(8);
    let loaded = service.load(&load, &steps, std::future::pending()).await;
    assert!(loaded.is_ok());
    stop(&service).await;
    assert!(ground.noted().is_empty());
}

#[tokio::test]
async fn a_stop_before_all_is_back_notes_what_was_coming() {
    let ground = used(&["a", "b"]).await;
    let service = ground.service();
    let ledger = Arc::new(Ledger {
        path: ground.note(),
        state: Mutex::default(),
    });
    let models = ledger.take().expect("a note").into_models();
    ledger.state().coming = models;
    assert_eq!(service.models_coming_back(), 0, "no note is kept yet");
    service.warmth.0.set(Arc::clone(&ledger)).unwrap();
    assert_eq!(service.models_coming_back(), 2);
    // One of them is asked for meanwhile.
    ask(&service, "a").await;
    stop(&service).await;
    assert_eq!(resident(&ground.warm().await), ["a", "b"]);

    // Once the last note is written, no other comes.
    let empty = Note::of(Vec::new());
    ledger.write(empty, Instant::now() + PATIENCE * 10, false);
    assert_eq!(ground.noted().len(), 2);
}

#[tokio::test]
async fn a_note_that_cannot_be_used_is_replaced_and_the_service_starts() {
    let ground = used(&["a", "b"]).await;
    let whole = fs::read(ground.note()).unwrap();
    let newer = br#"{"version": 99, "models": "all"}"#;
    for content in [&b""[..], b"\xff\xfe\0", &whole[..whole.len() / 2], newer] {
        fs::write(ground.note(), content).unwrap();
        let service = ground.warm().await;
        assert!(there(&service).is_empty());
        assert!(ground.noted().is_empty());
        ask(&service, "a").await;
        stop(&service).await;
        assert_eq!(ground.noted().len(), 1);
    }
    // Without a note, and without a place for one.
    fs::remove_file(ground.note()).unwrap();
    assert!(there(&ground.warm().await).is_empty());
    let service = ground.service();
    keep_warm(&service, ground.0.path().join("nowhere/warm.json")).await;
    ask(&service, "a").await;
    stop(&service).await;
}

#[tokio::test]
async fn a_model_whose_return_ended_two_daemons_does_not_come_back() {
    let ground = used(&["a", "b"]).await;
    for tries in 0..2 {
        ground.edit(|note| assert_eq!(note["tries"], tries));
        let ledger = Ledger {
            path: ground.note(),
            state: Mutex::default(),
        };
        assert!(ledger.take().is_some(), "killed behind this");
    }
    let service = ground.warm().await;
    assert!(there(&service).is_empty());
    ask(&service, "a").await;
    stop(&service).await;
    assert_eq!(resident(&ground.warm().await), ["a"]);
}
