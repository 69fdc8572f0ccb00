//! A model whose file is on a disk and not in the page cache: it is read while requests of another
//! model go on, and its text is what it is else.

#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

mod requests;

use std::fs::File;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use requests::{engine, fixture, greedy, load, load_endless, run, until};

#[tokio::test]
async fn a_cold_file_is_read_while_others_go_on() {
    let engine = engine(rocmforge_engine::api::Budget::Bytes(64 << 20));
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
    let file = File::open(&path).unwrap();
    file.sync_all().unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    if cold.file().seems_cached(0..cold.file().len()) {
        println!("skipped: nobody tells what of {} is cached", path.display());
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
