//! Models in several files: loaded by the first part, with the text of the whole file; listed once.

use std::os::unix::fs::symlink;
use std::path::Path;

use rocmforge_gguf::Gguf;
use rocmforge_gguf::write::split;
use rocmforge_proto::v1;
use tonic::Code;

use crate::daemon::{Daemon, assert_status, fixtures, greedy};

const WHOLE: &str = "tiny-llama-Q4_K_M.gguf";
const N: usize = 3;

fn part(number: usize) -> String {
    format!("tiny-split-{number:05}-of-{N:05}.gguf")
}

/// Writes the fixture in parts and returns the sum of their sizes.
fn write_parts(dir: &Path) -> u64 {
    let whole = std::fs::read(fixtures().join(WHOLE)).unwrap();
    let n = Gguf::parse(&whole, whole.len() as u64)
        .unwrap()
        .tensors()
        .len();
    let parts = split(&whole, &[n / 4, n / 2, n - n / 4 - n / 2]).unwrap();
    let write = |(i, writer): (usize, rocmforge_gguf::write::GgufWriter)| {
        let path = dir.join(part(i + 1));
        let writer = writer.part(i as u16, N as u16, n as i32);
        writer.write_to(&path).unwrap();
        path.metadata().unwrap().len()
    };
    parts.into_iter().enumerate().map(write).sum()
}

#[tokio::test]
async fn a_split_model_gives_the_text_of_the_whole_file() {
    let daemon = Daemon::start().await;
    let bytes = write_parts(daemon.dir.path());
    let whole = daemon.load(WHOLE, "whole").await.unwrap();
    let model = daemon.load(part(1), "").await.unwrap();
    assert_eq!(model.name, "tiny-split", "the name without the part");
    let file = model.file.unwrap();
    assert_eq!(file.size_bytes, bytes);
    assert!(file.path.ends_with(&part(1)), "{}", file.path);
    assert_eq!(model.segments.len(), whole.segments.len());
    assert_eq!(model.n_params, whole.n_params);
    // Once with room for both, once with every segment read again and again.
    for budget in [64 << 20, 2 << 20] {
        let request = v1::SetBudgetRequest {
            budget: Some(v1::set_budget_request::Budget::Bytes(budget)),
        };
        daemon.cache().set_budget(request).await.unwrap();
        let mut texts = Vec::new();
        for name in ["whole", "tiny-split"] {
            let request = greedy(name, "Once upon a time", 40);
            texts.push(daemon.generate(request).await.unwrap().0);
        }
        assert!(!texts[0].is_empty());
        assert_eq!(texts[0], texts[1], "budget {budget}");
    }
    let again = daemon.load(part(1), "tiny-split").await.unwrap();
    assert_eq!(again.name, "tiny-split", "loading it again is no error");

    let mut models = daemon.models();
    let files = models.list_files(v1::ListFilesRequest {}).await;
    let files = files.unwrap().into_inner().files;
    let listed: Vec<_> = files
        .iter()
        .filter(|file| file.path.contains("tiny-split"))
        .collect();
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert!(listed[0].path.ends_with(&part(1)), "{listed:?}");
    assert_eq!(listed[0].size_bytes, bytes);
    assert_eq!(listed[0].loaded_as, ["tiny-split"]);
}

#[tokio::test]
async fn parts_behind_links_are_found_by_the_links_names() {
    let daemon = Daemon::start().await;
    let dir = daemon.dir.path();
    std::fs::create_dir_all(dir.join("blobs")).unwrap();
    write_parts(dir);
    for number in 1..=N {
        let blob = dir.join(format!("blobs/{number:x}abc"));
        std::fs::rename(dir.join(part(number)), &blob).unwrap();
        symlink(&blob, dir.join(part(number))).unwrap();
    }
    daemon.load(part(1), "linked").await.unwrap();
    let (text, _) = daemon.generate(greedy("linked", "Once", 8)).await.unwrap();
    assert!(!text.is_empty());

    // A part that leads out of the model directories is refused as any file would be.
    let elsewhere = tempfile::tempdir().unwrap();
    let outside = elsewhere.path().join("blob");
    std::fs::copy(dir.join("blobs/2abc"), &outside).unwrap();
    std::fs::remove_file(dir.join(part(2))).unwrap();
    symlink(&outside, dir.join(part(2))).unwrap();
    let refused = daemon.load(part(1), "out").await;
    assert_status(refused, Code::PermissionDenied, &[&part(2)]);
}

#[tokio::test]
async fn what_is_missing_or_not_first_is_named() {
    let daemon = Daemon::start().await;
    let dir = daemon.dir.path();
    write_parts(dir);
    let refused = daemon.load(part(2), "").await;
    assert_status(
        refused,
        Code::InvalidArgument,
        &["part 2 of 3", "give the first", &part(1)],
    );
    std::fs::remove_file(dir.join(part(3))).unwrap();
    let refused = daemon.load(part(1), "").await;
    let status = assert_status(refused, Code::NotFound, &["3 parts", &part(3)]);
    assert!(!status.message().contains(&part(2)), "{status:?}");
    // One of another model in its place.
    std::fs::copy(fixtures().join("tiny-qwen3-Q8_0.gguf"), dir.join(part(3))).unwrap();
    let refused = daemon.load(part(1), "").await;
    assert_status(refused, Code::InvalidArgument, &[&part(3), "split.no 2"]);
}
