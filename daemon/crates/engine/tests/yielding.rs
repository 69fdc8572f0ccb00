//! Another process uses the card: memory is given up for it while requests go on, and taken again.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_engine::api::{Budget, GenerateEvent, GenerateRequest, IdleRelease, Snapshot, When};
use rocmforge_engine::{EngineConfig, EngineHandle, LoadedModel, Places, YieldTo};
use rocmforge_fake_hip::Live;

use crate::fake::{Running, Runtime, gpu_config};
use crate::requests::{greedy, load, load_endless, run, until};

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";
const MIB: u64 = 1 << 20;
const BUDGET: u64 = 16 * MIB;

/// The kernel's files of the card, as a test says.
struct Kernel(tempfile::TempDir);

impl Kernel {
    fn new() -> Self {
        let kernel = Self(tempfile::tempdir().unwrap());
        kernel.shows(100 * MIB, 0);
        kernel
    }

    /// The card's bytes in use, and the share of the time that it is busy.
    fn shows(&self, used: u64, busy: u32) {
        let card = self.0.path().join("sys/bus/pci/devices/0000:01:00.0");
        fs::create_dir_all(&card).unwrap();
        let write = |name: &str, number: u64| {
            let new = card.join("new");
            fs::write(&new, format!("{number}\n")).unwrap();
            fs::rename(new, card.join(name)).unwrap();
        };
        write("mem_info_vram_used", used);
        write("gpu_busy_percent", u64::from(busy));
    }

    fn root(&self) -> &Path {
        self.0.path()
    }
}

fn config(kernel: &Kernel, to: u64) -> EngineConfig {
    EngineConfig {
        budget: Budget::Bytes(BUDGET),
        cpu_compute: When::Never,
        host_budget: Some(Budget::Bytes(8 * MIB)),
        host_kv: When::Always,
        yield_to: Some(YieldTo {
            calm: Duration::from_millis(100),
            ..YieldTo::new(Budget::Bytes(to))
        }),
        places: Places {
            root: kernel.root().to_owned(),
            nvml: None,
        },
        ..EngineConfig::default()
    }
}

async fn first_look(running: &Running) {
    until(running, "a look", |s| {
        s.yielding.is_some_and(|y| y.others_bytes > 0)
    })
    .await;
}

fn is_yielding(snapshot: &Snapshot) -> bool {
    snapshot.yielding.unwrap().is_yielding
}

async fn text(engine: &EngineHandle, model: &Arc<LoadedModel>) -> String {
    run(engine, greedy(model, vec![1, 9, 17], 24)).await.0
}

#[tokio::test]
async fn streams_go_on_in_what_is_left_and_all_of_it_comes_back() {
    let (runtime, kernel) = (Runtime::new(), Kernel::new());
    let running = runtime
        .start_as(gpu_config(&runtime), config(&kernel, MIB))
        .unwrap();
    first_look(&running).await;
    let model = load(&running, LLAMA, "m").await;
    let expected = text(&running, &model).await;
    let endless = load_endless(&running, "endless").await;
    let request = |n| GenerateRequest {
        reuse: false,
        ..greedy(&endless, vec![1, 9, 17], n)
    };
    let (_, alone, _) = run(&running, request(300)).await;
    let mut stream = running.generate(request(300)).unwrap();
    let mut ids = Vec::new();
    let mut round = 0;
    loop {
        match stream.next().await.unwrap() {
            GenerateEvent::Piece { ids: new, .. } => ids.extend(new),
            GenerateEvent::Done(_) => break,
            GenerateEvent::Failed(error) => panic!("{error}"),
        }
        round += 1;
        if round == 20 {
            kernel.shows(1000 * MIB, 0);
            until(&running, "less", is_yielding).await;
            let budget = running.snapshot().cache.budget_bytes;
            assert!(budget < BUDGET / 2, "{budget}");
            let capacity = running.snapshot().device.memory.unwrap().capacity_bytes;
            assert!(capacity < BUDGET / 2, "{capacity}");
            // Another one that needs more than is to be kept has its room, too.
            assert_eq!(text(&running, &model).await, expected);
        }
    }
    assert_eq!(ids, alone);
    kernel.shows(100 * MIB, 0);
    until(&running, "all of it", |s| {
        !is_yielding(s) && s.cache.budget_bytes == BUDGET
    })
    .await;
    assert_eq!(running.snapshot().yielding.unwrap().count, 1);
    assert_eq!(text(&running, &model).await, expected);
    drop((model, endless, stream));
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn down_to_nothing_the_gpu_is_closed_and_opened_for_requests_alone() {
    let (runtime, kernel) = (Runtime::new(), Kernel::new());
    let running = runtime
        .start_as(gpu_config(&runtime), config(&kernel, 0))
        .unwrap();
    first_look(&running).await;
    let model = load(&running, LLAMA, "m").await;
    let expected = text(&running, &model).await;
    // Busy is enough, once it lasts.
    kernel.shows(100 * MIB, 90);
    let is_closed = |s: &Snapshot| is_yielding(s) && s.device_closed;
    until(&running, "it closed", is_closed).await;
    assert_eq!(
        (runtime.live(), runtime.is_open()),
        (Live::default(), false)
    );
    // One that grows as well changes nothing.
    kernel.shows(5000 * MIB, 90);
    assert_eq!(text(&running, &model).await, expected);
    let snapshot = running.snapshot();
    assert!(is_yielding(&snapshot) && !snapshot.device_closed);
    let budget = snapshot.cache.budget_bytes;
    assert!(budget < BUDGET / 2, "{budget}");
    until(&running, "it closed again", is_closed).await;
    assert_eq!(running.snapshot().released_budget, Some(BUDGET));
    // It is taken again by the next request behind it.
    kernel.shows(100 * MIB, 0);
    until(&running, "alone", |s| !is_yielding(s)).await;
    assert!(running.snapshot().device_closed);
    assert_eq!(text(&running, &model).await, expected);
    assert_eq!(running.snapshot().cache.budget_bytes, BUDGET);
    drop(model);
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// What is released anyway is not released again, and what somebody sets comes back.
#[tokio::test]
async fn a_release_and_a_budget_that_is_set_meanwhile_are_kept_to() {
    let (runtime, kernel) = (Runtime::new(), Kernel::new());
    let config = EngineConfig {
        idle_release: IdleRelease {
            after: None,
            host: false,
        },
        ..config(&kernel, MIB)
    };
    let running = runtime.start_as(gpu_config(&runtime), config).unwrap();
    first_look(&running).await;
    let model = load(&running, LLAMA, "m").await;
    let expected = text(&running, &model).await;
    kernel.shows(1000 * MIB, 0);
    until(&running, "less", is_yielding).await;
    let released = running.release(false).await.unwrap();
    assert_eq!(released.budget_bytes, BUDGET);
    assert_eq!(text(&running, &model).await, expected);
    assert!(running.snapshot().cache.budget_bytes < BUDGET / 2);
    running.set_budget(Budget::Bytes(BUDGET / 2)).await.unwrap();
    kernel.shows(100 * MIB, 0);
    until(&running, "what was set", |s| {
        !is_yielding(s) && s.cache.budget_bytes == BUDGET / 2
    })
    .await;
    assert_eq!(text(&running, &model).await, expected);
    drop(model);
    running.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
}

#[tokio::test]
async fn a_card_that_cannot_be_observed_is_told_and_serves() {
    let (runtime, kernel) = (Runtime::new(), Kernel::new());
    let mut config = config(&kernel, 0);
    config.places.root = "/nonexistent".into();
    let running = runtime.start_as(gpu_config(&runtime), config).unwrap();
    let told = running.snapshot().device.findings.join("; ");
    assert!(told.contains("yield_to: other users"), "{told}");
    assert!(told.contains("mem_info_vram_used"), "{told}");
    assert!(running.snapshot().yielding.is_none());
    let model = load(&running, LLAMA, "m").await;
    assert!(!text(&running, &model).await.is_empty());
    drop(model);
    running.end().unwrap();
}
