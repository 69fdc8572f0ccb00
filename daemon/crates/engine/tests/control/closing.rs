//! Closing models that nobody uses, and what models have in common.

use std::sync::Arc;

use rocmforge_engine::api::{Budget, GenerateEvent};
use rocmforge_engine::{Error, LoadedModel};

use super::{LLAMA, QWEN, long};
use crate::requests::{chat, engine, fixture, load, load_endless, run, until};

#[tokio::test]
async fn a_model_that_somebody_holds_is_not_closed() {
    let engine = engine(Budget::Bytes(64 << 20));
    let file = load(&engine, LLAMA, "m").await;
    assert!(engine.close("m").await.unwrap().is_none(), "it is held");
    // It is there as before.
    let found = engine.model("m").unwrap();
    assert!(Arc::ptr_eq(&file, &found));
    let answered = run(&engine, chat(&found, "42 - 30 = ?")).await;
    // An old snapshot may be asked for it, too.
    let snapshot = engine.snapshot();
    drop((file, found, answered));
    assert!(engine.close("m").await.unwrap().is_none());
    drop(snapshot);
    engine.pin("m", None, true).await.unwrap();
    assert!(engine.close("m").await.unwrap().is_none(), "it is pinned");
    engine.pin("m", None, false).await.unwrap();
    let closed = engine.close("m").await.unwrap().expect("nobody uses it");
    assert_eq!(closed.name(), "m");
    assert!(matches!(
        engine.close("m").await,
        Err(Error::UnknownModel { .. })
    ));
    let snapshot = engine.snapshot();
    assert!(snapshot.models.is_empty() && snapshot.cache.resident_bytes == 0);
    let again = load(&engine, LLAMA, "m").await;
    run(&engine, chat(&again, "42 - 30 = ?")).await;
}

/// Whoever closes the model of a deleted file may come when a new file has its name.
#[tokio::test]
async fn a_model_that_has_taken_the_name_of_another_stays() {
    let engine = engine(Budget::Bytes(64 << 20));
    let old = Arc::downgrade(&load(&engine, LLAMA, "m").await);
    engine.unload("m", false).await.unwrap();
    let new = Arc::downgrade(&load(&engine, QWEN, "m").await);
    let closed = engine.close_only("m", Some(old)).await.unwrap();
    assert!(closed.is_none() && engine.model("m").is_ok());
    assert!(engine.close_only("m", Some(new)).await.unwrap().is_some());
}

#[tokio::test]
async fn a_model_with_a_running_request_is_not_closed() {
    let engine = engine(Budget::Bytes(64 << 20));
    let model = load_endless(&engine, "m").await;
    let mut events = engine.generate(long(&model)).unwrap();
    drop(model);
    assert!(matches!(
        events.next().await,
        Some(GenerateEvent::Piece { .. })
    ));
    assert!(engine.close("m").await.unwrap().is_none(), "a request runs");
    assert!(engine.model("m").is_ok(), "it is published again");
    drop(events);
    until(&engine, "the end", |s| s.running == 0).await;
    assert!(engine.close("m").await.unwrap().is_some());
}

/// Models of one vocabulary have it once, whatever their files are called.
#[tokio::test]
async fn a_vocabulary_is_there_once_for_all_models_that_have_it() {
    let engine = engine(Budget::Bytes(64 << 20));
    let llama = load(&engine, LLAMA, "llama").await;
    let moe = load(&engine, "tiny-qwen3moe-Q4_K_M.gguf", "moe").await;
    let qwen = load(&engine, QWEN, "qwen").await;
    let memory = [&llama, &moe, &qwen].map(|model| model.memory());
    let same = |a: &Arc<LoadedModel>, b: &Arc<LoadedModel>| {
        (0..a.tokenizer().n_vocab() as u32)
            .all(|id| a.tokenizer().token_bytes(id) == b.tokenizer().token_bytes(id))
    };
    for (i, a) in [&llama, &moe, &qwen].into_iter().enumerate() {
        for (j, b) in [&llama, &moe, &qwen].into_iter().enumerate() {
            let shared = memory[i].vocabulary == memory[j].vocabulary;
            assert!(!shared || same(a, b), "{} {}", a.name(), b.name());
        }
    }
    // Another file of the same content.
    let copy = tempfile::tempdir().unwrap();
    let path = copy.path().join("copy.gguf");
    std::fs::copy(fixture(LLAMA), &path).unwrap();
    let file = rocmforge_gguf::MappedFile::open(&path).unwrap();
    let prepared = rocmforge_engine::prepare("copy", file, &mut |_| {}).unwrap();
    let other = engine.load(prepared).await.unwrap();
    assert_eq!(other.memory().vocabulary, memory[0].vocabulary);
    let grammars = |model: &Arc<LoadedModel>| Arc::as_ptr(model.grammars().unwrap());
    assert_eq!(grammars(&llama), grammars(&other));
}
