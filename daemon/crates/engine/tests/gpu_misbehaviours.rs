//! Whole models on runtimes that misbehave as real ones were seen to: each ends in the host's text,
//! not in a failure.

use crate::fake::{Runtime, gpu_config};
use crate::requests;
use crate::requests::{load, questions};
use rocmforge_device_gpu::GpuConfig;
use rocmforge_engine::api::Budget;
use rocmforge_engine::{EngineHandle, LoadedModel};
use rocmforge_fake_hip::{Live, Misbehaviour};

const FILE: &str = "tiny-llama-Q4_K_M.gguf";

/// The device as the daemon sets it up, but for small pinned memory and notes of trials.
fn usual(runtime: &Runtime) -> GpuConfig {
    GpuConfig {
        registration_trial: true,
        granularity_min: 2 << 20,
        ..gpu_config(runtime)
    }
}

async fn answers(engine: &EngineHandle, model: &std::sync::Arc<LoadedModel>) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for (question, _) in questions(2) {
        let request = requests::chat(model, &question);
        all.push(requests::run(engine, request).await.1);
    }
    all
}

#[tokio::test]
async fn every_misbehaviour_ends_in_the_text_of_a_runtime_that_behaves() {
    let expected = {
        let runtime = Runtime::new();
        let engine = runtime.start_with(usual(&runtime), 24 << 20).unwrap();
        let model = load(&engine, FILE, "m").await;
        let expected = answers(&engine, &model).await;
        engine.end().unwrap();
        expected
    };
    for (misbehaviour, number) in [
        (Misbehaviour::SlowRegistration, 400),
        (Misbehaviour::FalseGranularity, 4096),
        (Misbehaviour::KeepsMemory, 1),
        (Misbehaviour::RefusesAccess, 1),
        (Misbehaviour::FalseFreeBytes, 1),
        (Misbehaviour::FalseFreeBytes, 1 << 40),
        (Misbehaviour::LosesKernelWrites, 1),
        (Misbehaviour::LosesKernelReads, 1),
    ] {
        println!("{misbehaviour:?} {number}");
        let runtime = Runtime::new();
        runtime.misbehave(misbehaviour, number);
        let engine = runtime.start_with(usual(&runtime), 24 << 20).unwrap();
        let model = load(&engine, FILE, "m").await;
        assert_eq!(answers(&engine, &model).await, expected, "{misbehaviour:?}");
        // A budget in which segments come and go, and more again.
        for budget in [6 << 20, 30 << 20] {
            engine.set_budget(Budget::Bytes(budget)).await.unwrap();
            assert_eq!(answers(&engine, &model).await, expected, "{misbehaviour:?}");
        }
        if misbehaviour == Misbehaviour::SlowRegistration {
            assert_eq!(runtime.live().registrations, 0);
        }
        let mapped = runtime.live().reservations;
        match misbehaviour {
            Misbehaviour::SlowRegistration
            | Misbehaviour::FalseGranularity
            | Misbehaviour::FalseFreeBytes => assert_eq!(mapped, 1, "{misbehaviour:?}"),
            _ => assert_eq!(mapped, 0, "{misbehaviour:?}"),
        }
        engine.end().unwrap();
        assert_eq!(
            runtime.violations(),
            Vec::<String>::new(),
            "{misbehaviour:?}"
        );
        assert_eq!(runtime.live(), Live::default(), "{misbehaviour:?}");
    }
}

/// Memory stays taken from some day on, in a running daemon: the arena leaves its addresses,
/// requests go on.
#[tokio::test]
async fn memory_that_stops_coming_back_costs_no_request() {
    let runtime = Runtime::new();
    let engine = runtime.start_with(usual(&runtime), 40 << 20).unwrap();
    let model = load(&engine, FILE, "m").await;
    let expected = answers(&engine, &model).await;
    assert_eq!(runtime.live().reservations, 1);
    runtime.misbehave(Misbehaviour::KeepsMemory, 1);
    for budget in [8 << 20, 32 << 20, 10 << 20] {
        engine.set_budget(Budget::Bytes(budget)).await.unwrap();
        assert_eq!(answers(&engine, &model).await, expected, "{budget}");
        assert_eq!(runtime.live().reservations, 0, "the addresses have gone");
    }
    engine.end().unwrap();
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}
