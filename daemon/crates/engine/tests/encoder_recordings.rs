//! Passes of short texts through the HIP path: given to the device at once, recorded when their
//! shape comes again, and replayed.

use std::sync::Arc;

use futures_util::future::join_all;
use rocmforge_device_gpu::GpuConfig;
use rocmforge_engine::LoadedModel;
use rocmforge_engine::api::{Asker, EmbedRequest, Pooling};

use crate::embeddings::embed;
use crate::fake::{Running, Runtime, gpu_config};
use crate::requests::load;
use rocmforge_fake_hip::Live;

const ROOMY: u64 = 64 << 20;

/// Launches that bring a pass's inputs, at most.
const OF_INPUTS: u64 = 2;

/// Calls of the driver: recordings that were made, replays, and launches outside of replays.
fn calls(runtime: &Runtime) -> [u64; 3] {
    [
        "hipGraphInstantiate",
        "hipGraphLaunch",
        "hipModuleLaunchKernel",
    ]
    .map(|call| runtime.calls(call))
}

fn since(runtime: &Runtime, before: [u64; 3]) -> [u64; 3] {
    let now = calls(runtime);
    std::array::from_fn(|i| now[i] - before[i])
}

/// Tokens of a text, others for each seed.
fn ids(n: u32, seed: u32) -> Vec<u32> {
    (0..n)
        .map(|i| 5 + (i * 31 + seed * 17 + i * i) % 40)
        .collect()
}

/// An engine that launches everything by itself.
fn unrecorded(runtime: &Runtime) -> Running {
    let config = GpuConfig {
        graphs: false,
        ..gpu_config(runtime)
    };
    runtime.start_with(config, ROOMY).unwrap()
}

async fn classes(engine: &Running, model: &Arc<LoadedModel>, ids: &[u32]) -> Vec<f32> {
    let request = EmbedRequest {
        model: Arc::clone(model),
        ids: ids.to_vec(),
        pooling: Pooling::First,
        classes: true,
        deadline: None,
        asker: Asker::default(),
        adapters: None,
    };
    engine.embed(request).await.unwrap().values
}

/// Nothing is wrong by the runtime's account, and nothing is left.
fn end(runtime: &Runtime, engines: impl IntoIterator<Item = Running>) {
    for engine in engines {
        engine.end().unwrap();
    }
    assert_eq!(runtime.violations(), Vec::<String>::new());
    assert_eq!(runtime.live(), Live::default());
}

/// Another text of as many tokens is one replay, and its vector that of single launches.
#[tokio::test]
async fn short_texts_are_replayed_and_their_vectors_stay_the_same_bits() {
    let plain_runtime = Runtime::new();
    let plain = unrecorded(&plain_runtime);
    let runtime = Runtime::new();
    let engine = runtime.start(ROOMY).unwrap();
    for name in ["bert", "modern-bert", "nomic-bert-moe", "jina-bert-v2"] {
        let file = format!("encoders/{name}.gguf");
        let (expects, model) = (
            load(&plain, &file, name).await,
            load(&engine, &file, name).await,
        );
        let mut alone = Vec::new();
        for seed in 0..6 {
            let text = ids(16, seed);
            let before = calls(&runtime);
            let got = embed(&engine, &model, &text, Pooling::Mean).await;
            let [made, replays, launches] = since(&runtime, before);
            let expected = embed(&plain, &expects, &text, Pooling::Mean).await;
            assert_eq!(got, expected, "{name}, text {seed}");
            println!("{name}, text {seed}: {made} made, {replays} replays, {launches} launches");
            match seed {
                // With uploads; then it is launched once more, everything being resident.
                0 | 1 => alone.push(launches),
                2 => assert_eq!([made, replays], [1, 1], "{name}"),
                _ => {
                    assert_eq!([made, replays], [0, 1], "{name}, text {seed}");
                    assert!(
                        launches <= OF_INPUTS,
                        "{name}, text {seed}: {launches} launches"
                    );
                }
            }
        }
        assert!(alone[1] > 20, "{name}: {alone:?}");
    }
    assert_eq!(plain_runtime.calls("hipGraphLaunch"), 0);
    end(&runtime, [engine]);
    end(&plain_runtime, [plain]);
}

/// What is wanted of a text, and where it lies among others, are parts of a recording's shape or of
/// what is sent with each pass.
#[tokio::test]
async fn recordings_of_other_poolings_classes_and_neighbours_do_not_mix() {
    let plain_runtime = Runtime::new();
    let plain = unrecorded(&plain_runtime);
    let runtime = Runtime::new();
    let engine = runtime.start(ROOMY).unwrap();
    let name = "encoders/xlm-roberta-rank.gguf";
    let (expects, model) = (
        load(&plain, name, "m").await,
        load(&engine, name, "m").await,
    );
    for seed in 0..4 {
        for pooling in [Pooling::First, Pooling::Mean, Pooling::Last, Pooling::None] {
            let text = ids(9, seed);
            let got = embed(&engine, &model, &text, pooling).await;
            let expected = embed(&plain, &expects, &text, pooling).await;
            assert_eq!(got, expected, "{pooling:?}, text {seed}");
        }
        let text = ids(9, seed + 1);
        let (got, expected) = (
            classes(&engine, &model, &text).await,
            classes(&plain, &expects, &text).await,
        );
        assert_eq!(got, expected, "classes of text {seed}");
        // Together they are of one pass or of several, whichever comes first.
        let texts: Vec<Vec<u32>> = (0..5).map(|i| ids(5 + i, seed + i)).collect();
        let together = texts
            .iter()
            .map(|t| embed(&engine, &model, t, Pooling::Mean));
        for (text, got) in texts.iter().zip(join_all(together).await) {
            let expected = embed(&plain, &expects, text, Pooling::Mean).await;
            assert_eq!(got, expected, "beside others, text {seed}");
        }
    }
    assert!(runtime.calls("hipGraphLaunch") > 10);
    end(&runtime, [engine]);
    end(&plain_runtime, [plain]);
}

/// Texts of many lengths leave a bounded number of recordings, none of which outlives its model.
#[tokio::test]
async fn recordings_of_texts_of_many_lengths_are_bounded() {
    const MOST: u64 = 64;
    let runtime = Runtime::new();
    let engine = runtime.start(ROOMY).unwrap();
    let before = runtime.live().graphs;
    for name in ["bert", "xlm-roberta"] {
        let model = load(&engine, &format!("encoders/{name}.gguf"), name).await;
        for n in 2..=64 {
            for seed in 0..3 {
                embed(&engine, &model, &ids(n, seed), Pooling::First).await;
            }
        }
    }
    let made = runtime.calls("hipGraphInstantiate");
    assert!(made > MOST + 16, "{made}");
    let live = runtime.live().graphs - before;
    // Those whose place another has are let go of some at a time.
    assert!(live <= MOST + 16, "{live} of {made}");
    // Longer texts fill the device, and are launched.
    let model = load(&engine, "encoders/bert.gguf", "again").await;
    for seed in 0..3 {
        embed(&engine, &model, &ids(70, seed), Pooling::First).await;
    }
    assert_eq!(runtime.calls("hipGraphInstantiate"), made);
    drop(model);
    for name in ["bert", "xlm-roberta", "again"] {
        engine.unload(name, false).await.unwrap();
    }
    assert_eq!(runtime.live().graphs, 0);
    end(&runtime, [engine]);
}

/// A recording whose weights went, or came back elsewhere, is not replayed.
#[tokio::test]
async fn weights_that_went_and_came_back_elsewhere_are_recorded_again() {
    let plain_runtime = Runtime::new();
    let plain = unrecorded(&plain_runtime);
    let runtime = Runtime::new();
    let names = ["bert", "eurobert"];
    let bytes = |name: &str| {
        let path = crate::requests::fixture(&format!("encoders/{name}.gguf"));
        std::fs::metadata(path).unwrap().len()
    };
    // Room for one of them beside what passes take.
    let engine = runtime
        .start(bytes(names[0]).max(bytes(names[1])) + (180 << 10))
        .unwrap();
    let (mut expects, mut models) = (Vec::new(), Vec::new());
    for name in names {
        let file = format!("encoders/{name}.gguf");
        expects.push(load(&plain, &file, name).await);
        models.push(load(&engine, &file, name).await);
    }
    for round in 0..4 {
        for which in [0, 1] {
            for seed in 0..6 {
                let text = ids(12, round + seed);
                let got = embed(&engine, &models[which], &text, Pooling::Mean).await;
                let expected = embed(&plain, &expects[which], &text, Pooling::Mean).await;
                assert_eq!(got, expected, "{}, round {round}", names[which]);
            }
        }
    }
    let cache = engine.snapshot().cache;
    let [made, replays, _] = calls(&runtime);
    println!(
        "{} evictions, {made} recordings, {replays} replays",
        cache.evictions
    );
    assert!(cache.evictions > 0);
    assert!(made > 2, "each that came back is recorded anew");
    assert!(replays > made);
    drop((models, expects));
    end(&runtime, [engine]);
    end(&plain_runtime, [plain]);
}
