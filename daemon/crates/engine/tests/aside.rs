//! A model that is asked for while the text of another is read: its file, if it is not in the page
//! cache, and its weights come while the other goes on, and its text is what it is else.

use rocmforge_engine::api::Budget;

use crate::requests::{drop_cached, engine, fixture, greedy, load, load_endless, run, until};

#[tokio::test]
async fn a_cold_file_is_read_while_others_go_on() {
    let engine = engine(Budget::Bytes(64 << 20));
    let near = load_endless(&engine, "near").await;
    // Beside the build, which is on a disk more often than temporary files are.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("cold.gguf");
    std::fs::copy(fixture("tiny-qwen3-Q8_0.gguf"), &path).unwrap();
    let ids: Vec<u32> = (0..40).map(|i| 5 + i * 31 % 200).collect();
    let cold = load(&engine, path.to_str().unwrap(), "cold").await;
    let (_, expected, _) = run(&engine, greedy(&cold, ids.clone(), 8)).await;
    assert_eq!(engine.snapshot().brought_aside, 0, "nobody else was there");
    engine.unload("cold", false).await.unwrap();
    drop(cold);

    let cold = load(&engine, path.to_str().unwrap(), "cold").await;
    if !drop_cached(cold.file()) {
        println!("skipped: pages of {} stay cached", path.display());
        return;
    }
    let beside = engine
        .generate(greedy(&near, vec![1, 9, 17], 100_000))
        .unwrap();
    until(&engine, "the text beside", |s| s.running == 1).await;
    let (_, found, _) = run(&engine, greedy(&cold, ids, 8)).await;
    assert_eq!(found, expected);
    assert_eq!(engine.snapshot().brought_aside, 1);
    drop(beside);
}

#[tokio::test]
async fn weights_are_uploaded_beside_the_passes_of_others() {
    let (of_next, of_both) = upload_beside(Budget::Bytes(64 << 20), true).await;
    // Where both do not fit, its passes take room from the other's weights. Not by a smaller budget
    // of the same engine: what the other's text has of the device can lie behind it for a while.
    upload_beside(Budget::Bytes(of_both - of_next / 2), false).await;
}

#[tokio::test]
async fn experts_come_too_where_a_prompt_is_routed_to_most() {
    let engine = engine(Budget::Bytes(64 << 20));
    let near = load_endless(&engine, "near").await;
    let ids: Vec<u32> = (0..40).map(|i| 5 + i * 31 % 200).collect();
    let next = load(&engine, "tiny-qwen3moe-Q4_K_M.gguf", "next").await;
    let (_, expected, _) = run(&engine, greedy(&next, ids.clone(), 8)).await;
    engine.clear(Some("next")).await.unwrap();
    let beside = engine
        .generate(greedy(&near, vec![1, 9, 17], 100_000))
        .unwrap();
    until(&engine, "the text beside", |s| s.running == 1).await;
    let (_, found, _) = run(&engine, greedy(&next, ids, 8)).await;
    assert_eq!(found, expected);
    let now = engine.snapshot();
    let next = now
        .models
        .iter()
        .find(|m| m.model.name() == "next")
        .unwrap();
    let all: u64 = next.segments.iter().map(|segment| segment.bytes).sum();
    assert_eq!(now.uploaded_aside_bytes, all);
    drop(beside);
}

/// Asks for a cleared model beside another's text, whose weights fit a budget beside it or not.
/// Bytes of its weights, and of all that is resident then.
async fn upload_beside(budget: Budget, fits: bool) -> (u64, u64) {
    let engine = engine(budget);
    let near = load_endless(&engine, "near").await;
    let ids: Vec<u32> = (0..40).map(|i| 5 + i * 31 % 200).collect();
    let next = load(&engine, "tiny-qwen3-Q8_0.gguf", "next").await;
    let (_, expected, alone) = run(&engine, greedy(&next, ids.clone(), 8)).await;
    let before = engine.snapshot().uploaded_aside_bytes;
    assert_eq!(before, 0, "nobody else was there");
    engine.clear(Some("next")).await.unwrap();
    let beside = engine
        .generate(greedy(&near, vec![1, 9, 17], 1000))
        .unwrap();
    until(&engine, "the text beside", |s| s.running == 1).await;
    let (_, found, summary) = run(&engine, greedy(&next, ids, 8)).await;
    assert_eq!(found, expected);
    let now = engine.snapshot();
    let of_next = alone.cache.uploaded_bytes;
    if fits {
        assert_eq!(now.uploaded_aside_bytes, of_next);
        // They are counted to the request all the same.
        assert_eq!(summary.cache.uploaded_bytes, of_next);
    } else {
        assert_eq!(now.uploaded_aside_bytes, 0);
    }
    drop(beside);
    (of_next, now.cache.resident_bytes)
}
