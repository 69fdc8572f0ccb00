//! Loading, building and encoding, on the real vocabularies of the test data
//! (ROCMFORGE_TEST_DATA, or ../shared beside the workspace).

use std::hint::black_box;
use std::path::{Path, PathBuf};

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use rocmforge_gguf::{Gguf, MappedFile};
use rocmforge_tokenizer::Tokenizer;

fn workspace() -> &'static Path {
    let crate_root = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_root
        .ancestors()
        .nth(3)
        .expect("the crate lies three folders below the workspace")
}

fn vocabulary(name: &str) -> Option<(PathBuf, Gguf)> {
    let base = std::env::var_os("ROCMFORGE_TEST_DATA")
        .map_or_else(|| workspace().join("../shared"), PathBuf::from);
    let path = base.join(format!("vocab/ggml-vocab-{name}.gguf"));
    let opened = MappedFile::open(&path).and_then(|file| Gguf::open(&file));
    match opened {
        Ok(file) => Some((path, file)),
        Err(error) => {
            eprintln!("skipped: {}: {error}", path.display());
            None
        }
    }
}

/// English prose, then lines of code and other scripts: 1 MiB.
fn mixed_text() -> String {
    let story = std::fs::read_to_string(workspace().join("tests/fixtures/text.txt"))
        .expect("the fixture is part of the repository");
    let rest = "fn main() { let x_1 = 3.1415 * 0xFF; println!(\"{x_1:>8}\"); } // 中文，日本語 и русский\n\n\t";
    let mut text = String::new();
    let mut n = 0u32;
    while text.len() < 1 << 20 {
        text.push_str(&story);
        text.push_str(rest);
        // Words that do not come again.
        n = n.wrapping_mul(2_654_435_761).wrapping_add(12_345);
        text.push_str(&format!("w{n:x} q{:x}", n.rotate_left(7)));
    }
    text
}

fn benches(c: &mut Criterion) {
    let text = mixed_text();
    let unbroken = "abcdefghij".repeat((1 << 20) / 10);
    for name in ["llama-bpe", "qwen2", "gpt-2", "llama-spm"] {
        let Some((path, file)) = vocabulary(name) else {
            continue;
        };
        let mut group = c.benchmark_group(name);
        group.sample_size(10);
        group.bench_function("load", |b| {
            b.iter_batched(
                || (),
                |()| Tokenizer::from_gguf(&file).expect("a real vocabulary"),
                BatchSize::PerIteration,
            );
        });
        let tokenizer = Tokenizer::from_gguf(&file).expect("a real vocabulary");
        // The header's bytes are read and compared.
        group.bench_function("load_beside_another", |b| {
            b.iter(|| {
                let file = MappedFile::open(black_box(&path)).expect("the file opens");
                let header = Gguf::open_recognising(&file).expect("a real vocabulary");
                Tokenizer::shared(&header).expect("a real vocabulary")
            });
        });
        for (kind, text) in [("mixed", &text), ("one_word", &unbroken)] {
            group.throughput(Throughput::Bytes(text.len() as u64));
            group.bench_function(format!("encode_1MiB_{kind}"), |b| {
                b.iter(|| {
                    tokenizer
                        .encode(black_box(text), false, true)
                        .expect("plain text")
                });
            });
        }
        let ids = tokenizer.encode(&text, false, true).expect("plain text");
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.bench_function("decode_1MiB", |b| {
            b.iter(|| tokenizer.decode(black_box(&ids)).expect("known ids"));
        });
        group.bench_function("stream_1MiB", |b| {
            b.iter(|| {
                let mut stream = tokenizer.stream();
                ids.iter()
                    .map(|&id| stream.push(&tokenizer, id).len())
                    .sum::<usize>()
            });
        });
    }
}

criterion_group!(encode, benches);
criterion_main!(encode);
