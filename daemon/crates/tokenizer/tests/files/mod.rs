//! Where test data lies, and how a tokenizer is loaded from it.

use std::path::{Path, PathBuf};

use rocmforge_gguf::{Gguf, MappedFile};
use rocmforge_tokenizer::Tokenizer;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(3)
        .expect("the crate lies three folders below the workspace")
        .to_owned()
}

/// `name` below ROCMFORGE_TEST_DATA, or ../shared beside the workspace.
pub(crate) fn shared(name: &str) -> Option<PathBuf> {
    let base = match std::env::var_os("ROCMFORGE_TEST_DATA") {
        Some(base) => PathBuf::from(base),
        None => root().join("../shared"),
    };
    let path = base.join(name);
    if path.exists() {
        return Some(path);
    }
    println!(
        "skipped: {} is not there; set ROCMFORGE_TEST_DATA to the folder that holds {name}",
        path.display()
    );
    None
}

pub(crate) fn open(path: &Path) -> Gguf {
    Gguf::open(&MappedFile::open(path).unwrap()).unwrap()
}

pub(crate) fn fixture(name: &str) -> Gguf {
    open(&root().join("tests/fixtures").join(name))
}

pub(crate) fn tokenizer(path: &Path) -> Tokenizer {
    Tokenizer::from_gguf(&open(path)).unwrap()
}
