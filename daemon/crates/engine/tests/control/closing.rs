//! Closing models that nobody uses, and what models have in common.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rocmforge_engine::api::{Budget, GenerateEvent, SegmentState, SegmentStatus};
use rocmforge_engine::{Error, LoadedModel};
use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_gguf::{Gguf, MappedFile, TensorType};

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

/// Tokens of a vocabulary that is worth knowing by its bytes.
const TOKENS: u32 = 20_000;

/// Writes a model with a large vocabulary, which none of another salt has.
fn write_large(dir: &Path, name: &str, salt: &str) -> PathBuf {
    let token = |id: u32| match id {
        0 => "<unk>".to_owned(),
        1 => "<s>".to_owned(),
        2 => "</s>".to_owned(),
        id => format!("{salt}{id}"),
    };
    let types: Vec<i32> = (0..TOKENS).map(|id| if id < 3 { 3 } else { 1 }).collect();
    let scores: Vec<f32> = (0..TOKENS).map(|id| -(id as f32)).collect();
    let mut writer = GgufWriter::new()
        .key("general.architecture", "llama")
        .key("general.name", name)
        .key("llama.context_length", 512u32)
        .key("llama.embedding_length", 64u32)
        .key("llama.block_count", 1u32)
        .key("llama.feed_forward_length", 96u32)
        .key("llama.attention.head_count", 2u32)
        .key("llama.attention.head_count_kv", 1u32)
        .key("llama.attention.layer_norm_rms_epsilon", 1e-5f32)
        .key("llama.rope.dimension_count", 32u32)
        .key("tokenizer.ggml.model", "llama")
        .key(
            "tokenizer.ggml.tokens",
            (0..TOKENS).map(token).collect::<MetaValue>(),
        )
        .key("tokenizer.ggml.scores", scores.as_slice())
        .key("tokenizer.ggml.token_type", types.as_slice())
        .zeros(
            "token_embd.weight",
            &[64, u64::from(TOKENS)],
            TensorType::Q8_0,
        )
        .zeros("output_norm.weight", &[64], TensorType::F32);
    for (name, cols, rows) in [
        ("attn_q", 64, 64),
        ("attn_k", 64, 32),
        ("attn_v", 64, 32),
        ("attn_output", 64, 64),
        ("ffn_gate", 64, 96),
        ("ffn_up", 64, 96),
        ("ffn_down", 96, 64),
    ] {
        let name = format!("blk.0.{name}.weight");
        writer = writer.zeros(&name, &[cols, rows], TensorType::Q8_0);
    }
    for name in ["attn_norm", "ffn_norm"] {
        let name = format!("blk.0.{name}.weight");
        writer = writer.zeros(&name, &[64], TensorType::F32);
    }
    let path = dir.join(name);
    writer.write_to(&path).unwrap();
    path
}

/// A header that begins as another is read once as long as a model has its vocabulary, and makes
/// it anew where none has.
#[tokio::test]
async fn the_second_model_of_a_large_vocabulary_reads_its_header_once() {
    let engine = engine(Budget::Bytes(64 << 20));
    let dir = tempfile::tempdir().unwrap();
    let load = async |name: &str| {
        let path = write_large(dir.path(), name, "known");
        let file = MappedFile::open(&path).unwrap();
        let header = Gguf::open(&file).unwrap().header_bytes();
        let file = MappedFile::open(&path).unwrap();
        let prepared = rocmforge_engine::prepare(name, file, &mut |_| {}).unwrap();
        let model = engine.load(prepared).await.unwrap();
        let read = model.file().bytes_read();
        (model, read as f64 / header as f64)
    };
    let tokens = |model: &LoadedModel| {
        let tokenizer = model.tokenizer();
        let bytes = |id| tokenizer.token_bytes(id).unwrap().to_vec();
        (0..TOKENS).map(bytes).collect::<Vec<_>>()
    };
    let (first, reads) = load("first").await;
    assert!((1.0..1.1).contains(&reads), "{reads}");
    let expected = tokens(&first);
    assert_eq!(expected.last().unwrap(), b"known19999");
    let (second, reads) = load("second").await;
    // The first piece of each of three arrays is read twice.
    assert!((1.0..1.6).contains(&reads), "{reads}");
    assert_eq!(second.memory().vocabulary, first.memory().vocabulary);
    assert!(tokens(&second) == expected);
    drop((first, second));
    for name in ["first", "second"] {
        engine.unload(name, false).await.unwrap();
    }
    until(&engine, "their end", |s| s.models.is_empty()).await;
    let (third, reads) = load("third").await;
    assert!((1.9..2.6).contains(&reads), "{reads}");
    assert!(tokens(&third) == expected);
}

/// What thousands of registered models cost each snapshot is a pointer.
#[tokio::test]
async fn snapshots_share_the_segments_of_models_of_which_nothing_is_there() {
    let engine = engine(Budget::Bytes(64 << 20));
    let used = load(&engine, LLAMA, "used").await;
    load(&engine, QWEN, "idle").await;
    let of = |name: &str| {
        let snapshot = engine.snapshot();
        let mut models = snapshot.models.iter();
        let found = models.find(|status| status.model.name() == name).unwrap();
        Arc::clone(&found.segments)
    };
    let (absent, idle) = (of("used"), of("idle"));
    let all = |segments: &[SegmentStatus], state| segments.iter().all(|s| s.state == state);
    assert!(all(&absent, SegmentState::Absent) && !absent.is_empty());
    run(&engine, chat(&used, "42 - 30 = ?")).await;
    assert!(all(&of("used"), SegmentState::Resident));
    assert!(Arc::ptr_eq(&of("idle"), &idle));
    // An absent one that is pinned is none of those.
    engine.clear(Some("used")).await.unwrap();
    assert!(Arc::ptr_eq(&of("used"), &absent));
    engine.pin("used", Some(vec![1]), true).await.unwrap();
    let pinned = of("used");
    assert!(pinned[1].pinned && !pinned[0].pinned);
    assert_eq!(pinned[1].bytes, absent[1].bytes);
}
