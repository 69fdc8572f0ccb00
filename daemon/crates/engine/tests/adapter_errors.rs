//! What is said of adapters that do not fit a model, or are none.

use std::path::Path;

use rocmforge_engine::{AdapterFile, Beside, Error, prepare_beside};
use rocmforge_gguf::write::{GgufWriter, MetaValue};
use rocmforge_gguf::{MappedFile, TensorType};

use crate::requests::fixture;

/// The model: a llama with rows of 64 elements and four heads of 16.
const MODEL: &str = "arch/smollm3.gguf";
const ARCH: &str = "smollm3";
const MATRIX: &str = "blk.0.attn_q.weight";

fn header(arch: &str) -> GgufWriter {
    GgufWriter::new()
        .key("general.type", "adapter")
        .key("general.architecture", arch)
        .key("adapter.type", "lora")
        .key("adapter.lora.alpha", 8.0f32)
}

/// Both halves for a matrix, of zeros.
fn pair(writer: GgufWriter, matrix: &str, a: &[u64], b: &[u64]) -> GgufWriter {
    writer
        .zeros(&format!("{matrix}.lora_a"), a, TensorType::F32)
        .zeros(&format!("{matrix}.lora_b"), b, TensorType::F32)
}

fn sound() -> GgufWriter {
    pair(header(ARCH), MATRIX, &[64, 4], &[4, 64])
}

/// What loading the model with adapters comes to.
fn load(adapters: &[(&Path, &str, f32)]) -> Result<(), Error> {
    let given = adapters.iter().map(|(path, name, scale)| AdapterFile {
        name: (*name).to_owned(),
        file: MappedFile::open(path).unwrap(),
        scale: *scale,
    });
    let beside = Beside {
        projector: None,
        adapters: given.collect(),
    };
    let file = MappedFile::open(&fixture(MODEL)).unwrap();
    prepare_beside("m", file, beside, &mut |_| {}).map(drop)
}

fn refused(writer: &GgufWriter) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    writer.write_to(&path).unwrap();
    let message = load(&[(&path, "a", 1.0)]).unwrap_err().to_string();
    // What no product takes is said of all adapters together.
    let is_of_file = message.contains("a.gguf") || message.contains("adapters for ");
    assert!(is_of_file, "{message}");
    message
}

#[test]
fn a_header_that_does_not_fit_is_refused_with_why() {
    let ids = MetaValue::from(&[1u32, 2][..]);
    let key = |key: &str, value: &str| sound().key(key, value);
    let no_type = GgufWriter::new()
        .key("general.type", "adapter")
        .key("general.architecture", ARCH);
    let control = GgufWriter::new()
        .key("general.architecture", "controlvector")
        .zeros("direction.1", &[64], TensorType::F32);
    for (writer, words) in [
        (
            pair(header("llama"), MATRIX, &[64, 4], &[4, 64]),
            "architecture 'llama'",
        ),
        (header(ARCH), "no tensors"),
        (
            pair(no_type, MATRIX, &[64, 4], &[4, 64]),
            "adapter.type is ''",
        ),
        (
            key("adapter.alora.invocation_tokens", "").key("x", ids),
            "activated LoRA",
        ),
        (control, "control vector"),
        (
            header(ARCH).zeros(&format!("{MATRIX}.lora_a"), &[64, 4], TensorType::F32),
            "has a .lora_a and no .lora_b",
        ),
        (
            sound().zeros("blk.0.attn_norm.weight", &[64], TensorType::F32),
            "neither a .lora_a nor a .lora_b",
        ),
    ] {
        let message = refused(&writer);
        assert!(message.contains(words), "{words}: {message}");
    }
}

#[test]
fn tensors_that_do_not_fit_the_model_are_refused_by_name() {
    for (matrix, a, b, words) in [
        (MATRIX, [64, 4], [8, 64], "the ranks differ"),
        (
            MATRIX,
            [32, 4],
            [4, 64],
            "shape [64, 64] in the model, and the adapter is for [32, 64]",
        ),
        (MATRIX, [64, 4], [4, 32], "the adapter is for [64, 32]"),
        (
            "blk.9.attn_q.weight",
            [64, 4],
            [4, 64],
            "has no tensor 'blk.9.attn_q.weight'",
        ),
        (
            "blk.0.attn_norm.weight",
            [64, 4],
            [4, 1],
            "blk.0.attn_norm.weight",
        ),
    ] {
        let message = refused(&pair(header(ARCH), matrix, &a, &b));
        assert!(message.contains(words), "{words}: {message}");
    }
    let n_vocab = prepared_vocabulary();
    let embedding = pair(header(ARCH), "token_embd.weight", &[64, 4], &[4, n_vocab]);
    let message = refused(&embedding);
    assert!(message.contains("token_embd.weight"), "{message}");
    assert!(message.contains("are not supported"), "{message}");
}

/// Tokens of the model's vocabulary.
fn prepared_vocabulary() -> u64 {
    let file = MappedFile::open(&fixture(MODEL)).unwrap();
    let gguf = rocmforge_gguf::Gguf::open(&file).unwrap();
    gguf.tensor("token_embd.weight").unwrap().dims[1]
}

#[test]
fn numbers_that_no_adapter_has_are_refused() {
    for bad in [f32::NAN, f32::INFINITY, 1e6] {
        let mut values = vec![0f32; 256];
        values[7] = bad;
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let writer = header(ARCH)
            .tensor(
                &format!("{MATRIX}.lora_a"),
                &[64, 4],
                TensorType::F32,
                bytes,
            )
            .zeros(&format!("{MATRIX}.lora_b"), &[4, 64], TensorType::F32);
        let message = refused(&writer);
        assert!(message.contains("where finite numbers"), "{message}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    sound().write_to(&path).unwrap();
    for scale in [f32::NAN, 1001.0, f32::NEG_INFINITY] {
        let message = load(&[(&path, "a", scale)]).unwrap_err().to_string();
        assert!(message.contains("from -1000 to 1000"), "{message}");
    }
    assert!(load(&[(&path, "a", -0.5), (&path, "b", 0.0)]).is_ok());
}

#[test]
fn adapters_of_a_model_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    pair(header(ARCH), MATRIX, &[64, 300], &[300, 64])
        .write_to(&path)
        .unwrap();
    let names: Vec<String> = (0..17).map(|i| format!("a{i}")).collect();
    let some = |n: usize| {
        let given = names[..n].iter().map(|name| (&*path, name.as_str(), 1.0));
        load(&given.collect::<Vec<_>>())
    };
    assert!(some(3).is_ok());
    let message = some(4).unwrap_err().to_string();
    assert!(
        message.contains("come to 1200, and those of a model to at most 1024"),
        "{message}"
    );
    let message = some(17).unwrap_err().to_string();
    assert!(message.contains("17 adapters are given"), "{message}");
}
