//! The machine is short of memory: what the host gives back of its own, and takes again later. The
//! texts are those without.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::fake::{Running, Runtime, gpu_config};
use crate::requests::{greedy, load, run};
use rocmforge_engine::api::{Budget, GenerateRequest, HostPressureStatus, Snapshot, When};
use rocmforge_engine::{EngineConfig, HostPressure, LoadedModel, Stalls};
use rocmforge_fake_hip::Live;

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A machine's count of waits for memory, in a test's hands.
struct Machine {
    dir: tempfile::TempDir,
    total_us: u64,
}

impl Machine {
    fn new() -> Machine {
        let dir = tempfile::tempdir().unwrap();
        let mut machine = Machine { dir, total_us: 0 };
        machine.wait(0);
        machine
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("memory")
    }

    /// Something waited for memory for so long.
    fn wait(&mut self, us: u64) {
        self.total_us += us;
        let text = format!(
            "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 total=0\n",
            self.total_us
        );
        let new = self.dir.path().join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.file()).unwrap();
    }

    fn pressure(&self) -> Option<HostPressure> {
        Some(HostPressure {
            percent: 10.0,
            stalls: Stalls::at(vec![self.file()]),
            every: Duration::from_millis(50),
            calm: Duration::from_millis(100),
        })
    }

    /// Is short of memory until the engine passes the test.
    async fn press(
        &mut self,
        engine: &Running,
        passes: impl Fn(&HostPressureStatus) -> bool,
    ) -> Arc<Snapshot> {
        until(engine, || self.wait(1_000_000_000), passes).await
    }
}

/// Waits until the engine passes the test, and does something again and again meanwhile.
async fn until(
    engine: &Running,
    mut meanwhile: impl FnMut(),
    passes: impl Fn(&HostPressureStatus) -> bool,
) -> Arc<Snapshot> {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let snapshot = engine.snapshot();
        let status = snapshot.host_pressure.expect("it is looked after");
        if passes(&status) {
            return snapshot;
        }
        assert!(Instant::now() < give_up, "it stays so: {status:?}");
        meanwhile();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn status(engine: &Running) -> HostPressureStatus {
    engine.snapshot().host_pressure.expect("it is looked after")
}

fn start(runtime: &Runtime, config: EngineConfig) -> Running {
    runtime.start_as(gpu_config(runtime), config).unwrap()
}

fn request(model: &Arc<LoadedModel>, prompt: Vec<u32>) -> GenerateRequest {
    GenerateRequest {
        reuse: true,
        ..greedy(model, prompt, 20)
    }
}

/// `n` ids, others for another `seed`.
fn ids(seed: u32, n: u32) -> Vec<u32> {
    let id = |i: u32| 5 + (i * 31 + seed * 17 + i * i * seed) % 200;
    (0..n).map(id).collect()
}

fn end(runtime: &Runtime, engine: Running) {
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// Bytes of the host's memory that pages of chats may have.
const HOST: u64 = 1 << 20;

/// A card with room for one chat, whose pages go to the host's memory for the next one.
fn for_chats(host_pressure: Option<HostPressure>) -> EngineConfig {
    EngineConfig {
        budget: Budget::Bytes(3 << 20),
        cpu_compute: When::Never,
        host_budget: Some(Budget::Bytes(HOST)),
        host_kv: When::Always,
        host_pressure,
        ..EngineConfig::default()
    }
}

/// Chats that have no room beside each other on the card.
async fn turn(engine: &Running, model: &Arc<LoadedModel>, chats: &mut [Vec<u32>]) -> Vec<Vec<u32>> {
    let mut said = Vec::new();
    for (seed, chat) in (0..).zip(chats) {
        let (_, new, _) = run(engine, request(model, chat.clone())).await;
        chat.extend(&new);
        chat.extend(ids(seed, 10));
        said.push(new);
    }
    said
}

#[tokio::test]
async fn pages_go_while_memory_is_short_and_are_kept_again_later() {
    const CHATS: u32 = 8;
    let mut machine = Machine::new();
    let mut texts = Vec::new();
    for pressure in [None, machine.pressure()] {
        let runtime = Runtime::new();
        let is_watched = pressure.is_some();
        let engine = start(&runtime, for_chats(pressure));
        let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
        let mut chats: Vec<Vec<u32>> = (0..CHATS).map(|i| ids(i, 200)).collect();
        let mut said = vec![turn(&engine, &model, &mut chats).await];
        if is_watched {
            let before = status(&engine);
            assert!(before.held_bytes > HOST / 2, "{before:?}");
            assert_eq!((before.given_up_bytes, before.shrinks), (0, 0));
            // An idle engine notices, and goes down to what stays.
            let (floor, most) = (HOST / 8, HOST - HOST / 8);
            let is_least =
                |s: &HostPressureStatus| s.held_bytes <= floor && s.given_up_bytes == most;
            let least = machine.press(&engine, is_least).await;
            let (pressure, tier) = (least.host_pressure.unwrap(), least.host_tier);
            println!("{before:?}, then {pressure:?}");
            assert!(pressure.shrinks > 1, "{pressure:?}");
            assert_eq!(tier.budget_bytes, floor);
            assert!(tier.bytes <= floor && tier.dropped > 0, "{tier:?}");
        }
        said.push(turn(&engine, &model, &mut chats).await);
        if is_watched {
            assert!(engine.snapshot().host_tier.bytes <= HOST);
            let whole = until(&engine, || (), |s| s.given_up_bytes == 0).await;
            assert!(whole.host_pressure.unwrap().grows > 1);
        }
        said.push(turn(&engine, &model, &mut chats).await);
        if is_watched {
            let after = status(&engine);
            println!("{after:?}, {:?}", engine.snapshot().host_tier);
            assert!(after.held_bytes > HOST / 2, "taken again: {after:?}");
        }
        texts.push(said);
        drop(model);
        end(&runtime, engine);
    }
    assert_eq!(texts[0], texts[1]);
}

#[tokio::test]
async fn pages_go_beside_requests_that_run() {
    let mut machine = Machine::new();
    let mut texts = Vec::new();
    for pressure in [None, machine.pressure()] {
        let runtime = Runtime::new();
        let is_watched = pressure.is_some();
        let engine = start(&runtime, for_chats(pressure));
        let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
        let mut chats: Vec<Vec<u32>> = (0..6).map(|i| ids(i, 200)).collect();
        let mut said = Vec::new();
        let mut rounds = 0;
        // Of each round it is short of memory at some moments, and not at others.
        while rounds < 3 || (is_watched && status(&engine).shrinks < 3) {
            assert!(rounds < 200, "{:?}", status(&engine));
            machine.wait(1_000_000_000);
            let new = turn(&engine, &model, &mut chats).await;
            if rounds < 3 {
                said.push(new);
            } else {
                chats = (0..6).map(|i| ids(i, 200)).collect();
            }
            rounds += 1;
        }
        texts.push(said);
        drop(model);
        end(&runtime, engine);
    }
    assert_eq!(texts[0], texts[1]);
}

#[tokio::test]
async fn weights_go_when_the_pages_are_gone() {
    const MOST: u64 = 8 << 20;
    let mut machine = Machine::new();
    let runtime = Runtime::new();
    let engine = start(
        &runtime,
        EngineConfig {
            budget: Budget::Bytes(64 << 20),
            cpu_compute: When::Always,
            host_budget: Some(Budget::Bytes(MOST)),
            host_kv: When::Always,
            host_pressure: machine.pressure(),
            ..EngineConfig::default()
        },
    );
    let model = load(&engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let (_, expected, _) = run(&engine, request(&model, ids(1, 150))).await;
    let bytes = model.model().info().segments.iter().map(|s| s.bytes);
    let small = bytes.sum::<u64>() / 2 + (2 << 20);
    engine
        .set_budget(Budget::Bytes(small & !255))
        .await
        .unwrap();
    let ask = async |held: &str| {
        let (_, found, summary) = run(&engine, request(&model, ids(1, 150))).await;
        println!("{held}: {:?}", status(&engine));
        assert_eq!(found, expected, "{held}");
        assert!(
            summary.cache.host_bytes > 0,
            "{held}: the host took no part"
        );
    };
    ask("whole").await;
    let whole = status(&engine);
    assert!(whole.held_bytes > MOST / 8, "{whole:?}");
    // Less than a huge page is no room for any.
    let is_less = |s: &HostPressureStatus| s.held_bytes <= MOST / 8 && s.given_up_bytes > 0;
    machine.press(&engine, is_less).await;
    ask("pressed").await;
    until(&engine, || (), |s| s.given_up_bytes == 0).await;
    ask("whole again").await;
    assert!(status(&engine).held_bytes >= whole.held_bytes / 2);
    drop(model);
    engine.unload("m", false).await.unwrap();
    end(&runtime, engine);
}

#[tokio::test]
async fn where_nothing_can_go_nothing_is_told() {
    let machine = Machine::new();
    let runtime = Runtime::new();
    let config = |host_budget, host_pressure| EngineConfig {
        budget: Budget::Bytes(64 << 20),
        host_budget,
        host_pressure,
        ..EngineConfig::default()
    };
    let some = Some(Budget::Bytes(1 << 20));
    for config in [config(None, machine.pressure()), config(some, None)] {
        let engine = start(&runtime, config);
        assert_eq!(engine.snapshot().host_pressure, None);
        engine.end().unwrap();
    }
    let gone = HostPressure {
        stalls: Stalls::at(vec![machine.dir.path().join("gone")]),
        ..HostPressure::default()
    };
    let engine = start(&runtime, config(some, Some(gone)));
    assert!(status(&engine).is_blind);
    engine.end().unwrap();
}
