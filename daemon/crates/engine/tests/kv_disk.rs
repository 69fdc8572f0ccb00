//! Prompts whose pages and states are on disk: after eviction, unload and restart they are read,
//! and the text is what it is without.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rocmforge_engine::api::{Asker, Budget, GenerateRequest};
use rocmforge_engine::{
    EngineConfig, EngineHandle, EngineThread, KvDiskConfig, LoadedModel, PrefixCache, start,
};

use crate::fake;
use crate::requests::{greedy, load, run, until};
use crate::reuse::{KINDS, PAGE, ids};

fn config(directory: &Path) -> EngineConfig {
    EngineConfig {
        budget: Budget::Bytes(64 << 20),
        kv_disk: Some(KvDiskConfig {
            directory: directory.to_owned(),
            budget: Budget::Bytes(256 << 20),
            always: true,
            queue_bytes: None,
            write_bytes_per_s: None,
        }),
        ..EngineConfig::default()
    }
}

fn started(config: EngineConfig) -> (EngineHandle, EngineThread) {
    start(config).unwrap()
}

/// Ends an engine. What it had is on disk, or nowhere.
async fn end((engine, thread): (EngineHandle, EngineThread)) {
    engine.drain(Duration::from_secs(20)).await;
    drop(engine);
    thread.join().unwrap();
}

fn request(model: &Arc<LoadedModel>, prompt: Vec<u32>, n: u32, reuse: bool) -> GenerateRequest {
    GenerateRequest {
        reuse,
        ..greedy(model, prompt, n)
    }
}

/// So many pages and states are on disk, and no more are to come.
async fn written(engine: &EngineHandle, entries: u64) {
    until(engine, "all pages on disk", |s| {
        let disk = s.kv_disk.unwrap().store;
        disk.queued_bytes == 0 && disk.entries == entries
    })
    .await;
}

/// Two turns of a chat, with something done to the engine between them. Tokens that the second
/// turn found, and those that it had.
async fn turns(
    directory: &Path,
    name: &str,
    restarts: bool,
    evict: impl AsyncFn(&EngineHandle, &str),
) -> (usize, usize) {
    let file = format!("arch/{name}.gguf");
    let mut running = started(config(directory));
    let mut model = load(&running.0, &file, name).await;
    let mut prompt = ids(1, 150);
    let (_, answer, summary) = run(&running.0, request(&model, prompt.clone(), 45, true)).await;
    assert_eq!(summary.reused_tokens, 0, "{name}");
    prompt.extend(answer);
    prompt.extend(ids(2, 20));
    if restarts {
        drop(model);
        end(running).await;
        running = started(config(directory));
        model = load(&running.0, &file, name).await;
    } else {
        evict(&running.0, name).await;
        if running.0.snapshot().models.is_empty() {
            model = load(&running.0, &file, name).await;
        }
    }
    let engine = &running.0;
    let (_, found, summary) = run(engine, request(&model, prompt.clone(), 45, true)).await;
    let (_, expected, anew) = run(engine, request(&model, prompt.clone(), 45, false)).await;
    assert_eq!(anew.reused_tokens, 0);
    assert_eq!(found, expected, "{name}");
    let reused = summary.reused_tokens;
    let disk = engine.snapshot().kv_disk.unwrap();
    assert_eq!((disk.requests, disk.reused_tokens), (1, u64::from(reused)));
    assert_eq!(disk.store.skipped.all() + disk.store.read_errors, 0);
    assert_eq!(engine.snapshot().cache.kv_bytes, 0);
    drop(model);
    end(running).await;
    (reused as usize, prompt.len())
}

#[tokio::test]
async fn after_a_restart_a_second_turn_computes_what_is_new() {
    for name in KINDS {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kv");
        let (reused, known) = turns(&path, name, true, async |_, _| {}).await;
        println!("{name}: {reused} of {known} read");
        // The last page of the answer is not full, and its last token was never computed.
        assert!(known - reused <= 20 + PAGE, "{name}: {reused} of {known}");
    }
}

#[tokio::test]
async fn a_prompt_that_is_longer_than_the_queue_is_written_whole() {
    // Of 59 pages with 16 KiB each a quarter of the budget keeps 28 and the queue one.
    const TOKENS: usize = 1900;
    const BUDGET: u64 = 1800 << 10;
    let directory = tempfile::tempdir().unwrap();
    let usual = config(&directory.path().join("kv"));
    let kv_disk = usual.kv_disk.clone().map(|kv_disk| KvDiskConfig {
        queue_bytes: Some(16 << 10),
        write_bytes_per_s: Some(2 << 20),
        ..kv_disk
    });
    let running = started(EngineConfig {
        budget: Budget::Bytes(BUDGET),
        kv_disk,
        ..usual
    });
    let engine = &running.0;
    let model = load(engine, "arch/smollm3.gguf", "smollm3").await;
    run(engine, request(&model, ids(1, TOKENS), 1, true)).await;
    written(engine, (TOKENS / PAGE) as u64).await;
    until(engine, "a quarter of the budget", |s| {
        s.cache.prefix_bytes <= BUDGET / 4
    })
    .await;
    drop(model);
    end(running).await;
}

#[tokio::test]
async fn after_an_unload_and_an_eviction_prompts_are_read() {
    for name in ["smollm3", "gemma3", "qwen35"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("unloaded");
        let unload = async |engine: &EngineHandle, name: &str| {
            engine.unload(name, false).await.unwrap();
        };
        let (reused, known) = turns(&path, name, false, unload).await;
        assert!(known - reused <= 20 + PAGE, "{name}: {reused} of {known}");
        let path = directory.path().join("evicted");
        let clear = async |engine: &EngineHandle, _: &str| {
            engine.clear(None).await.unwrap();
        };
        let (reused, known) = turns(&path, name, false, clear).await;
        assert!(known - reused <= 20 + PAGE, "{name}: {reused} of {known}");
    }
}

#[tokio::test]
async fn prompts_are_read_to_a_card() {
    for name in ["smollm3", "gemma3", "qwen35"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kv");
        let runtime = fake::Runtime::new();
        let gpu = || fake::gpu_config(&runtime.fake);
        let mut prompt = ids(1, 150);
        for turn in 0..2 {
            let engine = runtime.start_as(gpu(), config(&path)).unwrap();
            let model = load(&engine, &format!("arch/{name}.gguf"), name).await;
            let (_, found, summary) = run(&engine, request(&model, prompt.clone(), 45, true)).await;
            let (_, expected, _) = run(&engine, request(&model, prompt.clone(), 45, false)).await;
            assert_eq!(found, expected, "{name}, turn {turn}");
            let computed = prompt.len() - summary.reused_tokens as usize;
            match turn {
                0 => assert_eq!(summary.reused_tokens, 0),
                _ => assert!(computed <= 20 + PAGE, "{name}: {computed}"),
            }
            prompt.extend(found);
            prompt.extend(ids(2, 20));
            drop(model);
            engine.drain(Duration::from_secs(20)).await;
        }
    }
}

/// Tokens of the same prompt that another engine finds for another client.
async fn found_by(of: &[(PrefixCache, u64)]) -> Vec<u32> {
    let directory = tempfile::tempdir().unwrap();
    let mut found = Vec::new();
    for &(prefix_cache, client) in of {
        let running = started(EngineConfig {
            prefix_cache,
            ..config(&directory.path().join("kv"))
        });
        let model = load(&running.0, "tiny-llama-Q4_K_M.gguf", "m").await;
        let asker = Asker {
            client,
            ..Asker::default()
        };
        let request = GenerateRequest {
            asker,
            ..request(&model, ids(1, 100), 4, true)
        };
        found.push(run(&running.0, request).await.2.reused_tokens);
        drop(model);
        end(running).await;
    }
    found
}

#[tokio::test]
async fn pages_on_disk_are_their_clients_own() {
    use PrefixCache::{PerClient, Shared};
    assert_eq!(found_by(&[(PerClient, 1), (PerClient, 1)]).await, [0, 96]);
    assert_eq!(found_by(&[(PerClient, 1), (PerClient, 2)]).await, [0, 0]);
    assert_eq!(found_by(&[(Shared, 1), (Shared, 2)]).await, [0, 96]);
    // The number of all clients together is that of a user, too.
    assert_eq!(found_by(&[(Shared, 0), (PerClient, 0)]).await, [0, 0]);
}

#[tokio::test]
async fn another_model_or_kv_type_has_other_pages() {
    use rocmforge_engine::KvType;
    let directory = tempfile::tempdir().unwrap();
    let mut found = Vec::new();
    for (file, kv_type) in [
        ("tiny-llama-Q4_K_M.gguf", KvType::F16),
        ("tiny-llama-Q4_K_M.gguf", KvType::F32),
        ("tiny-qwen3-Q8_0.gguf", KvType::F16),
        ("tiny-llama-Q4_K_M.gguf", KvType::F16),
    ] {
        let running = started(EngineConfig {
            kv_type: Some(kv_type),
            ..config(&directory.path().join("kv"))
        });
        // The name does not count.
        let model = load(&running.0, file, &format!("m{}", found.len())).await;
        let (_, _, summary) = run(&running.0, request(&model, ids(1, 100), 4, true)).await;
        found.push(summary.reused_tokens);
        drop(model);
        end(running).await;
    }
    assert_eq!(found, [0, 0, 0, 96]);
}

#[tokio::test]
async fn damaged_files_change_no_text() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    let prompt = ids(1, 300);
    let running = started(config(&path));
    let model = load(&running.0, "tiny-llama-Q4_K_M.gguf", "m").await;
    let (_, expected, _) = run(&running.0, request(&model, prompt.clone(), 10, true)).await;
    drop(model);
    end(running).await;
    let files = path.read_dir().unwrap().map(|file| file.unwrap().path());
    let files: Vec<_> = files
        .filter(|path| path.ends_with("kv-0000000000000001.seg"))
        .collect();
    let sound = std::fs::read(&files[0]).unwrap();
    let mut reused = Vec::new();
    for at in (0..10).map(|i| 40 + i * (sound.len() - 41) / 9) {
        let mut damaged = sound.clone();
        damaged[at] ^= 0x10;
        std::fs::write(&files[0], &damaged).unwrap();
        let running = started(config(&path));
        let model = load(&running.0, "tiny-llama-Q4_K_M.gguf", "m").await;
        let (_, found, summary) = run(&running.0, request(&model, prompt.clone(), 10, true)).await;
        assert_eq!(found, expected, "byte {at}");
        let skipped = running.0.snapshot().kv_disk.unwrap().store.skipped;
        assert_eq!(
            skipped.damaged,
            u64::from(summary.reused_tokens < 288),
            "byte {at}"
        );
        reused.push(summary.reused_tokens);
        drop(model);
        end(running).await;
        for file in path.read_dir().unwrap().map(|file| file.unwrap().path()) {
            std::fs::remove_file(file).unwrap();
        }
    }
    println!("{reused:?}");
    assert!(reused[0] == 0 && reused.iter().any(|&n| n > 100 && n < 288));
}

#[tokio::test]
async fn requests_together_read_their_prefix_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    let prompt = ids(3, 200);
    let running = started(config(&path));
    let model = load(&running.0, "tiny-llama-Q4_K_M.gguf", "m").await;
    let (_, expected, _) = run(&running.0, request(&model, prompt.clone(), 10, true)).await;
    written(&running.0, 6).await;
    running.0.clear(None).await.unwrap();
    let all = (0..8)
        .map(|_| request(&model, prompt.clone(), 10, true))
        .collect();
    for (found, summary) in crate::requests::together(&running.0, all).await {
        assert_eq!((found, summary.reused_tokens), (expected.clone(), 192));
    }
    let disk = running.0.snapshot().kv_disk.unwrap();
    assert_eq!((disk.store.read, disk.requests), (6, 1));
    drop(model);
    end(running).await;
}

#[tokio::test]
async fn cleared_pages_are_computed_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    let running = started(config(&path));
    let engine = &running.0;
    let mut models = Vec::new();
    for name in ["tiny-llama-Q4_K_M.gguf", "tiny-qwen3-Q8_0.gguf"] {
        models.push(load(engine, name, name).await);
    }
    let found = async |model: &Arc<LoadedModel>| {
        let request = request(model, ids(4, 100), 4, true);
        run(engine, request).await.2.reused_tokens
    };
    for model in &models {
        assert_eq!(found(model).await, 0);
    }
    written(engine, 6).await;
    engine.clear(None).await.unwrap();
    engine
        .clear_with_disk(Some(models[0].name()))
        .await
        .unwrap();
    written(engine, 3).await;
    assert_eq!(found(&models[0]).await, 0);
    assert_eq!(found(&models[1]).await, 96);
    engine.clear_with_disk(None).await.unwrap();
    written(engine, 0).await;
    assert_eq!(found(&models[1]).await, 0);
    drop(models);
    end(running).await;
}

/// Pages that have come for a request that has not begun hold up no unload.
#[tokio::test]
async fn a_model_is_unloaded_while_a_prefix_of_it_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv");
    let running = started(config(&path));
    let engine = &running.0;
    let prompt = ids(3, 900);
    let load = async || load(engine, "tiny-llama-Q4_K_M.gguf", "m").await;
    let ask = |model: &Arc<LoadedModel>| request(model, prompt.clone(), 4, true);
    let (_, expected, _) = run(engine, ask(&load().await)).await;
    written(engine, 28).await;
    for round in 0..20 {
        engine.unload("m", true).await.unwrap();
        let model = load().await;
        let mut events = engine.generate(ask(&model)).unwrap();
        drop(model);
        tokio::time::sleep(Duration::from_micros(100 * round)).await;
        engine.unload("m", true).await.unwrap();
        while events.next().await.is_some() {}
        let (_, found, _) = run(engine, ask(&load().await)).await;
        assert_eq!(found, expected);
    }
    assert_eq!(engine.snapshot().cache.kv_bytes, 0);
    end(running).await;
}
