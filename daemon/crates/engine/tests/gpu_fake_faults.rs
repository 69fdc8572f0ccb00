//! The HIP path when the driver refuses or fails: at every call, over the whole life
//! of an engine with a model.
//!
//! A life is: start, load, requests, a preload, scores, budgets that change, unload, end. One
//! call of it is made to fail, each in its turn. A refusal ends what asked with a clear error,
//! or is got around; what comes after is right again. A fault of queued work loses the device:
//! what runs and what comes gets UNAVAILABLE, and the engine ends. Nothing panics, hangs,
//! leaks or says another text.

use crate::requests;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::fake::{Runtime, ended, greedy, load, run, tiny};
use rocmforge_engine::api::{Asker, Budget, GenerateEvent, PreloadEvent, ScoreRequest, TokenScore};
use rocmforge_engine::{EngineHandle, Error, LoadedModel};
use rocmforge_fake_hip::{Live, when_run};

const OUT_OF_MEMORY: u32 = 2;
const INVALID_VALUE: u32 = 1;
const LAUNCH_FAILURE: u32 = 719;

/// Holds about a third of the model's segments, so that a pass evicts, moves and uploads.
const TIGHT: u64 = 352 << 10;

/// Holds about a third of the segments of the mixture.
const TIGHT_MIXTURE: u64 = 3 << 20;

/// Places of one function in a life of the mixture, which takes longer.
const MIXTURE_PLACES_MAX: u64 = 12;

/// Holds all of it, so that decode steps are recorded.
const ROOMY: u64 = 4 << 20;

/// Most places of one function at which it is made to fail; of more calls some are left out,
/// evenly, and others by each kind of test. ROCMFORGE_FAULT_PLACES sets another number: at all
/// of them it takes minutes.
const PLACES_MAX: u64 = 24;

/// The same for faults, each of which leaves a device behind.
const FAULTS_MAX: u64 = 20;

/// A life takes milliseconds; one that hangs fails.
const PATIENCE: Duration = Duration::from_secs(60);

const PROMPT: &str = "a tale of two cards";
const TOKENS: u32 = 6;

struct Model {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

fn model() -> Model {
    let dir = tempfile::tempdir().unwrap();
    Model {
        path: tiny::write(dir.path(), 6, 11),
        _dir: dir,
    }
}

/// What went wrong in a life.
#[derive(Debug, Default)]
struct Met {
    start: Option<Error>,
    load: Option<Error>,
    requests: Vec<Option<Error>>,
    unload: Option<Error>,
    end: Option<Error>,
    evictions: u64,
    /// What the requests that came to their end said.
    texts: Vec<Vec<u32>>,
    /// Log-probabilities, as bits.
    scores: Vec<Vec<u32>>,
}

impl Met {
    fn errors(&self) -> impl Iterator<Item = &Error> {
        let early = self.start.iter().chain(&self.load);
        let requests = self.requests.iter().flatten();
        early.chain(requests).chain(&self.unload).chain(&self.end)
    }
}

async fn preload(engine: &EngineHandle, name: &str) -> Result<(), Error> {
    let mut events = engine.preload(name, None)?;
    loop {
        match events.next().await {
            Some(PreloadEvent::Progress { .. }) => {}
            Some(PreloadEvent::Done { .. }) => return Ok(()),
            Some(PreloadEvent::Failed(error)) => return Err(error),
            None => return Err(ended()),
        }
    }
}

async fn scores(engine: &EngineHandle, model: &Arc<LoadedModel>) -> Result<Vec<u32>, Error> {
    let request = ScoreRequest {
        model: Arc::clone(model),
        ids: model.tokenizer().encode(PROMPT, true, true).unwrap(),
        top_n: 1,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    let scores = engine.score(request).await?;
    let bits = |s: &TokenScore| s.logprob.to_bits();
    Ok(scores.tokens.iter().map(bits).collect())
}

async fn life(runtime: &Runtime, path: &Path, budget: u64) -> Met {
    let lived = tokio::time::timeout(PATIENCE, async {
        let mut met = Met::default();
        let engine = match runtime.start(budget) {
            Ok(engine) => engine,
            Err(error) => {
                met.start = Some(error);
                return met;
            }
        };
        match load(&engine, path, "m").await {
            Ok(model) => {
                for part in 0..5 {
                    // What goes on beside the requests.
                    let aside = match part {
                        1 => preload(&engine, "m").await,
                        2 => scores(&engine, &model).await.map(|s| met.scores.push(s)),
                        3 => engine
                            .set_budget(Budget::Bytes(budget / 8 * 7))
                            .await
                            .map(drop),
                        4 => engine.set_budget(Budget::Bytes(budget)).await.map(drop),
                        _ => Ok(()),
                    };
                    met.requests.push(aside.err());
                    match run(&engine, greedy(&model, PROMPT, TOKENS)).await {
                        Ok((ids, _)) => {
                            met.texts.push(ids);
                            met.requests.push(None);
                        }
                        Err(error) => met.requests.push(Some(error)),
                    }
                }
                met.evictions = engine.snapshot().cache.evictions;
                met.unload = engine.unload("m", false).await.err();
            }
            Err(error) => met.load = Some(error),
        }
        met.end = engine.end().err();
        met
    });
    lived.await.expect("a life hangs")
}

/// What a life says when nothing fails, checked to be the same in both budgets.
struct Right {
    text: Vec<u32>,
    scores: Vec<u32>,
}

impl Right {
    fn is(&self, met: &Met) -> bool {
        let scored = met.scores.iter().all(|s| *s == self.scores);
        scored && met.texts.iter().all(|text| *text == self.text)
    }
}

async fn right(runtime: &Runtime, path: &Path) -> Right {
    let (mut texts, mut scores) = (Vec::new(), Vec::new());
    for budget in [ROOMY, TIGHT] {
        let moved = runtime.calls(when_run::D2D);
        let met = life(runtime, path, budget).await;
        // Slabs move where it is small; the arena itself when the budget
        // changes, if it is one allocation.
        let moved = runtime.calls(when_run::D2D) - moved;
        let whole = u64::from(runtime.calls("hipMemCreate") == 0);
        assert!(
            moved >= if budget == TIGHT { 20 } else { whole },
            "{budget}: {moved}"
        );
        assert!(met.evictions > 0 || budget == ROOMY, "{met:?}");
        assert_eq!(met.errors().count(), 0, "{met:?}");
        texts.extend(met.texts);
        scores.extend(met.scores);
        assert_eq!(runtime.violations(), Vec::<String>::new());
        assert_eq!(runtime.live(), Live::default());
    }
    let right = Right {
        text: texts[0].clone(),
        scores: scores[0].clone(),
    };
    assert_eq!(right.text.len(), TOKENS as usize);
    let both = Met {
        texts,
        scores,
        ..Met::default()
    };
    assert!(right.is(&both), "{both:?}");
    right
}

/// What was misused. A page of KV that is not full travels whole when memory is refused,
/// which reads what nobody wrote.
fn noted(runtime: &Runtime) -> Vec<String> {
    let mut noted = runtime.violations();
    noted.retain(|line| !line.starts_with("a copy to the host reads"));
    noted
}

/// The places at which to fail of `n` calls. What is left out differs by `code`.
fn places(n: u64, most: u64, code: u32) -> impl Iterator<Item = u64> {
    let told = std::env::var("ROCMFORGE_FAULT_PLACES").ok();
    let most = told.and_then(|v| v.parse().ok()).unwrap_or(most);
    let step = n.div_ceil(most).max(1);
    let first = if code == OUT_OF_MEMORY { 0 } else { step / 2 };
    (1 + first..=n).step_by(step as usize)
}

/// Every call that a life makes to ask for something, apart from those that give back.
const ASKING: [&str; 27] = [
    "hipMalloc",
    "hipMemGetAllocationGranularity",
    "hipMemAddressReserve",
    "hipMemCreate",
    "hipMemMap",
    "hipMemSetAccess",
    "hipMemUnmap",
    "hipHostMalloc",
    "hipHostRegister",
    "hipStreamCreateWithPriority",
    "hipDeviceGetStreamPriorityRange",
    "hipEventCreateWithFlags",
    "hipModuleLoadData",
    "hipModuleGetFunction",
    "hipModuleLaunchKernel",
    "hipMemcpyAsync",
    "hipMemsetAsync",
    "hipEventRecord",
    "hipEventQuery",
    "hipStreamWaitEvent",
    "hipStreamSynchronize",
    "hipStreamBeginCapture",
    "hipStreamEndCapture",
    "hipGraphGetNodes",
    "hipGraphInstantiate",
    "hipGraphLaunch",
    "hipMemGetInfo",
];

/// Fails `call` at each of its places in a life, and looks at what comes of it.
async fn refuse(runtime: &Runtime, path: &Path, budget: u64, call: &str, code: u32, right: &Right) {
    refuse_at(runtime, path, (budget, PLACES_MAX), call, code, right).await;
}

/// The same at so many places.
async fn refuse_at(
    runtime: &Runtime,
    path: &Path,
    (budget, most): (u64, u64),
    call: &str,
    code: u32,
    right: &Right,
) {
    let before = runtime.calls(call);
    life(runtime, path, budget).await;
    let n = runtime.calls(call) - before;
    let (mut at_start, mut in_request, mut around) = (0, 0, 0);
    for nth in places(n, most, code) {
        runtime.fail(call, nth, code);
        let met = life(runtime, path, budget).await;
        let place = format!("{call} {nth} of {n} in {budget} bytes");
        runtime.recover();
        for error in met.errors() {
            let text = error.to_string();
            assert!(
                text.contains(call) || text.contains("OutOfMemory"),
                "{place}: not a clear error: {text}"
            );
            assert!(!text.contains("panic"), "{place}: {text}");
        }
        assert!(right.is(&met), "{place}: {met:?}");
        assert!(
            met.load.is_none() && met.unload.is_none() && met.end.is_none(),
            "{place}: {met:?}"
        );
        let failed = met.requests.iter().flatten().count();
        assert!(failed <= 1, "{place}: one refusal, one request: {met:?}");
        assert_eq!(runtime.live(), Live::default(), "{place}: {met:?}");
        assert_eq!(noted(runtime), Vec::<String>::new(), "{place}: {met:?}");
        match (&met.start, failed) {
            (Some(_), _) => at_start += 1,
            (None, 1) => in_request += 1,
            (None, _) => around += 1,
        }
    }
    println!("{call} x {n}: {at_start} end the start, {in_request} a request, {around} nothing");
}

#[tokio::test]
async fn memory_refused_at_any_call_of_a_small_budget() {
    let (runtime, model) = (Runtime::new(), model());
    let right = right(&runtime, &model.path).await;
    for call in ASKING {
        refuse(&runtime, &model.path, TIGHT, call, OUT_OF_MEMORY, &right).await;
    }
}

#[tokio::test]
async fn memory_refused_at_any_call_of_a_large_budget() {
    let (runtime, model) = (Runtime::new(), model());
    let right = right(&runtime, &model.path).await;
    for call in ASKING {
        refuse(&runtime, &model.path, ROOMY, call, OUT_OF_MEMORY, &right).await;
    }
}

#[tokio::test]
async fn any_call_that_fails_in_a_small_budget() {
    let (runtime, model) = (Runtime::new(), model());
    let right = right(&runtime, &model.path).await;
    for call in ASKING {
        refuse(&runtime, &model.path, TIGHT, call, INVALID_VALUE, &right).await;
    }
}

#[tokio::test]
async fn any_call_that_fails_in_a_large_budget() {
    let (runtime, model) = (Runtime::new(), model());
    let right = right(&runtime, &model.path).await;
    for call in ASKING {
        refuse(&runtime, &model.path, ROOMY, call, INVALID_VALUE, &right).await;
    }
}

#[tokio::test]
async fn memory_refused_where_the_arena_is_one_allocation() {
    let (runtime, model) = (Runtime::new(), model());
    runtime.set_virtual_memory(false);
    let right = right(&runtime, &model.path).await;
    for budget in [TIGHT, ROOMY] {
        for call in ["hipMalloc", "hipMemcpyAsync", "hipStreamSynchronize"] {
            refuse(&runtime, &model.path, budget, call, OUT_OF_MEMORY, &right).await;
        }
    }
}

/// A layer's experts are held while others come: a failure must give them all back.
#[tokio::test]
async fn any_call_of_a_mixture_that_fails() {
    let runtime = Runtime::new();
    let path = requests::fixture("tiny-qwen3moe-Q4_K_M.gguf");
    let met = life(&runtime, &path, TIGHT_MIXTURE).await;
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(met.errors().count(), 0, "{met:?}");
    assert!(met.evictions > 0, "{met:?}");
    let right = Right {
        text: met.texts[0].clone(),
        scores: met.scores[0].clone(),
    };
    assert!(right.is(&met), "{met:?}");
    let place = (TIGHT_MIXTURE, MIXTURE_PLACES_MAX);
    for call in [
        "hipEventCreateWithFlags",
        "hipEventRecord",
        "hipMemcpyAsync",
    ] {
        for code in [OUT_OF_MEMORY, INVALID_VALUE] {
            refuse_at(&runtime, &path, place, call, code, &right).await;
        }
    }
}

#[tokio::test]
async fn a_fault_of_queued_work_loses_the_device_and_nothing_hangs() {
    let (runtime, model) = (Runtime::new(), model());
    let right = right(&runtime, &model.path).await;
    for budget in [TIGHT, ROOMY] {
        for work in [
            when_run::H2D,
            when_run::D2H,
            when_run::D2D,
            when_run::MEMSET,
            when_run::KERNEL,
        ] {
            let before = runtime.calls(work);
            life(&runtime, &model.path, budget).await;
            let n = runtime.calls(work) - before;
            assert!(n > 0, "no {work}");
            let mut lost = 0;
            for nth in places(n, FAULTS_MAX, LAUNCH_FAILURE) {
                runtime.fail(work, nth, LAUNCH_FAILURE);
                let met = life(&runtime, &model.path, budget).await;
                let place = format!("{work} {nth} of {n} in {budget} bytes");
                assert!(right.is(&met), "{place}: {met:?}");
                for error in met.requests.iter().flatten() {
                    assert!(
                        matches!(error, Error::Unavailable { .. }),
                        "{place}: {error:?}"
                    );
                }
                // Once lost, always lost.
                let first = met.requests.iter().position(Option::is_some);
                let after = &met.requests[first.unwrap_or(met.requests.len())..];
                assert!(after.iter().all(Option::is_some), "{place}: {met:?}");
                if first.is_some() {
                    assert!(
                        met.end.is_some(),
                        "{place}: the engine ends as if nothing were: {met:?}"
                    );
                    lost += 1;
                }
                assert_eq!(noted(&runtime), Vec::<String>::new(), "{place}");
                if met.errors().next().is_some() {
                    // What a lost device holds goes with the process; here the
                    // next life is in the same one.
                    runtime.reset();
                } else {
                    runtime.recover();
                }
                assert_eq!(runtime.live(), Live::default(), "{place}: {met:?}");
            }
            println!("{work} x {n} in {budget} bytes: {lost} seen by a request");
            // Memory is cleared at the start alone, before any request.
            assert!(lost > 0 || work == when_run::MEMSET, "{work}");
        }
    }
}

#[tokio::test]
async fn running_and_waiting_requests_get_unavailable_when_the_device_is_lost() {
    let (runtime, model) = (Runtime::new(), model());
    let engine = runtime.start(ROOMY).unwrap();
    let loaded = load(&engine, &model.path, "m").await.unwrap();
    // More than run at once.
    let mut all = Vec::new();
    for i in 0..24 {
        let request = greedy(&loaded, &format!("request {i}"), 300);
        all.push(engine.generate(request).unwrap());
    }
    for events in &mut all[..4] {
        let first = events.next().await;
        assert!(
            matches!(first, Some(GenerateEvent::Piece { .. })),
            "{first:?}"
        );
    }
    let mut snapshots = engine.watch();
    let queued = snapshots.wait_for(|s| s.running + s.queued == 24 && s.queued > 0);
    tokio::time::timeout(PATIENCE, queued)
        .await
        .expect("requests wait")
        .unwrap();
    runtime.fail(when_run::KERNEL, 100, LAUNCH_FAILURE);
    for (i, events) in all.iter_mut().enumerate() {
        let ended = tokio::time::timeout(PATIENCE, async {
            loop {
                match events.next().await {
                    Some(GenerateEvent::Piece { .. }) => {}
                    other => return other,
                }
            }
        });
        match ended.await.expect("a request hangs") {
            Some(GenerateEvent::Failed(Error::Unavailable { message, .. })) => {
                assert!(message.contains("lost"), "{i}: {message}");
            }
            other => panic!("request {i} of a lost device ends with {other:?}"),
        }
    }
    let late = run(&engine, greedy(&loaded, "too late", 1))
        .await
        .unwrap_err();
    assert!(matches!(late, Error::Unavailable { .. }), "{late:?}");
    assert!(engine.snapshot().device_lost.is_some());
    assert_eq!(engine.snapshot().running, 0);
    drop(all);
    engine.end().unwrap_err();
}
