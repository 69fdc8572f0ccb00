//! Files that other programs wrote: the project's fixtures, and the
//! vocabularies where they are present.

use std::path::{Path, PathBuf};

use rocmforge_gguf::{Gguf, MappedFile, ReadMode, TensorType};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// Opens `path` both ways and checks that both read the header and nothing else.
fn open(path: &Path) -> Gguf {
    let open = |mode| {
        let file = MappedFile::open_with(path, mode).unwrap();
        let gguf = Gguf::open(&file).unwrap();
        assert_eq!(
            file.bytes_read(),
            gguf.header_bytes(),
            "only the header of {} is read",
            path.display()
        );
        gguf
    };
    let (mapped, pread) = (open(ReadMode::Map), open(ReadMode::Pread));
    assert_eq!(mapped.tensors(), pread.tensors());
    assert!(mapped.keys().eq(pread.keys()));
    mapped
}

#[test]
fn fixtures_parse() {
    let llama = open(&root().join("tests/fixtures/tiny-llama-Q4_K_M.gguf"));
    assert_eq!(llama.str("general.architecture").unwrap(), Some("llama"));
    for ty in [TensorType::F32, TensorType::Q4K, TensorType::Q6K] {
        assert!(
            llama.tensors().iter().any(|t| t.ty == ty),
            "a tensor of {ty}"
        );
    }
    let qwen = open(&root().join("tests/fixtures/tiny-qwen3-Q8_0.gguf"));
    assert_eq!(qwen.str("general.architecture").unwrap(), Some("qwen3"));
    for gguf in [&llama, &qwen] {
        let arch = gguf.str("general.architecture").unwrap().unwrap();
        let n_embd = gguf
            .u64(&format!("{arch}.embedding_length"))
            .unwrap()
            .unwrap();
        let n_vocab = gguf
            .strings("tokenizer.ggml.tokens")
            .unwrap()
            .unwrap()
            .len() as u64;
        assert_eq!(
            gguf.tensor("token_embd.weight").unwrap().dims,
            [n_embd, n_vocab, 1, 1]
        );
        let types = gguf.i32s("tokenizer.ggml.token_type").unwrap().unwrap();
        assert_eq!(types.len() as u64, n_vocab);
        assert!(
            gguf.str("tokenizer.chat_template")
                .unwrap()
                .is_some_and(|t| t.contains("im_start"))
        );
    }
}

#[test]
fn vocabularies_parse() {
    let dir = std::env::var_os("ROCMFORGE_TEST_DATA")
        .map_or_else(|| root().join("../shared"), PathBuf::from)
        .join("vocab");
    for (name, n_vocab, token) in [
        ("gpt-2", 50_257, (262, "Ġthe")),
        ("llama-bpe", 128_256, (128_000, "<|begin_of_text|>")),
        ("llama-spm", 32_000, (1, "<s>")),
        ("qwen2", 151_936, (151_643, "<|endoftext|>")),
    ] {
        let path = dir.join(format!("ggml-vocab-{name}.gguf"));
        if !path.exists() {
            println!(
                "skipped: {} is absent (set ROCMFORGE_TEST_DATA)",
                path.display()
            );
            continue;
        }
        let gguf = open(&path);
        let tokens = gguf.strings("tokenizer.ggml.tokens").unwrap().unwrap();
        assert_eq!(tokens.len(), n_vocab, "{name}");
        assert_eq!(
            tokens.iter().nth(token.0),
            Some(token.1.as_bytes()),
            "{name}"
        );
        assert_eq!(
            gguf.i32s("tokenizer.ggml.token_type")
                .unwrap()
                .unwrap()
                .len(),
            n_vocab
        );
        assert!(gguf.tensors().is_empty());
    }
}
