//! Models that are opened, loaded again and closed as their files and their users come and go.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use rocmforge_engine::api::{Asker, Budget, GenerateEvent, GenerateRequest, SamplingParams};
use rocmforge_engine::{DeviceChoice, EngineConfig};
use rocmforge_failure::{Kind, Reason};
use rocmforge_tokenizer::Renderer;

use super::*;
use crate::Limits;
use crate::defaults::Defaults;
use crate::files::Available;
use crate::idle_models::Bounds;
use crate::model_files::ModelDirs;
use crate::refusals;
use crate::roles::Roles;

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";
const QWEN: &str = "tiny-qwen3-Q8_0.gguf";

/// A service over a directory of its own.
struct Ground {
    service: Arc<Service>,
    dir: tempfile::TempDir,
}

fn fixture(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/fixtures");
    fixtures.join(name)
}

impl Ground {
    fn new(bounds: Option<Bounds>) -> Self {
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
        let dir = tempfile::tempdir().unwrap();
        let dirs = ModelDirs::new(&[dir.path().to_owned()]).unwrap();
        let templates = Renderer::in_process();
        let mut service = Service::new(engine, dirs, limits, templates, Roles::default());
        service.bounds = bounds.unwrap_or(service.bounds);
        Self {
            service: Arc::new(service),
            dir,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.gguf"))
    }

    /// Copies a fixture over the file of this name, as `cp` does: into the inode that is there.
    fn copy(&self, file: &str, name: &str) {
        fs::copy(fixture(file), self.path(name)).unwrap();
    }

    /// The same by another file that is renamed.
    fn rename_over(&self, file: &str, name: &str) {
        let new = self.dir.path().join("new");
        fs::copy(fixture(file), &new).unwrap();
        fs::rename(new, self.path(name)).unwrap();
    }

    async fn ask(&self, name: &str) -> Result<Arc<LoadedModel>, Failure> {
        let arrival = Arrival::now(None);
        let found = self.service.model_at_first_use("model", name, &arrival);
        let model = found.await?;
        // Its file can be read.
        let request = request(&model, 1);
        let mut events = self.service.engine.generate(request).unwrap();
        loop {
            match events.next().await.unwrap() {
                GenerateEvent::Piece { .. } => {}
                GenerateEvent::Done(_) => return Ok(model),
                GenerateEvent::Failed(error) => return Err(refusals::from_engine(&error)),
            }
        }
    }

    /// The architecture of the model that a request with this name gets.
    async fn architecture(&self, name: &str) -> &'static str {
        self.ask(name).await.unwrap().model().info().architecture
    }

    fn loaded(&self) -> Vec<String> {
        let snapshot = self.service.engine.snapshot();
        let models = snapshot.models.iter();
        let mut names: Vec<_> = models.map(|s| s.model.name().to_owned()).collect();
        names.sort();
        names
    }

    fn origin(&self, name: &str) -> Origin {
        let loaded = self.service.engine.model(name).unwrap();
        self.service.origins.of(&loaded).unwrap().origin
    }

    async fn load(&self, name: &str, pin: bool) {
        let path = self.path(name);
        let load = Load::checked(path.to_str().unwrap(), name, pin, false).unwrap();
        let (steps, _reader) = mpsc::channel(8);
        let never = std::future::pending();
        self.service.load(&load, &steps, never).await.unwrap();
    }
}

fn request(model: &Arc<LoadedModel>, tokens: u32) -> GenerateRequest {
    GenerateRequest {
        model: Arc::clone(model),
        prompt: vec![5, 6, 7],
        sampling: SamplingParams::default(),
        max_tokens: Some(tokens),
        n_ctx: None,
        stop: Vec::new(),
        decoding: Default::default(),
        deadline: None,
        max_gap: None,
        asker: Asker::default(),
        reuse: false,
        adapters: None,
    }
}

fn declared(name: &str, path: PathBuf) -> Declared {
    Declared {
        name: name.to_owned(),
        path,
        aliases: Vec::new(),
        preload: false,
        pin: false,
        draft: None,
        mmproj: None,
        lora: Vec::new(),
        defaults: Defaults::default(),
    }
}

/// Such a model answered 500 for good once, also after a reload.
#[tokio::test]
async fn a_file_that_is_copied_over_is_opened_again_by_the_next_request() {
    let ground = Ground::new(None);
    for name in ["opened", "declared", "by-hand"] {
        ground.copy(LLAMA, name);
    }
    let path = ground.path("declared");
    ground.service.declare(vec![declared("declared", path)]);
    ground.load("by-hand", true).await;
    for name in ["opened", "declared", "by-hand"] {
        assert_eq!(ground.architecture(name).await, "llama");
    }
    for (file, architecture) in [(QWEN, "qwen3"), (LLAMA, "llama")] {
        for name in ["opened", "declared", "by-hand"] {
            ground.copy(file, name);
            assert_eq!(ground.architecture(name).await, architecture, "{name}");
            ground.rename_over(LLAMA, name);
            assert_eq!(ground.architecture(name).await, "llama", "{name}");
            fs::remove_file(ground.path(name)).unwrap();
            ground.copy(file, name);
            assert_eq!(ground.architecture(name).await, architecture, "{name}");
        }
    }
    assert_eq!(ground.origin("opened"), Origin::FirstUse);
    assert_eq!(ground.origin("by-hand"), Origin::ByHand);
    assert!(matches!(ground.origin("declared"), Origin::Declared(_)));
    // What was pinned is.
    let snapshot = ground.service.engine.snapshot();
    let by_hand = snapshot.models.iter().find(|s| s.model.name() == "by-hand");
    assert!(by_hand.unwrap().segments.iter().all(|s| s.pinned));
}

/// A reload loads all of them again, and says which could not be.
#[tokio::test]
async fn a_reload_loads_changed_files_again_whoever_opened_them() {
    let ground = Ground::new(None);
    for name in ["opened", "declared", "by-hand", "broken"] {
        ground.copy(LLAMA, name);
    }
    let path = ground.path("declared");
    ground.service.declare(vec![declared("declared", path)]);
    ground.load("by-hand", false).await;
    for name in ["opened", "declared", "broken"] {
        ground.ask(name).await.unwrap();
    }
    for name in ["opened", "declared", "by-hand"] {
        ground.copy(QWEN, name);
    }
    fs::write(ground.path("broken"), "no model").unwrap();
    let registration = ground.service.renew_declared().await;
    let refused: Vec<_> = registration.refused.iter().map(|(name, _)| name).collect();
    assert_eq!(refused, ["broken"]);
    for name in ["opened", "declared", "by-hand"] {
        let model = ground.service.engine.model(name).unwrap();
        assert_eq!(model.model().info().architecture, "qwen3", "{name}");
    }
}

/// A copy that is under way, or a bad file, is told; the next request tries again.
#[tokio::test]
async fn a_file_that_cannot_be_loaded_is_told_to_each_request_until_it_can() {
    let ground = Ground::new(None);
    for name in ["opened", "by-hand"] {
        ground.copy(LLAMA, name);
    }
    ground.load("by-hand", false).await;
    ground.ask("opened").await.unwrap();
    for name in ["opened", "by-hand"] {
        let whole = fs::read(fixture(QWEN)).unwrap();
        fs::write(ground.path(name), &whole[..1000]).unwrap();
        for _ in 0..2 {
            let failure = ground.ask(name).await.unwrap_err();
            assert_eq!(
                failure.reason(),
                Reason::BadModelFile,
                "{name}: {failure:?}"
            );
        }
        fs::write(ground.path(name), &whole).unwrap();
        assert_eq!(ground.architecture(name).await, "qwen3", "{name}");
    }
}

#[tokio::test]
async fn a_draft_model_whose_file_changes_is_loaded_again_with_the_model_it_drafts_for() {
    let ground = Ground::new(None);
    ground.copy(LLAMA, "large");
    ground.copy(LLAMA, "small");
    let mut large = declared("large", ground.path("large"));
    large.draft = Some("small".to_owned());
    ground.service.declare(vec![large]);
    ground.ask("large").await.unwrap();
    let before = ground.service.engine.model("small").unwrap();
    // Of the same content, since a draft model needs the vocabulary.
    ground.copy(LLAMA, "small");
    ground.ask("large").await.unwrap();
    let after = ground.service.engine.model("small").unwrap();
    assert!(!Arc::ptr_eq(&before, &after));
    let snapshot = ground.service.engine.snapshot();
    let large = snapshot.models.iter().find(|s| s.model.name() == "large");
    assert_eq!(large.unwrap().draft.as_deref(), Some("small"));
    // One that drafts is not closed.
    drop((before, after, snapshot));
    assert!(!ground.service.close_one().await);
}

#[tokio::test]
async fn a_replaced_file_waits_for_requests_that_read_the_old_one() {
    let ground = Ground::new(None);
    ground.copy(LLAMA, "m");
    let old = ground.ask("m").await.unwrap();
    let request = GenerateRequest {
        sampling: SamplingParams {
            temperature: 50.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: Some(3),
            ..SamplingParams::default()
        },
        ..request(&old, 800)
    };
    let mut events = ground.service.engine.generate(request).unwrap();
    let first = events.next().await;
    assert!(matches!(first, Some(GenerateEvent::Piece { .. })));
    ground.rename_over(QWEN, "m");
    assert_eq!(ground.architecture("m").await, "llama");
    drop(events);
    let mut snapshots = ground.service.engine.watch();
    let ended = snapshots.wait_for(|s| s.running == 0).await;
    drop(ended.unwrap());
    assert_eq!(ground.architecture("m").await, "qwen3");
}

#[tokio::test]
async fn many_first_requests_open_a_file_once_and_all_hear_of_a_failure() {
    let ground = Arc::new(Ground::new(None));
    ground.copy(LLAMA, "m");
    fs::write(ground.path("bad"), "no model at all").unwrap();
    let ask = |name: &'static str| {
        let ground = Arc::clone(&ground);
        tokio::spawn(async move {
            let arrival = Arrival::now(None);
            let found = ground.service.model_at_first_use("model", name, &arrival);
            found.await
        })
    };
    let asked: Vec<_> = (0..50).map(|_| ask("m")).collect();
    // One who goes away takes nothing along.
    asked[0].abort();
    let mut models = Vec::new();
    for asked in asked.into_iter().skip(1) {
        models.push(asked.await.unwrap().unwrap());
    }
    assert!(models.iter().all(|model| Arc::ptr_eq(model, &models[0])));
    let asked: Vec<_> = (0..20).map(|_| ask("bad")).collect();
    for asked in asked {
        let failure = asked.await.unwrap().unwrap_err();
        assert_eq!(failure.reason(), Reason::BadModelFile);
    }
    assert_eq!(ground.loaded(), ["m"]);
}

#[tokio::test]
async fn models_that_requests_opened_are_closed_least_recently_used_first() {
    let two = Bounds {
        bytes: u64::MAX,
        descriptors: 2,
        models: 100,
    };
    let ground = Ground::new(Some(two));
    for name in ["a", "b", "c", "d", "declared", "by-hand"] {
        ground.copy(LLAMA, name);
    }
    let path = ground.path("declared");
    ground.service.declare(vec![declared("declared", path)]);
    ground.load("by-hand", false).await;
    ground.ask("declared").await.unwrap();
    for name in ["a", "b", "a", "c"] {
        ground.ask(name).await.unwrap();
    }
    assert_eq!(ground.loaded(), ["a", "by-hand", "c", "declared"]);
    // One that is held stays, and is closed later.
    let held = ground.ask("a").await.unwrap();
    ground.ask("c").await.unwrap();
    ground.ask("d").await.unwrap();
    assert_eq!(ground.loaded(), ["a", "by-hand", "d", "declared"]);
    ground.ask("b").await.unwrap();
    assert_eq!(ground.loaded(), ["a", "b", "by-hand", "declared"]);
    drop(held);
    ground.ask("c").await.unwrap();
    assert_eq!(ground.loaded(), ["b", "by-hand", "c", "declared"]);
}

/// A call that loads a model, or a pin, keeps it open; a name is not in a load's way.
#[tokio::test]
async fn a_model_that_somebody_loads_by_hand_stays_open() {
    let none = Bounds {
        bytes: 0,
        descriptors: 0,
        models: 0,
    };
    let ground = Ground::new(Some(none));
    ground.copy(LLAMA, "a");
    ground.copy(LLAMA, "b");
    ground.ask("a").await.unwrap();
    ground.load("a", false).await;
    ground.ask("b").await.unwrap();
    assert_eq!(ground.loaded(), ["a", "b"]);
    // The file of a name that a request opened may be another by now.
    ground.copy(QWEN, "b");
    ground.load("b", false).await;
    assert_eq!(ground.architecture("b").await, "qwen3");
    assert!(!ground.service.close_one().await);
}

/// Their space on the disk was kept until somebody unloaded them.
#[tokio::test]
async fn a_deleted_file_is_closed_and_its_name_is_not_found() {
    let ground = Ground::new(None);
    for name in ["idle", "asked", "held", "by-hand"] {
        ground.copy(LLAMA, name);
    }
    ground.load("by-hand", false).await;
    for name in ["idle", "asked"] {
        ground.ask(name).await.unwrap();
    }
    let held = ground.ask("held").await.unwrap();
    ground.service.available().await.unwrap();
    for name in ["idle", "asked", "held", "by-hand"] {
        fs::remove_file(ground.path(name)).unwrap();
    }
    let listed = ground.service.available().await.unwrap();
    let listed: Vec<&str> = listed.iter().map(Available::name).collect();
    assert_eq!(listed, ["by-hand"]);
    let failure = ground.ask("asked").await.unwrap_err();
    assert_eq!(failure.kind(), Kind::NotFound);
    assert_eq!(ground.loaded(), ["by-hand", "held", "idle"]);
    let closing = tokio::spawn(Service::close_deleted(Arc::downgrade(&ground.service)));
    until_loaded(&ground, &["by-hand", "held"]).await;
    drop(held);
    until_loaded(&ground, &["by-hand"]).await;
    // What a call has loaded stays until a call unloads it.
    ground.ask("by-hand").await.unwrap();
    closing.abort();
}

/// While a model is being closed no snapshot has it, but the engine does: the first request for a
/// file that was written again meanwhile got 400 `LOADED_FILE_CHANGED`.
#[tokio::test]
async fn a_file_that_comes_back_while_its_model_is_closed_is_opened() {
    for is_by_hand in [false, true] {
        let ground = Ground::new(None);
        ground.copy(LLAMA, "a");
        let held = ground.ask("a").await.unwrap();
        fs::remove_file(ground.path("a")).unwrap();
        let service = Arc::clone(&ground.service);
        let closing = tokio::spawn(async move { service.close("a", "its file is deleted").await });
        while !ground.loaded().is_empty() && !closing.is_finished() {
            tokio::task::yield_now().await;
        }
        ground.copy(QWEN, "a");
        if is_by_hand {
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(5)).await;
                drop(held);
            });
            ground.load("a", false).await;
        }
        assert_eq!(ground.architecture("a").await, "qwen3");
    }
}

async fn until_loaded(ground: &Ground, names: &[&str]) {
    let until = async {
        while ground.loaded() != names {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(60), until).await;
    assert!(in_time.is_ok(), "{:?} are loaded", ground.loaded());
}
