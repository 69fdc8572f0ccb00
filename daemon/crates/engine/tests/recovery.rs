//! What goes wrong with a device while the engine works, through a fake HIP runtime: faults, hangs,
//! a sleep of the machine, and memory that the driver refuses.

use crate::{fake, requests};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::requests::{chat, load, questions, run};
use rocmforge_device_gpu::{GpuDevice, ImageFolder};
use rocmforge_engine::api::{
    Asker, Budget, GenerateEvent, GenerateRequest, Policy, PreloadEvent, ScoreRequest,
};
use rocmforge_engine::{
    Clocks, EngineConfig, EngineHandle, EngineThread, Error, Events, LoadedModel, LossKind,
    start_on,
};
use rocmforge_fake_hip::{Fake, HANG, when_run};

const LLAMA: &str = "tiny-llama-Q4_K_M.gguf";
const OUT_OF_MEMORY: u32 = 2;
const LAUNCH_FAILURE: u32 = 719;
const MIB: u64 = 1 << 20;

struct Setup {
    budget: u64,
    watchdog: Duration,
    clocks: Clocks,
    /// The driver keeps memory and addresses apart, and the arena grows where it is;
    /// else it is one allocation.
    mapped: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            budget: 16 * MIB,
            watchdog: Duration::from_secs(20),
            clocks: Clocks::default(),
            mapped: true,
        }
    }
}

/// An engine with a model, on a fake of its own.
async fn with_model(setup: Setup) -> (Fake, EngineHandle, EngineThread, Arc<LoadedModel>) {
    let fake = Fake::new();
    fake.set_virtual_memory(setup.mapped);
    let (engine, thread) = start(&fake, setup);
    let model = load(&engine, LLAMA, "m").await;
    (fake, engine, thread, model)
}

/// The engine ends as it should, and nothing was misused.
fn ends_well(fake: &Fake, engine: EngineHandle, thread: EngineThread) {
    drop(engine);
    thread.join().unwrap();
    assert_nothing_noted(fake);
}

fn start(fake: &Fake, setup: Setup) -> (EngineHandle, EngineThread) {
    let mut config = fake::gpu_config(fake);
    config.watchdog = setup.watchdog;
    let device = GpuDevice::open(config, Box::new(ImageFolder(fake.images()))).unwrap();
    let config = EngineConfig {
        budget: Budget::Bytes(setup.budget),
        clocks: setup.clocks,
        ..EngineConfig::default()
    };
    let card = device.card();
    start_on(Box::new(device), Some(card), config).unwrap()
}

async fn end(events: &mut Events<GenerateEvent>) -> Result<(), Error> {
    loop {
        match events.next().await {
            Some(GenerateEvent::Piece { .. }) => {}
            Some(GenerateEvent::Done(_)) => return Ok(()),
            Some(GenerateEvent::Failed(error)) => return Err(error),
            None => {
                return Err(Error::Unavailable {
                    message: "no last event".to_owned(),
                    retry_after: Duration::ZERO,
                });
            }
        }
    }
}

fn question(model: &Arc<LoadedModel>) -> GenerateRequest {
    chat(model, &questions(1)[0].0)
}

/// A device that fails with `code` at the `nth` of `call` from now: everyone is
/// told, and the engine ends.
async fn everyone_is_told(call: &str, nth: u64, code: u32, joins: bool) {
    let how = match code {
        HANG => LossKind::Hang,
        _ => LossKind::Fault,
    };
    let setup = Setup {
        watchdog: Duration::from_millis(600),
        ..Setup::default()
    };
    let (fake, engine, thread, model) = with_model(setup).await;
    run(&engine, question(&model)).await;
    let begin = Instant::now();
    fake.fail(call, nth, code);
    let mut running = Vec::new();
    for _ in 0..20 {
        match engine.generate(question(&model)) {
            Ok(events) => running.push(events),
            // The fault was faster.
            Err(error) => assert!(matches!(error, Error::Unavailable { .. }), "{error}"),
        }
    }
    let score = engine.score(ScoreRequest {
        model: Arc::clone(&model),
        ids: (1..60).collect(),
        top_n: 0,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    });
    let score = score.await;
    assert!(matches!(score, Err(Error::Unavailable { .. })), "{score:?}");
    for events in &mut running {
        match end(events).await {
            // It may have ended before the fault.
            Ok(()) => {}
            Err(Error::Unavailable { retry_after, .. }) => {
                assert!(retry_after <= Duration::from_secs(10));
            }
            Err(other) => panic!("{call}: {other}"),
        }
    }
    let reason = engine.lost().await;
    println!("{call}: {reason} after {:?}", begin.elapsed());
    assert_eq!(reason.kind, how, "{call}: {reason}");
    assert_eq!(engine.snapshot().device_lost.as_ref(), Some(&reason));
    let late = engine.set_budget(Budget::Bytes(8 * MIB)).await;
    assert!(matches!(late, Err(Error::Unavailable { .. })), "{late:?}");
    if joins {
        let ended = thread.join();
        assert!(matches!(ended, Err(Error::Unavailable { .. })), "{ended:?}");
    }
}

#[tokio::test]
async fn a_fault_of_a_kernel_ends_the_engine() {
    everyone_is_told(when_run::KERNEL, 100, LAUNCH_FAILURE, true).await;
}

#[tokio::test]
async fn a_fault_of_a_copy_ends_the_engine() {
    everyone_is_told(when_run::D2H, 3, LAUNCH_FAILURE, true).await;
}

#[tokio::test]
async fn a_kernel_that_hangs_ends_the_engine() {
    everyone_is_told(when_run::KERNEL, 100, HANG, false).await;
}

#[tokio::test]
async fn a_call_that_never_comes_back_ends_the_engine_though_its_thread_stays() {
    everyone_is_told("hipMemcpyAsync", 10, HANG, false).await;
}

/// Who watched the GPU before it was closed sees that it does not open.
#[tokio::test]
async fn a_gpu_that_hangs_while_it_is_opened_again_ends_the_engine() {
    let setup = Setup {
        watchdog: Duration::from_millis(600),
        ..Setup::default()
    };
    let (fake, engine, _thread, model) = with_model(setup).await;
    run(&engine, question(&model)).await;
    engine.release(false).await.unwrap();
    assert!(engine.snapshot().device_closed);
    fake.fail("hipSetDevice", 1, HANG);
    let mut events = engine.generate(question(&model)).unwrap();
    let ended = end(&mut events).await;
    assert!(matches!(ended, Err(Error::Unavailable { .. })), "{ended:?}");
    assert_eq!(engine.lost().await.kind, LossKind::Hang);
}

#[tokio::test]
async fn an_idle_engine_learns_of_a_fault_from_an_upload_ahead() {
    let fake = Fake::new();
    let (engine, _thread) = start(&fake, Setup::default());
    load(&engine, LLAMA, "m").await;
    fake.fail(when_run::H2D, 2, LAUNCH_FAILURE);
    let mut events = engine.preload("m", None).unwrap();
    let failed = loop {
        match events.next().await {
            Some(PreloadEvent::Failed(error)) => break Some(error),
            Some(PreloadEvent::Done { .. }) | None => break None,
            Some(PreloadEvent::Progress { .. }) => {}
        }
    };
    println!("{failed:?}");
    engine.lost().await;
}

/// What a test decides and sees of the engine's clocks.
#[derive(Default)]
struct TestClock {
    /// How long the machine has slept, in milliseconds.
    slept: AtomicU64,
    readings: AtomicU64,
}

fn clocks() -> (Clocks, Arc<TestClock>) {
    let clock = Arc::new(TestClock::default());
    let read = Arc::clone(&clock);
    let clocks = Clocks::reading(move || {
        read.readings.fetch_add(1, Ordering::Relaxed);
        let slept = Duration::from_millis(read.slept.load(Ordering::Relaxed));
        (Duration::from_secs(100) + slept, Duration::from_secs(50))
    });
    (clocks, clock)
}

/// Waits until the engine, which has nothing to do, has rested. It reads the clocks before each
/// rest and takes commands that come later after it; a command that follows at once may be
/// taken with the one before.
async fn until_it_rested(engine: &EngineHandle, clock: &TestClock) {
    let before = clock.readings.load(Ordering::Relaxed);
    while clock.readings.load(Ordering::Relaxed) < before + 3 {
        engine.set_policy(Policy::PassAware).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    engine.set_policy(Policy::PassAware).await.unwrap();
}

#[tokio::test]
async fn a_device_that_slept_well_keeps_what_it_held() {
    let (clocks, clock) = clocks();
    let (fake, engine, thread, model) = with_model(Setup {
        clocks,
        ..Setup::default()
    })
    .await;
    let before = run(&engine, question(&model)).await;
    clock.slept.store(3_600_000, Ordering::Relaxed);
    let after = run(&engine, question(&model)).await;
    assert_eq!(before.0, after.0);
    assert_eq!(after.2.cache.uploaded_bytes, 0, "weights were kept");
    ends_well(&fake, engine, thread);
}

#[tokio::test]
async fn a_device_that_forgot_in_its_sleep_serves_nothing() {
    // All of it, and all but what the device has for itself: then the weights tell.
    for kept in [0, 2 * MIB] {
        forgets_in_its_sleep(kept).await;
    }
}

async fn forgets_in_its_sleep(kept: u64) {
    let (clocks, clock) = clocks();
    let (fake, engine, thread, model) = with_model(Setup {
        clocks,
        ..Setup::default()
    })
    .await;
    run(&engine, question(&model)).await;
    until_it_rested(&engine, &clock).await;
    fake.forget_memory(kept);
    clock.slept.store(3_600_000, Ordering::Relaxed);
    // It may be lost by itself before it is asked.
    let error = match engine.generate(question(&model)) {
        Ok(mut events) => end(&mut events).await.unwrap_err(),
        Err(error) => error,
    };
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    let reason = engine.lost().await;
    println!("{kept} bytes kept: {reason}");
    assert_eq!(reason.kind, LossKind::ContentsLost);
    let reason = reason.to_string();
    assert!(reason.contains("3600 s of sleep"), "{reason}");
    assert_eq!(reason.contains("is not what it was"), kept > 0, "{reason}");
    assert!(thread.join().is_err());
}

/// Nothing was misused. A page of KV that is not full travels whole, which reads what nobody wrote.
#[track_caller]
fn assert_nothing_noted(fake: &Fake) {
    let mut noted = fake.violations();
    noted.retain(|line| !line.starts_with("a copy to the host reads"));
    assert_eq!(noted, Vec::<String>::new());
}

/// The ledger against the driver's count.
#[track_caller]
fn assert_counts_agree(engine: &EngineHandle, fake: &Fake) {
    let snapshot = engine.snapshot();
    let (memory, cache) = (snapshot.device.memory.unwrap(), snapshot.cache);
    assert_eq!(memory.allocated_bytes, fake.live().bytes);
    assert!(cache.resident_bytes + cache.in_flight_bytes <= cache.budget_bytes);
    assert!(cache.budget_bytes <= memory.capacity_bytes);
    let rounded = memory.granularity_bytes.max(1);
    assert_eq!(
        memory.capacity_bytes.next_multiple_of(rounded),
        memory.allocated_bytes
    );
}

/// The driver refuses the `nth` of `call` from now, while a question is answered on a
/// device with nothing resident.
async fn refused_once(call: &str, nth: u64, budgets: &[u64]) {
    let (fake, engine, thread, model) = with_model(Setup::default()).await;
    let host = requests::engine(Budget::Bytes(64 << 20));
    let on_host = load(&host, LLAMA, "m").await;
    let expected = run(&host, question(&on_host)).await;
    fake.fail(call, nth, OUT_OF_MEMORY);
    let got = run(&engine, question(&model)).await;
    assert_eq!(got.0, expected.0, "{call} {nth}");
    let budget = engine.snapshot().cache.budget_bytes;
    println!("{call} {nth}: budget {budget}");
    assert!(budgets.contains(&budget), "{budget}");
    assert_counts_agree(&engine, &fake);
    assert_eq!(run(&engine, question(&model)).await.0, expected.0);
    ends_well(&fake, engine, thread);
    assert_eq!(fake.live(), rocmforge_fake_hip::Live::default());
}

#[tokio::test]
async fn memory_refused_for_code_does_not_end_a_request() {
    // Code is made ready ahead of its use; what is refused then is asked for
    // again, and the budget stays.
    for nth in [1, 2, 4] {
        refused_once("hipModuleLoadData", nth, &[15 * MIB, 16 * MIB]).await;
    }
}

#[tokio::test]
async fn memory_refused_beside_pinned_segments_shrinks_the_budget_all_the_same() {
    let (fake, engine, thread, model) = with_model(Setup::default()).await;
    engine.pin("m", Some(vec![0, 3]), true).await.unwrap();
    fake.fail("hipModuleLaunchKernel", 200, OUT_OF_MEMORY);
    let first = run(&engine, question(&model)).await.0;
    let snapshot = engine.snapshot();
    assert_eq!(snapshot.cache.budget_bytes, 15 * MIB);
    assert!(snapshot.models[0].segments[3].pinned);
    assert_eq!(run(&engine, question(&model)).await.0, first);
    ends_well(&fake, engine, thread);
}

#[tokio::test]
async fn memory_refused_for_an_event_or_a_launch_shrinks_the_budget_and_the_request_goes_on() {
    refused_once("hipEventCreateWithFlags", 5, &[15 * MIB]).await;
    refused_once("hipModuleLaunchKernel", 200, &[15 * MIB]).await;
}

#[tokio::test]
async fn memory_refused_for_a_recording_costs_the_recording_only() {
    refused_once("hipGraphInstantiate", 1, &[16 * MIB]).await;
}

#[tokio::test]
async fn running_requests_keep_their_kv_when_the_budget_shrinks() {
    let (fake, engine, thread, model) = with_model(Setup::default()).await;
    let mut expected = Vec::new();
    for (q, _) in questions(4) {
        expected.push(run(&engine, chat(&model, &q)).await.0);
    }
    let asked: Vec<_> = questions(4)
        .into_iter()
        .map(|(q, _)| {
            let (engine, request) = (engine.clone(), chat(&model, &q));
            tokio::spawn(async move { run(&engine, request).await.0 })
        })
        .collect();
    // Somewhere in the middle, twice.
    fake.fail("hipModuleLaunchKernel", 400, OUT_OF_MEMORY);
    fake.fail("hipModuleLaunchKernel", 900, OUT_OF_MEMORY);
    let mut got = Vec::new();
    for task in asked {
        got.push(task.await.unwrap());
    }
    assert_eq!(got, expected);
    assert!(engine.snapshot().cache.budget_bytes < 16 * MIB);
    assert_counts_agree(&engine, &fake);
    ends_well(&fake, engine, thread);
}

#[tokio::test]
async fn a_scoring_that_is_done_again_counts_nothing_twice() {
    let (fake, engine, _thread, model) = with_model(Setup::default()).await;
    let request = || ScoreRequest {
        model: Arc::clone(&model),
        ids: (1..200).collect(),
        top_n: 2,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let expected = engine.score(request()).await.unwrap();
    let launches = fake.calls("hipModuleLaunchKernel");
    engine.score(request()).await.unwrap();
    let one = fake.calls("hipModuleLaunchKernel") - launches;
    // Among the last launches are those of the head.
    fake.fail("hipModuleLaunchKernel", one - 2, OUT_OF_MEMORY);
    let got = engine.score(request()).await.unwrap();
    assert_eq!(got.tokens, expected.tokens);
    assert_eq!(engine.snapshot().cache.budget_bytes, 15 * MIB);
}

#[tokio::test]
async fn what_can_never_fit_fails_with_the_numbers_and_the_next_request_works() {
    let (fake, engine, thread, model) = with_model(Setup {
        budget: 3 * MIB,
        ..Setup::default()
    })
    .await;
    // Longer than shrinking can go on.
    for nth in 1..40 {
        fake.fail("hipModuleLoadData", nth, OUT_OF_MEMORY);
    }
    let mut events = engine.generate(question(&model)).unwrap();
    let error = end(&mut events).await.unwrap_err();
    drop(events);
    let Error::Precondition(refusal) = &error else {
        panic!("{error:?}");
    };
    let message = refusal.to_string();
    println!("{message}");
    for word in ["bytes are free", "would be left", "needs"] {
        assert!(message.contains(word), "{message}");
    }
    fake.recover();
    let budget = engine.snapshot().cache.budget_bytes;
    assert!(budget < 3 * MIB, "{budget}");
    assert_counts_agree(&engine, &fake);
    run(&engine, question(&model)).await;
    // Nobody raises it but the operator.
    engine.set_budget(Budget::Bytes(8 * MIB)).await.unwrap();
    run(&engine, question(&model)).await;
    assert_counts_agree(&engine, &fake);
    ends_well(&fake, engine, thread);
}

#[tokio::test]
async fn a_budget_grows_where_old_and_new_do_not_fit_side_by_side() {
    for mapped in [true, false] {
        grows_on_a_full_card(mapped).await;
    }
}

async fn grows_on_a_full_card(mapped: bool) {
    let (fake, engine, _thread, model) = with_model(Setup {
        mapped,
        ..Setup::default()
    })
    .await;
    let before = run(&engine, question(&model)).await.0;
    // Room for 24 in all: 16 and 20 do not fit at the same time.
    fake.set_memory(24 * MIB, 0);
    fake.peak_bytes();
    let allocations = engine.snapshot().device.allocations;
    engine.set_budget(Budget::Bytes(20 * MIB)).await.unwrap();
    assert_eq!(engine.snapshot().cache.budget_bytes, 20 * MIB);
    assert_eq!(fake.peak_bytes(), 20 * MIB, "never both");
    assert_eq!(engine.snapshot().device.allocations, allocations + 1);
    assert_counts_agree(&engine, &fake);
    let after = run(&engine, question(&model)).await;
    assert_eq!(after.0, before);
    // Through the host's memory where nothing is mapped.
    assert_eq!(after.2.cache.uploaded_bytes, 0, "weights stay");
    // Others hold so much that it cannot be had: the numbers, and the budget as it was.
    fake.set_memory(1 << 30, (1 << 30) - 21 * MIB);
    let error = engine
        .set_budget(Budget::Bytes(100 * MIB))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, Error::Exhausted { message, .. } if message.contains("cannot be had now")),
        "{error}"
    );
    println!("{error}");
    assert_eq!(engine.snapshot().cache.budget_bytes, 20 * MIB);
    assert_counts_agree(&engine, &fake);
    assert_eq!(run(&engine, question(&model)).await.0, before);
}

#[tokio::test]
async fn a_smaller_budget_gives_memory_back_even_to_a_full_card() {
    for mapped in [true, false] {
        shrinks_on_a_full_card(mapped).await;
    }
}

async fn shrinks_on_a_full_card(mapped: bool) {
    let (fake, engine, _thread, model) = with_model(Setup {
        mapped,
        ..Setup::default()
    })
    .await;
    let before = run(&engine, question(&model)).await.0;
    fake.set_memory(17 * MIB, 0);
    fake.peak_bytes();
    engine.set_budget(Budget::Bytes(8 * MIB)).await.unwrap();
    assert_eq!(fake.peak_bytes(), 16 * MIB, "never both");
    assert!(fake.live().bytes <= 8 * MIB);
    assert_counts_agree(&engine, &fake);
    assert_eq!(run(&engine, question(&model)).await.0, before);
}
