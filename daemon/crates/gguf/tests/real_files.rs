//! Files that other programs wrote.
use std::path::PathBuf;

use rocmforge_gguf::{Gguf, MappedFile, TensorType};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

#[test]
fn fixtures_parse() {
    let file = MappedFile::open(&root().join("tests/fixtures/tiny-llama-Q4_K_M.gguf")).unwrap();
    let gguf = Gguf::open(&file).unwrap();
    for key in gguf.keys() {
        println!("{key}");
    }
    for t in gguf.tensors() {
        println!("{t:?}");
    }
    assert!(gguf.tensors().iter().any(|t| t.ty == TensorType::Q4K));
}
