//! Parsing a header of the size that a 128k-token vocabulary with merges has, the first time
//! and when its vocabulary is known, and copying tensor data out of a file.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_gguf::{Gguf, MappedFile, ReadMode, TensorType};

const TOKENS: usize = 128_256;
const MERGES: usize = 280_147;

/// A header as Llama 3.2 1B has it: tokens, their types, merges, 147 tensors.
fn header() -> GgufWriter {
    // Lengths as in a real vocabulary: 6 to 7 bytes on average.
    let word = |i: usize| "abcdefghijklmnopqrstuvwxyz"[..1 + (i * 7) % 13].to_owned();
    let mut writer = GgufWriter::new()
        .key("general.architecture", "llama")
        .key("llama.block_count", 16u32)
        .key("tokenizer.ggml.model", "gpt2")
        .key(
            "tokenizer.ggml.tokens",
            (0..TOKENS).map(word).collect::<MetaValue>(),
        )
        .key("tokenizer.ggml.token_type", vec![1i32; TOKENS].as_slice())
        .key(
            "tokenizer.ggml.merges",
            (0..MERGES)
                .map(|i| format!("{} {}", word(i), word(i / 3)))
                .collect::<MetaValue>(),
        );
    for i in 0..147 {
        writer = writer.zeros(
            &format!("blk.{}.tensor_{i}.weight", i / 9),
            &[256, 2],
            TensorType::Q4K,
        );
    }
    writer
}

fn parse(c: &mut Criterion) {
    let writer = header();
    let bytes = writer.to_bytes();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("vocab.gguf");
    writer.write_to(&path).expect("the file is written");

    let mut group = c.benchmark_group("header_128k");
    group.throughput(Throughput::Bytes(writer.header().len() as u64));
    group.bench_function("parse", |b| {
        b.iter(|| Gguf::parse(black_box(&bytes), bytes.len() as u64).expect("the header is valid"));
    });
    for (name, mode) in [
        ("open_mapped", ReadMode::Map),
        ("open_pread", ReadMode::Pread),
    ] {
        group.bench_function(name, |b| {
            b.iter(|| {
                let file = MappedFile::open_with(black_box(&path), mode).expect("the file opens");
                Gguf::open(&file).expect("the header is valid")
            });
        });
    }
    group.bench_function("open_recognising", |b| {
        b.iter(|| {
            let file = MappedFile::open(black_box(&path)).expect("the file opens");
            Gguf::open_recognising(&file).expect("the header is valid")
        });
    });
    group.finish();
}

/// Copies a file in the page cache to memory, in pieces of 4 MiB.
fn read(c: &mut Criterion) {
    const FILE_BYTES: usize = 256 << 20;
    const CHUNK_BYTES: usize = 4 << 20;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("data");
    std::fs::write(&path, vec![1; FILE_BYTES]).expect("the file is written");
    let mut buffer = vec![0; CHUNK_BYTES];

    let mut group = c.benchmark_group("read_4MiB_pieces");
    group.throughput(Throughput::Bytes(FILE_BYTES as u64));
    group.sample_size(10);
    for (name, mode) in [("mapped", ReadMode::Map), ("pread", ReadMode::Pread)] {
        let file = MappedFile::open_with(&path, mode).expect("the file opens");
        group.bench_function(name, |b| {
            b.iter(|| {
                for at in (0..FILE_BYTES).step_by(CHUNK_BYTES) {
                    file.read_into(at as u64, &mut buffer)
                        .expect("the file is there");
                }
            });
        });
    }
    group.bench_function("mapped_first_touch", |b| {
        b.iter(|| {
            let file = MappedFile::open(&path).expect("the file opens");
            for at in (0..FILE_BYTES).step_by(CHUNK_BYTES) {
                file.read_into(at as u64, &mut buffer)
                    .expect("the file is there");
            }
        });
    });
    group.finish();
}

criterion_group!(benches, parse, read);
criterion_main!(benches);
